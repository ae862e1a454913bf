"""A guard for operators whose output size comes from data: ask before allocating.

``np.zeros`` of a hostile size may succeed (the system over-commits) and kill the process on first touch; so every
reference that allocates from a run-time shape calls :func:`checked_shape` first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ResourceLimit

DEFAULT_TENSOR_BYTES = 1 << 34


class _Current(threading.local):
    tensor_bytes: int = DEFAULT_TENSOR_BYTES


_current = _Current()


@contextmanager
def tensor_limit(limit: int | None) -> Iterator[None]:
    """Within the block, one tensor may take at most ``limit`` bytes in this thread."""
    before = _current.tensor_bytes
    _current.tensor_bytes = DEFAULT_TENSOR_BYTES if limit is None else limit
    try:
        yield
    finally:
        _current.tensor_bytes = before


def checked_shape(shape: Iterable[int], dtype: Any, what: str = "tensor") -> tuple[int, ...]:
    """``shape`` as a tuple of ints, or an error when a size is negative or the tensor would pass the limit."""
    sizes = tuple(int(s) for s in shape)
    if any(s < 0 for s in sizes):
        raise InvalidValue(f"{what}: negative size in shape {list(sizes)}")
    nbytes = math.prod(sizes) * np.dtype(dtype).itemsize
    if nbytes > _current.tensor_bytes:
        raise ResourceLimit("tensor_bytes", _current.tensor_bytes, nbytes, f"{what} of shape {list(sizes)}")
    return sizes
