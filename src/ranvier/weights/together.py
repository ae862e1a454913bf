"""Work done several at a time, which ends early when one part of it fails or nobody waits for it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_POLL = 0.05
AT_ONCE = 4  # requests to one server


class Stop:
    """Set when the result of some work is wanted no more; ``outer`` is that of the work it is a part of, and
    ``forgotten`` tells where nobody is left to set it."""

    def __init__(self, outer: Stop | None = None, forgotten: Callable[[], bool] | None = None) -> None:
        self._event, self._outer, self._forgotten = threading.Event(), outer, forgotten

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        if self._event.is_set() or (self._outer is not None and self._outer.is_set()):
            return True
        return self._forgotten is not None and self._forgotten()

    def sleep(self, seconds: float) -> None:
        """Wait that long, or until it is set."""
        until = time.monotonic() + seconds
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            self._event.wait(left if self._outer is None else min(left, _POLL))


def together(work: Callable[[T], R], items: Iterable[T], most: int, stop: Stop) -> list[R]:
    """The results in the order of the items, at most so many in work at a time.

    The first error is raised at once, as is an interruption by the user: ``stop`` is set for those still in work, and
    they are not waited for, because one may sit in a read that only its timeout ends.
    """
    waiting = list(items)
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    left, lock, whole = iter(range(len(waiting))), threading.Lock(), False

    def worker() -> None:
        # one after another: a checkpoint may have a hundred thousand tensors, and a future for each takes longer than
        # most of them do
        while True:
            with lock:
                k = next(left, None)
            if k is None or over.is_set():
                return
            try:
                found[k] = work(waiting[k])
            except BaseException as error:
                failed[k] = error
                raise

    over, count = threading.Event(), max(1, min(most, len(waiting)))
    pool = ThreadPoolExecutor(count)
    try:
        wait([pool.submit(worker) for _ in range(count)], return_when=FIRST_EXCEPTION)
        if failed:
            raise failed[min(failed)]
        whole = True
        return [found[k] for k in range(len(waiting))]
    finally:
        if not whole:
            over.set()
            stop.set()
        pool.shutdown(wait=whole, cancel_futures=True)


def apart(work: Callable[[], R], go_on: Callable[[], None]) -> R:
    """The result of what a library does that hears nothing while it waits for a server. ``go_on``, which is called
    again and again, raises where nobody wants it any more: the work is left alone then, in a thread that does not keep
    the program from ending."""
    found: list[R] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def worker() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    threading.Thread(target=worker, daemon=True).start()
    while not over.wait(_POLL):
        go_on()
    if failed:
        raise failed.pop()
    return found.pop()
