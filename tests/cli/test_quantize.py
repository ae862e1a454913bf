"""``ranvier quantize``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
