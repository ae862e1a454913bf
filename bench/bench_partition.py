"""How fast is placing: seconds to divide a large graph among providers, and to schedule what comes of it.

    python -m bench.bench_partition [--nodes 10000] [--json]

The graph mixes what networks are made of: chains, residual blocks, branches, transformer layers that all read one
mask, and dense blocks in which everything reads everything before it. Four providers in three memories, each best
at something. With limits, nodes that compute much bring weights along, and the fast providers have room for a share of
them. Time is that of one core; the best of three runs is kept, for others may be at work.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.figures import Figure, main
from ranvier.runtime.partition.balance import balance
from ranvier.runtime.partition.optimise import optimise
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Choice, Flow, Link, Problem

CHOICES = (
    Choice("accelerator", space=1, launch=2e-5),
    Choice("worker", space=2, launch=1e-4),
    Choice("cpu", launch=5e-6),
    Choice("reference", launch=1e-5, whole_parts=False),
)
LINKS = {
    (0, 1): Link(1e-5, 12e9),
    (1, 0): Link(1e-5, 12e9),
    (0, 2): Link(1e-4, 1e9),
    (2, 0): Link(1e-4, 1e9),
}
LIMITS = ((0.5, 0.3), (0.1, 0.1), (0.05, None))  # shares of all weights that the first two providers can hold
RATES = (8e12, 2e12, 3e11, 1e10)  # operations per second
FIXED = (5e-6, 2e-6, 1e-6, 5e-6)  # seconds a node takes at least


class Network:
    """Nodes with a kind and a size, joined by values: made block by block, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seconds: list[list[float]] = []
        self.readers: dict[int, list[int]] = {OUTSIDE: []}
        self.nbytes: list[float] = []
        self.mask: list[int] = []

    def node(self, sources: list[int], heavy: bool = False) -> int:
        draw = self.draw
        index = len(self.seconds)
        work = 10 ** draw.uniform(6.5, 9) if heavy else 10 ** draw.uniform(4, 6.5)
        row = [fixed + work / rate for fixed, rate in zip(FIXED, RATES)]
        if not heavy and draw.random() < 0.2:
            row[1] = CANNOT
        if draw.random() < 0.05:
            row[0] = CANNOT
        self.seconds.append(row)
        self.nbytes.append(10 ** draw.uniform(3, 6.5))
        self.readers[index] = []
        for source in sources:
            self.readers[source].append(index)
        return index

    def chain(self, x: int, length: int) -> int:
        for k in range(length):
            x = self.node([x], heavy=k % 2 == 0)
        return x

    def residual(self, x: int) -> int:
        return self.node([x, self.chain(x, self.draw.randint(2, 6))])

    def branches(self, x: int) -> int:
        return self.node([self.chain(x, self.draw.randint(1, 6)) for _ in range(self.draw.randint(2, 5))])

    def dense(self, x: int) -> int:
        found = [x]
        for _ in range(self.draw.randint(4, 10)):
            found.append(self.chain(self.node(list(found)), 2))
        return self.node(found)

    def layer(self, x: int) -> int:
        norm = self.chain(x, 2)
        query, key, value = (self.node([norm], heavy=True) for _ in range(3))
        scores = self.node([query, key], heavy=True)
        masked = self.node([scores])
        self.mask.append(masked)
        attended = self.node([self.node([masked]), value], heavy=True)
        x = self.node([x, self.node([attended], heavy=True)])
        return self.node([x, self.chain(x, 5)])


def network(nodes: int, seed: int = 0) -> Problem:
    """A problem of about ``nodes`` nodes."""
    made = Network(seed)
    x = made.node([OUTSIDE])
    blocks = (lambda x: made.chain(x, made.draw.randint(3, 20)), made.residual, made.branches, made.dense, made.layer)
    while len(made.seconds) < nodes:
        x = made.draw.choices(blocks, (2, 4, 3, 1, 4))[0](x)
    flows = [Flow(OUTSIDE, tuple(made.readers[OUTSIDE]), 6e5), Flow(OUTSIDE, tuple(made.mask), 1e5)]
    for node in range(len(made.seconds)):
        flows.append(Flow(node, tuple(made.readers[node]), made.nbytes[node], output=not made.readers[node]))
    return Problem(CHOICES, made.seconds, flows, LINKS)


def limited(nodes: int, shares: Sequence[float | None], seed: int = 0) -> Problem:
    """The same with weights, and room for a share of them on the first providers."""
    problem = network(nodes, seed)
    weights = [max(0.0, (row[2] - FIXED[2]) * RATES[2] / 200 - 1e4) for row in problem.seconds]
    total = sum(weights)
    choices = [
        replace(choice, capacity=None if k >= len(shares) or shares[k] is None else total * (shares[k] or 0.0))
        for k, choice in enumerate(CHOICES)
    ]
    return Problem(choices, problem.seconds, problem.flows, LINKS, weights)


def best_of_three(make: Callable[[], Problem], work: Callable[[Problem], object]) -> float:
    found: list[float] = []
    for _ in range(3):
        problem = make()  # anew: what a problem derives from itself is part of the time
        started = time.process_time()
        work(problem)
        found.append(time.process_time() - started)
    return min(found)


def measure(nodes: int) -> list[Figure]:
    network(200)  # imports and caches
    optimise(network(200))
    placed = best_of_three(lambda: network(nodes), optimise)
    owner = optimise(network(nodes)).owner
    balanced = best_of_three(lambda: network(nodes), lambda problem: balance(problem, owner))
    problem = network(nodes)
    alone = Problem([CHOICES[2]], [[row[2]] for row in problem.seconds], problem.flows)
    single = best_of_three(lambda: Problem(alone.choices, alone.seconds, alone.flows), optimise)
    cost = problem.cost(owner)
    first = problem.cost([next(p for p, s in enumerate(row) if s < CANNOT) for row in problem.seconds])
    return [
        Figure("place by cost", placed, "s", None),
        Figure("overlap branches", balanced, "s", None),
        Figure("both", placed + balanced, "s", 2.0),
        *(
            Figure(
                f"place, room for {' and '.join('all' if share is None else f'{share:.0%}' for share in shares)}",
                best_of_three(functools.partial(limited, nodes, shares), optimise),
                "s",
                2.0,
            )
            for shares in LIMITS
        ),
        Figure("place on one provider", single, "s", 0.1),
        Figure("predicted cost against priority", cost.total / first.total, "×", 1.0),
        Figure("parts", cost.parts, "", None),
    ]


if __name__ == "__main__":
    main(__doc__, measure, ", four providers")
