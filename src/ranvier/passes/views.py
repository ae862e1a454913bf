"""Cancelling what changes only a shape, or cuts, pads and repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import Dim, Shape
from ranvier.passes.base import PassContext
from ranvier.passes.cancel_rules import CHANGED, Outcome, cancels
from ranvier.passes.edit import builder
from ranvier.passes.facts import integers_of, rank_of, same_shape, shape_of, widens

RESHAPING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})  # keep all elements, in their order
_END = 2**62  # an end at or past this stands for "to the end", whatever the size


# -- reshaping --------------------------------------------------------------------------------------------------------


def _sources(node: Node) -> Iterator[Value]:
    """Operands up the chain of reshaping nodes: the node's own, then its producer's …"""
    step: Node | None = node
    while step is not None and step.op in RESHAPING and not step.domain:
        operand = step.inputs[0]
        if operand is None:
            return
        yield operand
        step = operand.producer


def _equal_if_same_count(a: Shape | None, b: Shape | None) -> bool:
    """Equal shapes, given that both hold the same number of elements: one dimension may be unknown in both."""
    if a is None or b is None or len(a) != len(b):
        return False
    unknown = [k for k, (x, y) in enumerate(zip(a, b)) if x is None or y is None]
    if not unknown:
        return a == b
    if len(unknown) > 1:
        return False
    rest = [(x, y) for k, (x, y) in enumerate(zip(a, b)) if k != unknown[0]]
    return all(x == y and isinstance(x, int) and x > 0 for x, y in rest)


@cancels(*RESHAPING)
def restores_shape(node: Node, ctx: PassContext) -> Outcome:
    """The result has the shape of something up the chain, so it is that."""
    shape = shape_of(node.output)
    for value in _sources(node):
        if _equal_if_same_count(shape_of(value), shape):
            return value
    return None


@cancels("Squeeze", "Unsqueeze")
def inserts_and_removes(node: Node, ctx: PassContext) -> Outcome:
    """The same axes come and go; no shape needs to be known for that."""
    operand = node.inputs[0]
    inner = operand.producer if operand is not None else None
    opposite = "Squeeze" if node.op == "Unsqueeze" else "Unsqueeze"
    if inner is None or inner.op != opposite or inner.domain or len(node.inputs) != 2 or len(inner.inputs) != 2:
        return None
    axes, other = integers_of(node.inputs[1]), integers_of(inner.inputs[1])
    return inner.inputs[0] if axes is not None and other is not None and sorted(axes) == sorted(other) else None


@cancels(*RESHAPING)
def reshapes_twice(node: Node, ctx: PassContext) -> Outcome:
    """Of several reshaping nodes in a row only the last one counts."""
    chain = list(_sources(node))
    if len(chain) < 2:
        return None
    target = _target(node, chain[0], chain[-1])
    if target is None:
        return "its target depends on the shape between"
    if node.op == "Reshape" and integers_of(node.inputs[1]) == tuple(target):
        node.set_input(0, chain[-1])
        return CHANGED
    return builder(node, "cancel").Reshape(chain[-1], np.array(target, np.int64))


def _target(node: Node, operand: Value, base: Value) -> list[int] | None:
    """The result's shape as a target for a Reshape of ``base``, or None where it cannot be written down."""
    given = integers_of(node.input(1)) if node.op == "Reshape" else None
    if given is not None and not node.attrs.get("allowzero", 0):
        between, source = shape_of(operand), shape_of(base)
        resolved = [_copied(k, between, source) if size == 0 else size for k, size in enumerate(given)]
        if None not in resolved:
            return resolved  # type: ignore[return-value]
    shape = shape_of(node.output)
    if shape is None or 0 in shape:
        return None
    sizes = [d if isinstance(d, int) else -1 for d in shape]
    return sizes if sizes.count(-1) <= 1 else None


def _copied(position: int, between: Shape | None, source: Shape | None) -> int | None:
    """What a 0 in a target, which copies a dimension of the shape between, becomes when the source is reshaped."""
    dim: Dim = between[position] if between is not None and position < len(between) else None
    if isinstance(dim, int):
        return dim if dim > 0 else None
    return 0 if dim is not None and source is not None and position < len(source) and source[position] == dim else None


# -- cutting, padding, repeating --------------------------------------------------------------------------------------


@cancels("Slice")
def takes_everything(node: Node, ctx: PassContext) -> Outcome:
    if node.version < 10:
        return None
    given = [integers_of(v) for v in node.inputs[1:]]
    if None in given[:2] or any(g is None and v is not None for g, v in zip(given, node.inputs[1:])):
        return None
    starts, ends, axes, steps = (given + [None, None])[:4]
    assert starts is not None and ends is not None
    shape = shape_of(node.inputs[0])
    for k, (start, end) in enumerate(zip(starts, ends)):
        step = steps[k] if steps else 1
        axis = axes[k] if axes else k
        size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        whole = end >= _END or (isinstance(size, int) and end >= size)
        if start != 0 or step != 1 or not whole:
            return None
    return node.inputs[0]


@cancels("Pad")
def pads_nothing(node: Node, ctx: PassContext) -> Outcome:
    pads = integers_of(node.input(1)) if node.version >= 11 else node.attrs.get("pads")
    return node.inputs[0] if pads is not None and not any(pads) else None


@cancels("Expand")
def expands_nothing(node: Node, ctx: PassContext) -> Outcome:
    operand, target = node.inputs
    if operand is None:
        return None
    sizes = integers_of(target)
    return operand if same_shape(operand, node.output) or (sizes is not None and not widens(operand, sizes)) else None


@cancels("Tile")
def repeats_once(node: Node, ctx: PassContext) -> Outcome:
    if node.version < 6:
        return None
    repeats = integers_of(node.inputs[1])
    return node.inputs[0] if repeats is not None and all(r == 1 for r in repeats) else None


@cancels("Split")
def splits_into_one(node: Node, ctx: PassContext) -> Outcome:
    return node.inputs[0] if len(node.outputs) == 1 else None


@cancels("Concat")
def joins_empty(node: Node, ctx: PassContext) -> Outcome:
    """Operands that are empty along the axis add nothing."""
    axis = node.attrs.get("axis", 1)
    full = [v for v in node.inputs if not _is_empty(v, axis)]
    if not full or len(full) == len(node.inputs):
        return None
    node.set_inputs(full)
    return CHANGED


def _is_empty(value: Value | None, axis: int) -> bool:
    shape = shape_of(value)
    return shape is not None and -len(shape) <= axis < len(shape) and shape[axis] == 0


@cancels("Gather")
def gathers_all(node: Node, ctx: PassContext) -> Outcome:
    """Indices 0, 1, 2 … up to the size of the axis."""
    shape, indices = shape_of(node.inputs[0]), integers_of(node.inputs[1])
    axis = node.attrs.get("axis", 0)
    if not shape or indices is None or rank_of(node.inputs[1]) != 1 or not -len(shape) <= axis < len(shape):
        return None
    return node.inputs[0] if shape[axis] == len(indices) and indices == tuple(range(len(indices))) else None
