"""The plugin on its own, as its author would test it: the reference is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.errors import InvalidConfig, InvalidValue

FLOAT = onnx.TensorProto.FLOAT


def model(decay: float = 0.5, kind: int = FLOAT) -> bytes:
    """Relu, LeakyIntegrator, Exp: the plugin has the first two."""
    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("LeakyIntegrator", ["h"], ["i"], domain="example.signal", decay=decay),
        helper.make_node("Exp", ["i"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", kind, ["b", "n"])
    y = helper.make_tensor_value_info("y", kind, ["b", "n"])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example.signal", 1)]
    made = helper.make_model(helper.make_graph(nodes, "m", [x], [y]), opset_imports=opsets)
    data: bytes = made.SerializeToString()
    return data


def expected(x: np.ndarray[Any, Any], decay: float) -> np.ndarray[Any, Any]:
    """By the closed form, y[t] = sum of decay^(t-s) x[s]."""
    t = np.arange(x.shape[1])
    weights = np.where(t[:, None] >= t, float(decay) ** np.maximum(0, t[:, None] - t), 0)
    return np.exp(np.maximum(x, 0).astype(np.float64) @ weights.T)


X = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) / 8


@pytest.mark.parametrize("providers", [["example", "reference"], ["reference"], ["example", "cpu", "reference"]])
@pytest.mark.parametrize("decay", [0.5, -0.25, 0.0])
def test_it_computes_what_the_operator_means(providers: list[str], decay: float) -> None:
    with rv.load(model(decay), providers=providers) as session:
        np.testing.assert_allclose(session.run({"x": X})["y"], expected(X, decay), rtol=1e-5)


def test_the_plugin_runs_what_it_claims() -> None:
    with rv.load(model(), providers=["example", "reference"], optimization="none") as session:
        placed = {node.op: node.provider for node in session.report.nodes}
    assert placed == {"Relu": "example", "LeakyIntegrator": "example", "Exp": "reference"}


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    x = np.ones(shape, np.float32)
    with rv.load(model(), providers=["example", "reference"]) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected(x, 0.5), rtol=1e-6)


def test_types_it_does_not_take_go_to_others() -> None:
    x = X.astype(np.float64)
    with rv.load(model(kind=onnx.TensorProto.DOUBLE), providers=["example", "reference"]) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected(x, 0.5), rtol=1e-9)
        assert {node.provider for node in session.report.nodes} == {"reference"}


def test_others_finish_what_it_fails_at() -> None:
    options = {"example": {"max_elements": 100}}
    with rv.load(model(), providers=["example", "reference"], provider_options=options) as session:
        np.testing.assert_allclose(session.run({"x": X})["y"], expected(X, 0.5), rtol=1e-5)
        assert session.health["example"].fallbacks == 1
    with rv.load(model(), providers=["example", "reference"], provider_options=options) as session:
        small = X[:2]
        np.testing.assert_allclose(session.run({"x": small})["y"], expected(small, 0.5), rtol=1e-5)
        assert session.health["example"].fallbacks == 0


@pytest.mark.parametrize("options", [{"max_elements": 0}, {"max_elements": "many"}, {"max_element": 5}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="max_elements"):
        rv.load(model(), providers=["example", "reference"], provider_options={"example": options})


def test_a_decay_without_sense_is_the_models_fault() -> None:
    for providers in (["example", "reference"], ["reference"]):
        with rv.load(model(1.5), providers=providers) as session, pytest.raises(InvalidValue, match="between -1 and 1"):
            session.run({"x": X})
