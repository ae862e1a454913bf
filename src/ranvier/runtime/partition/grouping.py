"""How nodes with owners become parts: runs of one owner in an order that computes every value before its uses."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

Groups = list[tuple[int, list[int]]]  # (owner, nodes in the order they run)


def groups(
    before: Sequence[Collection[int]],
    owner: Sequence[int],
    whole: Sequence[bool],
    launch: Sequence[float],
    after: Sequence[Sequence[int]] | None = None,
) -> Groups:
    """The parts of nodes 0 … n-1, given in an order that runs; ``owner[k]`` indexes ``whole`` and ``launch``.

    ``before`` holds the nodes that each waits for; ``after``, where it is at hand, those that wait for it. A provider
    that is not ``whole`` gets its nodes one by one. Nodes change places where that costs fewer launches: an unrelated
    node of another owner does not cut a run in two.
    """
    best = _runs(range(len(owner)), owner, whole)
    owners = list(dict.fromkeys(owner))
    if len(owners) == 1 or _is_least(best, whole):
        return best
    least = launch_seconds(best, launch)
    waiting = [len(nodes) for nodes in before]
    followers = _followers(before) if after is None else after
    for first in owners:
        found = _runs(_together(followers, list(waiting), owner, first, len(whole)), owner, whole)
        seconds = launch_seconds(found, launch)
        if seconds < least:
            best, least = found, seconds
            if _is_least(best, whole):
                break
    return best


def _followers(before: Sequence[Collection[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in before]
    for k, nodes in enumerate(before):
        for each in nodes:
            found[each].append(k)
    return found


def launch_seconds(found: Groups, launch: Sequence[float]) -> float:
    """What starting all parts costs."""
    return sum(launch[owner] for owner, _ in found)


def _is_least(found: Groups, whole: Sequence[bool]) -> bool:
    """Has every owner that compiles whole parts one part only?"""
    runs = [owner for owner, _ in found if whole[owner]]
    return len(runs) == len(set(runs))


def _runs(order: Iterable[int], owner: Sequence[int], whole: Sequence[bool]) -> Groups:
    found: Groups = []
    last = -1
    nodes: list[int] = []
    for k in order:
        who = owner[k]
        if who == last:
            nodes.append(k)
        else:
            nodes = [k]
            found.append((who, nodes))
            last = who if whole[who] else -1
    return found


def _together(
    followers: Sequence[Sequence[int]], waiting: list[int], owner: Sequence[int], current: int, owners: int
) -> list[int]:
    """A topological order that stays with an owner while anything of it is ready; else as the nodes were given."""
    ready: list[list[int]] = [[] for _ in range(owners)]
    for k, count in enumerate(waiting):
        if not count:
            ready[owner[k]].append(k)  # in order, so a heap already
    order: list[int] = []
    own = ready[current]
    pop, push = heapq.heappop, heapq.heappush
    for _ in range(len(waiting)):
        if not own:
            own = min((nodes for nodes in ready if nodes), key=lambda nodes: nodes[0])
        k = pop(own)
        order.append(k)
        for follower in followers[k]:
            waiting[follower] -= 1
            if not waiting[follower]:
                push(ready[owner[follower]], follower)
    return order
