"""Steps of a part as a graph: who makes a value, who reads it, and what is the same in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ranvier.codegen.definitions.program import Definitions
from ranvier.graph.ir import Node, Value
from ranvier.providers.cuda.steps import Env, NodeStep, Step


@runtime_checkable
class Defines(Protocol):
    """A step in the place of several nodes that says itself what it computes. ``held``: constants of its own."""

    held: Mapping[Value, Any]

    def define(self, program: Definitions) -> None: ...


class Steps:
    """Steps with the tensors of their first run."""

    def __init__(self, steps: Sequence[Step], env: Env, outputs: Sequence[Value]) -> None:
        self.steps: list[Step | None] = list(steps)  # None: something else stands for it
        self.env = env
        self._outputs = set(outputs)
        self._maker: dict[Value, int] = {}
        self._users: dict[Value, list[int]] = {}
        for k, step in enumerate(steps):
            for value in step.writes:
                self._maker[value] = k
            for value in dict.fromkeys((*_operands(step), *step.shaped_by)):
                self._users.setdefault(value, []).append(k)

    def made_by(self, value: Value | None, *ops: str) -> Node | None:
        """The node that makes a value, where it is one of these operators of the standard."""
        at = None if value is None else self._maker.get(value)
        step = None if at is None else self.steps[at]
        if not isinstance(step, NodeStep) or step.node.domain or step.node.op not in ops:
            return None
        return step.node

    def place(self, value: Value) -> int:
        return self._maker[value]

    def only_user(self, value: Value, *ops: str) -> Node | None:
        """The one node that reads a value, where it is one of these operators, and the value is no result."""
        users = self._users.get(value, [])
        if len(users) != 1 or value in self._outputs:
            return None
        step = self.steps[users[0]]
        if not isinstance(step, NodeStep) or step.node.domain or step.node.op not in ops:
            return None
        return step.node

    def is_private(self, value: Value) -> bool:
        """Read once, and no result."""
        return len(self._users.get(value, [])) == 1 and value not in self._outputs

    def tensor(self, value: Value) -> Any:
        return self.env.tensors.get(value)

    def is_fixed(self, value: Value, depth: int = 16) -> bool:
        """The same in every run of these sizes."""
        if value.const is not None or value in self.env.host:
            return True
        at = self._maker.get(value)
        step = None if at is None else self.steps[at]
        if not depth or not isinstance(step, NodeStep) or step.stops:
            return False
        return all(self.is_fixed(v, depth - 1) for v in _operands(step))

    def put(self, step: Step, at: int, instead_of: Sequence[Value]) -> None:
        """A step at the place of one of those that made these values, which go."""
        for value in instead_of:
            self.steps[self._maker[value]] = None
        self.steps[at] = step

    def left(self) -> list[Step]:
        return [step for step in self.steps if step is not None]


def _operands(step: Step) -> tuple[Value, ...]:
    """What is read, constants in a form of their own too."""
    if isinstance(step, NodeStep):
        return tuple(v for v in step.node.inputs if v is not None)
    return step.reads


def number(value: Value | None) -> float | None:
    """The one element of a constant."""
    if value is None or value.const is None or value.const.size != 1:
        return None
    return float(value.const.numpy().reshape(-1)[0])


__all__ = ["Defines", "Steps", "number"]
