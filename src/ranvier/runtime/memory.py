"""The memory planner: an order of nodes that keeps few bytes alive, and an offset in one arena for every buffer.

Nothing here knows kernels or providers; lifetimes in, offsets out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ranvier.graph.ir import Graph, Node, Value, topological_order

ALIGNMENT = 64
_PAIRWISE_UP_TO = 512  # beyond this many buffers the quadratic placement is not tried


@dataclass(frozen=True)
class Lifetime:
    """One buffer: its size, and the steps (both inclusive) between which it must keep its content."""

    nbytes: int
    first: int
    last: int
    reuse: tuple[int, ...] = ()  # buffers whose memory it may take over: they end at the step where it begins


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets by buffer, the size of the arena, and what it is measured against."""

    offsets: tuple[int, ...]
    arena: int
    total: int  # the sum of all buffers: what no reuse at all would take
    lower_bound: int  # the most bytes alive at one step: what a perfect plan would take
    shared: int = 0  # buffers that took over another one's memory


@dataclass
class _Block:
    """Buffers that stand in the same place one after another."""

    nbytes: int
    first: int
    last: int
    members: list[int] = field(default_factory=list)
    offset: int = 0


def plan_memory(lifetimes: Sequence[Lifetime]) -> MemoryPlan:
    """Offsets so that no two buffers alive at the same time overlap, except where one takes over from another."""
    blocks, shared = _merge(lifetimes)
    best = _place_in_time(blocks)
    if len(blocks) <= _PAIRWISE_UP_TO:
        best = min(best, _place_by_size(blocks), key=lambda placed: placed[1])
    placement, arena = best
    offsets = [0] * len(lifetimes)
    for block, offset in zip(blocks, placement):
        for member in block.members:
            offsets[member] = offset
    total = sum(_aligned(each.nbytes) for each in lifetimes)
    return MemoryPlan(tuple(offsets), arena, total, _most_alive(blocks), shared)


def _merge(lifetimes: Sequence[Lifetime]) -> tuple[list[_Block], int]:
    blocks: list[_Block] = []
    home: dict[int, _Block] = {}
    shared = 0
    for k in sorted(range(len(lifetimes)), key=lambda k: lifetimes[k].first):
        each = lifetimes[k]
        nbytes = _aligned(each.nbytes)
        for candidate in each.reuse:
            block = home.get(candidate)
            # only the block's present holder may hand over, and only to something that fits
            if (
                block is not None
                and block.members[-1] == candidate
                and lifetimes[candidate].first < each.first == block.last
                and nbytes <= block.nbytes
            ):
                block.members.append(k)
                block.last = each.last
                home[k] = block
                shared += 1
                break
        else:
            home[k] = _Block(nbytes, each.first, each.last, [k])
            blocks.append(home[k])
    return blocks, shared


def _place_by_size(blocks: Sequence[_Block]) -> tuple[list[int], int]:
    """Largest first, each at the lowest offset that is free throughout its life."""
    offsets = [0] * len(blocks)
    placed: list[int] = []
    arena = 0
    for k in sorted(range(len(blocks)), key=lambda k: (-blocks[k].nbytes, blocks[k].first)):
        block = blocks[k]
        neighbours = sorted(
            (offsets[p], offsets[p] + blocks[p].nbytes)
            for p in placed
            if blocks[p].first <= block.last and block.first <= blocks[p].last
        )
        at = 0
        for start, end in neighbours:
            if at + block.nbytes <= start:
                break
            at = max(at, end)
        offsets[k] = at
        placed.append(k)
        arena = max(arena, at + block.nbytes)
    return offsets, arena


def _place_in_time(blocks: Sequence[_Block]) -> tuple[list[int], int]:
    """In order of birth, each into the smallest hole that holds it."""
    offsets = [0] * len(blocks)
    alive: list[tuple[int, int]] = []  # (last step, block)
    occupied: list[tuple[int, int]] = []  # (offset, end), sorted
    arena = 0
    for k in sorted(range(len(blocks)), key=lambda k: blocks[k].first):
        block = blocks[k]
        while alive and alive[0][0] < block.first:
            _, gone = heapq.heappop(alive)
            occupied.remove((offsets[gone], offsets[gone] + blocks[gone].nbytes))
        at, best = -1, -1
        edge = 0
        for start, end in occupied:
            hole = start - edge
            if hole >= block.nbytes and (best < 0 or hole < best):
                at, best = edge, hole
            edge = max(edge, end)
        offsets[k] = at if at >= 0 else edge
        occupied.append((offsets[k], offsets[k] + block.nbytes))
        occupied.sort()
        heapq.heappush(alive, (block.last, k))
        arena = max(arena, offsets[k] + block.nbytes)
    return offsets, arena


def _most_alive(blocks: Sequence[_Block]) -> int:
    events = [(b.first, b.nbytes) for b in blocks] + [(b.last + 1, -b.nbytes) for b in blocks]
    now = peak = 0
    for _, change in sorted(events):
        now += change
        peak = max(peak, now)
    return peak


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


# -- order ----------------------------------------------------------------------------------------------------------


def order_for_memory(graph: Graph, nbytes: Callable[[Value], int]) -> list[Node]:
    """A topological order with a low peak of live bytes: the better of the given one and a greedy one."""
    given = topological_order(graph)
    greedy = _greedy_order(graph, given, nbytes)
    return min((given, greedy), key=lambda order: peak_bytes(order, graph, nbytes))


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
