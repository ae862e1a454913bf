"""Steps of an LSTM that learns, by the kernels that a GPU has for them, against the operators' definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType
from ranvier.ops.own.lstm import DOMAIN
from ranvier.providers.cuda.ops import recurrent_training
from tests.torch.device import options

STEPS, BATCH, INPUTS, SIZE = 5, 3, 4, 6


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_training, "_ON_PROCESSOR", True)


def _graph(op: str, shapes: dict[str, tuple[int, ...] | None], outputs: int, **attrs: Any) -> Graph:
    graph = Graph("lstm", opsets={"": 21, DOMAIN: 1})
    inputs = [
        None if shape is None else graph.add_input(name, TensorType(DType.float32, shape))
        for name, shape in shapes.items()
    ]
    node = graph.add(op, inputs, attrs, outputs, domain=DOMAIN, version=1)
    for k, value in enumerate(node.outputs):
        value.name = f"y{k}"
    from ranvier.ops import complete

    complete(node)
    graph.outputs = list(node.outputs)
    return graph


def _same_as_defined(op: str, shapes: dict[str, tuple[int, ...] | None], outputs: int, **attrs: Any) -> None:
    draw = np.random.default_rng(4)
    given = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items() if shape is not None}
    if "gates" in given:
        given["gates"] = 1 / (1 + np.exp(-given["gates"]))
    with rv.load(_graph(op, shapes, outputs, **attrs), optimization="none", providers=["reference"]) as oracle:
        wanted = oracle.run(given)
    made = _graph(op, shapes, outputs, **attrs)
    with rv.load(made, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        assert {node.provider for node in session.report.nodes} == {"cuda"}
        for _ in range(2):
            for name, found in session.run(given).items():
                np.testing.assert_allclose(found, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("states", [True, False])
def test_forward(direction: str, states: bool) -> None:
    ways = 2 if direction == "bidirectional" else 1
    state = (ways, BATCH, SIZE) if states else None
    shapes = {
        "x": (STEPS, BATCH, INPUTS),
        "w": (ways, 4 * SIZE, INPUTS),
        "r": (ways, 4 * SIZE, SIZE),
        "bias": (ways, 8 * SIZE),
        "lengths": None,
        "h": state,
        "c": state,
    }
    _same_as_defined("LSTMTraining", shapes, 5, hidden_size=SIZE, direction=direction)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("read", ["all", "last"])
def test_back(direction: str, read: str) -> None:
    ways = 2 if direction == "bidirectional" else 1
    state = (ways, BATCH, SIZE)
    shapes = {
        "r": (ways, 4 * SIZE, SIZE),
        "gates": (STEPS, ways, BATCH, 4 * SIZE),
        "cells": (STEPS, ways, BATCH, SIZE),
        "c": state if read == "last" else None,
        "peepholes": None,
        "grad_y": (STEPS, ways, BATCH, SIZE) if read == "all" else None,
        "grad_h": state if read == "last" else None,
        "grad_c": state if read == "last" else None,
    }
    _same_as_defined("LSTMSlopes", shapes, 3, direction=direction)
