"""Tensors of a checkpoint by name, as the layouts of quantized layers read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Layer = Callable[[], Quantized]


class Readable(Protocol):
    def read(self) -> Array: ...


Tensors = Mapping[str, Readable]


def method_of(config: Config) -> str:
    """What settings are of, by both of the names that they have it under; nothing where they do not tell."""
    return str(config.get("quant_method") or config.get("method") or "").lower()


def numbers(tensors: Tensors, name: str) -> Array:
    if name not in tensors:
        raise WeightError(f"a quantized layer lacks its tensor {name!r}")
    return np.asarray(tensors[name].read())


def words(tensors: Tensors, name: str) -> Array:
    """A matrix of whole numbers as the bits they are."""
    found = numbers(tensors, name)
    if found.dtype.kind not in "iu" or found.ndim != 2:
        raise WeightError(f"{name!r} holds no matrix of words: {found.dtype}{list(found.shape)}")
    return np.ascontiguousarray(found).view(f"u{found.itemsize}")


def powers_of_two(exponents: Array) -> Array:
    """Scales that are kept as a byte each: their exponent, raised by 127."""
    return np.ascontiguousarray(exponents).view(DType.float8_e8m0fnu.numpy).astype(np.float32)


def check(layer: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != tuple(expected):
        raise WeightError(f"layer {layer!r}: its tensors do not fit: {list(got)} where {list(expected)} was expected")
