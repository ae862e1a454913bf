"""A few nodes of a large problem as a problem of their own, to see what a change there brings without all the rest."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Flow, Problem


class Region:
    """Some ``nodes`` of a problem, and around them those they read from and those that read from them: these stay
    where they are and take no time."""

    def __init__(self, problem: Problem, owner: Sequence[int], nodes: Sequence[int]) -> None:
        inside = set(nodes)
        touching = dict.fromkeys(k for node in nodes for k in problem.touching[node])
        flows = [problem.flows[k] for k in touching]
        around = {node for flow in flows for node in (flow.producer, *flow.consumers)} - {OUTSIDE}
        self.nodes = sorted(inside | around)
        self.place = {node: k for k, node in enumerate(self.nodes)}
        self.owner = [owner[node] for node in self.nodes]
        count = len(problem.choices)
        seconds = [
            problem.seconds[node] if node in inside else [0.0 if p == owner[node] else CANNOT for p in range(count)]
            for node in self.nodes
        ]
        place = self.place
        kept = [
            Flow(
                OUTSIDE if flow.producer == OUTSIDE else place[flow.producer],
                tuple([place[node] for node in flow.consumers]),
                flow.nbytes,
                flow.output,
            )
            for flow in flows
        ]
        order = [(place[a], place[b]) for a, b in problem.order if a in place and b in place]
        self.problem = Problem(problem.choices, seconds, kept, problem.links, order=order)

    def moved(self, nodes: Sequence[int], target: int) -> list[int]:
        """The placement of the region with ``nodes`` on another provider."""
        found = list(self.owner)
        for node in nodes:
            found[self.place[node]] = target
        return found
