"""softmax(Q·Kᵀ·scale + mask)·V as one Attention node.

The rules only look at how the scores are computed; how Q, K and V came to be four-dimensional is left as it is. What
must be proven is that no product broadcasts over samples or heads in a way the operator does not, and that the mask
covers all keys: the operator takes a shorter mask to forbid the rest.

One difference is meant: a query all of whose keys are masked by minus infinity gives zeros, not NaN.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.patterns import Match, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import Shape
from ranvier.passes.base import RulePass
from ranvier.passes.facts import dtype_of, integers_of, rank_of, shape_of, widens
from ranvier.passes.fuse.masks import BooleanMask, CausalMask, side_output_reason
from ranvier.passes.fuse.proofs import FLOATS, is_last_axis, same_dim

FORBIDDEN = -1e9  # a score this low has no weight beside any other, and swallows the score it replaces


class TransposeThroughThreeAxes(Rule):
    """The last two axes of a tensor swapped with the leading ones flattened for it: a plain Transpose."""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        return op.Reshape(op.Transpose(op.Reshape(x, ..., _label="flat"), perm=(0, 2, 1)), ...)

    def check(self, match: Match) -> str | None:
        before, flat, after = (shape_of(v) for v in (match["x"], match.node("flat").output, match.root.output))
        if before is None or flat is None or after is None or len(before) < 3 or len(after) != len(before):
            return "the ranks are not known to be equal"
        kept = zip((*flat[1:], *after), (*before[-2:], *before[:-2], before[-1], before[-2]))
        return None if all(same_dim(a, b) for a, b in kept) else "the leading axes are not known to be kept"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        rank = rank_of(match["x"])
        assert rank is not None
        return op.Transpose(match["x"], perm=(*range(rank - 2), rank - 1, rank - 2))


# -- the core -------------------------------------------------------------------------------------------------------


def _scaled(op: PatternOps, x: Any, factor: Any, divisor: Any) -> Any:
    return op.one_of(op.Mul(x, factor), op.Div(x, divisor), x)


class FuseAttention(Rule):
    """Scores by a MatMul with transposed keys, scaled, masked, through Softmax into a MatMul with the values."""

    def pattern(
        self,
        op: PatternOps,
        q: Any,
        q_factor: Any,
        q_divisor: Any,
        k: Any,
        k_factor: Any,
        k_divisor: Any,
        turned: Any,
        factor: Any,
        divisor: Any,
        cap: Any,
        uncap: Any,
        mask: Any,
        keep: Any,
        drop: Any,
        blocked: Any,
        v: Any,
    ) -> Any:
        queries = _scaled(op, q, q_factor, q_divisor)
        keys = op.one_of(
            op.Transpose(_scaled(op, k, k_factor, k_divisor), _label="turn"),
            _scaled(op, op.Transpose(k, _label="turn"), k_factor, k_divisor),
            _scaled(op, turned, k_factor, k_divisor),
        )
        product = op.MatMul(queries, keys, _label="scores")
        scores = _scaled(op, product, factor, divisor)
        capped = op.one_of(op.Mul(op.Tanh(op.Div(scores, cap)), uncap), scores)
        masked = op.one_of(
            op.Add(capped, mask),
            op.Where(keep, capped, blocked),
            op.Where(drop, blocked, capped),
            capped,
        )
        weights = op.one_of(
            op.Softmax(masked, _label="softmax"),
            op.Cast(op.Softmax(op.Cast(masked, _label="widen"), _label="softmax")),
        )
        guarded = op.one_of(weights, op.Where(op.IsNaN(weights), 0.0, weights))
        return op.MatMul(guarded, v)

    def check(self, match: Match) -> str | None:
        q, v, softmax = match["q"], match["v"], match.node("softmax")
        if dtype_of(q) not in FLOATS or dtype_of(v) is not dtype_of(q):
            return "Q and V are not known to be of one float type"
        if not is_last_axis(softmax.attrs.get("axis", -1 if softmax.version >= 13 else 1), softmax.output):
            return "Softmax does not run over the keys"
        widen = match.labels.get("widen")
        if widen is not None and dtype_of(widen.output) not in FLOATS:
            return "Softmax runs in a type that is not known"
        scale = _scale(match)
        if scale is None or not 0 < scale < math.inf:
            return "the scale is not one positive constant number"
        cap = match.scalar("cap")
        if match.get("cap") is not None and (cap is None or cap <= 0 or cap != match.scalar("uncap")):
            return "the cap of the scores is not one positive constant number"
        return _layout_reason(match) or _mask_reason(match)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        q, k, v = match["q"], _keys(op, match), match["v"]
        mask = _mask(op, match, k)
        attrs: dict[str, Any] = {"scale": _scale(match)}
        if match.get("cap") is not None:
            attrs["softcap"] = match.scalar("cap")
        widen = match.labels.get("widen")
        if widen is not None:
            precision = dtype_of(widen.output)
            assert precision is not None
            attrs["softmax_precision"] = precision.onnx
        operands = [q, k, v] if mask is None else [q, k, v, mask]
        if rank_of(q) == 4:
            return op.Attention(*operands, **attrs)
        one = op.constant(np.array([1]), "heads_axis")  # samples and heads in one axis: many samples of one head
        y = op.Attention(*(op.Unsqueeze(x, one) if rank_of(x) == 3 else x for x in operands), **attrs)
        return op.Squeeze(y, one)


def _scale(match: Match) -> float | None:
    """All factors on the way to the scores, or None where one is not a constant number."""
    total = 1.0
    for name in ("q_factor", "k_factor", "factor", "q_divisor", "k_divisor", "divisor"):
        if match.get(name) is None:
            continue
        number, constant = match.scalar(name), match[name].const
        if constant is None or number is None or number == 0 or widens(match["q"], constant.shape):
            return None
        total = total / number if name.endswith("divisor") else total * number
    return total


# -- layout ---------------------------------------------------------------------------------------------------------


def _transposed_keys(match: Match) -> Shape | None:
    """The shape of Kᵀ as it enters the product."""
    return shape_of(match.node("scores").inputs[1])


def _layout_reason(match: Match) -> str | None:
    """Why Q, K and V are not [batch, heads, time, size], or [batch, time, size], as the operator takes them."""
    q, keys, v = shape_of(match["q"]), _transposed_keys(match), shape_of(match["v"])
    if q is None or keys is None or v is None:
        return "the ranks of Q, K and V are not known"
    if not len(q) == len(keys) == len(v) or len(q) not in (3, 4):
        return f"Q, K and V have {len(q)}, {len(keys)} and {len(v)} axes"
    if not same_dim(q[0], keys[0], v[0]):
        return "Q, K and V are not known to be of one batch"
    if len(q) == 4 and not (same_dim(keys[1], v[1]) and (keys[1] == 1 or same_dim(q[1], keys[1]))):
        return "Q, K and V are not known to have fitting heads"
    return None


def _keys(op: GraphOps, match: Match) -> Value:
    """K as [batch, heads, time, size], which costs nothing where it was transposed for the product."""
    turn = match.labels.get("turn")
    if turn is None:
        turned = match["turned"]
        rank = rank_of(turned)
        assert rank is not None
        return op.Transpose(turned, perm=(*range(rank - 2), rank - 1, rank - 2))
    k = match["k"]
    perm = turn.attrs.get("perm") or tuple(reversed(range(rank_of(k) or 0)))
    swapped = (*perm[:-2], perm[-1], perm[-2])
    return k if swapped == tuple(range(len(swapped))) else op.Transpose(k, perm=swapped)


# -- mask -----------------------------------------------------------------------------------------------------------


def _mask_operand(match: Match) -> Value | None:
    return match.get("mask") or match.get("keep") or match.get("drop")


def _mask_reason(match: Match) -> str | None:
    """Why the mask cannot be handed to the operator."""
    mask, q = _mask_operand(match), shape_of(match["q"])
    if mask is None:
        return None
    shape, result = shape_of(mask), shape_of(match.root.output)
    assert q is not None
    if shape is None:
        return "the rank of the mask is not known"
    if len(shape) > len(q):
        return "the mask has more axes than the scores"
    if match.get("mask") is not None and dtype_of(mask) is not dtype_of(match["q"]):
        return "the mask is of another element type"
    for axis in range(len(q) - len(shape), len(q) - 1):
        own = shape[axis - len(q)]
        # where the result is as large as Q, no mask can have widened the scores
        if own != 1 and not same_dim(own, q[axis]) and (result is None or not same_dim(result[axis], q[axis])):
            return "the mask may widen the scores"
    if match.get("mask") is None:
        return _blocked_reason(match)
    return None


def _blocked_reason(match: Match) -> str | None:
    blocked, dtype, constant = match.scalar("blocked"), dtype_of(match["q"]), match["blocked"].const
    if blocked is None or constant is None or widens(match.node("scores").output, constant.shape):
        return "masked scores are not replaced by one constant number"
    if blocked == -math.inf or (blocked <= FORBIDDEN and dtype in (DType.float32, DType.bfloat16)):
        return None
    return f"masked scores become {blocked:g}, which is not low enough to count as forbidden"


def _mask(op: GraphOps, match: Match, k: Value) -> Value | None:
    """The mask to add, or the boolean mask of what may be seen, as long as the keys."""
    mask = _mask_operand(match)
    if mask is None:
        return None
    keys, shape = _transposed_keys(match), shape_of(mask)
    assert keys is not None and shape is not None
    if match.get("mask") is None:
        blocked, dtype = match.scalar("blocked"), dtype_of(match["q"])
        assert blocked is not None and dtype is not None
        if blocked == -math.inf:
            mask = mask if match.get("keep") is not None else op.Not(mask)
        else:  # a query without any key must still see all of them alike
            low, zero = (op.constant(np.array(x, dtype.numpy)) for x in (blocked, 0.0))
            mask = op.Where(mask, zero, low) if match.get("keep") is not None else op.Where(mask, low, zero)
    if shape and same_dim(shape[-1], keys[-1]):
        return mask
    # it may be of length 1, which the product broadcasts and the operator does not
    return op.Expand(mask, op.Shape(k, start=-2, end=-1))


# -- grouped heads --------------------------------------------------------------------------------------------------


def _repeated(op: PatternOps, x: Any, name: str) -> Any:
    spread = op.Expand(op.Unsqueeze(x, ..., _label=f"{name}_new"), ..., _label=f"{name}_spread")
    return op.Reshape(spread, ..., _label=f"{name}_whole")


class ShareKeyHeads(Rule):
    """Keys and values that were repeated so that every query head has its own: the operator shares them."""

    keep_inner = True  # repeated keys may also leave the model

    def pattern(self, op: PatternOps, q: Any, k: Any, v: Any, mask_: Any) -> Any:
        return op.Attention(q, _repeated(op, k, "k"), _repeated(op, v, "v"), mask_)

    def check(self, match: Match) -> str | None:
        return side_output_reason(match.root) or _repetition_reason(match, "k") or _repetition_reason(match, "v")

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        operands = [match["q"], match["k"], match["v"], *match.root.inputs[3:]]
        return op.node("Attention", operands, dict(match.root.attrs)).output


def _repetition_reason(match: Match, name: str) -> str | None:
    """Why a tensor is not [batch, heads, time, size] with each head repeated some times in a row."""
    values = match[name], match.node(f"{name}_spread").output, match.node(f"{name}_whole").output
    own, spread, whole = (shape_of(v) for v in values)
    if own is None or spread is None or whole is None or (len(own), len(spread), len(whole)) != (4, 5, 4):
        return "the shapes around the repetition are not known"
    if integers_of(match.node(f"{name}_new").input(1)) not in ((2,), (-3,)):
        return "the heads are not repeated one by one"
    kept = ((own[0], spread[0], whole[0]), (own[1], spread[1]), (own[2], spread[3], whole[2]))
    if not all(same_dim(*dims) for dims in (*kept, (own[3], spread[4], whole[3]))):
        return "the repetition may change more than the heads"
    heads, copies = own[1], spread[2]
    known = isinstance(heads, int) and isinstance(copies, int) and whole[1] == heads * copies
    return None if known else "the number of heads is not known"


class LayoutFusion(RulePass):
    """Detours in data movement that hide attention; exact."""

    name: ClassVar[str] = "fuse_layout"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (TransposeThroughThreeAxes,)


class AttentionFusion(RulePass):
    name: ClassVar[str] = "fuse_attention"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseAttention, ShareKeyHeads, CausalMask, BooleanMask)
