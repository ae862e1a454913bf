"""32-bit integers as bytes, by the instructions that saturate two vectors into one."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.isa import Isa

_WORDS = {16: "llvm.x86.sse2.packssdw.128", 32: "llvm.x86.avx2.packssdw", 64: "llvm.x86.avx512.packssdw.512"}
_SIGNED = {16: "llvm.x86.sse2.packsswb.128", 32: "llvm.x86.avx2.packsswb", 64: "llvm.x86.avx512.packsswb.512"}
_UNSIGNED = {16: "llvm.x86.sse2.packuswb.128", 32: "llvm.x86.avx2.packuswb", 64: "llvm.x86.avx512.packuswb.512"}
_SECTION = 16  # bytes that the instructions stay within


def lowest_beyond(isa: Isa) -> bool:
    """Whether :func:`nearest` gives the lowest integer for all numbers that no integer holds."""
    return isa.triple == "x86_64"


def packed_bytes(
    f: Fn, isa: Isa, vectors: Sequence[Val], zero: Val | None, *, signed: bool, rows: int = 2
) -> list[Val]:  # fmt: skip
    """Four vectors of i32, two of one row and two of another, or on x86 of four rows, plus ``zero`` (a code in every
    lane), as bytes: the rows. What is too large or too small becomes the largest or the smallest byte."""
    size, lanes = isa.vector_bytes, isa.lanes(4)
    words = vector("i16", 2 * lanes)
    halves = [_words(f, isa, vectors[k : k + 2]) for k in (0, 2)]
    if zero is not None:
        # codes are far from the ends of 16 bits, where words have been cut off already
        wide = _words(f, isa, [zero, zero])
        halves = [f.intrinsic(f"llvm.sadd.sat.v{2 * lanes}i16", words, [half, wide]) for half in halves]
    if isa.triple == "aarch64":
        narrowing = f"llvm.aarch64.neon.{'sqxtn' if signed else 'sqxtun'}.v{2 * lanes}i8"
        return [f.intrinsic(narrowing, vector("i8", 2 * lanes), [half]) for half in halves]
    name = (_SIGNED if signed else _UNSIGNED)[size]
    mixed = f.bitcast(f.intrinsic(name, vector("i8", 4 * lanes), halves), vector("i32", lanes))
    # every section holds four bytes of each vector
    sections = size // _SECTION
    order = [4 * section + k for k in range(4) for section in range(sections)]
    each = lanes // rows
    return [
        f.bitcast(f.shuffle(mixed, None, order[k : k + each]), vector("i8", 4 * each)) for k in range(0, lanes, each)
    ]


def packed_low_bytes(f: Fn, isa: Isa, vectors: Sequence[Val], zero: Val | None, *, signed: bool) -> list[Val]:
    """As :func:`packed_bytes`, on aarch64, of numbers that are the lower halves of the vectors' elements."""
    lanes = isa.lanes(4)
    rows = [f.cast(f.shuffle(vectors[k], vectors[k + 1], range(2 * lanes)), "i16") for k in (0, 2)]
    if zero is not None:
        both = f.cast(f.shuffle(zero, zero, range(2 * lanes)), "i16")
        rows = [row + both for row in rows]
    narrowing = f"llvm.aarch64.neon.{'sqxtn' if signed else 'sqxtun'}.v{2 * lanes}i8"
    return [f.intrinsic(narrowing, vector("i8", 2 * lanes), [row]) for row in rows]


def _words(f: Fn, isa: Isa, pair: Sequence[Val]) -> Val:
    """Two vectors of i32 as one of i16."""
    lanes = isa.lanes(4)
    if isa.triple == "aarch64":
        short = [f.intrinsic(f"llvm.aarch64.neon.sqxtn.v{lanes}i16", vector("i16", lanes), [x]) for x in pair]
        return f.shuffle(short[0], short[1], range(2 * lanes))
    return f.intrinsic(_WORDS[isa.vector_bytes], vector("i16", 2 * lanes), list(pair))
