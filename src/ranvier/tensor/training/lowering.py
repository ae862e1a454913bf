"""The graph of a loaded model as operations on tensors, for inputs of known shapes.

With shapes known, what computes shapes folds away and every value has one type; so a graph becomes a list of steps
that are followed at each call. They make expressions like any operation of a user's: gradients, fusion and jit need
to know nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.devices import Device
from ranvier.dtypes import DType
from ranvier.errors import NotSupported, ShapeMismatch
from ranvier.graph.defaults import settle as settle_default
from ranvier.graph.extract import extract
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import annotate
from ranvier.passes import (
    Cancel,
    DeadCode,
    FoldConstants,
    FoldShapes,
    LoopInvariants,
    Modernise,
    OptimizationPass,
    PassManager,
)
from ranvier.records import dataclass
from ranvier.tensor.building import version_of
from ranvier.tensor.core import Tensor, wrapped
from ranvier.tensor.custom import checkpoint
from ranvier.tensor.expr import ITEM, Expr, Fixed, Spec, applied, known, spec, tie

Shape = tuple[int, ...]
_Step = tuple[Spec, tuple[int, ...], DType, Shape]
_MASK = "training.mask"
LEARNING = ("Dropout", "BatchNormalization")  # operators that do something else while a model learns


_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


@dataclass(frozen=True)
class Mask:
    """What a Dropout multiplies by while a model learns."""

    ratio: float
    dtype: DType
    shape: Shape


@dataclass(frozen=True)
class Steps:
    """A model for one set of input shapes. Operands come in the order inputs, learned, states, masks."""

    steps: list[_Step]
    constants: list[Expr]
    masks: list[Mask]
    outputs: list[int]
    renewed: list[tuple[str, int]]  # states that get a new value, and which
    tied: list[list[int]]  # results of one operator, computed together

    def follow(
        self, given: Sequence[Expr], device: Device | None, small: DType | None = None, segments: int = 1
    ) -> list[Expr]:
        """Values of everything. ``small``: products of float32 run in this type, as ``autocast`` asks for.
        ``segments``: what is inside each of so many parts is computed again for its gradient instead of being kept."""
        made = [*given, *self.constants]
        first = len(made)
        for start, end in self._borders(segments):
            if segments == 1:
                made += self._part(dict(enumerate(made)), first, start, end, device, small)
            else:
                made += self._again(made, first, start, end, device, small)
        for members in self.tied:
            tie([made[k] for k in members])
        return made

    def _borders(self, segments: int) -> list[tuple[int, int]]:
        """Parts of about equal length; results of one operator stay in one."""
        count = len(self.steps)
        found = [0]
        for k in range(1, segments):
            at = max(round(k * count / segments), found[-1])
            while at < count and self.steps[at][0][0] == ITEM:
                at += 1
            found.append(at)
        return [(a, b) for a, b in zip(found, [*found[1:], count]) if a < b]

    def _part(
        self, have: dict[int, Expr], first: int, start: int, end: int, device: Device | None, small: DType | None
    ) -> list[Expr]:
        found: list[Expr] = []
        for k in range(start, end):
            of, operands, dtype, shape = self.steps[k]
            inputs = tuple([have[x] for x in operands])
            if small is not None and of[0] in _PRODUCTS and dtype is DType.float32:
                narrow = tuple([_cast(x, small, device) for x in inputs])
                made = _cast(applied(of, narrow, small, shape, device), dtype, device)
            else:
                made = applied(of, inputs, dtype, shape, device)
            have[first + k] = made
            found.append(made)
        return found

    def _again(
        self, made: list[Expr], first: int, start: int, end: int, device: Device | None, small: DType | None
    ) -> list[Expr]:
        """One segment: only what later ones or the caller read of it comes out by name."""
        inside = range(first + start, first + end)
        read = sorted({x for k in range(start, end) for x in self.steps[k][1] if x < first + start})
        later = {x for k in range(end, len(self.steps)) for x in self.steps[k][1]}
        later |= {*self.outputs, *(k for _, k in self.renewed)}
        out = [k for k in inside if k in later]
        values: list[Expr] = []

        def run(*operands: Tensor) -> tuple[Tensor, ...]:
            have = {k: x._expr for k, x in zip(read, operands)}
            values[:] = self._part(have, first, start, end, device, small)
            return tuple(wrapped(have[k]) for k in out)

        results = checkpoint(run)(*(wrapped(made[k]) for k in read))
        for k, each in zip(out, results):
            values[k - first - start] = each._expr
        return values


def _cast(expr: Expr, to: DType, device: Device | None) -> Expr:
    return expr if expr.dtype is to else applied(spec("Cast", (("to", to.onnx),)), (expr,), to, expr.shape, device)


def copied(graph: Graph) -> tuple[Graph, dict[str, Value]]:
    """A copy that may be changed, and its constants by the names they have in the original."""
    constants = list(graph.constants.values())
    made = extract(graph, [*graph.inputs, *constants], graph.outputs, name=graph.name, opsets=graph.opsets)
    made.metadata, made.doc = dict(graph.metadata), graph.doc
    for old, new in zip(graph.inputs, made.inputs):
        if old.name in graph.defaults:
            made.defaults[new.name] = graph.defaults[old.name]
    return made, {old.name: new for old, new in zip(constants, made.constants.values())}


def settle(graph: Graph) -> None:
    """Inputs that have a default become constants, as they are for whoever does not give them; nodes that learning
    changes get names of their own."""
    for value in [v for v in graph.inputs if v.name in graph.defaults]:
        settle_default(graph, value)
    taken: set[str] = set()
    for k, node in enumerate(graph):
        if node.op in LEARNING and (not node.name or node.name in taken):
            node.name = f"{node.op}.{k}"
        taken.add(node.name)


def steps_of(
    graph: Graph,
    inputs: Mapping[str, tuple[DType, Shape]],
    learned: Sequence[str],
    states: Sequence[str],
    training: frozenset[str],
) -> Steps:
    """What a graph does to inputs of these types. ``learned`` and ``states`` are constants that come in from outside;
    ``training`` names the nodes (Dropout, BatchNormalization) that do what they do while a model learns."""
    own, masks, renewed = prepared(graph, inputs, learned, states, training)
    return _Lowering(own, masks, renewed).steps()


def prepared(
    graph: Graph,
    inputs: Mapping[str, tuple[DType, Shape]],
    learned: Sequence[str],
    states: Sequence[str],
    training: frozenset[str],
) -> tuple[Graph, list[Mask], list[str]]:
    """A copy of the graph for these sizes, in which everything that steps need is known. Its inputs are those of the
    model, then learned constants, states and masks; its last outputs are new values of the states that are told."""
    own, constants = copied(graph)
    wider = [_is_wider(value, inputs[value.name][1]) for value in own.inputs]
    if any(wider):
        _free_batch(own)
    for value in own.inputs:
        value.type = TensorType(*inputs[value.name])
    for name in [*learned, *states]:
        value = constants[name]
        assert value.const is not None
        outside = own.add_input(f"{name}.outside", value.const.type)
        value.replace_by(outside)
        own.remove_constant(value)
    annotate(own)
    PassManager([DeadCode(), Modernise()]).run(own)
    place = {value: name for name, value in zip(states, own.inputs[len(inputs) + len(learned) :])}
    masks, renewed = _learning(own, training, place)
    own.outputs = [*own.outputs, *(value for _, value in renewed)]
    annotate(own)
    PassManager([DeadCode(), Modernise(), *_folding()]).run(own)
    problems = sorted({reason for node in own if (reason := _problem(node))})
    if problems:
        raise NotSupported(f"the model cannot be trained: {'; '.join(problems)}")
    return own, masks, [name for name, _ in renewed]


def _folding() -> list[OptimizationPass]:
    """What known shapes make superfluous goes; operators stay what they are, for the sake of their gradients."""
    return [FoldShapes(), FoldConstants(), LoopInvariants(), FoldShapes(), FoldConstants(), Cancel(), DeadCode()]


def decide(graph: Graph) -> None:
    """Resolve what follows from constants, so that weights inside branches that are always taken come out of them."""
    settle(graph)
    annotate(graph)
    PassManager([DeadCode(), Modernise(), *_folding()]).run(graph)


def _is_wider(value: Value, shape: Shape) -> bool:
    """Whether an input of a batch of one, as many files have it, is given several; other sizes must be as declared."""
    declared = value.type
    if not isinstance(declared, TensorType) or declared.shape is None:
        return False
    pairs = list(zip(declared.shape, shape))
    if len(declared.shape) == len(shape) and all(not isinstance(a, int) or a == b for a, b in pairs):
        return False
    if len(declared.shape) != len(shape) or declared.shape[0] != 1 or any(a != b for a, b in pairs[1:]):
        raise ShapeMismatch(f"input {value.name!r} is {declared}, not of shape {list(shape)}")
    return True


def _free_batch(graph: Graph) -> None:
    """Let a graph that was written for one sample take several: sizes are found anew, and a Reshape that begins with
    the one keeps what is there instead."""
    for node in graph:
        target, x = node.input(1), node.input(0)
        if node.op == "Reshape" and target is not None and target.const is not None and x is not None:
            numbers = target.const.numpy()
            one = isinstance(x.type, TensorType) and bool(x.type.shape) and x.type.shape[0] == 1  # type: ignore[index]
            if one and numbers.ndim == 1 and numbers.size and numbers[0] == 1 and not node.attrs.get("allowzero", 0):
                node.set_input(1, graph.add_constant(ConstTensor.of(np.array([0, *numbers[1:]], np.int64))))
    for node in graph:
        for result in node.outputs:
            found = result.type
            if isinstance(found, TensorType):
                result.type = TensorType(found.dtype, None)


def _learning(
    graph: Graph, training: frozenset[str], states: Mapping[Value, str]
) -> tuple[list[Mask], list[tuple[str, Value]]]:
    """Rewrite what behaves differently while a model learns: Dropout multiplies by a mask from outside, batch
    normalization takes the batch's own mean and gives new running ones."""
    masks: list[Mask] = []
    renewed: list[tuple[str, Value]] = []
    for node in list(graph):
        if node.domain or node.name not in training:
            continue
        x = node.inputs[0]
        assert x is not None
        if node.op == "Dropout" and not node.output.uses and not node.output.is_graph_output:
            continue
        if node.op == "Dropout":
            if not isinstance(x.type, TensorType) or not x.type.is_static or x.type.dtype is None:
                raise NotSupported(f"the shape of {x.name!r} is not known where Dropout needs a mask for it")
            shape = tuple(int(d) for d in x.type.shape or ())  # type: ignore[arg-type]
            masks.append(Mask(_ratio(node), x.type.dtype, shape))
            mask = graph.add_input(f"{_MASK}.{len(masks)}", x.type)
            product = graph.add("Mul", [x, mask], version=version_of("Mul"), before=node, name=node.name)
            product.output.type = x.type
            node.output.replace_by(product.output)
        elif node.op == "BatchNormalization":
            mean, variance = node.inputs[3], node.inputs[4]
            if mean not in states or variance not in states:
                continue
            assert mean is not None and variance is not None
            made = graph.add(
                node.op,
                node.inputs,
                {**node.attrs, "training_mode": 1},
                3,
                version=node.version,
                name=node.name,
                before=node,
            )
            made.output.type = node.output.type
            node.output.replace_by(made.output)
            renewed += [(states[mean], made.outputs[1]), (states[variance], made.outputs[2])]
    return masks, renewed


def _ratio(node: Node) -> float:
    if "ratio" in node.attrs:
        return float(node.attrs["ratio"])
    given = node.input(1)
    if given is None:
        return 0.5
    if given.const is None:
        raise NotSupported(f"the ratio of Dropout {node.name!r} is computed; only a constant one can be trained")
    return float(given.const.numpy())


class _Lowering:
    """The nodes of a graph as steps."""

    def __init__(self, graph: Graph, masks: list[Mask], renewed: list[str]) -> None:
        self._graph = graph
        self._masks = masks
        self._renewed = renewed
        self._numbers: dict[Value, int] = {value: k for k, value in enumerate(graph.inputs)}
        self._constants: list[Expr] = []
        self._steps: list[_Step] = []
        self._tied: list[list[int]] = []

    def steps(self) -> Steps:
        graph = self._graph
        read = {v: None for n in graph for v in n.inputs if v is not None and v.const is not None}
        for value in [*read, *(v for v in graph.outputs if v.const is not None)]:
            if value not in self._numbers:
                self._constant(value)
        for node in graph:
            self._node(node)
        results = [self._numbers[value] for value in graph.outputs]
        plain = len(results) - len(self._renewed)
        renewed = list(zip(self._renewed, results[plain:]))
        return Steps(self._steps, self._constants, self._masks, results[:plain], renewed, self._tied)

    def _constant(self, value: Value) -> None:
        assert value.const is not None
        array = np.array(value.const.numpy())
        array.flags.writeable = False
        self._numbers[value] = len(self._graph.inputs) + len(self._constants)
        self._constants.append(known(array, value.const.dtype))

    def _node(self, node: Node) -> None:
        fixed: list[Fixed] = []
        operands: list[int] = []
        for position, value in enumerate(node.inputs):
            if value is None:
                fixed.append((position, None))
            elif (numbers := _integers(value.const)) is not None:
                fixed.append((position, numbers))
            else:
                operands.append(self._numbers[value])
        attrs = tuple((name, _hashable(attr)) for name, attr in sorted(node.attrs.items()))
        op = f"{node.domain}::{node.op}" if node.domain else node.op
        of: Spec = (op, attrs, tuple(fixed), len(node.outputs))
        if len(node.outputs) == 1:
            self._numbers[node.output] = self._append(of, tuple(operands), node.output)
            return
        whole = self._append(of, tuple(operands), node.output)
        members: list[int] = []
        for k, value in enumerate(node.outputs):
            if value.uses or value.is_graph_output:
                self._numbers[value] = self._append(spec(ITEM, (("index", k),)), (whole,), value)
                members.append(self._numbers[value])
        self._tied.append(members)

    def _append(self, of: Spec, operands: tuple[int, ...], value: Value) -> int:
        found = value.type
        assert isinstance(found, TensorType) and found.dtype is not None and found.shape is not None
        self._steps.append((of, operands, found.dtype, tuple(int(d) for d in found.shape)))  # type: ignore[arg-type]
        return len(self._graph.inputs) + len(self._constants) + len(self._steps) - 1


def _problem(node: Node) -> str:
    """Why a node cannot be a step; empty where it can."""
    label = f"{node.op} {node.name!r}" if node.name else node.op
    if node.has_subgraphs:
        return f"{label} has a body whose course depends on values"
    if node.version != version_of(node.op, node.domain):
        return f"{label} is of version {node.version}, which has no newer form"
    for k, value in enumerate(node.outputs):
        if k and not (value.uses or value.is_graph_output):
            continue
        if not isinstance(value.type, TensorType) or value.type.dtype is None or not value.type.is_static:
            return f"{label} gives {value.type}, whose size depends on values"
    return ""


def _integers(const: ConstTensor | None) -> int | Shape | None:
    """The content of a small constant of integers, which is part of the operator."""
    if const is None or const.dtype is not DType.int64 or len(const.shape) > 1:
        return None
    array = const.numpy()
    return int(array) if array.ndim == 0 else tuple(int(n) for n in array)


def _hashable(attr: Any) -> Any:
    return tuple(_hashable(each) for each in attr) if isinstance(attr, list | tuple) else attr


_OF_TENSORS = True
