"""Schemes that other packages bring: their codes get into models that other runtimes read, or are refused clearly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from ranvier.errors import InvalidConfig
from ranvier.ops.contrib.levels import NF4_LEVELS
from ranvier.quantize import Float8, Integers, Nf4, Quantized, register_scheme, schemes
from ranvier.runtime.quantizing import Quantization
from ranvier.runtime.quantizing.grouped import in_groups
from ranvier.runtime.session import Session
from tests.runtime.test_quantizing_cases import model_of, numbers, quantized, results_elsewhere

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
INPUTS, OUTPUTS = 160, 24


class Scheme:
    """Codes by a function of the weights."""

    name = "mine"

    def __init__(self, make: Callable[[Array], Any]) -> None:
        self.quantize = make


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test adds is gone after it."""
    monkeypatch.setattr(schemes, "_added", {})


def add(make: Callable[[Array], Any]) -> None:
    register_scheme("mine", lambda: Scheme(make))


def signed_three_bits(weights: Array) -> Quantized:
    scales = np.abs(weights).max(axis=1, keepdims=True) / 3
    codes = np.clip(np.rint(weights / scales), -4, 3).astype(np.int8)
    return Quantized("mine", codes, scales, (1, weights.shape[1]), 3)


def fractional_zeros(weights: Array) -> Quantized:
    """Zeros between codes, in groups of 32."""
    split = weights.reshape(len(weights), -1, 32)
    low, high = split.min(axis=2), split.max(axis=2)
    scales = (high - low) / 15
    zeros = -low / scales
    codes = np.clip(np.rint(split / scales[..., None] + zeros[..., None]), 0, 15).astype(np.uint8)
    return Quantized("mine", codes.reshape(weights.shape), scales, (1, 32), 4, zeros)


def squares(weights: Array) -> Quantized:
    """One scale for 8 rows of 48 columns: the last block is smaller."""
    codes = RNG.integers(-128, 128, weights.shape).astype(np.int8)
    scales = (RNG.random((-(-len(weights) // 8), -(-weights.shape[1] // 48))) * 0.01).astype(np.float32)
    return Quantized("mine", codes, scales, (8, 48), 8)


def unsigned_without_zeros(weights: Array) -> Quantized:
    codes = RNG.integers(0, 4, weights.shape).astype(np.uint8)
    return Quantized("mine", codes, np.full((1, 1), 0.1, np.float32), weights.shape, 2)


def runs_through_rows(weights: Array) -> Quantized:
    codes = RNG.integers(-8, 8, weights.shape).astype(np.int8)
    scales = (RNG.random(weights.size // 32) * 0.1).astype(np.float32)
    return Quantized("mine", codes, scales, (32,), 4, flat=True)


def other_scales_of_nf4(weights: Array) -> Quantized:
    codes = RNG.integers(0, 16, weights.shape).astype(np.uint8)
    scales = (RNG.random(weights.size // 32) * 0.1).astype(np.float32)
    return Quantized("mine", codes, scales, (32,), 4, table=NF4_LEVELS, flat=True)


def large_blocks_of_nf4(weights: Array) -> Quantized:
    return Nf4(512).quantize(weights)


def float8_of_a_tensor(weights: Array) -> Quantized:
    return Float8(granularity="tensor").quantize(weights)


MAKERS = [
    signed_three_bits,
    fractional_zeros,
    squares,
    unsigned_without_zeros,
    runs_through_rows,
    other_scales_of_nf4,
    large_blocks_of_nf4,
    float8_of_a_tensor,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_models_hold_exactly_what_a_scheme_makes(tmp_path: Path, make: Callable[[Array], Quantized]) -> None:
    made: list[Quantized] = []

    def keeping(weights: Array) -> Quantized:
        made.append(make(weights))
        return made[-1]

    add(keeping)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "dense")
    model = model_of([node], {"x": ["n", INPUTS]}, ["y"], {"w": numbers(INPUTS, OUTPUTS)})
    data = {"x": RNG.standard_normal((4, INPUTS)).astype(np.float32)}
    graph, report = quantized(model, data, scheme="mine")
    expected = data["x"] @ made[0].dequantize().T
    theirs = results_elsewhere(graph, tmp_path / "q.onnx", data)[0]
    assert np.abs(theirs - expected).max() < 1e-5 * np.abs(expected).max()
    (layer,) = report.layers
    assert layer.scheme == "mine" and layer.bytes_after < layer.bytes_before
    with Session(tmp_path / "q.onnx") as session:
        ours = session.run(data)["y"]
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


def test_groups_are_no_larger_than_other_runtimes_read() -> None:
    coded = Integers(4, granularity="group", group=512).quantize(numbers(3, 1100))
    found = in_groups(coded, 32)
    assert found.block == (1, 256) and np.array_equal(found.dequantize(), coded.dequantize())


def table_of_its_own(weights: Array) -> Quantized:
    codes = np.zeros(weights.shape, np.uint8)
    return Quantized("mine", codes, np.ones(weights.size // 32), (32,), 4, table=np.arange(16.0), flat=True)


def small_groups(weights: Array) -> Quantized:
    return Quantized("mine", weights.astype(np.int8), np.ones((len(weights), weights.shape[1] // 8)), (1, 8), 4)


def large_codes(weights: Array) -> Quantized:
    return Quantized("mine", np.full(weights.shape, 9, np.uint8), np.ones((1, 1)), weights.shape, 2)


def codes_below(weights: Array) -> Quantized:
    """There is room for them in 8 bits, which hold those of 6, but they are none of 6."""
    return Quantized("mine", np.full(weights.shape, -40, np.int8), np.ones((1, 1)), weights.shape, 6)


def many_bits(weights: Array) -> Quantized:
    return Quantized("mine", weights.astype(np.int16), np.ones((1, 1)), weights.shape, 12)


def numbers_for_codes(weights: Array) -> Quantized:
    return Quantized("mine", weights, np.ones((1, 1)), weights.shape, 8)


def infinite_scales(weights: Array) -> Quantized:
    return Quantized("mine", weights.astype(np.int8), np.full((1, 1), np.inf), weights.shape, 8)


def shuffled(weights: Array) -> Quantized:
    order = np.arange(weights.shape[1]) % 2
    scales = np.ones((len(weights), 2))
    return Quantized("mine", weights.astype(np.int8), scales, (1, weights.shape[1] // 2), 4, axis=1, order=order)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (table_of_its_own, "a table that is not NF4's"),
        (small_groups, "8 weights share a scale, that must be a multiple of 16"),
        (large_codes, "go from 9 to 9, which is no 2 bits"),
        (codes_below, "go from -40 to -40, which is no 8 bits"),
        (many_bits, "12 bits"),
        (numbers_for_codes, "no integers"),
        (infinite_scales, "no finite numbers"),
        (shuffled, "no runs of neighbours"),
        (lambda weights: signed_three_bits(weights[:2]), r"gives no codes for weights \[24, 160\]"),
        (lambda weights: weights, r"gives no codes for weights \[24, 160\]"),
    ],
)
def test_what_no_operator_can_hold_is_refused(make: Callable[[Array], Any], said: str) -> None:
    add(make)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "dense")
    model = model_of([node], {"x": ["n", INPUTS]}, ["y"], {"w": numbers(INPUTS, OUTPUTS)})
    with pytest.raises(InvalidConfig, match=said) as refused:
        quantized(model, {"x": numbers(2, INPUTS)}, scheme="mine")
    assert "'dense'" in refused.value.__notes__[0]


def test_names_that_nobody_brings() -> None:
    with pytest.raises(InvalidConfig, match="mine"):
        Quantization("mine")
    add(signed_three_bits)
    assert Quantization("mine").scheme == "mine"


def test_the_group_is_handed_on_where_a_scheme_has_one() -> None:
    given: list[int] = []

    def grouped(group: int = 7) -> Scheme:
        given.append(group)
        return Scheme(signed_three_bits)

    register_scheme("mine", grouped)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "dense")
    model = model_of([node], {"x": ["n", INPUTS]}, ["y"], {"w": numbers(INPUTS, OUTPUTS)})
    quantized(model, {"x": numbers(2, INPUTS)}, scheme="mine", group=64)
    assert given == [64]


PACKAGE = """
import numpy as np
from ranvier.quantize import Quantized

class Halves:
    name = "halves"

    def quantize(self, array):
        codes = np.clip(np.rint(array * 2), -8, 7).astype(np.int8)
        return Quantized(self.name, codes, np.full((1, 1), 0.5, np.float32), array.shape, 4)
"""


def test_an_installed_package_brings_a_scheme_to_the_command(tmp_path: Path) -> None:
    package = tmp_path / "site"
    about = package / "halves-1.0.dist-info"
    about.mkdir(parents=True)
    (package / "halves.py").write_text(PACKAGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[ranvier.quantization]\nhalves = halves:Halves\nbroken = halves:Absent\n")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "dense")
    weights = RNG.integers(-8, 8, (INPUTS, OUTPUTS)).astype(np.float32) / 2
    model = model_of([node], {"x": ["n", INPUTS]}, ["y"], {"w": weights})
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    def call(scheme: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ranvier", "quantize", tmp_path / "m.onnx", "-o", tmp_path / "q.onnx"]
        paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
        given = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": paths}}
        return subprocess.run([*command, "--scheme", scheme], **given)

    done = call("halves")
    assert done.returncode == 0, done.stderr
    data = {"x": RNG.standard_normal((4, INPUTS)).astype(np.float32)}
    found = onnxruntime.InferenceSession(str(tmp_path / "q.onnx")).run(None, data)[0]
    np.testing.assert_allclose(found, data["x"] @ weights, rtol=1e-4, atol=1e-4)
    (tmp_path / "q.onnx").unlink()
    broken = call("broken")
    assert broken.returncode == 2 and "scheme 'broken' cannot be loaded" in broken.stderr
    assert "Traceback" not in broken.stderr
