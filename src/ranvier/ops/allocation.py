"""A guard for operators whose output size comes from data: ask before allocating.

``np.zeros`` of a hostile size may succeed (the system over-commits) and kill the process on first touch; so every
reference that allocates from a run-time shape calls :func:`checked_shape` first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ResourceLimit

DEFAULT_TENSOR_BYTES = 1 << 34
MAX_RANK = 64  # of a NumPy array


class _Current(threading.local):
    tensor_bytes: int = DEFAULT_TENSOR_BYTES


_current = _Current()


class tensor_limit:
    """Within the block, one tensor may take at most ``limit`` bytes in this thread."""

    __slots__ = ("_before", "_limit")

    def __init__(self, limit: int | None) -> None:
        self._limit = DEFAULT_TENSOR_BYTES if limit is None else limit

    def __enter__(self) -> None:
        self._before = _current.tensor_bytes
        _current.tensor_bytes = self._limit

    def __exit__(self, *error: object) -> None:
        _current.tensor_bytes = self._before


def checked_shape(shape: Iterable[int], dtype: Any, what: str = "tensor") -> tuple[int, ...]:
    """``shape`` as a tuple of ints, or an error when a size is negative or the tensor would pass the limit."""
    sizes = tuple(int(s) for s in shape)
    if len(sizes) > MAX_RANK:
        raise InvalidValue(f"{what}: {len(sizes)} dimensions; at most {MAX_RANK} are possible")
    if any(s < 0 for s in sizes):
        raise InvalidValue(f"{what}: negative size in shape {list(sizes)}")
    # an empty tensor counts by its other sizes: bodies make positions along each axis
    nbytes = math.prod(s or 1 for s in sizes) * np.dtype(dtype).itemsize
    if nbytes > _current.tensor_bytes:
        raise ResourceLimit("tensor_bytes", _current.tensor_bytes, nbytes, f"{what} of shape {list(sizes)}")
    return sizes


def may_outgrow(*operands: Any) -> bool:
    """Could a result as large as the product of the operands pass the limit? A quick look before a thorough one."""
    return math.prod([x.size for x in operands if isinstance(x, np.ndarray)]) * 16 > _current.tensor_bytes


def checked_text(strings: np.ndarray[Any, Any], what: str) -> None:
    """ResourceLimit when the characters of a string tensor pass the limit for one tensor."""
    length = sum(map(len, strings.ravel().tolist()))
    if length > _current.tensor_bytes:
        raise ResourceLimit("tensor_bytes", _current.tensor_bytes, length, f"characters of {what}")
