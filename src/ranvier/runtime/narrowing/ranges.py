"""How large the values of a graph get on a sample: what float16, which ends at 65504, has to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Value
from ranvier.ops import registry


def largest_values(graph: Graph, inputs: Mapping[Value, Any]) -> dict[str, float]:
    """The largest absolute value of every float32 tensor, by name, node by node as the operators define them.

    Infinite where a tensor holds what is not finite. What follows from nodes with bodies of their own is left out.
    """
    env: dict[Value, Any] = dict(inputs)
    found = {v.name: _largest(x) for v, x in env.items() if _counts(x)}
    last = {v: node for node in graph for v in node.dependencies()}
    for node in graph:
        for value in node.dependencies():
            if value not in env and value.const is not None:
                env[value] = value.const.numpy()
        if node.has_subgraphs or any(v is not None and v not in env for v in node.inputs):
            continue
        definition = registry.get(node.domain, node.op, node.version)
        wanted = tuple(bool(v.uses) or v.is_graph_output for v in node.outputs)
        call = registry.Call(wanted, node.version, node=node, opsets=graph.opsets)
        with np.errstate(all="ignore"):
            results = definition.run([None if v is None else env[v] for v in node.inputs], node.attrs, call)
        for value, result in zip(node.outputs, results):
            env[value] = result
            if _counts(result):
                found[value.name] = _largest(result)
        for value in set(node.dependencies()):
            if last[value] is node:
                env.pop(value, None)
    return found


def _counts(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float32


def _largest(x: Any) -> float:
    most = float(np.abs(x).max(initial=0.0))
    return most if np.isfinite(most) else float("inf")
