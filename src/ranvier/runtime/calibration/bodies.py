"""How often the nested graphs of control flow run, as far as shapes and constants tell before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType, Type

TRIPS = 8.0  # where nobody knows how often a loop runs
_NO_LIMIT = 2**31 - 1  # trip counts from here on say that a condition ends the loop
Values = Mapping[Value, Any]  # the data of small values that are known: constants, and what follows from shapes


def times_run(node: Node, types: Mapping[Value, Type | None], values: Values) -> float:
    """How often the body of a node runs: once for a branch, else the length of what is looped over."""
    if node.op == "If":
        return 1.0
    if node.op == "Loop":
        return _trip_count(node.input(0) if node.inputs else None, values)
    if node.op == "Scan":
        return _scanned(node, types)
    if node.op == "SequenceMap":
        return TRIPS
    return 1.0  # graphs that a node compiles into itself


def graphs_run(node: Node, values: Values) -> Sequence[Graph]:
    """The nested graphs that may run: where a condition is known, only the branch it takes."""
    if node.op == "If":
        condition = _known(node.input(0), values)
        if condition is not None and condition.size == 1:
            return [node.attrs["then_branch" if condition.reshape(()) else "else_branch"]]
    return list(node.subgraphs())


def _trip_count(value: Value | None, values: Values) -> float:
    found = _known(value, values)
    count = int(found.reshape(())) if found is not None and found.size == 1 else _NO_LIMIT
    return float(max(0, count)) if count < _NO_LIMIT else TRIPS


def _scanned(node: Node, types: Mapping[Value, Type | None]) -> float:
    """The length of the sequences; in its first form Scan goes through them for every entry of a batch."""
    count = node.attrs.get("num_scan_inputs", 1)
    value = node.inputs[-count]
    kind = None if value is None else types.get(value) or value.type
    if not isinstance(kind, TensorType) or kind.shape is None:
        return TRIPS
    if node.version < 9:
        sizes = kind.shape[:2]
    else:
        axis = (node.attrs.get("scan_input_axes") or (0,))[0]
        sizes = kind.shape[axis : axis + 1] if axis >= 0 else kind.shape[axis:][:1]
    return math.prod(float(size) if isinstance(size, int) else TRIPS for size in sizes)


def _known(value: Value | None, values: Values) -> Any:
    if value is None:
        return None
    found = values.get(value)
    return value.const.numpy() if found is None and value.const is not None and value.const.size == 1 else found
