"""Processes that compile for this one (:mod:`ranvier.codegen.llvm.compile_server`): started when needed, kept while
busy and a few seconds longer, gone with this process.

LLVM stays out of the user's process: its 60 to 80 MB, the lock of the interpreter between compilations, and what it
does when it fails, which is to abort. And its options, which hold for a whole process, change nobody else's code.

One request goes to one server at a time. A server that dies, hangs or talks nonsense is replaced once; when that one
fails as well, either LLVM is to blame, which is an error, or the system is, which raises :class:`Unavailable`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from ranvier.codegen.llvm import compile_server as protocol
from ranvier.errors import KernelError

KEEP_SECONDS = 5.0  # without work
LIMIT_SECONDS = 60.0  # for one request; they take 5 to 50 ms
MOST = 16  # servers; each takes memory and 25 ms of a core to start
_CRASHES = {-getattr(signal, name, 0) for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")}


class Unavailable(Exception):
    """Nothing can be compiled in another process, and why."""


class Rejected(Exception):
    """What LLVM says against a request."""


class _Lost(Exception):
    """A server did not answer."""

    def __init__(self, why: str, *, crashed: bool = False) -> None:
        super().__init__(why)
        self.crashed = crashed  # in LLVM, as far as one can tell from outside


def command(library: str) -> list[str]:
    """How to start a server: an interpreter without the user's settings and packages."""
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    return [sys.executable, *flags, os.path.abspath(protocol.__file__), library]


def request(text: str, triple: str, cpu: str, features: str, want: int) -> bytes:
    parts = [each.encode() for each in (triple, cpu, features, text)]
    return b"".join([protocol.REQUEST.pack(want, *map(len, parts)), *parts])


class _Server:
    """One process and the connection to it."""

    def __init__(self, argv: list[str]) -> None:
        self._connection, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # an interrupt from the terminal is for the user's process
            )
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._greeted = False

    def ask(self, message: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        try:
            if not self._greeted:
                if self._receive(len(protocol.GREETING), deadline) != protocol.GREETING:
                    raise _Lost("its greeting is wrong")
                self._greeted = True
            self._connection.settimeout(seconds)
            self._connection.sendall(message)
            greeting, status, size = protocol.REPLY.unpack(self._receive(protocol.REPLY.size, deadline))
            if greeting != protocol.GREETING or status > protocol.FAILED:
                raise _Lost("its reply is not understood")
            found = self._receive(size, deadline)
        except TimeoutError:
            raise _Lost(f"it did not answer within {seconds:g} s", crashed=self._greeted) from None
        except OSError as error:
            raise self._ended(error.strerror or str(error)) from None
        if status == protocol.DONE:
            return found
        text = found.decode(errors="replace")
        if status == protocol.REJECTED:
            raise Rejected(text)
        raise _Lost(text)

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise self._ended("it closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _ended(self, how: str) -> _Lost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1.0)
            return _Lost(f"it ended with status {code}", crashed=code in _CRASHES)
        return _Lost(how)

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def kill(self) -> None:
        """End the process and wait for it: it keeps nothing, so there is nothing to be polite about."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Let go of a server that belongs to the process this one was forked from."""
        self._connection.close()
        self.process.returncode = 0  # nobody here may wait for it


class Servers:
    """All servers of this process for one command. Any number of threads may use it."""

    def __init__(self, argv: list[str], most: int, *, keep: float = KEEP_SECONDS, limit: float = LIMIT_SECONDS) -> None:
        self._argv = argv
        self._most = max(1, min(most, MOST))
        self._keep = keep
        self._limit = limit
        self._changed = threading.Condition()
        self._free: list[_Server] = []
        self._all: set[_Server] = set()
        self._starting = 0
        self._used = 0.0  # when a server was last given back
        self._watched = False
        self._closed = False

    def prepare(self, count: int) -> None:
        """Start servers for as many requests, so that they are ready when the requests are."""
        for _ in range(count):
            with self._changed:
                if len(self._all) + self._starting >= min(count, self._most):
                    return
                self._starting += 1
            self._give_back(self._start())

    def compile(self, message: bytes) -> bytes:
        """The answer to a request. Raises Rejected where LLVM does, KernelError where LLVM fails."""
        lost: list[_Lost] = []
        for fresh in (False, True):
            server = self._take(fresh)
            try:
                found = server.ask(message, self._limit)
            except _Lost as error:
                self._drop(server)
                lost.append(error)
                continue
            except Rejected:
                self._give_back(server)
                raise
            except BaseException:  # an interrupt: a reply nobody waits for is under way
                self._drop(server)
                raise
            self._give_back(server)
            return found
        if all(each.crashed for each in lost):
            raise KernelError(
                f"LLVM fails on generated code: {lost[-1]} (with RANVIER_COMPILER=inside it says why, and takes this "
                "process with it)"
            )
        raise Unavailable(f"the compile server failed: {lost[-1]}")

    def _take(self, fresh: bool) -> _Server:
        with self._changed:
            while True:
                if self._closed:
                    raise Unavailable("the interpreter is ending")
                if self._free and not fresh:
                    return self._free.pop()
                if len(self._all) + self._starting < self._most:
                    self._starting += 1
                    break
                if self._free:  # a fresh one is wanted and there is no room
                    self._end(self._free.pop())
                else:
                    self._changed.wait()  # whoever has one gives it back or loses it within the limit
        return self._start()

    def _start(self) -> _Server:
        server = None
        try:
            server = _Server(self._argv)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise Unavailable(f"no process can be started: {error}") from None
        finally:
            with self._changed:
                self._starting -= 1
                if server is not None:
                    self._all.add(server)
                self._changed.notify_all()
        return server

    def _give_back(self, server: _Server) -> None:
        with self._changed:
            if self._closed:
                self._end(server)
                return
            self._free.append(server)
            self._used = time.monotonic()
            self._changed.notify_all()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="ranvier-compile-idle", daemon=True).start()

    def _drop(self, server: _Server) -> None:
        with self._changed:
            self._end(server)
            self._changed.notify_all()

    def _end(self, server: _Server) -> None:
        self._all.discard(server)
        server.close()

    def _watch(self) -> None:
        """End the servers when there was nothing to do for a while."""
        with self._changed:
            while self._all:
                left = self._used + self._keep - time.monotonic()
                if left <= 0 and len(self._free) == len(self._all):
                    while self._free:
                        self._end(self._free.pop())
                else:
                    self._changed.wait(max(left, 0.1))
            self._watched = False

    def close(self) -> None:
        """End all servers; requests under way fail."""
        with self._changed:
            self._closed = True
            for server in list(self._all):
                if server in self._free:
                    self._end(server)
                else:  # the thread that uses the connection closes it
                    server.kill()
            self._free.clear()
            self._changed.notify_all()

    def forget(self) -> None:
        for server in self._all:
            server.forget()


# -- those of this process ------------------------------------------------------------------------------------------

_lock = threading.Lock()
_servers: dict[tuple[str, ...], Servers] = {}


def of(argv: list[str], most: int) -> Servers:
    """The servers that run a command, which are started when something is asked of them."""
    with _lock:
        key = tuple(argv)
        if key not in _servers:
            _servers[key] = Servers(argv, most)
        return _servers[key]


def _close_all() -> None:
    for each in _servers.values():
        each.close()


def _after_fork() -> None:
    """The child starts its own: two processes on one connection would read each other's replies."""
    global _lock
    _lock = threading.Lock()
    for each in _servers.values():
        each.forget()
    _servers.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
