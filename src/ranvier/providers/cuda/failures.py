"""torch's errors as ours: what ran out, what failed, and what is lost for good.

After some failures of a GPU (an illegal address, an assertion in a kernel, a device that fell off the bus) its context
answers every later call with the same error. A provider that saw one is dead: it refuses by itself from then on, so
that nothing waits for, or computes in, a context that is no longer there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ranvier.errors import KernelError, OutOfMemory, ProviderFailed, ProviderUnavailable, RanvierError
from ranvier.logs import logger

PROVIDER = "cuda"
T = TypeVar("T")

# words in the messages of torch and of the driver; a context that said one of them says nothing else any more
_LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
    "device is lost",
    "device lost",
    "fallen off the bus",
    "uncorrectable ecc",
    "ecc error",
    "cudaerrorecc",
    "device unavailable",
    "context is destroyed",
    "mmu fault",
)
_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory", "not enough memory")
_PASSING = ("launch timed out", "system not ready", "device busy", "devices are busy")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _MEMORY)


def is_lost(error: BaseException) -> bool:
    """A context that will never answer again. What torch adds to every error, that assertions in kernels can be
    compiled in, says nothing about this one."""
    text = "\n".join(line for line in str(error).lower().splitlines() if not line.startswith("compile with"))
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST)


def typed(error: BaseException, doing: str, provider: str = PROVIDER) -> RanvierError:
    """The error of this project that says what went wrong, for an error of torch."""
    if isinstance(error, RanvierError):
        return error
    lines = str(error).strip().splitlines()
    text = f"{doing}: {lines[0] if lines else type(error).__name__}"
    if is_lost(error):
        return ProviderFailed(provider, text)
    if is_out_of_memory(error):
        found = OutOfMemory(text)
        found.provider = provider
        return found
    if any(word in str(error).lower() for word in _PASSING):
        return ProviderFailed(provider, text, transient=True)
    return KernelError(text, provider=provider)


class Health:
    """Whether a device can still be used. ``provider``: who uses it, by the name that a session knows it by."""

    def __init__(self, device: str, provider: str = PROVIDER) -> None:
        self._device = device
        self._provider = provider
        self.lost = ""  # why it cannot

    def check(self) -> None:
        if self.lost:
            raise ProviderUnavailable(self._provider, self.lost)

    def note(self, error: BaseException) -> None:
        """Look at an error that came from torch."""
        if not self.lost and is_lost(error):
            self.lost = f"{self._device} was lost ({str(error).strip().splitlines()[0]}); only a new process can use it"
            logger.error("%s", self.lost)

    def guarded(self, doing: str, work: Callable[[], T], release: Callable[[], Any]) -> T:
        """What ``work`` gives. Where memory runs out, ``release`` gives back what is kept for later, and it is tried
        once more; every error leaves as one of ours."""
        self.check()
        try:
            return work()
        except RanvierError as error:
            self._named(error)
            raise
        except Exception as first:
            self.note(first)
            if not is_out_of_memory(first) or self.lost:
                raise typed(first, doing, self._provider) from first
            logger.info("%s: out of memory; what is kept is given back, and it is tried again", doing)
        # outside of the handler: the traceback of the first attempt would hold its tensors
        release()
        try:
            return work()
        except RanvierError as error:
            self._named(error)
            raise
        except Exception as second:
            self.note(second)
            raise typed(second, doing, self._provider) from second

    def _named(self, error: RanvierError) -> None:
        """A step does not know which of several GPUs it runs on."""
        if getattr(error, "provider", "") == PROVIDER:
            error.provider = self._provider  # type: ignore[attr-defined]


__all__ = ["PROVIDER", "Health", "is_lost", "is_out_of_memory", "typed"]
