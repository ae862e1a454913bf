"""``@op``: an operator is declared once.

The decorated function *is* the reference: NumPy arrays in, NumPy arrays out. Beside it stand, each optional, the
type rule, the cost and the gradient::

    @op("Relu", since=14)
    def relu(x):
        return np.maximum(x, 0)

    @relu.cost
    def _(call): ...

The function's positional parameters are the operator's inputs (an optional input that is left out arrives as
``None``), its keyword-only parameters are the attributes with their defaults. Two keyword-only names are special:
``ctx`` receives a :class:`Call`, for the few operators that must know how many outputs are wanted or run a
subgraph; ``out`` receives a buffer for the first output, or ``None``, and the body may write there.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranvier.domains import normal_domain
from ranvier.errors import InvalidConfig, InvalidValue, MissingOp, UnsupportedOp
from ranvier.graph.types import Type
from ranvier.ops.allocation import check_broadcast, check_result
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.graph.ir import Graph, Node

Array = np.ndarray[Any, Any]
Body = Callable[..., Any]


def _no_subgraphs(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    raise InvalidValue(f"graph {graph.name!r} can only run inside a session")


@dataclass(slots=True)
class Call:
    """What a body may know about the call beyond its operands."""

    wanted: tuple[bool, ...] = (True,)  # per output: does anybody use it
    version: int = 0  # the operator's since_version
    run: Callable[[Graph, Sequence[Any]], list[Any]] = _no_subgraphs  # runs a subgraph on its explicit inputs
    node: Node | None = None
    opsets: Mapping[str, int] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        """How many outputs the node lists, unwanted ones included."""
        return len(self.wanted)

    def wants(self, position: int) -> bool:
        return position < len(self.wanted) and self.wanted[position]


@dataclass(slots=True)
class TypeCall:
    """What a type rule or a cost rule sees: operand types, operand values where known, attributes."""

    types: Sequence[Type | None]
    values: Sequence[Array | None]
    attrs: Mapping[str, Any]
    outputs: int
    version: int
    node: Node | None = None
    result_types: Sequence[Type | None] = ()  # for cost rules

    def type(self, position: int) -> Type | None:
        return self.types[position] if position < len(self.types) else None

    def value(self, position: int) -> Array | None:
        return self.values[position] if position < len(self.values) else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one node: arithmetic operations and bytes moved."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


_OURS = frozenset({"ctx", "out"})  # keywords that are not attributes


class _Form(NamedTuple):
    """The parameters of a body: how many operands, and which keywords."""

    operands: int
    optional_operands: int
    any_operand: bool
    keywords: frozenset[str]
    optional_keywords: frozenset[str]
    any_keyword: bool


def _form(body: Body) -> _Form:
    code = getattr(body, "__code__", None)
    if code is None or hasattr(body, "__wrapped__") or hasattr(body, "__signature__"):
        return _inspected(body)
    # what inspect would tell, a hundred times as fast: hundreds of operators are declared whenever this is imported
    return _Form(
        code.co_argcount,
        len(body.__defaults__ or ()),
        bool(code.co_flags & inspect.CO_VARARGS),
        frozenset(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]),
        frozenset(body.__kwdefaults__ or ()),
        bool(code.co_flags & inspect.CO_VARKEYWORDS),
    )


def _inspected(body: Body) -> _Form:
    parameters = inspect.signature(body).parameters.values()
    operands = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return _Form(
        len(operands),
        sum(p.default is not p.empty for p in operands),
        any(p.kind is p.VAR_POSITIONAL for p in parameters),
        frozenset(p.name for p in keywords),
        frozenset(p.name for p in keywords if p.default is not p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


class OpDef:
    """One operator over a range of versions. Calling it calls the reference."""

    __slots__ = (
        "attributes",
        "body",
        "cost_rule",
        "domain",
        "infer_rule",
        "least_inputs",
        "most_inputs",
        "name",
        "required",
        "since",
        "takes_ctx",
        "takes_out",
        "traits",
    )

    def __init__(self, body: Body, name: str, domain: str, since: int, traits: frozenset[str]) -> None:
        self.body = body
        self.name = name
        self.domain = domain
        self.since = since
        self.traits = traits
        form = _form(body)
        self.takes_ctx = "ctx" in form.keywords
        self.takes_out = "out" in form.keywords
        # None: the body takes any attribute (it hands them on)
        self.attributes = None if form.any_keyword else frozenset(form.keywords - _OURS)
        self.required = frozenset(form.keywords - form.optional_keywords - _OURS)
        self.least_inputs = form.operands - form.optional_operands
        self.most_inputs = None if form.any_operand else form.operands
        self.infer_rule: Callable[[TypeCall], Sequence[Type | None]] | None = None
        self.cost_rule: Callable[[TypeCall], Cost] | None = None

    # the slots beside the reference; each is used as a decorator

    def infer(self, rule: Callable[[TypeCall], Sequence[Type | None]]) -> Callable[[TypeCall], Sequence[Type | None]]:
        self.infer_rule = rule
        return rule

    def cost(self, rule: Callable[[TypeCall], Cost]) -> Callable[[TypeCall], Cost]:
        self.cost_rule = rule
        return rule

    def __call__(self, *inputs: Any, **attrs: Any) -> Any:
        if self.takes_ctx and "ctx" not in attrs:
            attrs["ctx"] = Call(version=self.since)
        return self.body(*inputs, **attrs)

    def run(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], call: Call, out: Array | None = None
    ) -> tuple[Any, ...]:
        """The outputs of the reference as a tuple; NumPy scalars become 0-d arrays."""
        self.check(len(inputs), attrs)
        return self.apply(inputs, attrs, call, out)

    def check(self, inputs: int, attrs: Mapping[str, Any]) -> None:
        """For operators that no schema describes, the body's signature is what a node is checked against."""
        if self.attributes is not None and not self.attributes.issuperset(attrs):
            unknown = sorted(set(attrs) - self.attributes)
            raise InvalidValue(f"{self.name}: unknown attribute {', '.join(map(repr, unknown))}", op=self.name)
        if inputs < self.least_inputs or (self.most_inputs is not None and inputs > self.most_inputs):
            most = "or more" if self.most_inputs is None else f"to {self.most_inputs}"
            raise InvalidValue(f"{self.name}: takes {self.least_inputs} {most} inputs, got {inputs}", op=self.name)
        if not self.required.issubset(attrs):
            missing = sorted(self.required - attrs.keys())
            raise InvalidValue(f"{self.name}: attribute {', '.join(map(repr, missing))} is missing", op=self.name)

    def apply(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], call: Call, out: Array | None = None
    ) -> tuple[Any, ...]:
        """As ``run``, for a node that was checked."""
        keywords = attrs
        if self.takes_ctx or self.takes_out:
            keywords = dict(attrs)
            if self.takes_ctx:
                keywords["ctx"] = call
            if self.takes_out:
                keywords["out"] = out
        if out is None and "elementwise" in self.traits:
            check_broadcast(inputs, self.name)
        result = self.body(*inputs, **keywords)
        results = result if type(result) is tuple else (result,)
        for each in results:
            check_result(each, self.name)
        return tuple([np.asarray(r) if isinstance(r, np.generic) else r for r in results])

    @property
    def full_name(self) -> str:
        return f"{self.domain}::{self.name}" if self.domain else self.name

    def __repr__(self) -> str:
        return f"<op {self.full_name}-{self.since}>"


_OPS: dict[tuple[str, str], list[OpDef]] = {}  # (domain, name) -> definitions by rising `since`
_found: dict[tuple[str, str, int | None], OpDef | None] = {}  # answers of ``find`` since the last declaration
_generation = 0
TRAITS = frozenset({"elementwise", "commutative", "random", "impure", "view"})


def op(name: str, *, since: int = 1, domain: str = "", traits: Iterable[str] = ()) -> Callable[[Body], OpDef]:
    """Declare an operator; the decorated function is its reference.

    ``since`` is the first version with this meaning; an older meaning is a declaration of its own with a lower
    ``since``. Traits: ``elementwise`` (result position depends on the same operand position, with broadcasting),
    ``commutative``, ``random`` (two calls differ), ``impure`` (must not be removed or merged), ``view`` (moves no
    data, only says how to read it).
    """
    unknown = set(traits) - TRAITS
    if unknown:
        raise InvalidConfig(f"operator {name!r}: unknown trait {sorted(unknown)}")

    def declare(body: Body) -> OpDef:
        definition = OpDef(body, name, normal_domain(domain), since, frozenset(traits))
        _insert(definition)
        return definition

    return declare


def _insert(definition: OpDef) -> None:
    known = _OPS.get((definition.domain, definition.name), [])
    replace(definition.domain, definition.name, [*(d for d in known if d.since != definition.since), definition])


def replace(domain: str, name: str, definitions: Iterable[OpDef]) -> None:
    """Let these, each for another ``since``, be all that is declared of an operator."""
    _OPS[domain, name] = sorted(definitions, key=lambda d: d.since)
    _changed()


def generation() -> int:
    """Another number after every change of what is declared, for those who keep what they worked out from it."""
    return _generation


def _changed() -> None:
    """After the change: who looked before it keeps what was found in the old declarations."""
    global _found, _generation
    _found = {}
    _generation += 1


Fallback = Callable[[str, str, int | None], OpDef | None]
_fallbacks: list[Fallback] = []


def add_fallback(fallback: Fallback) -> None:
    """Ask ``fallback(domain, name, version)`` for operators that have no declaration."""
    _fallbacks.append(fallback)
    _changed()


def find(domain: str, name: str, version: int | None = None) -> OpDef | None:
    """The declaration that defines ``name`` at ``version`` (newest when None), or None."""
    memo = _found
    key = (domain, name, version)
    try:
        return memo[key]
    except KeyError:
        found = memo[key] = _look_up(domain, name, version)
        return found


def own_declaration(domain: str, name: str, version: int | None) -> OpDef | None:
    """As ``find``, without asking the fallbacks."""
    versions = _OPS.get((domain, name))
    if versions is not None:
        at = len(versions) if version is None else bisect.bisect_right(versions, version, key=lambda d: d.since)
        if at:
            return versions[at - 1]
    return None


def _look_up(domain: str, name: str, version: int | None) -> OpDef | None:
    found = own_declaration(domain, name, version)
    if found is not None:
        return found
    for fallback in _fallbacks:
        found = fallback(domain, name, version)
        if found is not None:
            return found
    return None


def get(domain: str, name: str, version: int | None = None) -> OpDef:
    """Like :func:`find`, but raises UnsupportedOp."""
    found = find(domain, name, version)
    if found is None:
        raise UnsupportedOp([MissingOp(domain, name, version, ())])
    return found


def declared() -> list[OpDef]:
    """All declarations, by domain, name and version."""
    return [d for key in sorted(_OPS) for d in _OPS[key]]


def forget(domain: str, name: str) -> None:
    """Remove a user's operator again (used by tests and by `register_op(..., replace=True)`)."""
    _OPS.pop((normal_domain(domain), name), None)
    _changed()


def evaluate(
    name: str, *inputs: Any, domain: str = "", version: int | None = None, outputs: int = 1, **attrs: Any
) -> Any:
    """Run one operator by its reference: the single output, or a tuple when ``outputs`` is above 1.

    >>> evaluate("Relu", np.array([-1.0, 2.0]))
    array([0., 2.])
    """
    definition = get(normal_domain(domain), name, version)
    call = Call(wanted=(True,) * outputs, version=definition.since if version is None else version)
    results = definition.run(inputs, attrs, call)
    return results[0] if outputs == 1 else results[:outputs]
