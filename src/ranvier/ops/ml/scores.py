"""What the classifiers and regressors of ``ai.onnx.ml`` share: rows of features, class labels, score transforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array, TypeCall

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # in the order TreeEnsemble-5 numbers them


def feature_rows(op_name: str, X: Array) -> Array:
    """``X`` as [N, F] floats; a vector is one row. float64 stays, everything else becomes float32."""
    if X.ndim not in (1, 2):
        raise ShapeMismatch(f"{op_name}: expected an input of shape [N, F] or [F], got {list(X.shape)}")
    rows = X.reshape(1, -1) if X.ndim == 1 else X
    return rows if rows.dtype == np.float64 else rows.astype(np.float32, copy=False)


@prepared
def float_array(values: Sequence[float]) -> Array:
    """A list of the standard's floats, which are 32 bits wide, as an array."""
    return np.asarray(values, np.float32)


def class_labels(
    op_name: str, ints: Sequence[int] | None, strings: Sequence[str] | None, *, required: bool = True
) -> Array:
    """The labels of a classifier, whichever of the two attributes holds them."""
    if ints and strings:
        raise InvalidValue(f"{op_name}: class labels are given both as integers and as strings")
    if required and not ints and not strings:
        raise InvalidValue(f"{op_name}: no class labels are given")
    return np.array(strings, object) if strings else np.asarray(ints or (), np.int64)


def transform_scores(op_name: str, scores: Array, kind: str) -> Array:
    """``scores`` [N, E] after a ``post_transform``; the soft ones work along a row."""
    if kind == "NONE":
        return scores
    if kind == "LOGISTIC":
        # the exponent is never positive, so it cannot overflow
        decay = np.exp(-np.abs(scores))
        return np.asarray(np.where(scores < 0, decay, 1) / (1 + decay))
    if kind == "SOFTMAX":
        powers = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    if kind == "SOFTMAX_ZERO":
        return _softmax_without_zeros(scores)
    if kind == "PROBIT":
        return _probit(scores)
    raise InvalidValue(f"{op_name}: post_transform must be one of {', '.join(TRANSFORMS)}, got {kind!r}")


def _softmax_without_zeros(scores: Array) -> Array:
    """Softmax over the scores that are not zero; a score of zero says "no vote" and stays zero."""
    voted = np.abs(scores) > 1e-7
    powers = np.where(voted, np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf)), 0)
    total = powers.sum(axis=1, keepdims=True)
    return np.asarray(powers / np.where(total == 0, 1, total))


def _probit(probabilities: Array) -> Array:
    """The inverse of the normal distribution's cumulative function; NaN outside [0, 1]."""
    from statistics import NormalDist  # takes milliseconds to import, and few models need it

    normal = NormalDist()
    edges = np.where(probabilities == 0, -np.inf, np.where(probabilities == 1, np.inf, np.nan))
    result = edges.astype(probabilities.dtype)
    inside = (probabilities > 0) & (probabilities < 1)
    result[inside] = [normal.inv_cdf(float(p)) for p in probabilities[inside]]
    return result


# -- types -------------------------------------------------------------------------------------------------------------


def row_count(call: TypeCall) -> Dim:
    """How many rows the first input has."""
    kind = call.type(0)
    if not isinstance(kind, TensorType) or kind.shape is None or not kind.shape:
        return None
    return 1 if len(kind.shape) == 1 else kind.shape[0]


def scores_type(call: TypeCall, columns: Dim) -> TensorType:
    return TensorType(DType.float32, (row_count(call), columns))


def labels_type(call: TypeCall, strings_attr: str) -> TensorType:
    return TensorType(DType.string if call.attr(strings_attr) else DType.int64, (row_count(call),))
