"""A part as steps: callables with the values they read and write.

A step computes with tensors of the device. What only shapes others (sizes, axes, pads) is computed by the operators'
NumPy bodies on the host, once for given sizes and given contents of the operands that shape: see
:class:`~ranvier.providers.cuda.variant.Variant`. Whoever has something better than a function of torch for a run of
nodes puts a step of its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import numpy as np

from ranvier.errors import KernelError, RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import Same
from ranvier.graph.types import TensorType
from ranvier.ops import registry
from ranvier.providers.base import Array, Subgraph
from ranvier.providers.cuda.constants import Constants
from ranvier.providers.cuda.failures import PROVIDER, is_lost, is_out_of_memory
from ranvier.providers.cuda.library import as_bits, fitted, torch, torch_type, widened
from ranvier.providers.cuda.table import Call, Lowering, draws_alike, lowering_of
from ranvier.providers.foreign import needed_on_host


class Env:
    """One run: tensors and host arrays by value, and the conditions on which the results are right."""

    __slots__ = ("constants", "device", "host", "low", "made", "messages", "overwritten", "requirements", "tensors")

    def __init__(self, device: Any, low: Any, host: dict[Value, Array], constants: Mapping[Any, list[Any]]) -> None:
        self.device = device
        self.low = low
        self.tensors: dict[Value, Any] = {}
        self.host = host
        self.constants = constants  # tensors that steps made from host arrays in an earlier run of the same sizes
        self.made: dict[Any, list[Any]] = {}
        self.requirements: list[Any] = []
        self.messages: list[str] = []
        self.overwritten: frozenset[Value] = frozenset()  # operands in whose memory the caller wants results


class Step(Protocol):
    """Part of a run. ``stops``: why it cannot be captured; empty where it can."""

    label: str
    reads: tuple[Value, ...]  # tensors
    shaped_by: tuple[Value, ...]  # arrays of the host
    writes: tuple[Value, ...]
    stops: str

    def run(self, env: Env) -> None: ...


class NodeStep:
    """One node by a function of the table."""

    def __init__(self, node: Node, lowering: Lowering, prepared: Mapping[int, Any]) -> None:
        self.node = node
        self.label = node.name or node.op
        self.stops = "" if draws_alike(node) and "seed" in node.attrs else lowering.stops  # those are drawn once
        self.writes = tuple(node.outputs)
        given = list(enumerate(node.inputs))
        self.reads = tuple(v for k, v in given if v is not None and k not in lowering.host and k not in prepared)
        self.shaped_by = tuple(v for k, v in given if v is not None and k in lowering.host)
        self._lowering = lowering
        self.prepared = dict(prepared)
        self._types = [_torch_type(v) for v in node.outputs]

    def run(self, env: Env) -> None:
        call = Call(self.node, env.device, env.low, env.constants.get(self))
        if env.overwritten:
            call.overwrites = frozenset(k for k, v in enumerate(self.node.inputs) if v in env.overwritten)
        operands = [self._operand(k, v, env) for k, v in enumerate(self.node.inputs)]
        try:
            results = self._lowering.function(call, *operands)
        except RanvierError:
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_lost(error):
                raise
            what = f"{self.node.op} {self.label!r} failed on {PROVIDER}: {type(error).__name__}: {error}"
            raise KernelError(what, node=self.label, op=self.node.op, provider=PROVIDER) from error
        if call.made:
            env.made[self] = call.made
        bits = self._lowering.moves
        for value, dtype, result in zip(
            self.writes, self._types, results if isinstance(results, tuple) else (results,)
        ):
            if result is not None:
                env.tensors[value] = result if dtype is None else fitted(result, dtype, bits=bits)
        for condition, message in call.requirements:
            env.requirements.append(condition)
            env.messages.append(message)

    def _operand(self, position: int, value: Value | None, env: Env) -> Any:
        if value is None:
            return None
        if position in self._lowering.host:
            return env.host[value]
        if position in self.prepared:
            return self.prepared[position]
        found = adapted(env.tensors[value], self._lowering)
        prepare = self._lowering.prepares.get(position)
        return found if prepare is None else prepare(found, self.node)


class HostStep:
    """One node by the operator's NumPy body; it reads no tensor but its sizes."""

    stops = ""

    def __init__(self, node: Node, opsets: Mapping[str, int], *, sizes_only: bool) -> None:
        self.node = node
        self.label = node.name or node.op
        self.sizes_of = tuple(v for v in node.inputs if v is not None) if sizes_only else ()
        self.reads: tuple[Value, ...] = ()
        self.shaped_by = () if sizes_only else tuple(v for v in node.inputs if v is not None)
        self.writes = tuple(node.outputs)
        self._opsets = opsets

    def run(self, env: Env) -> None:
        operands = [None if v is None else self._operand(v, env) for v in self.node.inputs]
        definition = registry.get(self.node.domain, self.node.op, self.node.version)
        call = registry.Call((True,) * len(self.writes), self.node.version, node=self.node, opsets=self._opsets)
        with np.errstate(all="ignore"):
            results = definition.apply(operands, dict(self.node.attrs), call, None)
        env.host.update(zip(self.writes, results))

    def _operand(self, value: Value, env: Env) -> Array:
        found = env.host.get(value)
        if found is None:  # of which only the shape is looked at
            found = np.broadcast_to(np.zeros((), np.int8), tuple(env.tensors[value].shape))
        return found


def part_steps(
    part: Subgraph, opsets: Mapping[str, int], constants: Constants
) -> tuple[list[NodeStep | HostStep], set[Value]]:
    """The steps of a part, one for each node, and the values whose content the host needs. Constants that a
    function wants in another form are put into it here, once."""
    lowerings = [(node, _known(node)) for node in part.nodes]
    on_host = needed_on_host(lowerings)
    steps: list[NodeStep | HostStep] = []
    for node, lowering in lowerings:
        if lowering.numpy or any(v in on_host for v in node.outputs):
            if lowering.stops:  # what the host computes is kept, and this differs from run to run
                raise KernelError(
                    f"sizes follow from it: {lowering.stops}", node=node.name, op=node.op, provider=PROVIDER
                )
            steps.append(HostStep(node, opsets, sizes_only=lowering.numpy))
            continue
        prepared = {
            position: constants.form(value, _form(node, lowering, position), _preparing(node, lowering, prepare))
            for position, prepare in lowering.prepares.items()
            if (value := node.input(position)) is not None and value in constants
        }
        steps.append(NodeStep(node, lowering, prepared))
    return steps, on_host


def _preparing(node: Node, lowering: Lowering, prepare: Callable[[Any, Node], Any]) -> Callable[[Any], Any]:
    return lambda tensor: prepare(adapted(tensor, lowering), node)


def _form(node: Node, lowering: Lowering, position: int) -> Hashable | None:
    """All that an operand's form may depend on beside its numbers; None where attributes cannot be told apart."""
    attrs = [(name, tuple(attr) if isinstance(attr, list) else attr) for name, attr in sorted(node.attrs.items())]
    form = (Same(lowering), position, node.domain, node.op, *attrs)
    try:
        hash(form)
    except TypeError:
        return None
    return form


def adapted(tensor: Any, lowering: Lowering) -> Any:
    """An operand as a function wants it."""
    if lowering.moves:
        return as_bits(tensor)
    if lowering.wide and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.to(torch.float32)
    return widened(tensor)


def _torch_type(value: Value) -> Any:
    known = value.type.dtype if isinstance(value.type, TensorType) else None
    return None if known is None else torch_type(known)


def _known(node: Node) -> Lowering:
    found = lowering_of(node)
    if found is None:
        raise KernelError("it is not lowered to torch", node=node.name, op=node.op, provider=PROVIDER)
    return found


__all__ = ["Env", "HostStep", "NodeStep", "Step", "adapted", "part_steps"]
