"""Features in and out of classical models (``ai.onnx.ml``): scaling, encoding, vectors made of maps and back.

Linear models and support vector machines are in :mod:`ranvier.ops.ml_linear`, trees in :mod:`ranvier.ops.ml_trees`,
the mapping of labels in :mod:`ranvier.ops.ml_labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, TensorType
from ranvier.ops import ml_labels, ml_linear, ml_trees  # noqa: F401  the rest of the family
from ranvier.ops.allocation import checked_shape
from ranvier.ops.ml_labels import lookup, lookup_of
from ranvier.ops.ml_scores import class_labels, feature_rows, float_array
from ranvier.ops.operands import index_array
from ranvier.ops.registry import Array, Call, TypeCall, op

DOMAIN = "ai.onnx.ml"


# -- arithmetic on features --------------------------------------------------------------------------------------------


@op("Binarizer", domain=DOMAIN, traits=("elementwise",))
def binarizer(X: Array, *, threshold: float = 0.0) -> Array:
    return np.asarray(X > threshold).astype(X.dtype)


@op("Scaler", domain=DOMAIN)
def scaler(X: Array, *, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> Array:
    features = X.shape[-1] if X.ndim else 1
    for name, values in (("offset", offset), ("scale", scale)):
        if len(values) not in (0, 1, features):
            raise ShapeMismatch(f"Scaler: expected 1 or {features} values of '{name}', got {len(values)}")
    scaled = X if X.dtype == np.float64 else X.astype(np.float32)
    if offset:
        scaled = scaled - float_array(offset)
    if scale:
        scaled = scaled * float_array(scale)
    return np.asarray(scaled, np.float32).reshape(X.shape)


@op("Normalizer", domain=DOMAIN)
def normalizer(X: Array, *, norm: str = "MAX") -> Array:
    """Each row divided by its norm; by the standard MAX is the largest value, not the largest magnitude."""
    rows = feature_rows("Normalizer", X).astype(np.float64)
    if norm == "MAX":
        size = rows.max(axis=1, keepdims=True, initial=-np.inf)
    elif norm == "L1":
        size = np.abs(rows).sum(axis=1, keepdims=True)
    elif norm == "L2":
        size = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    else:
        raise InvalidValue(f"Normalizer: norm must be MAX, L1 or L2, got {norm!r}")
    return np.asarray(rows / np.where(size == 0, 1, size)).astype(np.float32).reshape(X.shape)


@op("Imputer", domain=DOMAIN)
def imputer(
    X: Array,
    *,
    imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    is_float = X.dtype.kind == "f"
    values: Sequence[float] = imputed_value_floats if is_float else imputed_value_int64s
    features = X.shape[-1] if X.ndim else 1
    if len(values) not in (1, features) or not values:
        kind = "floats" if is_float else "int64s"
        raise ShapeMismatch(f"Imputer: expected 1 or {features} imputed_value_{kind}, got {len(values)}")
    if not is_float and not _fits(values, X.dtype):
        raise InvalidValue(f"Imputer: an imputed value does not fit {X.dtype.name}")
    if not is_float:
        missing = X == replaced_value_int64
    elif np.isnan(replaced_value_float):
        missing = np.isnan(X)
    else:
        missing = X == replaced_value_float
    return np.where(missing, np.asarray(values, X.dtype), X).reshape(X.shape)


def _fits(values: Sequence[float], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return all(limits.min <= value <= limits.max for value in values)


# -- choosing and joining features -------------------------------------------------------------------------------------


@op("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(X: Array, Y: Array) -> Array:
    """The features of the last axis that ``Y`` names; a vector counts as one row."""
    if X.ndim == 0:
        raise ShapeMismatch("ArrayFeatureExtractor: expected an input of at least one axis, got a scalar")
    wanted = index_array("ArrayFeatureExtractor", Y).ravel()
    outside = np.flatnonzero((wanted < 0) | (wanted >= X.shape[-1]))
    if outside.size:
        raise InvalidValue(
            f"ArrayFeatureExtractor: index {wanted[outside[0]]} is out of range for {X.shape[-1]} features"
        )
    return X[np.newaxis, wanted] if X.ndim == 1 else X[..., wanted]


@op("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(*X: Array, inputdimensions: Sequence[int] = ()) -> Array:
    """The inputs side by side; one that is not as wide as ``inputdimensions`` says is cut or filled up with zeros."""
    if not X:
        raise InvalidValue("FeatureVectorizer: expected at least one input, got none")
    blocks = [x.reshape(1 if x.ndim <= 1 else x.shape[0], -1) for x in X]
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
    X: Array,
    *,
    cats_int64s: Sequence[int] | None = None,
    cats_strings: Sequence[str] | None = None,
    zeros: int = 1,
) -> Array:
    categories = class_labels("OneHotEncoder", cats_int64s, cats_strings)
    if (X.dtype == object) != (categories.dtype == object):
        raise DTypeMismatch(f"OneHotEncoder: categories of {_kind(categories)}, but an input of {_kind(X)}")
    shape = checked_shape((*X.shape, len(categories)), np.float32, "OneHotEncoder")
    keys = X if X.dtype == object else np.nan_to_num(np.trunc(X), nan=np.inf, posinf=np.inf, neginf=-np.inf)
    at = lookup_of(cats_strings if cats_strings else cats_int64s, _key_dtype(keys)).find(keys)
    if not zeros and (at < 0).any():
        unknown = X.flat[int(np.flatnonzero(at.ravel() < 0)[0])]
        raise InvalidValue(f"OneHotEncoder: {unknown!r} is not among the categories, and 'zeros' is 0")
    result = np.zeros((X.size, len(categories)), np.float32)
    known = np.flatnonzero(at.ravel() >= 0)
    result[known, at.ravel()[known]] = 1
    return result.reshape(shape)
