"""What the transfers of a placement take, all values at once: for large problems, where one by one takes too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.runtime.partition.problem import HOST, OUTSIDE, Problem

Array = np.ndarray[Any, Any]


class Moving:
    """The values of a problem as arrays."""

    def __init__(self, problem: Problem) -> None:
        flows = problem.flows
        spaces = sorted({HOST, *problem.space})
        place = {space: k for k, space in enumerate(spaces)}
        self.count = len(spaces)
        self.host = place[HOST]
        self.space: Array = np.array([place[space] for space in problem.space], np.intp)
        self.latency: Array = np.array([[problem.rate(a, b)[0] for b in spaces] for a in spaces])
        self.per_byte: Array = np.array([[problem.rate(a, b)[1] for b in spaces] for a in spaces])
        self.producer: Array = np.array([flow.producer for flow in flows], np.intp)
        self.inside: Array = self.producer != OUTSIDE
        self.nbytes: Array = np.array([flow.nbytes for flow in flows], np.float64)
        self.outputs: Array = np.flatnonzero(np.array([flow.output for flow in flows], np.bool_))
        self.consumers: Array = np.array([node for flow in flows for node in flow.consumers], np.intp)
        self.read: Array = np.repeat(np.arange(len(flows)), [len(flow.consumers) for flow in flows])

    def seconds(self, owner: Sequence[int]) -> Array:
        """By value, what bringing it to all memories takes in which it is read."""
        space = self.space[np.asarray(owner, np.intp)]
        source = np.where(self.inside, space[self.producer], self.host)
        reached = np.zeros((len(source), self.count), np.bool_)
        reached[self.read, space[self.consumers]] = True
        reached[self.outputs, self.host] = True
        reached[np.arange(len(source)), source] = False
        each = self.latency[source] + self.nbytes[:, None] * self.per_byte[source]
        found: Array = np.where(reached, each, 0.0).sum(1)
        return found
