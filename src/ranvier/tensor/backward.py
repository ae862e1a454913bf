"""Gradients of expressions, found once for each structure.

The expressions between results and variables become a graph, ``passes.differentiate`` adds the gradient's nodes to it,
and these are kept as a recipe: what to apply to which expressions. Equal structures follow the recipe again, which
costs no more than the operations themselves would. As a recipe makes expressions like any others, gradients of
gradients come by themselves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.devices import Device
from ranvier.errors import NotSupported, RanvierError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.gradients import parts_of, reason_against, rule_of
from ranvier.passes.differentiate import differentiate
from ranvier.tensor.building import lowered
from ranvier.tensor.expr import (
    CALL,
    CUSTOM,
    HOSTED,
    INPUT,
    ITEM,
    STOP,
    Expr,
    Fixed,
    Spec,
    applied,
    is_variable,
    known,
    line_of,
    spec,
)

_KEPT = 256  # recipes
_ENDS = (STOP, INPUT)
_CODES = "QuantizeLinear"  # whose integers stand for floating-point numbers
_Step = tuple[Spec, tuple[int, ...], Any, tuple[int, ...]]  # operator, where its operands are, type and shape


class Path:
    """What lies between results and variables, operands first, with the key of its structure."""

    __slots__ = ("key", "leaves", "order")

    def __init__(self, targets: Sequence[Expr], variables: Sequence[Expr]) -> None:
        self.leaves: list[Expr] = []
        self.order: list[Expr] = []
        key: list[Any] = []
        stops = set(variables)
        numbers: dict[Expr, int] = {}
        for variable in variables:  # first, whether or not anything depends on them
            self._leaf(variable, numbers, key)
        pending = list(reversed(targets))
        while pending:
            expr = pending[-1]
            write_out(expr)
            if expr in numbers:
                pending.pop()
            elif expr in stops or not derives(expr):
                pending.pop()
                self._leaf(expr, numbers, key)
            else:
                missing = [x for x in expr.inputs if x not in numbers]
                if missing:
                    pending += missing
                    continue
                pending.pop()
                numbers[expr] = len(numbers)
                self.order.append(expr)
                key.append(expr.spec)
                key += [numbers[x] for x in expr.inputs]
        self.key = (tuple(key), tuple(numbers[t] for t in targets), len(variables))

    def _leaf(self, expr: Expr, numbers: dict[Expr, int], key: list[Any]) -> None:
        if expr not in numbers:
            numbers[expr] = len(numbers)
            self.leaves.append(expr)
            key += (expr.dtype, expr.shape)


def write_out(expr: Expr) -> None:
    """Where an expression is the result of a compiled function: let it be what the function computed."""
    if expr.spec is not None and expr.spec[0] == CALL and expr.trace is not None:
        expr.spec[1][0][1].write_out(expr)


def derives(expr: Expr) -> bool:
    """Whether a gradient could go through an expression to what it was made of."""
    return (
        expr.spec is not None
        and expr.trace is not None
        and expr.spec[0] not in _ENDS
        and (expr.dtype.is_float or expr.spec[0] == _CODES)
        and not is_variable(expr)
    )


def variables_behind(targets: Sequence[Expr]) -> list[Expr]:
    """The parameters that expressions were made of, in a fixed order."""
    found: list[Expr] = []
    seen: set[Expr] = set()
    pending = list(targets)
    while pending:
        expr = pending.pop()
        if expr in seen:
            continue
        seen.add(expr)
        write_out(expr)
        if is_variable(expr):
            found.append(expr)
        elif derives(expr):
            assert expr.spec is not None
            pending += expr.inputs[1:] if expr.spec[0] == CUSTOM else expr.inputs
    return found


class Recipe:
    """How to make gradients out of the expressions of a path and the gradients of its results."""

    __slots__ = ("_constants", "_results", "_steps")

    def __init__(self, steps: list[_Step], constants: list[Expr], results: list[int | None]) -> None:
        self._steps = steps
        self._constants = constants
        self._results = results

    def follow(
        self, path: Path, seeds: Sequence[Expr], device: Device | None, traced: bool = True
    ) -> list[Expr | None]:
        """The gradients with respect to the variables; None where nothing depends on one. ``traced``: they can be
        derived themselves."""
        made = [*path.leaves, *path.order, *seeds, *self._constants]
        for of, operands, dtype, shape in self._steps:
            step = applied(of, tuple([made[k] for k in operands]), dtype, shape, device)
            if not traced:
                step.trace = None
            made.append(step)
        return [None if k is None else made[k] for k in self._results]


class Recipes:
    """Recipes by structure, the ones used last; thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._found: OrderedDict[Any, Recipe] = OrderedDict()
        self._lock = threading.Lock()
        self.made = 0

    def of(self, path: Path, targets: Sequence[Expr], variables: Sequence[Expr]) -> Recipe:
        with self._lock:
            found = self._found.get(path.key)
            if found is not None:
                self._found.move_to_end(path.key)
                return found
        found = _recipe(path, targets, variables)
        with self._lock:
            self.made += 1
            self._found[path.key] = found
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        return found


recipes = Recipes(_KEPT)


def _recipe(path: Path, targets: Sequence[Expr], variables: Sequence[Expr]) -> Recipe:
    graph, values = lowered(path.leaves, path.order)
    nodes = _makers(path, values)
    for node, expr in nodes:
        node.name = line_of(expr)
    _check_rules(path, nodes, variables)
    seeds = [graph.add_input(f"seed{k}", TensorType(t.dtype, t.shape)) for k, t in enumerate(targets)]
    numbers: dict[Value, int] = {}
    wholes: dict[Node, int] = {}  # operators with several results, which are no values themselves
    for k, expr in enumerate([*path.leaves, *path.order]):
        maker = values[expr].producer
        if maker is not None and expr.spec is not None and expr.spec[3] > 1:
            wholes[maker] = k
        else:
            numbers[values[expr]] = k
    for seed in seeds:
        numbers[seed] = len(path.leaves) + len(path.order) + seeds.index(seed)
    try:
        grads = differentiate(
            graph, [(values[t], seed) for t, seed in zip(targets, seeds)], [values[v] for v in variables]
        )
    except NotSupported as error:
        if error.node:
            error.add_note(f"at {error.node}")
        raise
    return _Lift(graph, numbers, wholes, len(path.leaves) + len(path.order) + len(seeds)).recipe(grads)


def _makers(path: Path, values: Any) -> list[tuple[Node, Expr]]:
    return [(node, expr) for expr in path.order if (node := values[expr].producer) is not None]


def _check_rules(path: Path, nodes: Sequence[tuple[Node, Expr]], variables: Sequence[Expr]) -> None:
    """Operators without a gradient on the way, all of them, where they stand in the user's program."""
    makers = {expr: node for node, expr in nodes}
    reached = set(variables)
    missing: dict[str, None] = {}
    for expr in path.order:
        if any(x in reached for x in expr.inputs):
            reached.add(expr)
            node = makers[expr]
            hosted = node.op.startswith(HOSTED)
            if hosted or (rule_of(node.domain, node.op) is None and parts_of(node) is None):
                reason = reason_against(node.domain, node.op)
                why = f"; {reason}" if reason else ""
                missing[f"{node.op.removeprefix(HOSTED)} ({line_of(expr)}{why})"] = None
    if missing:
        raise NotSupported(f"no gradient is known of {', '.join(missing)}; see stop_gradient")


class _Lift:
    """The nodes that gradients need, as steps of a recipe."""

    def __init__(self, graph: Graph, numbers: dict[Value, int], wholes: dict[Node, int], given: int) -> None:
        self._graph = graph
        self._numbers = numbers
        self._wholes = wholes
        self._given = given
        self._constants: list[Expr] = []
        self._steps: list[_Step] = []

    def recipe(self, grads: Sequence[Value | None]) -> Recipe:
        needed = self._needed(grads)
        nodes = [node for node in self._graph if node in needed]
        operands = {v: None for n in nodes for v in n.inputs if v is not None}
        for value in [*operands, *(g for g in grads if g is not None)]:
            if value.const is not None and value not in self._numbers:
                self._constant(value)
        for node in nodes:
            self._step(node)
        return Recipe(self._steps, self._constants, [None if g is None else self._numbers[g] for g in grads])

    def _needed(self, grads: Sequence[Value | None]) -> set[Node]:
        found: set[Node] = set()
        pending = [g for g in grads if g is not None]
        while pending:
            value = pending.pop()
            node = value.producer
            if value in self._numbers or node is None or node in found:
                continue
            found.add(node)
            pending += [v for v in node.inputs if v is not None]
        return found

    def _constant(self, value: Value) -> None:
        assert value.const is not None and isinstance(value.type, TensorType) and value.type.dtype is not None
        array = np.array(value.const.numpy())
        array.flags.writeable = False
        self._numbers[value] = self._given + len(self._constants)
        self._constants.append(known(array, value.type.dtype))

    def _step(self, node: Node) -> None:
        if node.has_subgraphs:
            raise NotSupported(
                "the gradient has a loop inside, as that of recurrent layers over many steps has; graphs can have it, "
                "tensors cannot: take shorter sequences"
            )
        fixed: list[Fixed] = []
        operands: list[int] = []
        for position, value in enumerate(node.inputs):
            if value is None:
                fixed.append((position, None))
            elif (numbers := _integers(value)) is not None:
                fixed.append((position, numbers))
            else:
                operands.append(self._numbers[value])
        attrs = tuple((name, _hashable(attr)) for name, attr in sorted(node.attrs.items()))
        op = f"{node.domain}::{node.op}" if node.domain else node.op
        of = (op, attrs, tuple(fixed), len(node.outputs))
        if len(node.outputs) == 1:
            self._add(of, tuple(operands), node.output)
            return
        whole = self._wholes.get(node)
        if whole is None:
            whole = self._append(of, tuple(operands), node.output)
        for k, value in enumerate(node.outputs):
            if value not in self._numbers:
                self._add(spec(ITEM, (("index", k),)), (whole,), value)

    def _add(self, of: Spec, operands: tuple[int, ...], value: Value) -> None:
        self._numbers[value] = self._append(of, operands, value)

    def _append(self, of: Spec, operands: tuple[int, ...], value: Value) -> int:
        found = value.type
        if not isinstance(found, TensorType) or found.dtype is None or not found.is_static:
            raise RanvierError(f"the gradient has a value of unknown type: {value!r}")
        assert found.shape is not None
        self._steps.append((of, operands, found.dtype, tuple(int(d) for d in found.shape)))  # type: ignore[arg-type]
        return self._given + len(self._constants) + len(self._steps) - 1


def _integers(value: Value) -> int | tuple[int, ...] | None:
    """The content of a small constant of integers, which is part of the operator."""
    if value.const is None or not isinstance(value.type, TensorType):
        return None
    array = value.const.numpy()
    if array.dtype != np.int64 or array.ndim > 1:
        return None
    return int(array) if array.ndim == 0 else tuple(int(n) for n in array)


def _hashable(attr: Any) -> Any:
    return tuple(attr) if isinstance(attr, list) else attr


_OF_TENSORS = True
