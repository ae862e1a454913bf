"""Random placement problems, and the cost of every placement there is: written apart from the optimiser's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.runtime.partition.problem import CANNOT, HOST, OUTSIDE, Choice, Flow, Link, Problem

Array = np.ndarray[Any, Any]


def random_problem(rng: np.random.Generator, nodes: int, providers: int = 3, capacities: bool = False) -> Problem:
    """A DAG; memory shared by some providers, some nodes beyond some of them, costs over two decades."""
    spaces = [int(rng.integers(0, 3)) for _ in range(providers)]
    dear = float(10 ** rng.uniform(-2, 1))  # of transfers against nodes
    weights = [int(rng.integers(0, 100)) for _ in range(nodes)]
    choices = [
        Choice(
            f"p{k}",
            space,
            launch=float(rng.choice([0.0, 0.1, 0.5, 2.0])),
            whole_parts=bool(rng.random() < 0.85),
            capacity=sum(weights) * float(rng.uniform(0.3, 0.9)) if capacities and k else None,
        )
        for k, space in enumerate(spaces)
    ]
    base = 10 ** rng.uniform(-1, 1, nodes)
    factor = 10 ** rng.uniform(-0.7, 0.7, (nodes, providers)) * 10 ** rng.uniform(-0.5, 0.5, providers)
    seconds = base[:, None] * factor
    seconds[rng.random((nodes, providers)) < 0.15] = CANNOT
    if capacities:
        seconds[:, 0] = base * 3
    for node in range(nodes):
        if not (seconds[node] < CANNOT).any():
            seconds[node, int(rng.integers(providers))] = base[node]
    width = int(rng.integers(1, 5))
    readers: list[set[int]] = [set() for _ in range(nodes)]
    entering: list[set[int]] = [set() for _ in range(int(rng.integers(1, 3)))]
    for node in range(nodes):
        for _ in range(int(rng.integers(1, 4))):
            source = node - int(rng.integers(1, width + 2))
            (readers[source] if source >= 0 else entering[int(rng.integers(len(entering)))]).add(node)
    flows = [Flow(OUTSIDE, tuple(sorted(r)), float(rng.integers(1, 100))) for r in entering if r]
    flows += [
        Flow(node, tuple(sorted(r)), float(rng.integers(1, 100)), output=not r or bool(rng.random() < 0.1))
        for node, r in enumerate(readers)
    ]
    links = {
        (a, b): Link(dear * float(rng.uniform(0.1, 1)), 60 / dear * float(rng.uniform(0.3, 3)))
        for a in range(3)
        for b in range(3)
        if a != b and (HOST in (a, b) or rng.random() < 0.5)
    }
    order = [(0, nodes - 1)] if nodes > 2 and rng.random() < 0.2 else []
    return Problem(choices, seconds.tolist(), flows, links, weights if capacities else (), order)


def brute_force(problem: Problem, upper: float = np.inf) -> tuple[float, Array]:
    """The least cost of all placements, and one that has it.

    ``upper`` is the cost of a placement at hand: those that cost more before any part is cut need no second look.
    """
    n, k = problem.size, len(problem.choices)
    owners = np.stack(np.meshgrid(*[np.arange(k)] * n, indexing="ij"), -1).reshape(-1, n).astype(np.int8)
    seconds = np.array(problem.seconds)
    cost = sum(seconds[node][owners[:, node]] for node in range(n))
    keep = cost <= upper
    owners, cost = owners[keep], cost[keep]
    cost = cost + _transfers(problem, owners)
    if problem.weights:
        for p, choice in enumerate(problem.choices):
            if choice.capacity is not None:
                held = (owners == p) @ np.array(problem.weights)
                cost = np.where(held > choice.capacity, np.inf, cost)
    used = sum(
        choice.launch * ((owners == p).any(1) if choice.whole_parts else (owners == p).sum(1))
        for p, choice in enumerate(problem.choices)
    )
    keep = cost + used <= upper * (1 + 1e-9)
    owners, cost = owners[keep], cost[keep]
    cost = cost + _launches(problem, owners)
    best = int(cost.argmin())
    return float(cost[best]), owners[best]


def _transfers(problem: Problem, owners: Array) -> Array:
    space = np.array([choice.space for choice in problem.choices])
    count = max(HOST, *space.tolist()) + 1
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a == b or (a not in (*space, HOST)) or (b not in (*space, HOST)):
                continue
            ways = [(a, b)] if (a, b) in problem.links else [(a, HOST), (HOST, b)]
            latency[a, b] = sum(problem.links[way].latency for way in ways)
            per_byte[a, b] = sum(1 / problem.links[way].bandwidth for way in ways)
    total = np.zeros(len(owners))
    where = space[owners]
    for flow in problem.flows:
        source = where[:, flow.producer] if flow.producer != OUTSIDE else np.full(len(owners), HOST)
        for target in range(count):
            needed = np.full(len(owners), flow.output and target == HOST)
            for consumer in flow.consumers:
                needed |= where[:, consumer] == target
            needed &= source != target
            if needed.any():
                moving = latency[:, target] + flow.nbytes * per_byte[:, target]
                total += np.where(needed, moving[source], 0.0)
    return total


def _launches(problem: Problem, owners: Array) -> Array:
    """Of all placements at once: the given order, and the orders that stay with a provider, whichever costs least."""
    n, k = problem.size, len(problem.choices)
    before = np.zeros(n, int)
    for flow in problem.flows:
        for consumer in flow.consumers:
            before[consumer] |= 1 << flow.producer if flow.producer != OUTSIDE else 0
    for first, second in problem.order:
        before[second] |= 1 << first
    done = np.arange(1 << n)
    ready_for = np.zeros(1 << n, int)
    for node in range(n):
        ready = (done & before[node] == before[node]) & (done >> node & 1 == 0)
        ready_for |= ready.astype(int) << node
    lowest = np.full(1 << n, -1)
    for node in reversed(range(n)):
        lowest[done >> node & 1 == 1] = node
    launch = np.array([choice.launch for choice in problem.choices])
    whole = np.array([choice.whole_parts for choice in problem.choices])
    own = np.stack([((owners == p).astype(int) << np.arange(n)).sum(1) for p in range(k)], 1)
    rows = np.arange(len(owners))

    def cost(order: Array) -> Array:
        who = owners[rows[:, None], order]
        cut = np.ones_like(who, bool)
        cut[:, 1:] = (who[:, 1:] != who[:, :-1]) | ~whole[who[:, 1:]]
        return (launch[who] * cut).sum(1)

    best = cost(np.broadcast_to(np.arange(n), owners.shape))
    for first in range(k):
        current = np.full(len(owners), first)
        seen = np.zeros(len(owners), int)
        order = np.zeros(owners.shape, int)
        for step in range(n):
            ready = ready_for[seen]
            mine = ready & own[rows, current]
            node = lowest[np.where(mine != 0, mine, ready)]
            current = owners[rows, node]
            order[:, step] = node
            seen |= 1 << node
        found = cost(order)
        best = np.where((own[:, first] != 0) & (found < best), found, best)
    return best
