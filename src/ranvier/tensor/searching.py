"""Sorting, and what depends on the numbers themselves: places of what is not zero, different values, ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.expr import results, spec
from ranvier.tensor.host import hosted, hosted_several
from ranvier.tensor.manipulate import astype, reshape
from ranvier.tensor.shapes import axes_of
from ranvier.tensor.types import COMPLEX


def top_k(x: Any, k: int, /, *, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The ``k`` largest (or smallest) along an axis, in order, and their places; of equals the first comes first."""
    own = as_tensor(x)
    (at,) = axes_of(axis, own.ndim)
    if not 0 <= k <= own.shape[at]:
        raise InvalidInput(f"{k} elements cannot be chosen of {own.shape[at]}")
    kind = own.dtype
    if kind in COMPLEX:
        raise DTypeMismatch("complex numbers have no order")
    work = astype(own, DType.uint8) if kind is DType.bool else own
    shape = (*own.shape[:at], k, *own.shape[at + 1 :])
    attrs = (("axis", at), ("largest", int(largest)), ("sorted", 1))
    of, types = spec("TopK", attrs, ((1, (k,)),), 2), ((work.dtype, shape), (DType.int64, shape))
    values, places = (wrapped(each) for each in results(of, (work._expr,), types, work._expr.device))
    return astype(values, kind), places


def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The elements in order along an axis."""
    own = as_tensor(x)
    if not own.ndim:
        return own
    return top_k(own, own.shape[axes_of(axis, own.ndim)[0]], axis=axis, largest=descending)[0]


def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The places of the elements in their order along an axis."""
    own = as_tensor(x)
    if not own.ndim:
        return Tensor(np.zeros((), np.int64))
    return top_k(own, own.shape[axes_of(axis, own.ndim)[0]], axis=axis, largest=descending)[1]


def nonzero(x: Any, /) -> tuple[Tensor, ...]:
    """The places of what is not zero, axis by axis."""
    own = as_tensor(x)
    if not own.ndim:
        raise InvalidInput("a tensor without dimensions has no places")
    return hosted_several(np.nonzero, own)


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Where elements of the second would go in the first, which is in order."""
    x, y = as_tensor(x1), as_tensor(x2)
    order = None if sorter is None else as_tensor(sorter).numpy()
    return hosted(np.searchsorted, x, y, side=side, sorter=order)


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Tensor:
    """Whether elements of the first are among those of the second."""
    first, second = as_tensor(x1), as_tensor(x2)
    return hosted(np.isin, first, second, invert=invert)


class UniqueAll(NamedTuple):
    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    values: Tensor
    inverse_indices: Tensor


def unique_all(x: Any, /) -> UniqueAll:
    """Different values in order, where each comes first, which one each element is, and how often each comes."""
    own = as_tensor(x)
    found = hosted_several(np.unique, own, return_index=True, return_inverse=True, return_counts=True, equal_nan=False)
    values, indices, inverse, counts = found
    return UniqueAll(values, indices, reshape(inverse, own.shape), counts)


def unique_counts(x: Any, /) -> UniqueCounts:
    found = unique_all(x)
    return UniqueCounts(found.values, found.counts)


def unique_inverse(x: Any, /) -> UniqueInverse:
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Any, /) -> Tensor:
    return unique_all(x).values


_OF_TENSORS = True
