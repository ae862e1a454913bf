"""Einsum: diagonals and sums of single operands, then products of pairs from left to right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import cast, const, mul
from ranvier.codegen.definitions.lower.contraction import multiply
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import NUMERIC
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.graph.ir import Node, Value
from ranvier.records import dataclass

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Term:
    """A tensor and what its axes are called, each name once."""

    value: Value
    labels: Labels


def _equation(node: Node) -> str:
    found = node.attrs.get("equation", "")
    return (found.decode() if isinstance(found, bytes) else str(found)).replace(" ", "")


def _well_formed(node: Node) -> str | None:
    left = _equation(node).partition("->")[0].split(",")
    if len(left) != len(node.inputs):
        return f"{len(left)} terms for {len(node.inputs)} operands"
    return None


def _labels(term: str, rank: int) -> Labels:
    """One name per axis; those an ellipsis stands for are numbered from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        raise Declined(f"Einsum: term {term!r} does not fit a tensor of rank {rank}")
    return (*before, *(f"...{hidden - k}" for k in range(hidden)), *after)


def _result_labels(equation: str, terms: Sequence[Labels]) -> Labels:
    dots = sorted({label for labels in terms for label in labels if len(label) > 1}, key=lambda d: -int(d[3:]))
    left, arrow, right = equation.partition("->")
    if arrow:
        before, ellipsis, after = right.partition("...")
        return (*before, *(dots if ellipsis else ()), *after)
    letters = [c for c in left if c.isalpha()]
    return (*dots, *sorted(c for c in set(letters) if letters.count(c) == 1))


@lowers("Einsum", dtypes=NUMERIC, check=_well_formed)
def einsum(n: NodeView, b: Definitions) -> None:
    equation, dtype = _equation(n.node), n.out_dtype()
    names = [_labels(term, n.rank(k)) for k, term in enumerate(equation.partition("->")[0].split(","))]
    sizes: dict[str, int] = {}
    for k, labels in enumerate(names):
        for label, size in zip(labels, n.shape(k)):
            known = sizes.setdefault(label, size)
            if known != size:
                if 1 not in (known, size):
                    raise Declined(f"Einsum: {label!r} is {known} and {size}")
                sizes[label] = size if known == 1 else known
    result = _result_labels(equation, names)
    if len(set(result)) != len(result) or not set(result) <= sizes.keys():
        raise Declined(f"Einsum: the result of {equation!r}")
    if 0 in sizes.values():  # a sum of nothing
        b.moved([], lambda nest, views: const(0, dtype), dtype, n.out_shape(), n.outputs[0])
        return
    wide = wide_type(dtype)
    terms: list[Term] = []
    for k, labels in enumerate(names):
        value = n.input(k)
        if wide is not dtype:
            value = b.pointwise([value], lambda e: cast(e[0], wide), wide)
        terms.append(_single(b, value, labels, sizes))
    made = _Product(b, sizes, result).of(terms, n.outputs[0] if wide is dtype else None)
    if wide is not dtype:
        b.pointwise([made], lambda e: cast(e[0], dtype), dtype, out=n.outputs[0])


def _single(b: Definitions, value: Value, labels: Labels, sizes: dict[str, int]) -> Term:
    """The operand without axes that only broadcast, and along its diagonal where a label repeats."""
    shape = b.shape(value)
    kept = [k for k, label in enumerate(labels) if shape[k] == sizes[label]]
    left: Labels = tuple(labels[k] for k in kept)
    if len(kept) < len(shape):
        value = b.reshape(value, [shape[k] for k in kept])
    distinct = tuple(dict.fromkeys(left))
    if distinct == left:
        return Term(value, left)

    def diagonal(view: View) -> View:
        steps = dict.fromkeys(distinct, 0)
        for label, stride in zip(left, view.strides):
            steps[label] += stride
        whole = tuple(sizes[label] for label in distinct)
        return View(view.storage, view.dtype, whole, tuple(steps.values()), view.offset)

    return Term(b.alias(value, diagonal, [sizes[label] for label in distinct]), distinct)


class _Product:
    """The sum of products of terms, over all labels that the result does not name."""

    def __init__(self, b: Definitions, sizes: dict[str, int], result: Labels) -> None:
        self.b = b
        self.sizes = sizes
        self.result = result

    def shape(self, labels: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[label] for label in labels)

    def of(self, terms: list[Term], out: Value | None) -> Value:
        value = terms[0]
        for k, term in enumerate(terms[1:]):
            needed = set(self.result).union(*(t.labels for t in terms[k + 2 :]))
            value = self.pair(
                self.reduced(value, needed | set(term.labels)),
                self.reduced(term, needed | set(value.labels)),
                needed,
                out if k == len(terms) - 2 else None,
            )
        value = self.reduced(value, set(self.result))
        if value.value is out:
            return value.value
        return self.b.transpose(value.value, [value.labels.index(label) for label in self.result], out)

    def reduced(self, term: Term, needed: set[str]) -> Term:
        """Without the labels nobody asks for any more."""
        axes = [k for k, label in enumerate(term.labels) if label not in needed]
        if not axes:
            return term
        dtype = self.b.dtype(term.value)

        def build(e: list[Expr]) -> RowBody:
            return RowBody([Reduce("sum", e[0], dtype)], finals={0: Result(0, dtype)})

        (value,) = self.b.rows([term.value], axes, build, [(dtype, False)], keepdims=False)
        return Term(value, tuple(label for label in term.labels if label in needed))

    def pair(self, x: Term, y: Term, needed: set[str], out: Value | None) -> Term:
        both = [label for label in x.labels if label in y.labels]
        batch = [label for label in both if label in needed]
        summed = [label for label in both if label not in needed]
        rows = [label for label in x.labels if label not in both]
        columns = [label for label in y.labels if label not in both]
        if not rows and not columns:
            return self.dots(x, y, batch, summed, out)
        if not summed:
            return self.outer(x, y, out)
        if (*batch, *columns, *rows) == self.result:
            x, y, rows, columns = y, x, columns, rows
        b, labels = self.b, (*batch, *rows, *columns)
        m, n, k = (math.prod(self.shape(group)) for group in (rows, columns, summed))
        lead = self.shape(batch)
        left = self.arranged(x, (*batch, *rows, *summed), (*lead, m, k))
        right = self.arranged(y, (*batch, *summed, *columns), (*lead, k, n))
        direct = labels == self.result and self.shape(labels) == (*lead, m, n)
        made = multiply(b, left, right, (*lead, m, n), out if direct else None)
        return Term(made if self.shape(labels) == (*lead, m, n) else b.reshape(made, self.shape(labels)), labels)

    def arranged(self, term: Term, labels: Sequence[str], shape: tuple[int, ...]) -> Value:
        value = self.b.transpose(term.value, [term.labels.index(label) for label in labels])
        return value if self.b.shape(value) == shape else self.b.reshape(value, shape)

    def seen(self, term: Term, labels: Sequence[str]) -> Use:
        """The term with an axis for every label, of size 1 where it has none."""
        own = [label for label in labels if label in term.labels]
        value = term.value
        if tuple(own) != term.labels:
            value = self.b.transpose(value, [term.labels.index(label) for label in own])
        return Use(value, tuple(self.sizes[label] if label in own else 1 for label in labels))

    def dots(self, x: Term, y: Term, batch: list[str], summed: list[str], out: Value | None) -> Term:
        """Operands with the same labels: elementwise products, and sums of them."""
        if not summed:
            return self.outer(x, y, out)
        b, labels = self.b, (*batch, *summed)
        dtype = b.dtype(x.value)

        def build(e: list[Expr]) -> RowBody:
            return RowBody([Reduce("sum", mul(e[0], e[1]), dtype)], finals={0: Result(0, dtype)})

        (value,) = b.rows(
            [self.seen(x, labels), self.seen(y, labels)],
            range(len(batch), len(labels)),
            build,
            [(dtype, False)],
            keepdims=False,
            results=[out if tuple(batch) == self.result else None],
        )
        return Term(value, tuple(batch))

    def outer(self, x: Term, y: Term, out: Value | None) -> Term:
        """Nothing to sum: a product of every pair."""
        own = {*x.labels, *y.labels}
        labels = tuple(label for label in self.result if label in own)
        labels += tuple(label for label in dict.fromkeys((*x.labels, *y.labels)) if label not in labels)
        value = self.b.pointwise(
            [self.seen(x, labels), self.seen(y, labels)],
            lambda e: mul(e[0], e[1]),
            self.b.dtype(x.value),
            shape=self.shape(labels),
            out=out if labels == self.result else None,
        )
        return Term(value, labels)
