"""Simpler masks for Attention: booleans instead of numbers to add, and no mask at all where it is the causal one."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.patterns import Match, PatternOps, Rule, scalar_of
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.facts import dtype_of, shape_of
from ranvier.passes.fuse.proofs import same_dim

LARGEST = 1 << 22  # elements of a constant mask that are worth a look


def _with_mask(op: GraphOps, node: Node, mask: Value | None, **attrs: Any) -> Value:
    operands = [*node.inputs[:3], *(() if mask is None else (mask,))]
    return op.node("Attention", operands, {**node.attrs, **attrs}).output


def side_output_reason(node: Node) -> str | None:
    """A node that also gives out its keys or scores stays as it is."""
    used = any(value.uses or value.is_graph_output for value in node.outputs[1:])
    return "other outputs are used" if used else None


class BooleanMask(Rule):
    """Adding 0 or minus infinity by a condition: the condition itself is the operator's boolean mask."""

    keep_inner = True  # the layers of a model share one mask

    def pattern(self, op: PatternOps, q: Any, k: Any, v: Any, keep: Any, drop: Any) -> Any:
        return [
            op.Attention(q, k, v, op.Where(keep, 0.0, -math.inf, _label="where")),
            op.Attention(q, k, v, op.Where(drop, -math.inf, 0.0, _label="where")),
        ]

    def check(self, match: Match) -> str | None:
        condition = match.get("keep") or match["drop"]
        whole, own = shape_of(match.node("where").output), shape_of(condition)
        alike = whole is not None and own is not None and len(own) == len(whole) and same_dim(own[-1], whole[-1])
        return side_output_reason(match.root) if alike else "the condition is not known to cover all keys"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        keep = match.get("keep")
        return _with_mask(op, match.root, keep if keep is not None else op.Not(match["drop"]))


class CausalMask(Rule):
    """A mask that lets every query see the keys up to its own position."""

    keep_inner = True

    def pattern(self, op: PatternOps, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.Attention(q, k, v, mask)

    def check(self, match: Match) -> str | None:
        if not is_causal(match["mask"]):
            return None  # an ordinary mask is no near miss; it stays
        q, k, mask = (shape_of(match[name]) for name in ("q", "k", "mask"))
        if q is None or k is None or mask is None or not (same_dim(mask[-2], q[-2]) and same_dim(mask[-1], k[-2])):
            return "the causal mask is not known to be of the size of the scores"
        return side_output_reason(match.root)

    def rewrite(self, op: GraphOps, match: Match) -> Value | None:
        return _with_mask(op, match.root, None, is_causal=1) if is_causal(match["mask"]) else None


def is_causal(mask: Value) -> bool:
    """The mask allows the lower triangle, diagonal included, and forbids the rest, alike for all samples and heads."""
    shape = shape_of(mask)
    if shape is None or len(shape) < 2 or any(d != 1 for d in shape[:-2]):
        return False
    if mask.const is not None:
        return mask.const.size <= LARGEST and _allows_lower_triangle(mask.const.numpy())
    node = mask.producer
    if node is None:
        return False
    if node.op == "Where":
        condition, low, high = node.inputs[0], scalar_of(node.input(1)), scalar_of(node.input(2))
        return (low, high) == (-math.inf, 0.0) and condition is not None and _is_upper(condition)
    if dtype_of(mask) is DType.bool:
        return _is_lower_ones(mask)
    return False


def _allows_lower_triangle(mask: np.ndarray[Any, Any]) -> bool:
    mask = mask.reshape(mask.shape[-2:])
    lower = np.tri(*mask.shape, dtype=np.bool_)
    if mask.dtype == np.bool_:
        return bool(np.array_equal(mask, lower))
    if mask.dtype.kind not in "fV":
        return False
    # the lowest finite number of a type is how many write minus infinity
    forbidden = (mask == -np.inf) | (mask.astype(np.float64) <= -1e9) | (mask == _lowest(mask.dtype))
    return bool(np.all(mask[lower] == 0) and np.all(forbidden[~lower]))


def _lowest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).min)


def _is_upper(condition: Value) -> bool:
    """True above the diagonal: the lower triangle of ones compared with zero."""
    node = condition.producer
    if node is None:
        return False
    if node.op == "Equal":
        left, right = node.inputs[0], node.inputs[1]
        return left is not None and scalar_of(right) == 0.0 and _is_lower_ones(left)
    return node.op == "Not" and node.inputs[0] is not None and _is_lower_ones(node.inputs[0])


def _is_lower_ones(value: Value) -> bool:
    """``Trilu`` of a tensor of ones, keeping what is on and below the diagonal; casts do not matter."""
    node = value.producer
    while node is not None and node.op in ("Cast", "Unsqueeze"):
        operand = node.inputs[0]
        node = operand.producer if operand is not None else None
    if node is None or node.op != "Trilu" or node.attrs.get("upper", 1):
        return False
    diagonal, source = node.input(1), node.inputs[0]
    if diagonal is not None and scalar_of(diagonal) != 0.0:
        return False
    while source is not None and source.producer is not None and source.producer.op in ("Expand", "Cast"):
        source = source.producer.inputs[0]
    if source is None or source.producer is None:
        return scalar_of(source) == 1.0
    filled = source.producer
    value_attr = filled.attrs.get("value")
    return filled.op == "ConstantOfShape" and value_attr is not None and np.asarray(value_attr).item() == 1
