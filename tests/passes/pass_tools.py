"""What the tests of single passes share: graphs by hand, one pass over them, and the same results before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import of
from ranvier.graph import ConstTensor, Graph, Symbol, TensorType, Value, verify
from ranvier.ops import NEWEST, annotate
from ranvier.ops.proto import schema_of
from ranvier.passes import OptimizationPass, PassContext
from ranvier.passes.evaluate import Evaluator


class Draft:
    """A graph in the making: ``d.op("Add", x, 1.0)``. Numbers become constants, strings in shapes symbols."""

    def __init__(self, outer: Draft | None = None) -> None:
        self.graph = Graph("draft")
        self.outer = outer

    def input(self, name: str = "x", shape: Sequence[Any] | None = (2, 3), dtype: Any = "float32") -> Value:
        dims = None if shape is None else tuple(Symbol(d) if isinstance(d, str) else d for d in shape)
        return self.graph.add_input(name, TensorType(of(dtype), dims))

    def constant(self, array: Any, name: str = "") -> Value:
        if isinstance(array, float):
            array = np.float32(array)
        elif isinstance(array, int | list | tuple):
            array = np.array(array, np.int64)
        return self.graph.add_constant(ConstTensor.of(array), name)

    def node(
        self, op: str, *operands: Any, outputs: int = 1, version: int | None = None, domain: str = "", **attrs: Any
    ) -> Any:
        values = [x if x is None or isinstance(x, Value) else self.constant(x) for x in operands]
        if version is None:
            schema = schema_of(domain, op, NEWEST)
            version = schema.since_version if schema is not None else 1
        return self.graph.add(op, values, attrs, outputs, domain=domain, version=version)

    def op(self, op: str, *operands: Any, **options: Any) -> Any:
        """The result of a new node, or all results when it has several."""
        node = self.node(op, *operands, **options)
        return node.output if len(node.outputs) == 1 else node.outputs

    def done(self, *outputs: Value) -> Graph:
        """The finished graph; results of nodes become outputs named y0, y1 …"""
        for k, value in enumerate(outputs):
            if value.producer is not None:
                value.name = f"y{k}"
        self.graph.outputs = list(outputs)
        if self.outer is None:
            annotate(self.graph)
            verify(self.graph)
        return self.graph


class Applied:
    """A graph after a pass, with what the pass said about it."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self.graph = graph
        self.ctx = ctx

    @property
    def ops(self) -> list[str]:
        return [node.op for node in self.graph]

    @property
    def reasons(self) -> str:
        return "; ".join(self.ctx.declined)

    def only(self, op: str) -> Any:
        (node,) = [n for n in self.graph.all_nodes() if n.op == op]
        return node


def feeds_for(graph: Graph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> list[np.ndarray]:
    """Random inputs, among them both zeros; symbols get the sizes given, or 2."""
    rng = np.random.default_rng(seed)
    feeds = []
    for value in graph.inputs:
        shape = [d if isinstance(d, int) else (sizes or {}).get(getattr(d, "name", ""), 2) for d in value.type.shape]
        dtype = value.type.dtype.numpy
        if dtype == np.bool_:
            array = rng.random(shape) < 0.5
        elif dtype.kind in "iu":
            array = rng.integers(0, 5, shape).astype(dtype)
        else:
            array = (rng.integers(-8, 8, shape) / 4).astype(dtype)
            if array.size > 3:
                array.flat[1], array.flat[2] = 0.0, -0.0
        feeds.append(array)
    return feeds


def assert_equal(before: Sequence[Any], after: Sequence[Any], rtol: float | None = None) -> None:
    """Equal bit by bit (NaN equals NaN), or within ``rtol`` of the largest element."""
    assert len(before) == len(after)
    for a, b in zip(before, after):
        if isinstance(a, list):
            assert_equal(a, b, rtol)
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype}{a.shape} became {b.dtype}{b.shape}"
        if a.dtype.kind not in "fV" and a.dtype.name != "bfloat16":
            np.testing.assert_array_equal(b, a)
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        if rtol is None:
            np.testing.assert_array_equal(y, x)
            numbers = ~np.isnan(x)
            np.testing.assert_array_equal(np.signbit(y)[numbers], np.signbit(x)[numbers], "signs of zeros")
        else:
            finite = np.abs(x[np.isfinite(x)])
            np.testing.assert_allclose(y, x, rtol=rtol, atol=rtol * max(1.0, finite.max(initial=0.0)))


def run(step: OptimizationPass, graph: Graph, **options: Any) -> PassContext:
    """Run a pass and return what it noted, for graphs that cannot be evaluated, or not twice alike."""
    ctx = PassContext(SessionConfig(**options))
    assert step.run(graph, ctx) == (ctx.changes > 0)
    verify(graph)
    return ctx


def apply(
    step: OptimizationPass,
    draw: Callable[[], Graph],
    *,
    sizes: Mapping[str, int] | None = None,
    rtol: float | None = None,
    feeds: Sequence[Any] | None = None,
    **options: Any,
) -> Applied:
    """Run a pass over what ``draw`` makes; invariants hold afterwards, and results are those of an untouched copy."""
    plain, graph = draw(), draw()
    ctx = run(step, graph, **options)
    assert [v.name for v in graph.outputs] == [v.name for v in plain.outputs]
    given = feeds_for(plain, sizes) if feeds is None else feeds
    assert_equal(Evaluator().graph(plain, given), Evaluator().graph(graph, given), rtol)
    return Applied(graph, ctx)
