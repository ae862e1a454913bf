"""Maps in and out of classical models (``ai.onnx.ml``). At run time a map is a dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.graph.types import MapType, TensorType
from ranvier.ops.allocation import checked_shape
from ranvier.ops.ml.scores import class_labels
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array, Call, TypeCall, op

DOMAIN = "ai.onnx.ml"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{float(value):f}"


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, str) else int(float(value))


_CASTS: Mapping[str, tuple[Callable[[Any], Any], DType, Any]] = {  # conversion, element type, filling
    "TO_FLOAT": (float, DType.float32, 0.0),
    "TO_INT64": (_whole, DType.int64, 0),
    "TO_STRING": (_text, DType.string, ""),
}


@op("CastMap", domain=DOMAIN)
def cast_map(X: Mapping[int, Any], *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> Array:
    """One row with the values in the order of their keys; in the SPARSE form a key is the column."""
    if cast_to not in _CASTS:
        raise InvalidValue(f"CastMap: cast_to must be one of {', '.join(_CASTS)}, got {cast_to!r}")
    if map_form not in ("DENSE", "SPARSE"):
        raise InvalidValue(f"CastMap: map_form must be DENSE or SPARSE, got {map_form!r}")
    convert, dtype, filling = _CASTS[cast_to]
    keys = sorted(X)
    try:
        values = [convert(X[key]) for key in keys]
    except (ValueError, OverflowError):
        raise InvalidValue(f"CastMap: a value cannot be read as {dtype}: {[X[key] for key in keys][:8]}") from None
    is_dense = map_form == "DENSE"
    columns = list(range(len(keys))) if is_dense else [int(key) for key in keys]
    if columns and not is_dense and not 0 <= columns[0] <= columns[-1] < max_map:
        raise InvalidValue(f"CastMap: keys {columns[0]} … {columns[-1]} do not fit a row of {max_map}")
    shape = checked_shape((1, len(keys) if is_dense else max_map), dtype.numpy, "CastMap")
    result = np.full(shape, filling, dtype.numpy)
    result[0, columns] = values
    return result


@cast_map.infer
def _(call: TypeCall) -> list[TensorType]:
    dtype = _CASTS.get(call.attr("cast_to", "TO_FLOAT"), _CASTS["TO_FLOAT"])[1]
    return [TensorType(dtype, (1, call.attr("max_map", 1) if call.attr("map_form") == "SPARSE" else None))]


@op("DictVectorizer", domain=DOMAIN)
def dict_vectorizer(
    X: Mapping[Any, Any],
    *,
    int64_vocabulary: Sequence[int] | None = None,
    string_vocabulary: Sequence[str] | None = None,
    ctx: Call,
) -> Array:
    """One row with the map's values in the order of the vocabulary, zero where the map has none.

    The row has two axes, since models made by converters go on with a matrix. Keys outside of the vocabulary are left
    out: they are features that training has not seen.
    """
    columns = _columns(int64_vocabulary, string_vocabulary)
    dtype = _value_dtype(X, ctx)
    result = np.full((1, len(columns)), "" if dtype is DType.string else 0, dtype.numpy)
    for key, value in X.items():
        column = columns.get(key)
        if column is not None:
            result[0, column] = value
    return result


@dict_vectorizer.infer
def _(call: TypeCall) -> list[TensorType | None]:
    kind = call.type(0)
    value = kind.value if isinstance(kind, MapType) else None
    width = len(call.attr("int64_vocabulary") or call.attr("string_vocabulary") or ())
    return [TensorType(value.dtype if isinstance(value, TensorType) else None, (1, width))]


@prepared
def _columns(ints: Sequence[int] | None, strings: Sequence[str] | None) -> dict[Any, int]:
    labels = class_labels("DictVectorizer", ints, strings)
    return {label: column for column, label in enumerate(labels.tolist())}


def _value_dtype(X: Mapping[Any, Any], ctx: Call) -> DType:
    """What the node's type says; else what the values look like, where a Python float stands for float32."""
    declared = ctx.node.outputs[0].type if ctx.node is not None and ctx.node.outputs else None
    if isinstance(declared, TensorType) and declared.dtype is not None:
        return declared.dtype
    some = next(iter(X.values()), 0.0)
    if isinstance(some, str):
        return DType.string
    if isinstance(some, int | np.integer):
        return DType.int64
    if isinstance(some, np.float64):
        return DType.float64
    return DType.float32


@op("ZipMap", domain=DOMAIN)
def zip_map(
    X: Array, *, classlabels_int64s: Sequence[int] | None = None, classlabels_strings: Sequence[str] | None = None
) -> list[dict[Any, float]]:
    """One dict per row, from class label to value."""
    labels = class_labels("ZipMap", classlabels_int64s, classlabels_strings).tolist()
    if X.ndim not in (1, 2) or X.shape[-1] != len(labels):
        raise ShapeMismatch(f"ZipMap: expected [N, {len(labels)}] for {len(labels)} labels, got {list(X.shape)}")
    if X.dtype.kind != "f":
        raise DTypeMismatch(f"ZipMap: expected floats, got {X.dtype.name}")
    return [dict(zip(labels, row)) for row in X.reshape(-1, len(labels)).tolist()]
