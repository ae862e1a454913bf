"""One graph for calls that differ in a size.

Two runs of a function on placeholders that differ in one size are compared step by step: what is equal is fixed, and
a whole number that differs must follow from the size (``a · n + b``). The graph is then built with a symbol. Every
further size is traced as well and held against what was found, so a function that does something else for some sizes
is noticed; what is saved is compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import NEWEST, annotate
from ranvier.tensor.building import version_of
from ranvier.tensor.expr import CUSTOM, ITEM, STOP, Array, Expr
from ranvier.tensor.stored import constant_of

SYMBOL = "n"


class Differs(Exception):
    """Two runs did different things, or a number does not follow from the size."""


class Traced(NamedTuple):
    """What a run on placeholders computed: expressions in order, operands first."""

    leaves: list[Expr]
    constants: list[Expr]
    order: list[Expr]
    wanted: list[Expr]


class _Linear(NamedTuple):
    """A number that follows from the size."""

    factor: int
    offset: int


class _Constant(NamedTuple):
    expr: Expr  # of the first run
    number: _Linear | None  # of a single float that is a size
    shape: tuple[Any, ...]  # with sizes in it where all elements are the same


class _Step(NamedTuple):
    spec: tuple[Any, ...]
    operands: tuple[int, ...]
    dtype: DType
    shape: tuple[Any, ...]


class Family:
    """What two runs have in common; ``graph`` computes it for every size."""

    def __init__(self, one: Traced, other: Traced) -> None:
        sizes = {
            (a, b)
            for x, y in zip(one.leaves, other.leaves)
            for a, b in zip(x.shape, y.shape)
            if len(x.shape) == len(y.shape) and a != b
        }
        if len(sizes) != 1:
            raise Differs("more than one size differs, or none")
        ((self._small, self._large),) = sizes
        if len(one.leaves) != len(other.leaves) or len(one.constants) != len(other.constants):
            raise Differs("they read different things")
        if len(one.order) != len(other.order):
            raise Differs("they do different things")
        self._leaves = [self._typed(x, y) for x, y in zip(one.leaves, other.leaves)]
        self._constants = [self._constant(x, y) for x, y in zip(one.constants, other.constants)]
        places, theirs = _places(one), _places(other)
        self._steps = [self._step(x, y, places, theirs) for x, y in zip(one.order, other.order)]
        self._wanted = [places[x] for x in one.wanted]
        if [theirs[x] for x in other.wanted] != self._wanted:
            raise Differs("they return different things")

    # -- comparing --------------------------------------------------------------------------------------------------

    def _number(self, a: int, b: int) -> Any:
        if a == b:
            return a
        factor, rest = divmod(b - a, self._large - self._small)
        if rest:
            raise Differs(f"{a} and {b} do not follow from the sizes {self._small} and {self._large}")
        return _Linear(factor, a - factor * self._small)

    def _numbers(self, a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise Differs("another kind of operand")
        if isinstance(a, tuple):
            if len(a) != len(b):
                raise Differs("another number of sizes")
            return tuple(self._number(x, y) for x, y in zip(a, b))
        return a if a is None else self._number(a, b)

    def _typed(self, x: Expr, y: Expr) -> tuple[DType, tuple[Any, ...]]:
        if x.dtype is not y.dtype:
            raise Differs("another element type")
        shape = self._numbers(x.shape, y.shape)
        if any(isinstance(d, _Linear) and d != (1, 0) for d in shape):
            raise Differs("a size of an argument follows from that of another")
        return x.dtype, shape

    def _constant(self, x: Expr, y: Expr) -> _Constant:
        if x is y:
            return _Constant(x, None, x.shape)
        a, b = _numbers(x), _numbers(y)
        if a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()):
            return _Constant(x, None, a.shape)
        if a.dtype != b.dtype or a.ndim != b.ndim:
            raise Differs("another constant")
        if (
            a.size == b.size == 1
            and a.dtype.kind == "f"
            and float(a.item()).is_integer()
            and float(b.item()).is_integer()
        ):
            number = self._number(int(a.item()), int(b.item()))
            return _Constant(x, number, a.shape)
        if a.size and b.size and (a == a.flat[0]).all() and (b == a.flat[0]).all():
            return _Constant(x, None, self._numbers(a.shape, b.shape))
        raise Differs("another constant")

    def _step(self, x: Expr, y: Expr, places: dict[Expr, int], theirs: dict[Expr, int]) -> _Step:
        assert x.spec is not None and y.spec is not None
        if x.spec[:2] != y.spec[:2] or x.spec[3] != y.spec[3] or x.dtype is not y.dtype:
            raise Differs("another operator")
        operands = tuple(places[each] for each in x.inputs)
        if operands != tuple(theirs[each] for each in y.inputs) or len(x.spec[2]) != len(y.spec[2]):
            raise Differs("other operands")
        fixed = tuple((p, self._numbers(a, b)) for (p, a), (_, b) in zip(x.spec[2], y.spec[2]))
        return _Step((x.spec[0], x.spec[1], fixed, x.spec[3]), operands, x.dtype, self._numbers(x.shape, y.shape))

    def size_of(self, run: Traced) -> int:
        """The size in a further run, which is checked to do the same."""
        counts = len(run.leaves), len(run.constants), len(run.order)
        if counts != (len(self._leaves), len(self._constants), len(self._steps)):
            raise Differs("it does something else")
        place = next(
            (k, a) for k, (_, shape) in enumerate(self._leaves) for a, d in enumerate(shape) if type(d) is _Linear
        )
        size = run.leaves[place[0]].shape[place[1]]
        for leaf, (dtype, shape) in zip(run.leaves, self._leaves):
            _same((leaf.dtype, leaf.shape), (dtype, _at(shape, size)))
        for each, constant in zip(run.constants, self._constants):
            _same_constant(each, constant, size)
        places = _places(run)
        for expr, step in zip(run.order, self._steps):
            of, attrs, fixed, count = step.spec
            expected = (of, attrs, tuple((p, _at(numbers, size)) for p, numbers in fixed), count)
            _same((expr.spec, expr.dtype, expr.shape), (expected, step.dtype, _at(step.shape, size)))
            _same(tuple(places[x] for x in expr.inputs), step.operands)
        _same([places[x] for x in run.wanted], self._wanted)
        return size

    # -- building ---------------------------------------------------------------------------------------------------

    def graph(self, name: str) -> Graph:
        graph = Graph(name, opsets={"": NEWEST})
        values: list[Value] = []
        symbol = Symbol(SYMBOL)
        for k, (dtype, shape) in enumerate(self._leaves):
            dims = tuple(symbol if type(d) is _Linear else d for d in shape)
            values.append(graph.add_input(f"x{k}", TensorType(dtype, dims)))
        make = _Maker(graph, values, self._leaves)
        for constant in self._constants:
            values.append(make.constant(constant))
        for step in self._steps:
            values.append(make.step(step, values))
        graph.outputs = [values[k] for k in self._wanted]
        annotate(graph)
        return graph


class _Maker:
    """Makes nodes of steps, with sizes computed from the shape of an input."""

    def __init__(self, graph: Graph, inputs: Sequence[Value], leaves: Sequence[tuple[DType, tuple[Any, ...]]]) -> None:
        self._graph = graph
        self._input, self._axis = next(
            (inputs[k], axis)
            for k, (_, shape) in enumerate(leaves)
            for axis, d in enumerate(shape)
            if type(d) is _Linear
        )
        self._made: dict[Any, Value] = {}

    def _node(self, op: str, operands: list[Value | None], **attrs: Any) -> Value:
        return self._graph.add(op, operands, attrs, 1, version=version_of(op)).output

    def _ints(self, *numbers: int) -> Value:
        return self._graph.add_constant(ConstTensor.of(np.array(numbers, np.int64)))

    def _size(self, number: Any) -> Value:
        """One number as a tensor of one element."""
        if number not in self._made:
            if type(number) is not _Linear:
                self._made[number] = self._ints(number)
            elif number == (1, 0):
                shape = self._node("Shape", [self._input])
                self._made[number] = self._node("Gather", [shape, self._ints(self._axis)], axis=0)
            else:
                whole = self._node("Mul", [self._size(_Linear(1, 0)), self._ints(number.factor)])
                self._made[number] = self._node("Add", [whole, self._ints(number.offset)])
        return self._made[number]

    def numbers(self, numbers: Any, reshaping: bool = False) -> Value:
        """An operand of whole numbers."""
        if not isinstance(numbers, tuple):
            one = self._size(numbers)
            return self._node("Squeeze", [one, self._ints(0)])
        varying = [n for n in numbers if type(n) is _Linear]
        if not varying:
            return self._ints(*numbers)
        if reshaping and len(varying) == 1 and 0 not in numbers:
            return self._ints(*(-1 if type(n) is _Linear else n for n in numbers))
        parts: list[Value | None] = [self._size(n) for n in numbers]
        return parts[0] if len(parts) == 1 and parts[0] is not None else self._node("Concat", parts, axis=0)

    def constant(self, constant: _Constant) -> Value:
        expr = constant.expr
        if constant.number is not None:
            number = self._node("Cast", [self._size(constant.number)], to=expr.dtype.onnx)
            return self._node("Reshape", [number, self._ints(*expr.shape)])
        if any(type(d) is _Linear for d in constant.shape):
            array = _numbers(expr)
            one = self._graph.add_constant(ConstTensor.of(np.array(array.flat[0], array.dtype)))
            return self._node("Expand", [one, self.numbers(constant.shape)])
        return self._graph.add_constant(constant_of(expr))

    def step(self, step: _Step, values: list[Value]) -> Value:
        op, attrs, fixed, count = step.spec
        if op == ITEM:
            made = values[step.operands[0]].producer
            assert made is not None
            found: Value = made.outputs[attrs[0][1]]
            return found
        operands: list[Value | None] = [values[k] for k in (step.operands[:1] if op == CUSTOM else step.operands)]
        for position, numbers in fixed:
            operands.insert(position, None if numbers is None else self.numbers(numbers, op == "Reshape"))
        domain, _, name = ("", "", "Identity") if op in (STOP, CUSTOM) else op.rpartition("::")
        if domain:
            self._graph.opsets.setdefault(domain, 1)
        node = self._graph.add(name, operands, dict(attrs), count, domain=domain, version=version_of(name, domain))
        return node.output


def _numbers(expr: Expr) -> Array:
    return constant_of(expr).numpy()


def _places(run: Traced) -> dict[Expr, int]:
    return {expr: k for k, expr in enumerate([*run.leaves, *run.constants, *run.order])}


def _at(numbers: Any, size: int) -> Any:
    if type(numbers) is _Linear:
        return numbers.factor * size + numbers.offset
    return tuple(_at(n, size) for n in numbers) if isinstance(numbers, tuple) else numbers


def _same(found: Any, expected: Any) -> None:
    if found != expected:
        raise Differs("it does something else")


def _same_constant(expr: Expr, constant: _Constant, size: int) -> None:
    if expr is constant.expr and constant.number is None and constant.shape == expr.shape:
        return  # which is not read for this
    array, own = _numbers(expr), _numbers(constant.expr)
    _same((array.dtype, array.shape), (own.dtype, _at(constant.shape, size)))
    if constant.number is not None:
        _same(float(array.item()), float(_at(constant.number, size)))
    elif array.shape == own.shape:
        _same(array is own or array.tobytes() == own.tobytes(), True)
    else:
        _same(bool((array == own.flat[0]).all()), True)


_OF_TENSORS = True
