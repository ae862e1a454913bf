"""``--precision`` and what goes with it, on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ranvier.cli import exit_codes
from ranvier.codegen.llvm import isa
from ranvier.providers.cpu.narrow.effective import effective

ON_CPU = ("--provider", "cpu")
needs_products = pytest.mark.skipif(
    effective("bf16", isa.host())[0] != "bf16", reason="this processor has no bfloat16 products"
)


@needs_products
def test_explain_tells_the_precision_of_nodes(call, call_json, dense: Path) -> None:
    found = call_json("explain", dense, *ON_CPU, "--precision", "bfloat16", "--set", "batch=64")
    assert found["precision"] == "bf16" and found["refused"] == ""
    nodes = {n["op"]: n for n in found["nodes"]}
    assert {n["precision"] for n in nodes.values()} <= {"f32", "bf16"}
    assert "border" in nodes["Softmax"]["precision_why"] and nodes["Softmax"]["stored"] == "f32"
    text = call("explain", dense, *ON_CPU, "--precision", "bf16", "--set", "batch=64").stdout
    assert "computes in" in text and "precision bf16: nodes" in text


def test_explain_says_nothing_of_it_otherwise(call, dense: Path) -> None:
    assert "precision" not in call("explain", dense, *ON_CPU).stdout


@needs_products
def test_sizes_that_are_not_known_yet(call, dense: Path) -> None:
    assert "not compiled yet" in call("explain", dense, *ON_CPU, "--precision", "bf16").stdout


@needs_products
def test_run_with_nodes_kept_and_a_sample(call, dense: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((2, 4), np.float32))
    how = ("--precision", "bf16", "--keep-f32", "*", "--calib", tmp_path / "in.npz", "--max-error", "0.5")
    result = call("run", dense, *ON_CPU, "--random", "--set", "batch=2", *how)
    assert result.exit_code == 0, result.stderr


def test_wrong_values(call, dense: Path, tmp_path: Path) -> None:
    result = call("run", dense, "--random", "--precision", "bf61")
    assert result.exit_code == exit_codes.USAGE and "bf16" in result.stderr
    result = call("run", dense, "--random", "--precision", "bf16", "--calib", tmp_path / "absent.npz")
    assert result.exit_code == exit_codes.USAGE and "absent.npz" in result.stderr
    assert call("run", dense, "--random", "--max-error", "0").exit_code == exit_codes.USAGE


def test_doctor_lists_what_the_processor_has(call_json) -> None:
    found = call_json("doctor")["code"]["precisions"]
    assert set(found) == {"float32", "bf16", "fp16"} and found["float32"] == ""
