"""Arrays of the host that shape a run, as far as they shape it.

Of a total length that fits the cache only whether this is a prompt counts, because lengths are read on the device. So a
context that grows has one variant, and one captured run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.graph.ir import Node, Value
from ranvier.passes.facts import is_wanted
from ranvier.providers.base import Array

ATTENTION = "GroupQueryAttention"


class Bounds:
    """Of a part whose ``shaping`` inputs are looked at on the host."""

    def __init__(self, nodes: Sequence[Node], shaping: Sequence[Value]) -> None:
        readers: dict[Value, list[tuple[Node, int]]] = {value: [] for value in shaping}
        for node in nodes:
            for position, value in enumerate(node.inputs):
                if value in readers:
                    readers[value].append((node, position))
        totals = {
            v: {n: None for n, _ in found} for v, found in readers.items() if found and all(map(_is_total, found))
        }
        self._totals = {value: list(found) for value, found in totals.items()}

    def __call__(self, shaping: Mapping[Value, Array], given: Mapping[Value, Any]) -> dict[Value, Array]:
        """The arrays, each as large as it can be without changing anything."""
        found = dict(shaping)
        for value, nodes in self._totals.items():
            bounds = {_bound(node, shaping[value], given) for node in nodes}
            if len(bounds) == 1 and (bound := bounds.pop()) is not None:
                found[value] = shaping[value].copy()
                found[value][...] = bound
        return found


def _is_total(read: tuple[Node, int]) -> bool:
    node, position = read
    return node.op == ATTENTION and position == 6


def _bound(node: Node, total: Array, given: Mapping[Value, Any]) -> int | None:
    """The largest total that gives the same result as this one; None where each is different."""
    past, length = node.input(3), _size(node.input(0), 1, given)
    if past is None or past not in given or length is None or total.size != 1:
        return None
    capacity, wanted = given[past].shape[2], int(total.reshape(-1)[0])
    if is_wanted(node, 3) or node.input(10) is not None or wanted > capacity:
        return None
    differs = wanted == length and (length > 1 or node.input(9) is not None)  # a prompt: it begins at position 0
    return None if differs else int(capacity)


def _size(value: Value | None, axis: int, given: Mapping[Value, Any]) -> int | None:
    """A size by the graph: said there, or the same symbol as that of an input."""
    shape = getattr(value.type, "shape", None) if value is not None else None
    if shape is None or axis >= len(shape):
        return None
    if isinstance(shape[axis], int):
        return int(shape[axis])
    for other, tensor in given.items():
        for symbol, size in zip(getattr(other.type, "shape", None) or (), tensor.shape):
            if shape[axis] is not None and symbol == shape[axis]:
                return int(size)
    return None


__all__ = ["ATTENTION", "Bounds"]
