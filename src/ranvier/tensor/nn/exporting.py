"""A module as an ONNX model: it is run once on placeholders, and what it computes is the model.

Sizes that may differ from call to call are found by running it a second time with others: operands of operators that
are not the same then (the target of a reshape) are written so that they fit all sizes, or named as what is in the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, NotSupported
from ranvier.formats.onnx.retarget import retarget
from ranvier.formats.onnx.writer import save
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Dim, Symbol, TensorType
from ranvier.ops import NEWEST
from ranvier.tensor.building import lowered
from ranvier.tensor.compiled import Behind
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.expr import Expr, known, line_of
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import State
from ranvier.tensor.stored import constant_of
from ranvier.tensor.tracing import Tracing, no_grad, now
from ranvier.tensor.trees import leaves

_OLDEST = 21  # the first with all types of elements and GroupNormalization as it is now
Axes = Mapping[str, Mapping[int, str]]


def export(
    model: Module | Callable[..., Any],
    example_inputs: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Axes | None = None,
    opset: int | None = None,
) -> Graph:
    """Write a module (in ``eval`` mode) or a function of tensors as an ONNX model; parameters keep their names.

    ``example_inputs`` is a tensor or a tuple of them: their types and shapes are those of the model. ``dynamic_axes``
    names sizes that may differ: ``{"x": {0: "batch"}}``. Without an ``opset`` it is the oldest from 21 on that has all
    operators, so that other runtimes can read the model; so can they codes of 3, 5 and 6 bits, which become 4 and 8.
    """
    from ranvier.runtime.quantizing.wider import widen  # only here: it takes time

    inputs = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    given = [as_tensor(each)._expr for each in inputs]
    names = _names(input_names, "input", len(given))
    dynamic = {name: dict(axes) for name, axes in (dynamic_axes or {}).items()}
    unknown = [name for name in dynamic if name not in names]
    if unknown:
        raise InvalidInput(f"dynamic_axes: {unknown[0]!r} is no input; there is {', '.join(names)}")
    with _for_inference(model):
        run = _Run(model, given)
        graph, values = lowered(run.leaves, run.behind.order, run.behind.constants)
        if dynamic:
            sizes = _sizes(given, names, dynamic)
            other = _Run(model, [_resized(e, dynamic.get(n, {}), sizes) for e, n in zip(given, names)])
            _Generalised(graph, values, run, other, sizes).apply()
    graph.name = type(model).__name__ if isinstance(model, Module) else getattr(model, "__name__", "function")
    graph.outputs = [values[expr] for expr in run.outputs]
    for value, name in zip(graph.inputs, names):
        value.name = name
    _weights(graph, [values[run.tracing.read_states[state]] for state in run.states], run.states, model)
    _without_copies(graph)
    widen(graph)
    for value, name in zip(graph.outputs, _names(output_names, "output", len(graph.outputs))):
        value.name = name
    _retargeted(graph, opset)
    if path is not None:
        save(graph, path)
    return graph


def _retargeted(graph: Graph, opset: int | None) -> None:
    if opset is not None:
        retarget(graph, opset)
        return
    for candidate in range(_OLDEST, NEWEST):
        try:
            retarget(graph, candidate)
            return
        except NotSupported:
            continue


def _names(given: Sequence[str] | None, kind: str, count: int) -> list[str]:
    if given is None:
        return [kind] if count == 1 else [f"{kind}{k}" for k in range(count)]
    if len(given) != count or len(set(given)) != count:
        raise InvalidInput(f"{count} {kind}s have as many names, all different; got {list(given)}")
    return list(given)


@contextmanager
def _for_inference(model: Any) -> Iterator[None]:
    modules = list(model.modules()) if isinstance(model, Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        with no_grad():
            yield
    finally:
        for module, mode in zip(modules, before):
            module.training = mode


class _Run:
    """A run on placeholders: its results, what is behind them, and the states that are read."""

    def __init__(self, model: Callable[..., Any], given: Sequence[Expr]) -> None:
        self.tracing = Tracing()
        placeholders = [self.tracing.placeholder(expr) for expr in given]
        if now.tracing is not None:
            raise InvalidInput("a model is exported outside of jitted functions")
        now.tracing = self.tracing
        try:
            result = model(*[wrapped(each) for each in placeholders])
        finally:
            now.tracing = None
            self.tracing.active = False
        tensors = list(leaves(result))
        if not tensors or not all(isinstance(each, Tensor) for each in tensors):
            raise InvalidInput("a model that is exported returns tensors")
        self.outputs = [each._expr for each in tensors]
        self.behind = Behind(self.outputs, self.tracing)
        self.states = [s for s, expr in self.tracing.read_states.items() if expr in self.behind.placeholders]
        self.leaves = [*placeholders, *(self.tracing.read_states[state] for state in self.states)]


def _weights(graph: Graph, values: Sequence[Value], states: Sequence[State], model: Any) -> None:
    """States that were read become constants, under the names they have in the module."""
    named = {}
    if isinstance(model, Module):
        named = {id(state): name for name, state in (*model.named_parameters(), *model.named_buffers())}
    for value, state in zip(values, states):
        constant = graph.add_constant(ConstTensor.of(state.numpy()), named.get(id(state), state.name))
        value.replace_by(constant)
        graph.inputs.remove(value)


def _without_copies(graph: Graph) -> None:
    """Take out identities that only said that no gradient goes through, and constants nobody uses."""
    for node in list(graph):
        if node.op != "Identity" or node.domain:
            continue
        source, result = node.inputs[0], node.output
        if source is None or (result in graph.outputs and (source.producer is None or source in graph.outputs)):
            continue
        result.replace_by(source)
        graph.remove(node)
    for value in list(graph.constants.values()):
        if not value.uses and value not in graph.outputs:
            graph.remove_constant(value)


# -- sizes that differ ----------------------------------------------------------------------------------------------


def _sizes(given: Sequence[Expr], names: Sequence[str], dynamic: Axes) -> dict[str, tuple[int, int]]:
    """For each named size the one of the examples, and another: numbers that do not come up by chance."""
    found: dict[str, tuple[int, int]] = {}
    for expr, name in zip(given, names):
        for axis, symbol in dynamic.get(name, {}).items():
            if not -len(expr.shape) <= axis < len(expr.shape):
                raise InvalidInput(f"dynamic_axes: {name} has no axis {axis}")
            size = expr.shape[axis]
            if found.setdefault(symbol, (size, size + 7 + 4 * len(found)))[0] != size:
                raise InvalidInput(f"the size {symbol!r} is {found[symbol][0]} and {size} in the examples")
    return found


def _resized(expr: Expr, axes: Mapping[int, str], sizes: Mapping[str, tuple[int, int]]) -> Expr:
    shape = list(expr.shape)
    for axis, symbol in axes.items():
        shape[axis] = sizes[symbol][1]
    return known(np.zeros(shape, expr.dtype.numpy), expr.dtype, expr.device)


class _Generalised:
    """The graph of one run, written so that it is that of the other run too."""

    def __init__(
        self, graph: Graph, values: Mapping[Expr, Value], one: _Run, other: _Run, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        self._graph, self._values, self._one, self._other = graph, values, one, other
        self._symbols = {pair: Symbol(name) for name, pair in sizes.items()}

    def apply(self) -> None:
        first, second = self._one.behind, self._other.behind
        if len(first.order) != len(second.order) or len(first.constants) != len(second.constants):
            raise NotSupported("what the model computes depends on the sizes of its inputs")
        for a, b in zip(first.constants, second.constants):
            one, other = (constant_of(each) for each in (a, b))
            if a is b or one is other:
                continue
            if a.shape != b.shape or not np.array_equal(one.numpy(), other.numpy(), equal_nan=a.dtype.is_float):
                raise NotSupported(f"a constant of shape {list(a.shape)} depends on the sizes of the inputs")
        for a, b in zip(first.order, second.order):
            self._fit(a, b)
        for a, b in zip([*self._one.leaves, *first.order], [*self._other.leaves, *second.order]):
            if a.shape != b.shape:
                dims = tuple(self._dim(m, n) for m, n in zip(a.shape, b.shape))
                self._values[a].type = TensorType(a.dtype, dims)

    def _dim(self, one: int, other: int) -> Dim:
        return one if one == other else self._symbols.get((one, other))

    def _fit(self, a: Expr, b: Expr) -> None:
        assert a.spec is not None and b.spec is not None
        if a.spec == b.spec:
            return
        node = self._values[a].producer
        assert node is not None
        if a.spec[:2] != b.spec[:2] or len(a.spec[2]) != len(b.spec[2]):
            raise self._in_the_way(a)
        for (position, ours), (_, theirs) in zip(a.spec[2], b.spec[2]):
            if ours == theirs:
                continue
            if not isinstance(ours, tuple) or not isinstance(theirs, tuple) or len(ours) != len(theirs):
                raise self._in_the_way(a)
            numbers = self._target(a, b, ours, theirs)
            constant = self._graph.add_constant(ConstTensor.of(np.array(numbers, np.int64)))
            node.set_input(position, constant)

    def _target(self, a: Expr, b: Expr, ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
        """Numbers that mean the target shape of both."""
        assert a.spec is not None
        before, after = a.inputs[0].shape, b.inputs[0].shape
        differ = [k for k, (m, n) in enumerate(zip(ours, theirs)) if m != n]
        found = list(ours)
        if a.spec[0] == "Reshape":
            for k in differ[:-1] if len(differ) > 1 else ():
                if k >= len(before) or (before[k], after[k]) != (ours[k], theirs[k]):
                    raise self._in_the_way(a)
                found[k] = 0  # as it is in the operand
            found[differ[-1]] = -1
            return found
        if a.spec[0] == "Expand":
            lead = len(ours) - len(before)
            for k in differ:
                if k < lead or (before[k - lead], after[k - lead]) != (ours[k], theirs[k]):
                    raise self._in_the_way(a)
                found[k] = 1  # as large as the operand
            return found
        raise self._in_the_way(a)

    def _in_the_way(self, expr: Expr) -> NotSupported:
        assert expr.spec is not None
        return NotSupported(f"{expr.spec[0]} ({line_of(expr)}) is written for one size of the inputs only")


_OF_TENSORS = True
