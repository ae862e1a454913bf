"""The cache between processes: emptied while it is filled, read where it may not be written, with what was left."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import CannotWrite, IntegrityError, InvalidConfig, WeightError
from ranvier.weights import UrlSource, WeightCache, WeightLoader, save_safetensors
from ranvier.weights import cache as cache_module
from ranvier.weights.cache import digest
from ranvier.weights.sources import kept
from tests.weights.server import serving


def filled(data: bytes) -> Callable[..., tuple[str, str]]:
    def download(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        tell("1")
        part.write_bytes(data)
        return "1", digest(part)

    return download


def broken(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
    tell("1")
    part.write_bytes(bytes(5000))
    raise WeightError("the connection ended")


_CHILD = """
import sys, time
from ranvier.weights import WeightCache, WeightLoader
kind, url, folder = sys.argv[1:]
until = time.monotonic() + 1.5
while time.monotonic() < until:
    if kind == "fill":
        assert (WeightLoader(cache=folder, backoff=0.01).load_many(url)["a"] == 1).all()
    else:
        WeightCache(folder).clear()
        time.sleep(0.001)
"""


def test_two_fill_while_a_third_empties(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m", {"a": np.ones(10_000, np.float32)})
    with serving(m__safetensors=(tmp_path / "m").read_bytes()) as server:
        command = [sys.executable, "-c", _CHILD]
        work = [
            subprocess.Popen([*command, kind, f"{server.url}/m.safetensors", str(tmp_path / "cache")])
            for kind in ("fill", "fill", "empty")
        ]
        assert [process.wait(60) for process in work] == [0, 0, 0]


def test_a_folder_that_goes_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir finds it there, and then no longer."""
    made, failures = Path.mkdir, [FileExistsError(errno.EEXIST, "File exists"), FileNotFoundError()]

    def mkdir(self: Path, *rest: Any, **more: Any) -> None:
        if failures:
            raise failures.pop()
        made(self, *rest, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert WeightCache(tmp_path).get("x", filled(b"numbers")).path.read_bytes() == b"numbers"


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    folder = WeightCache(tmp_path).get("x", filled(b"numbers")).path.parent
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(CannotWrite, match="File exists"):
        WeightCache(tmp_path).get("x", filled(b"numbers"))


def test_what_is_being_downloaded_is_left_alone(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)

    def download(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        part.write_bytes(b"beginning")
        assert WeightCache(tmp_path).clear() == 0
        return filled(b"all of it")(part, etag, tell)

    assert cache.get("x", download).path.read_bytes() == b"all of it"


def test_a_file_that_goes_between_found_and_opened(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    asked: list[int] = []

    def fetch() -> Any:
        entry = cache.get("x", filled(b"numbers"))
        asked.append(1)
        if len(asked) == 1:
            cache.clear()
        return entry

    assert bytes(kept.mapped_of(fetch, "x").read(0, 7)) == b"numbers"
    assert len(asked) == 2


def test_a_cache_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_safetensors(tmp_path / "m", {"a": np.ones(3, np.float32)})
    with serving(m__safetensors=(tmp_path / "m").read_bytes()) as server:
        url = f"{server.url}/m.safetensors"
        WeightLoader(cache=tmp_path / "cache").preload(url)

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for name in ("utime", "unlink", "replace", "mkdir"):
            monkeypatch.setattr(os, name, refuse)
        assert WeightLoader(cache=tmp_path / "cache", offline=True).load(url).tolist() == [1, 1, 1]
        (tmp_path / "n").write_bytes((tmp_path / "m").read_bytes())
        server.files["/m.safetensors"] = (tmp_path / "n").read_bytes()[:-4] + b"\0\0\0\0"
        assert WeightLoader(cache=tmp_path / "cache").load(url).tolist() == [1, 1, 0], "by ranges, past the old copy"


def test_all_tensors_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_safetensors(tmp_path / "m", {"a": np.ones(3, np.float32), "b": np.zeros(2, np.int8)})
    with serving(m__safetensors=(tmp_path / "m").read_bytes()) as server:
        found = WeightLoader(cache=tmp_path / "file").load_many(f"{server.url}/m.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {"a": [1, 1, 1], "b": [0, 0]}


@pytest.mark.parametrize(
    "facts",
    ["", "null", "[" * 100_000, '{"address": "x", "etag": "1", "size": 1e999, "sha256": ""}', '{"address": "x"}'],
)
def test_damaged_facts(tmp_path: Path, facts: str) -> None:
    cache = WeightCache(tmp_path)
    folder = cache.get("x", filled(b"numbers")).path.parent
    (folder / "facts.json").write_text(facts)
    (folder / "part.json").write_text(facts)
    assert cache.find("x") is None and not cache.entries()
    assert cache.get("x", filled(b"numbers")).path.read_bytes() == b"numbers"
    assert cache.find("x") is not None


def test_a_part_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Where the folder of caches is one that others may write to, too."""
    (tmp_path / "precious").write_bytes(b"precious")
    cache = WeightCache(tmp_path / "cache")
    with pytest.raises(WeightError):
        cache.get("x", broken)
    (part,) = tmp_path.glob("cache/*/part")
    part.unlink()
    part.symlink_to(tmp_path / "precious")
    found = cache.get("x", filled(b"numbers")).path
    assert found.read_bytes() == b"numbers" and not found.is_symlink()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_two_at_a_time_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some shared disks: each has a part of its own, and whoever ends first leaves a whole file."""
    monkeypatch.setattr(cache_module, "fcntl", None)
    cache = WeightCache(tmp_path)

    def slow(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        tell("1")
        with part.open("wb") as file:
            file.write(b"num")
            file.flush()
            first = cache.get("x", filled(b"numbers"))  # another one, meanwhile
            assert first.path.read_bytes() == b"numbers" and first.sha256 == digest(first.path)
            file.write(b"bers")
        return "1", digest(part)

    found = cache.get("x", slow)
    assert found.path.read_bytes() == b"numbers" and found.sha256 == digest(found.path)
    with pytest.raises(WeightError):
        cache.get("y", broken)
    assert not list(tmp_path.glob("*/*part*"))


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="cannot write to the cache"):
        WeightCache(tmp_path / "file").get("x", filled(b""))


def test_a_full_disk(tmp_path: Path) -> None:
    def download(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CannotWrite, match=r"cannot keep x in .*No space left"):
        WeightCache(tmp_path).get("x", download)
    assert WeightCache(tmp_path).find("x") is None


def test_what_interrupted_downloads_left_counts_and_goes(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, limit=2000)
    with pytest.raises(WeightError):
        cache.get("broken", broken)
    assert cache.nbytes() == 5000 and not cache.entries()
    cache.get("x", filled(bytes(1000)))
    assert cache.nbytes() == 1000 and [entry.address for entry in cache.entries()] == ["x"]
    with pytest.raises(WeightError):
        cache.get("broken", broken)
    assert cache.clear() == 6000 and not list(tmp_path.iterdir())


def test_an_entry_cut_short_is_fetched_again(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    first = cache.get("x", filled(b"numbers"))
    first.path.write_bytes(b"num")
    assert cache.find("x") is None
    assert cache.get("x", filled(b"numbers")).path.read_bytes() == b"numbers"
    first.path.write_bytes(b"numbats")
    assert cache.find("x") is not None and cache.find("x", verify=True) is None
    assert cache.get("x", filled(b"numbers"), verify=True).path.read_bytes() == b"numbers"


def test_checksums_in_capitals(tmp_path: Path) -> None:
    import hashlib

    with serving(x__raw=b"1234") as server:
        source = UrlSource(f"{server.url}/x.raw", sha256=hashlib.sha256(b"1234").hexdigest().upper())
        loader = WeightLoader(cache=tmp_path)
        for _ in range(2):
            assert loader.load(source, dtype="uint8", shape=(4,)).tolist() == list(b"1234")


@pytest.mark.parametrize(
    "options",
    [{"cache_limit": -1}, {"concurrency": 0}, {"tensor_bytes": 0}, {"timeout": None}, {"backoff": float("inf")}],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options)).removeprefix("cache_")):
        WeightLoader(**options)


def test_what_a_killed_process_left_goes_too(tmp_path: Path) -> None:
    """One that was writing its notes."""
    cache = WeightCache(tmp_path)
    entry = cache.get("x", filled(b"data"))
    (entry.path.parent / ".facts.json.0123456789abcdef.part").write_bytes(b"{")
    cache.clear()
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_what_could_not_be_had(tmp_path: Path) -> None:
    """Not even a lock: a service that is asked for files which are not there would fill the disk with them."""
    cache = WeightCache(tmp_path / "cache")

    def absent(part: Path, etag: str, tell: Callable[[str], None]) -> tuple[str, str]:
        raise WeightError("there is no such file")

    for download, sha256 in ((absent, ""), (filled(b"x"), "0" * 64)):
        with pytest.raises((WeightError, IntegrityError)):
            cache.get("http://host/file", download, sha256=sha256)
        assert not list(cache.folder.iterdir())
    entry = cache.get("http://host/file", filled(b"x"))
    cache.clear()
    cache.drop(entry)  # which somebody else has removed
    assert not list(cache.folder.iterdir())
    with pytest.raises(WeightError):
        cache.get("http://host/file", broken)
    assert {file.name for file in cache.folder.glob("*/*")} == {"part", "part.json", "lock"}, "to be gone on with"
