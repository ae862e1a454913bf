"""``ranvier tune``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ranvier.codegen import tuning_store
from ranvier.codegen.tuning_store import Entry
from ranvier.runtime.tuning import search
from ranvier.runtime.tuning.variant import interleaved
from tests.cli.conftest import Call
from tests.runtime.small_models import model_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning_store, "folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(tuning_store, "_read", {})
    monkeypatch.setattr(search, "interleaved", lambda one, other, _seconds: interleaved(one, other, 0.0))
    return tmp_path / "tuning"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    value = helper.make_tensor_value_info
    w = np.random.default_rng(0).standard_normal((96, 80)).astype(np.float32)
    made = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        [value("x", TensorProto.FLOAT, ("n", 96))],
        [value("y", TensorProto.FLOAT, ("n", 80))],
        {"w": w},
    )
    onnx.save(made, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_it_tunes_keeps_shows_and_forgets(call: Call, call_json: Callable[..., Any], model: Path, folder: Path) -> None:
    found = call_json("tune", model, "--set", "n=64", "--seconds", "60", "--threads", "1", "-p", "cpu")
    assert found["threads"] == 1 and found["default_seconds"] > 0 and found["gain"] > 0
    assert found["kept"] and found["rejected"] == 0 and found["known_before"] == 0
    keys = {d["key"]: d for d in found["decisions"]}
    one = keys["product panels (64, 96, 80, 'float32', 'constant')"]
    assert one["decision"] == "product panels" and one["groups"] == 1 and one["tried"]
    assert one["chosen"] is None or one["chosen"] in one["tried"]
    assert len(list(folder.glob("*.json"))) == 1
    (shown,) = call_json("tune", "--show")["tables"]
    assert shown["current"] and set(shown["entries"]) == set(keys)
    assert "product panels" in call("tune", "--show").output
    again = call_json("tune", model, "--set", "n=64", "--seconds", "60", "--threads", "1", "-p", "cpu")
    assert again["decisions"] == [] and again["known_before"] >= 1
    assert call_json("tune", "--clear") == {"deleted": 1}
    assert "nothing is known" in call("tune", "--show").output


def test_its_tables_are_for_people(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("tune", model, "--set", "n=64", "--seconds", "60", "-p", "cpu")
    assert result.exit_code == 0 and "by default" in result.output and "gain" in result.output
    tuning_store.save("elsewhere", 2, {"conv way (1,)": Entry("winograd4", 1.25, 0.01)})
    text = call("tune", "--show").output
    assert "elsewhere, 2 threads" in text and "1.25" in text


def test_a_model_is_needed(call: Call) -> None:
    result = call("tune")
    assert result.exit_code == 2 and "MODEL" in result.output


def test_explain_says_what_was_tuned(call: Call, call_json: Callable[..., Any], model: Path) -> None:
    found = call_json("tune", model, "--set", "n=64", "--seconds", "60", "--threads", "1", "-p", "cpu")
    key = "product panels (64, 96, 80, 'float32', 'constant')"
    other = next(iter(next(d for d in found["decisions"] if d["key"] == key)["tried"]))
    tuning_store.save(found["isa"], 1, {d["key"]: Entry("", 1.0, 1.0) for d in found["decisions"]})
    tuning_store.save(found["isa"], 1, {key: Entry(other, 1.2, 1.0)})
    onnx.save(_fixed(onnx.load(model)), model)
    told = call_json("explain", model, "--threads", "1", "-p", "cpu")
    assert told["tuned"] == 1
    assert "tuned: 1 decision" in call("explain", model, "--threads", "1", "-p", "cpu").output


def _fixed(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 64
    return model
