"""How a long body lets a deadline or a cancellation through.

The runtime looks at the limits of a run between nodes. A body whose loop may take long calls :func:`pulse` once a
round; the runtime says through :class:`interruptible` what happens then, and outside a run nothing does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Check = Callable[[str], None]


class _Current(threading.local):
    check: Check | None = None


_current = _Current()


def pulse(where: str) -> None:
    """Raise here when the run must end; ``where`` says how far it came."""
    check = _current.check
    if check is not None:
        check(where)


def watching() -> Check | None:
    """What a pulse would call; None where nobody watches this run. For work that cannot pulse by itself."""
    return _current.check


class interruptible:
    """Within the block, ``check`` is called at every pulse of this thread."""

    __slots__ = ("_before", "_check")

    def __init__(self, check: Check | None) -> None:
        self._check = check

    def __enter__(self) -> None:
        self._before = _current.check
        _current.check = self._check

    def __exit__(self, *error: object) -> None:
        _current.check = self._before
