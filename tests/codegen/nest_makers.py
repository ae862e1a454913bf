"""Common nests in a line: what providers build operand by operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.loops.fold import is_arg
from ranvier.codegen.loops.ir import Expr, Final, Fold, Load, Map, Nest, Op, Operand, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


def elementwise(out: View, inputs: Sequence[View], value: Callable[..., Expr], label: str = "") -> Nest:
    """``out[...] = value(inputs[0][...], …)`` with NumPy's broadcasting of the inputs to the output's shape."""
    operands = [Operand(v.expanded(out.shape), v.expanded(out.shape).strides) for v in inputs]
    operands.append(Operand(out, out.strides))
    loads = [Load(k, v.dtype) for k, v in enumerate(inputs)]
    return Nest(out.shape, tuple(operands), (Map(((len(inputs), value(*loads)),)),), label=label)


def copy(out: View, source: View) -> Nest:
    """``out[...] = source[...]``, converted where the element types differ."""
    return elementwise(out, [source], lambda x: x if source.dtype is out.dtype else Op("cast", (x,), out.dtype))


def reduction(out: View, source: View, axes: Sequence[int], fold: Fold) -> Nest:
    """``out = fold over axes of source``; ``out`` has size 1 along the axes (reshape it to that)."""
    dtype = DType.int64 if is_arg(fold) else source.dtype
    strides = tuple(0 if a in axes else s for a, s in enumerate(out.strides))
    return Nest(
        source.shape,
        (Operand(source, source.strides), Operand(out, strides)),
        (Reduce(fold, Load(0, source.dtype), dtype), Final(((1, Result(0, dtype)),))),
        frozenset(axes),
    )
