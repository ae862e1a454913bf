"""The memory planner: an offset in one arena for every buffer.

Nothing here knows kernels or providers; lifetimes in, offsets out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import field

from ranvier.records import dataclass

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
