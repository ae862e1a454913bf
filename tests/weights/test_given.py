"""Arguments of wrong kinds: said when they are given, by name, with what would be right, and without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import InvalidConfig
from ranvier.weights import (
    Bars,
    FileSource,
    HubSource,
    MemorySource,
    S3Source,
    UrlSource,
    WeightCache,
    WeightLoader,
)


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"folder"


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (WeightLoader, {"cache": 3}, "cache must be a path, a WeightCache or None, got int"),
    (WeightLoader, {"cache": b"folder"}, "cache must be a path, a WeightCache or None, got bytes"),
    (WeightLoader, {"cache": BytesPath()}, "cache must be a path, a WeightCache or None, got bytes"),
    (WeightLoader, {"cache": WeightCache}, "cache must be .*, got the class WeightCache"),
    (WeightLoader, {"cache_limit": "1G"}, "cache_limit must be a whole number of 0 or more or None, got '1G'"),
    (WeightLoader, {"cache": WeightCache("x"), "cache_limit": 1}, "cache_limit does nothing"),
    (WeightLoader, {"offline": "no"}, "offline must be True or False, got 'no'"),
    (WeightLoader, {"verify": None}, "verify must be True or False, got None"),
    (WeightLoader, {"concurrency": "4"}, "concurrency must be a whole number"),
    (WeightLoader, {"tensor_bytes": "4"}, "tensor_bytes must be a positive number or None"),
    (WeightLoader, {"file_bytes": "4"}, "file_bytes must be a positive number or None"),
    (WeightLoader, {"timeout": "4"}, "timeout must be a number of seconds"),
    (WeightLoader, {"longest_wait": True}, "longest_wait must be a number of seconds"),
    (WeightLoader, {"retries": 1.5}, "retries must be a whole number"),
    (WeightLoader, {"progress": print}, "progress must be an object with the methods begin, advance, end, got built"),
    (WeightLoader, {"progress": 0}, "progress must be an object with the methods begin, advance, end, got int"),
    (WeightLoader, {"progress": Bars}, "progress must be .*, got the class Bars"),
    (WeightLoader, {"sleep": 0.5}, "sleep must be a function of seconds or None, got float"),
    (WeightLoader, {"stop": True}, "stop must be a Stop, got bool"),
    (WeightLoader, {"connections": 4}, "connections must be Connections, got int"),
    (WeightLoader, {"cach": "x"}, "WeightLoader: unknown option 'cach'.*did you mean 'cache'"),
    (WeightCache, {"folder": 3}, "folder must be a path or None, got int"),
    (WeightCache, {"folder": "~nobody-of-this-name/x"}, "folder '~nobody-of-this-name/x' cannot be found"),
    (WeightCache, {"limit": "1G"}, "limit must be a whole number"),
    (FileSource, {"path": 3}, "path must be a path, got int"),
    (FileSource, {"path": None}, "path must be a path, got None"),
    (FileSource, {"path": b"x"}, "path must be a path, got bytes"),
    (FileSource, {"path": "x", "tensor": 3}, "tensor must be text or None, got int"),
    (FileSource, {"path": "x", "format": 3}, "format must be text or None, got int"),
    (FileSource, {"path": "x", "tensors": "y"}, "FileSource: unknown option 'tensors'"),
    (MemorySource, {"data": "text"}, "data must be bytes, or an object .*, got str"),
    (MemorySource, {"data": [1, 2]}, "data must be bytes, or an object .*, got list"),
    (MemorySource, {"data": np.zeros(2, ml_dtypes.bfloat16)}, "data must be bytes, or an object .*, got ndarray"),
    (MemorySource, {"data": b"", "format": 3}, "format must be text or None, got int"),
    (MemorySource, {"data": b"", "name": None}, "name must be text, got None"),
    (UrlSource, {"url": Path("x")}, "url must be text, got P"),
    (UrlSource, {"url": "https://x/y", "headers": "token"}, "headers must be a mapping from names to texts, got str"),
    (UrlSource, {"url": "https://x/y", "headers": {"a": None}}, "headers must be .* to texts, got None for 'a'"),
    (UrlSource, {"url": "https://x/y", "headers": {1: "a"}}, "headers must be .* to texts, got int as a name"),
    (UrlSource, {"url": "https://x/y", "sha256": b"ab"}, "sha256 must be text, got bytes"),
    (UrlSource, {"url": "https://x/y", "sha256": None}, "sha256 must be text, got None"),
    (UrlSource, {"url": "https://x/y", "format": 3}, "format must be text or None"),
    (HubSource, {"repo": 1, "file": "f"}, "repo must be text, got int"),
    (HubSource, {"repo": "a/b", "file": Path("f")}, "file must be text, got P"),
    (HubSource, {"repo": "a/b", "file": "f", "revision": None}, "revision must be text, got None"),
    (HubSource, {"repo": "a/b", "file": "f", "cache_dir": 3}, "cache_dir must be a path or None, got int"),
    (HubSource, {"repo": "a/b", "file": "f", "token": 1.5}, "token must be text, True, False or None, got float"),
    (HubSource, {"repo": "a/b", "file": "f", "endpoint": 3}, "endpoint must be text or None"),
    (HubSource, {"repo": "a/b", "file": "f", "format": 3}, "format must be text or None"),
    (S3Source, {"bucket": 1, "key": "k"}, "bucket must be text, got int"),
    (S3Source, {"bucket": "b", "key": None}, "key must be text, got None"),
    (S3Source, {"bucket": "b", "key": "k", "region": 3}, "region must be text or None"),
    (S3Source, {"bucket": "b", "key": "k", "endpoint": 3}, "endpoint must be text or None"),
    (S3Source, {"bucket": "b", "key": "k", "options": "x"}, "options must be a mapping from names of options"),
    (S3Source, {"bucket": "b", "key": "k", "options": {1: 2}}, "options must be .*, got int as a name"),
    (S3Source, {"bucket": "b", "key": "k", "sha256": 3}, "sha256 must be text, got int"),
    (S3Source, {"bucket": "b", "key": "k", "format": 3}, "format must be text or None"),
]


@pytest.mark.parametrize(("make", "given", "said"), WRONG)
def test_arguments_of_the_wrong_kind(make: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make(**given)


@pytest.mark.parametrize("kind", [3, ["npy"]])
def test_a_format_of_the_wrong_kind(kind: Any) -> None:
    loader = WeightLoader(offline=True)
    for ask in (loader.open, loader.metadata, loader.load, loader.load_many):
        with pytest.raises(InvalidConfig, match="format must be text or None, got"):
            ask(b"bytes", format=kind)


def test_no_secret_is_told() -> None:
    for make in (
        lambda: UrlSource(b"https://user:hush@x/y"),  # type: ignore[arg-type]
        lambda: UrlSource("https://x/y", {"Authorization": ["hush"]}),  # type: ignore[dict-item]
        lambda: UrlSource("https://x/y", ["hush"]),  # type: ignore[arg-type]
        lambda: HubSource("a/b", "f", token=b"hush"),  # type: ignore[arg-type]
        lambda: S3Source("b", "k", options=["hush"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidConfig) as error:
            make()
        assert "hush" not in str(error.value)


def test_arguments_of_all_right_kinds(tmp_path: Path) -> None:
    for cache in (None, str(tmp_path), tmp_path, WeightCache(tmp_path, 5)):
        WeightLoader(cache=cache, progress=None, tensor_bytes=None)
    WeightLoader(cache=tmp_path, cache_limit=0, offline=True, verify=True, sleep=lambda seconds: None)
    assert FileSource(tmp_path / "x", "w", "raw") == FileSource(tmp_path / "x", tensor="w", format="raw")
    for data in (b"x", bytearray(b"x"), memoryview(b"x"), np.zeros((4, 4))[:, ::2]):
        assert MemorySource(data, "raw").open(None).size > 0  # type: ignore[arg-type]
    for token in (None, True, False, "text"):
        HubSource("a/b", "f", cache_dir=tmp_path, token=token)
    assert S3Source("b", "k", options={"skip_signature": True}).address == "s3://b/k"
