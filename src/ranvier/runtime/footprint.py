"""Memory a session holds, and giving back what it does not need between runs."""

from __future__ import annotations

from ranvier.graph.ir import Graph
from ranvier.runtime.session import Session


def graph_bytes(graph: Graph) -> int:
    """Bytes of all constants of a graph and of the graphs nested in it, loaded or not."""
    return sum(
        tensor.nbytes
        for each in graph.all_graphs()
        for tensor in [v.const for v in each.constants.values() if v.const is not None] + list(each.defaults.values())
    )


def weight_bytes(session: Session) -> int:
    """Bytes of the constants of a session's graph and of what its kernels made of them."""
    return graph_bytes(session.graph) + sum(item.kernel.memory_usage().constants for item in session._parts)


def arena_bytes(session: Session, running: int = 0) -> int:
    """Bytes of arenas that wait for the next run, and of those that ``running`` runs in progress use."""
    with session._lock:
        plans = list(session._plans.values())
    waiting = sum(plan.memory.arena * len(plan._free) for plan in plans)
    # a run has taken its arena out of the pool; which plan it follows is its own affair, so the largest is counted
    in_use = running * max((plan.memory.arena for plan in plans), default=0)
    return waiting + in_use


def trim(session: Session) -> None:
    """Give back to the system the arenas that no run uses; the next run takes a new one."""
    with session._lock:
        plans = list(session._plans.values())
    for plan in plans:
        plan.close()
    release(session)


def release(session: Session) -> None:
    """Empty the pools in which the session's providers keep freed memory."""
    for provider in session.providers:
        provider.allocator().trim()


__all__ = ["arena_bytes", "graph_bytes", "release", "trim", "weight_bytes"]
