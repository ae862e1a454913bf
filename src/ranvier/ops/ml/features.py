"""Features of classical models (``ai.onnx.ml``): scaling, filling gaps, choosing, joining, encoding categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType, Type
from ranvier.ops.allocation import checked_shape
from ranvier.ops.ml.key_table import key_table
from ranvier.ops.ml.scores import class_labels, feature_rows, float_array, row_count
from ranvier.ops.operands import index_array
from ranvier.ops.registry import Array, TypeCall, op

DOMAIN = "ai.onnx.ml"
_INT64_RANGE = 2.0**63


# -- arithmetic on features --------------------------------------------------------------------------------------------


@op("Binarizer", domain=DOMAIN, traits=("elementwise",))
def binarizer(x: Array, *, threshold: float = 0.0) -> Array:
    return np.asarray(x > threshold).astype(x.dtype)


@op("Scaler", domain=DOMAIN)
def scaler(x: Array, *, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> Array:
    features = x.shape[-1] if x.ndim else 1
    for name, values in (("offset", offset), ("scale", scale)):
        if len(values) not in (0, 1, features):
            raise ShapeMismatch(f"Scaler: expected 1 or {features} values of '{name}', got {len(values)}")
    scaled = x if x.dtype == np.float64 else x.astype(np.float32)
    if offset:
        scaled = scaled - float_array(offset)
    if scale:
        scaled = scaled * float_array(scale)
    return np.asarray(scaled, np.float32).reshape(x.shape)


@op("Normalizer", domain=DOMAIN)
def normalizer(x: Array, *, norm: str = "MAX") -> Array:
    """Each row divided by its norm; by the standard MAX is the largest value, not the largest magnitude."""
    rows = feature_rows("Normalizer", x).astype(np.float64)
    if norm == "MAX":
        size = rows.max(axis=1, keepdims=True, initial=-np.inf)
    elif norm == "L1":
        size = np.abs(rows).sum(axis=1, keepdims=True)
    elif norm == "L2":
        size = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    else:
        raise InvalidValue(f"Normalizer: norm must be MAX, L1 or L2, got {norm!r}")
    return np.asarray(rows / np.where(size == 0, 1, size)).astype(np.float32).reshape(x.shape)


@op("Imputer", domain=DOMAIN)
def imputer(
    x: Array,
    *,
    imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    is_float = x.dtype.kind == "f"
    values: Sequence[float] = imputed_value_floats if is_float else imputed_value_int64s
    features = x.shape[-1] if x.ndim else 1
    if len(values) not in (1, features) or not values:
        kind = "floats" if is_float else "int64s"
        raise ShapeMismatch(f"Imputer: expected 1 or {features} imputed_value_{kind}, got {len(values)}")
    if not is_float and not _fits(values, x.dtype):
        raise InvalidValue(f"Imputer: an imputed value does not fit {x.dtype.name}")
    if not is_float:
        missing = x == replaced_value_int64
    elif np.isnan(replaced_value_float):
        missing = np.isnan(x)
    else:
        missing = x == replaced_value_float
    return np.where(missing, np.asarray(values, x.dtype), x).reshape(x.shape)


def _fits(values: Sequence[float], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return all(limits.min <= value <= limits.max for value in values)


# -- choosing and joining features -------------------------------------------------------------------------------------


@op("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(x: Array, Y: Array) -> Array:
    """The features of the last axis that ``Y`` names; a vector counts as one row."""
    if x.ndim == 0:
        raise ShapeMismatch("ArrayFeatureExtractor: expected an input of at least one axis, got a scalar")
    wanted = index_array("ArrayFeatureExtractor", Y).ravel()
    outside = np.flatnonzero((wanted < 0) | (wanted >= x.shape[-1]))
    if outside.size:
        raise InvalidValue(
            f"ArrayFeatureExtractor: index {wanted[outside[0]]} is out of range for {x.shape[-1]} features"
        )
    return x[np.newaxis, wanted] if x.ndim == 1 else x[..., wanted]


@op("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(*inputs: Array, inputdimensions: Sequence[int] = ()) -> Array:
    """The inputs side by side; one that is not as wide as ``inputdimensions`` says is cut or filled up with zeros."""
    if not inputs:
        raise InvalidValue("FeatureVectorizer: expected at least one input, got none")
    blocks = [x.reshape(1 if x.ndim <= 1 else x.shape[0], -1) for x in inputs]
    if len({len(block) for block in blocks}) != 1:
        raise ShapeMismatch(f"FeatureVectorizer: the inputs have {[len(block) for block in blocks]} rows")
    widths = list(inputdimensions) or [block.shape[1] for block in blocks]
    if len(widths) != len(blocks):
        raise InvalidValue(f"FeatureVectorizer: {len(blocks)} inputs, but {len(widths)} inputdimensions")
    result = np.zeros(checked_shape((len(blocks[0]), sum(widths)), np.float32, "FeatureVectorizer"), np.float32)
    start = 0
    for block, width in zip(blocks, widths):
        if width < 0:
            raise InvalidValue(f"FeatureVectorizer: inputdimensions holds {width}")
        used = min(width, block.shape[1])
        result[:, start : start + used] = block[:, :used]
        start += width
    return result


@op("OneHotEncoder", domain=DOMAIN)
def one_hot_encoder(
    x: Array,
    *,
    cats_int64s: Sequence[int] | None = None,
    cats_strings: Sequence[str] | None = None,
    zeros: int = 1,
) -> Array:
    categories = class_labels("OneHotEncoder", cats_int64s, cats_strings)
    if (x.dtype == object) != (categories.dtype == object):
        raise DTypeMismatch(f"OneHotEncoder: categories are {of(categories)}, but the input is {of(x)}")
    shape = checked_shape((*x.shape, len(categories)), np.float32, "OneHotEncoder")
    at = key_table(cats_strings or cats_int64s, categories.dtype.type).find(x if x.dtype == object else _truncated(x))
    if x.dtype.kind == "f":
        at = np.where(np.abs(x) < _INT64_RANGE, at, -1)  # NaN and infinities are in no category
    unknown = np.flatnonzero(at.ravel() < 0)
    if unknown.size and not zeros:
        raise InvalidValue(f"OneHotEncoder: {x.flat[unknown[0]]!r} is not among the categories, and 'zeros' is 0")
    result = np.zeros((x.size, len(categories)), np.float32)
    known = np.flatnonzero(at.ravel() >= 0)
    result[known, at.ravel()[known]] = 1
    return result.reshape(shape)


def _truncated(x: Array) -> Array:
    """Numbers as integers, by the standard's rule for float features; what no int64 can hold becomes 0."""
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    return np.where(np.abs(x) < _INT64_RANGE, x, 0).astype(np.int64)


# -- types -------------------------------------------------------------------------------------------------------------


@scaler.infer
@normalizer.infer
def _(call: TypeCall) -> list[TensorType]:
    kind = call.type(0)
    return [TensorType(DType.float32, kind.shape if isinstance(kind, TensorType) else None)]


@imputer.infer
def _(call: TypeCall) -> list[Type | None]:
    return [call.type(0)]


@array_feature_extractor.infer
def _(call: TypeCall) -> list[Type | None]:
    kind, chosen = call.type(0), call.type(1)
    if not isinstance(kind, TensorType) or kind.shape is None:
        return [TensorType(kind.dtype) if isinstance(kind, TensorType) else None]
    count: Dim = None
    if isinstance(chosen, TensorType) and chosen.shape is not None:
        sizes = [d for d in chosen.shape if isinstance(d, int)]
        count = math.prod(sizes) if len(sizes) == len(chosen.shape) else None
    return [TensorType(kind.dtype, (*(kind.shape[:-1] or (1,)), count))]


@feature_vectorizer.infer
def _(call: TypeCall) -> list[TensorType]:
    widths = call.attr("inputdimensions", ())
    return [TensorType(DType.float32, (row_count(call), sum(widths) if widths else None))]
