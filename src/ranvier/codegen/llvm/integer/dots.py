"""The instruction that multiplies small integers: four bytes, or two 16-bit words, of every 32-bit lane at a time.

Products of 8-bit codes are exact in all of them. The matrix unit multiplies bytes of either sign; where only the vector
units multiply bytes, one operand is unsigned and the other signed (VNNI), or both are signed (NEON's dot products);
elsewhere codes are widened to 16 bits first, because the older byte instruction of x86 adds two products in 16 bits,
where they may saturate. Codes of few bits are so small that they do not, and several sums of two fit there too.

Codes of B that are widened are bytes in memory all the same: that is an instruction for all rows of A that meet them,
and half of what there is to read, which is what takes the time where rows are few.

Codes of 16 bits are multiplied as they are; VNNI adds such products to sums too.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier.codegen import tuning
from ranvier.codegen.llvm.amx.micro import STEP, suits
from ranvier.codegen.llvm.builder import Fn, Val, size_of, vector
from ranvier.codegen.llvm.gemm.tiles import LANE_REGISTERS
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

HALF = 128
EACH = 0x01010101  # byte of a lane


@dataclass(frozen=True)
class Dot:
    """How operands of a product are stored: ``group`` of them fill a 32-bit lane, those of B once they are loaded."""

    group: int
    left: DType | None  # None: bytes as they are
    right: DType
    step: int = 1  # groups that K is padded to a multiple of

    @property
    def unit(self) -> int:
        """Bytes of a group of B."""
        return self.group * self.right.numpy.itemsize

    @property
    def narrower(self) -> int:
        """How many times a group of B is half as wide as a sum: 0 or 1."""
        return (4 // self.unit).bit_length() - 1

    @property
    def packed(self) -> DType:
        """An integer for each group of B."""
        return DType.int16 if self.narrower else DType.int32

    def groups(self, k: int) -> int:
        """32-bit groups that K codes fill."""
        return -(-k // (self.group * self.step)) * self.step

    @property
    def moves(self) -> int:
        """What is added to codes of A that have the other sign than ``left``: 0 where all are taken as they are."""
        if self.left is DType.uint8:
            return HALF
        return -HALF if self.left is DType.int8 else 0

    def turns(self, left: DType) -> bool:
        """Whether codes of A of this type are moved so."""
        return self.moves != 0 and left is not self.left


BYTES = Dot(4, DType.uint8, DType.int8)
SIGNED = Dot(4, DType.int8, DType.int8)
WORDS = Dot(2, DType.int16, DType.int8)
PAIRS = Dot(2, DType.int16, DType.int16)  # of codes that have 16 bits
TILES = Dot(4, None, DType.int8, STEP)
_TILE_ROWS = 4  # rows from which the matrix unit is faster; a single row is a matter of reading B …
LEAST_TERMS = 64  # … and terms of a sum: it takes as long for fewer


def dot_of(isa: Isa) -> Dot:
    """What the vector units have."""
    if isa.has("avx512vnni") or isa.has("avxvnni"):
        return BYTES
    return SIGNED if isa.has("dotprod") else WORDS


def multiplies_bytes(isa: Isa) -> bool:
    """Whether the vector units multiply four bytes of a lane at a time: the second operand signed, the first one
    unsigned or, where it stays below 128, of either sign."""
    return dot_of(isa).group == BYTES.group


def multiplies_pairs_of_bytes(isa: Isa) -> bool:
    """Whether there is an instruction for sums of two products of bytes in 16 bits: any AVX2 has it."""
    return isa.triple == "x86_64" and isa.vector_bytes >= 32


def pairs_that_fit(reach: int) -> int:
    """How many such sums, of bytes up to ``reach`` and signed ones, add up in 16 bits."""
    return ((1 << 15) - 1) // (2 * HALF * reach)


def dot_for(isa: Isa, rows: int, terms: int) -> Dot:
    """What suits products with so many rows, and sums of so many products."""
    large = rows >= _TILE_ROWS and terms >= LEAST_TERMS
    return TILES if large and suits(isa, DType.uint8, DType.int8) else dot_of(isa)


def tuned_dot(isa: Isa, rows: int, terms: int, key: tuple[object, ...]) -> Dot:
    """What was measured to suit a product, else :func:`dot_for`; ``key`` tells the product from others."""
    usual = dot_for(isa, rows, terms)
    if not suits(isa, DType.uint8, DType.int8):
        return usual
    return tuning.choose("integer way", lambda: key, usual, lambda: {"tiles": TILES, "vectors": dot_of(isa)})


def shapes_of(isa: Isa) -> Isa:
    """The instruction set as the table of micro-kernel shapes should see it: does a product need a register, and do
    rows of A, of which products pick lanes?"""
    dot = dot_of(isa)
    if dot is SIGNED:
        return replace(isa, registers=min(isa.registers, LANE_REGISTERS))
    return isa if dot is BYTES else replace(isa, fma=False)


def multiply_add(f: Fn, isa: Isa, acc: Val, left: Val, right: Val, dot: Dot | None = None) -> Val:
    """``acc + left · right`` in every 32-bit lane; operands are vectors of i32 that hold a group each.

    Where all are signed (``SIGNED``) a ``right`` that is one lane of a register everywhere costs no instruction.
    """
    lanes, dot = acc.lanes, dot or dot_of(isa)
    if dot is PAIRS:
        return multiply_words(f, isa, acc, left, right)
    kind = vector("i8", 4 * lanes)
    if dot is BYTES:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        return f.intrinsic(name, acc.type, [acc, f.bitcast(left, kind), f.bitcast(right, kind)])
    if dot is SIGNED:
        name = f"llvm.aarch64.neon.sdot.v{lanes}i32.v{4 * lanes}i8"
        return f.intrinsic(name, acc.type, [acc, f.bitcast(left, kind), f.bitcast(right, kind)])
    return acc + _words(f, isa, left, right)


def spread_groups(f: Fn, isa: Isa, at: Val, count: int) -> list[Val]:
    """So many 32-bit groups that follow each other at an address, each in every lane of a vector."""
    lanes = isa.lanes(4)
    if dot_of(isa) is SIGNED and count > 1:
        # one load for all of them: the products pick their lanes
        beside = f.load(vector("i32", count), at, 1)
        return [f.shuffle(beside, None, [k] * lanes) for k in range(count)]
    return [f.splat(f.load("i32", f.gep(at, 4 * k), 1), lanes) for k in range(count)]


def load_groups(f: Fn, isa: Isa, at: Val, dot: Dot) -> Val:
    """A vector of 32-bit groups of B from where they are packed."""
    lanes = isa.lanes(4)
    if not dot.narrower:
        return f.load(vector("i32", lanes), at, isa.vector_bytes)
    codes = f.load(vector("i8", 2 * lanes), at, isa.vector_bytes // 2)
    return f.bitcast(f.cast(codes, "i16"), vector("i32", lanes))


def multiply_words(f: Fn, isa: Isa, acc: Val, left: Val, right: Val) -> Val:
    """As :func:`multiply_add`, with two 16-bit words in every lane on all processors."""
    if dot_of(isa) is BYTES:
        # as text, because the compiler would take the instruction apart again
        prefix = "" if isa.has("avx512vnni") else "{vex} "
        operands = ", ".join(f"{v.type} {v.name}" for v in (left, right, acc))
        return f.emit(acc.type, f'call {acc.type} asm "{prefix}vpdpwssd $2, $1, $0", "=v,v,v,0"({operands})')
    return acc + _words(f, isa, left, right)


_BYTE_PAIRS = {
    16: "llvm.x86.ssse3.pmadd.ub.sw.128",
    32: "llvm.x86.avx2.pmadd.ub.sw",
    64: "llvm.x86.avx512.pmaddubs.w.512",
}


def multiply_pairs(f: Fn, left: Val, right: Val) -> Val:
    """Sums of two products of an unsigned byte and a signed one in every 16 bits, which saturate."""
    size = left.lanes * size_of(left.element)
    return f.intrinsic(
        _BYTE_PAIRS[size], vector("i16", size // 2), [f.bitcast(x, vector("i8", size)) for x in (left, right)]
    )


def add_words(f: Fn, isa: Isa, acc: Val, pairs: Val, times: int = 1) -> Val:
    """``acc`` and both 16-bit words of every lane, so many times."""
    return multiply_words(f, isa, acc, f.bitcast(pairs, acc.type), f.bitcast(f.const(pairs.type, times), acc.type))


def add_signed(f: Fn, isa: Isa, acc: Val, right: Val) -> Val:
    """``acc`` and the four signed bytes of every lane."""
    ones = f.const(acc.type, EACH)
    if multiplies_bytes(isa):
        return multiply_add(f, isa, acc, ones, right)
    return add_words(f, isa, acc, multiply_pairs(f, ones, right))


_PAIRS = {16: "llvm.x86.sse2.pmadd.wd", 32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}


def _words(f: Fn, isa: Isa, left: Val, right: Val) -> Val:
    lanes = left.lanes
    whole = lanes * 4 == isa.vector_bytes
    words = [f.bitcast(x, vector("i16", 2 * lanes)) for x in (left, right)]
    if isa.triple == "x86_64" and whole:
        return f.intrinsic(_PAIRS[isa.vector_bytes], left.type, words)
    if isa.triple == "aarch64" and whole:
        # long products of either half, whose neighbours are added
        halves = [range(lanes), range(lanes, 2 * lanes)]
        name, pairs = f"llvm.aarch64.neon.smull.v{lanes}i32", f"llvm.aarch64.neon.addp.v{lanes}i32"
        long = [f.intrinsic(name, left.type, [f.shuffle(x, None, half) for x in words]) for half in halves]
        return f.intrinsic(pairs, left.type, long)
    low = f.ashr(f.shl(left, 16), 16) * f.ashr(f.shl(right, 16), 16)
    return low + f.ashr(left, 16) * f.ashr(right, 16)
