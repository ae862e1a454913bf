"""Conversions between float and the 16-bit formats, whose values travel as i16 vectors."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import bits, exactly, from_bits


def half_to_float(f: Fn, h: Val, isa: Isa) -> Val:
    if isa.half:
        return f.cast(f.bitcast(h, vector("half", h.lanes)), "float")
    wide = f.cast(h, "i32", signed=False)
    size = f.and_(wide, 0x7FFF)
    # the exponent moves by a multiplication, which normalises denormals too; infinity and NaN keep theirs full
    value = exactly(f, "fmul", from_bits(f, f.shl(size, 13)), 2.0**112)
    full = f.select(f.cmp("sge", size, 0x7C00), f.const(wide.type, 0x7F800000), f.const(wide.type, 0))
    sign = f.shl(f.and_(wide, 0x8000), 16)
    return from_bits(f, f.or_(f.or_(bits(f, value), full), sign))


def float_to_half(f: Fn, x: Val, isa: Isa) -> Val:
    """To the nearest half, ties to even; NaN stays NaN."""
    if isa.half:
        return f.bitcast(f.cast(x, "half"), vector("i16", x.lanes))
    whole = bits(f, x)
    size = f.and_(whole, 0x7FFFFFFF)
    odd = f.and_(f.lshr(size, 13), 1)
    normal = f.sub(f.lshr(f.add(f.add(size, 0xFFF), odd), 13), 112 << 10)
    # denormals: one half's last place is that of a float from 1/2 to 1, so an addition rounds as wanted
    denormal = f.sub(bits(f, exactly(f, "fadd", from_bits(f, size), 0.5)), 0x3F000000)
    found = f.select(f.cmp("slt", size, 0x38800000), denormal, normal)
    found = f.select(f.cmp("sge", size, 0x477FF000), f.const(size.type, 0x7C00), found)
    nan = f.or_(f.and_(f.lshr(size, 13), 0x3FF), 0x7E00)
    found = f.select(f.cmp("sgt", size, 0x7F800000), nan, found)
    return f.cast(f.or_(found, f.and_(f.lshr(whole, 16), 0x8000)), "i16")


def bfloat_to_float(f: Fn, b: Val, isa: Isa) -> Val:
    return from_bits(f, f.shl(f.cast(b, "i32", signed=False), 16))


def float_to_bfloat(f: Fn, x: Val, isa: Isa) -> Val:
    """To the nearest bfloat16, ties to even, denormals included (the native instruction would flush them)."""
    whole = bits(f, x)
    odd = f.and_(f.lshr(whole, 16), 1)
    rounded = f.lshr(f.add(f.add(whole, 0x7FFF), odd), 16)
    nan = f.or_(f.lshr(whole, 16), 0x40)
    return f.cast(f.select(f.cmp("uno", x, x), nan, rounded), "i16")
