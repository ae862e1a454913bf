"""``ranvier weights``."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from ranvier.cli import weights
from ranvier.weights import save_safetensors
from tests.weights.server import serving


def test_tensors_of_a_file(call, call_json, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(4, np.int8)}, {"made": "here"})
    found = call_json("weights", str(path))
    assert found["parameters"] == 10 and found["bytes"] == 52 and found["notes"] == {"made": "here"}
    assert {t["name"]: (t["dtype"], t["shape"]) for t in found["tensors"]} == {
        "a": ("float64", [2, 3]),
        "b": ("int8", [4]),
    }
    assert "2x3" in call("weights", str(path)).stdout
    tensor = call_json("weights", str(path), "--tensor", "a")["tensor"]
    assert (tensor["min"], tensor["max"], tensor["mean"], tensor["zeros"]) == (0.0, 5.0, 2.5, 1)


@pytest.mark.filterwarnings("error")
def test_numbers_at_the_end_of_what_there_is(call_json, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {"large": np.array([1.5e308, 1.5e308, -1.5e308, 1.5e308]), "whole": np.array([2**62 + 1, 3], np.int64)}
    save_safetensors(path, arrays)
    large = call_json("weights", str(path), "--tensor", "large")["tensor"]
    assert (large["min"], large["max"]) == (-1.5e308, 1.5e308)
    assert large["mean"] == pytest.approx(0.75e308) and large["std"] == pytest.approx(0.75**0.5 * 1.5e308)
    whole = call_json("weights", str(path), "--tensor", "whole")["tensor"]
    assert (whole["min"], whole["max"]) == (3, 2**62 + 1)


def test_long_lists_are_cut(call, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_safetensors(path, {f"w{k:03}": np.zeros(1, np.float32) for k in range(70)})
    assert "and 10 more" in call("weights", str(path)).stdout
    assert "w069" in call("weights", str(path), "--all").stdout


def test_fetch(call_json, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "m", {"a": np.zeros(3, np.float32)})
    with serving(m__safetensors=(tmp_path / "m").read_bytes()) as server:
        url, folder = f"{server.url}/m.safetensors", str(tmp_path / "cache")
        found = call_json("weights", url, "--fetch", "--cache-dir", folder)
        assert Path(found["path"]).read_bytes() == (tmp_path / "m").read_bytes()
    assert call_json("weights", url, "--offline", "--cache-dir", folder)["parameters"] == 3


def test_errors(call, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    bad = call("weights", str(tmp_path / "x.safetensors"))
    assert bad.exit_code != 0 and "no safetensors file" in bad.stderr


def test_raw_data(call, call_json, tmp_path: Path) -> None:
    path = tmp_path / "x.raw"
    path.write_bytes(np.arange(6, dtype=">f4").tobytes())
    found = call_json("weights", str(path), "--dtype", ">f4", "--shape", "2x3", "--tensor", "tensor")
    assert found["tensors"][0]["shape"] == [2, 3] and found["tensor"]["max"] == 5.0
    bad = call("weights", str(path), "--dtype", "f4", "--shape", "two")
    assert bad.exit_code != 0 and "--shape must be like 128x64" in bad.stderr


@pytest.mark.parametrize("dtype", ["wat", "str", "object", "f4,f4", ",", "(99999999999,)f4", "V4", "datetime64[s]", ""])
def test_a_type_that_is_none(call, tmp_path: Path, dtype: str) -> None:
    (tmp_path / "x.raw").write_bytes(bytes(24))
    bad = call("weights", tmp_path / "x.raw", "--dtype", dtype, "--shape", "2x3")
    assert (
        bad.exit_code == 2
        and f"--dtype must be a type of numbers, such as float16, bfloat16 or >f4, got {dtype!r}"
        in (" ".join(bad.stderr.split()))
    )


@pytest.mark.parametrize("shape", ["two", "2x", "x", "-2x3", "2xx3", "2.0x3", "9" * 5000])
def test_a_shape_that_is_none(call, tmp_path: Path, shape: str) -> None:
    (tmp_path / "x.raw").write_bytes(bytes(24))
    bad = call("weights", tmp_path / "x.raw", "--dtype", "f4", "--shape", shape)
    assert bad.exit_code == 2 and "--shape must be like 128x64" in bad.stderr


def test_a_shape_of_nothing_is_one_number(call_json, tmp_path: Path) -> None:
    (tmp_path / "x.raw").write_bytes(np.float32(1.5).tobytes())
    found = call_json("weights", tmp_path / "x.raw", "--dtype", "f4", "--shape", "", "--tensor", "tensor")
    assert found["tensor"]["shape"] == [] and found["tensor"]["max"] == 1.5


def test_numbers_of_a_complex_tensor(call_json, tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", np.array([3 + 4j, 1j]))
    tensor = call_json("weights", str(tmp_path / "c.npy"), "--tensor", "c")["tensor"]
    assert (tensor["of"], tensor["min"], tensor["max"]) == ("magnitudes", 1.0, 5.0)


def test_a_tensor_of_text_has_no_numbers(call, call_json, tmp_path: Path) -> None:
    words = helper.make_tensor("words", onnx.TensorProto.STRING, [2], [b"a", b"b"])
    graph = helper.make_graph([], "g", [], [], [words])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    given = ("weights", str(tmp_path / "m.onnx"), "--tensor", "words")
    assert call_json(*given)["tensor"] == {"name": "words", "shape": [2], "of": "strings"}
    assert "strings" in call(*given).stdout


def test_names_do_not_speak_to_the_terminal(call, call_json, tmp_path: Path) -> None:
    name = "a\x1b[2J\rb\n\u202ec é"
    save_safetensors(tmp_path / "m.safetensors", {name: np.zeros(1)}, {"k\x1b[31m": "v\x1b]0;title\x07"})
    for options in ((), ("--tensor", name)):
        shown = call("weights", tmp_path / "m.safetensors", *options).stdout
        assert not any(c in shown for c in "\x1b\r\x07\u202e")
        assert r"a\x1b[2J\rb\n\u202ec é" in shown and r"v\x1b]0;title\x07" in shown
    assert call_json("weights", tmp_path / "m.safetensors")["tensors"][0]["name"] == name


def test_a_tensor_in_short_is_that_of_all_its_pieces(
    call_json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 7)
    array = np.random.default_rng(0).standard_normal((9, 11)).astype(np.float32)
    array[3, 4], array[5, 6] = 0, np.nan
    np.save(tmp_path / "c.npy", np.asfortranarray(array))
    found = call_json("weights", tmp_path / "c.npy", "--tensor", "c")["tensor"]
    known = array[np.isfinite(array)].astype(np.float64)
    wanted = {"min": known.min(), "max": known.max(), "mean": known.mean(), "std": known.std(), "zeros": 1}
    assert found.pop("finite") is False
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


def test_a_tensor_in_short_takes_little_memory(call_json, tmp_path: Path) -> None:
    with (tmp_path / "x.raw").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    found = call_json("weights", tmp_path / "x.raw", "--dtype", "int8", "--shape", "67108864", "--tensor", "tensor")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["tensor"]["zeros"] == 64 << 20 and peak < 100 << 20  # more than a gigabyte before
