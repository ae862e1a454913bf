"""Weights that are rounded by samples: they are no worse on others, and the report says how they do there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from ranvier.runtime.quantizing import quantizer as quantizer_file
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.samples import results
from tests.runtime.test_quantizing_cases import CONFIG, model_of, quantized

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer_file, "timed", lambda *_: (1.0, 1.0))


def samples(count: int, seed: int) -> Array:
    """Rows whose channels go together, as those of a layer do."""
    rng = np.random.default_rng(seed)
    mixed = np.random.default_rng(0).standard_normal((96, 96)) * np.geomspace(1, 0.05, 96)[:, None]
    return (rng.standard_normal((count, 96)) @ mixed).astype(np.float32)


def model() -> Any:
    weights = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
    return model_of([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"x": [1, 96]}, ["y"], {"w": weights})


def elsewhere(scheme: str, count: int) -> tuple[Difference, float]:
    """What the report says, and the error on samples that nothing was made by."""
    made, report = quantized(model(), {"x": samples(count, 2)}, scheme=scheme)
    unseen = samples(256, 3)
    expected = [[row[None] @ model_weights()] for row in unseen]
    found = list(results(made, [{"x": row[None]} for row in unseen], CONFIG))
    return report.difference, difference(found, expected).error


def model_weights() -> Array:
    return np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)


@pytest.mark.parametrize("count", [2, 4, 16, 96, 400])
def test_few_samples_do_no_harm(count: int) -> None:
    """As many samples as channels are the worst: moments can be inverted, and are far from those of others."""
    _, nearest = elsewhere("uint4", 4)
    _, rounded = elsewhere("gptq", count)
    assert rounded < nearest * (1.0 if count < 16 else 0.95 if count < 96 else 0.85)
    _, scaled = elsewhere("awq", count)
    assert scaled < nearest * 1.01


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_noise_teaches_nothing(scheme: str) -> None:
    """Channels that have nothing to do with each other look as if they had, in few samples."""
    rng = np.random.default_rng(6)
    seen, unseen = (rng.standard_normal((count, 1, 96)).astype(np.float32) for count in (16, 256))
    expected = [[row @ model_weights()] for row in unseen]
    errors = {}
    for name in ("uint4", scheme):
        made, _ = quantized(model(), {"x": seen[:, 0]}, scheme=name)
        errors[name] = difference(list(results(made, [{"x": row} for row in unseen], CONFIG)), expected).error
    assert errors[scheme] < 1.005 * errors["uint4"]


def test_channels_that_samples_leave_out_keep_their_weights() -> None:
    """Behind an activation many channels are zero in most samples: few samples may never see one."""
    rng = np.random.default_rng(5)
    seen, unseen = (np.where(rng.random((count, 96)) < 0.1, rng.random((count, 96)), 0) for count in (12, 256))
    expected = [[row[None] @ model_weights()] for row in unseen.astype(np.float32)]
    errors = {}
    for scheme in ("uint4", "awq"):
        made, _ = quantized(model(), {"x": seen.astype(np.float32)}, scheme=scheme)
        found = list(results(made, [{"x": row[None]} for row in unseen.astype(np.float32)], CONFIG))
        errors[scheme] = difference(found, expected).error
    assert errors["awq"] < 1.2 * errors["uint4"]


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
@pytest.mark.parametrize("count, held", [(3, 0), (4, 1), (8, 2), (15, 4), (16, 4)])
def test_samples_are_held_back_as_soon_as_there_are_enough(scheme: str, count: int, held: int) -> None:
    _, report = quantized(model(), {"x": samples(count, 2)}, scheme=scheme)
    assert (report.samples, report.held) == (count, held) and report.as_dict()["held"] == held


def test_errors_of_layers_are_of_samples_that_had_no_part() -> None:
    data = samples(16, 2)
    made, report = quantized(model(), {"x": data}, scheme="gptq")
    held = [data[k][None] for k in (2, 5, 10, 13)]
    found = list(results(made, [{"x": each} for each in held], CONFIG))
    expected = [[each @ model_weights()] for each in held]
    assert report.layers[0].error == pytest.approx(difference(found, expected).error, rel=1e-4)


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_the_report_is_of_samples_that_had_no_part(scheme: str) -> None:
    said, true = elsewhere(scheme, 96)
    assert 0.8 * true < said.error < 1.3 * true


def test_layers_stay_in_float_by_samples_that_had_no_part() -> None:
    data = {"x": samples(96, 2)}
    _, loose = quantized(model(), data, scheme="gptq")
    _, tight = quantized(model(), data, scheme="gptq", max_error=0.95 * loose.difference.error)
    assert [layer.reason for layer in tight.layers] == ["it hurt the results"]
