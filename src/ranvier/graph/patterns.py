"""Patterns: a subgraph written as ordinary Python calls, found in a graph by its last operator.

::

    class FuseGelu(Rule):
        def pattern(self, op, x):
            return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Div(x, 2**0.5)), 1.0))

        def check(self, match):            # None, or the reason why this match is not rewritten
            return None if match["x"].type is not None else "type of x is unknown"

        def rewrite(self, op, match):
            return op.Gelu(match["x"])

Parameters of ``pattern`` after ``op`` are variables: each matches any value, the same one wherever it stands. A
number matches a constant that holds this number once or in every element. Operands of commutative operators match
in either order. ``...`` as the last operand stands for any further ones. All nodes of a match lie in one graph.

Rules are indexed by the operator of their last node and by one of the operators that feed it, so a node meets only
the rules that could fit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ranvier.graph.ir import Node, Value

COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "Sum", "And", "Or", "Xor", "Equal"})
# Their present versions have no attributes; old ones broadcast by `axis`, which no pattern speaks of.
_PLAIN = COMMUTATIVE | {"Sub", "Div", "Pow", "Greater", "Less"}
_TOLERANCE = 1e-5  # relative: exporters write constants with five digits and more
ANY = ""  # a head that every operand has
CONSTANT = "constant"  # the head of a constant operand


class Var:
    """Matches any value; one variable stands for one value throughout a pattern. An optional one may be absent."""

    __slots__ = ("name", "optional")

    def __init__(self, name: str, optional: bool = False) -> None:
        self.name = name
        self.optional = optional


class Number:
    """Matches a constant whose every element is this number."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


class Apply:
    """Matches a node: operator, operands, and the attributes that are named. ``label`` makes the node retrievable."""

    __slots__ = ("attrs", "domain", "label", "op", "operands", "output", "rest")

    def __init__(
        self,
        op: str,
        operands: Sequence[Term],
        attrs: dict[str, Any],
        domain: str = "",
        label: str = "",
        output: int = 0,
        rest: bool = False,
    ) -> None:
        self.op = op
        self.operands = tuple(operands)
        self.attrs = attrs
        self.domain = domain
        self.label = label
        self.output = output
        self.rest = rest  # further operands may follow

    def __getitem__(self, output: int) -> Apply:
        """The same node, matched through another of its outputs."""
        return Apply(self.op, self.operands, self.attrs, self.domain, self.label, output, self.rest)


class OneOf:
    """Matches whatever one of its alternatives matches; tried in order."""

    __slots__ = ("choices",)

    def __init__(self, *choices: Any) -> None:
        self.choices = tuple(_term(c) for c in choices)


Term = Var | Number | Apply | OneOf | None


def _term(x: Any) -> Term:
    if x is None or isinstance(x, Var | Number | Apply | OneOf):
        return x
    if isinstance(x, int | float):
        return Number(float(x))
    raise TypeError(f"{type(x).__name__} cannot stand in a pattern")


class PatternOps:
    """``op.Add(a, b)`` makes a pattern node. Keywords are attributes; ``_label`` and ``_domain`` are our own."""

    def __getattr__(self, name: str) -> Callable[..., Apply]:
        def make(*operands: Any, _label: str = "", _domain: str = "", **attrs: Any) -> Apply:
            rest = bool(operands) and operands[-1] is ...
            terms = [_term(x) for x in (operands[:-1] if rest else operands)]
            return Apply(name, terms, attrs, _domain, _label, rest=rest)

        return make

    def one_of(self, *choices: Any) -> OneOf:
        return OneOf(*choices)


class Match:
    """What a pattern found: values by variable name, nodes by label, and all nodes it covers, last one first."""

    __slots__ = ("labels", "nodes", "root", "values")

    def __init__(self, root: Node) -> None:
        self.root = root
        self.values: dict[str, Value | None] = {}
        self.labels: dict[str, Node] = {}
        self.nodes: list[Node] = []

    def __getitem__(self, name: str) -> Value:
        value = self.values[name]
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str) -> Value | None:
        """The value of a variable, None where an optional one is absent."""
        return self.values.get(name)

    def node(self, label: str) -> Node:
        return self.labels[label]

    def scalar(self, name: str) -> float | None:
        """The number a constant holds (in every element), or None."""
        return scalar_of(self.values.get(name))

    def copy(self) -> Match:
        other = Match(self.root)
        other.values = dict(self.values)
        other.labels = dict(self.labels)
        other.nodes = list(self.nodes)
        return other


class Rule:
    """One rewrite: ``pattern``, ``check``, ``rewrite``. ``name`` is stamped on the nodes it makes."""

    name = ""
    keep_inner = False  # True: inner values may have other users; their nodes then stay

    def __init__(self) -> None:
        self.name = self.name or type(self).__name__
        names = list(inspect.signature(self.pattern).parameters)[1:]
        found = self.pattern(PatternOps(), *(Var(n, n.endswith("_")) for n in names))
        roots = found if isinstance(found, list | tuple) else [found]
        self.patterns: list[Apply] = []
        for root in roots:
            if not isinstance(root, Apply):
                raise TypeError(f"rule {self.name!r}: a pattern ends in an operator")
            self.patterns.append(root)

    def pattern(self, op: PatternOps, *variables: Any) -> Any:
        """The pattern, or a list of alternatives. A variable whose name ends in ``_`` is optional."""
        raise NotImplementedError

    def check(self, match: Match) -> str | None:
        """None when the match may be rewritten, else the reason why not."""
        return None

    def rewrite(self, op: Any, match: Match) -> Value | Sequence[Value] | None:
        """Build the replacement of the root's outputs through ``op``; None leaves the graph as it is."""
        raise NotImplementedError

    def match(self, root: Node) -> Match | None:
        """The first way in which a pattern of this rule fits at ``root``."""
        return next(self.matches(root), None)

    def matches(self, root: Node) -> Iterator[Match]:
        """Every way in which a pattern of this rule fits at ``root``."""
        for pattern in self.patterns:
            for found in _match_node(pattern, root, Match(root)):
                if self.keep_inner or _closed(found):
                    yield found


def _closed(match: Match) -> bool:
    """No value inside the match, other than the root's, is used outside of it."""
    inside = {id(n) for n in match.nodes}
    for node in match.nodes:
        if node is match.root:
            continue
        for value in node.outputs:
            if any(id(user) not in inside for user, _ in value.uses) or value.is_graph_output:
                return False
    return True


def heads(pattern: Apply) -> frozenset[str]:
    """Names of which one must be the head of an operand wherever ``pattern`` fits: an operator, CONSTANT or ANY."""
    found = [_heads(term) for term in pattern.operands]
    definite = [names for names in found if ANY not in names]
    # an operator says more than "some constant"
    return min(definite, key=lambda names: (CONSTANT in names, len(names)), default=frozenset({ANY}))


def _heads(term: Term) -> frozenset[str]:
    if isinstance(term, Apply):
        return frozenset({term.op})
    if isinstance(term, Number):
        return frozenset({CONSTANT})
    if isinstance(term, OneOf):
        return frozenset[str]().union(*(_heads(choice) for choice in term.choices))
    return frozenset({ANY})


def heads_of(node: Node) -> set[str]:
    """The heads of a node's operands, for looking up patterns that could fit."""
    found = {ANY}
    for value in node._inputs:
        if value is None:
            continue
        if value.producer is not None:
            found.add(value.producer.op)
        elif value.const is not None:
            found.add(CONSTANT)
    return found


def _match_node(pattern: Apply, node: Node, state: Match) -> Iterator[Match]:
    if node.op != pattern.op or node.domain != pattern.domain or node.graph is not state.root.graph:
        return
    if node.attrs and node.op in _PLAIN and not node.domain:
        return
    for name, wanted in pattern.attrs.items():
        if not _same_attr(node.attrs.get(name), wanted):
            return
    inputs = list(node._inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    terms = list(pattern.operands)
    absent: list[str] = []
    while len(terms) > len(inputs) and (terms[-1] is None or (isinstance(terms[-1], Var) and terms[-1].optional)):
        left_out = terms.pop()
        if isinstance(left_out, Var):
            absent.append(left_out.name)
    if pattern.rest:
        del inputs[len(terms) :]
    if len(terms) != len(inputs) or any(state.values.get(name) is not None for name in absent):
        return
    if pattern.label and state.labels.get(pattern.label, node) is not node:
        return
    orders = [inputs]
    if len(terms) == 2 and inputs[0] is not inputs[1] and node.op in COMMUTATIVE and not node.domain:
        orders.append(inputs[::-1])
    orders = [order for order in orders if all(map(_plausible, terms, order))]
    if not orders:
        return
    state = state.copy()
    state.values.update(dict.fromkeys(absent))
    if pattern.label:
        state.labels[pattern.label] = node
    if not any(n is node for n in state.nodes):
        state.nodes.append(node)
    for order in orders:
        yield from _match_operands(terms, order, state)


def _plausible(term: Term, value: Value | None) -> bool:
    """A first look, which settles most attempts before any state is copied."""
    if type(term) is Apply:
        return value is not None and value.producer is not None and value.producer.op == term.op
    if type(term) is Number:
        return value is not None and value.const is not None
    return True


def _match_operands(terms: Sequence[Term], values: Sequence[Value | None], state: Match) -> Iterator[Match]:
    if not terms:
        yield state
        return
    for found in _match_value(terms[0], values[0], state):
        yield from _match_operands(terms[1:], values[1:], found)


def _match_value(term: Term, value: Value | None, state: Match) -> Iterator[Match]:
    if term is None:
        if value is None:
            yield state
    elif isinstance(term, Var):
        known = state.values.get(term.name)
        if term.name in state.values and known is not value:
            return
        if value is None and not term.optional:
            return
        if term.name not in state.values:
            state = state.copy()
            state.values[term.name] = value
        yield state
    elif isinstance(term, Number):
        if _holds(value, term.number):
            yield state
    elif isinstance(term, OneOf):
        for choice in term.choices:
            yield from _match_value(choice, value, state)
    elif value is not None and value.producer is not None and value.index == term.output:
        yield from _match_node(term, value.producer, state)


def _holds(value: Value | None, number: float) -> bool:
    """Is this a constant of ``number``, as exactly as its element type can say it?"""
    found = scalar_of(value)
    if found is None:
        return False
    if math.isclose(found, number, rel_tol=_TOLERANCE, abs_tol=1e-12):
        return True
    assert value is not None and value.const is not None
    narrow = value.const.dtype
    return narrow.is_float and narrow.bits < 32 and math.isclose(found, float(np.asarray(number).astype(narrow.numpy)))


def scalar_of(value: Value | None) -> float | None:
    """The number a small constant holds in every element, or None."""
    if value is None or value.const is None or not 0 < value.const.size <= 4096:
        return None
    array = value.const.numpy()
    if array.dtype == object or array.dtype.kind == "c":
        return None
    first = array.flat[0]
    if array.size > 1 and not np.all(array == first):
        return None
    return float(first)


def _same_attr(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return isinstance(got, int | float) and math.isclose(got, wanted, rel_tol=_TOLERANCE)
    if isinstance(wanted, list | tuple):
        return isinstance(got, list | tuple) and tuple(got) == tuple(wanted)
    return bool(got == wanted)
