"""``ranvier calibrate``, and the options that place nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.cli.options import Setup, Sources
from ranvier.codegen.llvm import cache
from ranvier.config import SessionConfig, resolve
from ranvier.errors import InvalidConfig
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration import lazy, store
from ranvier.runtime.calibration.classes import CLASSES, work_of
from ranvier.runtime.calibration.measure import measure
from ranvier.runtime.calibration.samples import samples
from ranvier.runtime.session import Session
from tests.cli.conftest import Call


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels stay where the tests keep them; calibrations go to a folder of the test."""
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "calibration")
    monkeypatch.setattr(store, "_read", {})
    return tmp_path / "calibration"


def test_it_measures_keeps_shows_and_forgets(call: Call, call_json: Callable[..., Any], own_folder: Path) -> None:
    found = call_json("calibrate", "-p", "reference", "--seconds", "0.3")
    figures = found["providers"]["reference"]
    assert figures["launch"] > 0 and figures["inward"] is None
    assert figures["points"]["product float32"][0][1] > 0
    assert len(list(own_folder.iterdir())) == 1
    store._read.clear()
    assert call_json("calibrate", "-p", "reference", "--show")["providers"]["reference"] == figures
    text = call("calibrate", "-p", "reference", "--show").output
    assert "product" in text and "Gop/s" in text
    assert call_json("calibrate", "--clear", "-p", "reference") == {"deleted": 1}
    assert "nothing is known" in call("calibrate", "-p", "reference", "--show").output


def test_options_of_a_provider_make_another_calibration(call_json: Callable[..., Any], own_folder: Path) -> None:
    def far(*more: Any) -> Any:
        return call_json("calibrate", "-p", "sim", "--option", "provider_options.sim.latency=0.01", *more)

    slow = far("--seconds", "0.3")["providers"]["sim"]
    assert slow["inward"][0] + slow["outward"][0] >= 0.01
    assert call_json("calibrate", "-p", "sim", "--show")["providers"] == {}
    assert far("--show")["providers"]["sim"] == slow


def test_what_cannot_be_measured_is_told(call: Call) -> None:
    result = call("calibrate", "-p", "cpuu")
    assert result.exit_code == 2
    assert "did you mean 'cpu'" in result.output
    failed = call("calibrate", "-p", "ROCMExecutionProvider")
    assert failed.exit_code == 1
    assert "cannot be measured" in failed.output


def test_doctor_knows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.cli.doctor import environment_facts

    monkeypatch.setenv(lazy.VARIABLE, "off")
    assert environment_facts([])[lazy.VARIABLE] == "switches measuring for placement by cost"


def test_policy_and_pins_come_from_every_source(tmp_path: Path) -> None:
    given = Setup(policy="cost", pins=(("op:Conv", "cpu"), ("a=b", "cpu,reference")), sources=Sources(file="off"))
    assert given.config().policy == "cost"
    assert given.config().pins == {"op:Conv": ("cpu",), "a=b": ("cpu", "reference")}
    environ = {"RANVIER_POLICY": "priority", "RANVIER_PINS": "op:Conv=cpu; decoder/*=cpu|reference"}
    config = resolve(environ=environ, folder=tmp_path).config
    assert config.policy == config.placing == "priority"
    assert config.pins == {"op:Conv": ("cpu",), "decoder/*": ("cpu", "reference")}
    (tmp_path / "ranvier.toml").write_text('policy = "cost"\n[pins]\n"op:Conv" = "cpu"\nhead = ["cpu", "reference"]\n')
    found = resolve(environ={}, folder=tmp_path)
    assert found.config.pins == {"op:Conv": ("cpu",), "head": ("cpu", "reference")}
    assert found.origin("policy") == "ranvier.toml:1"
    assert SessionConfig().policy is None


@pytest.mark.parametrize("pins", ["op:Conv", {"op:Conv": ()}, {"op:Conv": 3}, {"": "cpu"}, [("a", "cpu")]])
def test_pins_that_make_no_sense(pins: Any) -> None:
    with pytest.raises(InvalidConfig, match="pins"):
        SessionConfig(pins=pins)


def test_pins_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="RANVIER_PINS: pins must be like"):
        resolve(environ={"RANVIER_PINS": "Conv"}, folder=tmp_path)


def test_a_model_is_explained_with_pins(call_json: Callable[..., Any], dense: Path) -> None:
    found = call_json("explain", dense, "--pin", "op:Relu=reference", "-p", "cpu,reference")
    assert {n["op"]: n["provider"] for n in found["nodes"]}["Relu"] == "reference"


# -- what is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", samples(), ids=lambda s: s.name)
def test_samples_are_of_the_class_they_stand_for(sample: Any) -> None:
    assert sample.kind in CLASSES
    built = sample.make()
    for node in built.measured:
        assert work_of(node).kind == sample.kind
        assert work_of(node).dtype == sample.dtype
        assert work_of(node).amount > 0


@pytest.mark.parametrize("name", ["product float32", "conv.depthwise float32", "recurrent float32", "quantise int8"])
def test_samples_compute(name: str) -> None:
    sample = min((s for s in samples() if s.name == name), key=lambda s: s.make().feed["x"].size)
    built = sample.make()
    with Session(built.graph, SessionConfig(providers=("reference",))) as session:
        assert np.isfinite(session.run(built.feed)["y"].astype(np.float64)).all()


def test_however_little_time_there_is_both_kinds_of_work_are_measured() -> None:
    figures = measure(REGISTRY.get("reference"), budget=1e-9)
    assert set(figures.points) == {"product float32", "elementwise float32"}
    assert figures.launch > 0
    assert figures.time("product", "float32", 1e6) is not None


def test_the_cache_is_where_calibrations_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    assert store.folder() == tmp_path / "calibration"
    monkeypatch.setenv(cache.SWITCH, "off")
    assert store.folder() is None
