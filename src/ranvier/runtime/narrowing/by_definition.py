"""A sample worked out node by node, as the operators define them: nothing has to be compiled for it.

It tells what the results should be, and how large values get on the way, which float16, which ends at 65504, has to
know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.ops import registry
from ranvier.records import dataclass


@dataclass(frozen=True)
class WorkedOut:
    """``largest``: the largest absolute value of every float32 tensor, by name, infinite where it holds what is not
    finite. ``outputs``: the graph's results, None where one follows from a node with bodies of its own: such nodes and
    what is made of their results are left out."""

    largest: dict[str, float]
    outputs: list[Any] | None


def worked_out(graph: Graph, inputs: Mapping[Value, Any]) -> WorkedOut:
    env: dict[Value, Any] = dict(inputs)
    largest = {v.name: _largest(x) for v, x in env.items() if _counts(x)}
    last = {v: node for node in graph for v in node.dependencies()}
    wanted_last = set(graph.outputs)
    for node in graph:
        for value in node.dependencies():
            if value not in env and value.const is not None:
                env[value] = _read(value.const)
        if not node.has_subgraphs and all(v is None or v in env for v in node.inputs):
            definition = registry.get(node.domain, node.op, node.version)
            wanted = tuple(bool(v.uses) or v.is_graph_output for v in node.outputs)
            call = registry.Call(wanted, node.version, node=node, opsets=graph.opsets)
            with np.errstate(all="ignore"):
                results = definition.run([None if v is None else env[v] for v in node.inputs], node.attrs, call)
            for value, result in zip(node.outputs, results):
                env[value] = result
                if _counts(result):
                    largest[value.name] = _largest(result)
        for value in set(node.dependencies()) - wanted_last:
            if last[value] is node:
                env.pop(value, None)
    env |= {v: _read(v.const) for v in graph.outputs if v not in env and v.const is not None}
    complete = all(v in env for v in graph.outputs)
    return WorkedOut(largest, [env[v] for v in graph.outputs] if complete else None)


def _read(const: ConstTensor) -> np.ndarray[Any, Any]:
    """The data for as long as it is needed here; :meth:`ConstTensor.numpy` would keep a copy of what lies unaligned."""
    raw = const.raw()
    return raw if raw.flags.aligned else raw.copy()


def _counts(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float32


def _largest(x: np.ndarray[Any, Any]) -> float:
    most = max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))
    return most if math.isfinite(most) else math.inf
