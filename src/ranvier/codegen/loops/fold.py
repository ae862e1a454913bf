"""What folds start from and give, and what stages evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ranvier.codegen.loops.ir import Expr, Fold, Reduce, Scalar, Scan, Stage
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


def expressions(stage: Stage) -> Iterator[Expr]:
    """The expressions a stage evaluates."""
    if isinstance(stage, Reduce | Scan):
        yield stage.value
    else:
        for _, value in stage.stores:
            yield value
