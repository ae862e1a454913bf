"""Mathematical functions as inline vector code: no libm, the same code for float and double.

Every function takes the function under construction, one or two values of ``float`` or ``double`` elements with any
number of lanes, and the instruction set. Errors stay within 4 units in the last place of the exact result; NaN,
infinities, signed zeros and denormals are treated as NumPy does. The ``short`` ones are for float values that are only
kept in few bits.
"""

from ranvier.codegen.llvm.vmath.exponential import cosh, exp, expm1, sigmoid, sinh, tanh
from ranvier.codegen.llvm.vmath.halves import bfloat_to_float, float_to_bfloat, float_to_half, half_to_float
from ranvier.codegen.llvm.vmath.inverse import acos, asin, atan, atan2
from ranvier.codegen.llvm.vmath.logarithm import acosh, asinh, atanh, log, log1p, softplus
from ranvier.codegen.llvm.vmath.power import pow  # noqa: A004
from ranvier.codegen.llvm.vmath.rounding import ceil, floor, fmod, rint, rsqrt, trunc
from ranvier.codegen.llvm.vmath.short import short_one_plus_erf, short_sigmoid
from ranvier.codegen.llvm.vmath.special import erf
from ranvier.codegen.llvm.vmath.trigonometry import cos, sin, tan

__all__ = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bfloat_to_float",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "expm1",
    "float_to_bfloat",
    "float_to_half",
    "floor",
    "fmod",
    "half_to_float",
    "log",
    "log1p",
    "pow",
    "rint",
    "rsqrt",
    "short_one_plus_erf",
    "short_sigmoid",
    "sigmoid",
    "sin",
    "sinh",
    "softplus",
    "tan",
    "tanh",
    "trunc",
]
