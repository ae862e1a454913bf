"""The networks of the training benchmark, smaller: a step is one part of the device, and learns as elsewhere."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import ranvier as rv
from bench.gpu import training as benchmark
from bench.models import training as networks
from tests.torch.device import DEVICE

CASES = [case for case in networks.CASES if case.name != "resnet18"]  # a minute; its layers are tested elsewhere
SMALL = {"LENGTH": 12, "WIDTH": 32, "HEADS": 4, "LAYERS": 2, "WORDS": 20, "LSTM_STEPS": 6, "LSTM_SIZE": 16}


def _batch(name: str) -> tuple[Any, Any]:
    draw = np.random.default_rng(2)
    if name == "mlp":
        return draw.standard_normal((8, 784), np.float32), draw.integers(0, 10, 8)
    if name == "lenet":
        return draw.standard_normal((4, 3, 32, 32), np.float32), draw.integers(0, 10, 4)
    if name == "transformer":
        return draw.integers(0, 20, (2, 12)), draw.integers(0, 20, 24)
    return draw.standard_normal((6, 4, 128), np.float32), draw.integers(0, 10, 4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(networks, name, size)
    monkeypatch.setenv("RANVIER_CONFIG", "off")
    benchmark.configure(DEVICE, "f32", str(tmp_path))


def _losses(case: Any, backend: str, count: int) -> tuple[list[float], dict[str, Any]]:
    x, t = _batch(case.name)
    try:
        step, _, function = benchmark.ours(case, x, t, backend)
        return [float(step().item()) for _ in range(count)], benchmark.told(function)
    finally:
        rv.set_backend(None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_one_part_and_learns_alike(small: None, case: Any) -> None:
    wanted, _ = _losses(case, "cpu", 5)
    found, told = _losses(case, "cuda", 5)
    assert told["states_stay"] and len(told["parts"]) == 1 and told["parts"][0].endswith("on cuda")
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
    assert found[-1] < found[0]


def test_the_benchmark_runs(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = [each for each in networks.CASES if each.name == "transformer"]
    case = replace(case, batch=lambda draw: _batch("transformer"))
    args = argparse.Namespace(device=DEVICE, precision="f32", peers=["eager"], seconds=0.01, kernels=False)
    try:
        found = benchmark.measured(case, args)
    finally:
        rv.set_backend(None)
    assert json.loads(json.dumps(found)) == found
    assert found["eager"]["losses_differ_by"] < 1e-4
    assert all(found[name]["milliseconds"][way] > 0 for name in ("ranvier", "eager") for way in ("steps", "read"))
    means = benchmark.show({"transformer": found, "other": {"error": "lost"}}, ["eager"])
    assert set(means) == {"eager, steps", "eager, read"}
    assert "lost" in capsys.readouterr().out
