"""What a caller may say about one run: a time limit, a flag to stop it, a memory limit. Checked between nodes."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ranvier.config import Limits
from ranvier.errors import Cancelled, DeadlineExceeded, InvalidConfig, NotSupported, nearest
from ranvier.memory import Budget
from ranvier.ops.allocation import held_bytes
from ranvier.ops.pulse import interruptible

SHRINK_ENTRY = "memory.enable_memory_arena_shrinkage"  # give back, after the run, arenas that no run uses
UNSYNCHRONIZED_ENTRY = "disable_synchronize_execution_providers"  # results bound to a GPU may not be there yet
RUN_ENTRIES = (SHRINK_ENTRY, UNSYNCHRONIZED_ENTRY)


class RunOptions:
    """Options of one run.

    ``timeout`` is in seconds from the start of the run. Setting ``terminate`` to True, from any thread, stops runs
    that use these options at the next node. The other names are ONNX Runtime's; they are kept for scripts that set
    them.
    """

    __slots__ = (
        "_entries",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "only_execute_path_to_fetches",
        "tag",
        "terminate",
        "timeout",
    )

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise InvalidConfig(f"RunOptions: timeout must be a positive number of seconds, got {timeout!r}")
        self.timeout = timeout
        self.terminate = False
        self.tag = ""
        self.logid = ""
        self.log_severity_level = -1
        self.log_verbosity_level = 0
        self.only_execute_path_to_fetches = False
        self._entries: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            known = [slot for slot in self.__slots__ if not slot.startswith("_")]
            raise InvalidConfig(f"RunOptions: unknown option {name!r}{nearest(name, known)}") from None

    def add_run_config_entry(self, key: str, value: str) -> None:
        """One of ONNX Runtime's string options of a run."""
        if key not in RUN_ENTRIES:
            raise InvalidConfig(f"RunOptions: run config entry {key!r} is not supported{nearest(key, RUN_ENTRIES)}")
        self._entries[key] = str(value)

    def get_run_config_entry(self, key: str) -> str:
        """What was set for ``key``, or an empty text."""
        return self._entries.get(key, "")

    def add_active_adapter(self, adapter: Any) -> None:
        raise NotSupported("RunOptions: LoRA adapters are not supported; merge them into the model")


class RunControl:
    """The limits of one run in progress; ``check`` raises when one is reached.

    ``budget`` is what it shares with other runs of its session. ``close`` gives back what the run still counts there:
    from then on its results are the caller's.
    """

    __slots__ = ("_deadline", "_held", "_options", "_reserved", "_seconds", "budget", "ends_early", "watched")

    def __init__(self, options: RunOptions | None, limits: Limits, budget: Budget | None = None) -> None:
        self._options = options
        seconds = [s for s in (options.timeout if options else None, limits.run_seconds) if s is not None]
        self._seconds = min(seconds) if seconds else None
        self._deadline = time.monotonic() + self._seconds if self._seconds is not None else None
        if budget is None and limits.memory_bytes is not None:
            budget = Budget(limits.memory_bytes)
        self.budget = budget
        self._reserved: dict[str, int] = {}
        self._held: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self.ends_early = options is not None or self._deadline is not None  # may ``check`` raise?
        self.watched = self.ends_early or budget is not None

    def again(self) -> RunControl:
        """For another attempt at the same run: the time goes on, the memory starts anew."""
        made = copy.copy(self)
        made._reserved, made._held = {}, {}
        return made

    def check(self, where: str) -> None:
        if self._options is not None and self._options.terminate:
            raise Cancelled(f"the run was cancelled at {where}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineExceeded(f"the run passed its limit of {self._seconds:g} s at {where}")

    def reserve(self, nbytes: int, where: str) -> None:
        """Count bytes for the whole run, or fewer of them; MemoryLimit when they pass the limit."""
        if self.budget is None or not nbytes:
            return
        if nbytes > 0:
            self.budget.add(nbytes, where)
        else:
            self.budget.remove(-nbytes, where)
        self._reserved[where] = self._reserved.get(where, 0) + nbytes

    def hold(self, result: Any, where: str) -> None:
        """Count a tensor, or the tensors of a sequence, for as long as anybody refers to it."""
        if self.budget is None:
            return
        for array in _arrays(result):
            key = id(array)
            if key not in self._held:  # a value that is passed through counts once
                nbytes = held_bytes(array)
                self.budget.add(nbytes, where)
                self._held[key] = weakref.ref(array, self._forget(key)), nbytes, where

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            entry = self._held.pop(key, None)
            if entry is not None and self.budget is not None:
                self.budget.remove(entry[1], entry[2])

        return forget

    def close(self) -> None:
        """The run is over, however it ended."""
        if self.budget is None:
            return
        while self._held:
            try:
                _, (_, nbytes, where) = self._held.popitem()
            except KeyError:  # the last one went by itself
                break
            self.budget.remove(nbytes, where)
        while self._reserved:
            where, nbytes = self._reserved.popitem()
            self.budget.remove(nbytes, where)


def _arrays(x: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, list):
        for item in x:
            yield from _arrays(item)


class _Current(threading.local):
    control: RunControl | None = None
    profiler: Any = None


current = _Current()


def is_plain(control: RunControl, profiler: Any) -> bool:
    """Is there nothing that nested graphs would have to know: no limit, no profiler, no run around this one?"""
    return profiler is None and not control.watched and current.control is None


class running:
    """Within the block, a run's control and profiler are known to nested graphs in this thread."""

    __slots__ = ("_before", "_control", "_interruptible", "_profiler")

    def __init__(self, control: RunControl, profiler: Any) -> None:
        self._control = control
        self._profiler = profiler
        self._interruptible = interruptible(control.check if control.ends_early else None)

    def __enter__(self) -> None:
        self._before = current.control, current.profiler
        current.control, current.profiler = self._control, self._profiler
        self._interruptible.__enter__()

    def __exit__(self, *error: object) -> None:
        self._interruptible.__exit__()
        current.control, current.profiler = self._before
