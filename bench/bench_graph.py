"""How fast is the IR: microseconds to build a node, seconds to try every fusion rule on a large graph.

    python -m bench.bench_graph [--nodes 10000] [--json]

Two graphs of the same size are searched: one of common operators in which no rule applies, and one made of exported
transformer layers, of whose nodes 56 become 32 (types of the new nodes included).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

import numpy as np

from bench.figures import Figure, main
from ranvier.dtypes import DType
from ranvier.graph import ConstTensor, Graph, TensorType, Value
from ranvier.ops import NEWEST, annotate, complete
from ranvier.ops.proto import schema_of
from ranvier.passes.base import PassContext, RulePass
from ranvier.passes.fuse import fusion_passes

BATCH, TIME, WIDTH, HEADS = 2, 16, 64, 4


class Builder:
    """``b("Add", x, y)`` adds a node; constants are made once and shared."""

    def __init__(self) -> None:
        self.graph = Graph("bench", opsets={"": NEWEST})
        self.shared: dict[object, Value] = {}
        self.versions: dict[str, int] = {}

    def __call__(self, op: str, *operands: Value, outputs: int = 1, **attrs: object) -> Value:
        version = self.versions.get(op)
        if version is None:
            schema = schema_of("", op, NEWEST)
            assert schema is not None
            version = self.versions[op] = schema.since_version
        return self.graph.add(op, operands, attrs, outputs, version=version).output

    def number(self, x: float) -> Value:
        return self.constant(x, np.float32(x))

    def ints(self, *x: int) -> Value:
        return self.constant(x, np.array(x))

    def weight(self, *shape: int) -> Value:
        return self.constant(("weight", shape), np.full(shape, 0.25, np.float32))

    def constant(self, key: object, array: object) -> Value:
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = self.graph.add_constant(ConstTensor.of(np.asarray(array)))
        return found


Block = Callable[[Builder, Value], Value]


def plain_block(b: Builder, x: Value) -> Value:
    """Twelve nodes that look like beginnings of patterns, and are none."""
    y = b("MatMul", x, b.weight(WIDTH, WIDTH))
    y = b("Relu", b("Add", y, b.weight(WIDTH)))
    y = b("Mul", b("Add", y, b.number(1.0)), b.number(0.25))
    y = b("Div", b("Sub", y, b("ReduceMax", y, b.ints(-1))), b.number(3.0))
    y = b("Mul", y, b("Sigmoid", b("Neg", y)))
    return b("Add", x, y)


def layer_norm(b: Builder, x: Value) -> Value:
    d = b("Sub", x, b("ReduceMean", x, b.ints(-1)))
    variance = b("ReduceMean", b("Pow", d, b.number(2.0)), b.ints(-1))
    unit = b("Div", d, b("Sqrt", b("Add", variance, b.number(1e-5))))
    return b("Add", b("Mul", unit, b.weight(WIDTH)), b.weight(WIDTH))


def linear(b: Builder, x: Value, width: int = WIDTH) -> Value:
    return b("Add", b("MatMul", x, b.weight(WIDTH, width)), b.weight(width))


def heads(b: Builder, x: Value, perm: tuple[int, ...]) -> Value:
    return b("Transpose", b("Reshape", linear(b, x), b.ints(0, 0, HEADS, WIDTH // HEADS)), perm=perm)


def exported_block(b: Builder, x: Value) -> Value:
    """56 nodes as PyTorch exports a transformer layer and what stands around it."""
    y = layer_norm(b, x)
    q, k, v = (heads(b, y, perm) for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)))
    weights = b("Softmax", b("Div", b("MatMul", q, k), b.number(4.0)), axis=-1)
    y = b("Transpose", b("MatMul", weights, v), perm=(0, 2, 1, 3))
    x = b("Add", x, linear(b, b("Reshape", y, b.ints(0, 0, WIDTH))))
    y = linear(b, layer_norm(b, x))
    y = b("Mul", b("Mul", y, b.number(0.5)), b("Add", b("Erf", b("Div", y, b.number(math.sqrt(2)))), b.number(1.0)))
    x = b("Add", x, linear(b, y))
    y = b("Mul", x, b("Sigmoid", x))
    y = b("Concat", b("Relu", y), x, axis=-1)
    y = b("Slice", y, b.ints(0), b.ints(WIDTH), b.ints(-1))
    return b("Tanh", b("Add", y, x))


def build(nodes: int, block: Block) -> Graph:
    b = Builder()
    x = b.graph.add_input("x", TensorType(DType.float32, (BATCH, TIME, WIDTH)))
    while len(b.graph) < nodes:
        x = block(b, x)
    b.graph.outputs = [x]
    return b.graph


def chain(nodes: int) -> Graph:
    """Nodes and nothing else: what the IR itself costs."""
    graph = Graph("chain")
    x = graph.add_input("x", TensorType(DType.float32, (WIDTH,)))
    w = graph.add_constant(ConstTensor.of(np.ones(WIDTH, np.float32)), "w")
    for _ in range(nodes // 4):
        y = graph.add("MatMul", (x, w), version=13).output
        y = graph.add("Add", (y, w), version=14).output
        y = graph.add("Softmax", (y,), {"axis": -1}, version=13).output
        x = graph.add("Mul", (x, y), version=14).output
    graph.outputs = [x]
    return graph


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time: all of this runs on one thread, and other processes should not count."""
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def search(graph: Graph) -> tuple[float, int]:
    """Seconds for all rules of all fusion passes, and how many rewrites they made."""
    passes = [step for step in fusion_passes() if isinstance(step, RulePass)]  # others look for layers, not patterns
    for step in passes:
        step.rule_set()  # patterns are made once per process
    ctx = PassContext()
    seconds = timed(lambda: [step.run(graph, ctx) for step in passes])
    return seconds, ctx.changes


def measure(nodes: int) -> list[Figure]:
    build(min(nodes, 200), exported_block)  # imports and caches
    built = min(timed(lambda: chain(nodes)) for _ in range(3))
    figures = [Figure("build a node", built / nodes * 1e6, "µs", 5.0)]
    for name, block in (("nothing fits", plain_block), ("much fuses", exported_block)):
        graph = build(nodes, block)
        annotate(graph)
        first = next(iter(graph))
        complete(first)  # the operator registry and the standard's schemas are loaded by now
        seconds, changes = search(graph)
        figures.append(Figure(f"all rules, {name}", seconds, "s", 1.0))
        figures.append(Figure(f"rewrites, {name}", changes, "", None))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
