"""A guard for operators whose output size comes from data: ask before allocating.

``np.zeros`` of a hostile size may succeed (the system over-commits) and kill the process on first touch; so every
reference that allocates from a run-time shape calls :func:`checked_shape` first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ResourceLimit
from ranvier.memory import NOTED_FROM, NOTHING, Promise, promised
from ranvier.varying import whole

DEFAULT_TENSOR_BYTES = 1 << 34
MAX_RANK = 64  # of a NumPy array


class _Current(threading.local):
    tensor_bytes: int = DEFAULT_TENSOR_BYTES
    promise: Promise = NOTHING  # of the tensor that was asked for last: whoever asks again has written it by then


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
        _current.promise = NOTHING


def current_limit() -> int:
    """The limit of this thread, for others that help it."""
    return _current.tensor_bytes


def checked_shape(shape: Iterable[int], dtype: Any, what: str = "tensor") -> tuple[int, ...]:
    """``shape`` as a tuple of ints, or an error when a size is negative or the tensor would pass the limit."""
    sizes = tuple([whole(s) for s in shape])
    if len(sizes) > MAX_RANK:
        raise InvalidValue(f"{what}: {len(sizes)} dimensions; at most {MAX_RANK} are possible")
    if sizes and min(sizes) < 0:
        raise InvalidValue(f"{what}: negative size in shape {list(sizes)}")
    # an empty tensor counts by its other sizes: bodies make positions along each axis
    nbytes = math.prod([s or 1 for s in sizes]) * np.dtype(dtype).itemsize
    if nbytes > _current.tensor_bytes:
        raise ResourceLimit("tensor_bytes", _current.tensor_bytes, nbytes, f"{what} of shape {list(sizes)}")
    if nbytes >= NOTED_FROM:
        _current.promise = NOTHING
        _current.promise = promised(nbytes, what)
    return sizes


def may_outgrow(*operands: Any) -> bool:
    """Could a result as large as the product of the operands pass the limit? A quick look before a thorough one."""
    return math.prod([x.size for x in operands if isinstance(x, np.ndarray)]) * 16 > _current.tensor_bytes


def check_broadcast(operands: Sequence[Any], what: str) -> None:
    """Before an elementwise body runs: small operands may broadcast to an immense result, and strings add up."""
    product, text = 16, False
    for x in operands:  # on the way of every small node: a quick look first
        if type(x) is np.ndarray:
            product *= x.size
            text = text or x.dtype.char == "O"
    if product <= _current.tensor_bytes and not text:
        return
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    try:
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
    except ValueError:
        return  # the body says what is wrong
    checked_shape(shape, max((x.dtype for x in arrays), key=lambda d: d.itemsize), what)
    if text:
        copies = [(x, math.prod(shape) // max(x.size, 1)) for x in arrays if x.dtype == object]
        _check_characters(sum(_characters(x) * times for x, times in copies), what)


def check_result(result: Any, what: str) -> None:
    """After a body ran: what it made is within the limit, whatever its operands were."""
    if isinstance(result, np.ndarray):
        if result.nbytes > _current.tensor_bytes:
            raise ResourceLimit(
                "tensor_bytes", _current.tensor_bytes, result.nbytes, f"{what} of shape {list(result.shape)}"
            )
        if result.dtype == object:
            _check_characters(_characters(result), what)


def held_bytes(array: np.ndarray[Any, Any]) -> int:
    """Memory of a tensor, with the characters of its strings."""
    return array.nbytes + (_characters(array) if array.dtype == object else 0)


def _characters(strings: np.ndarray[Any, Any]) -> int:
    return sum([len(s) for s in strings.ravel().tolist() if isinstance(s, str | bytes)])


def _check_characters(count: int, what: str) -> None:
    if count > _current.tensor_bytes:
        raise ResourceLimit("tensor_bytes", _current.tensor_bytes, count, f"characters of {what}")
