"""Mathematical functions as inline vector code: no calls, no tables, the same code for float and double.

Every function takes the function under construction, one or two values of ``float`` or ``double`` elements with any
number of lanes, and the instruction set. Errors stay within 4 units in the last place of the exact result; NaN,
infinities, signed zeros and denormals are treated as NumPy does.
"""

from ranvier.codegen.llvm.vmath.exponential import exp, expm1, sigmoid, tanh
from ranvier.codegen.llvm.vmath.logarithm import log
from ranvier.codegen.llvm.vmath.special import erf

__all__ = ["erf", "exp", "expm1", "log", "sigmoid", "tanh"]
