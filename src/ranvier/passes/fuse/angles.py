"""Cosines and sines of rotary embeddings: where they come from, and in which form the operator can have them."""

from __future__ import annotations

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.facts import integers_of, rank_of, shape_of
from ranvier.passes.fuse.proofs import is_last_axis, same_dim
from ranvier.records import dataclass


@dataclass(frozen=True)
class Angles:
    """Cosines or sines for x, one row per sample and position."""

    value: Value
    heads_axis: int | None  # of ``value``: the axis of size 1 that stands for all heads
    time_axis: int  # of x: 2 in [batch, heads, time, size], 1 in [batch, time, heads, size]


def find_angles(value: Value, x: Value, size: int) -> Angles | None:
    """``value`` as rows of ``size`` angles that are alike for all heads of x; None where that is not certain."""
    shape, own = shape_of(value), shape_of(x)
    if shape is None or own is None or not 2 <= len(shape) <= 4 or shape[-1] != size:
        return None
    missing = 4 - len(shape)
    full = (1,) * missing + shape
    if full[0] != 1 and not same_dim(full[0], own[0]):
        return None
    for heads, time in ((1, 2), (2, 1)):
        if full[heads] == 1 and same_dim(full[time], own[time]):
            return Angles(value, heads - missing if heads >= missing else None, time)
    return None


def table(op: GraphOps, angles: Angles, x: Value, half: int, step: int) -> Value:
    """The angles as [batch, time, half]: without heads, one of each pair, repeated for every sample."""
    value = _without_heads(op, angles)
    shape, own = shape_of(value), shape_of(x)
    assert shape is not None and own is not None
    if shape[-1] != half:
        end = half if step == 1 else 2 * half
        value = op.Slice(value, *(np.array([n]) for n in (0, end, len(shape) - 1, step)))
    if len(shape) == 2:
        value = op.Unsqueeze(value, np.array([0]))
    elif same_dim(shape[0], own[0]):
        return value
    if isinstance(own[0], int):
        return value if own[0] == 1 else op.Expand(value, np.array([own[0], 1, 1]))
    return op.Expand(value, op.Concat(op.Shape(x, start=0, end=1), np.array([1, 1]), axis=0))


def _without_heads(op: GraphOps, angles: Angles) -> Value:
    value, axis = angles.value, angles.heads_axis
    if axis is None:
        return value
    node = value.producer
    if node is not None and node.op == "Unsqueeze" and node.inputs[0] is not None:
        added = integers_of(node.input(1))
        if added is not None and len(added) == 1 and added[0] % (rank_of(value) or 1) == axis:
            return node.inputs[0]
    return op.Squeeze(value, np.array([axis]))


# -- one angle for both features of a pair --------------------------------------------------------------------------


def turns_pairs(value: Value | None, step: int) -> bool:
    """Both features of every pair have one angle.

    Pairs are the halves of the last axis (``step`` 1: a tensor stands there twice) or neighbours on it (``step`` 2:
    every element stands there twice). Follows the value back to a constant or to where the repetition was made.
    """
    while value is not None and value.producer is not None:
        node = value.producer
        if node.op == "Concat" and step == 1:
            twice = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return twice and is_last_axis(node.attrs.get("axis"), value)
        if node.op == "Reshape" and step == 2:
            return _elements_twice(node)
        value = _same_features(node)
    if value is None or value.const is None or not value.const.shape:
        return False
    array = value.const.numpy()
    half = array.shape[-1] // 2
    a, b = (array[..., 0::2], array[..., 1::2]) if step == 2 else (array[..., :half], array[..., half:])
    return bool(np.array_equal(a, b))


def _same_features(node: Node) -> Value | None:
    """The operand whose last axis the node hands on, element by element; None where it has none."""
    operand, rank = node.input(0), rank_of(node.input(0))
    if node.op in ("Cos", "Sin", "Cast", "Identity"):
        return operand
    if node.op in ("Mul", "Div"):
        other = node.input(1)
        if other is not None and other.const is not None and other.const.size == 1:
            return operand
        return other if operand is not None and operand.const is not None and operand.const.size == 1 else None
    if rank is None:
        return None
    if node.op == "Unsqueeze":
        axes = integers_of(node.input(1))
        return operand if axes is not None and all(a % (rank + len(axes)) < rank for a in axes) else None
    if node.op == "Slice":
        axes = integers_of(node.input(3))
        return operand if axes is not None and all(a % rank != rank - 1 for a in axes) else None
    if node.op == "Gather":
        return operand if node.attrs.get("axis", 0) % rank != rank - 1 else None
    if node.op == "Expand":
        before, after = shape_of(operand), shape_of(node.output)
        return operand if before and after and same_dim(before[-1], after[-1]) else None
    return None


def _elements_twice(reshape: Node) -> bool:
    """A tensor whose last axis is two equal numbers, merged with the axis before it."""
    operand = reshape.inputs[0]
    before, after = shape_of(operand), shape_of(reshape.output)
    if operand is None or operand.producer is None or before is None or after is None or before[-1] != 2:
        return False
    if len(after) != len(before) - 1 or not all(same_dim(a, b) for a, b in zip(after[:-1], before[:-2])):
        return False
    node = operand.producer
    if node.op == "Concat":
        return len(node.inputs) == 2 and _one_value(*node.inputs) and is_last_axis(node.attrs.get("axis"), operand)
    spread = shape_of(node.input(0))
    return node.op in ("Expand", "Tile") and spread is not None and len(spread) == len(before) and spread[-1] == 1


def _one_value(a: Value | None, b: Value | None) -> bool:
    """The same value, or two Unsqueeze nodes of one value along one axis."""
    if a is b:
        return True
    left, right = (v.producer if v is not None else None for v in (a, b))
    if left is None or right is None or not left.op == right.op == "Unsqueeze":
        return False
    axes = integers_of(left.input(1))
    return left.inputs[0] is right.inputs[0] and axes is not None and axes == integers_of(right.input(1))
