"""What is kept is what was asked for: damaged copies are noticed, and what is no file of weights is not taken in."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import IntegrityError, WeightError
from ranvier.weights import HubSource, NotCached, UrlSource, WeightCache, WeightLoader, save_safetensors
from ranvier.weights import cache as cache_module
from ranvier.weights.http import Page, check_no_page
from tests.weights.server import Served, answer, kept, loader, serving

PATH = "/model.safetensors"
NUMBERS = list(range(2000))


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_safetensors(tmp_path / "x", {"a": np.arange(2000, dtype=np.float32)})
    return (tmp_path / "x").read_bytes()


@pytest.fixture
def served(whole: bytes) -> Iterator[Served]:
    with serving(model__safetensors=whole) as server:
        yield server


def given(served: Served, whole: bytes) -> UrlSource:
    return UrlSource(served.url + PATH, sha256=hashlib.sha256(whole).hexdigest())


def flip(path: Path) -> None:
    """Another last byte, in a file of the same length."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0x40]))


def damaged(served: Served, tmp_path: Path, whole: bytes) -> tuple[UrlSource, Path]:
    """A file with a checksum, and its copy in the cache, of which a byte is another."""
    source = given(served, whole)
    (path,) = loader(tmp_path).preload(source)
    assert path is not None
    flip(path)
    return source, path


def settled(path: Path) -> None:
    """As if nobody had written to it for a while: a file that was written to just now is read every time."""
    then = time.time_ns() - 10**10
    os.utime(path, ns=(then, then))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files in caches whose bytes were read for their checksum."""
    found: list[Path] = []
    real = cache_module.digest

    def digest(path: Path, *rest: Any, **more: Any) -> str:
        found.append(path)
        return real(path, *rest, **more)

    monkeypatch.setattr(cache_module, "digest", digest)
    return found


# -- with a checksum ------------------------------------------------------------------------------------------------


def test_a_damaged_copy_of_a_file_with_a_checksum_is_fetched_again(
    served: Served, tmp_path: Path, whole: bytes
) -> None:
    source, path = damaged(served, tmp_path, whole)
    assert loader(tmp_path).load(source).tolist() == NUMBERS
    assert path.read_bytes() == whole
    flip(path)
    (again,) = loader(tmp_path).preload(source)
    assert again is not None and again.read_bytes() == whole, "a path is that of a file which was looked at"


@pytest.mark.parametrize("with_sha256", [True, False])
def test_a_damaged_copy_without_the_network(served: Served, tmp_path: Path, whole: bytes, with_sha256: bool) -> None:
    source = given(served, whole) if with_sha256 else UrlSource(served.url + PATH)
    off = loader(tmp_path, offline=True, verify=not with_sha256)
    (path,) = loader(tmp_path).preload(source)
    assert path is not None
    assert off.load(source).tolist() == NUMBERS
    flip(path)
    for work in (off.load, off.preload, off.load_many, off.metadata):
        with pytest.raises(IntegrityError, match="is damaged: its checksum is"):
            work(source)
    online = loader(tmp_path, verify=not with_sha256)
    online.preload(source)
    assert off.load(source).tolist() == NUMBERS


def test_a_damaged_copy_goes_also_where_it_cannot_be_fetched_again(
    served: Served, tmp_path: Path, whole: bytes
) -> None:
    source, _ = damaged(served, tmp_path, whole)
    served.files.clear()
    with pytest.raises(WeightError, match="no such file"):
        loader(tmp_path).load(source)
    with pytest.raises(NotCached):
        loader(tmp_path, offline=True).load(UrlSource(served.url + PATH))


def test_one_file_is_not_read_for_every_load(served: Served, tmp_path: Path, whole: bytes, hashed: list[Path]) -> None:
    source = given(served, whole)
    (path,) = loader(tmp_path).preload(source)
    assert path is not None
    settled(path)
    hashed.clear()
    for _ in range(5):
        assert loader(tmp_path).load(source).tolist() == NUMBERS
        assert loader(tmp_path, verify=True, offline=True).load(served.url + PATH).tolist() == NUMBERS
    assert hashed == [path]
    flip(path)
    settled(path)
    with pytest.raises(IntegrityError):
        loader(tmp_path, offline=True).load(source)
    assert hashed == [path, path]


def test_a_file_that_nobody_gave_a_checksum_of_is_not_read(served: Served, tmp_path: Path, hashed: list[Path]) -> None:
    loader(tmp_path).preload(served.url + PATH)
    hashed.clear()
    assert loader(tmp_path).load(served.url + PATH).tolist() == NUMBERS
    assert not hashed


# -- the hub's cache ------------------------------------------------------------------------------------------------


def hub_cache(folder: Path, name: str, data: bytes, blob: str) -> Path:
    """A folder as the hub's client leaves it; gives the file that holds the bytes."""
    commit, place = "0123456789abcdef0123456789abcdef01234567", folder / "models--owner--name"
    for below in ("blobs", "refs", f"snapshots/{commit}"):
        (place / below).mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    (place / "blobs" / blob).write_bytes(data)
    (place / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob}")
    return place / "blobs" / blob


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_name_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.mark.parametrize("named", [sha256_of, git_name_of])
def test_a_damaged_blob_of_the_hub(tmp_path: Path, whole: bytes, named: Callable[[bytes], str]) -> None:
    pytest.importorskip("huggingface_hub")
    blob = hub_cache(tmp_path / "hub", "model.safetensors", whole, named(whole))
    source = HubSource("owner/name", "model.safetensors", cache_dir=str(tmp_path / "hub"), token=False)
    checking = loader(tmp_path, verify=True, offline=True)
    assert checking.load(source).tolist() == NUMBERS
    assert checking.preload(source)[0] is not None
    flip(blob)
    for work in (checking.load, checking.preload, checking.load_many, checking.metadata):
        with pytest.raises(IntegrityError, match=r"remove .* and preload it once more"):
            work(source)
    assert loader(tmp_path, offline=True).load(source).tolist() != NUMBERS, "nobody asked for it to be looked at"


def test_a_blob_of_the_hub_is_read_once(tmp_path: Path, whole: bytes, hashed: list[Path]) -> None:
    pytest.importorskip("huggingface_hub")
    blob = hub_cache(tmp_path / "hub", "model.safetensors", whole, sha256_of(whole))
    settled(blob)
    source = HubSource("owner/name", "model.safetensors", cache_dir=str(tmp_path / "hub"), token=False)
    for _ in range(5):
        assert loader(tmp_path, verify=True, offline=True).load(source).tolist() == NUMBERS
    assert hashed == [blob.resolve()]


def test_a_blob_of_the_hub_that_cannot_be_verified(
    tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("huggingface_hub")
    hub_cache(tmp_path / "hub", "model.safetensors", whole, "an-etag-of-some-mirror")
    source = HubSource("owner/name", "model.safetensors", cache_dir=str(tmp_path / "hub"), token=False)
    for _ in range(2):
        assert loader(tmp_path, verify=True, offline=True).load(source).tolist() == NUMBERS
    assert [r.message for r in caplog.records if "cannot be verified" in r.message] != []


# -- the limit ------------------------------------------------------------------------------------------------------


def test_a_file_larger_than_the_limit_stays_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(a__raw=bytes(5000), b__raw=bytes(5000)) as server:
        small = loader(tmp_path, cache_limit=1000)
        for name in "ab":
            (path,) = small.preload(f"{server.url}/{name}.raw")
            assert path is not None and path.stat().st_size == 5000
            assert len(kept(tmp_path)) == 1
    told = [r.message for r in caplog.records if "more than the limit of the cache (1000)" in r.message]
    assert len(told) == 1 and "a.raw takes 5000 bytes" in told[0]
    WeightCache(tmp_path / "cache", limit=1000).trim()
    assert not kept(tmp_path)


# -- what is no file of weights -------------------------------------------------------------------------------------

PAGES = {
    "behind a byte order mark": b"\xef\xbb\xbf<!DOCTYPE html><p>Log in",
    "behind a mark and lines": b"\xef\xbb\xbf\r\n <html><p>Log in",
    "in UTF-16": "\ufeff<!doctype html><p>Log in".encode("utf-16-le"),
    "behind a comment": b"<!-- served by a proxy --><html><p>Log in",
    "from its head on": b"<head><title>Log in</title></head>",
    "from its body on": b"<BODY class='x'>Log in",
    "XML": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "a picture": b'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN"><svg/>',
    "JSON": b'{"error":"expired"}',
    "JSON of several lines": b'\xef\xbb\xbf[\n  {\n    "message" : "gone"\n  }\n]',
    "a list of words": b'["access denied", "log in"]',
}


@pytest.mark.parametrize("size", [1 << 20, 1])
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_not_kept(tmp_path: Path, page: bytes, size: int) -> None:
    """However few bytes of it come at a time."""

    def slowly(handler: Any) -> None:
        handler.send_response(200)
        for name, value in {"Content-Length": str(len(page)), "ETag": '"1"'}.items():
            handler.send_header(name, value)
        handler.end_headers()
        for at in range(0, len(page), size):
            handler.wfile.write(page[at : at + size])
            handler.wfile.flush()

    with serving(model__safetensors=page) as server:
        server.headers["Content-Type"] = "application/octet-stream"
        server.fail, server.failure = (99 if size == 1 else 0), slowly
        found = loader(tmp_path)
        with pytest.raises(WeightError, match="answered with a page of"):
            found.preload(server.url + PATH)
        assert not kept(tmp_path) and not list((tmp_path / "cache").glob("*/part"))
        asked = len(server.requests)
        assert not found.available(server.url + PATH)
        assert len(server.requests) == asked + 1


def test_a_page_that_comes_in_two_attempts(tmp_path: Path) -> None:
    """The beginning that was kept of the first is too short to be known as one."""
    page = b"<!-" + b"- a proxy --><html>" + bytes(100)
    with serving(model__safetensors=page) as server:
        server.stop_after = 3
        with pytest.raises(WeightError, match="answered with a page of"):
            loader(tmp_path).preload(server.url + PATH)
        assert not kept(tmp_path) and not list((tmp_path / "cache").glob("*/part"))


def test_files_that_begin_like_pages(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "x.safetensors"}}).encode()
    length = int.from_bytes(b'{"', "little")  # of the header: the file begins as JSON does
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).ljust(length).encode()
    odd = struct.pack("<Q", length) + header + b"\7"
    raw = b'{"a":1}<!-- numbers -->'
    with serving(model__index__json=index, odd__safetensors=odd, x__raw=raw, y__raw=raw[7:], z__bin=raw) as server:
        found = loader(tmp_path)
        for name, data in {
            "odd.safetensors": odd,
            "model.index.json": index,
            "x.raw": raw,
            "y.raw": raw[7:],
        }.items():
            server.files["/x.safetensors"] = odd
            (path,) = found.preload(f"{server.url}/{name}")
            assert path is not None and path.read_bytes() == data
            assert found.available(f"{server.url}/{name}")
        assert found.load(f"{server.url}/odd.safetensors").tolist() == [7]
        (path,) = found.preload(UrlSource(f"{server.url}/z.bin", format="raw"))
        assert path is not None and path.read_bytes() == raw


def test_a_page_of_html_is_none_of_raw_data_either() -> None:
    with pytest.raises(Page):
        check_no_page(b"<!doctype html>", "it", "x.raw", "raw")
    check_no_page(b"<head>", "it", "x.raw")
    check_no_page(b"<header", "it", "x.bin")


# -- lengths that contradict each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_answer", [True, False])
def test_a_whole_that_is_shorter_than_the_file(
    served: Served, tmp_path: Path, whole: bytes, in_one_answer: bool
) -> None:
    def lying(handler: Any) -> None:
        served.fail += 1  # every time
        etag, asked = served.etag(PATH), handler.headers.get("Range", "")
        if asked and not in_one_answer:
            answer(handler, 206, whole[:1], ETag=etag, Content_Range=f"bytes 0-0/{len(whole)}")
            return
        total = {"Content_Range": f"bytes 0-{len(whole) - 1001}/{len(whole)}"} if in_one_answer else {}
        answer(handler, 200, whole[:-1000], ETag=etag, **total)

    served.fail, served.failure = 1, lying
    with pytest.raises(WeightError, match=f"sends {len(whole) - 1000} bytes as the whole file, and has {len(whole)}"):
        loader(tmp_path).preload(served.url + PATH)
    assert not kept(tmp_path) and not list((tmp_path / "cache").glob("*/part"))


def test_a_checksum_saves_the_question_about_the_length(served: Served, tmp_path: Path, whole: bytes) -> None:
    WeightLoader(cache=tmp_path / "one").preload(given(served, whole))
    assert [asked for _, _, asked in served.requests] == [""]
    WeightLoader(cache=tmp_path / "two").preload(served.url + PATH)
    assert [asked for _, _, asked in served.requests] == ["", "", "bytes=0-0"]
