"""Checkpoints of more files than a process may have open."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ranvier.errors import WeightError
from ranvier.formats.onnx import read
from ranvier.memory.mapping import give_back, is_mapped, mapped
from ranvier.weights import S3Source, WeightLoader, save_safetensors
from tests.weights.server import loader, serving

COUNT = 60


@contextlib.contextmanager
def few_files(more: int = 30) -> Iterator[None]:
    """Not many more may be opened than are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shards(folder: Path) -> Path:
    places = {f"w{k}": f"m-{k}.safetensors" for k in range(COUNT)}
    for k, (name, file) in enumerate(places.items()):
        save_safetensors(folder / file, {name: np.full(32, k, np.float32)})
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder / "m.safetensors.index.json"


def parts(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "m.gguf", "test", split_max_tensors=1)
    for k in range(COUNT):
        writer.add_tensor(f"w{k}", np.full(32, k, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / f"m-00001-of-{COUNT:05d}.gguf"


@pytest.mark.parametrize("written", [shards, parts])
def test_on_this_machine(tmp_path: Path, written: Callable[[Path], Path]) -> None:
    path = written(tmp_path)
    with few_files():
        found = WeightLoader().load_many(path)
        assert {name: (len(array), *set(array)) for name, array in found.items()} == {
            f"w{k}": (32, k) for k in range(COUNT)
        }


@pytest.mark.parametrize("written", [shards, parts])
def test_far_away(tmp_path: Path, written: Callable[[Path], Path]) -> None:
    """One for each file was kept, and the server is in this process too."""
    path = written(tmp_path)
    with serving() as server:
        server.files = {f"/{each.name}": each.read_bytes() for each in tmp_path.iterdir()}
        with few_files(40):
            found = loader(tmp_path).open(f"{server.url}/{path.name}")
            assert {name: weight.read()[0] for name, weight in found.items()} == {f"w{k}": k for k in range(COUNT)}
        assert len(server.ports) <= 4


def test_of_many_files_those_with_the_wanted_tensors_are_opened(tmp_path: Path) -> None:
    path = shards(tmp_path)
    with serving() as server:
        server.files = {f"/{each.name}": each.read_bytes() for each in tmp_path.iterdir()}
        url = f"{server.url}/{path.name}"

        def asked() -> set[str]:
            found = {name for _, name, _ in server.requests} - {f"/{path.name}"}
            server.requests.clear()
            return found

        assert loader(tmp_path / "a").load(url, "w7")[0] == 7 and asked() == {"/m-7.safetensors"}
        found = loader(tmp_path / "b").open(url)
        assert "w9" in found and "other" not in found and found.get("other") is None and len(found) == COUNT
        assert not asked()
        some = loader(tmp_path / "c").load_many(url, ["w3", "w5"])
        assert [array[0] for array in some.values()] == [3, 5] and asked() == {"/m-3.safetensors", "/m-5.safetensors"}
        assert len(loader(tmp_path / "d").metadata(url).tensors) == COUNT == len(asked())
        assert len(found.values()) == COUNT == len(asked())
        assert found["w2"].read()[0] == 2 and not asked(), "so small a file came as a whole"


@pytest.mark.parametrize("written", [shards, parts])
def test_in_a_bucket(tmp_path: Path, written: Callable[[Path], Path]) -> None:
    pytest.importorskip("obstore")
    path = written(tmp_path)
    with serving() as server:
        server.files = {f"/bucket/{each.name}": each.read_bytes() for each in tmp_path.iterdir()}
        with few_files(60):
            source = S3Source("bucket", path.name, "us-east-1", server.url, {"skip_signature": True})
            found = loader(tmp_path).open(source)
            assert {name: weight.read()[0] for name, weight in found.items()} == {f"w{k}": k for k in range(COUNT)}
        assert len(server.ports) <= 8


def test_what_is_mapped_stays_as_long_as_it_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(bytes(range(256)) * 100)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    whole = np.frombuffer(mapped(path), np.uint8)
    piece = whole[1000:1010]
    assert mappings() == 1
    path.unlink()  # the bytes are there all the same
    del whole
    assert piece.tolist() == [k % 256 for k in range(1000, 1010)]
    with pytest.raises(ValueError, match="WRITEABLE"):
        piece.flags.writeable = True
    del piece
    gc.collect()
    assert mappings() == 0


def test_pages_that_were_given_back_are_read_again(tmp_path: Path) -> None:
    """What was mapped here and nothing else: memory that somebody brought would be zeros afterwards."""
    path = tmp_path / "m"
    path.write_bytes(bytes(range(256)) * 512)
    data, brought = mapped(path), memoryview(bytearray(b"x" * (1 << 16)))
    seen = np.frombuffer(data, np.uint8)
    assert is_mapped(data[5000:]) and not is_mapped(brought) and not is_mapped(mapped(Path("/dev/null")))

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(f"{path}\n", 1)[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert int(seen.sum()) == 512 * sum(range(256))
    before = resident()
    give_back(data[5000:])
    assert resident() < before
    give_back(brought)
    assert bytes(brought) == b"x" * (1 << 16) and int(seen.sum()) == 512 * sum(range(256))


def test_a_model_with_a_file_for_every_tensor(tmp_path: Path) -> None:
    """As exporters write large ones."""
    names = [f"w{k}" for k in range(COUNT)]
    weights = [numpy_helper.from_array(np.full(32, k, np.float32), name) for k, name in enumerate(names)]
    for each in weights:
        onnx.external_data_helper.set_external_data(each, f"{each.name}.bin")
        (tmp_path / f"{each.name}.bin").write_bytes(each.raw_data)
        each.ClearField("raw_data")
    y = helper.make_tensor_value_info("y", 1, [32])
    graph = helper.make_graph([helper.make_node("Sum", names, ["y"])], "net", [], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with few_files():
        found = read(tmp_path / "m.onnx")
        assert [found.constants[name].const.numpy()[0] for name in names] == list(range(COUNT))  # type: ignore[union-attr]


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, limits[1]))
    try:
        with pytest.raises(WeightError, match=r"cannot open .*m\.safetensors': Cannot allocate memory"):
            WeightLoader().metadata(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
