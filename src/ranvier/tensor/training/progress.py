"""How far a run has come: a bar with rate, loss and time left on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class Shown(Protocol):
    """Told how far training has come."""

    def begin(self, total: int | None, done: int) -> None: ...

    def step(self, done: int, epoch: int, values: Mapping[str, float]) -> None: ...

    def report(self, text: str) -> None:
        """A line that stays."""
        ...

    def end(self) -> None: ...


class Quiet:
    """Nobody looks."""

    def begin(self, total: int | None, done: int) -> None:
        pass

    def step(self, done: int, epoch: int, values: Mapping[str, float]) -> None:
        pass

    def report(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


class Lines:
    """A line every few seconds: logs stay readable however fast steps are."""

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every

    def begin(self, total: int | None, done: int) -> None:
        self._total, self._first = total, done
        self._started = self._said = time.monotonic()

    def step(self, done: int, epoch: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        rate = (done - self._first) / max(now - self._started, 1e-9)
        left = f", {duration((self._total - done) / rate)} left" if self._total is not None and rate > 0 else ""
        of = f"/{self._total}" if self._total is not None else ""
        self.report(f"step {done}{of}, epoch {epoch + 1}, {rate:.1f} steps/s{left}: {values_text(values)}")

    def report(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        pass


class Bar:
    """One bar for the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task: Any = None

    def begin(self, total: int | None, done: int) -> None:
        self._first, self._started, self._said = done, time.monotonic(), 0.0
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, rate="", values="")
        self._bar.start()

    def step(self, done: int, epoch: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._said < 0.1:  # an eye needs no more, and steps may be shorter than drawing
            return
        self._said = now
        rate = (done - self._first) / max(now - self._started, 1e-9)
        text = values_text(values)
        self._bar.update(self._task, completed=done, epoch=epoch + 1, rate=f"{rate:.1f}/s", values=text)

    def report(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def end(self) -> None:
        self._bar.stop()


def shown_of(wanted: bool | Shown | None) -> Shown:
    """With None: a bar where somebody can see it, lines elsewhere."""
    if wanted is None or wanted is True:
        return Bar() if sys.stderr.isatty() else Lines()
    return Quiet() if wanted is False else wanted


def values_text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def duration(seconds: float) -> str:
    """``8 s``, ``2 min 5 s``, ``3 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
