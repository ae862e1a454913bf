"""Generated code that packs: rows of stored codes to panels, in one pass.

What ``pack.py`` and ``coupled.py`` do with NumPy takes ten to twenty passes over memory, and weights of a model may be
billions. Here as many words of as many rows as a vector has lanes are turned in registers, until a vector has the same
word of all of its columns; then fours of codes are spread to the bytes of words, and put together as the coding has
them. Floats are words that stay what they are: numbers of groups are turned by the same code.

Code is made once for every kind of weights and kept on disk. Small weights are left to NumPy (:func:`pays`), and so are
those whose order is not that of memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.called import called, runs
from ranvier.codegen.llvm.coded.coding import Coding
from ranvier.codegen.llvm.coded.coupled import HALF_BITS, MIDDLES
from ranvier.codegen.llvm.coded.shape import beside
from ranvier.codegen.llvm.integer.dots import EACH
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.transpose import turned
from ranvier.ops.contrib.weight_only import packed
from ranvier.parts import in_parts
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
LEAST_BYTES = 1 << 20  # of weights that code is made for (:func:`pays`)
WORDS = Coding(32, "float32")  # that stay what they are
_ROW_BYTES = 1 << 20  # that a thread takes at a time, about
_TIMES = ("first", "second")


@dataclass(frozen=True)
class Packing:
    """What code depends on: codes of ``bits``, or floats of 16 or 32, become those of a coding. ``coupled``: the form
    of two columns in a byte. ``numbers``: floats that something is done to on their way."""

    bits: int
    coding: Coding
    coupled: bool = False
    numbers: bool = False

    @property
    def fours(self) -> int:
        """Fours of codes that fill words both as they are stored and as they are packed; of floats there are none."""
        return math.lcm(8 // math.gcd(8, self.bits), self.coding.quads) if self.bits <= 8 else 0

    @property
    def given(self) -> int:
        """32-bit words that so many take where they are stored,"""
        return self.fours * self.bits // 8 or 1

    @property
    def made(self) -> int:
        """and where they are packed."""
        return self.fours // self.coding.quads * self.coding.parts or 1

    def suits(self, row: int, nbytes: int, isa: Isa) -> bool:
        """Whether rows of so many bytes are packed by generated code; ``nbytes``: of all that is made."""
        units, rest = divmod(row, 4 * self.given)
        return not rest and units >= isa.lanes(4) and pays(nbytes, isa)

    def spec(self) -> KernelSpec:
        key = ("coded packer", self.bits, *self.coding.key, self.coupled, self.numbers)

        def emit(module: Module, symbol: str, isa: Isa) -> None:
            sizes = [("i64", "row"), ("i64", "units"), ("i64", "panels")]
            numbers = [("float", "less"), *(("float", name) for name in _TIMES)]
            params = [("ptr", "rows"), ("ptr", "target"), *sizes, *numbers]
            _Packer(module.function(symbol, params), isa, self).emit()

        return KernelSpec(f"pack {self.bits} bits in {self.coding.bits}", key, emit)

    def pack(
        self, rows: Callable[[int, int], Array], n: int, row: int, target: Array, isa: Isa, less: float = 0,
        times: tuple[float, float] = (1, 1),
    ) -> None:  # fmt: skip
        """``rows(first, last)`` are some of ``n``, and ``row`` bytes of each are packed to ``target``. Of numbers,
        ``less`` is taken off, and the rest of every second vector is ``times`` the same."""
        function, columns = _function(self, isa), isa.lanes(4) * beside(isa)
        units, panels = row // (4 * self.given), -(-n // columns)
        size = units * self.made * columns * 4
        assert target.nbytes >= panels * size and not target.ctypes.data % isa.vector_bytes

        def some(first: int, last: int) -> None:
            found = _bytes(rows(first * columns, min(n, last * columns)))[:, :row]
            assert found.shape == (min(n, last * columns) - first * columns, row)  # code looks at no more than this
            whole = len(found) // columns
            place = target.ctypes.data + first * size
            function(found.ctypes.data, place, found.strides[0], units, whole, less, *times)
            if whole < last - first:
                filled = np.broadcast_to(self._nothing(row, less), (columns, row)).copy()
                rest = found[whole * columns :]
                filled[: len(rest)] = rest
                function(filled.ctypes.data, place + whole * size, row, units, 1, less, *times)

        in_parts(some, panels, max(1, _ROW_BYTES // (columns * row)), target.nbytes)

    def _nothing(self, row: int, less: float) -> Array:
        """What columns past the last one have for a row."""
        if self.numbers:
            return np.full(row // 4, less, np.float32).view(np.uint8)
        if self.bits > 8:
            return np.zeros(row, np.uint8)
        code = self.coding.nothing if self.bits == self.coding.bits else 1 << (self.bits - 1)
        return packed(np.full(row * 8 // self.bits, code, np.uint8), self.bits)


def _bytes(rows: Array) -> Array:
    """[rows, bytes], those of a row one behind the other."""
    found = rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows)
    return found if found.dtype == np.uint8 else found.view(np.uint8)


def pays(nbytes: int, isa: Isa) -> bool:
    """Whether generated code makes so much of weights: NumPy takes about as long for less as making code does, and
    code has to run here."""
    return nbytes >= LEAST_BYTES and runs(isa)


_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, *3 * (ctypes.c_int64,), *3 * (ctypes.c_float,)
)  # fmt: skip


@functools.cache
def _function(packing: Packing, isa: Isa) -> Any:
    return called(packing.spec(), isa, _SIGNATURE)


class _Packer:
    def __init__(self, fn: Fn, isa: Isa, packing: Packing) -> None:
        self.fn, self.packing = fn, packing
        self.lanes, self.beside, self.size = isa.lanes(4), beside(isa), isa.vector_bytes
        self.words = vector("i32", self.lanes)

    def emit(self) -> None:
        f, lanes, packing = self.fn, self.lanes, self.packing
        row, units = f.args["row"], f.args["units"]
        step = self.beside * self.size  # bytes of a word of all columns
        near = f.stack("i8", lanes * packing.given * step)
        with f.loop(0, f.args["panels"]) as panel:
            source = f.gep(f.args["rows"], panel * row * (lanes * self.beside))
            target = f.gep(f.args["target"], panel * units * (packing.made * step))
            with f.loop(0, units, lanes) as first:
                begin = f.min_(first, units - lanes)  # the last ones may be packed twice
                with f.loop(0, self.beside) as v:
                    here = f.gep(f.gep(source, v * row * lanes), begin * (4 * packing.given))
                    with f.loop(0, packing.given) as k:
                        self._turn(f.gep(here, k * self.size), f.gep(near, k * (lanes * step) + v * self.size))
                to = f.gep(target, begin * (packing.made * step))
                with f.loop(0, lanes) as unit:
                    self._pack(f.gep(near, unit * (packing.given * step)), f.gep(to, unit * (packing.made * step)))
        f.ret()

    def _turn(self, source: Val, target: Val) -> None:
        """A square of words: those of some rows side by side."""
        f, row = self.fn, self.fn.args["row"]
        given = [f.load(self.words, f.gep(source, row * r) if r else source, 1) for r in range(self.lanes)]
        for k, column in enumerate(turned(f, given)):
            f.store(column, f.gep(target, k * self.beside * self.size), self.size)

    def _pack(self, source: Val, target: Val) -> None:
        """What fills words together, of one vector of the panel after the other or of two that belong together."""
        f, packing = self.fn, self.packing
        step, together = self.beside * self.size, 1 + (packing.coupled or (packing.numbers and self.beside > 1))
        with f.loop(0, self.beside, together) as v:
            here, to = (f.gep(at, v * self.size) for at in (source, target))
            given = [
                [f.load(self.words, f.gep(here, k * step + i * self.size), self.size) for k in range(packing.given)]
                for i in range(together)
            ]
            for i, made in enumerate(self._made(given)):
                for k, word in enumerate(made):
                    f.store(word, f.gep(to, k * step + i * self.size), self.size)

    def _made(self, given: list[list[Val]]) -> list[list[Val]]:
        """Words as they are packed, for each of some vectors."""
        packing = self.packing
        if packing.bits > 8:
            return [[self._number(word, v) for word in words] for v, words in enumerate(given)]
        fours = [self._fours(words) for words in given]
        return self._coupled(*fours) if packing.coupled else [self._together(each) for each in fours]

    def _fours(self, words: list[Val]) -> list[Val]:
        """Consecutive codes by fours, as the bytes of words."""
        packing = self.packing
        if packing.bits == HALF_BITS:
            return self._halves(words[0])
        fours = [self._four(words, k) for k in range(packing.fours)]
        raised = packing.coding.middle - (1 << (packing.bits - 1)) if packing.bits != packing.coding.bits else 0
        return [four + raised * EACH for four in fours]  # no byte is too large: none carries to the next

    def _halves(self, word: Val) -> list[Val]:
        f, lanes = self.fn, self.lanes
        both = f.bitcast(word, vector("i8", 4 * lanes))
        low, high = f.and_(both, (1 << HALF_BITS) - 1), f.lshr(both, HALF_BITS)
        places = [4 * lane + k // 2 + k % 2 * 4 * lanes for lane in range(lanes) for k in range(4)]
        return [f.bitcast(f.shuffle(low, high, [at + 2 * half for at in places]), word.type) for half in range(2)]

    def _four(self, words: list[Val], number: int) -> Val:
        f, bits = self.fn, self.packing.bits
        at, shift = divmod(4 * bits * number, 32)
        four = f.lshr(words[at], shift) if shift else words[at]
        if shift + 4 * bits > 32:
            four = f.or_(four, f.shl(words[at + 1], 32 - shift))
        return four if bits == 8 else self._moved(self._moved(four, 2 * bits, 16, 1), bits, 8, 0x00010001)

    def _moved(self, words: Val, bits: int, to: int, each: int) -> Val:
        """The second of two neighbours of so many bits, which begin where ``each`` has ones, moved up to bit ``to``."""
        f, first = self.fn, ((1 << bits) - 1) * each
        second = f.shl(f.and_(words, first << bits), to - bits)
        return f.or_(f.and_(words, first), second)

    def _together(self, fours: list[Val]) -> list[Val]:
        f, coding = self.fn, self.packing.coding
        made: list[Val] = []
        for first in range(0, len(fours), coding.quads):
            parts: list[Val | None] = [None] * coding.parts
            for four, pieces in zip(fours[first:], coding.pieces):
                below = coding.bits
                for part, at, width in pieces:
                    below -= width
                    piece = four
                    if width < coding.bits:
                        piece = f.and_(f.lshr(four, below), ((1 << width) - 1) * EACH)
                    piece = f.shl(piece, at) if at else piece
                    there = parts[part]
                    parts[part] = piece if there is None else f.or_(there, piece)
            made += [part for part in parts if part is not None]
        return made

    def _coupled(self, first: list[Val], second: list[Val]) -> list[list[Val]]:
        """The words of two vectors from their fours: the first has the first four of both, the other the next."""
        f = self.fn
        both = [f.or_(a, f.shl(f.xor(b, MIDDLES), HALF_BITS)) for a, b in zip(first, second)]
        return [both[0::2], both[1::2]]

    def _number(self, word: Val, v: int) -> Val:
        f = self.fn
        if not self.packing.numbers:
            return word
        number = f.bitcast(word, vector("float", self.lanes))
        return f.bitcast((number - f.args["less"]) * f.args[_TIMES[v]], word.type)
