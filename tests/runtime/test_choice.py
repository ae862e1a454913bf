"""The choice of a provider for one operation, and preferences of a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import errors
from ranvier.codegen.llvm import cache
from ranvier.runtime.calibration import lazy, store
from ranvier.runtime.calibration.table import Figures
from ranvier.runtime.preferred import preferred
from tests.runtime.small_models import model_of


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(lazy.VARIABLE, "off")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(store, "_read", {})
    yield
    rv.set_backend(None)
    rv.set_backend_priority([])


def relu() -> Any:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy"]
    return model_of([helper.make_node("Relu", ["x"], ["y"])], info[:1], info[1:])


def providers() -> list[str]:
    with rv.load(relu()) as made:
        return [node.provider for node in made.report.nodes]


def figures(launch: float, seconds: float) -> Figures:
    return Figures("", launch=launch, points={"product float32": ((1.0, seconds), (1e9, seconds * 1e9))})


def test_the_calibrated_costs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"cpu": figures(1e-6, 1e-9), "onnxruntime": figures(1e-3, 1e-10)}
    monkeypatch.setattr("ranvier.runtime.choice.figures_for", lambda providers, config, **how: known)
    pytest.importorskip("onnxruntime")
    choice = ["cpu", "onnxruntime"]
    assert rv.select_backend("MatMul", ((8, 8), (8, 8)), choice) == "cpu"
    assert rv.select_backend("MatMul", ((512, 512), (512, 512)), choice) == "onnxruntime"


def test_the_way_to_a_device_counts() -> None:
    # by the declared and the nominal speeds: a message there and back takes longer than this product
    assert rv.select_backend("MatMul", ((16, 16), (16, 16)), ["cpu", "sim"]) == "cpu"


def test_the_reference_is_a_last_resort() -> None:
    assert rv.select_backend("Relu", 1000) == "cpu"
    assert rv.select_backend("Relu", (10, 100), ["reference"]) == "reference"
    assert rv.select_backend("Relu", [(10, 100)], ["cpu", "reference"]) == "cpu"


def test_preferences_come_first() -> None:
    with rv.backend("reference"):
        assert rv.select_backend("Relu", 1000) == "reference"
        with rv.backend(None):
            assert rv.select_backend("Relu", 1000) == "cpu"
    assert rv.select_backend("Relu", 1000) == "cpu"
    rv.set_backend_priority(["reference", "cpu"])
    assert rv.select_backend("Relu", 1000) == "reference"
    assert rv.select_backend("Relu", 1000, ["cpu"]) == "cpu"


def test_sessions_ask_what_is_preferred_first() -> None:
    assert providers() == ["cpu"]
    with rv.backend("reference"):
        assert providers() == ["reference"]
        with rv.load(relu(), providers="cpu") as made:  # a list is a list
            assert made.report.providers == ("cpu",)
    rv.set_backend("numpy")  # another name of the reference
    assert providers() == ["reference"]
    rv.set_backend(None)
    assert providers() == ["cpu"]
    rv.set_backend_priority(["reference"])
    assert providers() == ["reference"]
    with rv.backend("cpu"):
        assert providers() == ["cpu"]


def test_preferences_are_of_the_thread_that_set_them() -> None:
    found: list[tuple[str, ...]] = []
    rv.set_backend("reference")
    other = threading.Thread(target=lambda: found.append(preferred()))
    other.start()
    other.join()
    assert found == [()]
    assert preferred() == ("reference",)


def test_wrong_names_are_told() -> None:
    with pytest.raises(errors.InvalidConfig, match="did you mean 'cpu'"):
        rv.set_backend("cpuu")
    with pytest.raises(errors.InvalidConfig, match="did you mean 'reference'"):
        rv.set_backend_priority(["cpu", "referense"])
    assert preferred() == ()
    with pytest.raises(errors.InvalidConfig, match="a list of providers"):
        rv.set_backend_priority("cpu")
    with pytest.raises(errors.InvalidConfig, match="did you mean 'MatMul'"):
        rv.select_backend("MatMull", ((2, 2), (2, 2)))
    with pytest.raises(errors.InvalidConfig, match="a shape for each operand"):
        rv.select_backend("MatMul", "large")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidConfig, match="did you mean 'float32'"):
        rv.select_backend("Relu", 10, dtype="float23")
    with pytest.raises(errors.RanvierError, match="cudaa"):
        rv.select_backend("Relu", 10, ["cudaa"])
