"""Connections to web servers that are used again: opening one takes several times as long as a small answer.

urllib closes a connection after every answer. The handlers here keep those whose answer was read to its end, for the
next request to the same place, whichever file it is for: a checkpoint may have a thousand of them. Everything else,
redirections and proxies among it, stays urllib's.
"""

from __future__ import annotations

import functools
import http.client
import io
import math
import os
import selectors
import socket
import ssl
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from typing import Any

from ranvier.weights.together import Stop, apart

_KEPT = 4  # connections that wait, to each place
_DRAINED = 1 << 12  # bytes of an answer that nobody wanted which are read for the sake of the connection
_PACE = 1 << 20  # bytes that an answer must bring in some times as long as one waits for a byte
_TIMES, _LEAST_PERIOD = 10.0, 120.0  # so many, and never in fewer seconds than that
_POLL = 0.1  # seconds after which one who waits for a byte looks whether anybody wants it still
_PROXY = "proxy-authorization"  # a header that is for the proxy alone
_Place = tuple[int, str, str, str]  # process, scheme, host, and the host behind a proxy


class _Watched(io.RawIOBase):
    """What comes through a socket, as long as somebody waits for it and it comes at a pace: a byte now and then would
    keep us for ever."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, stop: Stop) -> None:
        super().__init__()
        self._raw, self._sock, self._stop = raw, sock, stop  # who closes the first lets go of the second
        self._seconds = max(_TIMES * (sock.gettimeout() or 0.0), _LEAST_PERIOD)
        self._began, self._came = time.monotonic(), 0
        self.head = True  # of the answer: that must be there after one period, however much has come

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        passed = time.monotonic() - self._began
        if passed > self._seconds:
            if self.head or self._came < _PACE:
                raise TimeoutError(f"no more than {self._came} bytes in {passed:.3g} seconds")
            self._began, self._came = time.monotonic(), 0
        count = self._received(buffer)
        self._came += count
        return count

    def _received(self, buffer: Any) -> int:
        """As many bytes as there are, waited for a little at a time."""
        timeout = left = self._sock.gettimeout() or math.inf
        try:
            while True:
                self._sock.settimeout(min(_POLL, left))
                try:
                    return self._sock.recv_into(buffer)
                except TimeoutError:
                    left -= _POLL
                    if left <= 0 or self._stop.is_set():
                        raise
        finally:
            self._sock.settimeout(None if timeout == math.inf else timeout)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reply(http.client.HTTPResponse):
    """An answer that says when it is done with, and whether it was read to its end."""

    done: Callable[[bool], None] | None = None

    def __init__(self, sock: socket.socket, *arguments: Any, stop: Stop, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self._watched = _Watched(self.fp.detach(), sock, stop)
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        super().begin()
        self._watched.head = False

    def close(self) -> None:
        done, self.done = self.done, None
        whole = done is not None and self._is_whole()
        super().close()
        if done is not None:
            done(whole and not self.will_close)

    def _is_whole(self) -> bool:
        try:
            if not self.isclosed() and self.length is not None and 0 < self.length <= _DRAINED:
                self.read()
        except (OSError, http.client.HTTPException):
            return False
        return self.isclosed() or self.length == 0


_Waiting = dict[_Place, list[http.client.HTTPConnection]]


class Connections:
    """Those that wait for a request, until nobody refers to this any more. Any number of threads may ask; a child of
    ``fork`` has none of its parent's."""

    def __init__(self) -> None:
        self._waiting: _Waiting = {}
        weakref.finalize(self, _close, self._waiting)

    def opener(self, stop: Stop, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
        """What sends requests by these connections, and waits for answers until ``stop`` is set; whoever has it must
        keep them too."""
        return urllib.request.build_opener(*handlers, _Handler(self, stop))

    def open(self, request: urllib.request.Request, stop: Stop) -> Any:
        """The answer to a request, by a connection that waits or by a new one."""
        place = os.getpid(), request.type or "", request.host or "", _behind_proxy(request)
        waiting = self._waiting.setdefault(place, [])
        while waiting:
            try:
                connection = waiting.pop()
            except IndexError:  # somebody was quicker
                break
            # an answer that was left to the collector of garbage gives its connection back, whose socket may be closed
            if connection.sock is None or connection.sock.fileno() < 0 or _speaks(connection.sock):
                connection.close()
                continue
            connection.sock.settimeout(request.timeout)
            try:
                return self._asked(connection, request, waiting, stop)
            except TimeoutError:
                raise  # it was there, and nobody answered
            except (OSError, http.client.HTTPException):
                continue  # closed by the other side just now, or not worth finding out
        try:
            return self._asked(self._new(request), request, waiting, stop)
        except OSError as error:
            raise urllib.error.URLError(error) from error

    def _new(self, request: urllib.request.Request) -> http.client.HTTPConnection:
        host, timeout = request.host or "", request.timeout
        if request.type == "https":
            made: http.client.HTTPConnection = http.client.HTTPSConnection(host, timeout=timeout, context=self._secure)
        else:
            made = http.client.HTTPConnection(host, timeout=timeout)
        if behind := _behind_proxy(request):
            private = {k: v for k, v in request.headers.items() if k.lower() == _PROXY}
            made.set_tunnel(behind, headers=private)
        return made

    @functools.cached_property
    def _secure(self) -> ssl.SSLContext:
        """Made once: the certificates that are trusted take longer to read than a connection takes to open."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        request: urllib.request.Request,
        waiting: list[http.client.HTTPConnection],
        stop: Stop,
    ) -> Any:
        connection.response_class = functools.partial(_Reply, stop=stop)  # type: ignore[assignment]
        behind = _behind_proxy(request)
        headers = {**request.headers, **request.unredirected_hdrs}
        headers = {k.title(): v for k, v in headers.items() if not behind or k.lower() != _PROXY}

        def go_on() -> None:
            if stop.is_set():
                raise TimeoutError("nobody waits for it any more")

        try:
            if connection.sock is None:  # to find a host that does not answer, the system takes its time
                apart(connection.connect, go_on)
            connection.request(request.get_method(), request.selector, headers=headers)
            reply: Any = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        reply.url, reply.msg = request.full_url, reply.reason  # as urllib wants them
        reply.asked = request  # the last one, where redirections led elsewhere

        def done(again: bool) -> None:
            if again and len(waiting) < _KEPT:
                waiting.append(connection)
            else:
                connection.close()

        reply.done = done
        return reply


def _close(all_waiting: _Waiting) -> None:
    for (process, *_), waiting in all_waiting.items():
        while waiting and process == os.getpid():
            waiting.pop().close()


def _behind_proxy(request: urllib.request.Request) -> str:
    """The host that a proxy is to lead to, where one does."""
    return getattr(request, "_tunnel_host", None) or ""


def _speaks(sock: socket.socket) -> bool:
    """Whether something came that nobody asked for: the end of the connection, or bytes behind an answer."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(sock, selectors.EVENT_READ)
        return bool(waiting.select(0))


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Takes the place of both in an opener."""

    def __init__(self, connections: Connections, stop: Stop) -> None:
        super().__init__()
        self._stop = stop
        # an opener and its handlers know each other: they would keep sockets open until somebody collects them
        self._connections = weakref.ref(connections)

    def http_open(self, request: urllib.request.Request) -> Any:
        return (self._connections() or Connections()).open(request, self._stop)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.http_open(request)
