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
from ranvier.errors import Cancelled, DeadlineExceeded, InvalidConfig, MemoryLimit, NotSupported, nearest
from ranvier.ops.allocation import held_bytes
from ranvier.ops.pulse import interruptible
from ranvier.providers import memory

SHRINK_ENTRY = "memory.enable_memory_arena_shrinkage"  # give back, after the run, arenas that no run uses
RUN_ENTRIES = (SHRINK_ENTRY, "disable_synchronize_execution_providers")  # the second has nothing to act on here


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
    """The limits of one run in progress; ``check`` raises when one is reached."""

    __slots__ = ("_allowed", "_deadline", "_held", "_live", "_options", "_seconds", "watched")

    def __init__(self, options: RunOptions | None, limits: Limits) -> None:
        self._options = options
        seconds = [s for s in (options.timeout if options else None, limits.run_seconds) if s is not None]
        self._seconds = min(seconds) if seconds else None
        self._deadline = time.monotonic() + self._seconds if self._seconds is not None else None
        self._allowed = limits.memory_bytes
        self._live = 0
        self._held: dict[int, weakref.ref[Any]] = {}
        self.watched = options is not None or self._deadline is not None or self._allowed is not None

    def again(self) -> RunControl:
        """For another attempt at the same run: the time goes on, the memory starts anew."""
        made = copy.copy(self)
        made._live, made._held = 0, {}
        return made

    def check(self, where: str) -> None:
        if self._options is not None and self._options.terminate:
            raise Cancelled(f"the run was cancelled at {where}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise DeadlineExceeded(f"the run passed its limit of {self._seconds:g} s at {where}")

    def reserve(self, nbytes: int, where: str) -> None:
        """Count bytes for the whole run; MemoryLimit when they pass the limit."""
        self._live += nbytes
        self._check_memory(where, nbytes)

    def hold(self, result: Any, where: str) -> None:
        """Count a tensor, or the tensors of a sequence, for as long as anybody refers to it."""
        if self._allowed is None:
            return
        added = 0
        for array in _arrays(result):
            key = id(array)
            if key not in self._held:  # a value that is passed through counts once
                nbytes = held_bytes(array)
                self._held[key] = weakref.ref(array, self._forget(key, nbytes))
                self._live += nbytes
                added += nbytes
        self._check_memory(where, added)

    def _forget(self, key: int, nbytes: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self._held.pop(key, None)
            self._live -= nbytes

        return forget

    def _check_memory(self, where: str, added: int) -> None:
        if added > 0 and self._allowed is not None and self._live > self._allowed:
            raise MemoryLimit("memory_bytes", self._allowed, self._live, where, part=where, requested=added)


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
        self._interruptible = interruptible(control.check if control.watched else None)

    def __enter__(self) -> None:
        self._before = current.control, current.profiler, memory.current.reserve
        memory.current.reserve = self._control.reserve if self._control.watched else None
        current.control, current.profiler = self._control, self._profiler
        self._interruptible.__enter__()

    def __exit__(self, *error: object) -> None:
        self._interruptible.__exit__()
        current.control, current.profiler, memory.current.reserve = self._before
