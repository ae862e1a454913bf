"""Small graphs for the tests of the provider."""

from __future__ import annotations

from typing import Any

import numpy as np

import ranvier as rv
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.runtime.session import Session
from tests.torch.device import options as provider_options

WEIGHTS = np.random.default_rng(5).standard_normal((8, 8)).astype(np.float32)


def rows_graph() -> Graph:
    """MatMul, Relu, Gather by the second input: of any number of rows."""
    graph = Graph("rows", opsets={"": 21})
    kind = TensorType(DType.float32, (Symbol("rows"), 8))
    x = graph.add_input("x", kind)
    chosen = graph.add_input("chosen", TensorType(DType.int64, (2,)))
    weights = graph.add_constant(ConstTensor.of(WEIGHTS), "w")
    product = graph.add("MatMul", [x, weights], version=13, name="product").output
    positive = graph.add("Relu", [product], version=14, name="positive").output
    result = graph.add("Gather", [positive, chosen], {"axis": 0}, version=13, name="result").output
    product.type = positive.type = kind
    result.type = TensorType(DType.float32, (2, 8))
    result.name = "y"
    graph.outputs = [result]
    return graph


def load(graph: Graph | None = None, providers: tuple[str, ...] = ("cuda", "reference"), **options: Any) -> Session:
    given = provider_options(**options)
    return rv.load(graph or rows_graph(), optimization="none", providers=list(providers), provider_options=given)


def inputs(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
    return {"x": x, "chosen": np.array([0, -1])}


def expected(given: dict[str, np.ndarray]) -> np.ndarray:
    return np.maximum(given["x"] @ WEIGHTS, 0)[given["chosen"]]
