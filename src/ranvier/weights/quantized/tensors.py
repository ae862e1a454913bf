"""Tensors of a checkpoint by name, as the layouts of quantized layers read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import WeightError
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Rows
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
_SETTINGS = ("quantization_config", "compression_config")  # in config.json; the second is of earlier releases


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


def settings_in(config: Config) -> Config:
    """Settings of quantization, also where all of ``config.json`` is given, which has them under a name."""
    if not isinstance(config, Mapping):
        raise WeightError(f"settings of quantization are a mapping, not {type(config).__name__}")
    inner = next((config[name] for name in _SETTINGS if name in config), None)
    return inner if isinstance(inner, Mapping) and not method_of(config) else config


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


def factors(tensors: Tensors, name: str) -> Array:
    """Scales, which are floats."""
    found = numbers(tensors, name)
    if not of(found).is_float:
        raise WeightError(f"{name!r} holds no scales: {found.dtype}{list(found.shape)}")
    return found


def one_factor(layer: str, tensors: Tensors, part: str) -> np.float32:
    """The scale that all scales of a layer have in common."""
    found = factors(tensors, f"{layer}.{part}")
    check(layer, (found.size,), (1,))
    return np.float32(found.reshape(()))


def positions(layer: str, tensors: Tensors, part: str, inputs: int, groups: int) -> Array:
    """The group of each input."""
    found = numbers(tensors, f"{layer}.{part}")
    if found.dtype.kind not in "iu" or found.shape != (inputs,):
        raise WeightError(
            f"layer {layer!r}: {part} has the groups of {inputs} inputs, got {found.dtype}{list(found.shape)}"
        )
    if found.min(initial=0) < 0 or found.max(initial=0) >= groups:
        raise WeightError(f"layer {layer!r}: {part} names groups that are not there")
    return found.astype(np.int64)


def group_size(layer: str, columns: int, groups: int, told: Any = None) -> int:
    """How many weights of a row share one of its scales: as many as settings tell, where that makes so many groups, or
    else equal parts. A last group that is smaller cannot be told from the number of groups alone."""
    size = int(told or 0)
    if size > 0 and -(-columns // size) == groups:
        return size
    if groups < 1 or columns % groups:
        raise WeightError(f"layer {layer!r}: {groups} groups of {told} weights do not make up a row of {columns}")
    return max(1, columns // groups)


def is_exponents(scales: Array) -> bool:
    """Whether scales are powers of two that are kept as a byte each, with or without a type of their own."""
    return of(scales) in (DType.uint8, DType.float8_e8m0fnu)


def powers_of_two(exponents: Array) -> Array:
    """Scales that are kept as a byte each: their exponent, raised by 127."""
    return np.ascontiguousarray(exponents).view(DType.float8_e8m0fnu.numpy).astype(np.float32)


def check(layer: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != tuple(expected):
        raise WeightError(f"layer {layer!r}: its tensors do not fit: {list(got)} where {list(expected)} was expected")
