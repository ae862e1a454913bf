"""Tensors from nothing, and from what others hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier import dlpack, dtypes
from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor, as_tensor, device_of, wrapped
from ranvier.tensor.expr import known
from ranvier.tensor.shapes import check_sizes, shape_of
from ranvier.tensor.types import DEFAULT_FLOAT, DEFAULT_INT, of_python


def _of(array: Any, dtype: DType, device: Any) -> Tensor:
    array.flags.writeable = False
    return wrapped(known(array, dtype, device_of(device)))


def _kind(dtype: Any, default: DType = DEFAULT_FLOAT) -> DType:
    return default if dtype is None else dtypes.of(dtype)


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Tensor:
    """A tensor of what has numbers. A tensor is itself where nothing is to change; arrays of others are copied."""
    if isinstance(obj, Tensor):
        same = (dtype is None or dtypes.of(dtype) is obj.dtype) and (
            device is None or device_of(device) == obj._expr.device
        )
        if same and not copy:
            return obj
        if copy is False:
            raise ValueError(f"a copy is needed to convert {obj.dtype} on {obj.device}")
    elif copy is False:
        raise ValueError("what is not a tensor is copied: others could change it")
    return Tensor(obj, dtype, device)


array = asarray


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Tensor:
    """A tensor over the memory of another library's array; nothing is copied unless ``copy`` says so."""
    if isinstance(x, Tensor):
        return x if device is None else x.to_device(device)
    found = dlpack.from_dlpack(x)
    if copy:
        found = found.copy()
    else:
        found = found.view()
    return _of(found, dtypes.of(found), device)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    kind = _kind(dtype)
    return _of(np.zeros(check_sizes(shape_of(shape)), kind.numpy), kind, device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    kind = _kind(dtype)
    return _of(np.ones(check_sizes(shape_of(shape)), kind.numpy), kind, device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Zeros: numbers that nobody has written are of no use where nothing can be written."""
    return zeros(shape, dtype=dtype, device=device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    number = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    kind = _kind(dtype, of_python(number))
    return _of(np.full(check_sizes(shape_of(shape)), number, kind.numpy), kind, device)


def zeros_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    own = as_tensor(x)
    return zeros(own.shape, dtype=_kind(dtype, own.dtype), device=own.device if device is None else device)


def ones_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    own = as_tensor(x)
    return ones(own.shape, dtype=_kind(dtype, own.dtype), device=own.device if device is None else device)


def empty_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    return zeros_like(x, dtype=dtype, device=device)


def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    own = as_tensor(x)
    place = own.device if device is None else device
    return full(own.shape, fill_value, dtype=_kind(dtype, own.dtype), device=place)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Numbers one step apart, from the first up to the second, which is left out."""
    begin, end = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(n, int) for n in (begin, end, step))
    kind = _kind(dtype, DEFAULT_INT if whole else DEFAULT_FLOAT)
    if step == 0:
        raise InvalidInput("the step cannot be 0")
    length = max(math.ceil((end - begin) / step), 0)
    if whole:
        found = begin + np.arange(len(range(begin, end, step)), dtype=np.int64) * step
    else:
        found = begin + np.arange(length) * step
    return _of(found.astype(kind.numpy), kind, device)


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Tensor:
    """As many numbers at equal distances between two."""
    complex_given = isinstance(start, complex) or isinstance(stop, complex)
    kind = _kind(dtype, DType.complex64 if complex_given else DEFAULT_FLOAT)
    return _of(np.linspace(start, stop, num, endpoint=endpoint).astype(kind.numpy), kind, device)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Tensor:
    """Ones on a diagonal, zeros elsewhere."""
    kind = _kind(dtype)
    return _of(np.eye(n_rows, n_cols, k, kind.numpy), kind, device)


def copy(x: Any, /) -> Tensor:
    """The same value under a name of its own; assignments to one do not show in the other."""
    return wrapped(as_tensor(x)._expr)


_OF_TENSORS = True
