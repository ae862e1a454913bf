"""``ranvier explain``, ``profile``, ``providers`` and ``doctor``."""

from __future__ import annotations

import json

import pytest

from ranvier.cli import doctor, exit_codes
from ranvier.errors import ProviderUnavailable
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY


class Absent(ReferenceProvider):
    name = "absent"
    aliases = ()

    def available(self):
        return "there is no such thing here"


class Broken(ReferenceProvider):
    name = "broken"
    aliases = ()

    def compile(self, part, ctx):
        raise RuntimeError("does not compile")


@pytest.fixture
def more_providers():
    REGISTRY.register("absent", Absent)
    REGISTRY.register("broken", Broken)
    yield
    REGISTRY.unregister("absent")
    REGISTRY.unregister("broken")


def test_explain(call, call_json, dense):
    found = call_json("explain", dense)
    assert found["nodes_loaded"] == 4 and found["optimization"] == "basic"
    assert sum(found["by_provider"].values()) == len(found["nodes"])
    assert {"name", "seconds", "changes", "gain", "notes", "declined"} <= set(found["passes"][0])
    text = call("explain", dense, "--provider", "reference").stdout
    assert "placement" in text and "rectify" in text and "first asked" in text
    assert "none ran" in call("explain", dense, "--level", "none").stdout
    assert "for example" in call("explain", dense, "--groups").stdout


def test_profile(call, call_json, dense, tmp_path):
    trace = tmp_path / "trace.json"
    found = call_json("profile", dense, "--repeat", 3, "-o", trace, "--level", "none", "--provider", "reference")
    assert {o["op"] for o in found["operators"]} == {"MatMul", "Add", "Relu", "Softmax"}
    assert sum(o["share"] for o in found["operators"]) == pytest.approx(1)
    assert all(o["calls_per_run"] == 1 for o in found["operators"])
    assert found["slowest_nodes"][0]["seconds_per_run"] > 0 and found["median_seconds"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 3 * 5  # four nodes and the run around them
    text = call("profile", dense).stdout
    assert "by operator" in text and "slowest nodes" in text


def test_providers(call, call_json, more_providers):
    found = {p["name"]: p for p in call_json("providers")["providers"]}
    assert found["reference"]["available"] and found["reference"]["device"] == "cpu"
    assert not found["absent"]["available"] and "no such thing" in found["absent"]["reason"]
    assert "no: there is no such thing here" in call("providers").stdout


def test_doctor(call, call_json, monkeypatch):
    monkeypatch.setenv("RANVIER_THREADS", "2")
    found = call_json("doctor")
    assert found["problems"] == [] and found["machine"]["cores"] >= 1
    assert found["versions"]["numpy"] and "llvmlite" in found["versions"]
    assert found["environment"]["RANVIER_THREADS"] == "sets threads"
    threads = next(o for o in found["options"] if o["option"] == "threads")
    assert threads == {"option": "threads", "value": 2, "origin": "RANVIER_THREADS"}
    reference = next(p for p in found["providers"] if p["name"] == "reference")
    assert reference["result"] == "ok" and reference["seconds"] > 0
    assert "everything works" in call("doctor").stdout


def test_doctor_finds_what_is_broken(call_json, more_providers):
    found = call_json("doctor", code=exit_codes.CHECK_FAILED)
    results = {p["name"]: p["result"] for p in found["providers"]}
    assert (results["absent"], results["broken"]) == ("not available", "failed")
    assert len(found["problems"]) == 1 and "does not compile" in found["problems"][0]


def test_doctor_checks_the_result(monkeypatch):
    monkeypatch.setattr(doctor, "run_small_graph", lambda _name: (0.1, 0.5))
    found = doctor.check_provider("reference")
    assert found["result"] == "failed" and "wrong result" in found["problem"]


def test_doctor_reports_a_malformed_variable(call_json, monkeypatch):
    monkeypatch.setenv("RANVIER_THREADS", "many")
    monkeypatch.setenv("RANVIER_TYPO", "1")
    found = call_json("doctor", code=exit_codes.CHECK_FAILED)
    assert "RANVIER_THREADS" in found["problems"][0]
    assert "no effect" in found["environment"]["RANVIER_TYPO"]


def test_absent_provider_is_an_error_of_its_own(call, dense, more_providers):
    with pytest.raises(ProviderUnavailable):
        REGISTRY.get("absent")
    result = call("run", dense, "--provider", "absent")
    assert result.exit_code == exit_codes.PROVIDER_UNAVAILABLE and "no such thing" in result.stderr
