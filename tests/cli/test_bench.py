"""``ranvier bench``, with peers made for the purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ranvier.cli import exit_codes, peers
from ranvier.cli.turns import Measured, speed_ratio

QUICK = ("--seconds", "0.05", "--rounds", "3", "--warmup", "0")


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    for name, kind in {"twin": "Agreeing", "wrong": "Wrong", "refusing": "Refusing", "dying": "Dying"}.items():
        monkeypatch.setitem(peers.KNOWN, name, ("ranvier", f"fake_peer:{kind}"))
    monkeypatch.setitem(peers.KNOWN, "missing", ("no_such_module", "fake_peer:Agreeing"))


def test_alone(call, dense):
    result = call("bench", dense, "--peers", "none", *QUICK)
    assert result.exit_code == 0 and "ranvier" in result.stdout and "3 rounds" in result.stdout


def test_against_a_twin(call_json, dense, fakes):
    found = call_json("bench", dense, "--peers", "twin,missing", "--set", "batch=3", *QUICK)
    assert [r["name"] for r in found["runtimes"]] == ["ranvier", "twin"]
    assert found["not_installed"] == ["missing"] and found["inputs"] == {"x": "float32[3, 4]"}
    for each in found["runtimes"]:
        assert each["runs"] >= 3 and each["p10_seconds"] <= each["median_seconds"] <= each["p90_seconds"]
    (compared,) = found["comparisons"]
    assert compared["agrees"] and compared["largest_relative_difference"] == 0.0
    assert compared["low"] <= compared["ratio"] <= compared["high"]


def test_disagreement_and_failing_peers(call, dense, fakes):
    result = call("bench", dense, "--peers", "wrong,refusing,dying", *QUICK)
    assert result.exit_code == exit_codes.CHECK_FAILED
    assert "differ from wrong's" in result.stderr
    assert "refusing cannot run this model: this model is beyond me" in result.stderr
    assert "ended with code 7" in result.stderr


def test_own_failure_keeps_its_exit_code(call_json, dense, fakes):
    found = call_json("bench", dense, "--peers", "none", "--limit", "memory_bytes=16", *QUICK, code=7)
    assert "memory_bytes" in found["error"]["message"]


def test_onnxruntime(call_json, dense):
    pytest.importorskip("onnxruntime")
    found = call_json("bench", dense, "--peers", "onnxruntime", *QUICK)
    assert found["comparisons"][0]["agrees"] and found["comparisons"][0]["largest_relative_difference"] < 1e-5


def test_unknown_peer(call, dense):
    result = call("bench", dense, "--peers", "onnxrunner")
    assert result.exit_code == exit_codes.USAGE and "did you mean 'onnxruntime'" in result.stderr


def test_ratio_is_taken_within_rounds():
    # the machine slows down by ten in the second half; the ratio does not notice
    ours = Measured("a", rounds=[[1.0], [1.0], [10.0], [10.0]])
    theirs = Measured("b", rounds=[[2.0], [2.0], [20.0], [20.0]])
    assert speed_ratio(ours, theirs) == {"ratio": 2.0, "low": 2.0, "high": 2.0, "best": 2.0}
    assert ours.statistics()["median_seconds"] == 5.5
