"""What folds start from, and small constructors of common nests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ranvier.codegen.loops.ir import Expr, Fold, Load, Map, Nest, Op, Operand, Reduce, Scalar, Scan, Stage
from ranvier.codegen.loops.ir import Final as FinalStage
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


def identity(fold: Fold, dtype: DType) -> Scalar:
    """What a fold of nothing gives: the value that changes nothing. For arg… folds, that of the values compared."""
    match fold:
        case "sum":
            return False if dtype is DType.bool else 0
        case "prod" | "and":
            return 1
        case "or":
            return False
    largest = fold in ("max", "argmax", "argmax_last")
    if dtype.is_float:
        return -math.inf if largest else math.inf
    if dtype is DType.bool:
        return not largest
    info = np.iinfo(dtype.numpy)
    return int(info.min if largest else info.max)


def is_arg(fold: Fold) -> bool:
    """Whether the fold gives a position rather than a value."""
    return fold.startswith("arg")


def elementwise(out: View, inputs: Sequence[View], value: Callable[..., Expr], label: str = "") -> Nest:
    """``out[...] = value(inputs[0][...], …)`` with NumPy's broadcasting of the inputs to the output's shape."""
    operands = [Operand(v.expanded(out.shape), v.expanded(out.shape).strides) for v in inputs]
    operands.append(Operand(out, out.strides))
    loads = [Load(k, v.dtype) for k, v in enumerate(inputs)]
    return Nest(out.shape, tuple(operands), (Map(((len(inputs), value(*loads)),)),), label=label)


def copy(out: View, source: View, label: str = "") -> Nest:
    """``out[...] = source[...]``, converted where the element types differ."""

    def same(x: Expr) -> Expr:
        return x if source.dtype is out.dtype else Op("cast", (x,), out.dtype)

    return elementwise(out, [source], same, label)


def reduction(
    out: View,
    source: View,
    axes: Sequence[int],
    fold: Fold,
    *,
    before: Callable[[Expr], Expr] | None = None,
    after: Callable[[Expr], Expr] | None = None,
    label: str = "",
) -> Nest:
    """``out = after(fold over axes of before(source))``; ``out`` has size 1 along the axes (reshape it to that)."""
    from ranvier.codegen.loops.ir import Result

    load: Expr = Load(0, source.dtype)
    value = before(load) if before else load
    dtype = DType.int64 if is_arg(fold) else value.dtype
    result: Expr = Result(0, dtype)
    strides = tuple(0 if a in axes else s for a, s in enumerate(out.strides))
    return Nest(
        source.shape,
        (Operand(source, source.strides), Operand(out, strides)),
        (Reduce(fold, value, dtype), FinalStage(((1, after(result) if after else result),))),
        frozenset(axes),
        label,
    )


def expressions(stage: Stage) -> Iterator[Expr]:
    """The expressions a stage evaluates."""
    if isinstance(stage, Reduce | Scan):
        yield stage.value
    else:
        for _, value in stage.stores:
            yield value
