"""Running nodes on constants by their reference, subgraphs included. What folding uses; not how models are run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import ResourceLimit
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops import registry


class Evaluator:
    """Evaluates nodes; gives up with ResourceLimit after ``steps`` of them or ``seconds``: nothing may hang a load."""

    def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        self.steps = steps
        self.done = 0
        self.started = time.monotonic()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds since the first node could run."""
        return time.monotonic() - self.started

    def check(self, where: str) -> None:
        if self.seconds is not None and self.spent > self.seconds:
            raise ResourceLimit("folding seconds", self.seconds, self.spent, where)

    def node(self, node: Node, env: Mapping[Value, Any]) -> tuple[Any, ...]:
        """The results of one node; ``env`` holds its operands and what its subgraphs capture, constants aside."""
        self.done += 1
        if self.steps is not None and self.done > self.steps:
            raise ResourceLimit("folding steps", self.steps, self.done, f"{node.op} {node.name!r}")
        self.check(f"{node.op} {node.name!r}")
        wanted = tuple(bool(v.uses) or v.is_graph_output for v in node.outputs)
        call = registry.Call(wanted, node.version, node=node)
        if node.has_subgraphs:
            call.run = lambda graph, inputs: self.graph(graph, inputs, env)
        operands = [None if v is None else _look_up(v, env) for v in node.inputs]
        with np.errstate(all="ignore"):
            results = registry.get(node.domain, node.op, node.version).run(operands, node.attrs, call)
        return tuple(map(_laid_out, results))

    def graph(self, graph: Graph, inputs: Sequence[Any], outer: Mapping[Value, Any] | None = None) -> list[Any]:
        """The outputs of a graph on its inputs; ``outer`` holds the values it may capture."""
        env: dict[Value, Any] = dict(outer or {})
        env.update(zip(graph.inputs, inputs))
        for node in graph:
            env.update(zip(node.outputs, self.node(node, env)))
        return [_look_up(v, env) for v in graph.outputs]


def _laid_out(result: Any) -> Any:
    """A tensor as a run would store it: sums over it then add in the same order."""
    if isinstance(result, np.ndarray) and not result.flags.c_contiguous:
        return result.copy(order="C")
    return result


def _look_up(value: Value, env: Mapping[Value, Any]) -> Any:
    return value.const.numpy() if value.const is not None else env[value]
