"""Downloads and parts from servers that change, forget, compress or cut what they send."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ranvier.errors import CannotWrite, WeightError
from ranvier.weights import Bars, Unreachable, UrlSource, connections, save_safetensors
from ranvier.weights.access import Stopped
from ranvier.weights.cache import digest
from ranvier.weights.sources import web
from ranvier.weights.together import Stop
from tests.weights.server import Served, answer, kept, loader, serving, status

PATH = "/model.safetensors"


def contents(folder: Path, value: float) -> bytes:
    save_safetensors(folder / "x", {"a": np.full((300, 400), value, np.float32), "b": np.arange(3)})
    return (folder / "x").read_bytes()


@pytest.fixture
def old(tmp_path: Path) -> bytes:
    return contents(tmp_path, 1.0)


@pytest.fixture
def new(tmp_path: Path) -> bytes:
    return contents(tmp_path, 2.0)


@pytest.fixture
def served(old: bytes) -> Iterator[Served]:
    with serving(model__safetensors=old) as server:
        yield server


def interrupted(served: Served, tmp_path: Path) -> None:
    """A download that broke off: its first 100,000 bytes are in the cache."""
    served.stop_after = 100_000
    with pytest.raises(Unreachable):
        loader(tmp_path, retries=0).preload(served.url + PATH)


def test_another_version_in_the_middle_of_a_resume(served: Served, tmp_path: Path, new: bytes) -> None:
    interrupted(served, tmp_path)
    served.files[PATH] = new
    served.if_range = False  # it gives the rest of whatever it has now
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == new


def test_no_room_for_another_version(
    served: Served, tmp_path: Path, new: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of the old one is not taken for the beginning of the new one when there is room again."""

    def full(*_: Any) -> None:
        raise CannotWrite("the disk is full")

    interrupted(served, tmp_path)
    served.files[PATH] = new
    with monkeypatch.context() as patch, pytest.raises(CannotWrite):
        patch.setattr(web, "check_room", full)
        loader(tmp_path).preload(served.url + PATH)
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == new


def test_a_download_that_only_lacks_its_name(served: Served, tmp_path: Path, old: bytes) -> None:
    interrupted(served, tmp_path)
    (part,) = (tmp_path / "cache").glob("*/part")
    part.write_bytes(old)  # whole, and the process ended before it was kept: there is no byte behind it to ask for
    before = served.sent
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old
    assert served.sent - before < 10, "nothing is fetched twice"


def test_a_download_as_long_as_another_version_now_is(served: Served, tmp_path: Path, old: bytes) -> None:
    interrupted(served, tmp_path)
    (part,) = (tmp_path / "cache").glob("*/part")
    part.write_bytes(old)
    served.if_range = False  # the server does not look of which version the rest is wanted
    served.files[PATH] = new = old[:-1] + bytes([old[-1] ^ 1])
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == new


def test_a_checksum_that_nobody_waits_for(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large file takes a while; what had come is kept."""
    stop = Stop()

    def stopped(part: Path, between: Callable[[], None]) -> str:
        stop.set()
        return digest(part, between)

    monkeypatch.setattr(web, "digest", stopped)
    with pytest.raises(Stopped):
        loader(tmp_path, stop=stop).preload(served.url + PATH)
    monkeypatch.undo()
    before = served.sent
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == served.files[PATH]
    assert served.sent - before < 10


@pytest.mark.parametrize("header", ["bytes {}-{}/*", "nonsense", "bytes 7-9/10"])
def test_a_rest_that_is_not_told_of_what(served: Served, tmp_path: Path, old: bytes, header: str) -> None:
    interrupted(served, tmp_path)

    def rest(handler: Any) -> None:
        said = header.format(100_000, 100_049)
        body = old[100_000:100_050]
        answer(handler, 206, body, Content_Range=said, ETag=served.etag(PATH))

    served.fail, served.failure = 1, rest
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old


def test_a_part_where_all_was_asked_for(served: Served, tmp_path: Path, old: bytes) -> None:
    served.fail = 9
    served.failure = lambda h: answer(h, 206, old[:50], Content_Range="bytes 0-49/*")
    with pytest.raises(WeightError, match="with a part"):
        loader(tmp_path).preload(served.url + PATH)
    assert not kept(tmp_path)


def test_many_interruptions_of_a_large_file(tmp_path: Path) -> None:
    data = bytes(9 << 20)
    with serving(large__raw=data) as server:
        server.stop_after, server.stops = 5 << 18, True
        (path,) = loader(tmp_path, retries=1).preload(f"{server.url}/large.raw")
        assert path is not None and path.read_bytes() == data
        assert server.sent == len(data)


def test_an_interrupted_part_goes_on(served: Served, tmp_path: Path) -> None:
    weight = loader(tmp_path).open(served.url + PATH)["a"]
    served.sent, served.stop_after = 0, 300_000
    assert (weight.read() == 1.0).all()
    assert served.sent == 300 * 400 * 4


def test_compressed_bytes_are_not_the_file(served: Served, tmp_path: Path, old: bytes) -> None:
    served.fail = 9
    served.failure = lambda h: answer(h, 200, gzip.compress(old), Content_Encoding="gzip")
    for ask in (loader(tmp_path).preload, loader(tmp_path).metadata):
        with pytest.raises(WeightError, match=r"compressed \(gzip\)"):
            ask(served.url + PATH)
    assert not kept(tmp_path)


def test_a_page_that_claims_to_be_a_file(served: Served, tmp_path: Path) -> None:
    served.files["/page.safetensors"] = b"\n<!DOCTYPE html><p>Log in"
    with pytest.raises(WeightError, match="page of HTML"):
        loader(tmp_path).preload(f"{served.url}/page.safetensors")
    assert not kept(tmp_path)


def test_a_weak_etag_tells_a_newer_file(served: Served, tmp_path: Path, new: bytes) -> None:
    served.headers["ETag"] = 'W/"1"'
    loader(tmp_path).preload(served.url + PATH)
    served.headers["ETag"] = 'W/"2"'
    served.files[PATH] = new  # of the same size
    assert loader(tmp_path).load(served.url + PATH, "a")[0, 0] == 2.0


def test_a_weak_etag_is_not_gone_on_with(served: Served, tmp_path: Path, new: bytes) -> None:
    served.headers["ETag"] = 'W/"1"'
    interrupted(served, tmp_path)
    served.files[PATH] = new
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == new


def test_a_file_that_changes_under_an_open_checkpoint(served: Served, tmp_path: Path, old: bytes) -> None:
    served.headers["ETag"] = ""  # the size tells it all the same
    weight = loader(tmp_path).open(served.url + PATH)["a"]
    served.files[PATH] = old + bytes(8)
    with pytest.raises(WeightError, match="changed while it was read"):
        weight.read()


@pytest.mark.parametrize("query", ["", "?signature=1"])
def test_shards_lie_beside_their_index(served: Served, tmp_path: Path, query: str) -> None:
    served.files["/m.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    loader(tmp_path).preload(f"{served.url}/m.safetensors.index.json{query}")
    assert len(kept(tmp_path)) == 2
    served.files["/m.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../model.safetensors"}}).encode()
    served.requests.clear()
    with pytest.raises(WeightError, match="no name of a file beside it"):
        loader(tmp_path).preload(f"{served.url}/m.safetensors.index.json{query}")
    assert not any(".." in path for _, path, _ in served.requests)


def test_what_people_write_in_addresses(served: Served, tmp_path: Path, old: bytes) -> None:
    served.files["/mod%C3%A8le%20a.safetensors"] = old
    assert loader(tmp_path).available(f"{served.url}/modèle a.safetensors")
    loader(tmp_path).metadata(served.url.replace("http://", "http://me:p%40ss@") + PATH)
    assert served.seen_headers[-1]["authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("url", ["http://host:port/x", "http://[::1/x", "http:///x", "http://" + "é" * 70 + "/x"])
def test_addresses_that_are_none(tmp_path: Path, url: str) -> None:
    with pytest.raises(WeightError, match="no address of a file"):
        loader(tmp_path).metadata(url)


@pytest.mark.parametrize("value", ["secret\n", "secret\r\nX-Other: 1", "secret €", b"secret\n"])
def test_headers_that_cannot_be_sent(served: Served, tmp_path: Path, value: Any) -> None:
    """The end of a line is in many a token that was read from a file: the header is named, its value is not."""
    with pytest.raises(WeightError, match="cannot be asked: the header 'X-Key'") as caught:
        loader(tmp_path).metadata(UrlSource(served.url + PATH, {"X-Other": "1", "X-Key": value}))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host:99999/file",
        "https://me:secret/secret@host/file",
        "https://me:secret@[host/file?signature=secret",
        "https://me:secret#secret@host/file",
        "htps://me:secret@host/file?signature=secret",
        "https:///file?signature=secret",
    ],
)
def test_addresses_that_are_none_tell_no_secrets(tmp_path: Path, url: str) -> None:
    for source in (url, UrlSource(url)):
        with pytest.raises(WeightError) as caught:
            loader(tmp_path).metadata(source)
        assert "secret" not in str(caught.value)


def test_a_redirection_with_a_body_without_end(served: Served, tmp_path: Path, old: bytes) -> None:
    sent = 0

    def endless(handler: Any) -> None:
        nonlocal sent
        handler.send_response(302)
        handler.send_header("Location", PATH)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        with contextlib.suppress(OSError):
            while sent < 1 << 28:
                sent += handler.wfile.write(bytes(1 << 20))
        handler.close_connection = True

    served.fail, served.failure = 1, endless
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old
    assert sent < 1 << 27, "nobody reads it"


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity, chunked"])
def test_transfers_that_are_not_plain(served: Served, tmp_path: Path, old: bytes, coding: str) -> None:
    """What would be kept is the transfer, not the file."""
    served.headers = {"Transfer-Encoding": coding, "Content-Length": ""}
    for ask in (loader(tmp_path).preload, loader(tmp_path).metadata):
        with pytest.raises(WeightError, match="not plainly"):
            ask(served.url + PATH)
    assert not kept(tmp_path)


@pytest.mark.parametrize("etag", ["", '"1"'])
def test_an_answer_whose_end_nobody_tells_is_asked_for_again(
    served: Served, tmp_path: Path, old: bytes, etag: str
) -> None:
    """It may have been cut off: the next time it may be whole."""
    length = 1000

    def untold(handler: Any) -> None:
        handler.send_response(200)
        if etag:
            handler.send_header("ETag", etag)
        handler.end_headers()
        handler.wfile.write(old[:length])
        handler.close_connection = True

    served.fail, served.failure = 99, untold
    with pytest.raises(WeightError, match="cut off"):
        loader(tmp_path).metadata(served.url + PATH)
    length = len(old)
    assert loader(tmp_path).load(served.url + PATH, "b").tolist() == [0, 1, 2]
    assert loader(tmp_path, offline=True).load(served.url + PATH, "b").tolist() == [0, 1, 2]


def test_a_part_that_nobody_can_go_on_with_is_not_kept(served: Served, tmp_path: Path) -> None:
    served.headers = {"ETag": ""}
    served.stop_after, served.stops = 100_000, True
    with pytest.raises(Unreachable):
        loader(tmp_path, retries=0).preload(served.url + PATH)
    assert not list((tmp_path / "cache").glob("*/part"))


@pytest.mark.parametrize("sha256", ["abc", "sha256:" + "0" * 64, "0" * 63 + "g"])
def test_checksums_that_are_none(served: Served, tmp_path: Path, sha256: str) -> None:
    for work in (loader(tmp_path).preload, loader(tmp_path).metadata):
        with pytest.raises(WeightError, match="is no sha256"):
            work(UrlSource(served.url + PATH, sha256=sha256))
    assert not served.requests


def test_an_empty_file(tmp_path: Path) -> None:
    """Which has no first byte that one could ask for."""
    with serving(none__raw=b"") as server:
        found = loader(tmp_path)
        assert found.available(f"{server.url}/none.raw")
        for _ in range(2):
            (path,) = found.preload(f"{server.url}/none.raw")
            assert path is not None and path.read_bytes() == b""
        assert found.load(f"{server.url}/none.raw", dtype="float32", shape=(0, 3)).shape == (0, 3)


def test_any_number_of_attempts(served: Served, tmp_path: Path) -> None:
    """The time between them does not double beyond what a number can be."""
    waits: list[float] = []
    served.fail, served.failure = 1100, status(503)
    found = loader(tmp_path, retries=2000, sleep=waits.append)
    assert found.available(served.url + PATH)
    assert len(waits) == 1100 and waits[-1] == 0.01


def test_no_header_of_the_caller_follows_a_redirect_elsewhere(served: Served, tmp_path: Path, old: bytes) -> None:
    with serving(model__safetensors=old) as other:
        served.fail, served.failure = 1, status(302, Location=other.url + PATH)
        loader(tmp_path).metadata(UrlSource(served.url + PATH, {"X-Api-Key": "secret", "Private-Token": "secret"}))
        assert "secret" not in other.seen_headers[0].values()
        assert other.seen_headers[0]["range"] == "bytes=0-0"


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 19, "-5", "1e3", "5, 7", "0x10", ""])
def test_lengths_that_are_none(served: Served, tmp_path: Path, old: bytes, length: str) -> None:
    """An answer that ends before its length is not the file, so a length must be a number."""

    def told(handler: Any) -> None:
        answer(handler, 200, old, Content_Length=length)
        handler.close_connection = True

    served.fail, served.failure = 9, told
    for work in (loader(tmp_path).preload, loader(tmp_path).load_many):
        with pytest.raises(WeightError, match="says that it sends"):
            work(served.url + PATH)
    assert not kept(tmp_path)


def test_two_lengths(served: Served, tmp_path: Path, old: bytes) -> None:
    def told(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "10")
        answer_rest(handler, old)

    served.fail, served.failure = 9, told
    with pytest.raises(WeightError, match=f"says that it sends '10 or {len(old)}' bytes"):
        loader(tmp_path).preload(served.url + PATH)
    assert not kept(tmp_path)


def answer_rest(handler: Any, body: bytes) -> None:
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    handler.close_connection = True


def test_chunks_end_by_themselves(served: Served, tmp_path: Path, old: bytes) -> None:
    """A length beside them says nothing."""

    def chunks(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Content-Length", "5")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(old), old))

    served.fail, served.failure = 9, chunks
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old


@pytest.mark.parametrize("code", [201, 202, 203, 204, 205])
def test_answers_that_are_no_file(served: Served, tmp_path: Path, code: int) -> None:
    served.fail, served.failure = 9, status(code)
    for work in (loader(tmp_path).preload, loader(tmp_path).load_many):
        with pytest.raises(WeightError, match=f"answered {code} .*not with a file"):
            work(served.url + PATH)
    assert not kept(tmp_path)


def test_what_a_server_says_does_not_speak_to_the_terminal(served: Served, tmp_path: Path) -> None:
    def rude(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 404 \x1b[2J\x07No\x9b\r\nContent-Length: 0\r\n\r\n")

    def no_answer(handler: Any) -> None:
        handler.wfile.write(b"\x1b]0;title\x07" * 1000 + b"\r\n")
        handler.close_connection = True

    for failure in (rude, no_answer):
        served.fail, served.failure = 9, failure
        with pytest.raises(WeightError) as caught:
            loader(tmp_path).metadata(served.url + PATH)
        assert str(caught.value).isprintable() and r"\x1b" in str(caught.value) and len(str(caught.value)) < 2000


def drips_its_head(handler: Any) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 400:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.02)


def drips_its_body(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    for _ in range(400):
        handler.wfile.write(b"a")
        time.sleep(0.02)


def goes_on_without_end(handler: Any) -> None:
    for _ in range(1000):  # which is long enough
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes an eighth of a second, and a period of an answer two of them and a half."""
    clock = itertools.count()
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: next(clock) / 8))
    monkeypatch.setattr(connections, "_LEAST_PERIOD", 0.3)
    monkeypatch.setattr(connections, "_TIMES", 0.0)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("failure", [drips_its_head, drips_its_body, goes_on_without_end])
def test_a_server_that_never_stops_and_never_gets_anywhere(served: Served, tmp_path: Path, failure: Any) -> None:
    def quietly(handler: Any) -> None:
        with contextlib.suppress(OSError):
            failure(handler)
        handler.close_connection = True

    served.fail, served.failure = 9, quietly
    with pytest.raises(Unreachable, match=r"no more than [1-9][0-9]* bytes in 0\.375 seconds"):
        loader(tmp_path, retries=0).preload(served.url + PATH)
    assert not kept(tmp_path)


@pytest.mark.usefixtures("ticks")
def test_a_slow_server_that_gets_somewhere(
    served: Served, tmp_path: Path, old: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A period is over several times, and each has brought enough."""

    def slowly(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(old)))
        handler.end_headers()
        for start in range(0, len(old), len(old) // 12):
            handler.wfile.write(old[start : start + len(old) // 12])
            time.sleep(0.03)

    monkeypatch.setattr(connections, "_PACE", 1)
    served.fail, served.failure = 9, slowly
    (path,) = loader(tmp_path, retries=0).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old


def test_bars_of_files_with_one_name(served: Served, tmp_path: Path, old: bytes) -> None:
    with Bars() as bars:
        for _ in range(2):
            bars.begin("http://host/1/a", 10)
        bars.begin("http://host/2/a", 10)
        bars.end("http://host/1/a")
        bars.advance("http://host/1/a", 5)
        bars.end("http://host/1/a")
        bars.advance("http://host/1/a", 5)  # one who was stopped and does not know it yet
        bars.advance("http://host/2/a", 10)
        bars.end("http://host/2/a")


def test_bars_of_names_that_look_like_styles(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        for name in ("http://host/[red]m", "http://host/[/red]/", "http://host/a\x1b[2Jb"):
            bars.begin(name, 10)
            bars.end(name)
    shown = capsys.readouterr().err
    assert "[red]m" in shown and "[/red]/" in shown and "a?[2Jb" in shown and "\x1b[2J" not in shown


def test_progress_of_a_download_that_begins_anew(served: Served, tmp_path: Path, new: bytes) -> None:
    counts: list[int] = []

    class Counts:
        def begin(self, name: str, total: int | None, done: int = 0) -> None:
            counts.append(done)

        def advance(self, name: str, count: int) -> None:
            counts.append(count)

        def end(self, name: str) -> None:
            pass

    def changed(_: float) -> None:
        served.files[PATH] = new

    served.stop_after = 100_000
    loader(tmp_path, progress=Counts(), sleep=changed).preload(served.url + PATH)
    assert sum(counts) == len(new) and min(counts) == -100_000


def test_a_remote_archive_is_listed_without_a_request_for_each_member(tmp_path: Path) -> None:
    data = (Path(__file__).parent / "data" / "archive.pt").read_bytes()
    with serving(m__pt=data) as server:
        found = loader(tmp_path).open(f"{server.url}/m.pt")
        assert len(found) > 10 and len(server.requests) < 8
        np.testing.assert_array_equal(found["model.whole"].read(), np.arange(7))


def test_a_remote_npz(tmp_path: Path) -> None:
    arrays = {f"a{k}": np.full((50, 100), k, np.float32) for k in range(6)}
    np.savez(tmp_path / "m.npz", **arrays)  # type: ignore[arg-type]
    np.savez_compressed(tmp_path / "c.npz", **arrays)  # type: ignore[arg-type]
    files = {name: (tmp_path / f"{name}.npz").read_bytes() for name in "mc"}
    with serving(m__npz=files["m"], c__npz=files["c"]) as server:
        opened = loader(tmp_path).open(f"{server.url}/m.npz")
        server.sent = 0
        np.testing.assert_array_equal(opened["a3"].read((slice(1, 3, 1), slice(0, 100, 1))), arrays["a3"][1:3])
        assert server.sent == 2 * 100 * 4
        np.testing.assert_array_equal(loader(tmp_path).load(f"{server.url}/c.npz", "a4"), arrays["a4"])
