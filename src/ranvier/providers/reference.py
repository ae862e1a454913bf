"""The reference provider: every declared operator by its NumPy body, one node at a time.

It is the oracle that other providers are tested against and the last link of every chain, so it takes whatever has
a declaration and a body.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ranvier.devices import CPU, Device
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.ops.allocation import check_result
from ranvier.providers.base import (
    BodyRunner,
    Claim,
    CompileContext,
    Decline,
    GraphView,
    KernelStats,
    MemoryUsage,
    ProviderCapability,
    Subgraph,
)
from ranvier.providers.memory import PoolAllocator
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReferenceOptions:
    """The reference has no options."""


class ReferenceProvider:
    name: ClassVar[str] = "reference"
    aliases: ClassVar[tuple[str, ...]] = ("numpy",)
    Options: ClassVar[type] = ReferenceOptions

    def __init__(self) -> None:
        self.device: Device = CPU
        self._allocator = PoolAllocator(name=self.name)

    def available(self) -> str | None:
        return None

    def capability(self) -> ProviderCapability:
        return ProviderCapability(
            whole_parts=False,
            last_resort=True,
            asks_for_bodies=True,
            threads="one",
            notes="NumPy bodies of all declared operators",
        )

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]:
        for node in view:
            if registry.find(node.domain, node.op, node.version) is None:
                yield Decline(node, _missing_reason(node))
            else:
                yield Claim((node,))

    def compile(self, part: Subgraph, ctx: CompileContext) -> ReferenceKernel:
        (node,) = part.nodes
        return (BranchKernel if _is_branch(node) else ReferenceKernel)(node, part, ctx)

    def allocator(self) -> PoolAllocator:
        return self._allocator

    def close(self) -> None:
        self._allocator.trim()


def _missing_reason(node: Node) -> str:
    other = [d.since for d in registry.declared() if (d.domain, d.name) == (node.domain, node.op)]
    if other:
        return f"declared for versions {', '.join(map(str, other))}, not for {node.version}"
    return "no operator of this name is declared"


class ReferenceKernel:
    """One node bound to its body."""

    def __init__(self, node: Node, part: Subgraph, ctx: CompileContext) -> None:
        self.node = node
        self.definition = registry.get(node.domain, node.op, node.version)
        self._attrs = dict(node.attrs)
        # where each operand stands among the part's inputs; None for an optional one that was left out
        where = {value: k for k, value in enumerate(part.inputs)}
        self._operands = [None if v is None else where[v] for v in node.inputs]
        self._bodies: dict[int, BodyRunner] = {id(g): ctx.body(g) for g in node.subgraphs()}
        self._captures: list[tuple[Value, int]] = [(v, where[v]) for v in node.captures()] if self._bodies else []
        made = set(part.outputs)
        self._wanted = tuple(v in made for v in node.outputs)
        self._positions = [k for k, v in enumerate(node.outputs) if v in made]
        self._opsets = ctx.opsets
        self._call = self._new_call()
        self._checked = False
        self._elementwise = "elementwise" in self.definition.traits
        self._calls, self._seconds = 0, 0.0

    def bodies(self) -> Sequence[BodyRunner]:
        return tuple(self._bodies.values())

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        call = self._call
        if self._bodies:
            call = self._new_call()
            captured = {value: inputs[k] for value, k in self._captures}
            call.run = lambda graph, given: self._bodies[id(graph)](given, captured)
        operands = [None if k is None else inputs[k] for k in self._operands]
        out = outputs[0] if outputs and self._positions[0] == 0 else None
        if not self._checked:  # what is wrong with a node is said when it runs, and looked for once
            self.definition.check(len(operands), self._attrs)
            self._checked = True
        with np.errstate(all="ignore"):
            results = self.definition.apply(operands, self._attrs, call, out)
        for k, position in enumerate(self._positions):
            if position >= len(results):
                name = self.definition.name
                raise InvalidValue(f"{name}: gave {len(results)} results, output {position} is used", op=name)
            _hand_out(results[position], outputs, k, operands)
        self._count(time.perf_counter() - started)

    def _count(self, seconds: float) -> None:
        self._calls += 1  # without a lock: the interpreter does not change threads within either of these
        self._seconds += seconds

    @property
    def source(self) -> str:
        return _source(self.definition)

    def _new_call(self) -> registry.Call:
        return registry.Call(self._wanted, self.node.version, node=self.node, opsets=self._opsets)

    def in_place(self, output: int, input: int) -> bool:
        if len(self._positions) != 1:
            return False  # a later result may still be a view of the operand
        if not self.definition.takes_out or self._positions[output] != 0:
            return True  # results are complete before they are copied into the buffer
        if not self._elementwise:
            return False
        operand = next((v for v, k in zip(self.node.inputs, self._operands) if k == input), None)
        result = self.node.outputs[0]
        return (
            operand is not None
            and isinstance(operand.type, TensorType)
            and isinstance(result.type, TensorType)
            and operand.type == result.type
        )

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage()

    def stats(self) -> KernelStats:
        return KernelStats(self._calls, self._seconds)


class BranchKernel(ReferenceKernel):
    """An If: all there is to find out is which body runs. Models whose every call asks have it as the shortest way."""

    def __init__(self, node: Node, part: Subgraph, ctx: CompileContext) -> None:
        super().__init__(node, part, ctx)
        condition = self._operands[0]
        assert condition is not None
        self.condition = condition
        self._branches = [self._bodies[id(self._attrs[name])] for name in ("else_branch", "then_branch")]

    def branch(self, truth: bool) -> BodyRunner:
        return self._branches[truth]

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
        condition = inputs[self.condition]
        if not isinstance(condition, np.ndarray) or condition.size != 1:
            super().__call__(inputs, outputs, workspace, dims)  # and say what is wrong
            return
        body = self._branches[bool(condition.item())]
        results = body((), {value: inputs[k] for value, k in self._captures})
        for k, position in enumerate(self._positions):
            result = results[position]
            check_result(result, "If")
            _hand_out(result, outputs, k, inputs)  # a body may give what it captured
        self._count(time.perf_counter() - started)


def _is_branch(node: Node) -> bool:
    """Whether a node is an If as it should be, and means what the standard says."""
    if node.op != "If" or len(node.inputs) != 1:
        return False
    from ranvier.ops.flow.control import if_  # only here: few models have one

    if registry.get(node.domain, node.op, node.version) is not if_:
        return False
    bodies = [node.attrs.get(name) for name in ("then_branch", "else_branch")]
    return all(isinstance(body, Graph) and len(body.outputs) >= len(node.outputs) for body in bodies)


def _hand_out(result: Any, outputs: list[Any], k: int, operands: Sequence[Any]) -> None:
    """A result where it is wanted: in the buffer that is there for it, if it has its type and shape."""
    buffer = outputs[k]
    if buffer is None:
        outputs[k] = _owned(result, operands)
    elif result is buffer:
        pass
    elif isinstance(result, np.ndarray) and result.shape == buffer.shape and result.dtype == buffer.dtype:
        np.copyto(buffer, result)
    else:  # the model's declared shapes were wrong; what was computed counts
        outputs[k] = _owned(result, operands)


def _owned(result: Any, operands: Sequence[Any]) -> Any:
    """The result with memory of its own: a body may return an operand or a view of one, whose buffer will be reused."""
    if isinstance(result, np.ndarray):
        if result.base is not None:
            return result.copy()
        for x in operands:
            if x is result:
                return result.copy()
        return result
    if isinstance(result, list):
        return [_owned(item, operands) for item in result]
    return result


def _source(definition: registry.OpDef) -> str:
    import inspect

    try:
        return inspect.getsource(definition.body)
    except (OSError, TypeError):
        return f"{definition.full_name}-{definition.since}"
