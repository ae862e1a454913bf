"""What placing nodes costs, as plain data: no graph, no provider, nothing but numbers.

Nodes are numbered in an order that runs. A placement names a provider for every node; its cost is the sum of
what the nodes take, what the transfers take and what starting the parts takes (:class:`Cost`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from ranvier.errors import InvalidConfig
from ranvier.records import dataclass
from ranvier.runtime.partition.grouping import Groups, groups, launch_seconds

if TYPE_CHECKING:
    from ranvier.runtime.partition.moving import Moving

HOST = 0  # the memory space of graph inputs and outputs
OUTSIDE = -1  # the producer of a graph input
CANNOT = math.inf
MANY = 500  # nodes from which on transfers are added up by arrays


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one memory to another."""

    latency: float  # seconds
    bandwidth: float = math.inf  # bytes per second

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Choice:
    """One provider as the optimiser sees it.

    Providers with the same ``space`` read each other's results without a transfer. Providers with the same
    ``engine`` compete for its ``lanes``: how many parts run at once there without slowing each other down.
    """

    name: str
    space: int = HOST
    launch: float = 0.0  # seconds to start a part
    whole_parts: bool = True  # False: every node is a part of its own
    capacity: float | None = None  # bytes of weights it can hold
    engine: int | None = None  # None: one of its own
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Flow:
    """One value: who makes it, who reads it. Constants are no flows; their bytes are weights of nodes."""

    producer: int
    consumers: tuple[int, ...]
    nbytes: float
    output: bool = False  # must end on the host


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted seconds of a placement, run part after part."""

    compute: float
    transfer: float
    launch: float
    parts: int

    @property
    def total(self) -> float:
        return self.compute + self.transfer + self.launch


@dataclass(frozen=True)
class Problem:
    """Everything the optimiser reads.

    ``seconds[node][provider]`` is infinite where the provider cannot run the node or must not. A link that is not
    given goes through the host. ``order`` holds pairs of nodes that must keep their order although no value binds them.
    """

    choices: Sequence[Choice]
    seconds: Sequence[Sequence[float]]
    flows: Sequence[Flow]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    weights: Sequence[float] = ()  # bytes that come along with a node; empty: none
    order: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        return len(self.seconds)

    @cached_property
    def space(self) -> list[int]:
        return [choice.space for choice in self.choices]

    @cached_property
    def whole(self) -> list[bool]:
        return [choice.whole_parts for choice in self.choices]

    @cached_property
    def launch(self) -> list[float]:
        return [choice.launch for choice in self.choices]

    @cached_property
    def limited(self) -> bool:
        """Can any provider be overfull at all?"""
        total = sum(self.weights)
        return any(choice.capacity is not None and choice.capacity < total for choice in self.choices)

    @cached_property
    def allowed(self) -> list[list[int]]:
        """The providers of each node that can run it."""
        return [[p for p, seconds in enumerate(row) if seconds < CANNOT] for row in self.seconds]

    @cached_property
    def before(self) -> list[set[int]]:
        """The nodes that must have run before each node starts."""
        found: list[set[int]] = [set() for _ in self.seconds]
        for flow in self.flows:
            if flow.producer != OUTSIDE:
                for consumer in flow.consumers:
                    found[consumer].add(flow.producer)
        for first, second in self.order:
            found[second].add(first)
        return found

    @cached_property
    def after(self) -> list[list[int]]:
        """The nodes that wait for each node."""
        found: list[list[int]] = [[] for _ in self.seconds]
        for node, earlier in enumerate(self.before):
            for each in earlier:
                found[each].append(node)
        return found

    @cached_property
    def touching(self) -> list[list[int]]:
        """The flows each node makes or reads."""
        found: list[list[int]] = [[] for _ in self.seconds]
        for index, flow in enumerate(self.flows):
            if flow.producer != OUTSIDE:
                found[flow.producer].append(index)
            for consumer in dict.fromkeys(flow.consumers):
                found[consumer].append(index)
        return found

    @cached_property
    def _links(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Latency and seconds per byte for every pair of spaces in use; through the host where no link is given."""
        spaces = sorted({HOST, *self.space})
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for a in spaces:
            for b in spaces:
                legs = [(a, b)] if (a, b) in self.links else [(a, HOST), (HOST, b)]
                steps = [leg for leg in legs if leg[0] != leg[1]] if a != b else []
                missing = [leg for leg in steps if leg not in self.links]
                if missing:
                    raise InvalidConfig(f"no link from memory space {missing[0][0]} to {missing[0][1]}")
                ways = [self.links[leg] for leg in steps]
                found[a, b] = sum(way.latency for way in ways), sum(1 / way.bandwidth for way in ways)
        return found

    def rate(self, source: int, target: int) -> tuple[float, float]:
        """Latency and seconds per byte from one memory space to another."""
        return self._links[source, target]

    def moving(self, source: int, target: int, nbytes: float) -> float:
        """Seconds to bring a value from one memory space to another."""
        latency, per_byte = self._links[source, target]
        return latency + nbytes * per_byte

    def reached(self, flow: Flow, owner: Sequence[int]) -> tuple[int, list[int]]:
        """The memory space a value is made in, and the others it must reach, each once."""
        space = self.space
        source = HOST if flow.producer == OUTSIDE else space[owner[flow.producer]]
        targets = {space[owner[consumer]] for consumer in flow.consumers}
        if flow.output:
            targets.add(HOST)
        targets.discard(source)
        return source, sorted(targets) if targets else []

    def flow_seconds(self, flow: Flow, owner: Sequence[int]) -> float:
        """What the transfers of one value take."""
        source, targets = self.reached(flow, owner)
        total = 0.0
        for target in targets:
            latency, per_byte = self._links[source, target]
            total += latency + flow.nbytes * per_byte
        return total

    def transfer_seconds(self, owner: Sequence[int]) -> float:
        """What all transfers of a placement take."""
        if self.size < MANY:
            return sum(self.flow_seconds(flow, owner) for flow in self.flows)
        return float(self._moving.seconds(owner).sum())

    @cached_property
    def _moving(self) -> Moving:
        from ranvier.runtime.partition.moving import Moving  # NumPy is needed for large problems only

        return Moving(self)

    def parts(self, owner: Sequence[int]) -> Groups:
        """The parts of a placement, as the runtime forms them."""
        return groups(self.before, owner, self.whole, self.launch, self.after)

    def overfull(self, owner: Sequence[int]) -> list[tuple[str, float, float]]:
        """(provider, capacity, bytes) of every provider that is given more weights than it can hold."""
        if not self.limited:
            return []
        held = [0.0] * len(self.choices)
        for node, who in enumerate(owner):
            held[who] += self.weights[node]
        return [
            (choice.name, choice.capacity, nbytes)
            for choice, nbytes in zip(self.choices, held)
            if choice.capacity is not None and nbytes > choice.capacity
        ]

    def cost(self, owner: Sequence[int]) -> Cost:
        """What a placement costs, its memory aside."""
        compute = sum(row[who] for row, who in zip(self.seconds, owner))
        found = self.parts(owner) if self.size else []
        return Cost(compute, self.transfer_seconds(owner), launch_seconds(found, self.launch), len(found))
