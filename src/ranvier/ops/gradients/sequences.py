"""Tensors in sequences and optionals: found again where they went in, so that lists need no gradients.

That takes lists whose length and order follow from the graph alone. What a loop fills has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import NotSupported
from ranvier.graph.bodies import copy_body
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import OptionalType, SequenceType, TensorType
from ranvier.ops.gradients.base import Backward, attribute, constant_array, constant_ints, first, needs, operand
from ranvier.ops.gradients.parts import made_of

HOLDERS = frozenset({"Optional", "SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceMap",
                     "SplitToSequence"})  # fmt: skip


def carries(value: Value) -> bool:
    """Whether a value is, or holds, numbers that can have a gradient."""
    kind = value.type
    while isinstance(kind, SequenceType | OptionalType):
        kind = kind.elem
        if isinstance(kind, TensorType):
            return kind.dtype is None or kind.dtype.is_float
        if kind is None:
            return True
    return needs(value)


@made_of("SequenceAt")
def _at(b: Backward, node: Node) -> Sequence[Value]:
    tensors = _tensors(b, first(node))
    (place,) = constant_ints(node.inputs[1], "the position of SequenceAt")
    return [b.Identity(tensors[place])]


@made_of("ConcatFromSequence")
def _concat(b: Backward, node: Node) -> Sequence[Value]:
    tensors, axis = _tensors(b, first(node)), int(node.attrs["axis"])
    if attribute(node, "new_axis", 0):
        tensors = [b.Unsqueeze(tensor, b.whole(axis)) for tensor in tensors]
    return [b.node("Concat", tensors, {"axis": axis}).output]


@made_of("OptionalGetElement")
def _element(b: Backward, node: Node) -> Sequence[Value]:
    return [b.Identity(_held(first(node)))]


def _held(value: Value) -> Value:
    """What an optional was made of."""
    while value.producer is not None and value.producer.op in ("Optional", "OptionalGetElement", "Identity"):
        value = first(value.producer)
    if isinstance(value.type, OptionalType):
        raise NotSupported(f"the gradient of {value.name!r} is not known: whether it is there depends on what runs")
    return value


def _tensors(b: Backward, sequence: Value) -> list[Value]:
    """What a sequence holds, in order."""
    value = _held(sequence)
    node = value.producer
    if node is None or node.domain:
        raise _unknown(value)
    if node.op == "SequenceConstruct":
        return [v for v in node.inputs if v is not None]
    if node.op == "SequenceEmpty":
        return []
    if node.op in ("SequenceInsert", "SequenceErase"):
        return _changed(b, node)
    if node.op == "SplitToSequence":
        return _pieces(b, node)
    if node.op == "SequenceMap":
        return _mapped(b, node, list(node.outputs).index(value))
    raise _unknown(value)


def _unknown(value: Value) -> NotSupported:
    return NotSupported(f"the gradient of the sequence {value.name!r} is not known: what it holds depends on what runs")


def _changed(b: Backward, node: Node) -> list[Value]:
    held = list(_tensors(b, first(node)))
    inserts = node.op == "SequenceInsert"
    given = constant_ints(operand(node, 2 if inserts else 1), f"the position of {node.op}")
    place = given[0] if given else len(held) if inserts else -1
    place += len(held) if place < 0 else 0
    if not inserts:
        return [*held[:place], *held[place + 1 :]]
    tensor = node.inputs[1]
    assert tensor is not None
    return [*held[:place], tensor, *held[place:]]


def _pieces(b: Backward, node: Node) -> list[Value]:
    x, given = first(node), operand(node, 1)
    axis = b.axis(node, 0, x)
    size = b.sizes(x)[axis]
    if given is None:
        lengths = [1] * size
    else:
        sizes = constant_array(given, "the lengths of SplitToSequence")
        step = int(sizes) if sizes.ndim == 0 else 0
        lengths = [int(n) for n in sizes] if not step else [min(step, size - at) for at in range(0, size, step)]
    ends = np.cumsum(lengths)
    parts = [
        b.Slice(x, b.whole(int(end) - n), b.whole(int(end)), b.whole(axis)) for end, n in zip(ends, lengths)
    ]  # fmt: skip
    if given is None and not attribute(node, "keepdims", 1):
        parts = [b.Squeeze(part, b.whole(axis)) for part in parts]
    return parts


def _mapped(b: Backward, node: Node, output: int) -> list[Value]:
    """The body once for each element; operands that are no sequences are the same for all."""
    body: Graph = node.attrs["body"]
    given = [v for v in node.inputs if v is not None]
    lists = {v: _tensors(b, v) for v in given if not isinstance(v.type, TensorType)}
    found = []
    for k in range(len(lists[given[0]])):
        inputs = {inner: lists[v][k] if v in lists else v for inner, v in zip(body.inputs, given)}
        made = copy_body(body, inputs, b.graph, b.before)
        found.append(made[body.outputs[output]])
    return found
