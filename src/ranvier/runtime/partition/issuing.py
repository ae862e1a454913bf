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
    """Positions of the schedule's steps in the order to start them."""
    steps = schedule.steps
    waiting = [len(step.after) for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for k, step in enumerate(steps):
        for other in step.after:
            followers[other].append(k)
    ready: list[tuple[bool, float, int]] = []

    def enter(k: int) -> None:
        heapq.heappush(ready, (_waits(problem, schedule, k), steps[k].start, k))

    for k, count in enumerate(waiting):
        if not count:
            enter(k)
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)[2]
        order.append(k)
        for other in followers[k]:
            waiting[other] -= 1
            if not waiting[other]:
                enter(other)
    return order


def _waits(problem: Problem, schedule: Schedule, k: int) -> bool:
    """Does the thread that starts a step wait for work: the step's own, or that of another device?"""
    space = problem.space[schedule.steps[k].owner]
    before = {problem.space[schedule.steps[other].owner] for other in schedule.steps[k].after}
    return space == HOST or not before <= {HOST, space}
