"""Who is told how far a transfer has come: nobody, a function of the caller's, or a bar on the terminal."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Protocol


class Progress(Protocol):
    """Told about transfers as they go on, from any thread, by the address of what is transferred.

    ``count`` is below zero where a server began anew: what had come is fetched again.
    """

    def begin(self, name: str, total: int | None, done: int = 0) -> None: ...

    def advance(self, name: str, count: int) -> None: ...

    def end(self, name: str) -> None: ...


class Silent:
    """Nobody is told."""

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        pass

    def advance(self, name: str, count: int) -> None:
        pass

    def end(self, name: str) -> None:
        pass


class Bars:
    """A bar for each transfer, with rate and time left, on standard error; use it as a context."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Rich

        columns = (
            TextColumn("{task.description}", markup=False),  # a name in brackets is not a style
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Rich(*columns, console=Console(stderr=True), transient=False)
        self._tasks: dict[str, list[Any]] = {}  # two threads may be at the same thing
        self._lock = threading.Lock()

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        label = "".join(c if c.isprintable() else "?" for c in name.rpartition("/")[2] or name)
        with self._lock:
            self._tasks.setdefault(name, []).append(self._bars.add_task(label, total=total, completed=done))

    def advance(self, name: str, count: int) -> None:
        with self._lock:
            task = self._tasks[name][-1] if self._tasks.get(name) else None
        if task is not None:  # else it comes from one who was stopped, and has ended
            self._bars.advance(task, count)

    def end(self, name: str) -> None:
        with self._lock:
            tasks = self._tasks.get(name)
            task = tasks.pop() if tasks else None
            if not tasks:
                self._tasks.pop(name, None)
        if task is not None:
            self._bars.stop_task(task)
