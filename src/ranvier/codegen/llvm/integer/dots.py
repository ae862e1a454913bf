"""The instruction that multiplies small integers: four bytes, or two 16-bit words, of every 32-bit lane at a time.

Products of 8-bit codes are exact in all of them. The matrix unit multiplies bytes of either sign; where only the vector
units multiply bytes, one operand is unsigned and the other signed; elsewhere codes are widened to 16 bits first,
because the older byte instruction saturates.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier.codegen import tuning
from ranvier.codegen.llvm.amx.micro import STEP, suits
from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass


@dataclass(frozen=True)
class Dot:
    """How operands of a product are stored: ``group`` of them fill a 32-bit lane."""

    group: int
    left: DType | None  # None: bytes as they are
    right: DType
    step: int = 1  # groups that K is padded to a multiple of

    def groups(self, k: int) -> int:
        """32-bit groups that K codes fill."""
        return -(-k // (self.group * self.step)) * self.step


BYTES = Dot(4, DType.uint8, DType.int8)
WORDS = Dot(2, DType.int16, DType.int16)
TILES = Dot(4, None, DType.int8, STEP)
_TILE_ROWS = 4  # rows from which the matrix unit is faster; a single row is a matter of reading B


def dot_of(isa: Isa) -> Dot:
    """What the vector units have."""
    return BYTES if isa.has("avx512vnni") or isa.has("avxvnni") else WORDS


def dot_for(isa: Isa, rows: int) -> Dot:
    """What suits products with so many rows."""
    return TILES if rows >= _TILE_ROWS and suits(isa, DType.uint8, DType.int8) else dot_of(isa)


def tuned_dot(isa: Isa, rows: int, key: tuple[object, ...]) -> Dot:
    """What was measured to suit a product, else :func:`dot_for`; ``key`` tells the product from others."""
    usual = dot_for(isa, rows)
    if not suits(isa, DType.uint8, DType.int8):
        return usual
    return tuning.choose("integer way", lambda: key, usual, lambda: {"tiles": TILES, "vectors": dot_of(isa)})


def shapes_of(isa: Isa) -> Isa:
    """The instruction set as the table of micro-kernel shapes should see it: does a product need a register?"""
    return isa if dot_of(isa) is BYTES else replace(isa, fma=False)


def multiply_add(f: Fn, isa: Isa, acc: Val, left: Val, right: Val) -> Val:
    """``acc + left · right`` in every 32-bit lane; operands are vectors of i32 that hold a group each."""
    lanes = acc.lanes
    if dot_of(isa) is BYTES:
        kind = vector("i8", 4 * lanes)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        return f.intrinsic(name, acc.type, [acc, f.bitcast(left, kind), f.bitcast(right, kind)])
    return acc + _words(f, isa, left, right)


def multiply_words(f: Fn, isa: Isa, acc: Val, left: Val, right: Val) -> Val:
    """As :func:`multiply_add`, with two 16-bit words in every lane on all processors."""
    if dot_of(isa) is BYTES:
        # as text, because the compiler would take the instruction apart again
        prefix = "" if isa.has("avx512vnni") else "{vex} "
        operands = ", ".join(f"{v.type} {v.name}" for v in (left, right, acc))
        return f.emit(acc.type, f'call {acc.type} asm "{prefix}vpdpwssd $2, $1, $0", "=v,v,v,0"({operands})')
    return acc + _words(f, isa, left, right)


_PAIRS = {16: "llvm.x86.sse2.pmadd.wd", 32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}


def _words(f: Fn, isa: Isa, left: Val, right: Val) -> Val:
    lanes = left.lanes
    if isa.triple == "x86_64" and lanes * 4 == isa.vector_bytes:
        kind = vector("i16", 2 * lanes)
        return f.intrinsic(_PAIRS[isa.vector_bytes], left.type, [f.bitcast(left, kind), f.bitcast(right, kind)])
    low = f.ashr(f.shl(left, 16), 16) * f.ashr(f.shl(right, 16), 16)
    return low + f.ashr(left, 16) * f.ashr(right, 16)
