"""Two-way streams of messages; the one here runs over a pair of pipes to a process of our own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import BinaryIO, Protocol

from ranvier.providers.distant import wire
from ranvier.providers.distant.wire import Buffer, Message


class Channel(Protocol):
    """One end of a connection. ``send`` may be called from several threads, ``receive`` from one."""

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Hand a message over; its memory may be reused afterwards. OSError where nobody takes it any more."""
        ...

    def receive(self) -> Message:
        """Wait for the next message; EOFError at the end, BadMessage where it is none."""
        ...

    def close(self) -> None:
        """End it; a ``receive`` that waits in another thread ends too."""
        ...


class PipeChannel:
    """Messages over unbuffered binary files."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, limit: int = wire.MAX_MESSAGE) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._limit = limit
        self._lock = threading.Lock()

    def send(self, pieces: Sequence[Buffer]) -> None:
        with self._lock:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view:
                    written = self._outgoing.write(view)
                    view = view[written:]

    def receive(self) -> Message:
        prefix = self._exactly(wire.PREFIX.size)
        return wire.decode(prefix, self._exactly(wire.measure(prefix, self._limit)))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._incoming.readinto(view)  # type: ignore[attr-defined]
            if not got:
                raise EOFError("the other end closed the connection")
            view = view[got:]
        return data

    def close(self) -> None:
        for file in (self._outgoing, self._incoming):
            with contextlib.suppress(OSError):
                file.close()
