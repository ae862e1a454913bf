"""Generated code that fills bytes with codes: blocks of a file to what operators have, in one pass.

A block has the bits of its codes in fields. Where a code has bits in each of them is known when code is made, so many
codes at a time are picked from bytes by shuffles that do not change, shifted, masked and put together; and written as
consecutive codes fill bytes, the low bits first. Positions in a table become its levels on the way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.called import called
from ranvier.codegen.llvm.isa import Isa, host
from ranvier.quantize.fields import Codes, Field
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_AT_ONCE = 32  # codes: every block has whole runs of as many
_TABLE = 16  # bytes of a table that one instruction looks up in
_WORD = 8  # codes that are one number of 64 bits, a byte of each
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *3 * (ctypes.c_int64,))


@dataclass(frozen=True)
class Filling:
    """What code depends on: how codes are stored, and the ``bits`` they are to have. ``levels``: what each position
    becomes; else codes are ``added`` a number to."""

    codes: Codes
    bits: int
    added: int = 0
    levels: tuple[int, ...] = ()

    def function(self) -> Callable[[Array, Array], None]:
        """Code for this machine, that takes blocks [rows, blocks, size], one behind the other, and where the codes go
        [rows, bytes], bytes of a row one behind the other."""
        native = _function(self, host())

        def fill(blocks: Array, into: Array) -> None:
            rows, count, size = blocks.shape
            assert size == self.codes.size and into.shape == (rows, count * self.codes.weights * self.bits // 8)
            if not into.size:
                return
            assert blocks.flags.c_contiguous and into.strides[1] == 1
            native(blocks.ctypes.data, into.ctypes.data, rows, count, into.strides[0])

        return fill

    def spec(self) -> KernelSpec:
        fields = tuple((each.at, each.bits, each.run, each.above) for each in self.codes.fields)
        key = ("filling", self.codes.weights, self.codes.size, fields, self.bits, self.added, self.levels)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            sizes = [("i64", "rows"), ("i64", "count"), ("i64", "step")]
            _Filler(module.function(symbol, [("ptr", "blocks"), ("ptr", "into"), *sizes]), self, isa).emit()

        return KernelSpec(f"fill bytes with codes of {self.bits} bits", key, emit)


@functools.cache
def _function(filling: Filling, isa: Isa) -> Any:
    return called(filling.spec(), isa, _SIGNATURE)


class _Filler:
    def __init__(self, fn: Fn, filling: Filling, isa: Isa) -> None:
        self.fn, self.filling, self.lookup = fn, filling, _lookup(isa)
        self.kind = vector("i8", _AT_ONCE)

    def emit(self) -> None:
        f, codes, bits = self.fn, self.filling.codes, self.filling.bits
        count, made = f.args["count"], codes.weights * bits // 8
        with f.loop(0, f.args["rows"]) as row:
            source = f.gep(f.args["blocks"], row * count * codes.size)
            target = f.gep(f.args["into"], row * f.args["step"])
            with f.loop(0, count) as block:
                here, to = f.gep(source, block * codes.size), f.gep(target, block * made)
                for first in range(0, codes.weights, _AT_ONCE):
                    f.store(self._filled(self._codes(here, first)), f.gep(to, first * bits // 8), 1)
        f.ret()

    def _codes(self, block: Val, first: int) -> Val:
        f, found = self.fn, None
        for field in self.filling.codes.fields:
            part = self._field(block, field, first)
            part = f.shl(part, field.above) if field.above else part
            found = part if found is None else f.or_(found, part)
        assert found is not None
        if self.filling.levels:
            return self._looked_up(found)
        return f.add(found, self.filling.added) if self.filling.added else found

    def _field(self, block: Val, field: Field, first: int) -> Val:
        """These bits of some codes."""
        f = self.fn
        places = [field.place(k) for k in range(first, first + _AT_ONCE)]
        begin, end = min(at for at, _ in places), max(at for at, _ in places) + 1
        found = f.load(vector("i8", end - begin), f.gep(block, begin), 1)
        wanted = [at - begin for at, _ in places]
        found = found if wanted == list(range(end - begin)) else f.shuffle(found, None, wanted)
        shifts = [shift for _, shift in places]
        if any(shifts):
            found = f.lshr(found, f.listed("i8", shifts))
        return found if field.bits == 8 else f.and_(found, (1 << field.bits) - 1)

    def _looked_up(self, positions: Val) -> Val:
        f, levels = self.fn, list(self.filling.levels)
        if len(levels) <= _TABLE and self.lookup is not None:
            size, name = self.lookup
            kind, table = vector("i8", size), f.listed("i8", (levels + [0] * (_TABLE - len(levels))) * (size // _TABLE))
            parts = [list(range(at, at + size)) for at in range(0, _AT_ONCE, size)]
            first, *rest = [f.intrinsic(name, kind, [table, f.shuffle(positions, None, part)]) for part in parts]
            return f.shuffle(first, rest[0], list(range(_AT_ONCE))) if rest else first
        made = f.like(positions, levels[0])
        for k, level in enumerate(levels[1:], 1):
            made = f.select(f.cmp("eq", positions, k), f.like(positions, level), made)
        return made

    def _filled(self, codes: Val) -> Val:
        """Bytes that are full: neighbours of so many bits become one, three times, until eight are one number."""
        f, bits = self.fn, self.filling.bits
        if bits == _WORD:
            return codes
        words = f.bitcast(codes, vector("i64", _AT_ONCE // _WORD))
        for k in range(3):
            width, room = bits << k, 8 << k
            first = sum(((1 << width) - 1) << at for at in range(0, 64, 2 * room))
            moved = f.and_(f.lshr(words, room - width), first << width)
            words = f.or_(f.and_(words, first), moved)
        wanted = [_WORD * word + byte for word in range(_AT_ONCE // _WORD) for byte in range(bits)]
        return f.shuffle(f.bitcast(words, self.kind), None, wanted)


def _lookup(isa: Isa) -> tuple[int, str] | None:
    """Bytes that an instruction looks up at once, each in 16 bytes, and its name."""
    if isa.triple == "aarch64":
        return 16, "llvm.aarch64.neon.tbl1.v16i8"
    return (32, "llvm.x86.avx2.pshuf.b") if isa.vector_bytes >= 32 else None
