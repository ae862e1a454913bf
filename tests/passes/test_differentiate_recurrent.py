"""Gradients of recurrent layers in all their forms against finite differences of the layers themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import of
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.ops.gradients import recurrent
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Array, Build, Case, check, r

LENGTH, BATCH, WIDTH, SIZE = 3, 2, 3, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layer(name: str, output: int, lengths: bool, first: bool, holes: bool, attrs: dict[str, Any]) -> Build:
    """Operands come as x, w, r, bias, then what there is of first states, peepholes and lengths."""

    def build(op: GraphOps, *given: Value) -> Value:
        rest = list(given[4:])
        states: list[Value | None] = [None, None]
        if first:
            states = [rest.pop(0), rest.pop(0) if name == "LSTM" else None]
        peepholes = rest.pop(0) if holes else None
        operands = [*given[:4], rest.pop(0) if lengths else None, *states, peepholes]
        operands = operands if name == "LSTM" else operands[:6]
        outputs = 3 if name == "LSTM" else 2
        return op.node(name, operands, {"hidden_size": SIZE, **attrs}, outputs=outputs).outputs[output]

    return build


def case(
    name: str, output: int = 0, lengths: list[int] | None = None, *, first: bool = False, holes: bool = False,
    **attrs: Any,
) -> Case:  # fmt: skip
    ways, gates = (2 if attrs.get("direction") == "bidirectional" else 1), GATES[name]
    given: list[Array] = [
        r(LENGTH, BATCH, WIDTH),
        r(ways, gates * SIZE, WIDTH, seed=1),
        r(ways, gates * SIZE, SIZE, seed=2),
        r(ways, 2 * gates * SIZE, seed=3),
    ]
    states = [r(ways, BATCH, SIZE, seed=seed) for seed in (4, 5)[: 2 if name == "LSTM" else 1]] if first else []
    if attrs.get("layout"):
        given[0] = np.ascontiguousarray(given[0].swapaxes(0, 1))
        states = [np.ascontiguousarray(state.swapaxes(0, 1)) for state in states]
    given += [*states, *([r(ways, 3 * SIZE, seed=6)] if holes else [])]
    others = [] if lengths is None else [np.array(lengths, np.int32)]
    return Case(layer(name, output, lengths is not None, first, holes, attrs), given, others)


CASES = {
    **{f"{name} with the batch first": case(name, layout=1, first=True) for name in GATES},
    **{f"{name} with the batch first, last state": case(name, 1, layout=1) for name in GATES},
    **{f"{name} clipped": case(name, clip=0.4) for name in GATES},
    **{f"{name} of lengths": case(name, lengths=[3, 1], first=True) for name in GATES},
    **{
        f"{name} of lengths, both ways": case(name, lengths=[2, 3], direction="bidirectional", layout=1)
        for name in GATES
    },
    **{f"{name} of lengths, last state": case(name, 1, lengths=[1, 2], direction="reverse") for name in GATES},
    "LSTM of lengths, last cell": case("LSTM", 2, lengths=[2, 3], direction="reverse", holes=True),
    "LSTM coupled": case("LSTM", input_forget=1, holes=True, first=True),
    "LSTM of its own": case("LSTM", activations=["HardSigmoid", "Softsign", "ScaledTanh"],
                            activation_alpha=[0.3, 0.9], activation_beta=[0.4, 1.3]),
    "GRU of its own": case("GRU", activations=["Sigmoid", "LeakyRelu", "HardSigmoid", "Affine"],
                           activation_alpha=[0.2, 0.25, 0.7], activation_beta=[0.45, 0.1], direction="bidirectional"),
    "GRU of its own, after": case("GRU", activations=["Softsign", "Softplus"], linear_before_reset=1, clip=1.5),
    **{f"RNN by {name}": case("RNN", activations=[name])
       for name in ("Relu", "Elu", "Softplus", "ThresholdedRelu", "affine")},
    "RNN both ways": case("RNN", activations=["Relu", "Tanh"], direction="bidirectional", first=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


LONG = ("GRU of lengths, both ways", "GRU of its own", "LSTM of lengths, last cell", "LSTM coupled", "RNN both ways")


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_are_scanned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_LONGEST", 2)
    check(CASES[name])


def test_a_graph_does_not_grow_with_the_sequence() -> None:
    sizes = []
    for length in (600, 1200):
        graph = Graph("g", opsets={"": 21})
        kind = of(np.float64(0))
        shapes = ((length, 2, 3), (1, 6, 3), (1, 6, 2))
        given = [graph.add_input(f"x{k}", TensorType(kind, shape)) for k, shape in enumerate(shapes)]
        node = GraphOps(graph, None, "", complete).node("GRU", given, {"hidden_size": 2}, outputs=2)
        grads = differentiate(graph, [(node.outputs[0], None)], given)
        assert all(grad is not None for grad in grads)
        sizes.append(len(list(graph)))
    assert sizes[0] == sizes[1]
