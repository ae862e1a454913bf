"""Proxies: files behind one that leads to the host (``CONNECT``), by connections that are kept."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.weights import WeightLoader
from ranvier.weights.access import Access, Unreachable
from ranvier.weights.http import HttpFile
from tests.weights.server import Served, loader, serving, status

CERTIFICATE = Path(__file__).parent / "data" / "localhost.pem"
DATA = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
URL = "https://elsewhere.test/m.bin"  # a host that only the proxy knows


@dataclass
class Proxy:
    """Leads wherever it is asked to a single server, and remembers what it was told."""

    target: tuple[str, int] = ("127.0.0.1", 0)
    port: int = 0
    refuse: int = 0  # the status every request is answered with
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    led: list[socket.socket] = field(default_factory=list)  # to the server

    def cut(self) -> None:
        """Break off all connections that it leads."""
        for each in self.led:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxying() -> Iterator[Proxy]:
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_CONNECT(self) -> None:
            proxy.asked.append(self.path)
            proxy.headers.append({k.lower(): v for k, v in self.headers.items()})
            if proxy.refuse:
                self.send_response(proxy.refuse, "No")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with socket.create_connection(proxy.target) as server:
                proxy.led.append(server)
                self.send_response(200, "Connection established")
                self.end_headers()
                between(self.connection, server)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    proxy.port = server.server_address[1]
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def between(one: socket.socket, other: socket.socket) -> None:
    """What one says to the other, until either falls silent for good."""
    with contextlib.suppress(OSError):
        while True:
            for source in select.select([one, other], [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                (other if source is one else one).sendall(data)


@pytest.fixture
def served() -> Iterator[Served]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with serving(context, m__bin=DATA.tobytes()) as server:
        yield server


@pytest.fixture
def proxy(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with proxying() as found:
        found.target = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        monkeypatch.setenv("https_proxy", f"http://some%20one:secret@127.0.0.1:{found.port}")
        yield found


def opened(**headers: str) -> tuple[HttpFile, Any]:
    file = HttpFile(URL, Access(retries=0, timeout=5.0), headers)
    return file, file.question()


def test_ranges_come_by_one_connection(served: Served, proxy: Proxy) -> None:
    file, remote = opened()
    for start in range(0, 100_000, 9_000):
        np.testing.assert_array_equal(file.range(start, start + 7_000, remote), DATA[start : start + 7_000])
    assert proxy.asked == ["elsewhere.test:443"]
    assert len(served.requests) == 13 and len(served.ports) == 1
    assert {headers["host"] for headers in served.seen_headers} == {"elsewhere.test"}


def test_each_hears_its_own_secrets_only(served: Served, proxy: Proxy) -> None:
    file, remote = opened(Authorization="Bearer of the file")
    file.range(0, 10, remote)
    assert [headers["proxy-authorization"] for headers in proxy.headers] == ["Basic c29tZSBvbmU6c2VjcmV0"]
    assert not any("authorization" in headers for headers in proxy.headers)
    assert all(headers["authorization"] == "Bearer of the file" for headers in served.seen_headers)
    assert not any("proxy-authorization" in headers for headers in served.seen_headers)


def test_hosts_behind_one_proxy_are_told_apart(served: Served, proxy: Proxy) -> None:
    access = Access(retries=0, timeout=5.0)
    for host in ("elsewhere.test", "localhost", "elsewhere.test", "localhost"):
        HttpFile(f"https://{host}/m.bin", access).question()
    assert proxy.asked == ["elsewhere.test:443", "localhost:443"]
    assert [headers["host"] for headers in served.seen_headers] == ["elsewhere.test", "localhost"] * 2


def test_a_connection_that_the_proxy_cut(served: Served, proxy: Proxy) -> None:
    file, remote = opened()
    proxy.cut()
    np.testing.assert_array_equal(file.range(0, 100, remote), DATA[:100])
    assert len(proxy.asked) == 2


def test_a_certificate_of_another_host(served: Served, proxy: Proxy) -> None:
    with pytest.raises(Exception, match="certificate is not valid"):
        HttpFile("https://another.test/m.bin", Access(retries=0, timeout=5.0)).question()
    assert not served.requests


@pytest.mark.parametrize("code", [403, 407])
def test_a_proxy_that_refuses_is_not_asked_again(proxy: Proxy, tmp_path: Path, code: int) -> None:
    proxy.refuse = code
    with pytest.raises(Unreachable, match=rf"the proxy refuses to lead there \({code} No\)"):
        loader(tmp_path).available(URL)
    assert len(proxy.asked) == 1


def test_a_proxy_that_wants_a_password(served: Served, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that passes requests on."""
    with serving() as passing:
        passing.fail, passing.failure = 1, status(407)
        monkeypatch.setenv("http_proxy", passing.url)
        with pytest.raises(Unreachable, match=r"the proxy refuses to lead there \(407 Proxy Auth"):
            HttpFile("http://elsewhere.test/m.bin", Access(timeout=5.0)).question()
    assert len(passing.requests) == 1


def test_a_file_in_the_cache_does_without_a_proxy_that_refuses(proxy: Proxy, tmp_path: Path) -> None:
    loader(tmp_path).preload(URL)
    proxy.refuse = 403
    assert loader(tmp_path).load(URL, format="raw", dtype="uint8", shape=(7,)).tobytes() == DATA[:7].tobytes()


def test_a_proxy_that_cannot_reach_the_host(proxy: Proxy, tmp_path: Path) -> None:
    proxy.refuse = 503
    with pytest.raises(Unreachable, match="503 No"):
        loader(tmp_path).metadata(URL, format="raw")
    assert len(proxy.asked) == 3


def test_hosts_that_are_asked_without_it(served: Served, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert HttpFile(served.url + "/m.bin", Access(retries=0, timeout=5.0)).question().size == len(DATA)
    assert not proxy.asked


def test_a_part_of_a_tensor(served: Served, proxy: Proxy, tmp_path: Path) -> None:
    found: WeightLoader = loader(tmp_path)
    for part in (slice(0, 10), slice(100, 200)):
        got = found.load(URL, "tensor", part=part, format="raw", dtype="uint8", shape=(200_000,))
        np.testing.assert_array_equal(got, DATA[part])
    found.preload(URL)
    assert found.load(URL, format="raw", dtype="uint8", shape=(200_000,)).tobytes() == DATA.tobytes()
    assert len(proxy.asked) == 1
