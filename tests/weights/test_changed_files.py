"""Files that somebody writes to, or takes away, while they are open: what was in them, or an error that says so."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ranvier as rv
from ranvier.errors import WeightError
from ranvier.formats.onnx import read
from ranvier.weights import Checkpoint, FileChanged, WeightLoader, save_safetensors
from ranvier.weights.blob import MemoryBlob
from ranvier.weights.quantized import quantized_layers
from ranvier.weights.quantized.tensors import Layer
from tests.weights.changing import CHANGES, HARMLESS, Event, aged, cut_off, replaced, written_over

Array = np.ndarray[Any, Any]
NUMBERS = np.arange(3000, dtype=np.float32)
SENTENCE = r"(?s)m\.\w+' (was written to after it was opened|had \d+ bytes when .* now has \d+).*load the model again"


def in_gguf(path: Path) -> None:
    writer = pytest.importorskip("gguf").GGUFWriter(path, "test")
    writer.add_tensor("a", NUMBERS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_onnx(path: Path) -> None:
    y = helper.make_tensor_value_info("y", 1, [3000])
    net = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["y"])], "m", [], [y], [numpy_helper.from_array(NUMBERS, "a")]
    )
    onnx.save(helper.make_model(net), path)


def in_torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.from_numpy(NUMBERS)}, path)


FORMATS: dict[str, Callable[[Path], None]] = {
    "m.safetensors": lambda path: save_safetensors(path, {"a": NUMBERS}),
    "m.npy": lambda path: np.save(path, NUMBERS),
    "m.npz": lambda path: np.savez(path, a=NUMBERS),
    "m.gguf": in_gguf,
    "m.onnx": in_onnx,
    "m.pt": in_torch,
}


def opened(path: Path) -> Checkpoint:
    aged(path)
    return WeightLoader(offline=True).open(path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("event", CHANGES)
def test_what_was_written_to_is_not_read(tmp_path: Path, name: str, event: Event) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    (weight,) = opened(path).values()
    np.testing.assert_array_equal(weight.read(), NUMBERS)
    event(path)
    for _ in range(2):
        with pytest.raises(FileChanged, match=SENTENCE) as caught:
            weight.read()
        assert caught.value.path == str(path)
    with pytest.raises(WeightError):
        weight.read((slice(0, 1, 1),))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("event", HARMLESS)
def test_what_is_still_there_is_read(tmp_path: Path, name: str, event: Event) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    (weight,) = opened(path).values()
    event(path)
    np.testing.assert_array_equal(weight.read(), NUMBERS)


def test_external_data(tmp_path: Path) -> None:
    in_onnx(tmp_path / "whole.onnx")
    onnx.save(onnx.load(tmp_path / "whole.onnx"), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin")
    aged(tmp_path / "m.bin")
    found = opened(tmp_path / "m.onnx")
    np.testing.assert_array_equal(found["a"].read(), NUMBERS)
    written_over(tmp_path / "m.bin")
    with pytest.raises(FileChanged, match=SENTENCE):
        found["a"].read()


# -- models, whose weights are read where they lie when a run first needs them -----------------------------------------


def model_of(folder: Path, external: bool) -> tuple[Path, Path]:
    """A model of a product with open rows, and the file that has its weights."""
    x, y = (helper.make_tensor_value_info(name, 1, ["rows", 64]) for name in ("x", "y"))
    weights = [numpy_helper.from_array(np.eye(64, dtype=np.float32), "a")]
    net = helper.make_graph([helper.make_node("MatMul", ["x", "a"], ["y"])], "m", [x], [y], weights)
    model = helper.make_model(net, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "m.onnx"
    if external:
        onnx.save(model, path, save_as_external_data=True, location="m.bin", size_threshold=0)
    else:
        onnx.save(model, path)
    file = folder / ("m.bin" if external else "m.onnx")
    aged(file)
    return path, file


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("event", CHANGES)
def test_a_model_does_not_run_with_weights_that_were_written_to_since(
    tmp_path: Path, event: Event, external: bool
) -> None:
    path, file = model_of(tmp_path, external)
    with rv.load(path, providers=["reference"]) as session:
        event(file)
        for _ in range(2):
            with pytest.raises(FileChanged, match=SENTENCE):
                session.run({"x": np.ones((2, 64), np.float32)})


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("event", HARMLESS)
def test_a_model_whose_weights_are_still_there_runs(tmp_path: Path, event: Event, external: bool) -> None:
    path, file = model_of(tmp_path, external)
    rows = np.arange(128, dtype=np.float32).reshape(2, 64)
    with rv.load(path, providers=["reference"]) as session:
        event(file)
        np.testing.assert_array_equal(session.run({"x": rows})["y"], rows)


def test_constants_of_a_graph_that_were_looked_at_before(tmp_path: Path) -> None:
    path, file = model_of(tmp_path, True)
    weights = read(path).constants["a"].const
    assert weights is not None
    np.testing.assert_array_equal(weights.numpy(), np.eye(64))
    written_over(file)
    for look in (weights.numpy, weights.raw):
        with pytest.raises(FileChanged, match=SENTENCE):
            look()


def test_links(tmp_path: Path) -> None:
    """As a hub's cache has them: names that lead to contents, and after a while to others."""
    path, content, other = tmp_path / "m.safetensors", tmp_path / "content", tmp_path / "other"
    save_safetensors(content, {"a": NUMBERS})
    save_safetensors(other, {"a": -NUMBERS})
    path.symlink_to(content)
    aged(content)
    found = opened(path)
    path.unlink()
    path.symlink_to(other)
    np.testing.assert_array_equal(found["a"].read(), NUMBERS)
    written_over(other)
    np.testing.assert_array_equal(found["a"].read(), NUMBERS)
    written_over(content)
    with pytest.raises(FileChanged, match=SENTENCE):
        found["a"].read()


def test_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": NUMBERS})
    monkeypatch.chdir(tmp_path)
    found = opened(Path(path.name))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    cut_off(path)
    with pytest.raises(FileChanged, match=SENTENCE):
        found["a"].read()


def test_a_new_look_is_one_at_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": NUMBERS})
    first = opened(path)
    path.write_bytes(path.read_bytes().replace(NUMBERS.tobytes(), (-NUMBERS).tobytes()))
    with pytest.raises(FileChanged):
        first["a"].read()
    np.testing.assert_array_equal(WeightLoader(offline=True).load(path), -NUMBERS)


def test_files_without_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.touch()
    aged(path)
    blob = MemoryBlob.of_file(path)
    assert blob.read(0, 0).size == 0
    path.write_bytes(b"some")
    with pytest.raises(FileChanged, match="had 0 bytes when it was opened and now has 4"):
        blob.read(0, 0)


def test_one_look_for_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": NUMBERS.reshape(3, 1000)})
    found = opened(path)
    looks: list[Any] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *given, **named: looks.append(given) or stat(*given, **named))
    found["a"].read()
    found["a"].read((slice(0, 3, 2), slice(0, 1000, 3)))
    assert len(looks) == 2


def test_the_error_goes_to_other_processes() -> None:
    error = pickle.loads(pickle.dumps(FileChanged("m.gguf", "was written to after it was opened")))
    assert (error.path, error.how) == ("m.gguf", "was written to after it was opened") and "load the model" in str(
        error
    )


# -- codes ------------------------------------------------------------------------------------------------------------


def layer_of(path: Path) -> Layer:
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (32, 1)).astype(np.float32)
    save_safetensors(path, {"a.weight": codes, "a.weight_scale": scales})
    return quantized_layers(opened(path))["a"]


@pytest.mark.parametrize("event", CHANGES)
def test_codes_that_were_written_to(tmp_path: Path, event: Event) -> None:
    layer = layer_of(tmp_path / "m.safetensors")
    layer()
    event(tmp_path / "m.safetensors")
    with pytest.raises(FileChanged, match=SENTENCE):
        layer()


@pytest.mark.parametrize("event", HARMLESS)
def test_codes_that_are_still_there(tmp_path: Path, event: Event) -> None:
    layer = layer_of(tmp_path / "m.safetensors")
    before = layer().dequantize()
    event(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(layer().dequantize(), before)


@pytest.mark.parametrize("event", [written_over, replaced])
def test_codes_that_are_written_to_while_they_are_read(tmp_path: Path, event: Event) -> None:
    path = tmp_path / "m.safetensors"
    layer = layer_of(path)

    def read() -> Any:
        found = layer.read()
        event(path)
        return found

    disturbed = Layer(read, layer.tensors, layer.codes)
    with pytest.raises(FileChanged, match=SENTENCE) if event is written_over else contextlib.nullcontext():
        disturbed()


def test_readers_in_threads_are_all_told(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "m.safetensors")
    written_over(tmp_path / "m.safetensors")
    told: list[str] = []

    def read() -> None:
        try:
            layer()
        except FileChanged as error:
            told.append(error.path)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert told == [str(tmp_path / "m.safetensors")] * 4
