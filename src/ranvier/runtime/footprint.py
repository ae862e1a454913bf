"""Memory a session holds, and giving back what it does not need between runs."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.graph.ir import Graph
from ranvier.runtime.session import Session


@dataclass(frozen=True)
class Footprint:
    """Bytes: constants of the graph and of its kernels, and arenas kept for the next run."""

    weights: int = 0
    arenas: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.arenas


def graph_bytes(graph: Graph) -> int:
    """Bytes of all constants of a graph and of the graphs nested in it, loaded or not."""
    return sum(
        tensor.nbytes
        for each in graph.all_graphs()
        for tensor in [v.const for v in each.constants.values() if v.const is not None] + list(each.defaults.values())
    )


def footprint(session: Session, running: int = 0) -> Footprint:
    """What a session holds while ``running`` runs are in progress."""
    kernels = sum(item.kernel.memory_usage().constants for item in session._parts)
    with session._lock:
        plans = list(session._plans.values())
    waiting = sum(plan.memory.arena * len(plan._free) for plan in plans)
    # a run has taken its arena out of the pool; which plan it follows is its own affair, so the largest is counted
    in_use = running * max((plan.memory.arena for plan in plans), default=0)
    return Footprint(graph_bytes(session.graph) + kernels, waiting + in_use)


def trim(session: Session) -> None:
    """Give back arenas that no run uses; the next run takes a new one."""
    with session._lock:
        plans = list(session._plans.values())
    for plan in plans:
        plan.close()


__all__ = ["Footprint", "footprint", "graph_bytes", "trim"]
