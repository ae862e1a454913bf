"""Random values for the inputs of a model: of the declared type, and of a kind that models can work with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.graph.types import Dim, MapType, OptionalType, SequenceType, Symbol, TensorType, Type

Array = np.ndarray[Any, Any]

_LENGTH = re.compile(r"(^|_|\b)(len|lens|length|lengths|size|sizes)(_|\b|$)", re.IGNORECASE)
_MASK = re.compile(r"mask", re.IGNORECASE)
_KIND_OF_TOKEN = re.compile(r"token_type|segment", re.IGNORECASE)
_BATCH = re.compile(r"^(bs|batch.*)$", re.IGNORECASE)
_SOUND = re.compile(r"sample|wave|audio|signal|speech|pcm", re.IGNORECASE)
_WORDS = ("the", "nerve", "signal", "leaps", "from", "node", "to", "node")
_INTEGERS_BELOW = 10  # small enough to be an index into any vocabulary
_PICTURE, _SECOND, _STEPS = 224, 16_000, 16  # sizes that networks for pictures, sound and sequences can work with


def default_size(dim: Dim, axis: int, declared: TensorType, name: str) -> int:
    """A size for a dimension of the input ``name`` that nobody gave one.

    1 for a batch, the side of a usual picture, a second of sound, a short sequence elsewhere.
    """
    if isinstance(dim, int):
        return dim
    rank = declared.rank or 0
    floats = declared.dtype is not None and declared.dtype.is_float
    label = dim.name if isinstance(dim, Symbol) else ""
    if axis == 0 or _BATCH.match(label):
        size = 1
    elif floats and rank <= 2 and (_SOUND.search(label) or _SOUND.search(name)):
        size = _SECOND
    else:
        size = _PICTURE if rank == 4 and floats else _STEPS
    if isinstance(dim, Symbol):
        size = max(size, dim.lo) if dim.hi is None else min(max(size, dim.lo), dim.hi)
    return size


class RandomSource:
    """Makes values one after another from one seed; sizes of symbolic dims are chosen once and kept in ``sizes``."""

    def __init__(self, seed: int, sizes: Mapping[str, int]) -> None:
        self._rng = np.random.default_rng(seed)
        self.sizes = dict(sizes)
        self.chosen: dict[str, int] = {}  # those that were chosen here rather than given

    def value(self, name: str, declared: Type | None, shape: tuple[int, ...] | None = None) -> Any:
        """A value for the input ``name``; ``shape`` overrides the declared one."""
        if isinstance(declared, SequenceType):
            return [self.value(name, declared.elem, shape) for _ in range(2)]
        if isinstance(declared, OptionalType):
            return self.value(name, declared.elem, shape)
        if isinstance(declared, MapType):
            keys: list[Any] = list(dict.fromkeys(_WORDS)) if declared.key is DType.string else list(range(4))
            inner = declared.value
            return {key: self.value(name, inner, () if inner is None else None) for key in keys}
        if not isinstance(declared, TensorType):
            raise InvalidInput(f"input {name!r}: its type is not known; give it from a file")
        if shape is None and declared.shape is None:
            raise InvalidInput(f"input {name!r} has no declared rank; give its shape as {name}=random:2x3")
        return self._tensor(
            name, declared.dtype or DType.float32, self.shape(name, declared) if shape is None else shape
        )

    def shape(self, name: str, declared: TensorType) -> tuple[int, ...]:
        """The shape a value for the input ``name`` gets."""
        return tuple(self._size(dim, axis, declared, name) for axis, dim in enumerate(declared.shape or ()))

    def _size(self, dim: Dim, axis: int, declared: TensorType, name: str) -> int:
        if not isinstance(dim, Symbol):
            return default_size(dim, axis, declared, name)
        if dim.name not in self.sizes:
            total = self._sum(dim.name)
            self.sizes[dim.name] = default_size(dim, axis, declared, name) if total is None else total
            self.chosen[dim.name] = self.sizes[dim.name]
        return self.sizes[dim.name]

    def _sum(self, label: str) -> int | None:
        """The size of a dimension that is named as a sum of others, ``past_length + 1``, as exporters do."""
        terms = [term.strip() for term in label.split("+")]
        sizes = [int(term) if term.isdigit() else self.sizes.get(term) for term in terms]
        return sum(s for s in sizes if s is not None) if len(terms) > 1 and None not in sizes else None

    def _tensor(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
        rng = self._rng
        if dtype is DType.string:
            words = np.empty(shape, dtype=object)
            words.reshape(-1)[:] = [_WORDS[k] for k in rng.integers(0, len(_WORDS), words.size)]
            return words
        if dtype is DType.bool:
            return np.asarray(rng.random(shape) < 0.5)
        if dtype.is_integer:
            return self._integers(name, dtype, shape)
        if dtype.is_complex:
            return np.asarray(rng.random(shape) + 1j * rng.random(shape)).astype(dtype.numpy)
        return np.asarray(rng.random(shape)).astype(dtype.numpy)

    def _integers(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Small and never negative; lengths as long as the longest dimension chosen so far, masks all on."""
        if _KIND_OF_TOKEN.search(name):
            return np.zeros(shape, dtype.numpy)
        if _MASK.search(name):
            return np.ones(shape, dtype.numpy)
        if _LENGTH.search(name):
            return np.full(shape, max([1, *self.sizes.values()]), dtype.numpy)
        if dtype in (DType.uint8, DType.int8) and len(shape) > 1:  # bytes of a picture, quantized numbers
            low, high = (0, 256) if dtype is DType.uint8 else (-128, 128)
            return self._rng.integers(low, high, shape).astype(dtype.numpy)
        top = min(_INTEGERS_BELOW, 1 << (dtype.bits - 1))
        low = 1 if not shape else 0
        return np.asarray(self._rng.integers(low, max(top, low + 1), shape)).astype(dtype.numpy)
