"""Downloads and parts from servers that change, forget, compress or cut what they send."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights import Bars, Unreachable, UrlSource, save_safetensors
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


def test_a_download_that_only_lacks_its_name(served: Served, tmp_path: Path, old: bytes) -> None:
    interrupted(served, tmp_path)
    (part,) = (tmp_path / "cache").glob("*/part")
    part.write_bytes(old)  # whole, and the process ended before it was kept: there is no byte behind it to ask for
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == old


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


@pytest.mark.parametrize("value", ["a\nb", "€"])
def test_headers_that_cannot_be_sent(served: Served, tmp_path: Path, value: str) -> None:
    with pytest.raises(WeightError, match="cannot be asked"):
        loader(tmp_path).metadata(UrlSource(served.url + PATH, {"X-Key": value}))


def test_no_header_of_the_caller_follows_a_redirect_elsewhere(served: Served, tmp_path: Path, old: bytes) -> None:
    with serving(model__safetensors=old) as other:
        served.fail, served.failure = 1, status(302, Location=other.url + PATH)
        loader(tmp_path).metadata(UrlSource(served.url + PATH, {"X-Api-Key": "secret", "Private-Token": "secret"}))
        assert "secret" not in other.seen_headers[0].values()
        assert other.seen_headers[0]["range"] == "bytes=0-0"


def test_a_length_of_five_thousand_digits(served: Served, tmp_path: Path, old: bytes) -> None:
    def endless(handler: Any) -> None:
        answer(handler, 200, old, Content_Length="9" * 5000)
        handler.close_connection = True

    served.fail, served.failure = 9, endless
    assert (loader(tmp_path).load(served.url + PATH, "a") == 1.0).all()


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
