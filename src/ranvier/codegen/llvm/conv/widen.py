"""Inputs of another type than a kernel has: widened, or rounded where it multiplies in 16 bits."""

from __future__ import annotations

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Load, Map, Nest, Op, Operand
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


def widened(x: View, dtype: DType, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """A channels-last copy of ``x`` in another type, and the launches that make it."""
    order = (0, *range(2, x.rank), 1)
    made = View.temporary(dtype, x.shape, order)
    value = Op("cast", (Load(0, x.dtype),), dtype)
    nest = Nest(x.shape, (Operand(x, x.strides), Operand(made, made.strides)), (Map(((1, value),)),))
    return made, nests.launches(nest, isa, threads)
