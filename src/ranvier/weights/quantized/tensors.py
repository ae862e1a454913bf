"""Tensors of a checkpoint by name, as the layouts of quantized layers read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Rows
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]


class Readable(Protocol):
    def read(self) -> Array: ...


Tensors = Mapping[str, Readable]


@dataclass(frozen=True, eq=False)  # as functions are
class Layer:
    """A layer that is read when it is called."""

    read: Callable[[], Quantized | Rows]
    tensors: Tensors
    codes: str  # the tensor that has them

    def __call__(self) -> Quantized:
        with self.opened() as found:
            return found.whole() if isinstance(found, Rows) else found

    @contextmanager
    def opened(self) -> Iterator[Quantized | Rows]:
        """Its codes, or what reads some rows of them at a time, as long as it is open."""
        yield self.read()
        stored = self._stored
        if stored is not None:
            stored.blob.check()  # once more: it may have been written over while codes were made of it
            stored.blob.give_back(stored.start, stored.start + stored.info.nbytes)

    @property
    def lasting(self) -> bool:
        """Whether it can be read again at any time."""
        return self._stored is not None

    @property
    def _stored(self) -> Any:
        """Its codes as bytes of a file on this machine, which is mapped; None where they are something else."""
        tensor = self.tensors[self.codes]
        found = getattr(tensor, "raw", tensor)
        return found if getattr(getattr(found, "blob", None), "is_file", False) else None


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
