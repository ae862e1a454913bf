"""Files behind a server that stalls, lies, breaks off, or is someone else."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import IntegrityError, ResourceLimit, WeightError
from ranvier.weights import Missing, NotCached, Slice, Unreachable, UrlSource, save_safetensors
from ranvier.weights.cache import WeightCache, digest
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.kept import fetched
from tests.weights.server import Served, kept, loader, serving, status

PATH = "/model.safetensors"


@pytest.fixture
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return {
        "big": rng.standard_normal((512, 300)).astype(np.float32),
        "small": rng.integers(-9, 9, (7, 3)).astype(np.int16),
    }


@pytest.fixture
def served(tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Iterator[Served]:
    save_safetensors(tmp_path / "m", arrays)
    with serving(model__safetensors=(tmp_path / "m").read_bytes()) as server:
        yield server


def test_metadata_costs_the_header(served: Served, tmp_path: Path) -> None:
    found = loader(tmp_path).metadata(served.url + PATH)
    assert found.tensors["big"].shape == (512, 300) and found.parameters == 512 * 300 + 21
    assert served.sent < 1 << 15 and len(served.requests) == 2  # is it there, and its first bytes


def test_a_part_costs_the_part(served: Served, tmp_path: Path, arrays: dict[str, Any]) -> None:
    got = loader(tmp_path).load(served.url + PATH, "big", part=slice(10, 20))
    np.testing.assert_array_equal(got, arrays["big"][10:20])
    assert served.sent < 2000 + 10 * 300 * 4 + (1 << 16)


@pytest.mark.parametrize(
    "part",
    [
        (slice(3, 500, 100), slice(10, 12)),
        (slice(None), slice(299, 300)),
        (slice(5, 5),),
        (slice(2, 400, 7), slice(0, 300, 9)),
    ],
)
def test_parts_by_ranges(served: Served, tmp_path: Path, arrays: dict[str, Any], part: Any) -> None:
    got = loader(tmp_path).load(served.url + PATH, "big", Slice(part))
    np.testing.assert_array_equal(got, arrays["big"][part])


def test_preload_then_offline(served: Served, tmp_path: Path, arrays: dict[str, Any]) -> None:
    url = served.url + PATH
    with pytest.raises(NotCached, match="not in the cache"):
        loader(tmp_path, offline=True).load(url, "small")
    loader(tmp_path).preload(url)
    before = len(served.requests)
    got = loader(tmp_path, offline=True).load_many(url)
    assert len(served.requests) == before
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)


def test_interrupted_download_goes_on(served: Served, tmp_path: Path) -> None:
    served.stop_after = 100_000
    data = served.files[PATH]
    (path,) = loader(tmp_path).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == data
    assert served.sent < len(data) + 1000, "what had come was asked for again"


def test_interrupted_process_goes_on(served: Served, tmp_path: Path) -> None:
    served.stop_after = 100_000
    with pytest.raises(Unreachable, match="after 100000 of"):
        loader(tmp_path, retries=0).preload(served.url + PATH)
    assert not kept(tmp_path)
    (path,) = loader(tmp_path, retries=0).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == served.files[PATH]
    assert any(asked == "bytes=100000-" for _, _, asked in served.requests)


def test_a_file_that_changed_meanwhile_begins_anew(served: Served, tmp_path: Path) -> None:
    served.stop_after = 100_000
    with pytest.raises(Unreachable):
        loader(tmp_path, retries=0).preload(served.url + PATH)
    served.files[PATH] = bytes(200_000)
    (path,) = loader(tmp_path, retries=0).preload(served.url + PATH)
    assert path is not None and path.read_bytes() == bytes(200_000)


def test_newer_file_replaces_the_cached_one(served: Served, tmp_path: Path) -> None:
    url = served.url + PATH
    loader(tmp_path).preload(url)
    save_safetensors(tmp_path / "n", {"big": np.zeros(4, np.float32)})
    served.files[PATH] = (tmp_path / "n").read_bytes()
    assert loader(tmp_path).load_many(url)["big"].shape == (4,)


def test_checksum(served: Served, tmp_path: Path) -> None:
    right = hashlib.sha256(served.files[PATH]).hexdigest()
    with pytest.raises(IntegrityError, match="checksum"):
        loader(tmp_path).load(UrlSource(served.url + PATH, sha256="0" * 64), "small")
    assert not kept(tmp_path)
    assert loader(tmp_path).load(UrlSource(served.url + PATH, sha256=right), "small").shape == (7, 3)


def test_damage_on_disk_is_noticed(served: Served, tmp_path: Path, arrays: dict[str, Any]) -> None:
    url = served.url + PATH
    (path,) = loader(tmp_path).preload(url)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    got = loader(tmp_path, verify=True).load(url, "small")
    np.testing.assert_array_equal(got, arrays["small"])
    loader(tmp_path).preload(url)
    path.write_bytes(data[:50])  # cut off: seen without reading it all
    np.testing.assert_array_equal(loader(tmp_path).load(url, "small"), arrays["small"])


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_trouble_is_waited_out(served: Served, tmp_path: Path, code: int) -> None:
    waits: list[float] = []
    served.fail, served.failure = 2, status(code, Retry_After="7")
    loader(tmp_path, sleep=waits.append, longest_wait=9.0).metadata(served.url + PATH)
    assert waits == [7.0, 7.0]


@pytest.mark.parametrize(
    "after",
    ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2030 00:00:00 +99999999999999", "-1", "soon"],
)
def test_times_to_wait_that_are_none(served: Served, tmp_path: Path, after: str) -> None:
    served.fail, served.failure = 1, status(503, Retry_After=after)
    assert loader(tmp_path).metadata(served.url + PATH).tensors


def test_lasting_trouble_is_told(served: Served, tmp_path: Path) -> None:
    served.fail, served.failure = 99, status(503)
    with pytest.raises(Unreachable, match=r"503.*after 3 attempts"):
        loader(tmp_path).metadata(served.url + PATH)


@pytest.mark.parametrize(("code", "what"), [(404, "no such file"), (401, "credentials"), (403, "refuses")])
def test_refusals_are_not_retried(served: Served, tmp_path: Path, code: int, what: str) -> None:
    served.fail, served.failure = 1, status(code)
    with pytest.raises(Missing, match=what):
        loader(tmp_path).metadata(served.url + PATH)
    assert len(served.requests) == 1
    assert loader(tmp_path).available(served.url + PATH)
    assert not loader(tmp_path).available(served.url + "/absent")


def test_a_page_is_no_file(served: Served, tmp_path: Path) -> None:
    served.headers["Content-Type"] = "text/html; charset=utf-8"
    with pytest.raises(WeightError, match="page"):
        loader(tmp_path).preload(served.url + PATH)
    served.headers["Content-Type"] = "application/octet-stream"
    served.files["/page"] = b"<!doctype html><p>Log in"
    with pytest.raises(WeightError, match="HTML"):
        loader(tmp_path).metadata(served.url + "/page")
    assert not kept(tmp_path)


def test_a_server_that_knows_no_ranges(served: Served, tmp_path: Path, arrays: dict[str, Any]) -> None:
    served.ranges = False
    np.testing.assert_array_equal(loader(tmp_path).load(served.url + PATH, "small"), arrays["small"])
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize("length", ["1000", "99999999"])
def test_a_server_that_lies_about_length(served: Served, tmp_path: Path, length: str) -> None:
    served.headers["Content-Length"] = length
    served.ranges = False
    with pytest.raises(WeightError):
        loader(tmp_path, timeout=0.3, retries=1).load_many(served.url + PATH)


def test_a_server_that_stalls(served: Served, tmp_path: Path) -> None:
    def stall(handler: Any) -> None:
        time.sleep(1.0)

    served.fail, served.failure = 99, stall
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"timed out|Timeout"):
        loader(tmp_path, timeout=0.1, retries=1).metadata(served.url + PATH)
    assert time.monotonic() - began < 5


def test_too_large(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ResourceLimit, match="file_bytes"):
        loader(tmp_path, file_bytes=1000).metadata(served.url + PATH)


def test_credentials_stay_with_their_host(served: Served, tmp_path: Path) -> None:
    with serving(model__safetensors=served.files[PATH]) as other:
        served.fail, served.failure = 1, status(302, Location=other.url + PATH)
        source = UrlSource(served.url + PATH, {"Authorization": "Bearer secret"})
        loader(tmp_path).metadata(source)
        assert served.seen_headers[0]["authorization"] == "Bearer secret"
        assert "authorization" not in other.seen_headers[0]
        assert "secret" not in source.address


def test_redirects_lead_to_servers_only(served: Served, tmp_path: Path) -> None:
    served.fail, served.failure = 1, status(302, Location="file:///etc/passwd")
    with pytest.raises(WeightError):
        loader(tmp_path).metadata(served.url + PATH)
    served.fail, served.failure = 99, status(302, Location=PATH)
    with pytest.raises(WeightError):
        loader(tmp_path).metadata(served.url + PATH)
    served.fail, served.failure = 1, status(302, Location=served.url.replace("//", "//me:secret@") + PATH)
    with pytest.raises(WeightError, match="with a name and a password") as caught:
        loader(tmp_path).metadata(served.url + PATH)
    assert "secret" not in str(caught.value)


def test_threads_download_once(served: Served, tmp_path: Path) -> None:
    results: list[Any] = []

    def work() -> None:
        results.extend(loader(tmp_path).preload(served.url + PATH))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    whole = [r for r in served.requests if not r[2]]
    assert len(whole) == 1


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    with serving(a__raw=bytes(1000), b__raw=bytes(1000), c__raw=bytes(1000)) as server:
        small = loader(tmp_path, cache_limit=2500)
        for name in "ab":
            small.preload(f"{server.url}/{name}.raw")
            time.sleep(0.01)
        small.preload(f"{server.url}/a.raw")  # used again
        time.sleep(0.01)
        small.preload(f"{server.url}/c.raw")
        off = loader(tmp_path, offline=True)
        assert [off.available(f"{server.url}/{name}.raw") for name in "abc"] == [True, False, True]


def test_what_somebody_else_has_fetched_meanwhile_is_taken(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)

    def download(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        tell("1")
        part.write_bytes(b"numbers")
        return "1", digest(part)

    def again(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        raise AssertionError("it is there already")

    first = cache.get("there", download)
    assert fetched(Context(cache), "there", "", again) == first
    cache.drop(replace(first, etag="0"))  # another version than the one that is there
    assert cache.find("there") == first
    cache.drop(first)
    assert cache.find("there") is None


def test_a_stream_of_before_1_6_costs_no_request_for_every_tensor(tmp_path: Path) -> None:
    data = (Path(__file__).parent / "data" / "legacy.pth").read_bytes()
    with serving(legacy__pth=data) as server:
        found = loader(tmp_path).metadata(f"{server.url}/legacy.pth")
        assert len(server.requests) < len(found.tensors)
