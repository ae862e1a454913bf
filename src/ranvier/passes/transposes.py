"""Cancelling transposes: those that keep the order, pairs, and pairs with elementwise work between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.passes.base import PassContext
from ranvier.passes.cancel_rules import CHANGED, Outcome, cancels
from ranvier.passes.edit import builder, prune
from ranvier.passes.facts import is_elementwise, only_use, rank_of, shape_of

REGION = 16  # nodes between two transposes; keeps the search linear over the graph
Perm = tuple[int, ...]


def perm_of(node: Node) -> Perm | None:
    """The order a Transpose makes; None where it is the default one and the rank is unknown."""
    perm = node.attrs.get("perm")
    if perm:
        return tuple(perm)
    rank = rank_of(node.inputs[0])
    return None if rank is None else tuple(reversed(range(rank)))


def _transposer(value: Value | None) -> Node | None:
    node = value.producer if value is not None else None
    return node if node is not None and node.op == "Transpose" and not node.domain else None


@cancels("Transpose")
def keeps_order(node: Node, ctx: PassContext) -> Outcome:
    perm = perm_of(node)
    return node.inputs[0] if perm is not None and perm == tuple(range(len(perm))) else None


@cancels("Transpose")
def transposes_twice(node: Node, ctx: PassContext) -> Outcome:
    inner = _transposer(node.inputs[0])
    if inner is None:
        return None
    first, second = perm_of(inner), perm_of(node)
    if first is None or second is None or len(first) != len(second):
        return None
    node.attrs["perm"] = tuple(first[axis] for axis in second)
    node.set_input(0, inner.inputs[0])
    return CHANGED


@cancels("Transpose")
def meets_its_inverse(node: Node, ctx: PassContext) -> Outcome:
    """Elementwise nodes between a transpose and its inverse work on the untransposed values as well."""
    perm = perm_of(node)
    operand = node.inputs[0]
    if perm is None or operand is None or operand.producer is None or not _passes_order(operand.producer):
        return None
    region = _Region(perm)
    if not region.enter(operand) or region.cancelled == 0:
        return None
    region.rewrite()
    return operand


@cancels("Add", "Sub", "Mul", "Div")
def shares_order(node: Node, ctx: PassContext) -> Outcome:
    """Two operands transposed alike: the result is transposed instead, once."""
    first, second = (_transposer(v) for v in node.inputs)
    if first is None or second is None or first is second or not _passes_order(node):
        return None
    perm = perm_of(first)
    if perm is None or perm != perm_of(second) or not all(only_use(n.output) for n in (first, second)):
        return None
    op = builder(node, "cancel")
    combined = op.node(node.op, [first.inputs[0], second.inputs[0]], node.attrs, version=node.version)
    return op.Transpose(combined.output, perm=perm)


class _Region:
    """The elementwise nodes above a Transpose, up to transposes that it undoes, and constants."""

    def __init__(self, perm: Perm) -> None:
        self.perm = perm
        self.nodes: list[Node] = []
        self.cancelled = 0

    def enter(self, value: Value) -> bool:
        """Take the producer of ``value`` in, and all it needs; False where something stands in the way."""
        node = value.producer
        if node is None or only_use(value) is None or len(node.outputs) != 1 or not _passes_order(node):
            return False
        if any(node is each for each in self.nodes):
            return True
        if len(self.nodes) == REGION:
            return False
        if rank_of(value) != len(self.perm):
            return False
        self.nodes.append(node)
        return all(self._admits(node, operand) for operand in node.inputs if operand is not None)

    def _admits(self, node: Node, operand: Value) -> bool:
        if self._is_undone(operand):
            self.cancelled += 1
            return True
        if operand.const is not None:
            return operand.const.size == 1 or node.op not in _SCALAR_PARAMETERS
        return shape_of(operand) == () or self.enter(operand)

    def _is_undone(self, value: Value) -> bool:
        inner = _transposer(value)
        first = perm_of(inner) if inner is not None else None
        if first is None or len(first) != len(self.perm):
            return False
        return all(first[axis] == place for place, axis in enumerate(self.perm))

    def rewrite(self) -> None:
        inside = {id(node) for node in self.nodes}
        for node in self.nodes:
            for position, operand in enumerate(node.inputs):
                if operand is None or (operand.producer is not None and id(operand.producer) in inside):
                    continue
                if operand.const is not None:
                    node.set_input(position, self._transposed(node, operand))
                elif shape_of(operand) != ():
                    inner = _transposer(operand)
                    assert inner is not None
                    node.set_input(position, inner.inputs[0])
                    prune([operand])
            result = node.output
            if isinstance(result.type, TensorType) and result.type.shape is not None:
                result.type = TensorType(result.type.dtype, tuple(result.type.shape[axis] for axis in self.perm))

    def _transposed(self, node: Node, constant: Value) -> Value:
        """The constant as it looks from the other side; one element looks the same."""
        assert constant.const is not None
        if constant.const.size == 1:
            return constant
        array = constant.const.numpy()
        full = array.reshape((1,) * (len(self.perm) - array.ndim) + array.shape)
        return builder(node, "cancel").constant(_trimmed(full.transpose(self.perm), array.ndim))


def _trimmed(array: np.ndarray, rank: int) -> np.ndarray:
    """Without the leading dimensions of size 1 that exceed ``rank``, where broadcasting makes them anyway."""
    shape: Sequence[int] = array.shape
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return np.ascontiguousarray(array).reshape(shape)


# Elementwise in their first operand as long as the others hold one element.
_SCALAR_PARAMETERS = frozenset({"Clip", "QuantizeLinear", "DequantizeLinear"})


def _passes_order(node: Node) -> bool:
    """The node treats every position alike, so that transposing before or after it is the same."""
    if node.domain:
        return False
    if node.op in ("QuantizeLinear", "DequantizeLinear"):
        return all(v is not None and v.const is not None and v.const.size == 1 for v in node.inputs[1:])
    return is_elementwise(node) and "axis" not in node.attrs and not node.has_subgraphs
