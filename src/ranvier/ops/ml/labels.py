"""Mapping labels to labels (``ai.onnx.ml``): LabelEncoder and CategoryMapper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidValue
from ranvier.graph.types import TensorType
from ranvier.ops.ml.key_table import key_table
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array, TypeCall, op

DOMAIN = "ai.onnx.ml"
_LIST_DTYPES: Mapping[str, type] = {"strings": np.object_, "int64s": np.int64, "floats": np.float32}


@op("LabelEncoder", domain=DOMAIN)
def label_encoder_1(
    x: Array,
    *,
    classes_strings: Sequence[str] = (),
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> Array:
    """Strings to their positions in a list, or positions to strings."""
    if x.dtype == object:
        at = key_table(classes_strings, np.object_).find(x)
        return np.where(at < 0, np.int64(default_int64), at)
    known = (x >= 0) & (x < len(classes_strings))
    return _chosen(known, np.where(known, x, 0), _values(classes_strings, np.object_), default_string)


@label_encoder_1.infer
def _(call: TypeCall) -> list[TensorType | None]:
    kind = call.type(0)
    if not isinstance(kind, TensorType) or kind.dtype is None:
        return [None]
    return [TensorType(DType.int64 if kind.dtype is DType.string else DType.string, kind.shape)]


@op("LabelEncoder", since=2, domain=DOMAIN)
def label_encoder(
    x: Array,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: Array | None = None,
    keys_floats: Sequence[float] = (),
    keys_int64s: Sequence[int] = (),
    keys_strings: Sequence[str] = (),
    keys_tensor: Array | None = None,
    values_floats: Sequence[float] = (),
    values_int64s: Sequence[int] = (),
    values_strings: Sequence[str] = (),
    values_tensor: Array | None = None,
) -> Array:
    keys, key_dtype = _given("keys", keys_tensor, strings=keys_strings, int64s=keys_int64s, floats=keys_floats)
    labels, dtype = _given("values", values_tensor, strings=values_strings, int64s=values_int64s, floats=values_floats)
    if len(keys) != len(labels):
        raise InvalidValue(f"LabelEncoder: {len(keys)} keys, but {len(labels)} values")
    table = key_table(keys, key_dtype)
    if x.dtype != table.dtype:
        raise DTypeMismatch(f"LabelEncoder: the keys are {of(table.dtype)}, but the input is {of(x)}")
    values = _values(labels, dtype)
    default: Any
    if default_tensor is not None:
        if default_tensor.size != 1 or default_tensor.dtype != values.dtype:
            raise InvalidValue(f"LabelEncoder: default_tensor must hold one {of(values)}, like the values")
        default = default_tensor.ravel()[0]
    else:
        default = {"O": default_string, "i": default_int64}.get(values.dtype.kind, default_float)
    at = table.find(x)
    return _chosen(at >= 0, at, values, default)


@op("CategoryMapper", domain=DOMAIN)
def category_mapper(
    x: Array,
    *,
    cats_int64s: Sequence[int] = (),
    cats_strings: Sequence[str] = (),
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> Array:
    """Strings to integers or integers to strings, as the input asks."""
    if len(cats_int64s) != len(cats_strings) or not cats_strings:
        raise InvalidValue(
            f"CategoryMapper: expected as many integers as strings, got {len(cats_int64s)} and {len(cats_strings)}"
        )
    if x.dtype == object:
        at = key_table(cats_strings, np.object_).find(x)
        return _chosen(at >= 0, at, _values(cats_int64s, np.int64), default_int64)
    at = key_table(cats_int64s, np.int64).find(x)
    return _chosen(at >= 0, at, _values(cats_strings, np.object_), default_string)


def _given(what: str, tensor: Array | None, **lists: Sequence[Any]) -> tuple[Any, type]:
    """The one attribute that was set out of a tensor and several lists, and its element type."""
    found: list[tuple[Any, type]] = [(values, _LIST_DTYPES[kind]) for kind, values in lists.items() if values]
    if tensor is not None:
        found.append((tensor, tensor.dtype.type))
    if len(found) != 1:
        names = ", ".join(f"{what}_{kind}" for kind in ("tensor", *lists))
        raise InvalidValue(f"LabelEncoder: exactly one of {names} must be given, got {len(found)}")
    return found[0]


@prepared
def _values(values: Sequence[Any] | Array, dtype: type) -> Array:
    return np.asarray(values, dtype).ravel()


def _chosen(known: Array, at: Array, values: Array, default: Any) -> Array:
    """``values[at]`` where known, else the default."""
    result = np.empty(known.shape, values.dtype)
    try:
        result[...] = default
    except OverflowError:
        raise InvalidValue(f"LabelEncoder: default {default} does not fit {values.dtype.name}") from None
    result[known] = values[at[known]]
    return result
