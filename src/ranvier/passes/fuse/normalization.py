"""Layer and RMS normalisation, in three steps that compose.

First the core is found, whatever its spelling, and becomes a normalisation with a scale of ones. Then casts around
it go (the operator computes in float32 by itself), and the multiplication and addition after it move into scale and
bias. A step that does not apply leaves a graph that is already right.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import Match, OneOf, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import Shape
from ranvier.passes.base import RulePass
from ranvier.passes.facts import SMALL, array_of, dtype_of, rank_of, shape_of, widens
from ranvier.passes.fuse.proofs import NARROW_FLOATS, reduced_axes, same_dim, spreads_into, trailing_count

# float64 is left alone: the standard would compute its statistics in float32
STASHED = NARROW_FLOATS | {DType.float32}


# -- the core -------------------------------------------------------------------------------------------------------


def _mean(op: PatternOps, x: Any, label: str) -> OneOf:
    return op.one_of(op.ReduceMean(x, ..., _label=label), op.GlobalAveragePool(x, _label=label))


def _mean_square(op: PatternOps, x: Any) -> OneOf:
    return _mean(op, op.one_of(op.Pow(x, 2.0), op.Mul(x, x)), "square")


def _inverse_root(op: PatternOps, energy: Any) -> OneOf:
    """1 / √energy"""
    root = op.Sqrt(energy)
    return op.one_of(op.Reciprocal(root), op.Div(1.0, root), op.Pow(energy, -0.5))


def _divided(op: PatternOps, x: Any, energy: Any, scale: Any) -> list[Any]:
    """x / √energy, also with a scale that was multiplied into the denominator first."""
    inverse = _inverse_root(op, energy)
    return [op.Div(x, op.Sqrt(energy)), op.Mul(x, inverse), op.Mul(x, op.Mul(inverse, scale))]


class _Core(Rule):
    """Normalises ``x`` over its last axes; ``eps`` is the constant under the root."""

    def check(self, match: Match) -> str | None:
        x = match["x"]
        if dtype_of(x) not in STASHED:
            return f"the element type {dtype_of(x)} cannot be normalised in float32"
        epsilon = match.scalar("eps")
        if epsilon is None or epsilon < 0 or _widened(x, match["eps"]):
            return "epsilon is not one constant number"
        axes = [reduced_axes(match.node(label)) for label in ("mean", "square") if label in match.labels]
        if any(a is None for a in axes):
            return "the axes of a mean are not known"
        counts = {trailing_count(a, rank_of(x)) for a in axes}
        if counts == {None}:
            return f"axes {list(axes[0] or ())} are not the last ones"
        return None if len(counts) == 1 else "mean and variance are taken over different axes"

    def core(self, op: GraphOps, match: Match, name: str) -> Value:
        x = match["x"]
        count = trailing_count(reduced_axes(match.node("square")), rank_of(x))
        assert count is not None
        ones = _ones(op, x, count)
        return op.node(name, [x, ones], {"axis": -count, "epsilon": match.scalar("eps")}).output


def _widened(x: Value, constant: Value) -> bool:
    return constant.const is None or widens(x, constant.const.shape)


def _ones(op: GraphOps, x: Value, count: int) -> Value:
    """A scale that changes nothing: as large as the normalised axes, or of size 1 where theirs is large or unknown."""
    dtype, shape = dtype_of(x), shape_of(x)
    assert dtype is not None
    sizes = tuple(d for d in (shape or ())[-count:] if isinstance(d, int))
    whole = len(sizes) == count and math.prod(sizes) <= SMALL
    return op.constant(np.ones(sizes if whole else (1,), dtype.numpy), "ones")


class FuseLayerNorm(_Core):
    """(x - mean) / √(variance + ε)"""

    def pattern(self, op: PatternOps, x: Any, eps: Any, scale: Any) -> Any:
        centred = op.Sub(x, _mean(op, x, "mean"))
        return _divided(op, centred, op.Add(_mean_square(op, centred), eps), scale)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        y = self.core(op, match, "LayerNormalization")
        scale = match.get("scale")
        return y if scale is None else op.Mul(y, scale)


class FuseMovedLayerNorm(_Core):
    """x · gain + (bias - mean · gain) with gain = scale / √(variance + ε), as TensorFlow writes it"""

    def pattern(self, op: PatternOps, x: Any, eps: Any, scale: Any, bias: Any) -> Any:
        mean = _mean(op, x, "mean")
        inverse = _inverse_root(op, op.Add(_mean_square(op, op.Sub(x, mean)), eps))
        gain = op.one_of(op.Mul(inverse, scale), inverse)
        moved = op.Mul(mean, gain)
        return [op.Add(op.Mul(x, gain), op.Sub(bias, moved)), op.Sub(op.Mul(x, gain), moved)]

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        y = self.core(op, match, "LayerNormalization")
        scale, bias = match.get("scale"), match.get("bias")
        if scale is not None:
            y = op.Mul(y, scale)
        return y if bias is None else op.Add(y, bias)


class FuseRMSNorm(_Core):
    """x / √(mean(x²) + ε)"""

    def pattern(self, op: PatternOps, x: Any, eps: Any, scale: Any) -> Any:
        return _divided(op, x, op.Add(_mean_square(op, x), eps), scale)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        y = self.core(op, match, "RMSNormalization")
        scale = match.get("scale")
        return y if scale is None else op.Mul(y, scale)


# -- what stands around it ------------------------------------------------------------------------------------------


def _norms(op: PatternOps, x: Any, scale: Any) -> list[Any]:
    return [op.LayerNormalization(x, scale, _label="norm"), op.RMSNormalization(x, scale, _label="norm")]


def _remade(op: GraphOps, norm: Node, operands: list[Value]) -> Value:
    return op.node(norm.op, operands, dict(norm.attrs)).output


class AbsorbCasts(Rule):
    """A half-precision tensor that is normalised in float32 and rounded before its scale: what the operator does."""

    keep_inner = True  # others may read the widened tensor

    def pattern(self, op: PatternOps, x: Any, scale: Any) -> Any:
        return [op.Cast(norm) for norm in _norms(op, op.Cast(x), scale)]

    def check(self, match: Match) -> str | None:
        norm, x = match.node("norm"), match["x"]
        if len(norm.output.uses) > 1 or norm.output.is_graph_output:
            return "the float32 result is used elsewhere"
        if dtype_of(x) not in NARROW_FLOATS or dtype_of(match.root.output) is not dtype_of(x):
            return "the casts do not lead from a half-precision type to float32 and back"
        if dtype_of(norm.input(0)) is not DType.float32:
            return "the normalisation is not computed in float32"
        return None if match.scalar("scale") == 1.0 else "the scale is applied before the result is rounded"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x, ones, dtype = match["x"], array_of(match["scale"]), dtype_of(match["x"])
        assert ones is not None and dtype is not None
        return _remade(op, match.node("norm"), [x, op.constant(ones.astype(dtype.numpy), "ones")])


def _affine_reason(x: Value, norm: Node, operand: Value, what: str) -> str | None:
    """Why ``operand`` cannot be the scale or bias of a normalisation of ``x``."""
    if dtype_of(operand) is None or dtype_of(operand) is not dtype_of(x):
        return f"{what} is of another element type"
    shape, sizes = shape_of(operand), _normalised(x, norm)
    if shape is None or sizes is None:
        return f"the shape of {what} or of the operand is not known"
    rank = rank_of(x)
    inner = _without_leading_ones(shape, len(sizes))
    if len(shape) > len(sizes) and (rank is None or len(shape) > rank or len(inner) > len(sizes)):
        return f"{what} differs along axes that are not normalised"
    if operand.const is None and (len(shape) != len(sizes) or not _same_dims(shape, sizes)):
        return f"{what} is computed and not of the shape of the normalised axes"
    return None if spreads_into(inner, sizes) else f"{what} does not fit the normalised axes"


def _same_dims(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(same_dim(d, e) for d, e in zip(a, b))


def _normalised(x: Value, norm: Node) -> Shape | None:
    """The sizes of the axes that are normalised."""
    shape = shape_of(x)
    return None if shape is None else shape[norm.attrs.get("axis", -1) :]


def _without_leading_ones(shape: Shape, keep: int) -> Shape:
    first = 0
    while len(shape) - first > keep and shape[first] == 1:
        first += 1
    return shape[first:]


def _affine_operand(op: GraphOps, x: Value, norm: Node, operand: Value) -> Value:
    """``operand`` in the shape of the normalised axes; a constant is spread over them where their sizes are known."""
    sizes, constant = _normalised(x, norm), operand.const
    assert sizes is not None
    if constant is None or constant.shape == sizes:
        return operand
    array = constant.numpy()
    array = array.reshape(_without_leading_ones(constant.shape, len(sizes)))
    static = tuple(d for d in sizes if isinstance(d, int))
    if len(static) == len(sizes):
        array = np.broadcast_to(array, static)
    return op.constant(np.ascontiguousarray(array), operand.name)


class AbsorbScale(Rule):
    """A normalisation with a scale of ones, times a tensor that varies along the normalised axes only."""

    def pattern(self, op: PatternOps, x: Any, scale: Any) -> Any:
        return [op.Mul(norm, scale) for norm in _norms(op, x, 1.0)]

    def check(self, match: Match) -> str | None:
        return _affine_reason(match["x"], match.node("norm"), match["scale"], "scale")

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x, norm = match["x"], match.node("norm")
        return _remade(op, norm, [x, _affine_operand(op, x, norm, match["scale"])])


class AbsorbBias(Rule):
    """A layer normalisation without bias, plus a tensor that varies along the normalised axes only."""

    def pattern(self, op: PatternOps, x: Any, scale: Any, bias: Any) -> Any:
        return op.Add(op.LayerNormalization(x, scale, _label="norm"), bias)

    def check(self, match: Match) -> str | None:
        return _affine_reason(match["x"], match.node("norm"), match["bias"], "bias")

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        x, norm = match["x"], match.node("norm")
        return _remade(op, norm, [x, match["scale"], _affine_operand(op, x, norm, match["bias"])])


class NormalizationFusion(RulePass):
    name: ClassVar[str] = "fuse_normalizations"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseLayerNorm, FuseMovedLayerNorm, FuseRMSNorm, AbsorbCasts, AbsorbScale, AbsorbBias)
