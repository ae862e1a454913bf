"""Attention that a graph spells out (scores, a mask, softmax, values) as one call of torch's kernels for it.

Sizes are known here, so what a pass over the graph cannot prove of symbolic sizes is seen: that nothing broadcasts, and
that a mask is the causal one. Queries, keys and values are read where they lie. The result lies token by token, so that
joining the heads again is another view of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ranvier.codegen.definitions.defs import broadcast
from ranvier.codegen.definitions.exprs import HALVES, add, cast, const, op, where
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.cuda.causal import causal_forms
from ranvier.providers.cuda.library import functional, torch, torch_type
from ranvier.providers.cuda.patterns import Steps, number
from ranvier.providers.cuda.steps import Env, NodeStep
from ranvier.records import dataclass

FORBIDDEN = -1e4  # a score this low has no weight beside others


@dataclass(frozen=True)
class Scores:
    """``scale`` · q kᵀ, what is added, and where other numbers stand in their place."""

    q: Value
    turned: Value  # kᵀ
    scale: float
    added: tuple[Value, ...] = ()
    kept: tuple[tuple[Value, float, bool], ...] = ()  # conditions, the number elsewhere, and whether they are negated
    inside: tuple[Value, ...] = ()


class AttentionStep:
    """One call for all heads."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(
        self,
        label: str,
        scores: Scores,
        v: Value,
        mask: Value | None,
        causal: bool,
        out: Value,
        row: Value | None = None,
    ) -> None:
        """``row``: what the mask adds to keys, where all else that it does is to hide those behind a token."""
        self.label = label
        self._masks = [each for each in (mask, row) if each is not None]
        self.reads = (scores.q, scores.turned, v, *self._masks)
        self.writes: tuple[Value, ...] = (out,)
        self.causal = causal
        self.row = row
        self._scale = scores.scale
        self._ran = False

    def run(self, env: Env) -> None:
        q, turned, v = (env.tensors[value] for value in self.reads[:3])
        if self.row is None or not q.is_cuda:
            env.tensors[self.writes[0]] = self._by_library(env)
            return
        given = (q, turned.mT, v, env.tensors[self.row])
        forms = causal_forms(*given, self._scale)
        made = None
        if forms is not None:  # the first run only shows how results lie; meanwhile kernels are compiled
            made = forms(lambda: self._by_library(env), given, decide=self._ran)
        env.tensors[self.writes[0]] = self._by_library(env) if made is None else made
        self._ran = True

    def _by_library(self, env: Env) -> Any:
        q, turned, v = (env.tensors[value] for value in self.reads[:3])
        mask = [env.tensors[value] for value in self._masks[:1]]
        heads = q.ndim == 4
        q, k, v = (x if heads else x.unsqueeze(1) for x in (q, turned.mT, v))
        dtype = q.dtype
        if q.device.type == "cpu":  # whose sums of halves are halves
            q, k, v = (x.float() for x in (q, k, v))
        bias = None
        if mask:
            bias = mask[0] if heads or mask[0].ndim < 3 else mask[0].unsqueeze(1)
            bias = bias.to(q.dtype).expand(*q.shape[:3], k.shape[2])
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.causal, scale=self._scale)
        y = y.to(dtype)
        return y.transpose(1, 2).contiguous().transpose(1, 2) if heads else y.squeeze(1)


class MaskStep:
    """All that is done to scores between product and softmax, as one tensor to add. Layers that mask alike share it."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""
    held: Mapping[Value, Any] = {}

    def __init__(self, scores: Scores, dtype: DType, env: Env) -> None:
        self._dtype = dtype
        self._added, self._kept = scores.added, scores.kept
        self.reads = (*scores.added, *(condition for condition, _, _ in scores.kept))
        self._shape = broadcast(*(tuple(env.tensors[v].shape) for v in self.reads))
        self.out = Value("mask", TensorType(dtype, self._shape))
        self.writes: tuple[Value, ...] = (self.out,)
        self.label = "mask"

    def _lowest(self) -> float:
        return float(torch.finfo(torch_type(self._dtype)).min)

    def run(self, env: Env) -> None:
        total = torch.zeros(self._shape, dtype=torch.float32, device=env.device)
        for value in self._added:
            total = total + env.tensors[value].float()
        for condition, low, negated in self._kept:
            allowed = env.tensors[condition] != negated
            total = total + torch.where(allowed, 0.0, low)
        env.tensors[self.out] = total.clamp(min=self._lowest()).to(torch_type(self._dtype))

    def define(self, program: Definitions) -> None:
        f32, count = DType.float32, len(self._added)

        def compute(e: list[Expr]) -> Expr:
            total: Expr | None = None
            terms = [cast(x, f32) for x in e[:count]]
            for condition, (_, low, negated) in zip(e[count:], self._kept):
                pair = (const(low, f32), const(0.0, f32)) if negated else (const(0.0, f32), const(low, f32))
                terms.append(where(condition, *pair))
            for term in terms:
                total = term if total is None else add(total, term)
            assert total is not None
            return cast(op("max", total, const(self._lowest(), f32)), self._dtype)

        program.pointwise(list(self.reads), compute, self._dtype, shape=self._shape, out=self.out)


class _Masks:
    """Masks of a part, each made once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._made: dict[Any, MaskStep] = {}
        self._conditions: list[Value] = []

    def same(self, condition: Value) -> Value:
        """The first condition of which this one is a copy in every run."""
        if not self._steps.is_fixed(condition):
            return condition
        tensor = self._steps.tensor(condition)
        for other in self._conditions:
            known = self._steps.tensor(other)
            if known.shape == tensor.shape and bool(torch.equal(known, tensor)):
                return other
        self._conditions.append(condition)
        return condition

    def step(self, scores: Scores, dtype: DType) -> tuple[MaskStep, bool]:
        """The step that makes a mask, and whether it is a new one."""
        key = (scores.added, scores.kept, dtype)
        found = self._made.get(key)
        if found is not None:
            return found, False
        made = self._made[key] = MaskStep(scores, dtype, self._steps.env)
        return made, True


def attend(steps: Steps) -> None:
    """Put one step in the place of attention in steps."""
    masks = _Masks(steps)
    before: dict[int, list[MaskStep]] = {}
    for step in list(steps.steps):
        if isinstance(step, NodeStep) and step.node.op == "Softmax" and not step.node.domain:
            _attend(steps, step.node, masks, before)
    steps.steps = [each for k, step in enumerate(steps.steps) for each in (*before.get(k, ()), step)]


def _attend(steps: Steps, softmax: Node, masks: _Masks, before: dict[int, list[MaskStep]]) -> None:
    weights, into = softmax.output, softmax.input(0)
    last = steps.only_user(weights, "MatMul")
    if last is None or last.input(0) is not weights or into is None or not _over_last(softmax, steps):
        return
    v, out = last.input(1), last.output
    scores = _scores(steps, into)
    if v is None or scores is None or not _fits(steps, scores, v, into):
        return
    kept = tuple((masks.same(c), low, negated) for c, low, negated in scores.kept)
    scores = Scores(scores.q, scores.turned, scores.scale, scores.added, kept, scores.inside)
    at = steps.place(out)
    dtype = out.type.dtype if isinstance(out.type, TensorType) else None
    assert dtype is not None
    mask, causal, row = None, False, None
    if kept and not scores.added and len(kept) == 1 and _is_causal(steps, kept[0], into):
        causal = True
    elif kept or len(scores.added) > 1:
        made, new = masks.step(scores, dtype)
        if new:
            made.run(steps.env)
            before.setdefault(at, []).append(made)
        mask = made.out
        if len(kept) == len(scores.added) == 1 and _is_causal(steps, kept[0], into):
            row = scores.added[0] if _is_row(steps, scores.added[0], into) else None
    elif scores.added:
        mask = scores.added[0]
    step = AttentionStep(out.name, scores, v, mask, causal, out, row)
    step.run(steps.env)  # by which its layout is known
    steps.put(step, at, [out, weights, into, *scores.inside])


def _over_last(softmax: Node, steps: Steps) -> bool:
    rank = steps.tensor(softmax.output).ndim
    axis = int(softmax.attrs.get("axis", -1 if softmax.version >= 13 else 1))
    return softmax.version >= 13 and axis % rank == rank - 1


def _scores(steps: Steps, value: Value, inside: tuple[Value, ...] = ()) -> Scores | None:
    """How scores came to be; None where they are not of a product."""
    node = steps.made_by(value, "MatMul", "Add", "Mul", "Div", "Where")
    if node is None or not steps.is_private(value):
        return None
    if node.op == "MatMul":
        return _product(steps, node, inside)
    if node.op == "Where":
        return _replaced(steps, node, inside)
    first, second = node.input(0), node.input(1)
    if first is None or second is None:
        return None
    if node.op == "Add":
        for one, other in ((first, second), (second, first)):
            found = None if number(other) is not None else _scores(steps, one, (*inside, one))
            if found is not None:
                return Scores(found.q, found.turned, found.scale, (*found.added, other), found.kept, found.inside)
        return None
    pairs = [(first, second)] if node.op == "Div" else [(first, second), (second, first)]
    for one, other in pairs:
        by = number(other)
        found = None if not by else _scores(steps, one, (*inside, one))
        if found is not None and by and not found.added and not found.kept:
            scale = found.scale / by if node.op == "Div" else found.scale * by
            return Scores(found.q, found.turned, scale, inside=found.inside)
    return None


def _replaced(steps: Steps, node: Node, inside: tuple[Value, ...]) -> Scores | None:
    condition, first, second = node.input(0), node.input(1), node.input(2)
    for one, other, negated in ((first, second, False), (second, first, True)):
        low = number(other)
        if one is None or condition is None or low is None or not -math.inf <= low <= FORBIDDEN:
            continue
        found = _scores(steps, one, (*inside, one))
        if found is not None:
            kept = (*found.kept, (condition, max(low, -3e38), negated))
            return Scores(found.q, found.turned, found.scale, found.added, kept, found.inside)
    return None


def _product(steps: Steps, node: Node, inside: tuple[Value, ...]) -> Scores | None:
    q, turned = node.input(0), node.input(1)
    if q is None or turned is None:
        return None
    scale = 1.0
    found: list[Value] = []
    for value in (q, turned):
        scaling = steps.made_by(value, "Mul", "Div") if steps.is_private(value) else None
        by = None if scaling is None else number(scaling.input(1))
        source = None if scaling is None else scaling.input(0)
        if scaling is not None and by and source is not None:
            scale = scale / by if scaling.op == "Div" else scale * by
            inside = (*inside, value)
            found.append(source)
        else:
            found.append(value)
    return Scores(found[0], found[1], scale, inside=inside) if 0 < scale < math.inf else None


def _fits(steps: Steps, scores: Scores, v: Value, into: Value) -> bool:
    """No product broadcasts, and no mask widens the scores."""
    tensors = [steps.tensor(x) for x in (scores.q, scores.turned, v)]
    whole = steps.tensor(into)
    kind = scores.q.type.dtype if isinstance(scores.q.type, TensorType) else None
    if whole is None or any(t is None or t.ndim not in (3, 4) for t in tensors) or kind not in HALVES:
        return False
    q, turned, values = (tuple(t.shape) for t in tensors)
    alike = len(q) == len(turned) == len(values) and q[:-2] == turned[:-2] == values[:-2]
    if not alike or 0 in (*q, *turned, *values) or values[-1] != q[-1]:
        return False
    return tuple(whole.shape) == (*q[:-1], turned[-1])


def _is_row(steps: Steps, value: Value, into: Value) -> bool:
    """Whether something that is added to scores is a number for each key of a sequence, the same for all heads."""
    tensor, whole = steps.tensor(value), tuple(steps.tensor(into).shape)
    kind = value.type.dtype if isinstance(value.type, TensorType) else None
    if (
        tensor.ndim != 4
        or len(whole) != 4
        or kind is not (into.type.dtype if isinstance(into.type, TensorType) else None)
    ):
        return False
    return tuple(tensor.shape[1:]) == (1, 1, whole[3]) and tensor.shape[0] in (1, whole[0])


def _is_causal(steps: Steps, kept: tuple[Value, float, bool], into: Value) -> bool:
    condition, _, negated = kept
    tensor, (*_, time, total) = steps.tensor(condition), steps.tensor(into).shape
    if time != total or tensor.numel() != time * total or not steps.is_fixed(condition):
        return False
    lower = torch.ones(time, total, dtype=torch.bool, device=tensor.device).tril()
    return bool(torch.equal(tensor.reshape(time, total) != negated, lower))


__all__ = ["AttentionStep", "MaskStep", "attend"]
