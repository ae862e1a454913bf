"""Questions and answers over a channel: many under way at once, every one of them answered, or failed when the
other end is gone.

Answers are read by a thread of their own, so whoever asked need not wait: what matters is only that the other end
works in the order in which it is asked.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from ranvier import errors
from ranvier.errors import KernelError, OutOfMemory, ProviderFailed, ProviderTimeout, RanvierError, WorkerLost
from ranvier.ops.pulse import pulse
from ranvier.providers.distant import wire
from ranvier.providers.distant.channel import Channel
from ranvier.providers.distant.wire import Array, BadMessage, Message

_SLICE = 0.05  # seconds between looks at the deadline of the run that waits


class Link:
    """One connection; once broken it stays broken, and says why."""

    def __init__(self, channel: Channel, provider: str, timeout: float | None) -> None:
        self.provider = provider
        self.timeout = timeout  # seconds that an answer may take
        self._channel = channel
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Message]] = {}
        self._unused: list[int] = []  # tensors nobody holds any more; told with the next question
        self._broken: ProviderFailed | None = None
        self._reader = threading.Thread(target=self._read, name=f"ranvier-{provider}", daemon=True)
        self._reader.start()

    @property
    def usable(self) -> bool:
        """Can more be asked? Not after a failure, and not in the child of a fork: the pipe is its parent's."""
        return self._broken is None and os.getpid() == self._pid

    @property
    def ended_by(self) -> str:
        """Why it is broken; empty while it is not."""
        return "" if self._broken is None else self._broken.reason

    def next_number(self) -> int:
        return next(self._numbers)

    def forget(self, tensor: int) -> None:
        """Called by finalisers, so it only takes a note."""
        self._unused.append(tensor)

    def post(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Array] = ()) -> Future[Message]:
        """Ask without waiting; the future has the answer, or the error."""
        number = self.next_number()
        future: Future[Message] = Future()
        with self._lock:
            if not self.usable:
                raise self._broken or WorkerLost(self.provider, "the connection belongs to the parent process")
            self._pending[number] = future
            unused, self._unused = self._unused, []
        try:
            self._channel.send(wire.encode(kind, {**fields, "number": number, "unused": unused}, tensors))
        except (OSError, ValueError) as error:  # ValueError: the file was closed meanwhile
            self._end(WorkerLost(self.provider, f"nobody takes questions any more ({error})", transient=True))
        return future

    def ask(
        self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Array] = (), at_least: float = 0.0
    ) -> Message:
        return self.wait(self.post(kind, fields, tensors), kind, at_least)

    def wait(self, future: Future[Message], what: str, at_least: float = 0.0) -> Message:
        """The answer, when it comes. Passing the time allowed ends the link: nothing tells when, if ever, the other
        end would go on. ``at_least``: seconds that this answer may take even where others may not."""
        allowed = None if self.timeout is None else max(self.timeout, at_least)
        until = None if allowed is None else time.monotonic() + allowed
        while True:
            try:
                return future.result(_SLICE)
            except NotYet:
                if future.done():
                    raise  # an error of the same name that the other end reported
                pulse(f"waiting for {self.provider}")
                if until is not None and time.monotonic() > until:
                    late = ProviderTimeout(self.provider, f"no answer to {what!r} within {allowed:g} s")
                    self._end(late)
                    raise late from None

    def close(self) -> None:
        self._end(WorkerLost(self.provider, "the connection was closed"))
        if threading.current_thread() is not self._reader and os.getpid() == self._pid:
            self._reader.join(1.0)

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
                number = message.fields.get("number")
                with self._lock:
                    future = self._pending.pop(number, None) if isinstance(number, int) else None
                if future is None:
                    raise BadMessage(f"an answer came to a question that nobody asked ({number!r})")
            except BadMessage as error:
                self._end(ProviderFailed(self.provider, str(error), transient=True))
                return
            except PermissionError as error:
                self._end(ProviderFailed(self.provider, str(error)))
                return
            except (EOFError, OSError, ValueError) as error:
                self._end(WorkerLost(self.provider, f"the other end is gone ({error})", transient=True))
                return
            if message.kind == "error":
                future.set_exception(_error(message, self.provider))
            else:
                future.set_result(message)

    def _end(self, reason: ProviderFailed) -> None:
        with self._lock:
            first = self._broken is None
            if first:
                self._broken = reason
            pending, self._pending = self._pending, {}
        if first:
            self._channel.close()
        for future in pending.values():
            future.set_exception(self._broken or reason)


def error_fields(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    found: dict[str, Any] = {"type": type(error).__name__, "text": str(error) or type(error).__name__}
    if isinstance(error, OutOfMemory):
        found["requested"] = error.requested
    if isinstance(error, ProviderFailed):
        found["transient"] = error.transient
        found["text"] = error.reason
    return found


def _error(message: Message, provider: str) -> RanvierError:
    """The error that the other end had: of the same type where a text is all that such an error is made of."""
    fields = message.fields
    name, text = str(fields.get("type")), str(fields.get("text"))
    if name in ("OutOfMemory", "MemoryError"):
        requested = fields.get("requested")
        return OutOfMemory(f"provider {provider!r}: {text}", requested=requested if type(requested) is int else None)
    if name == "ProviderFailed":
        return ProviderFailed(provider, text, transient=fields.get("transient") is True)
    if name in ("InvalidValue", "ShapeMismatch", "DTypeMismatch", "InvalidInput", "InvalidModel", "NotSupported"):
        made: RanvierError = getattr(errors, name)(text)
        return made
    return KernelError(f"provider {provider!r}: {name}: {text}", provider=provider)
