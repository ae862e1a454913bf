"""Rotary position embeddings: pairs of features turned by an angle per position, as one RotaryEmbedding node.

The operator wants cosine and sine once per pair, ``[batch, time, size / 2]``. Models that compute ``x·cos +
rotated(x)·sin`` hold them twice, so it must be proven that both features of a pair are turned by the same angle.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import Match, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.base import RulePass
from ranvier.passes.facts import dtype_of, integers_of, rank_of, shape_of
from ranvier.passes.fuse.angles import Angles, find_angles, table, turns_pairs
from ranvier.passes.fuse.proofs import is_last_axis, reshapes_to

ROTATED = frozenset({DType.float32, DType.float16, DType.bfloat16})  # what the standard's operator takes

# -- parts of x -----------------------------------------------------------------------------------------------------


def _taken(node: Node, x: Value, size: int) -> range | None:
    """Which of ``size`` features a slice along the last axis takes; None where it does not say it by constants."""
    start, end, axis, step = (integers_of(node.input(k)) for k in range(1, 5))
    if start is None or end is None or axis is None or not len(start) == len(end) == len(axis) == 1:
        return None
    if not is_last_axis(axis[0], x) or (node.input(4) is not None and step is None):
        return None
    return range(size)[slice(start[0], end[0], step[0] if step else 1)]


def _parts_reason(match: Match, step: int) -> str | None:
    """Why ``first`` and ``second``, or the outputs of ``split``, are not the two parts of x that rotate."""
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
        halves = len(split.outputs) == 2 and (sizes or (size // 2,) * 2) == (size // 2,) * 2
        return None if halves and is_last_axis(split.attrs.get("axis", 0), x) else "x is not split into halves"
    features = range(size)
    wanted = [features[: size // 2], features[size // 2 :]] if step == 1 else [features[0::2], features[1::2]]
    taken = [_taken(match.node(label), x, size) for label in ("first", "second")]
    return None if taken == wanted else "the slices are not the two parts of the features that rotate"


def _parts(op: PatternOps, x: Any) -> list[tuple[Any, Any]]:
    """Both ways to take two parts of x: one Split or two Slices."""
    split = op.Split(x, ..., _label="split")
    return [(split[0], split[1]), (op.Slice(x, ..., _label="first"), op.Slice(x, ..., _label="second"))]


# -- rules ----------------------------------------------------------------------------------------------------------


class _Rotary(Rule):
    """Rotates ``x`` by ``cos`` and ``sin``; ``step`` 1 pairs the halves of the features, 2 pairs neighbours."""

    step: ClassVar[int] = 1
    doubled: ClassVar[bool] = True  # cos and sin have one entry per feature, not per pair

    def check(self, match: Match) -> str | None:
        reason = _parts_reason(match, self.step) or self.joint_reason(match)
        if reason is not None:
            return reason
        x = match["x"]
        cos, sin = self._angles(match, "cos"), self._angles(match, "sin")
        if cos is None or sin is None or cos.time_axis != sin.time_axis:
            return "cos and sin are not known to be given per sample and position, alike for all heads"
        if any(dtype_of(angles.value) is not dtype_of(x) for angles in (cos, sin)):
            return "cos and sin are of another element type"
        if self.doubled and not all(turns_pairs(angles.value, self.step) for angles in (cos, sin)):
            return "the two features of a pair are not known to be turned by one angle"
        shape = shape_of(x)
        if cos.time_axis == 1 and (shape is None or not isinstance(shape[2], int)):
            return "the number of heads is not known"
        return None

    def joint_reason(self, match: Match) -> str | None:
        """Why the rotated parts are not put together to features again."""
        joint = match.node("joint")
        if self.step == 1:
            last = is_last_axis(joint.attrs.get("axis"), joint.output)
            return None if last else "the rotated halves are not joined along the features"
        rank = rank_of(match["x"])
        if any(integers_of(match.node(label).input(1)) not in ((-1,), (rank,)) for label in ("left", "right")):
            return "the pairs are not made along a new last axis"
        if reshapes_to(joint.output, joint.input(1), match["x"]):
            return None
        return "the pairs are not known to be merged back into the features"

    def _angles(self, match: Match, name: str) -> Angles | None:
        x = match["x"]
        shape = shape_of(x)
        if shape is None or not isinstance(shape[-1], int):
            return None
        return find_angles(match[name], x, shape[-1] if self.doubled else shape[-1] // 2)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x = match["x"]
        shape = shape_of(x)
        cos, sin = self._angles(match, "cos"), self._angles(match, "sin")
        assert shape is not None and isinstance(shape[-1], int) and cos is not None and sin is not None
        tables = [table(op, angles, x, shape[-1] // 2, self.step) for angles in (cos, sin)]
        attrs: dict[str, Any] = {"interleaved": 1} if self.step == 2 else {}
        if cos.time_axis == 2:
            return op.RotaryEmbedding(x, *tables, **attrs)
        packed = op.Reshape(x, np.array([0, 0, -1]))  # [batch, time, heads, size] needs no transpose this way
        turned = op.RotaryEmbedding(packed, *tables, num_heads=shape[2], **attrs)
        return op.Reshape(turned, np.array([0, 0, shape[2], shape[3]]))


class FuseRotateHalf(_Rotary):
    """x · cos + concat(-second, first) · sin"""

    def pattern(self, op: PatternOps, x: Any, cos: Any, sin: Any) -> Any:
        turned = [op.Concat(op.Neg(second), first, _label="joint") for first, second in _parts(op, x)]
        return op.Add(op.Mul(x, cos), op.Mul(op.one_of(*turned), sin))


class FuseRotatedHalves(_Rotary):
    """concat(first · cos - second · sin, first · sin + second · cos)"""

    doubled = False

    def pattern(self, op: PatternOps, x: Any, cos: Any, sin: Any) -> Any:
        return [
            op.Concat(
                op.Sub(op.Mul(first, cos), op.Mul(second, sin)),
                op.Add(op.Mul(first, sin), op.Mul(second, cos)),
                _label="joint",
            )
            for first, second in _parts(op, x)
        ]


def _interleaved(op: PatternOps, left: Any, right: Any) -> Any:
    """Two tensors, element by element in turn."""
    columns = op.Unsqueeze(left, ..., _label="left"), op.Unsqueeze(right, ..., _label="right")
    return op.Reshape(op.Concat(*columns, axis=-1), ..., _label="joint")


class FuseRotateEveryTwo(_Rotary):
    """x · cos + interleave(-odd, even) · sin"""

    step = 2

    def pattern(self, op: PatternOps, x: Any, cos: Any, sin: Any) -> Any:
        even, odd = _parts(op, x)[1]
        return op.Add(op.Mul(x, cos), op.Mul(_interleaved(op, op.Neg(odd), even), sin))


class FuseRotatedPairs(_Rotary):
    """interleave(even · cos - odd · sin, even · sin + odd · cos)"""

    step = 2
    doubled = False

    def pattern(self, op: PatternOps, x: Any, cos: Any, sin: Any) -> Any:
        even, odd = _parts(op, x)[1]
        real = op.Sub(op.Mul(even, cos), op.Mul(odd, sin))
        return _interleaved(op, real, op.Add(op.Mul(even, sin), op.Mul(odd, cos)))


class FusePartialRotary(Rule):
    """The first features rotated and the rest appended as they were: one attribute of the operator."""

    def pattern(self, op: PatternOps, x: Any, cos: Any, sin: Any) -> Any:
        front, rest = op.Slice(x, ..., _label="front"), op.Slice(x, ..., _label="rest")
        return op.Concat(op.RotaryEmbedding(front, cos, sin, _label="rotary"), rest)

    def check(self, match: Match) -> str | None:
        x = match["x"]
        shape = shape_of(x)
        if shape is None or len(shape) != 4 or not isinstance(shape[-1], int):
            return "the operand is not known to be [batch, heads, time, size]"
        if not is_last_axis(match.root.attrs.get("axis"), x):
            return "the parts are not joined along the features"
        features = range(shape[-1])
        front, rest = (_taken(match.node(label), x, shape[-1]) for label in ("front", "rest"))
        if front is None or features[: len(front)] != front or features[len(front) :] != rest:
            return "the slices are not the first features and the rest"
        return None

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        turned = shape_of(match.node("front").output)
        assert turned is not None
        attrs = {**match.node("rotary").attrs, "rotary_embedding_dim": turned[-1]}
        return op.RotaryEmbedding(match["x"], match["cos"], match["sin"], **attrs)


class RotaryFusion(RulePass):
    name: ClassVar[str] = "fuse_rotary"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseRotateHalf, FuseRotatedHalves, FuseRotateEveryTwo, FuseRotatedPairs, FusePartialRotary)
