"""Connections to web servers that are used again: opening one takes several times as long as a small answer.

urllib closes a connection after every answer. The handlers here keep those whose answer was read to its end, for the
next request to the same place; everything else, redirections and proxies among it, stays urllib's.
"""

from __future__ import annotations

import http.client
import os
import selectors
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

_KEPT = 4  # connections that wait, to each place
_DRAINED = 1 << 12  # bytes of an answer that nobody wanted which are read for the sake of the connection
_Place = tuple[int, str, str, str]  # process, scheme, host, and the host behind a proxy


class _Reply(http.client.HTTPResponse):
    """An answer that says when it is done with, and whether it was read to its end."""

    done: Callable[[bool], None] | None = None

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


class Connections:
    """Those that wait for a request. Any number of threads may ask; a child of ``fork`` has none of its parent's."""

    def __init__(self) -> None:
        self._waiting: dict[_Place, list[http.client.HTTPConnection]] = {}
        self._closed = False

    def handlers(self) -> tuple[urllib.request.BaseHandler, ...]:
        return _Plain(self), _Secure(self)

    def open(self, kind: str, request: urllib.request.Request, make: Callable[[], http.client.HTTPConnection]) -> Any:
        """The answer to a request, by a connection that waits or by a new one."""
        behind = getattr(request, "_tunnel_host", None) or ""
        waiting = self._waiting.setdefault((os.getpid(), kind, request.host or "", behind), [])
        while waiting:
            try:
                connection = waiting.pop()
            except IndexError:  # somebody was quicker
                break
            if connection.sock is None or _speaks(connection.sock):
                connection.close()
                continue
            connection.sock.settimeout(request.timeout)
            try:
                return self._asked(connection, request, waiting)
            except (OSError, http.client.HTTPException):
                continue  # closed by the other side just now, or not worth finding out
        connection = make()
        connection.response_class = _Reply
        if behind:
            private = {k: v for k, v in request.headers.items() if k.lower() == "proxy-authorization"}
            connection.set_tunnel(behind, headers=private)
        try:
            return self._asked(connection, request, waiting)
        except OSError as error:
            raise urllib.error.URLError(error) from error

    def close(self) -> None:
        """Close those that wait, and every other one after its answer."""
        self._closed = True
        for (process, *_), waiting in self._waiting.items():
            while waiting and process == os.getpid():
                waiting.pop().close()

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        request: urllib.request.Request,
        waiting: list[http.client.HTTPConnection],
    ) -> Any:
        headers = {**request.headers, **request.unredirected_hdrs}
        behind = getattr(request, "_tunnel_host", None)
        headers = {k.title(): v for k, v in headers.items() if not behind or k.lower() != "proxy-authorization"}
        try:
            connection.request(request.get_method(), request.selector, headers=headers)
            reply: Any = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        reply.url, reply.msg = request.full_url, reply.reason  # as urllib wants them

        def done(again: bool) -> None:
            if again and len(waiting) < _KEPT and not self._closed:
                waiting.append(connection)
            else:
                connection.close()

        reply.done = done
        return reply


def _speaks(sock: socket.socket) -> bool:
    """Whether something came that nobody asked for: the end of the connection, or bytes behind an answer."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(sock, selectors.EVENT_READ)
        return bool(waiting.select(0))


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self._connections = connections

    def http_open(self, request: urllib.request.Request) -> Any:
        def make() -> http.client.HTTPConnection:
            return http.client.HTTPConnection(request.host or "", timeout=request.timeout)

        return self._connections.open("http", request, make)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self._connections = connections

    def https_open(self, request: urllib.request.Request) -> Any:
        def make() -> http.client.HTTPConnection:
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1"])
            return http.client.HTTPSConnection(request.host or "", timeout=request.timeout, context=context)

        return self._connections.open("https", request, make)
