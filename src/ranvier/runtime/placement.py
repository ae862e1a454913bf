"""The placement of a session's graph: by the list of providers, or by cost where there is something to weigh.

Most sessions have nothing to weigh: ``cpu`` takes a node or the reference does. They are placed by asking, without a
look at costs. Costs are asked for only where two providers, neither of them a last resort, take the same node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph, Node
from ranvier.logs import warn_once
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.partition import Blocked, Partitioner, Partitioning
from ranvier.runtime.partition.pins import matching, resolve_pins
from ranvier.runtime.transfer import space_of

if TYPE_CHECKING:
    from ranvier.runtime.partition.costs import Claims
    from ranvier.runtime.partition.placing import Placed

MARGIN = 0.2  # share of the time that dividing the work must save: less than that, predictions err


def partitioned(
    graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig, blocked: Blocked | None = None
) -> Partitioning:
    """The parts of a graph; ``blocked`` keeps nodes from providers."""
    if config.placing == "cost" and sum(not provider.capability().last_resort for provider in providers) > 1:
        found = _weighed(graph, providers, config, blocked or {})
        if found is not None:
            return found
    placed = Partitioner(providers, blocked).partition(graph)
    if config.placing == "cost" and graph.parent is None and len(placed.parts) > 1:
        from ranvier.runtime.beside import side_by_side  # which looks at costs

        return side_by_side(graph, placed, providers, config)
    return placed


def _weighed(
    graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig, blocked: Blocked
) -> Partitioning | None:
    """The cheapest placement, in an order that keeps devices busy; None where there is nothing to weigh or order."""
    from ranvier.runtime.beside import count_of, threads_of
    from ranvier.runtime.calibration.lazy import figures_for  # most sessions never need these
    from ranvier.runtime.calibration.model import MachineCosts, guessed
    from ranvier.runtime.partition.costs import ask, restricted
    from ranvier.runtime.partition.placing import place
    from ranvier.runtime.predicted import prediction

    claims = restricted(ask(graph, providers), providers, blocked)
    takers = [0] * len(claims.nodes)
    for node, _ in claims.notes:
        takers[node] += 1
    choice = max(takers, default=0) > 1
    among = {p for _, p in claims.notes}
    involved = [provider for p, provider in enumerate(providers) if p in among]
    if not choice and len({space_of(provider) for provider in involved}) < 2:
        return None  # nor does anything run at the same time
    figures = figures_for(involved, config, measuring=choice)
    known = guessed(graph)
    model = MachineCosts(providers, figures, known.types, known.values)
    # bodies of control flow run inside a part, which has its threads already
    count = count_of(config) if graph.parent is None else 1
    threads = partial(threads_of, providers=providers, model=model, count=count) if count > 1 else None
    placed = place(graph, providers, model, claims=claims, threads=threads)
    if choice and len(set(placed.owner)) > 1:
        whole = [place(graph, providers, model, claims=each, threads=threads) for each in _undivided(claims, among)]
        placed = _worth_it(placed, whole)
    placed.partitioning.predicted = prediction(placed, [provider.name for provider in providers], model)
    return placed.partitioning


def _undivided(claims: Claims, among: Iterable[int]) -> list[Claims]:
    """For each provider the claims that leave it all it takes; others get the rest."""
    found: list[Claims] = []
    for p in sorted(among):
        notes = {(k, q): note for (k, q), note in claims.notes.items() if q == p or (k, p) not in claims.notes}
        left = {(k, q): "kept together" for k, q in claims.notes if (k, q) not in notes}
        found.append(replace(claims, notes=notes, declined={**claims.declined, **left}))
    return found


def _worth_it(divided: Placed, whole: Sequence[Placed]) -> Placed:
    """The divided placement, where it promises more than predictions err; else the best that is not divided."""
    best = min(whole, key=lambda placed: placed.schedule.seconds)
    return divided if divided.schedule.seconds < (1 - MARGIN) * best.schedule.seconds else best


def pinned(graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig) -> Blocked:
    """Pins as nodes that other providers do not get, in nested graphs too.

    A pin to providers that are not there binds nothing: it was checked when the session was made, and who is missing
    now has failed since.
    """
    if not config.pins:
        return {}
    names = {name.lower() for provider in providers for name in (provider.name, *provider.aliases)}
    wanted = {rule: [n for n in _tuple(given) if n.lower() in names] for rule, given in config.pins.items()}
    nodes = list(graph.all_nodes())
    rules = {rule: given for rule, given in wanted.items() if given and any(map(matching(rule), nodes))}
    found: Blocked = {}
    for k, (allowed, rule) in resolve_pins(rules, nodes, providers).items():
        for p, provider in enumerate(providers):
            if p in allowed:
                continue
            found[provider.name, id(nodes[k])] = f"pinned elsewhere by {rule!r}"
            if not provider.capability().asks_for_bodies:
                for outer in _around(nodes[k]):
                    found.setdefault((provider.name, id(outer)), f"a node inside is pinned elsewhere by {rule!r}")
    return found


def _around(node: Node) -> Iterator[Node]:
    """The nodes of control flow that a node is inside of."""
    outer = node.graph.parent if node.graph is not None else None
    while outer is not None:
        yield outer
        outer = outer.graph.parent if outer.graph is not None else None


def check_pins(
    graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig, loaded: Mapping[str, bool]
) -> None:
    """InvalidConfig for a pin that names an unknown provider or no node at all; a warning for one whose nodes the
    optimizer has fused into others or removed. ``loaded`` says which rules fitted the model as it came."""
    nodes = list(graph.all_nodes()) if config.pins else []
    for rule, given in config.pins.items():
        gone = loaded.get(rule, False) and not any(map(matching(rule), nodes))
        resolve_pins({rule: given}, [] if gone else nodes, providers, must_match=not gone)
        if gone:
            warn_once(f"pin {rule}", f"pin {rule!r}: the optimizer left no node that it names")


def fitting(graph: Graph, config: SessionConfig) -> dict[str, bool]:
    """Which pins name a node of the graph."""
    nodes = list(graph.all_nodes()) if config.pins else []
    return {rule: any(map(matching(rule), nodes)) for rule in config.pins}


def _tuple(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


__all__ = ["check_pins", "fitting", "partitioned", "pinned"]
