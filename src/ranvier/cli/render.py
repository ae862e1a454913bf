"""What every command shares to show results: one object for stdout and stderr, tables, numbers for people.

rich is imported when something is drawn, so that help and JSON do not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from ranvier.cli.sheets import Sheet

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 200  # columns where stdout is no terminal and COLUMNS does not say: lines stay whole for grep


@dataclass
class Output:
    """How this call of the command talks: stdout carries the result, stderr everything else."""

    json: bool = False
    preset: str = "normal"

    def use_preset(self, preset: str) -> None:
        from ranvier import logs

        self.preset = preset
        logs.setup(preset)

    @property
    def talks(self) -> bool:
        """Are notes for people wanted?"""
        return self.preset != "quiet" and not self.json

    @cached_property
    def console(self) -> Console:
        """Lays things out for stdout. Plain text: what a model calls its nodes is never markup."""
        from rich.console import Console

        width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _PIPE_WIDTH
        return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)

    def emit(self, data: Any) -> None:
        """The one JSON document of a call."""
        click.echo(json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False))

    def show(self, *things: Any) -> None:
        """Text or a table on stdout, for people."""
        with self.console.capture() as captured:
            for thing in things:
                self.console.print(thing, crop=False)
        click.echo("\n".join(line.rstrip() for line in captured.get().split("\n")), nl=False)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self.show("", Text(text, style="bold"))

    def say(self, text: str) -> None:
        """A line of text as it is."""
        from rich.text import Text

        self.show(Text(text))

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        if self.talks:
            click.echo(f"note: {text}", err=True)

    def progress(self, items: Sequence[Any], label: str) -> Iterator[Any]:
        """The items, with a bar on stderr when going through them takes more than a second."""
        from ranvier import logs

        if self.preset == "quiet":
            yield from items
        elif len(items) == 1:
            with self.busy(label):
                yield items[0]
        else:
            yield from logs.progress(items, label)

    @contextlib.contextmanager
    def busy(self, label: str, after: float = 1.0) -> Iterator[None]:
        """A sign of life on a terminal's stderr while something without steps takes longer than a second."""
        if self.preset == "quiet" or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        status = Console(stderr=True).status(f"{label} …")
        timer = threading.Timer(after, status.start)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            status.stop()


def plain(data: Any) -> Any:
    """The same data in types JSON has; numbers it lacks become the strings NaN, Infinity and -Infinity."""
    if isinstance(data, float):
        if math.isnan(data):
            return "NaN"
        return data if math.isfinite(data) else "Infinity" if data > 0 else "-Infinity"
    if data is None or isinstance(data, str | int):
        return data
    if is_dataclass(data) and not isinstance(data, type):
        return plain(asdict(data))
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [plain(item) for item in data]
    if hasattr(data, "tolist"):
        return plain(data.tolist())
    return str(data)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> Sheet:
    """A table for people. A heading that starts with ``>`` makes its column one of figures, ``!`` keeps cells whole."""
    return Sheet(columns, rows, title)


def facts(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Names and values side by side, without rules."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, ""):
            made.add_row(name, str(value))
    return made


# -- numbers --------------------------------------------------------------------------------------------------------


def count_text(number: float) -> str:
    """``12``, ``4,096``, ``25.6 M``."""
    for limit, factor, unit in ((1e15, 1e15, "P"), (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M")):
        if abs(number) >= limit:
            return f"{number / factor:.3g} {unit}" if abs(number) / factor < 100 else f"{number / factor:.0f} {unit}"
    return f"{number:,.0f}"


def bytes_text(nbytes: float | None) -> str:
    """``812 B``, ``1.4 MB`` (decimal units)."""
    if nbytes is None:
        return "unknown"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.3g} {unit}" if abs(nbytes) / factor < 100 else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """``13 µs``, ``4.31 ms``, ``2.05 s``."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"
