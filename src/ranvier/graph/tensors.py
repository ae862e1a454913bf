"""Constants of a graph: tensors that may still lie in a file.

A :class:`ConstTensor` knows its type at once and its data on demand, so that a graph of many gigabytes can be
loaded, printed and rewritten without touching the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.graph.types import TensorType


class ConstTensor:
    """A tensor by type, with its data made once on first need by ``load``."""

    __slots__ = ("_array", "_drop", "_load", "_raw", "source", "type")

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        load: Callable[[], np.ndarray[Any, Any]],
        source: str = "memory",
        drop: Callable[[], None] | None = None,
    ) -> None:
        self.type = TensorType(dtype, shape)
        self.source = source  # where the bytes come from, for people
        self._load: Callable[[], np.ndarray[Any, Any]] | None = load
        self._drop = drop  # gives back the memory of data that can be read again
        self._raw: np.ndarray[Any, Any] | None = None
        self._array: np.ndarray[Any, Any] | None = None

    @classmethod
    def of(cls, array: Any) -> ConstTensor:
        """A constant around an array (not copied; made read-only for all who get it from here)."""
        array = np.asarray(array)
        tensor = cls.__new__(cls)
        tensor.type = TensorType(dtypes.of(array), array.shape)
        tensor.source = "memory"
        tensor._load = tensor._drop = None
        tensor._raw = tensor._array = _frozen(array)
        return tensor

    @property
    def dtype(self) -> DType:
        assert self.type.dtype is not None
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape  # type: ignore[return-value]

    @property
    def size(self) -> int:
        return self.type.size or 0

    @property
    def nbytes(self) -> int:
        return self.type.nbytes or 0

    @property
    def is_loaded(self) -> bool:
        return self._raw is not None

    def numpy(self) -> np.ndarray[Any, Any]:
        """The data, read-only; loaded on the first call."""
        array = self._array
        if array is None:
            array = self.raw()
            if not array.flags.aligned:
                array = _frozen(array.copy())  # BLAS would copy it for every call
            self._array = array
        return array

    def raw(self) -> np.ndarray[Any, Any]:
        """The data as it lies in its file, perhaps at an address that does not suit its type: for those who only
        make something else of it. The same array whenever asked."""
        array = self._raw
        if array is None:
            load = self._load
            assert load is not None
            array = _frozen(load())
            if array.shape != self.shape or dtypes.of(array) is not self.dtype:
                from ranvier.errors import WeightError

                got = TensorType(dtypes.of(array), array.shape)
                raise WeightError(f"{self.source}: expected {self.type}, got {got}")
            self._raw = array
            self._load = None
        return array

    def release(self) -> None:
        """Nobody is expected to look at the data soon: where it is a part of a file, its memory is given back."""
        if self._drop is not None:
            self._drop()

    def __repr__(self) -> str:
        state = "loaded" if self.is_loaded else f"in {self.source}"
        return f"<ConstTensor {self.type}, {state}>"


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
