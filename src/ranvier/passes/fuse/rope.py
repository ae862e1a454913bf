"""Rotary position embeddings: pairs of features turned by an angle per position, as one RotaryEmbedding node.

The operator wants cosine and sine once per pair, ``[batch, time, size / 2]``. Models that compute ``x·cos +
rotated(x)·sin`` hold them twice, so it must be proven that both features of a pair are turned by the same angle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import Apply, Match, OneOf, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.base import RulePass
from ranvier.passes.facts import dtype_of, integers_of, rank_of, shape_of
from ranvier.passes.fuse.proofs import is_last_axis, reshapes_to, same_dim

ROTATED = frozenset({DType.float32, DType.float16, DType.bfloat16})  # what the standard's operator takes

# -- parts of x -----------------------------------------------------------------------------------------------------


def _slice(op: PatternOps, x: Any, label: str, bounds: tuple[Any, Any, Any, Any]) -> Apply:
    return op.Slice(x, *bounds, _label=label)


def _slice_bounds(node: Node) -> tuple[int, int, int, int] | None:
    """Start, end, axis and step of a slice along one axis by constants."""
    start, end, axis, step = (integers_of(node.input(k)) for k in range(1, 5))
    if start is None or end is None or axis is None or not len(start) == len(end) == len(axis) == 1:
        return None
    if node.input(4) is not None and (step is None or len(step) != 1):
        return None
    return start[0], end[0], axis[0], step[0] if step else 1


def _is_part(node: Node, x: Value, size: int, first: int, step: int) -> bool:
    """The slice takes every ``step``-th of ``size`` features from ``first`` on, half of them in all."""
    bounds = _slice_bounds(node)
    if bounds is None:
        return False
    start, end, axis, stride = bounds
    wanted = range(first, size, step) if step > 1 else range(first, first + size // 2)
    return is_last_axis(axis, x) and range(*slice(start, end, stride).indices(size)) == wanted


def _parts_reason(match: Match, step: int) -> str | None:
    """Why ``first`` and ``second`` (or the outputs of ``split``) are not the two halves of x that rotate."""
    x = match["x"]
    shape = shape_of(x)
    if dtype_of(x) not in ROTATED:
        return "the operand is not known to be float32, float16 or bfloat16"
    if shape is None or len(shape) != 4:
        return "the operand is not known to have four axes"
    size = shape[-1]
    if not isinstance(size, int) or size % 2:
        return "the number of features is not known or odd"
    split = match.labels.get("split")
    if split is not None:
        sizes = integers_of(split.input(1))
        halves = len(split.outputs) == 2 and (sizes is None or sizes == (size // 2, size // 2))
        return None if halves and is_last_axis(split.attrs.get("axis", 0), x) else "x is not split into halves"
    places = (("first", 0), ("second", 1 if step > 1 else size // 2))
    if all(_is_part(match.node(label), x, size, place, step) for label, place in places):
        return None
    return "the slices are not the two halves of the features"


# -- angles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Angles:
    """Where cosines or sines for x come from: a value, and the axis of heads to take out of it (None: it has none)."""

    source: Value
    heads_axis: int | None


def _angles(value: Value, x: Value, size: int) -> _Angles | None:
    """``value`` as one row of ``size`` per sample and position, alike for all heads; None where that is not certain.

    x is [batch, heads, time, size], or [batch, time, heads, size], which shows in where the heads are left out.
    """
    shape, own = shape_of(value), shape_of(x)
    if shape is None or own is None or not 2 <= len(shape) <= 4 or shape[-1] != size:
        return None
    full = (1,) * (4 - len(shape)) + shape
    if not (same_dim(full[0], own[0]) or full[0] == 1):
        return None
    for axis, time in ((1, 2), (2, 1)):
        if full[axis] == 1 and same_dim(full[time], own[time]):
            place = axis - (4 - len(shape))
            return _Angles(value, place if place >= 0 else None)
    return None


def _time_axis(angles: _Angles) -> int:
    """The axis of x that counts positions."""
    shape = shape_of(angles.source)
    assert shape is not None
    return 1 if angles.heads_axis is not None and angles.heads_axis == len(shape) - 2 else 2


def _table(op: GraphOps, angles: _Angles, x: Value, half: int, step: int) -> Value:
    """The angles as [batch, time, half]: heads taken out, one per pair, repeated for every sample."""
    value = _without_heads(op, angles)
    shape, own = shape_of(value), shape_of(x)
    assert shape is not None and own is not None
    if shape[-1] != half:
        end = half if step == 1 else 2 * half
        value = op.Slice(value, *(np.array([n]) for n in (0, end, len(shape) - 1, step)))
    if len(shape) == 2:
        value = op.Unsqueeze(value, np.array([0]))
    if len(shape) == 3 and same_dim(shape[0], own[0]):
        return value
    if isinstance(own[0], int):
        return value if own[0] == 1 else op.Expand(value, np.array([own[0], 1, 1]))
    return op.Expand(value, op.Concat(op.Shape(x, start=0, end=1), np.array([1, 1]), axis=0))


def _without_heads(op: GraphOps, angles: _Angles) -> Value:
    source, axis = angles.source, angles.heads_axis
    if axis is None:
        return source
    node = source.producer
    if node is not None and node.op == "Unsqueeze" and node.inputs[0] is not None:
        added = integers_of(node.input(1))
        if added is not None and len(added) == 1 and added[0] % (rank_of(source) or 1) == axis:
            return node.inputs[0]
    return op.Squeeze(source, np.array([axis]))


# -- the same angle twice -------------------------------------------------------------------------------------------

_KEEPS_FEATURES = frozenset({"Cos", "Sin", "Cast", "Identity", "Neg"})


def _repeats(value: Value | None, step: int) -> bool:
    """Both features of every pair hold the same number: the last axis is a tensor twice (step 1), or every element
    of it twice (step 2)."""
    while value is not None and value.producer is not None:
        node = value.producer
        if node.op == "Concat" and step == 1:
            return _same_twice(node) and is_last_axis(node.attrs.get("axis"), value)
        if node.op == "Reshape" and step == 2:
            return _elements_twice(node)
        following = _upstream(node)
        if following is None:
            return False
        value = following
    if value is None or value.const is None or not value.const.shape:
        return False
    array = value.const.numpy()
    if step == 2:
        return bool(np.array_equal(array[..., 0::2], array[..., 1::2]))
    half = array.shape[-1] // 2
    return bool(np.array_equal(array[..., :half], array[..., half:]))


def _upstream(node: Node) -> Value | None:
    """The operand whose last axis the node hands on feature by feature, or None."""
    operand = node.input(0)
    if operand is None:
        return None
    rank = rank_of(operand)
    if node.op in _KEEPS_FEATURES:
        return operand
    if node.op in ("Mul", "Add", "Div"):
        for value, other in ((operand, node.input(1)), (node.input(1), operand)):
            if other is not None and other.const is not None and other.const.size == 1:
                return value
        return None
    if rank is None:
        return None
    if node.op == "Unsqueeze":
        axes = integers_of(node.input(1))
        return operand if axes is not None and all(a % (rank + len(axes)) < rank for a in axes) else None
    if node.op == "Slice":
        axes = integers_of(node.input(3))
        return operand if axes is not None and all(a % rank != rank - 1 for a in axes) else None
    if node.op == "Gather":
        return operand if rank > 1 and node.attrs.get("axis", 0) % rank != rank - 1 else None
    return None


def _same_twice(concat: Node) -> bool:
    return len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]


def _elements_twice(reshape: Node) -> bool:
    """A tensor with a last axis of two equal numbers, which is then merged with the axis before it."""
    operand = reshape.inputs[0]
    before, after = shape_of(operand), shape_of(reshape.output)
    if operand is None or operand.producer is None or before is None or after is None or before[-1] != 2:
        return False
    if len(after) != len(before) - 1 or not all(same_dim(a, b) for a, b in zip(after[:-1], before[:-2])):
        return False
    if operand.producer.op == "Concat":
        parts = operand.producer.inputs
        alike = len(parts) == 2 and (parts[0] is parts[1] or _from_one(parts[0], parts[1]))
        return alike and is_last_axis(operand.producer.attrs.get("axis"), operand)
    spread = shape_of(operand.producer.input(0))
    return operand.producer.op in ("Expand", "Tile") and spread is not None and spread[-1] == 1


def _from_one(a: Value | None, b: Value | None) -> bool:
    """Two Unsqueeze nodes of one value along one axis."""
    if a is None or b is None or a.producer is None or b.producer is None:
        return False
    left, right = a.producer, b.producer
    return (
        left.op == right.op == "Unsqueeze"
        and left.inputs[0] is right.inputs[0]
        and integers_of(left.input(1)) == integers_of(right.input(1)) != None  # noqa: E711
    )


# -- rules ----------------------------------------------------------------------------------------------------------


class _Rotary(Rule):
    """Rotates ``x`` by ``cos`` and ``sin``; ``step`` 1 pairs the halves of the features, 2 pairs neighbours."""

    step: ClassVar[int] = 1
    doubled: ClassVar[bool] = True  # cos and sin have one entry per feature, not per pair

    def check(self, match: Match) -> str | None:
        reason = _parts_reason(match, self.step)
        if reason is not None:
            return reason
        x = match["x"]
        cos, sin = (self._angles(match, name) for name in ("cos", "sin"))
        if cos is None or sin is None or _time_axis(cos) != _time_axis(sin):
            return "cos and sin are not known to be given per sample and position, alike for all heads"
        if any(dtype_of(a.source) is not dtype_of(x) for a in (cos, sin)):
            return "cos and sin are of another element type"
        if self.doubled and not all(_repeats(a.source, self.step) for a in (cos, sin)):
            return "the two features of a pair are not known to be turned by one angle"
        heads = shape_of(x)
        if _time_axis(cos) == 1 and (heads is None or not isinstance(heads[2], int)):
            return "the number of heads is not known"
        return None

    def _angles(self, match: Match, name: str) -> _Angles | None:
        shape = shape_of(match["x"])
        if shape is None or not isinstance(shape[-1], int):
            return None
        return _angles(match[name], match["x"], shape[-1] if self.doubled else shape[-1] // 2)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x = match["x"]
        shape = shape_of(x)
        assert shape is not None and isinstance(shape[-1], int)
        cos, sin = (self._angles(match, name) for name in ("cos", "sin"))
        assert cos is not None and sin is not None
        tables = [_table(op, angles, x, shape[-1] // 2, self.step) for angles in (cos, sin)]
        attrs: dict[str, Any] = {"interleaved": 1} if self.step == 2 else {}
        if _time_axis(cos) == 2:
            return op.RotaryEmbedding(x, *tables, **attrs)
        packed = op.Reshape(x, np.array([0, 0, -1]))  # [batch, time, heads, size] needs no transpose this way
        turned = op.RotaryEmbedding(packed, *tables, num_heads=shape[2], **attrs)
        return op.Reshape(turned, np.array([0, 0, shape[2], shape[3]]))


def _halves(op: PatternOps, x: Any, sizes: Any, low: tuple[Any, ...], high: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Both ways to take the halves of x: one Split or two Slices."""
    split = op.Split(x, sizes, _label="split")
    first, second = op.Slice(x, *low, _label="first"), op.Slice(x, *high, _label="second")
    return [(split[0], split[1]), (first, second)]


class FuseRotateHalf(_Rotary):
    """x · cos + concat(-second, first) · sin"""

    def pattern(
        self,
        op: PatternOps,
        x: Any,
        cos: Any,
        sin: Any,
        sizes_: Any,
        start: Any,
        end: Any,
        axis: Any,
        steps_: Any,
        start2: Any,
        end2: Any,
        axis2: Any,
        steps2_: Any,
    ) -> Any:
        low, high = (start, end, axis, steps_), (start2, end2, axis2, steps2_)
        turned = [
            op.Concat(op.Neg(second), first, _label="turned") for first, second in _halves(op, x, sizes_, low, high)
        ]
        return op.Add(op.Mul(x, cos), op.Mul(op.one_of(*turned), sin))

    def check(self, match: Match) -> str | None:
        turned = match.node("turned")
        if not is_last_axis(turned.attrs.get("axis"), turned.output):
            return "the rotated halves are not joined along the features"
        return super().check(match)


class FuseRotatedHalves(_Rotary):
    """concat(first · cos - second · sin, first · sin + second · cos)"""

    doubled = False

    def pattern(
        self,
        op: PatternOps,
        x: Any,
        cos: Any,
        sin: Any,
        sizes_: Any,
        start: Any,
        end: Any,
        axis: Any,
        steps_: Any,
        start2: Any,
        end2: Any,
        axis2: Any,
        steps2_: Any,
    ) -> Any:
        low, high = (start, end, axis, steps_), (start2, end2, axis2, steps2_)
        return [
            op.Concat(op.Sub(op.Mul(first, cos), op.Mul(second, sin)), op.Add(op.Mul(first, sin), op.Mul(second, cos)))
            for first, second in _halves(op, x, sizes_, low, high)
        ]

    def check(self, match: Match) -> str | None:
        if not is_last_axis(match.root.attrs.get("axis"), match.root.output):
            return "the rotated halves are not joined along the features"
        return super().check(match)


def _interleaved(op: PatternOps, first: Any, second: Any, axes: Any, axes2: Any, whole: Any, label: str) -> Apply:
    """Two tensors, element by element in turn."""
    pairs = op.Concat(op.Unsqueeze(first, axes), op.Unsqueeze(second, axes2), axis=-1)
    return op.Reshape(pairs, whole, _label=label)


class _Interleaved(_Rotary):
    step = 2

    def check(self, match: Match) -> str | None:
        whole, x = match.node("whole"), match["x"]
        rank = rank_of(x)
        if any(integers_of(match[name]) not in ((-1,), (rank,)) for name in ("axes", "axes2")):
            return "the pairs are not made along a new last axis"
        if not reshapes_to(whole.output, match["target"], x):
            return "the pairs are not known to be merged back into the features"
        return super().check(match)


class FuseRotateEveryTwo(_Interleaved):
    """x · cos + interleave(-odd, even) · sin"""

    def pattern(
        self,
        op: PatternOps,
        x: Any,
        cos: Any,
        sin: Any,
        target: Any,
        axes: Any,
        axes2: Any,
        start: Any,
        end: Any,
        axis: Any,
        steps: Any,
        start2: Any,
        end2: Any,
        axis2: Any,
        steps2: Any,
    ) -> Any:
        even = op.Slice(x, start, end, axis, steps, _label="first")
        odd = op.Slice(x, start2, end2, axis2, steps2, _label="second")
        turned = _interleaved(op, op.Neg(odd), even, axes, axes2, target, "whole")
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin))


class FuseRotatedPairs(_Interleaved):
    """interleave(even · cos - odd · sin, even · sin + odd · cos)"""

    doubled = False

    def pattern(
        self,
        op: PatternOps,
        x: Any,
        cos: Any,
        sin: Any,
        target: Any,
        axes: Any,
        axes2: Any,
        start: Any,
        end: Any,
        axis: Any,
        steps: Any,
        start2: Any,
        end2: Any,
        axis2: Any,
        steps2: Any,
    ) -> Any:
        even = op.Slice(x, start, end, axis, steps, _label="first")
        odd = op.Slice(x, start2, end2, axis2, steps2, _label="second")
        real = op.Sub(op.Mul(even, cos), op.Mul(odd, sin))
        imaginary = op.Add(op.Mul(even, sin), op.Mul(odd, cos))
        return _interleaved(op, real, imaginary, axes, axes2, target, "whole")


class FusePartialRotary(Rule):
    """The first features rotated and the rest appended as they were: one attribute of the operator."""

    def pattern(
        self,
        op: PatternOps,
        x: Any,
        cos: Any,
        sin: Any,
        start: Any,
        end: Any,
        axis: Any,
        steps_: Any,
        start2: Any,
        end2: Any,
        axis2: Any,
        steps2_: Any,
    ) -> Any:
        front = op.Slice(x, start, end, axis, steps_, _label="front")
        rest = op.Slice(x, start2, end2, axis2, steps2_, _label="rest")
        return op.Concat(op.RotaryEmbedding(front, cos, sin, _label="rotary"), rest)

    def check(self, match: Match) -> str | None:
        x = match["x"]
        shape, turned = shape_of(x), shape_of(match.node("front").output)
        if shape is None or turned is None or not isinstance(shape[-1], int) or not isinstance(turned[-1], int):
            return "the number of features is not known"
        if len(shape) != 4 or not is_last_axis(match.root.attrs.get("axis"), x):
            return "the parts are not joined along the features of [batch, heads, time, size]"
        front, rest = (_slice_bounds(match.node(label)) for label in ("front", "rest"))
        if front is None or rest is None or not is_last_axis(front[2], x) or not is_last_axis(rest[2], x):
            return "the features are not sliced by constants"
        size, rotary = shape[-1], turned[-1]
        taken = [range(*slice(start, end, step).indices(size)) for start, end, _, step in (front, rest)]
        whole = taken == [range(rotary), range(rotary, size)]
        return None if whole else "the slices are not the first features and the rest"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        turned = shape_of(match.node("front").output)
        assert turned is not None
        attrs = {**match.node("rotary").attrs, "rotary_embedding_dim": turned[-1]}
        return op.RotaryEmbedding(match["x"], match["cos"], match["sin"], **attrs)


class RotaryFusion(RulePass):
    name: ClassVar[str] = "fuse-rotary"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseRotateHalf, FuseRotatedHalves, FuseRotateEveryTwo, FuseRotatedPairs, FusePartialRotary)
