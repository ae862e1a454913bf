"""The hub and S3 through their own clients, against servers of the test's own."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import CannotWrite, IntegrityError, ResourceLimit, WeightError
from ranvier.weights import (
    Access,
    Context,
    FileSource,
    HubSource,
    Missing,
    NotCached,
    S3Source,
    UrlSource,
    WeightCache,
    WeightLoader,
    save_safetensors,
    source_of,
)

pytest.importorskip("huggingface_hub")
pytest.importorskip("obstore")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def standing_in(answer: Any) -> Iterator[str]:
    """A server that answers by a function of (method, path, headers): (status, headers, body)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self) -> None:
            status, headers, body = answer(self.command, self.path.partition("?")[0], self.headers)
            asked = self.headers.get("Range", "")
            whole = len(body)
            if asked and status == 200:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                stop = min(whole, int(last) + 1) if last else whole
                headers = {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{whole}"}
                status, body = 206, body[int(first) : stop]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = reply

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def shards(tmp_path: Path) -> tuple[dict[str, bytes], dict[str, np.ndarray[Any, Any]]]:
    arrays = {f"w{k}": np.full((k + 2, 3), k, np.float32) for k in range(4)}
    places = {name: f"part-{k % 2}.safetensors" for k, name in enumerate(arrays)}
    files = {}
    for file in set(places.values()):
        save_safetensors(tmp_path / file, {n: arrays[n] for n in arrays if places[n] == file})
        files[file] = (tmp_path / file).read_bytes()
    files["model.safetensors.index.json"] = json.dumps({"weight_map": places}).encode()
    return files, arrays


# -- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(shards: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    files, _ = shards

    def answer(method: str, path: str, headers: Any) -> Any:
        facts = {"X-Repo-Commit": COMMIT}
        if path == "/api/models/owner/name/revision/main":
            body = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
        for revision in ("main", COMMIT):
            found = path.removeprefix(f"/owner/name/resolve/{revision}/")
            if found in files:
                facts["ETag"] = f'"{hashlib.sha256(files[found]).hexdigest()}"'
                return 200, facts, files[found]
        return 404, {**facts, "X-Error-Code": "EntryNotFound"}, b""

    with standing_in(answer) as url:
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield url


def test_hub(hub: str, shards: Any, tmp_path: Path) -> None:
    _, arrays = shards
    folder = str(tmp_path / "hub")
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    source = HubSource("owner/name", "model.safetensors.index.json", cache_dir=folder, endpoint=hub, token=False)
    assert loader.available(source)
    assert loader.metadata(source).tensors["w3"].shape == (5, 3)
    assert not Path(folder).exists(), "looking at metadata downloads nothing"
    found = loader.load_many(source)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert list(Path(folder).glob("models--owner--name/snapshots/*/part-1.safetensors"))
    offline = WeightLoader(cache=tmp_path / "cache", offline=True)
    np.testing.assert_array_equal(offline.load(source, "w2"), arrays["w2"])


def test_a_damaged_blob_comes_again_once_it_is_removed(hub: str, shards: Any, tmp_path: Path) -> None:
    """As the error says."""
    source = HubSource("owner/name", "part-1.safetensors", cache_dir=tmp_path / "hub", endpoint=hub, token=False)
    loader = WeightLoader(cache=tmp_path / "cache", retries=0, verify=True)
    (path,) = loader.preload(source)
    assert path is not None
    blob = path.resolve()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1] + b"?")
    for work in (loader.preload, loader.load_many):
        with pytest.raises(IntegrityError) as caught:
            work(source)
    assert f"remove {str(blob)!r}" in str(caught.value)
    blob.unlink()
    loader.preload(source)
    assert blob.read_bytes() == whole


def test_hub_tells_its_progress_and_keeps_to_limits(hub: str, shards: Any, tmp_path: Path) -> None:
    files, _ = shards
    counts: dict[str, int] = {}

    class Counts:
        def begin(self, name: str, total: int | None, done: int = 0) -> None:
            counts[name] = done
            assert total == len(files["part-1.safetensors"])

        def advance(self, name: str, count: int) -> None:
            counts[name] += count

        def end(self, name: str) -> None:
            pass

    source = HubSource("owner/name", "part-1.safetensors", cache_dir=str(tmp_path / "hub"), endpoint=hub, token=False)
    with pytest.raises(ResourceLimit, match="file_bytes"):
        WeightLoader(cache=tmp_path / "cache", file_bytes=10).preload(source)
    assert not list((tmp_path / "hub").glob("models--owner--name/snapshots/*/*"))
    WeightLoader(cache=tmp_path / "cache", progress=Counts()).preload(source)
    assert counts == {source.address: len(files["part-1.safetensors"])}


def test_hub_without_the_file(hub: str, tmp_path: Path) -> None:
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    source = HubSource("owner/name", "absent.safetensors", cache_dir=str(tmp_path / "hub"), endpoint=hub, token=False)
    assert not loader.available(source)
    with pytest.raises(Missing, match="no such file"):
        loader.preload(source)
    with pytest.raises(NotCached):
        WeightLoader(cache=tmp_path / "cache", offline=True).metadata(source)


def test_a_cache_of_the_hub_that_cannot_be_written(hub: str, shards: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # where a folder should be
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    source = HubSource("owner/name", "model.safetensors.index.json", "main", str(tmp_path / "file"), False, hub)
    with pytest.raises(CannotWrite, match="cannot keep hf://owner/name/model"):
        loader.preload(source)
    found = loader.load_many(source)
    for name, array in shards[1].items():
        np.testing.assert_array_equal(found[name], array)


def test_a_full_disk_under_the_cache_of_the_hub(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    source = HubSource("owner/name", "part-1.safetensors", cache_dir=str(tmp_path / "hub"), endpoint=hub, token=False)
    with pytest.raises(CannotWrite, match="No space left"):
        WeightLoader(cache=tmp_path / "cache", retries=0).preload(source)


def test_the_hubs_own_word_for_offline(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    source = HubSource("owner/name", "part-1.safetensors", cache_dir=str(tmp_path / "hub"), endpoint=hub, token=False)
    assert not loader.available(source)
    with pytest.raises(NotCached):
        loader.metadata(source)


def test_tokens_that_cannot_be_sent_are_not_shown(hub: str, tmp_path: Path) -> None:
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    for token in ("hf_secret\n", "hf_secret €"):
        folder = str(tmp_path / "hub")
        source = HubSource("owner/name", "part-1.safetensors", cache_dir=folder, endpoint=hub, token=token)
        for ask in (loader.preload, loader.metadata, loader.available):
            with pytest.raises(WeightError, match="the token cannot be sent") as caught:
                ask(source)
            assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_a_hub_that_refuses_us(tmp_path: Path) -> None:
    with standing_in(lambda *_: (403, {}, b"")) as url:
        loader = WeightLoader(cache=tmp_path / "cache", retries=0)
        source = HubSource("owner/name", "x", cache_dir=str(tmp_path / "hub"), endpoint=url, token=False)
        with pytest.raises(Missing, match="it refuses us"):
            loader.preload(source)


@pytest.mark.parametrize(
    "file", ["../../../../secret", "a/../../../../../secret", "{folder}/secret", "a\\..\\secret", "a\0", "", "a//b"]
)
def test_hub_files_lie_inside_their_repository(hub: str, tmp_path: Path, file: str) -> None:
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(8))
    name = file.replace("{folder}", str(tmp_path))
    source = HubSource("owner/name", name, COMMIT, str(tmp_path / "hub"), False, hub)
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    for work in (loader.open, loader.preload, loader.available):
        with pytest.raises(WeightError, match="no path inside of one"):
            work(source)


def test_secrets_are_not_shown() -> None:
    for source in (
        HubSource("owner/name", "file", token="hf_secret"),
        S3Source("bucket", "key", options={"secret_access_key": "secret"}),
        UrlSource("https://me:secret@host/file?signature=secret", {"Authorization": "Bearer secret"}),
    ):
        assert "secret" not in repr(source) and "secret" not in source.address
    assert "secret" not in repr(UrlSource("https//me:secret@host/file"))


def test_addresses() -> None:
    found = source_of("hf://owner/name/folder/file.gguf@v1.0")
    assert found == HubSource("owner/name", "folder/file.gguf", "v1.0")
    assert source_of("s3://bucket/a/b.npz") == S3Source("bucket", "a/b.npz")
    for address in ("file:///a%20b/c", "file://localhost/a%20b/c"):
        assert source_of(address) == FileSource("/a b/c")
    assert source_of("file://localhosts/a") == FileSource("localhosts/a")
    for address in ("hf://owner/name", "s3://bucket", "gs://bucket/key", "htps://host/file"):
        with pytest.raises(WeightError, match=r"must be like|unknown kind of source"):
            source_of(address)


# -- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(shards: Any) -> Iterator[tuple[str, list[str]]]:
    files, _ = shards
    asked: list[str] = []

    def answer(method: str, path: str, headers: Any) -> Any:
        name = path.removeprefix("/bucket/models/")
        if method == "GET":
            asked.append(headers.get("Range", ""))
        if name not in files:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        facts = {
            "ETag": f'"{hashlib.md5(files[name], usedforsecurity=False).hexdigest()}"',
            "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT",
        }
        return 200, facts, files[name]

    with standing_in(answer) as url:
        yield url, asked


def object_of(url: str, key: str, **options: Any) -> S3Source:
    secrets = {"access_key_id": "id", "secret_access_key": "secret"}
    return S3Source("bucket", f"models/{key}", "us-east-1", url, secrets, **options)


def test_s3(s3: tuple[str, list[str]], shards: Any, tmp_path: Path) -> None:
    url, asked = s3
    _, arrays = shards
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    part = object_of(url, "part-1.safetensors")
    assert loader.available(part) and not loader.available(object_of(url, "absent"))
    got = loader.load(part, "w3", part=slice(1, 3))
    np.testing.assert_array_equal(got, arrays["w3"][1:3])
    assert asked and all(asked), "only ranges are asked for"
    found = loader.load_many(object_of(url, "model.safetensors.index.json"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    offline = WeightLoader(cache=tmp_path / "cache", offline=True)
    np.testing.assert_array_equal(offline.load(part, "w3"), arrays["w3"])


def test_s3_object_that_changes_while_it_is_read(s3: tuple[str, list[str]], shards: Any, tmp_path: Path) -> None:
    url, _ = s3
    files, _ = shards
    source = object_of(url, "part-1.safetensors")
    context = Context(WeightCache(tmp_path / "cache"), Access(retries=0))
    opened = source.open(context)
    files["part-1.safetensors"] = files["part-1.safetensors"][:-4] + b"\1\2\3\4"  # of the same size
    with pytest.raises(WeightError, match="changed while it was read"):
        opened.read(0, 8)
    assert bytes(source.open(context).read(0, opened.size)) == files["part-1.safetensors"]


def test_s3_download_goes_on_only_with_the_same_version(
    s3: tuple[str, list[str]], shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ranvier.weights.sources import s3 as module

    url, _ = s3
    files, _ = shards
    monkeypatch.setattr(module, "_CHUNK", 64)
    source = object_of(url, "part-1.safetensors")
    whole = files["part-1.safetensors"]
    reads: list[int] = []
    piece = module._Object._piece

    def fails_later(self: Any, each: Any) -> Any:
        reads.append(each[0])
        if len(reads) == 3:
            files["part-1.safetensors"] = whole[:-4] + b"\1\2\3\4"
        return piece(self, each)

    monkeypatch.setattr(module._Object, "_piece", fails_later)
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    with pytest.raises(WeightError, match="changed while it was read"):
        loader.preload(source)
    (path,) = loader.preload(source)
    assert path is not None and path.read_bytes() == files["part-1.safetensors"]
    assert reads[3] == 0, "what had come is of the version before"


def test_s3_without_room_for_another_version(
    s3: tuple[str, list[str]], shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ranvier.weights.sources import s3 as module

    def full(*_: Any) -> None:
        raise CannotWrite("the disk is full")

    files, _ = shards
    monkeypatch.setattr(module, "_CHUNK", 64)
    source, loader = object_of(s3[0], "part-1.safetensors"), WeightLoader(cache=tmp_path / "cache", retries=0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module, "check_no_page", lambda *_: 1 / 0)  # as soon as something is there
        loader.preload(source)
    whole = files["part-1.safetensors"]
    part = next((tmp_path / "cache").glob("*/part"))
    part.write_bytes(whole[:128])
    files["part-1.safetensors"] = b"\1\2\3\4" + whole[4:]
    with monkeypatch.context() as patch, pytest.raises(CannotWrite):
        patch.setattr(module, "check_room", full)
        loader.preload(source)
    (path,) = loader.preload(source)
    assert path is not None and path.read_bytes() == files["part-1.safetensors"]


def test_s3_trouble(s3: tuple[str, list[str]], tmp_path: Path) -> None:
    url, _ = s3
    loader = WeightLoader(cache=tmp_path / "cache", retries=0, timeout=1.0)
    with pytest.raises(Missing, match="no such object"):
        loader.metadata(object_of(url, "absent"))
    with pytest.raises(IntegrityError):
        loader.metadata(object_of(url, "part-1.safetensors", sha256="0" * 64))
    assert not list((tmp_path / "cache").glob("*/data"))
    assert "secret" not in object_of(url, "x").address


@pytest.mark.parametrize("key", ["../x", "a//b", "a/./b", "a\0b", "a\nb"])
def test_keys_that_s3_does_not_have(s3: tuple[str, list[str]], tmp_path: Path, key: str) -> None:
    with pytest.raises(WeightError, match="is no address of an object"):
        WeightLoader(cache=tmp_path / "cache", retries=0).metadata(object_of(s3[0], key))


def test_settings_of_s3_that_are_none(s3: tuple[str, list[str]], tmp_path: Path) -> None:
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    for endpoint in ("nonsense", "localhost:9000", "http://me:secret@host"):
        with pytest.raises(WeightError, match=r"is no address|takes no name and password") as caught:
            S3Source("bucket", "key", endpoint=endpoint)
        assert "secret" not in str(caught.value)
    options = {"access_key_id": "id\n", "secret_access_key": "secret"}
    with pytest.raises(WeightError, match="check region and credentials") as caught:
        loader.metadata(S3Source("bucket", "key", "us-east-1", s3[0], options))
    assert "secret" not in str(caught.value)


def test_a_page_in_place_of_an_object(s3: tuple[str, list[str]], shards: Any, tmp_path: Path) -> None:
    files, _ = shards
    files["part-1.safetensors"] = b"<!DOCTYPE html><title>Sign in</title>"
    loader = WeightLoader(cache=tmp_path / "cache", retries=0)
    with pytest.raises(WeightError, match="a page of HTML"):
        loader.preload(object_of(s3[0], "part-1.safetensors"))
    assert not list((tmp_path / "cache").glob("*/data"))
