"""An order of nodes that keeps few bytes alive."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.topology import topological_order
from ranvier.graph.types import TensorType

_TYPICAL_DIM = 64  # stands in for a symbolic dim where sizes are only compared


def order_for_memory(graph: Graph, nbytes: Callable[[Value], int]) -> list[Node]:
    """A topological order with a low peak of live bytes: the better of the given one and a greedy one."""
    given = topological_order(graph)
    sizes = {v: nbytes(v) for node in given for v in node.outputs}  # each is asked for many times

    def size(value: Value) -> int:
        found = sizes.get(value)
        return nbytes(value) if found is None else found

    greedy = _greedy_order(graph, given, size)
    if greedy == given:
        return given
    return min((given, greedy), key=lambda order: peak_bytes(order, graph, size))


def peak_bytes(order: Sequence[Node], graph: Graph, nbytes: Callable[[Value], int]) -> int:
    """The most bytes of node results alive at once when the nodes run in this order."""
    last = _last_uses(order, graph)
    ending: dict[int, list[Value]] = {}
    for value, step in last.items():
        ending.setdefault(step, []).append(value)
    now = peak = 0
    for step, node in enumerate(order):
        now += sum(nbytes(v) for v in node.outputs)
        peak = max(peak, now)
        now -= sum(nbytes(v) for v in ending.get(step, ()))
    return peak


def _last_uses(order: Sequence[Node], graph: Graph) -> dict[Value, int]:
    """For every node result, the step after which it is not needed."""
    last: dict[Value, int] = {}
    for step, node in enumerate(order):
        for value in node.outputs:
            last[value] = step
        for value in node.dependencies():
            if value in last:
                last[value] = step
    for value in graph.outputs:
        if value in last:
            last[value] = len(order)
    return last


def _greedy_order(graph: Graph, given: Sequence[Node], nbytes: Callable[[Value], int]) -> list[Node]:
    """Always run next the ready node that frees the most beyond what it makes; ties keep the given order."""
    needs = [[v for v in dict.fromkeys(node.dependencies()) if v.producer is not None] for node in given]
    index = {id(node): k for k, node in enumerate(given)}
    users: dict[Value, int] = {}
    followers: list[list[int]] = [[] for _ in given]
    waiting = [0] * len(given)
    for k, operands in enumerate(needs):
        producers = {index[id(v.producer)] for v in operands if id(v.producer) in index}
        waiting[k] = len(producers)
        for p in producers:
            followers[p].append(k)
        for value in operands:
            users[value] = users.get(value, 0) + 1
    for value in graph.outputs:
        users[value] = users.get(value, 0) + 1

    def growth(k: int) -> int:
        made = sum(nbytes(v) for v in given[k].outputs)
        return made - sum(nbytes(v) for v in needs[k] if users.get(v) == 1)

    ready = [(growth(k), k) for k in range(len(given)) if waiting[k] == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        claimed, k = heapq.heappop(ready)
        current = growth(k)
        if current < claimed:  # somebody else's use ended meanwhile: it may now be a better choice
            heapq.heappush(ready, (current, k))
            continue
        order.append(given[k])
        for value in needs[k]:
            users[value] -= 1
        for follower in followers[k]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (growth(follower), follower))
    return order


def typical_bytes(value: Value) -> int:
    """Bytes of a value, or what they might be where sizes are not known."""
    found = value.type
    if not isinstance(found, TensorType) or found.shape is None or found.dtype is None:
        return 0
    count = 1
    for dim in found.shape:
        count *= dim if isinstance(dim, int) else _TYPICAL_DIM
    return found.dtype.nbytes(count)
