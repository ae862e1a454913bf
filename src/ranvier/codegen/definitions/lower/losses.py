"""Losses over class scores: NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import cast, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

INT64 = DType.int64
Score = Callable[[NestBuilder, list[View], Expr], Expr]  # minus the loss of a label, from the given sources


def _known_reduction(node: Node) -> str | None:
    name = node.attrs.get("reduction") or "mean"
    return None if name in ("none", "sum", "mean") else f"reduction {name!r}"


@lowers("NegativeLogLikelihoodLoss", check=_known_reduction)
def negative_log_likelihood_loss(n: NodeView, b: Definitions) -> None:
    _loss(n, b, [n.input(0)], _chosen)


@lowers("SoftmaxCrossEntropyLoss", check=_known_reduction)
def softmax_cross_entropy_loss(n: NodeView, b: Definitions) -> None:
    scores, dtype = n.input(0), n.dtype(0)
    wide = wide_type(dtype)
    if n.rank(0) < 2:
        raise Declined(f"{n.op}: scores of shape {list(n.shape(0))}")

    def folds(x: Expr) -> list[Reduce]:
        return [Reduce("max", x, wide), Reduce("sum", op("exp", sub(x, Result(0, wide))), wide)]

    if not n.wants(1):  # two numbers per label are enough

        def sums(e: list[Expr]) -> RowBody:
            finals: dict[int, Expr] = {0: Result(0, wide), 1: op("log", Result(1, wide))}
            return RowBody(folds(cast(e[0], wide)), finals=finals)

        peak, total = b.rows([scores], [1], sums, [(wide, False), (wide, False)], domain=n.shape(0), keepdims=False)

        def score(nest: NestBuilder, views: list[View], label: Expr) -> Expr:
            shifted = sub(cast(_chosen(nest, views, label), wide), nest.load(views[1]))
            return sub(shifted, nest.load(views[2]))

        _loss(n, b, [scores, peak, total], score)
        return

    def logs(e: list[Expr]) -> RowBody:
        x = cast(e[0], wide)
        return RowBody(folds(x), maps={0: sub(sub(x, Result(0, wide)), op("log", Result(1, wide)))})

    (log_prob,) = b.rows(
        [scores], [1], logs, [(wide, True)], domain=n.shape(0), results=[n.outputs[1] if wide is dtype else None]
    )
    if wide is not dtype:
        b.pointwise([log_prob], lambda e: cast(e[0], dtype), dtype, out=n.outputs[1])
    if n.wants(0):
        _loss(n, b, [log_prob], _chosen)


def _chosen(nest: NestBuilder, views: list[View], label: Expr) -> Expr:
    """The element of the first source [N, C, …] that belongs to this label [N, …]."""
    scores = views[0]
    return nest.load(scores, (scores.strides[0], *scores.strides[2:]), at=mul(label, Size(scores.strides[1])))


def _loss(n: NodeView, b: Definitions, sources: Sequence[Value], score: Score) -> None:
    """Minus the score of each label, weighted by class; the mean divides by the weights that counted."""
    shape, labels = n.shape(0), n.input(1)
    where_, dtype, wide = n.shape(1), n.out_dtype(), wide_type(n.out_dtype())
    if len(shape) < 2 or where_ != (shape[0], *shape[2:]):
        raise Declined(f"{n.op}: scores {list(shape)} and labels {list(where_)} do not fit")
    classes, ignored = shape[1], n.attrs.get("ignore_index")
    weights = n.input(2) if n.has(2) else None

    def counts(label: Expr) -> Expr:
        if ignored is None:
            return const(True, DType.bool)
        return compare("ne", label, const(int(ignored), INT64))

    _check_labels(n, b, labels, classes, counts)

    def gather(nest: NestBuilder, views: list[View]) -> list[Expr]:
        label = cast(nest.load(views[0]), INT64)
        counted = counts(label)
        safe = op("max", op("min", label, Size(max(0, classes - 1))), const(0, INT64))
        weight = cast(counted, wide)
        if weights is not None:
            own = nest.load(views[1], (0,) * len(where_), at=mul(safe, Size(views[1].strides[0])))
            weight = where(counted, cast(own, wide), const(0.0, wide))
        found = cast(score(nest, views[1 + (weights is not None) :], safe), wide)
        value = where(counted, mul(op("neg", found), weight), const(0.0, wide))
        return [value, weight]

    given = [labels, *([weights] if weights is not None else []), *sources]
    reduction = n.attr("reduction", "mean")
    if reduction == "none":
        b.moved(given, lambda nest, views: cast(gather(nest, views)[0], dtype), dtype, where_, n.outputs[0])
        return

    def build(e: list[Expr]) -> RowBody:
        reduces = [Reduce("sum", e[0], wide)]
        value: Expr = Result(0, wide)
        if reduction == "mean":
            reduces.append(Reduce("sum", e[1], wide))
            value = div(value, Result(1, wide))
        return RowBody(reduces, finals={0: cast(value, dtype)})

    b.rows(
        [],
        range(len(where_)),
        build,
        [(dtype, False)],
        domain=where_,
        keepdims=False,
        results=[n.outputs[0]],
        sources=given,
        gather=gather,
    )


def _check_labels(n: NodeView, b: Definitions, labels: Value, classes: int, counts: Callable[[Expr], Expr]) -> None:
    where_ = b.shape(labels)
    if 0 in where_:
        return
    if classes == 0:
        raise Declined(f"{n.op}: no classes")

    def outside(e: list[Expr]) -> RowBody:
        label = cast(e[0], INT64)
        bad = op("not", between(const(0, INT64), label, Size(classes)), dtype=DType.bool)
        bad = op("and", bad, counts(label), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([labels], range(len(where_)), outside, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: a label is out of range for {classes} classes")
