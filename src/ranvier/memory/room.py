"""A look at what is left before much memory is taken, and a note of what was promised and is not in use yet.

Systems over-commit: a request beyond what there is succeeds, and the process is killed when it touches the memory.
So whoever wants much asks here first and gets an error that can be handled. What the system calls left does not know
of memory that was handed out and not yet written; two that ask at the same time would both be told yes. So an answer
is a :class:`Promise`: it counts against everybody who asks later, in any session of the process, until the memory has
been written (from then on the system counts it) or is given up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ranvier.devices import address_space_left, memory_left, resident_memory
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import OutOfMemory
from ranvier.memory import forking

LARGE = 64 << 20  # promises that are less than this together are not worth a look at the machine
NOTED_FROM = 8 << 20  # a request of less is not worth a note
_HEADROOM = 32 << 20  # what the interpreter and others need to go on
_NAMED = 3  # holders of promises that an error names


class Promise:
    """Bytes that somebody may take. Over when ``done`` is called, when the ``with`` block ends, or when nobody refers
    to it any more: so no way out of a function, an error's included, leaves one behind."""

    __slots__ = ("__weakref__", "_ledger", "nbytes")

    def __init__(self, ledger: Promises, nbytes: int) -> None:
        self._ledger = ledger
        self.nbytes = nbytes

    def lower(self, nbytes: int) -> None:
        """No more than ``nbytes`` of it are still to be written."""
        if nbytes < self.nbytes:
            self._ledger.change(self, nbytes if nbytes >= NOTED_FROM else 0)

    def done(self) -> None:
        if self.nbytes:
            self._ledger.change(self, 0)

    def __enter__(self) -> Promise:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()

    __del__ = done


class Promises:
    """Every promise of the process; thread-safe."""

    fork_order = 2  # allocators and trackers ask while they hold their own locks

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected in here may end a promise
        self._open: dict[int, tuple[int, str]] = {}  # bytes and part by the identity of the promise
        self._total = 0
        self._relief: list[tuple[int, Callable[[], Callable[[], object] | None]]] = []
        forking.watch(self)

    @property
    def total(self) -> int:
        """Bytes that are promised now."""
        return self._total

    def holders(self) -> dict[str, int]:
        """Bytes promised, by part, the most first."""
        found: dict[str, int] = {}
        for nbytes, part in list(self._open.values()):
            found[part] = found.get(part, 0) + nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def ask(self, nbytes: int, part: str, around: Surroundings | None = None) -> Promise:
        """A promise of that many bytes; OutOfMemory, which names ``part`` and the numbers, when that is more than is
        left. Before that happens, whoever keeps memory for later is asked to give it back."""
        made = Promise(self, 0)
        if nbytes < min(NOTED_FROM, LARGE) or self._enter(made, nbytes, part, around):
            return made
        for _, find in sorted(self._relief, key=lambda item: item[0]):
            release = find()
            if release is not None:
                release()
        with self._lock:
            if not self._enter(made, nbytes, part, around):
                raise self._refusal(nbytes, part, around)
        return made

    def on_pressure(self, release: Callable[[], object], order: int = 0) -> None:
        """Call a method before a request fails, as long as its object lives: those with the lowest ``order`` first.
        It is called in the middle of other work, so it must not wait for long, nor for locks of allocators."""
        known: Callable[[], Any] = weakref.WeakMethod(release)
        with self._lock:
            self._relief = [entry for entry in self._relief if entry[1]() is not None]
            self._relief.append((order, known))

    def change(self, promise: Promise, nbytes: int) -> None:
        with self._lock:
            entry = self._open.pop(id(promise), None)
            promise.nbytes = nbytes
            if entry is None:
                return
            self._total -= entry[0] - nbytes
            if nbytes:
                self._open[id(promise)] = nbytes, entry[1]

    def _enter(self, promise: Promise, nbytes: int, part: str, around: Surroundings | None) -> bool:
        """Note the promise, where there is room for it."""
        with self._lock:
            if nbytes + self._total >= LARGE:
                left, space = memory_left(around), address_space_left(around)
                if left is not None and nbytes + self._total + _HEADROOM > left:
                    return False
                if space is not None and nbytes + _HEADROOM > space:
                    return False
            promise.nbytes = nbytes
            self._open[id(promise)] = nbytes, part
            self._total += nbytes
        return True

    def _refusal(self, nbytes: int, part: str, around: Surroundings | None) -> OutOfMemory:
        held, left, space = resident_memory(around), memory_left(around), address_space_left(around)
        if space is not None and nbytes + _HEADROOM > space:
            text, free = f"{space:,} are left of the address space that the process may have", space
        else:
            free = left or 0
            text = f"{free:,} are left on this machine"
            if self._total:
                holders = list(self.holders().items())
                names = ", ".join(f"{size:,} to {who}" for who, size in holders[:_NAMED])
                more = " and others" if len(holders) > _NAMED else ""
                text += f" and {self._total:,} of those are promised ({names}{more})"
        return OutOfMemory(
            f"{part}: {nbytes:,} bytes asked for, {text} (the process holds {held:,})",
            part=part,
            requested=nbytes,
            in_use=held + self._total,
            capacity=held + free,
        )

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self, child: bool) -> None:
        if child:  # what the parent's threads were about to write, nobody writes here
            self._open.clear()
            self._total = 0
        self._lock.release()


promises = Promises()  # of this process
NOTHING = Promise(promises, 0)  # stands where nothing was asked for


def promised(nbytes: int, part: str, around: Surroundings | None = None) -> Promise:
    """Of the process's ledger: hold what it returns until the memory has been written."""
    return promises.ask(nbytes, part, around)


def check_room(nbytes: int, part: str, around: Surroundings | None = None) -> None:
    """As :func:`promised`, for memory that is written at once."""
    promises.ask(nbytes, part, around).done()
