"""Every error Ranvier raises: one root, typed subclasses, fields a program can read.

A message names the thing, what was expected and what came. Subclasses also inherit from the built-in a caller
would otherwise catch (``ValueError``, ``MemoryError`` …), so ordinary ``except`` clauses keep working.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ranvier.records import dataclass


class RanvierError(Exception):
    """Root of all errors raised on purpose by Ranvier; ``node`` names the node that was running, where one was."""

    node: str | None = None


class InvalidConfig(RanvierError, ValueError):
    """An option has an unknown name or a value outside its range."""


class InvalidModel(RanvierError, ValueError):
    """The model cannot be read, or breaks a rule of its format."""


class InvalidGraph(RanvierError, ValueError):
    """The IR breaks one of its invariants; after a pass this is a bug of that pass."""


class InvalidInput(RanvierError, ValueError):
    """An input handed to ``run`` is missing, unknown or of a kind the model does not take."""


class InvalidValue(RanvierError, ValueError):
    """An operator met data it cannot work with: an index out of range, a NaN where an index is needed …"""

    def __init__(self, message: str, *, op: str | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.node = node


class ShapeMismatch(RanvierError, ValueError):
    """Shapes do not fit: an input against the model's signature, or operands against each other."""


class DimensionMismatch(ShapeMismatch):
    """One symbolic dimension was given two different sizes."""


class DTypeMismatch(RanvierError, TypeError):
    """An element type differs from the one the model or operator takes."""


class ProviderUnavailable(RanvierError):
    """A provider was asked for and cannot be had on this machine; ``reason`` says why."""

    def __init__(self, provider: str, reason: str) -> None:
        super().__init__(provider, reason)  # all arguments, so that the error can be pickled
        self.provider = provider
        self.reason = reason

    def __str__(self) -> str:
        return f"provider {self.provider!r} is not available: {self.reason}"


class ProviderFailed(RanvierError, RuntimeError):
    """A provider could not do its part of a run. ``transient``: the same may work when it is tried again."""

    def __init__(self, provider: str, reason: str, *, transient: bool = False) -> None:
        super().__init__(provider, reason)
        self.provider = provider
        self.reason = reason
        self.transient = transient

    def __str__(self) -> str:
        return f"provider {self.provider!r} failed: {self.reason}"


class WorkerLost(ProviderFailed):
    """The process or machine behind a provider is gone, and what it held with it."""


class ProviderTimeout(ProviderFailed, TimeoutError):
    """A provider gave no answer in the time it is allowed."""


class DeviceMismatch(RanvierError):
    """A buffer lives on another device than the one it is used on."""


class InvalidBuffer(RanvierError, ValueError):
    """A buffer was given to an allocator that does not have it in use: freed twice, or another one's."""


class OutOfMemory(RanvierError, MemoryError):
    """Memory that was asked for cannot be had. Where known: ``part`` names who asked, ``requested`` is the number of
    bytes, ``in_use`` what is held already, ``capacity`` what there may be in all, and ``provider`` who ran."""

    provider: str = ""

    def __init__(
        self,
        message: str,
        *,
        part: str = "",
        requested: int | None = None,
        in_use: int | None = None,
        capacity: float | None = None,
    ) -> None:
        super().__init__(message)
        self.part = part
        self.requested = requested
        self.in_use = in_use
        self.capacity = capacity


class KernelError(RanvierError, RuntimeError):
    """A node failed while it ran; ``node``, ``op`` and ``provider`` say which, ``__cause__`` says why."""

    def __init__(self, message: str, *, node: str = "", op: str = "", provider: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.op = op
        self.provider = provider


class ResourceLimit(RanvierError):
    """A limit set in the options was reached: ``limit`` names it, ``allowed`` and ``actual`` are the numbers."""

    def __init__(self, limit: str, allowed: float, actual: float, what: str = "") -> None:
        super().__init__(limit, allowed, actual, what)
        self.limit = limit
        self.allowed = allowed
        self.actual = actual
        self.what = what

    def __str__(self) -> str:
        where = f" ({self.what})" if self.what else ""
        return f"limit {self.limit!r} reached{where}: allowed {_number(self.allowed)}, needed {_number(self.actual)}"


class MemoryLimit(ResourceLimit, OutOfMemory):
    """A limit on memory that the options set was reached, so it is out of memory by somebody's wish: ``part`` asked
    for ``requested`` bytes beside ``in_use``, and ``allowed`` is the limit."""

    def __init__(self, limit: str, allowed: float, actual: int, what: str = "", *, part: str = "", requested: int = 0):
        RanvierError.__init__(self, limit, allowed, actual, what)
        self.limit = limit
        self.allowed = self.capacity = allowed
        self.actual = actual
        self.what = what or part
        self.part = part or what
        self.requested = requested
        self.in_use = actual - requested

    def __str__(self) -> str:
        asked = f"; asked for {_number(self.requested)}" if self.requested else ""
        return f"{super().__str__()}{asked}"


class Cancelled(RanvierError):
    """A run was cancelled through its run options."""


class DeadlineExceeded(Cancelled, TimeoutError):
    """A run passed its deadline."""


class SessionClosed(RanvierError, RuntimeError):
    """A closed session was used."""


class NotSupported(RanvierError, NotImplementedError):
    """A known feature that this version does not have; the message says what to use instead, where there is one."""


class TracingError(RanvierError, TypeError):
    """A jitted function did what cannot be compiled: it looked at a value that is not known while it is traced."""


class WeightError(RanvierError):
    """A weight cannot be read: missing external file, truncated data, path outside the model's folder."""


class CannotWrite(RanvierError, OSError):
    """A file cannot be written; what was there before is still there."""


class IntegrityError(RanvierError):
    """Stored bytes do not match their checksum."""


@dataclass(frozen=True)
class MissingOp:
    """One operator that nothing can run, and the nodes that use it."""

    domain: str
    op: str
    version: int | None
    nodes: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        full = f"{self.domain}::{self.op}" if self.domain else self.op
        version = f"-{self.version}" if self.version is not None else ""
        names = ", ".join(repr(n) for n in self.nodes[:4])
        more = f" and {len(self.nodes) - 4} more" if len(self.nodes) > 4 else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{full}{version} at {names}{more}{reason}"


class UnsupportedOp(RanvierError):
    """The model holds operators that no provider runs; ``missing`` lists all of them at once."""

    def __init__(self, missing: Iterable[MissingOp]) -> None:
        self.missing = tuple(missing)
        super().__init__(self.missing)

    def __str__(self) -> str:
        lines = "\n  ".join(str(m) for m in self.missing)
        return f"{len(self.missing)} unsupported operator(s):\n  {lines}"


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"10^{math.log10(abs(value)):.0f}"  # too long to read, perhaps too long to print
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"


def printable(text: str) -> str:
    """A text from elsewhere for the terminal: what would move the cursor, turn the direction of writing around or
    cannot be written at all is shown by its number."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_LISTED = 40  # names in a message, at most


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or the list of names when nothing is close."""
    import difflib  # only where something is wrong

    names = sorted(known)
    folded = {n.lower(): n for n in reversed(names)}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {folded[close[0]]!r}?)"
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    shown = (n if n.isprintable() else repr(n) for n in names[:_LISTED])  # names come from files: none moves the cursor
    return f" (known: {', '.join(shown)}{more})" if names else ""
