"""Weights are packed a part at a time, parts by as many threads as there are cores: NumPy lets others run meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ranvier.devices import usable_cores

_MUCH = 1 << 22  # bytes that are worth starting threads for


def in_parts(work: Callable[[int, int], None], count: int, each: int, nbytes: int) -> None:
    """``work(first, last)`` for all of ``count``, ``each`` at a time; ``nbytes``: of the whole."""
    starts = range(0, count, each)
    threads = min(len(starts), usable_cores()) if nbytes >= _MUCH else 1
    if threads <= 1:
        for first in starts:
            work(first, min(count, first + each))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="ranvier-pack") as pool:
        list(pool.map(lambda first: work(first, min(count, first + each)), starts))
