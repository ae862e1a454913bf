"""A web server of the test's own, which misbehaves as told, and a loader that has no patience with it."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ranvier.weights import WeightLoader


@dataclass
class Served:
    """What the server has and does; tests change it while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # added to every answer
    ranges: bool = True
    if_range: bool = True  # the rest of a file is given only of the version that is asked for
    fail: int = 0  # so many requests are answered by ``failure`` first
    failure: Callable[[Any], None] | None = None
    stop_after: int | None = None  # bytes after which the connection is closed, once
    stops: bool = False  # not once, but every time
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    ports: set[int] = field(default_factory=set)  # of those who asked: one for each connection
    url: str = ""

    def etag(self, path: str) -> str:
        return f'"{hashlib.sha256(self.files[path]).hexdigest()[:16]}"'


def answer(handler: Any, code: int, body: bytes, **headers: str) -> None:
    handler.send_response(code)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(body)


def status(code: int, **headers: str) -> Callable[[Any], None]:
    return lambda handler: answer(handler, code, b"", **headers)


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None, /, **files: bytes) -> Iterator[Served]:
    served = Served({f"/{name.replace('__', '.')}": data for name, data in files.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as servers do: the head and the body of an answer are sent one by one

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked = self.headers.get("Range", "")
            served.requests.append((self.command, path, asked))
            served.ports.add(self.client_address[1])
            served.seen_headers.append({k.lower(): v for k, v in self.headers.items()})
            if served.fail > 0 and served.failure is not None:
                served.fail -= 1
                served.failure(self)
                return
            data = served.files.get(path)
            if data is None:
                status(404)(self)
                return
            start, stop, code = 0, len(data), 200
            current = not served.if_range or self.headers.get("If-Range") in (None, served.etag(path))
            if asked and served.ranges and current:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop, code = int(first), min(len(data), int(last) + 1 if last else len(data)), 206
                if start >= len(data):
                    status(416)(self)
                    return
            self.send_response(code)
            if code == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            kind = {"Content-Length": str(stop - start), "ETag": served.etag(path)}
            for name, value in {**kind, **served.headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if not body:
                return
            if served.stop_after is not None and stop - start > served.stop_after:
                stop = start + served.stop_after
                served.stop_after = served.stop_after if served.stops else None
                self.close_connection = True
            served.sent += stop - start
            with contextlib.suppress(OSError):
                self.wfile.write(data[start:stop])

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # those of clients who have heard enough
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def loader(tmp_path: Path, **options: Any) -> WeightLoader:
    """One that does not wait long, with a cache of its own."""
    settings = {"retries": 2, "backoff": 1e-3, "longest_wait": 0.01, "timeout": 5.0, **options}
    return WeightLoader(cache=tmp_path / "cache", **settings)


def kept(tmp_path: Path) -> list[Path]:
    """Files in that cache."""
    return list((tmp_path / "cache").glob("*/data"))
