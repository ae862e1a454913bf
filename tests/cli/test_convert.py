"""``ranvier convert``."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import helper

from ranvier.cli import convert, exit_codes

from .conftest import save_model


@pytest.fixture
def folding(tmp_path):
    """A model with something to optimize: an Identity, and arithmetic on constants."""
    nodes = [
        helper.make_node("Add", ["c", "c"], ["two"], name="constant_sum"),
        helper.make_node("Identity", ["x"], ["i"], name="useless"),
        helper.make_node("Mul", ["i", "two"], ["y"], name="double"),
    ]
    weights = {"c": np.ones((1, 600), np.float32)}
    return save_model(tmp_path / "in.onnx", nodes, {"x": ["n", 600]}, {"y": ["n", 600]}, weights)


def test_convert(call, call_json, folding, tmp_path):
    target = tmp_path / "out.onnx"
    found = call_json("convert", folding, "-o", target, "--verify")
    assert found["verified"] is True and found["differences"] == {"y": 0.0}
    assert found["nodes_before"] == 3 and found["nodes_after"] <= 3
    onnx.checker.check_model(str(target), full_check=True)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert call("run", target).exit_code == 0


def test_nothing_is_overwritten_unasked(call, folding, tmp_path):
    target = tmp_path / "out.onnx"
    target.write_text("precious")
    result = call("convert", folding, "-o", target)
    assert result.exit_code == exit_codes.USAGE and "--force" in result.stderr
    assert target.read_text() == "precious"
    assert call("convert", folding, "-o", target, "--force", "--level", "none").exit_code == 0
    onnx.checker.check_model(str(target))


def test_what_is_no_file_is_not_replaced(call, folding, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in (("convert", folding, "-o", pipe, "--force"), ("inspect", folding, "--svg", pipe)):
        result = call(*command)
        assert result.exit_code != 0 and "no ordinary file" in result.stderr and pipe.is_fifo()


def test_external_data(call_json, folding, tmp_path):
    target = tmp_path / "out.onnx"
    found = call_json("convert", folding, "-o", target, "--external-data", "--verify", "--level", "none")
    assert sorted(found["files"]) == [str(target), str(tmp_path / "out.onnx.data")]
    assert onnx.load(target, load_external_data=False).graph.initializer[0].external_data[0].value == "out.onnx.data"


def test_a_model_that_differs_is_not_written(call, call_json, folding, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "compare", lambda *_args: {"y": 0.5})
    target = tmp_path / "out.onnx"
    found = call_json("convert", folding, "-o", target, "--verify", code=exit_codes.CHECK_FAILED)
    assert found["verified"] is False and not target.exists()
    assert "was not written" in call("convert", folding, "-o", target, "--verify").stderr


def test_comparison_sees_differences(folding, tmp_path):
    from ranvier.cli.options import Setup

    proto = onnx.load(folding)
    proto.graph.node[0].op_type = "Sub"
    onnx.save(proto, tmp_path / "other.onnx")
    assert convert.compare(str(folding), str(tmp_path / "other.onnx"), Setup())["y"] > 0.5


def test_bad_targets_and_models(call, folding, tmp_path):
    assert call("convert", folding).exit_code == exit_codes.USAGE
    assert call("convert", folding, "-o", tmp_path / "no" / "such" / "out.onnx").exit_code == exit_codes.USAGE
    assert call("convert", tmp_path / "none.onnx", "-o", tmp_path / "o.onnx").exit_code == exit_codes.INVALID_MODEL
    assert not (tmp_path / "o.onnx").exists()
