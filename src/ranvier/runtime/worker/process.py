"""How a process that works for another one keeps out of its way. Imports nothing else of Ranvier: what such a process
holds before its work begins shall be as little as possible."""

from __future__ import annotations

import os
import signal
import sys


def die_with_parent() -> None:
    """End when the parent does, even while stopped or stuck; only Linux can be told so."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def private_stdout() -> int:
    """A descriptor for answers alone: what libraries print goes to stderr from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers
