"""Logging, warnings that come once, progress bars.

Ranvier logs under the name ``ranvier`` and stays quiet until somebody listens; ``setup`` is for the command line.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

logger = logging.getLogger("ranvier")
logger.addHandler(logging.NullHandler())

PRESETS = {"quiet": logging.ERROR, "normal": logging.WARNING, "verbose": logging.INFO, "debug": logging.DEBUG}

_said: set[str] = set()
_lock = threading.Lock()
Item = TypeVar("Item")


def setup(preset: str = "normal") -> None:
    """Send Ranvier's log to stderr at one of the presets: quiet, normal, verbose, debug."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(PRESETS[preset])


def warn_once(key: str, message: str, *, stderr: bool = False) -> bool:
    """Warn the first time a key is seen in this process; True when it did.

    Where nobody listens to the log the message goes to stderr; with ``stderr`` it goes there even when it is logged
    somewhere else.
    """
    with _lock:
        if key in _said:
            return False
        _said.add(key)
    logger.warning(message)
    listening = [h for h in _handlers() if not isinstance(h, logging.NullHandler)]
    if not listening or (stderr and not any(getattr(h, "stream", None) is sys.stderr for h in listening)):
        print(f"ranvier: warning: {message}", file=sys.stderr)
    return True


def _handlers() -> list[logging.Handler]:
    return [*logger.handlers, *logging.getLogger().handlers]


def progress(items: Iterable[Item], label: str, total: int | None = None, after: float = 1.0) -> Iterator[Item]:
    """Iterate with a progress bar on stderr, shown only when the work lasts longer than ``after`` seconds."""
    import time

    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    started = time.monotonic()
    shown = False
    task = bar.add_task(label, total=total if total is not None else (len(items) if isinstance(items, Sized) else None))
    try:
        for done, item in enumerate(items):
            if not shown and time.monotonic() - started > after:
                bar.start()
                shown = True
            if shown:
                bar.update(task, completed=done)
            yield item
    finally:
        if shown:
            bar.stop()
