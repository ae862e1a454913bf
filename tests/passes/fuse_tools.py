"""What the tests of fusion share: models as exporters write them, fused, and compared with themselves unfused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ranvier.dtypes import of
from ranvier.formats.onnx import read, to_proto
from ranvier.graph import Graph, verify
from ranvier.passes.base import PassContext
from ranvier.passes.evaluate import Evaluator
from ranvier.passes.fuse import fusion_passes

OPSET = onnx.defs.onnx_opset_version()
# float64 too: exporters write constants with float32's digits
TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-5, np.dtype(np.float16): 1e-2}


class Sketch:
    """Builds a model node by node, as a tracing exporter would: ``s.Add(x, 1.0)`` gives the name of the result."""

    def __init__(self, opset: int = OPSET, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: list[int | str | None] | None, dtype: Any = None) -> str:
        number = of(np.dtype(dtype or self.dtype)).onnx
        self.inputs.append(helper.make_tensor_value_info(name, number, shape))
        return name

    def constant(self, value: Any) -> str:
        """A name for a number (of the sketch's type), a list of integers, or an array."""
        if isinstance(value, float):
            value = np.array(value, self.dtype)
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def call(self, op: str, *operands: Any, outputs: int = 1, **attrs: Any) -> Any:
        names = ["" if x is None else x if isinstance(x, str) else self.constant(x) for x in operands]
        results = [f"t{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, names, results, **attrs))
        return results[0] if outputs == 1 else results

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        return lambda *operands, **attrs: self.call(op, *operands, **attrs)

    def model(self, *outputs: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "sketch",
            self.inputs,
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=onnx.IR_VERSION)


@dataclass
class Fused:
    graph: Graph
    ops: Counter[str]
    declined: Counter[str]

    def only(self, op: str) -> Any:
        """The one node of this operator."""
        (node,) = [n for n in self.graph.all_nodes() if n.op == op]
        return node

    def reasons(self) -> str:
        return "; ".join(self.declined)


def fused(model: onnx.ModelProto) -> Fused:
    """The model after all fusion passes, checked for the IR's invariants and against the standard's checker."""
    graph = read(model)
    declined: Counter[str] = Counter()
    for step in fusion_passes():
        ctx = PassContext()
        step.run(graph, ctx)
        verify(graph)
        declined.update(ctx.declined)
    return Fused(graph, Counter(n.op for n in graph.all_nodes()), declined)


def random_feeds(graph: Graph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> list[np.ndarray]:
    """Inputs for a graph; symbolic dims get the sizes given, or 3."""
    rng = np.random.default_rng(seed)
    feeds = []
    for value in graph.inputs:
        shape = [d if isinstance(d, int) else (sizes or {}).get(getattr(d, "name", ""), 3) for d in value.type.shape]
        dtype = value.type.dtype.numpy
        if dtype == np.bool_:
            feeds.append(rng.random(shape) < 0.7)
        elif dtype.kind in "iu":
            feeds.append(rng.integers(0, 4, shape).astype(dtype))
        else:
            feeds.append((2 * rng.standard_normal(shape)).astype(dtype))
    return feeds


def assert_same(
    model: onnx.ModelProto,
    feeds: list[np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    tolerance: float | None = None,
) -> Fused:
    """Fuse; outputs must be those of the unfused graph, and the fused graph a valid model of the newest opset."""
    plain, result = read(model), fused(model)
    feeds = feeds if feeds is not None else random_feeds(plain, sizes)
    before, after = Evaluator().graph(plain, feeds), Evaluator().graph(result.graph, feeds)
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype}{a.shape} became {b.dtype}{b.shape}"
        bound = tolerance if tolerance is not None else TOLERANCE.get(a.dtype, 0.0)
        np.testing.assert_allclose(b.astype(np.float64), a.astype(np.float64), rtol=bound, atol=bound)
    exported = to_proto(result.graph)
    onnx.checker.check_model(exported)
    if after[0].dtype == np.float32:  # the standard's own reference means the same by the new operators
        names = [value.name for value in result.graph.inputs]
        with np.errstate(all="ignore"):
            oracle = ReferenceEvaluator(exported).run(None, dict(zip(names, feeds)))
        for a, b in zip(before, oracle, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    return result
