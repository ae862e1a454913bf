"""Normalisations per channel or group of channels, and division by the Euclidean norm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.patterns import Match, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.base import RulePass
from ranvier.passes.facts import array_of, dtype_of, integers_of, rank_of, shape_of, widens
from ranvier.passes.fuse.normalization import STASHED
from ranvier.passes.fuse.proofs import reduced_axes, reshapes_to, same_dim


class FuseGroupNorm(Rule):
    """Channels reshaped to groups, InstanceNormalization, reshaped back: how PyTorch exports GroupNorm."""

    def pattern(self, op: PatternOps, x: Any, scale: Any, bias: Any) -> Any:
        grouped = op.Reshape(x, ..., _label="grouped")
        return op.Reshape(op.InstanceNormalization(grouped, scale, bias, _label="norm"), ...)

    def check(self, match: Match) -> str | None:
        x, grouped = match["x"], match.node("grouped")
        shape, parts = shape_of(x), shape_of(grouped.output)
        if dtype_of(x) not in STASHED:
            return f"the element type {dtype_of(x)} cannot be normalised in float32"
        if shape is None or len(shape) < 3 or parts is None or len(parts) != 3:
            return "the operand is not known to be [N, C, …] and reshaped to [N, groups, rest]"
        channels, count = shape[1], parts[1]
        if not isinstance(channels, int) or not isinstance(count, int) or count < 1 or channels % count:
            return f"{channels} channels do not divide into {count} groups"
        target = integers_of(grouped.input(1))
        kept = target is not None and target[0] == 0 and not grouped.attrs.get("allowzero", 0)
        if not kept and not same_dim(shape[0], parts[0]):
            return "the samples are not known to stay apart in the reshape"
        if not reshapes_to(match.root.output, match.root.input(1), x):
            return "the result is not known to be reshaped back"
        known = array_of(match["scale"]) is not None and array_of(match["bias"]) is not None
        return None if known else "scale and bias of the groups are not constants"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x, norm = match["x"], match.node("norm")
        shape, scale, bias = shape_of(x), array_of(match["scale"]), array_of(match["bias"])
        assert shape is not None and isinstance(shape[1], int) and scale is not None and bias is not None
        repeats = shape[1] // scale.size
        return op.GroupNormalization(
            x,
            op.constant(np.repeat(scale, repeats), "scale"),
            op.constant(np.repeat(bias, repeats), "bias"),
            num_groups=int(scale.size),
            epsilon=norm.attrs.get("epsilon", 1e-5),
        )


# -- scale and bias per channel -------------------------------------------------------------------------------------


def _channel_reason(x: Value, operand: Value, what: str) -> str | None:
    """Why ``operand`` is not one number per channel of ``x [N, C, …]``."""
    own, shape = shape_of(x), shape_of(operand)
    if own is None or len(own) < 3 or not isinstance(own[1], int) or shape is None:
        return f"the shape of {what} or the number of channels is not known"
    if dtype_of(operand) is None or dtype_of(operand) is not dtype_of(x):
        return f"{what} is of another element type"
    per_channel = (1, own[1], *(1,) * (len(own) - 2))
    return None if shape in (per_channel, per_channel[1:]) else f"{what} is not one number per channel"


def _per_channel(op: GraphOps, operand: Value) -> Value:
    if operand.const is not None:
        return op.constant(operand.const.numpy().reshape(-1), operand.name)
    return op.Reshape(operand, op.constant(np.array([-1])))


class AbsorbChannelScale(Rule):
    """A normalisation of each channel on its own, times one number per channel."""

    def pattern(self, op: PatternOps, x: Any, scale: Any) -> Any:
        return [
            op.Mul(op.InstanceNormalization(x, 1.0, 0.0, _label="norm"), scale),
            op.Mul(op.GroupNormalization(x, 1.0, 0.0, _label="norm"), scale),
            op.Mul(op.LayerNormalization(x, 1.0, _label="norm"), scale),
        ]

    def check(self, match: Match) -> str | None:
        x, norm = match["x"], match.node("norm")
        if norm.op == "LayerNormalization":
            rank = rank_of(x)
            if rank is None or rank < 3 or norm.attrs.get("axis", -1) not in (2, 2 - rank):
                return "not all axes after the channels are normalised"
        return _channel_reason(x, match["scale"], "scale")

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x, norm = match["x"], match.node("norm")
        scale = _per_channel(op, match["scale"])
        if norm.op != "LayerNormalization":
            return op.node(norm.op, [x, scale, norm.inputs[2]], dict(norm.attrs)).output
        shape, dtype = shape_of(x), dtype_of(x)
        assert shape is not None and isinstance(shape[1], int) and dtype is not None
        zeros = op.constant(np.zeros(shape[1], dtype.numpy), "zeros")
        return op.InstanceNormalization(x, scale, zeros, epsilon=norm.attrs.get("epsilon", 1e-5))


class AbsorbChannelBias(Rule):
    """A normalisation of each channel with a bias of zeros, plus one number per channel."""

    def pattern(self, op: PatternOps, x: Any, scale: Any, bias: Any) -> Any:
        return [
            op.Add(op.InstanceNormalization(x, scale, 0.0, _label="norm"), bias),
            op.Add(op.GroupNormalization(x, scale, 0.0, _label="norm"), bias),
        ]

    def check(self, match: Match) -> str | None:
        return _channel_reason(match["x"], match["bias"], "bias")

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        norm = match.node("norm")
        return op.node(norm.op, [match["x"], match["scale"], _per_channel(op, match["bias"])], dict(norm.attrs)).output


# -- Euclidean norm -------------------------------------------------------------------------------------------------


class FuseL2Norm(Rule):
    """x / ‖x‖ along one axis. The operator gives zeros for a vector of zeros, where a bare division gives NaN."""

    def pattern(self, op: PatternOps, x: Any, axes_: Any, floor: Any, top_: Any, target: Any) -> Any:
        squares = op.one_of(op.Mul(x, x), op.Pow(x, 2.0))
        norm = op.one_of(op.ReduceL2(x, axes_, _label="reduce"), op.Sqrt(op.ReduceSum(squares, axes_, _label="reduce")))
        bounded = op.one_of(op.Clip(norm, floor, top_), op.Max(norm, floor), norm)
        return op.Div(x, op.one_of(op.Expand(bounded, target, _label="expand"), bounded))

    def check(self, match: Match) -> str | None:
        x = match["x"]
        if dtype_of(x) is not DType.float32:
            return "the operand is not known to be float32"
        axes = reduced_axes(match.node("reduce"))
        if axes is None or len(axes) != 1:
            return "the norm is not known to be taken along one axis"
        if match.get("top_") is not None:
            return "the norm is bounded from above"
        expand = match.labels.get("expand")
        if expand is not None and not reshapes_to(expand.output, expand.input(1), x):
            return "the norm may be expanded beyond the operand"
        floor = match.get("floor")
        if floor is None:
            return None
        least = match.scalar("floor")
        if least is None or floor.const is None or widens(x, floor.const.shape):
            return "the least norm is not one constant number"
        # no norm but 0 is smaller than the root of the smallest square that float32 can hold
        smallest = math.sqrt(float(np.finfo(np.float32).smallest_subnormal))
        return None if 0 < least <= smallest else f"vectors shorter than {least:g} would be stretched to length 1"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        axes = reduced_axes(match.node("reduce"))
        assert axes is not None
        return op.LpNormalization(match["x"], axis=axes[0], p=2)


class ChannelFusion(RulePass):
    name: ClassVar[str] = "fuse_channel_normalizations"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseGroupNorm, AbsorbChannelScale, AbsorbChannelBias, FuseL2Norm)
