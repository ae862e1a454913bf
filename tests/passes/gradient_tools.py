"""What gradient rules are held against: finite differences in float64, run by the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import of
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.graph.verify import verify
from ranvier.ops import complete
from ranvier.passes.differentiate import differentiate
from ranvier.runtime.session import Session

Array = np.ndarray[Any, Any]
REFERENCE = SessionConfig(providers=("reference",), optimization="none")
STEP = 1e-6
Build = Callable[..., Value]


@dataclass
class Case:
    """``build(op, *inputs)`` makes the result; ``inputs`` are what is derived by, ``others`` what is not."""

    build: Build
    inputs: list[Array]
    others: list[Array] = field(default_factory=list)
    shape: tuple[int, ...] | None = None  # of the result, where the standard cannot tell


def r(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed + sum(shape) * 31 + len(shape))
    return rng.uniform(low, high, shape)


def graph_of(case: Case) -> tuple[Graph, list[Value], Value, Value]:
    graph = Graph("case", opsets={"": 26, "com.microsoft": 1})
    values = [graph.add_input(f"x{k}", TensorType(of(a), a.shape)) for k, a in enumerate(case.inputs)]
    constants = [graph.add_constant(ConstTensor.of(a)) for a in case.others]
    y = case.build(GraphOps(graph, None, "", complete), *values, *constants)
    shape = case.shape or (y.type.shape if isinstance(y.type, TensorType) else None)
    assert shape is not None
    seed = graph.add_input("seed", TensorType(of(np.float64(0)), shape))
    return graph, values, y, seed


def run(graph: Graph, feeds: Mapping[str, Array]) -> list[Array]:
    with Session(graph, REFERENCE) as session:
        return [np.asarray(x) for x in session.run(dict(feeds)).values()]


def forward(case: Case) -> Session:
    """The result alone, to be run at many places."""
    graph, _, y, seed = graph_of(case)
    graph.inputs.remove(seed)
    graph.outputs = [y]
    return Session(graph, REFERENCE)


def check(case: Case, tolerance: float = 2e-5, step: float = STEP) -> None:
    graph, values, y, seed = graph_of(case)
    grads = differentiate(graph, [(y, seed)], values)
    graph.outputs = list(dict.fromkeys(g for g in grads if g is not None))  # operands of a sum have the same
    verify(graph)
    weights = r(*seed.type.shape, seed=9)  # type: ignore[union-attr, misc]
    feeds = {f"x{k}": a for k, a in enumerate(case.inputs)}
    found = dict(zip(graph.outputs, run(graph, {**feeds, "seed": weights})))
    with forward(case) as session:
        for k, grad in enumerate(grads):
            numeric = slopes(session, feeds, f"x{k}", weights, step)
            exact = np.zeros_like(numeric) if grad is None else found[grad]
            assert exact.shape == numeric.shape
            np.testing.assert_allclose(exact, numeric, rtol=tolerance, atol=tolerance, err_msg=f"input {k}")


def slopes(session: Session, feeds: Mapping[str, Array], name: str, weights: Array, step: float) -> Array:
    """How the weighed sum of the result changes with each element of an input."""
    array = feeds[name]
    found = np.zeros_like(array)
    for place in np.ndindex(array.shape):
        moved = []
        for sign in (1, -1):
            changed = array.copy()
            changed[place] += sign * step
            (y,) = session.run({**feeds, name: changed}).values()
            moved.append(float((np.asarray(y) * weights).sum()))
        found[place] = (moved[0] - moved[1]) / (2 * step)
    return found


def op_of(name: str, *operands: Any, **attrs: Any) -> Build:
    return lambda op, *v: op.node(name, [*v, *operands], attrs).output
