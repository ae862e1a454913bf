"""An order of nodes in which everything is computed before it is used."""

from __future__ import annotations

import heapq

from ranvier.errors import InvalidGraph
from ranvier.graph.ir import Graph, Node


def topological_order(graph: Graph) -> list[Node]:
    """Nodes so that each stands after what it depends on; stable; raises InvalidGraph naming a cycle."""
    nodes = list(graph)
    position = {id(node): k for k, node in enumerate(nodes)}
    waiting: list[int] = []
    followers: list[list[int]] = [[] for _ in nodes]
    for k, node in enumerate(nodes):
        before = {
            position[id(v.producer)]
            for v in node.dependencies()
            if v.producer is not None and id(v.producer) in position
        }
        waiting.append(len(before))
        for p in before:
            followers[p].append(k)
    ready = [k for k, count in enumerate(waiting) if count == 0]
    order: list[Node] = []
    while ready:
        k = heapq.heappop(ready)
        order.append(nodes[k])
        for follower in followers[k]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) != len(nodes):
        stuck = [nodes[k].name or nodes[k].op for k, count in enumerate(waiting) if count > 0]
        raise InvalidGraph(f"graph {graph.name!r} has a cycle through {', '.join(map(repr, stuck[:5]))}")
    return order
