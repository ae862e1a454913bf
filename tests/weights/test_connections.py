"""Connections that are used again: fewer of them, and the same answers from servers that end or spoil them."""

from __future__ import annotations

import gc
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights import connections
from ranvier.weights.access import Access, Transient, Unreachable
from ranvier.weights.http import HttpFile
from tests.weights.server import Served, answer, loader, serving

DATA = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(m__bin=DATA.tobytes()) as server:
        yield server


def impatient(timeout: float = 5.0) -> Access:
    """With connections of its own."""
    return Access(retries=0, timeout=timeout)


def opened(served: Served, access: Access | None = None) -> tuple[HttpFile, Any]:
    file = HttpFile(served.url + "/m.bin", access or impatient())
    return file, file.question()


def kept(file: HttpFile) -> list[Any]:
    """Connections that wait."""
    return [each for waiting in file.access.connections._waiting.values() for each in waiting]


def test_ranges_come_by_one_connection(served: Served) -> None:
    file, remote = opened(served)
    for start in range(0, 100_000, 9_000):
        np.testing.assert_array_equal(file.range(start, start + 7_000, remote), DATA[start : start + 7_000])
    assert len(served.requests) == 13 and len(served.ports) == 1


def test_threads_have_connections_of_their_own(served: Served) -> None:
    file, remote = opened(served)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda k: file.range(k * 1000, k * 1000 + 1000, remote), range(150)))
    np.testing.assert_array_equal(np.concatenate(found), DATA[:150_000])
    assert 1 <= len(served.ports) < 40


def test_a_server_that_says_it_closes(served: Served) -> None:
    served.headers["Connection"] = "close"
    file, remote = opened(served)
    for start in (0, 500, 1000):
        np.testing.assert_array_equal(file.range(start, start + 100, remote), DATA[start : start + 100])
    assert len(served.ports) == 4


def ends_quietly(handler: Any) -> None:
    """The answer, and the end of the connection, of which no word was said."""
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    body = DATA[first : last + 1].tobytes()
    answer(handler, 206, body, Content_Range=f"bytes {first}-{last}/{len(DATA)}")
    handler.close_connection = True


def says_too_much(handler: Any) -> None:
    """More than was announced: bytes that look like the next answer."""
    ends_quietly(handler)
    handler.wfile.flush()
    time.sleep(0.02)
    handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\n\r\n" + bytes(100))
    handler.close_connection = False


@pytest.mark.parametrize("failure", [ends_quietly, says_too_much])
def test_connections_that_are_spoilt_cost_no_attempt(served: Served, failure: Any) -> None:
    file, remote = opened(served)
    served.fail, served.failure = 3, failure
    for start in (0, 500, 1000, 1500, 2000):
        spoilt = served.fail > 0
        np.testing.assert_array_equal(file.range(start, start + 100, remote), DATA[start : start + 100])
        for connection in kept(file) if spoilt else []:
            select.select([connection.sock], [], [], 0.5)  # what spoils it may be still to come, or came along
    assert len(served.requests) == 6


def test_a_connection_that_ends_when_it_is_used(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be seen of it before."""
    monkeypatch.setattr(connections, "_speaks", lambda sock: False)
    file, remote = opened(served)
    served.fail, served.failure = 1, ends_quietly
    for start in (0, 500, 1000):
        np.testing.assert_array_equal(file.range(start, start + 100, remote), DATA[start : start + 100])
    assert len(served.ports) == 2


def test_a_connection_on_which_nobody_answers_is_not_tried_again_by_another(served: Served) -> None:
    file, remote = opened(served, impatient(0.3))
    served.fail, served.failure = 1, lambda handler: time.sleep(1.0)
    with pytest.raises(Unreachable, match="timed out"):
        file.range(0, 100, remote)
    assert len(served.requests) == 2 and len(served.ports) == 1


def test_an_answer_that_was_left_is_not_read_by_the_next(served: Served) -> None:
    file, remote = opened(served)
    pieces = file._range(0, 150_000, remote)
    next(pieces)
    pieces.close()
    np.testing.assert_array_equal(file.range(7, 1000, remote), DATA[7:1000])
    assert len(served.ports) == 2


def test_an_answer_that_is_left_to_the_collector_of_garbage(served: Served) -> None:
    """The socket is closed by then, and the connection it belongs to is no use to anybody."""
    file, remote = opened(served)
    served.fail, served.failure = 1, lambda handler: answer(handler, 200, b"")
    reply = file._send({})
    reply.itself = reply
    del reply
    gc.collect()
    np.testing.assert_array_equal(file.range(7, 1000, remote), DATA[7:1000])


@pytest.mark.parametrize("place", ["http://[bad/x", "ftp://host/file"])
def test_the_connection_of_a_redirection_that_is_not_followed_goes_on(served: Served, place: str) -> None:
    file, remote = opened(served)
    served.fail, served.failure = 1, lambda handler: answer(handler, 302, b"", Location=place)
    with pytest.raises(WeightError):
        file.range(0, 100, remote)
    np.testing.assert_array_equal(file.range(7, 1000, remote), DATA[7:1000])
    assert len(served.ports) == 1


def test_another_process_has_none_of_them(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file, remote = opened(served)
    monkeypatch.setattr(connections, "os", SimpleNamespace(getpid=lambda: os.getpid() + 1))
    np.testing.assert_array_equal(file.range(7, 1000, remote), DATA[7:1000])
    assert len(served.ports) == 2


def test_files_share_connections(served: Served) -> None:
    served.files |= {f"/{k}": DATA[k:].tobytes() for k in range(40)}
    access = impatient()
    files = [HttpFile(f"{served.url}/{k}", access) for k in range(40)]  # all of them open at the same time
    for k, file in enumerate(files):
        np.testing.assert_array_equal(file.range(5, 10, file.question()), DATA[k + 5 : k + 10])
    assert len(served.requests) == 80 and len(served.ports) == 1


def test_the_last_that_is_let_go_closes_connections(served: Served) -> None:
    """Without waiting for the garbage collector."""
    access = impatient()
    first, second = opened(served, access)[0], opened(served, access)[0]
    (connection,) = kept(first)
    gc.disable()
    try:
        del first, access
        assert connection.sock is not None
        del second
        assert connection.sock is None
    finally:
        gc.enable()


def test_a_proxy_is_asked_for_other_hosts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", served.url)
    monkeypatch.delenv("no_proxy", raising=False)
    served.files["http://elsewhere.invalid/m.bin"] = DATA.tobytes()
    file = HttpFile("http://elsewhere.invalid/m.bin", impatient())
    remote = file.question()
    for start in (0, 500):
        np.testing.assert_array_equal(file.range(start, start + 100, remote), DATA[start : start + 100])
    assert len(served.ports) == 1


def test_a_server_without_tls_is_told_from_one_that_has_it(served: Served) -> None:
    with pytest.raises(Unreachable, match="SSL"):
        HttpFile(served.url.replace("http:", "https:") + "/m.bin", impatient()).question()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises((Transient, WeightError)):
        HttpFile(f"http://127.0.0.1:{port}/m.bin", impatient()).question()


def test_loading_everything_by_ranges_takes_few_connections(served: Served, tmp_path: Path) -> None:
    found = loader(tmp_path)
    for part in (slice(0, 10), slice(100, 200), slice(5000, 5001)):
        got = found.load(served.url + "/m.bin", "tensor", part=part, format="raw", dtype="uint8", shape=(200_000,))
        np.testing.assert_array_equal(got, DATA[part])
    assert len(served.requests) == 6 and len(served.ports) == 1
