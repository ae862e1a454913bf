"""Constants of a graph: tensors that may still lie in a file.

A :class:`ConstTensor` knows its type at once and its data on demand, so that a graph of many gigabytes can be
loaded, printed and rewritten without touching the weights.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.graph.types import TensorType
from ranvier.memory.trim import gone

Array = np.ndarray[Any, Any]


class ConstTensor:
    """A tensor by type, with its data made by ``load``: once, on first need, or (``again``) whenever it is wanted."""

    __slots__ = ("__weakref__", "_array", "_drop", "_load", "_raw", "again", "source", "type")

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        load: Callable[[], Array],
        source: str = "memory",
        drop: Callable[[], None] | None = None,
        again: bool = False,
    ) -> None:
        self.type = TensorType(dtype, shape)
        self.source = source  # where the bytes come from, for people
        self._load: Callable[[], Array] | None = load
        self._drop = drop  # gives back the memory of data that can be read again
        self.again = again
        self._raw: Array | None = None
        self._array: Array | None = None

    @classmethod
    def of(cls, array: Any) -> ConstTensor:
        """A constant around an array (not copied; made read-only for all who get it from here)."""
        array = np.asarray(array)
        tensor = cls.__new__(cls)
        tensor.type = TensorType(dtypes.of(array), array.shape)
        tensor.source = "memory"
        tensor._load = tensor._drop = None
        tensor.again = False
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

    def numpy(self) -> Array:
        """The data, read-only; loaded on the first call."""
        array = self._array
        if array is None:
            array = self.raw()
            if not array.flags.aligned:
                array = _frozen(array.copy())  # BLAS would copy it for every call
            if not self.again:
                self._array = array
        return array

    def raw(self) -> Array:
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
            if not self.again:
                self._raw = array
                self._load = None
        return array

    @property
    def origin(self) -> object:
        """The same object whenever it is asked for, also where the data is made again: what was made of the data is
        known by it."""
        return self if self.again else self.raw()

    def release(self) -> None:
        """Nobody is expected to look at the data soon: where it is a part of a file, or can be made again, its memory
        is given back."""
        if self._drop is not None:
            self._drop()

    def __repr__(self) -> str:
        state = "loaded" if self.is_loaded else f"in {self.source}"
        return f"<ConstTensor {self.type}, {state}>"


_ONE_ZERO = bytes(16)  # an element of any type, and nobody can write to it


def stand_in(tensor: ConstTensor) -> Array:
    """An array of the same type and shape without the data, for those who do not read it."""
    dtype = tensor.dtype.numpy
    if dtype.hasobject:
        return np.broadcast_to(np.zeros((), dtype), tensor.shape)
    return np.ndarray(tensor.shape, dtype, _ONE_ZERO, 0, (0,) * len(tensor.shape))


class Same:
    """An object, such as an array, as part of a key: equal to itself only, and kept alive, so that no other can come to
    stand in its place in memory and be taken for it."""

    __slots__ = ("_object",)

    def __init__(self, found: object) -> None:
        self._object = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


def remade(arrays: Sequence[Array], make: Callable[[], Sequence[Array]], source: str) -> list[ConstTensor]:
    """Constants that come from one place together and can be made again. Each stays until it is released; from then on
    it is there as long as somebody has it, or until those of another place are made again."""
    of = _Remade(arrays, make, source)
    return [
        ConstTensor(
            *(dtypes.of(x), x.shape, functools.partial(of.get, k), source),
            drop=functools.partial(of.forget, k),
            again=True,
        )
        for k, x in enumerate(arrays)
    ]


class _Remade:
    _latest: ref[_Remade] | None = None  # made again: whoever wants one of its arrays wants the others next
    _changing = threading.Lock()  # which is the latest

    def __init__(self, arrays: Sequence[Array], make: Callable[[], Sequence[Array]], source: str) -> None:
        self._make, self._source = make, source
        self._making = threading.Lock()  # of its own: making may take long, and compute what others make
        self._keep(arrays)

    def _keep(self, arrays: Sequence[Array]) -> list[Array]:
        own = list(map(_frozen, arrays))
        self._seen = [ref(x) for x in own]
        self._kept = dict(enumerate(own))  # of which any thread takes out what is not needed
        return own

    def get(self, k: int) -> Array:
        found = self._seen[k]()
        if found is None:
            with self._making:
                found = self._seen[k]()
                if found is None:
                    found = self._made_again()[k]
        return found

    def _made_again(self) -> list[Array]:
        still, made = [each() for each in self._seen], self._make()
        if len(made) != len(still):
            from ranvier.errors import WeightError

            raise WeightError(f"{self._source}: expected {len(still)} tensors, got {len(made)}")
        own = self._keep([new if old is None else old for old, new in zip(still, made)])
        with self._changing:
            before = None if _Remade._latest is None else _Remade._latest()
            _Remade._latest = ref(self)
        if before is not None and before is not self:
            before._kept = {}
        return own

    def forget(self, k: int) -> None:
        found = self._kept.pop(k, None)
        if found is not None:
            size = found.nbytes
            del found
            gone(size)


def _frozen(array: Array) -> Array:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
