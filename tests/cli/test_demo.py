"""``ranvier demo``."""

from __future__ import annotations

import numpy as np
import pytest

from ranvier.cli import demo, exit_codes

from .conftest import save_model


@pytest.fixture
def small_digits(monkeypatch, tmp_path):
    """Eight pictures and a model that answers with the brightest column; the last label is wrong on purpose."""
    from onnx import helper

    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], name="columns", keepdims=0)]
    path = save_model(
        tmp_path / "d.onnx", nodes, {"x": ["n", 1, 8, 8]}, {"y": ["n", 8]}, {"axes": np.array([1, 2], np.int64)}
    )
    images = np.zeros((8, 1, 8, 8), np.float32)
    for k in range(8):
        images[k, 0, :, k] = 1
    labels = np.array([0, 1, 2, 3, 4, 5, 6, 0])
    monkeypatch.setattr(demo, "_files", lambda: (path.read_bytes(), {"images": images, "labels": labels}))


def test_json(call_json, small_digits):
    found = call_json("demo")
    assert found["predictions"] == list(range(8)) and found["accuracy"] == 7 / 8
    assert found["seconds_one"] > 0 and found["seconds_all"] > 0
    assert all(0 < c <= 1 for c in found["confidences"])
    assert found["operators_by_provider"]


def test_pictures_fit_eighty_columns(call, small_digits):
    result = call("demo")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "█" in result.stdout and "✗0" in result.stdout and "right    7 of 8" in result.stdout
    assert "\x1b[" not in result.stdout


def test_without_the_files(call, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.resources.files", lambda _package: tmp_path)
    result = call("demo")
    assert result.exit_code == exit_codes.INVALID_MODEL and "not part of this installation" in result.stderr


def test_the_model_of_the_package(call_json):
    try:
        demo._files()
    except Exception:
        pytest.skip("the package was built without its model")
    found = call_json("demo")
    assert len(found["labels"]) == 16 and found["accuracy"] > 0.9
