"""A small writer of LLVM IR text.

Text rather than an object tree because it is several times quicker to make and kernels are many. A :class:`Val` is a
typed name; :class:`Fn` writes one function. Mutable variables are stack slots that LLVM's ``sroa`` turns into
registers, so kernel authors write loops and assignments, never phi nodes.

Types are LLVM's own spellings: ``float``, ``i64``, ``ptr``, ``<16 x float>``.
"""

from ranvier.codegen.llvm.builder.memory import Var
from ranvier.codegen.llvm.builder.module import Fn, Module
from ranvier.codegen.llvm.builder.types import mangled, size_of, vector
from ranvier.codegen.llvm.builder.values import Operand, Val

__all__ = ["Fn", "Module", "Operand", "Val", "Var", "mangled", "size_of", "vector"]
