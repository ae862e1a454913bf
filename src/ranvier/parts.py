"""Weights are read and packed a part at a time, parts by as many threads as there are cores: NumPy lets others run
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ranvier.devices import usable_cores

T = TypeVar("T")
R = TypeVar("R")

_MUCH = 1 << 22  # bytes that are worth starting threads for


def in_parts(work: Callable[[int, int], None], count: int, each: int, nbytes: int) -> None:
    """``work(first, last)`` for all of ``count``, ``each`` at a time; ``nbytes``: of the whole."""
    for _ in side_by_side(lambda first: work(first, min(count, first + each)), range(0, count, each), nbytes):
        pass


def side_by_side(work: Callable[[T], R], items: Sequence[T], nbytes: int) -> Iterator[R]:
    """What ``work`` makes of each, in their order."""
    threads = min(len(items), usable_cores()) if nbytes >= _MUCH else 1
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="ranvier-parts") as pool:
        yield from pool.map(work, items)
