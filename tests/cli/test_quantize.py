"""``ranvier quantize``."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.runtime.test_quantizing import model


def test_a_model_and_its_report(call_json, call, tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx")
    np.savez(tmp_path / "s.npz", x=np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32))
    target = tmp_path / "q.onnx"
    given = ("quantize", path, "-o", target, "--calib", tmp_path / "s.npz", "--slower", "1e9")
    found = call_json(*given)
    assert target.exists() and found["difference"]["cosine"] > 0.99 and found["scheme"] == "int8"
    assert {layer["name"] for layer in found["layers"]} == {"conv1", "conv2", "dense1", "dense2"}
    again = call(*given)
    assert again.exit_code == 2 and "--force" in again.stderr
    shown = call(*given, "--force").stdout
    assert "times as fast" in shown and "dense2" in shown


def test_refused(call, tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx")
    np.savez(tmp_path / "s.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    target = tmp_path / "q.onnx"
    found = call("quantize", path, "-o", target, "--calib", tmp_path / "s.npz", "--slower", "1e-9")
    assert found.exit_code == 1 and "not written" in found.stderr and not target.exists()
    assert call("quantize", path, "-o", target).exit_code == 2  # int8 needs samples
    forced = call("quantize", path, "-o", target, "--calib", tmp_path / "s.npz", "--slower", "1e-9", "--force")
    assert forced.exit_code == 0 and target.exists() and "worse than asked" in forced.stdout


def test_mistakes_are_found_before_the_work(call, tmp_path: Path) -> None:
    path, samples = model(tmp_path / "m.onnx"), tmp_path / "s.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    given, target = ("quantize", path, "--calib", samples), tmp_path / "q.onnx"
    for more, said in (
        (("-o", tmp_path / "none" / "q.onnx"), "no folder"),
        (("-o", tmp_path, "--force"), "is a folder"),
        (("-o", target, "--group", "64"), "--group does nothing with --scheme int8"),
        (("-o", target, "--scheme", "int4", "--signed"), "--signed does nothing with --scheme int4"),
        (("-o", target, "--scheme", "fp8", "--group", "64"), "--group does nothing with --scheme fp8"),
        (
            ("-o", target, "--scheme", "int8_dynamic", "--group", "64"),
            "--group does nothing with",
        ),
        (("-o", target, "--scheme", "int8_dynamic", "--ranges", "mse"), "--ranges does nothing"),
        (("-o", target, "--scheme", "int4", "--bits", "8"), "--bits does nothing with --scheme int4"),
        (("-o", target, "--scheme", "gptq", "--bits", "3"), "--bits"),
        (("-o", target, "--activations", "int8"), "--activations does nothing with --scheme int8"),
        (("-o", target, "--scheme", "nf4", "--activations", "int8"), "--activations does nothing with --scheme nf4"),
        (("-o", target, "--scheme", "int4", "--group", "48"), "power of two"),
        (("-o", target, "--cosine", "1.5"), "at most 1"),
        (("-o", target, "--samples", "0"), "--samples"),
        (("-o", target, "--cosine", "0.9", "--max-error", "0.1"), "give one of them"),
        (("-o", tmp_path / ("q" * 300)), "cannot be written"),
    ):
        found = call(*given, *more)
        assert found.exit_code == 2 and said in found.stderr, more
    assert not target.exists()


@pytest.mark.parametrize(
    "more, said",
    [
        (("--scheme", "int8"), "int8_dynamic needs none"),
        (("--scheme", "awq"), "needs --calib"),
        (("--scheme", "int4", "--samples", "4"), "--samples does nothing without --calib"),
        (("--scheme", "int4", "--slower", "2"), "--slower does nothing without --calib"),
        (("--scheme", "int4", "--threads", "1"), "--threads does nothing without --calib"),
        (("--scheme", "int4", "--max-error", "0.1"), "--max-error needs --calib"),
        (("--scheme", "int4", "--cosine", "0.9"), "--cosine needs --calib"),
    ],
)
def test_what_only_samples_can_tell(call, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    found = call("quantize", model(tmp_path / "m.onnx"), "-o", tmp_path / "q.onnx", *more)
    assert found.exit_code == 2 and said in found.stderr and not (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize("scheme", ["int4", "int8_dynamic"])
def test_a_report_without_samples_says_nothing_of_results(call_json, tmp_path: Path, scheme: str) -> None:
    found = call_json("quantize", model(tmp_path / "m.onnx"), "-o", tmp_path / "q.onnx", "--scheme", scheme)
    assert found["samples"] == 0 and found["bytes_after"] < found["bytes_before"]
    assert {found[name] for name in ("difference", "seconds_before", "seconds_after", "speedup")} == {None}


@pytest.mark.parametrize(("scheme", "most"), [("int4", 16), ("gptq", 128), ("awq", 128)])
def test_what_looks_at_inputs_once_takes_more_samples(call_json, tmp_path: Path, scheme: str, most: int) -> None:
    path, samples = model(tmp_path / "m.onnx"), tmp_path / "s.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((130 * 8, 3, 8, 8)).astype(np.float32))
    given = ("quantize", path, "-o", tmp_path / "q.onnx", "--calib", samples, "--scheme", scheme, "--force")
    assert call_json(*given)["samples"] == most


@pytest.mark.parametrize("scheme, bits", [("gptq", 2), ("gptq", 8), ("awq", 8), ("awq", 4)])
def test_bits_and_activations(call_json, tmp_path: Path, scheme: str, bits: int) -> None:
    path, samples, target = model(tmp_path / "m.onnx"), tmp_path / "s.npz", tmp_path / "q.onnx"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    given = ("quantize", path, "-o", target, "--calib", samples, "--scheme", scheme, "--bits", str(bits), "--force")
    errors = []
    for activations, level in (("float32", None), ("int8", 4)):
        errors.append(call_json(*given, "--activations", activations)["difference"]["error"])
        coded = [node for node in onnx.load(target).graph.node if node.op_type == "MatMulNBits"]
        found = [{each.name: each.i for each in node.attribute} for node in coded]
        assert len(found) == 2
        assert all(each["bits"] == bits and each.get("accuracy_level") == level for each in found)
    assert errors[0] != errors[1] and max(errors) < {2: 1.0, 4: 0.2, 8: 0.02}[bits]


def test_a_cosine_for_weights_alone(call_json, tmp_path: Path) -> None:
    path, samples = model(tmp_path / "m.onnx"), tmp_path / "s.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    given = ("quantize", path, "--calib", samples, "--scheme", "int4", "--group", "16", "--slower", "1e9")
    found = call_json(*given, "-o", tmp_path / "a.onnx")
    assert found["difference"]["cosine"] < 0.999
    near = call_json(*given, "-o", tmp_path / "b.onnx", "--cosine", "0.999", "--force")
    assert near["difference"]["cosine"] >= 0.999


def test_as_long_as_it_takes(call_json, tmp_path: Path) -> None:
    path, samples = model(tmp_path / "m.onnx"), tmp_path / "s.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32))
    given = ("quantize", path, "-o", tmp_path / "q.onnx", "--calib", samples, "--slower", "1e9", "--cosine", "0.99999")
    assert len(call_json(*given, "--seconds", "inf", "--not-timed", "--force")["layers"]) == 4


def test_data_of_the_model_is_not_overwritten(call, tmp_path: Path) -> None:
    whole = model(tmp_path / "whole.onnx")
    path = tmp_path / "m.onnx"
    onnx.save(onnx.load(whole), path, save_as_external_data=True, location="weights.data", size_threshold=0)
    before = (tmp_path / "weights.data").read_bytes()
    for target in ("weights.data", "weights"):  # large weights would lie beside the second
        found = call("quantize", path, "-o", tmp_path / target, "--scheme", "int4", "--force")
        assert found.exit_code == 2 and "holds data of" in found.stderr
    assert call("quantize", path, "-o", path, "--scheme", "int4", "--force").exit_code == 0
    assert (tmp_path / "weights.data").read_bytes() == before and len(onnx.load(path).graph.node) > 3


def test_what_is_no_file_is_not_replaced(call, tmp_path: Path) -> None:
    path, pipe, link = model(tmp_path / "m.onnx"), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nowhere")
    found = call("quantize", path, "-o", pipe, "--scheme", "int4", "--force")
    assert found.exit_code == 2 and "no ordinary file" in found.stderr and pipe.is_fifo()
    found = call("quantize", path, "-o", link, "--scheme", "int4")
    assert found.exit_code == 2 and "--force" in found.stderr and link.is_symlink()


@pytest.mark.parametrize(
    "option, given, meant", [("--scheme", "gptx", "gptq"), ("--scheme", "INT4W", "int4"), ("--ranges", "mean", None)]
)
def test_names_that_are_nearly_right(call, tmp_path: Path, option: str, given: str, meant: str | None) -> None:
    found = call("quantize", tmp_path / "m.onnx", "-o", tmp_path / "q.onnx", option, given)
    assert found.exit_code == 2 and ("did you mean" in found.stderr) is (meant is not None)
    assert meant is None or f"did you mean '{meant}" in found.stderr


@pytest.mark.parametrize("count, said", [(3, "none held back"), (8, "8, 2 held back")])
def test_the_report_says_how_many_samples_had_no_part(call, tmp_path: Path, count: int, said: str) -> None:
    path, samples = model(tmp_path / "m.onnx"), tmp_path / "s.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((count, 3, 8, 8)).astype(np.float32))
    given = ("quantize", path, "-o", tmp_path / "q.onnx", "--calib", samples, "--scheme", "gptq", "--slower", "1e9")
    shown = call(*given).stdout
    assert said in shown and ("of 2 samples, held back" if count == 8 else "of 3 samples") in shown


@pytest.mark.parametrize(
    "first, again, said",
    [
        ("int8", "int8", "4 layers in codes (2 Conv behind DequantizeLinear, 1 "),
        ("int8", "int4", "none left in float"),
        ("int4", "int4", "2 layers in codes (2 MatMulNBits), 2 left in float"),
        ("nf4", "fp8", "2 layers in codes (2 MatMulBnb4), 2 left in float"),
        ("fp8", "int4", "left in float"),
    ],
)
def test_a_model_that_is_quantized_already(call, tmp_path: Path, first: str, again: str, said: str) -> None:
    path, samples, made = model(tmp_path / "m.onnx"), tmp_path / "s.npz", tmp_path / "q.onnx"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    given = ("--calib", samples, "--slower", "1e9", "--cosine", "0")
    assert call("quantize", path, "-o", made, "--scheme", first, *given, "--force").exit_code == 0
    found = call("quantize", made, "-o", tmp_path / "r.onnx", "--scheme", again, *given)
    assert found.exit_code == 2 and not (tmp_path / "r.onnx").exists()
    assert "no layer of this model can be quantized" in found.stderr
    assert "it is quantized already" in found.stderr and said in found.stderr
