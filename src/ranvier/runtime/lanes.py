"""Threads that help a run: calls that work at the same time, one of them in the caller's own thread.

Helpers wait for work in between, and there are never more of them than a session may use. A call that finds none free
runs in the caller's thread after the first, so nothing ever waits for a helper to become free.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ranvier.devices import usable_cores

Item = TypeVar("Item")
Call = Callable[["Halt"], None]


class Halt:
    """Told to one of several calls: must it end because one that comes before it has failed?

    Those before it go on, so that the error a caller gets is the one that it would get without helpers.
    """

    __slots__ = ("_failed", "_lane")

    def __init__(self, failed: list[bool], lane: int) -> None:
        self._failed, self._lane = failed, lane

    def until(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, up to the moment at which the rest is of no use."""
        for item in items:
            if any(self._failed[: self._lane]):
                return
            yield item


class _Helper:
    """One thread; ``start`` and ``wait`` in turns."""

    __slots__ = ("_done", "_go", "_task", "thread")

    def __init__(self, number: int) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._task: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._serve, name=f"ranvier-lane-{number}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            task, self._task = self._task, None
            if task is None:
                return
            task()
            del task  # what it worked on is not kept until the next one
            self._done.release()

    def start(self, task: Callable[[], None] | None) -> None:
        """Begin a task, which does not raise; None sends the thread home."""
        self._task = task
        self._go.release()

    def wait(self) -> None:
        self._done.acquire()


class Helpers:
    """The helping threads of a session that may use ``threads`` in all, started when first wanted. Thread-safe."""

    def __init__(self, threads: int | None) -> None:
        self._most = (threads or usable_cores()) - 1
        self._closed = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self._count = 0

    def run(self, calls: Sequence[Call]) -> None:
        """Make all calls, the first in this thread, and wait for all of them; raises what the first that failed did."""
        failed = [False] * len(calls)
        errors: dict[int, BaseException] = {}

        def make(lane: int) -> None:
            try:
                calls[lane](Halt(failed, lane))
            except BaseException as error:
                failed[lane] = True
                errors[lane] = error

        taken: list[_Helper] = []
        own = [0]
        for lane in range(1, len(calls)):
            helper = self._take()
            if helper is None:
                own.append(lane)
                continue
            helper.start(_in_context(make, lane))
            taken.append(helper)
        try:
            for lane in own:
                make(lane)
        finally:
            interrupted = self._wait(taken, failed)
        for problem in (interrupted, *(error for _, error in sorted(errors.items()))):
            if problem is not None:
                raise problem

    def _wait(self, taken: Sequence[_Helper], failed: list[bool]) -> BaseException | None:
        """Until all have ended, whatever interrupts: they use memory that the caller gives to others next."""
        interrupted: BaseException | None = None
        for helper in taken:
            while True:
                try:
                    helper.wait()
                    break
                except BaseException as error:
                    interrupted = error
                    failed[0] = True
            self._give(helper)
        return interrupted

    def _take(self) -> _Helper | None:
        if os.getpid() != self._process:
            self._begin_anew()  # the threads stayed with the process that this one was forked from
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._closed or self._count >= self._most:
                return None
            self._count += 1
            number = self._count
        try:
            return _Helper(number)
        except RuntimeError:  # the system has no more threads to give
            with self._lock:
                self._count -= 1
            return None

    def _give(self, helper: _Helper) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(helper)
                return
        self._end([helper])

    def close(self) -> None:
        """Send the threads home. Runs in progress finish first by themselves, and take theirs along."""
        if os.getpid() != self._process:
            self._begin_anew()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._end(idle)

    @staticmethod
    def _end(helpers: Sequence[_Helper]) -> None:
        for helper in helpers:
            helper.start(None)
        for helper in helpers:
            if helper.thread is not threading.current_thread():
                helper.thread.join()


def _in_context(make: Callable[[int], None], lane: int) -> Callable[[], None]:
    """The call with the caller's context variables, which a thread does not inherit."""
    context = contextvars.copy_context()
    return lambda: context.run(make, lane)


__all__ = ["Halt", "Helpers"]
