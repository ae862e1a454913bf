"""GGUF checkpoints in several files, written by the package ``gguf``: from any part, near and far, and faulty ones."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from ranvier.cli.weights import command
from ranvier.errors import WeightError
from ranvier.weights import HubSource, MemorySource, Missing, NotCached, UrlSource, WeightLoader
from ranvier.weights.formats import gguf_parts
from tests.weights.server import Served, kept, loader, serving

LOADER = WeightLoader()
Arrays = dict[str, np.ndarray[Any, Any]]
NAMES = [f"m-{k:05d}-of-00003.gguf" for k in (1, 2, 3)]
WORDS = ["a", "bc", ""] * 3000  # more than the first piece of a header


def finished(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(folder: Path, alignment: int | None = None, **options: Any) -> Arrays:
    """Five tensors, two to a file."""
    rng = np.random.default_rng(5)
    arrays: Arrays = {f"blk.{k}.w": rng.standard_normal((k + 2, 64)).astype(np.float32) for k in range(4)}
    codes = gguf.quants.quantize(arrays["blk.3.w"], gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(folder / "m.gguf", "test", **{"split_max_tensors": 2, **options})
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.words", WORDS)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.add_tensor("blocks", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finished(writer)
    return {**arrays, "blocks": gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q8_0)}


def part_file(path: Path, split: dict[str, Any], **tensors: np.ndarray[Any, Any]) -> None:
    """One file that says what it is told to say; numbers are int32, which the reader does not mind."""
    writer = gguf.GGUFWriter(path, "test")
    for key, value in split.items():
        if value is not None:
            writer.add_key_value(f"split.{key}", value, KINDS[type(value)], *SUB.get(type(value), ()))
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    finished(writer)


KINDS = {
    int: gguf.GGUFValueType.INT32,
    str: gguf.GGUFValueType.STRING,
    float: gguf.GGUFValueType.FLOAT32,
    bool: gguf.GGUFValueType.BOOL,
    list: gguf.GGUFValueType.ARRAY,
}
SUB = {list: (gguf.GGUFValueType.INT32,)}
ONE = np.ones(4, np.float32)


def said(no: Any, count: Any, total: Any) -> dict[str, Any]:
    return {"no": no, "count": count, "tensors.count": total}


def pair(folder: Path, first: dict[str, Any], second: dict[str, Any], tensors: tuple[str, str] = ("a", "b")) -> Path:
    """Two files, of which the first is returned."""
    for k, (split, tensor) in enumerate(zip((first, second), tensors)):
        part_file(folder / f"m-{k + 1:05d}-of-00002.gguf", split, **{tensor: ONE})
    return folder / "m-00001-of-00002.gguf"


@pytest.fixture
def arrays(tmp_path: Path) -> Arrays:
    return written(tmp_path)


@pytest.fixture
def served(tmp_path: Path, arrays: Arrays) -> Iterator[Served]:
    with serving() as server:
        server.files = {f"/models/{name}": (tmp_path / name).read_bytes() for name in NAMES}
        yield server


# -- on this machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", NAMES)
def test_any_part_opens_them_all(tmp_path: Path, arrays: Arrays, named: str) -> None:
    found = LOADER.metadata(tmp_path / named)
    assert list(found.tensors) == ["blk.0.w", "blk.1.w", "blk.2.w", "blk.3.w", "blocks"]
    assert [info.source for info in found.tensors.values()] == [NAMES[0]] * 2 + [NAMES[1]] * 2 + [NAMES[2]]
    assert found.notes == {"general.architecture": "test", "tokenizer.words": WORDS}
    everything = LOADER.load_many(tmp_path / named)
    assert everything.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(everything[name], array)
    np.testing.assert_array_equal(LOADER.load(tmp_path / named, "blk.2.w", part=slice(1, 3)), arrays["blk.2.w"][1:3])
    assert LOADER.load(tmp_path / named, "blocks", raw=True).dtype == np.uint8
    with pytest.raises(WeightError, match=rf"'{named}' has no tensor 'blk.9.w'"):
        LOADER.load(tmp_path / named, "blk.9.w")


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    arrays = written(tmp_path, split_max_tensors=3, small_first_shard=True)
    assert len(gguf.GGUFReader(tmp_path / NAMES[0]).tensors) == 0
    found = LOADER.metadata(tmp_path / NAMES[2])
    assert found.tensors.keys() == arrays.keys() and found.notes["tokenizer.words"] == WORDS


def test_the_command(tmp_path: Path, arrays: Arrays) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / NAMES[1]), "--json"])
    assert result.exit_code == 0, result.output
    assert [tensor["name"] for tensor in json.loads(result.output)["tensors"]] == list(arrays)


@pytest.mark.parametrize("count", [None, 0, 1])
def test_one_file_is_the_whole(tmp_path: Path, count: int | None) -> None:
    # parts that were joined again keep their keys, with a count of 0
    part_file(tmp_path / "whole.gguf", said(0, count, 7), a=ONE)
    assert LOADER.load(tmp_path / "whole.gguf", "a").tolist() == [1, 1, 1, 1]
    assert LOADER.load((tmp_path / "whole.gguf").read_bytes(), "a").tolist() == [1, 1, 1, 1]
    # and neither does a name make a part
    (tmp_path / "whole.gguf").rename(tmp_path / NAMES[1])
    assert list(LOADER.metadata(tmp_path / NAMES[1]).tensors) == ["a"]


@pytest.mark.parametrize("alignment", [8, 16, 64, 256, 4096])
@pytest.mark.parametrize("named", NAMES)
def test_parts_aligned_as_the_first_one_tells(tmp_path: Path, alignment: int, named: str) -> None:
    """The package writes the key to the first part alone, and all parts by it."""
    arrays = written(tmp_path, alignment=alignment)
    assert [b"general.alignment" in (tmp_path / name).read_bytes() for name in NAMES] == [True, False, False]
    found = LOADER.load_many(tmp_path / named)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    # the last tensor need not be filled up
    last = tmp_path / NAMES[2]
    last.write_bytes(last.read_bytes()[: -(-340 % alignment) or None])
    np.testing.assert_array_equal(LOADER.load(tmp_path / named, "blocks"), arrays["blocks"])


@pytest.mark.parametrize("named", NAMES[:2])
def test_parts_aligned_as_files_are_that_tell_nothing(tmp_path: Path, named: str) -> None:
    """llama.cpp writes the first part by its key and the others without."""
    plain, aligned = tmp_path / "plain", tmp_path / "aligned"
    for folder, options in ((plain, {}), (aligned, {"alignment": 4096})):
        folder.mkdir()
        arrays = written(folder, **options)
    for name in NAMES[1:]:
        (aligned / name).write_bytes((plain / name).read_bytes())
    found = LOADER.load_many(aligned / named)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with (aligned / NAMES[1]).open("ab") as file:
        file.write(bytes(8))
    with pytest.raises(WeightError, match=f"'{NAMES[1]}' tells no alignment .* neither by 32 bytes nor by 4096"):
        LOADER.load_many(aligned / named)


# -- far away ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", NAMES)
def test_metadata_costs_the_headers(served: Served, tmp_path: Path, arrays: Arrays, named: str) -> None:
    found = loader(tmp_path).metadata(f"{served.url}/models/{named}")
    assert found.tensors.keys() == arrays.keys() and found.notes["tokenizer.words"] == WORDS
    asked = {name: [r[0] for r in served.requests if r[1].endswith(name)] for name in NAMES}
    # is it there, and its first bytes; of the first the rest of its words
    assert [len(asked[name]) for name in NAMES] == [3, 2, 2]
    assert not kept(tmp_path)


def test_headers_are_read_at_the_same_time(
    served: Served, tmp_path: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=5)  # broken, and an error, where one waits for the other
    beside = gguf_parts._beside

    def meeting(*given: Any) -> Any:
        both.wait()
        return beside(*given)

    monkeypatch.setattr(gguf_parts, "_beside", meeting)
    assert loader(tmp_path).metadata(f"{served.url}/models/{NAMES[0]}").tensors.keys() == arrays.keys()


@pytest.mark.parametrize("named", NAMES)
def test_all_parts_are_fetched(served: Served, tmp_path: Path, arrays: Arrays, named: str) -> None:
    url = f"{served.url}/models/{named}?key=1"
    (path,) = loader(tmp_path).preload(url)
    assert path is not None and path.read_bytes() == (tmp_path / named).read_bytes()
    assert len(kept(tmp_path)) == 3
    before = len(served.requests)
    found = loader(tmp_path, offline=True).load_many(url)
    assert len(served.requests) == before
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_names_that_only_look_like_parts(served: Served, tmp_path: Path) -> None:
    part_file(tmp_path / "x", said(None, None, None), a=ONE)
    served.files = {"/best-of-3.gguf": (tmp_path / "x").read_bytes(), "/1-of-3.gguf.txt": b"no GGUF file"}
    loader(tmp_path).preload(*(served.url + path for path in served.files))
    assert len(kept(tmp_path)) == 2
    assert loader(tmp_path).load_many(f"{served.url}/best-of-3.gguf")["a"].tolist() == [1, 1, 1, 1]


def test_one_part_in_the_cache(served: Served, tmp_path: Path, arrays: Arrays) -> None:
    source = UrlSource(f"{served.url}/models/{NAMES[1]}")
    own = loader(tmp_path)
    source.fetch(own._context)
    np.testing.assert_array_equal(own.load(source, "blk.0.w"), arrays["blk.0.w"])
    # neither of the others is there, and either may be the first to be missed
    with pytest.raises(NotCached, match=rf"'{NAMES[1]}' is one of 3 parts, and 'm-0000[13]-of.*' cannot be had: .*not"):
        loader(tmp_path, offline=True).metadata(source)


def test_a_part_that_the_server_has_not(served: Served, tmp_path: Path) -> None:
    del served.files[f"/models/{NAMES[1]}"]
    url = f"{served.url}/models/{NAMES[2]}"
    with pytest.raises(Missing, match=rf"'{NAMES[2]}' is one of 3 parts, and '{NAMES[1]}' cannot be had: .*404"):
        loader(tmp_path).metadata(url)
    with pytest.raises(Missing, match=NAMES[1]):
        loader(tmp_path).preload(url)


@pytest.mark.parametrize("place", ["hub", "s3"])
def test_the_hub_and_s3(tmp_path: Path, arrays: Arrays, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("obstore")
    from tests.weights.test_hub_and_s3 import COMMIT, object_of, standing_in

    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    facts = {"X-Repo-Commit": COMMIT, "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}

    def answer(method: str, path: str, headers: Any) -> Any:
        folder, _, name = path.rpartition("/")
        if folder not in ("/bucket/models", *(f"/owner/name/resolve/{v}/q8" for v in ("main", COMMIT))):
            return 404, {}, b""
        data = (tmp_path / name).read_bytes()
        return 200, {**facts, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, data

    with standing_in(answer) as url:
        source: Any = object_of(url, NAMES[1])
        if place == "hub":
            cache = str(tmp_path / "hub")
            source = HubSource("owner/name", f"q8/{NAMES[1]}", cache_dir=cache, endpoint=url, token=False)
        own = loader(tmp_path, retries=0)
        assert own.metadata(source).tensors["blocks"].source == NAMES[2]
        own.preload(source)
    found = loader(tmp_path, offline=True).load_many(source)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_links_into_a_folder_of_contents(tmp_path: Path, arrays: Arrays) -> None:
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for k, name in enumerate(NAMES):
        (tmp_path / name).rename(tmp_path / "blobs" / f"{k}f0")
        (snapshot / name).symlink_to(f"../../blobs/{k}f0")
    assert LOADER.metadata(snapshot / NAMES[2]).tensors.keys() == arrays.keys()


def test_names_that_need_quotes(tmp_path: Path, arrays: Arrays) -> None:
    with serving() as server:
        for name in NAMES:
            server.files[f"/my%20{name}"] = (tmp_path / name).read_bytes()
        assert loader(tmp_path).metadata(f"{server.url}/my%20{NAMES[0]}").tensors.keys() == arrays.keys()
        # a name that is a way to somewhere else once it is read
        server.files[f"/x%2F..%2F{NAMES[0]}"] = (tmp_path / NAMES[0]).read_bytes()
        asked = len(server.requests)
        with pytest.raises(WeightError, match="must be a file called"):
            loader(tmp_path).metadata(f"{server.url}/x%2F..%2F{NAMES[0]}")
        assert {path for _, path, _ in server.requests[asked:]} == {f"/x%2F..%2F{NAMES[0]}"}


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_missing_part(tmp_path: Path, arrays: Arrays) -> None:
    (tmp_path / NAMES[2]).unlink()
    with pytest.raises(
        WeightError, match=rf"'{NAMES[0]}' is one of 3 parts, and '{NAMES[2]}' cannot be had: .*No such"
    ):
        LOADER.load(tmp_path / NAMES[0], "blk.0.w")


def test_something_else_in_place_of_a_part(tmp_path: Path, arrays: Arrays) -> None:
    (tmp_path / NAMES[1]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(WeightError, match=rf"'{NAMES[1]}' is no GGUF file: it begins b'vers'"):
        LOADER.metadata(tmp_path / NAMES[0])


def test_a_part_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    written(inner)
    (inner / NAMES[1]).rename(tmp_path / "elsewhere.gguf")
    (inner / NAMES[1]).symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(WeightError, match="leads out of its folder"):
        LOADER.metadata(inner / NAMES[0])


@pytest.mark.parametrize(
    "name", ["model.gguf", "m-1-of-3.gguf", "m-00002-of-00003 (1).gguf", "5f70bf18a086", NAMES[0][1:]]
)
def test_a_name_without_a_number(tmp_path: Path, arrays: Arrays, name: str) -> None:
    (tmp_path / NAMES[1]).rename(tmp_path / name)
    should = f"{name.removesuffix('.gguf')}-00002-of-00003.gguf"
    with pytest.raises(WeightError) as caught:
        LOADER.metadata(tmp_path / name)
    assert f"{name!r} is part 2 of 3 of a checkpoint" in str(caught.value)
    assert f"must be a file called {should!r}" in str(caught.value)
    (tmp_path / name).rename(tmp_path / should)
    with pytest.raises(WeightError, match="cannot be had"):  # as it was told, but not the others
        LOADER.metadata(tmp_path / should)


def test_a_name_with_the_wrong_number(tmp_path: Path, arrays: Arrays) -> None:
    (tmp_path / NAMES[1]).rename(tmp_path / "keep")
    (tmp_path / NAMES[2]).rename(tmp_path / NAMES[1])
    (tmp_path / "keep").rename(tmp_path / NAMES[2])
    with pytest.raises(WeightError, match=rf"part 2 of 3 by its name, but part 3 of 3 by its .* name '{NAMES[2]}'"):
        LOADER.metadata(tmp_path / NAMES[1])
    with pytest.raises(WeightError, match=rf"beside '{NAMES[0]}' is part . of 3 by its name, but part . of 3 by its"):
        LOADER.metadata(tmp_path / NAMES[0])


def test_bytes_in_memory_have_no_others(tmp_path: Path, arrays: Arrays) -> None:
    data = (tmp_path / NAMES[0]).read_bytes()
    asks: list[Callable[[Any], Any]] = [LOADER.metadata, LOADER.load_many]
    for ask in asks:
        with pytest.raises(WeightError, match=r"must be a file called .* or all parts be joined to one file"):
            ask(data)
        with pytest.raises(WeightError, match=rf"'({'|'.join(NAMES[1:])})'.*bytes in memory have no other files"):
            ask(MemorySource(data, name=NAMES[0]))


DISAGREEING = {
    "the second of three": (said(0, 2, 2), said(1, 3, 2), "but part 2 of 3 by its header"),
    "the first twice": (said(0, 2, 2), said(0, 2, 2), "but part 1 of 2 by its header"),
    "one that is whole": (said(0, 2, 2), said(None, None, None), "but a whole checkpoint by its header"),
    "too few tensors": (said(0, 2, 3), said(1, 2, 3), "have 3 tensors together; they have 2"),
    "too many tensors": (said(0, 2, 1), said(1, 2, 1), "have 1 tensors together; they have 2"),
    "totals that differ": (said(0, 2, 2), said(1, 2, 5), "'m-00002-of-00002.gguf' says .* 5 tensors together"),
}


@pytest.mark.parametrize("fault", DISAGREEING)
def test_parts_that_disagree(tmp_path: Path, fault: str) -> None:
    first, second, message = DISAGREEING[fault]
    with pytest.raises(WeightError, match=message):
        LOADER.metadata(pair(tmp_path, first, second))


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    path = pair(tmp_path, said(0, 2, 1), said(1, 2, 1), ("a", "a"))
    with pytest.raises(WeightError, match=r"'a' is in 'm-00001-of-00002.gguf' and again in 'm-00002-of-00002.gguf'"):
        LOADER.metadata(path)


@pytest.mark.parametrize(
    ("split", "key"),
    [
        *((said(0, count, 2), "split.count") for count in (-1, 65535, 2**31 - 1, "2", 2.0, True, [2])),
        *((said(no, 2, 2), "split.no") for no in (None, -1, 2, "../0", 0.0, False, [0] * 999)),
        *((said(0, 2, total), "split.tensors.count") for total in (None, -1, "2", 2.0, True, [2])),
    ],
)
def test_values_that_are_none(tmp_path: Path, split: dict[str, Any], key: str) -> None:
    path = pair(tmp_path, split, said(1, 2, 2))
    with pytest.raises(WeightError, match=rf"'m-00001-of-00002.gguf': {key} is ") as caught:
        LOADER.metadata(path)
    assert len(str(caught.value)) < 200
    # the same where it is in one that is opened along
    with pytest.raises(WeightError, match=rf"'m-00001-of-00002.gguf': {key} is "):
        LOADER.metadata(tmp_path / "m-00002-of-00002.gguf")
