"""The order in which one thread starts the steps of a schedule, so that devices work while the host does.

A step on a device returns before the work is done; a step on the host does not, and one that reads a device's result
waits for it. So whatever a device can begin is begun at once, and the host takes its own steps in the order in which
the schedule has them start: those that wait for a device come last by themselves.
"""

from __future__ import annotations

import heapq

from ranvier.runtime.partition.problem import HOST, Problem
from ranvier.runtime.partition.schedule import Schedule


def order_of_issue(problem: Problem, schedule: Schedule) -> list[int]:
    """Positions of the schedule's steps in the order to start them. The steps of a wave stand together, lane by lane:
    run one after the other they are right too."""
    steps = schedule.steps
    first: dict[int, int] = {}  # step of each wave
    unit = [k if step.wave < 0 else first.setdefault(step.wave, k) for k, step in enumerate(steps)]
    members: dict[int, list[int]] = {}
    for k in sorted(range(len(steps)), key=lambda k: steps[k].lane if steps[k].wave >= 0 else 0):
        members.setdefault(unit[k], []).append(k)
    before: dict[int, set[int]] = {u: set() for u in members}
    followers: dict[int, list[int]] = {u: [] for u in members}
    for k, step in enumerate(steps):
        for other in step.after:
            if unit[other] != unit[k] and unit[other] not in before[unit[k]]:
                before[unit[k]].add(unit[other])
                followers[unit[other]].append(unit[k])
    waiting = {u: len(earlier) for u, earlier in before.items()}
    ready: list[tuple[bool, float, int]] = []

    def enter(u: int) -> None:
        heapq.heappush(ready, (_waits(problem, schedule, u), steps[u].start, u))

    for u, count in waiting.items():
        if not count:
            enter(u)
    order: list[int] = []
    while ready:
        u = heapq.heappop(ready)[2]
        order += members[u]
        for other in followers[u]:
            waiting[other] -= 1
            if not waiting[other]:
                enter(other)
    return order


def _waits(problem: Problem, schedule: Schedule, k: int) -> bool:
    """Does the thread that starts a step wait for work: the step's own, or that of another device?"""
    space = problem.space[schedule.steps[k].owner]
    if schedule.steps[k].wave >= 0:
        return True
    before = {problem.space[schedule.steps[other].owner] for other in schedule.steps[k].after}
    return space == HOST or not before <= {HOST, space}
