"""What happens to allocators and trackers when the process forks: no lock stays held in the child, and no shared
memory is handed out by two processes."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forking(Protocol):
    """``fork_order``: those whose locks are taken while others hold theirs come later."""

    fork_order: int

    def before_fork(self) -> None: ...

    def after_fork(self, child: bool) -> None: ...


_watched: weakref.WeakSet[Forking] = weakref.WeakSet()
_watching = threading.Lock()
_halted: list[Forking] = []


def watch(each: Forking) -> None:
    """Tell an object of forks for as long as it lives."""
    with _watching:
        _watched.add(each)


def _before() -> None:
    _watching.acquire()
    _halted[:] = sorted(_watched, key=lambda each: each.fork_order)
    for each in _halted:
        each.before_fork()


def _after(child: bool) -> None:
    for each in reversed(_halted):
        each.after_fork(child)
    _halted.clear()
    _watching.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=lambda: _after(child=False), after_in_child=lambda: _after(child=True)
    )
