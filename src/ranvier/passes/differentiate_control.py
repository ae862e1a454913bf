"""Gradients of If, Loop and Scan.

A branch's gradient is a branch. A loop's gradient is a loop that runs the other way: the states each iteration began
with are kept by the forward loop, every backward iteration computes its own iteration again from them and derives it,
and what the body captures from outside gathers its gradient in a state of its own. A Scan is a loop first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.bodies import copy_body
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.gradients import Backward, needs
from ranvier.records import dataclass

Derive = Callable[[Graph, Sequence[tuple[Value, Value | None]], Sequence[Value]], list[Value | None]]
CONTROL = frozenset({"If", "Loop", "Scan"})
_INDEX = TensorType(DType.int64, ())
_TRUTH = TensorType(DType.bool, ())


@dataclass(frozen=True)
class Kept:
    """What a forward loop keeps for its gradient: the number of each iteration, and the states it began with."""

    numbers: Value
    states: tuple[Value, ...]


def prepared(graph: Graph, node: Node) -> tuple[Node, dict[Value, Value], Kept | None]:
    """The node in the form that can be derived, which values took the place of which, and what it keeps."""
    if node.op == "If":
        return node, {}, None
    replaced: dict[Value, Value] = {}
    if node.op == "Scan":
        node, replaced = _as_loop(graph, node)
    node, more, kept = _keeping(graph, node)
    return node, {**{old: more.get(new, new) for old, new in replaced.items()}, **more}, kept


def control_gradients(
    b: Backward, node: Node, grads: list[Value | None], kept: Kept | None, derive: Derive
) -> dict[Value, Value]:
    """Gradients of all that a node reads, what its bodies capture included."""
    if node.op == "If":
        return _if(b, node, grads, derive)
    assert kept is not None
    return _loop(b, node, grads, kept, derive)


def _captures(node: Node) -> list[Value]:
    return [value for value in dict.fromkeys(node.captures()) if needs(value)]


# -- branches -------------------------------------------------------------------------------------------------------


def _if(b: Backward, node: Node, grads: list[Value | None], derive: Derive) -> dict[Value, Value]:
    wanted = _captures(node)
    branches: dict[str, Any] = {}
    for key in ("then_branch", "else_branch"):
        branch: Graph = node.attrs[key]
        made = Graph(branch.name, opsets=branch.opsets)
        found = copy_body(branch, {}, made)
        targets = [
            (found.get(out, out), grad) for out, grad in zip(branch.outputs, grads) if grad is not None and needs(out)
        ]
        own = derive(made, targets, wanted)
        ops = Backward(made)
        made.outputs = [ops.Identity(ops.zeros(v) if g is None else g) for v, g in zip(wanted, own)]
        branches[key] = made
    if not wanted:
        return {}
    results = [Value("", value.type) for value in wanted]
    b.graph.add("If", [node.inputs[0]], branches, results, version=node.version, origin="gradient")
    return dict(zip(wanted, results))


# -- loops ----------------------------------------------------------------------------------------------------------


def _keeping(graph: Graph, node: Node) -> tuple[Node, dict[Value, Value], Kept]:
    """The same loop with more results: its iterations' numbers and the states they began with."""
    body: Graph = node.attrs["body"]
    made = Graph(body.name, opsets=body.opsets)
    inputs = {value: made.add_input(value.name, value.type) for value in body.inputs}
    found = copy_body(body, inputs, made)
    ops = Backward(made)
    again = [ops.Identity(inputs[value]) for value in (body.inputs[0], *body.inputs[2:])]
    made.outputs = [*(found.get(value, value) for value in body.outputs), *again]
    results = [Value("", value.type) for value in node.outputs]
    more = [Value("", _stacked(value)) for value in again]
    loop = graph.add(
        "Loop", node.inputs, {"body": made}, [*results, *more], version=node.version, name=node.name, before=node
    )
    replaced = dict(zip(node.outputs, results))
    for old, new in replaced.items():
        new.name, old.name = old.name, f"{old.name}.before"
        old.replace_by(new)
    graph.remove(node)
    return loop, replaced, Kept(more[0], tuple(more[1:]))


def _stacked(value: Value) -> TensorType | None:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    return TensorType(kind.dtype, (None, *kind.shape))


def _loop(b: Backward, node: Node, grads: list[Value | None], kept: Kept, derive: Derive) -> dict[Value, Value]:
    body: Graph = node.attrs["body"]
    states = body.inputs[2:]
    own = len(states)
    scans = len(body.outputs) - 1 - own - (1 + own)  # the last ones are those kept
    picks = _picks(node)
    captures = [v for v in _captures(node) if v not in picks]
    moving = [k for k in range(own) if needs(states[k])]
    count = b.Gather(b.Shape(kept.numbers), b.constant(np.asarray(0, np.int64)))

    made = Graph(f"{body.name}.gradient", opsets=body.opsets)
    number, going = made.add_input("number", _INDEX), made.add_input("going", _TRUTH)
    come = {k: made.add_input(f"from{k}", states[k].type) for k in moving}
    sums = {v: made.add_input(f"sum{k}", v.type) for k, v in enumerate(captures)}
    ops = Backward(made)
    place = ops.Sub(ops.Sub(count, number), ops.constant(np.asarray(1, np.int64)))
    begun = [ops.Gather(saved, place, axis=0) for saved in kept.states]
    for value, state in zip(begun, states):
        value.type = state.type if value.type is None or state.type is None else state.type.merge(value.type)
    instead = {body.inputs[0]: place, body.inputs[1]: ops.constant(np.asarray(True)), **dict(zip(states, begun))}
    found = copy_body(body, instead, made)
    targets: list[tuple[Value, Value | None]] = []
    for k in moving:
        out = body.outputs[1 + k]
        targets.append((found.get(out, out), come[k]))
    for k in range(scans):
        grad, out = grads[own + k], body.outputs[1 + own + k]
        if grad is not None and needs(out):
            piece = ops.Gather(grad, place, axis=0)
            piece.type = out.type if piece.type is None or out.type is None else out.type.merge(piece.type)
            targets.append((found.get(out, out), piece))
    taken = [(source, each) for source, nodes in picks.items() for each in nodes]
    pieces = [found[each.output] for _, each in taken]
    gained = derive(made, targets, [*(begun[k] for k in moving), *captures, *pieces])
    ops = Backward(made)
    before = [
        ops.Identity(ops.zeros(begun[k]) if grad is None else grad) for k, grad in zip(moving, gained[: len(moving)])
    ]
    totals = [
        ops.Identity(sums[v]) if grad is None else ops.Add(sums[v], grad)
        for v, grad in zip(captures, gained[len(moving) : len(moving) + len(captures)])
    ]
    slopes = [
        ops.Identity(ops.zeros(piece) if grad is None else grad)
        for piece, grad in zip(pieces, gained[len(moving) + len(captures) :])
    ]
    places = [ops.cast(_given(found.get(_given(n.inputs[1]), n.inputs[1])), DType.int64) for _, n in taken]
    made.outputs = [ops.Identity(going), *before, *totals, *slopes, *(ops.Identity(place) for place in places)]

    ends = [node.outputs[k] for k in moving]
    starts = [b.Identity(b.zeros(end) if grads[k] is None else _given(grads[k])) for k, end in zip(moving, ends)] + [
        b.zeros(v) for v in captures
    ]
    results = [Value("", states[k].type) for k in moving] + [Value("", v.type) for v in captures]
    rows, at = ([Value("", _stacked(v)) for v in each] for each in (slopes, places))
    b.graph.add(
        "Loop", [count, None, *starts], {"body": made}, [*results, *rows, *at], version=node.version, origin="gradient"
    )
    outcome: dict[Value, Value] = dict(zip(captures, results[len(moving) :]))
    for (source, each), row, place in zip(taken, rows, at):
        put = _put_back(b, source, int(each.attrs.get("axis", 0)), row, place)
        outcome[source] = b.Add(outcome[source], put) if source in outcome else put
    for k, result in zip(moving, results):
        start = node.inputs[2 + k]
        if start is not None:
            outcome[start] = b.Add(outcome[start], result) if start in outcome else result
    return outcome


def _picks(node: Node) -> dict[Value, list[Node]]:
    """Values from outside of which every iteration takes one slice and nothing else, with the nodes that do. Their
    gradients are gathered slice by slice and added up once, where a sum of the whole value in each iteration would
    take as many times as long."""
    body: Graph = node.attrs["body"]
    found: dict[Value, list[Node]] = {}
    others: set[Value] = set(body.outputs)
    outside = set(_captures(node))
    for each in body:
        picks = each.op == "Gather" and not each.domain and _is_number(each.inputs[1])
        for position, value in enumerate(each.inputs):
            if value in outside:
                if picks and position == 0:
                    found.setdefault(_given(value), []).append(each)
                else:
                    others.add(_given(value))
        others.update(each.captures())
    ranked = {v for v in found if isinstance(v.type, TensorType) and v.type.shape is not None}
    return {value: nodes for value, nodes in found.items() if value in ranked - others}


def _is_number(value: Value | None) -> bool:
    return value is not None and isinstance(value.type, TensorType) and value.type.shape == ()


def _put_back(b: Backward, source: Value, axis: int, rows: Value, places: Value) -> Value:
    """Gradients of slices of a value, added where the slices were taken from."""
    rank = b.rank(source)
    axis %= rank
    moved = [axis, *(k for k in range(rank) if k != axis)]
    zeros = b.zeros(source) if axis == 0 else b.Transpose(b.zeros(source), perm=moved)
    added = b.ScatterND(zeros, b.Unsqueeze(places, b.whole(1)), rows, reduction="add")
    return added if axis == 0 else b.Transpose(added, perm=[int(k) for k in np.argsort(moved)])


def _given(value: Value | None) -> Value:
    assert value is not None
    return value


def _as_loop(graph: Graph, node: Node) -> tuple[Node, dict[Value, Value]]:
    """A Scan as the loop it is: each iteration takes its pieces of the scanned tensors itself."""
    if node.version < 9:
        raise NotSupported("the gradient of Scan is known from opset 9 on")
    body: Graph = node.attrs["body"]
    count = int(node.attrs["num_scan_inputs"])
    own = len(body.inputs) - count
    outs = len(body.outputs) - own
    axes_in, axes_out = (list(node.attrs.get(k) or ()) for k in ("scan_input_axes", "scan_output_axes"))
    back_in, back_out = (list(node.attrs.get(k) or ()) for k in ("scan_input_directions", "scan_output_directions"))
    b = Backward(graph)
    b.before = node
    scanned = [v for v in node.inputs[own:] if v is not None]
    axis = int(axes_in[0]) if axes_in else 0
    length = b.Gather(b.Shape(scanned[0]), b.constant(np.asarray(axis % max(1, b.rank(scanned[0])), np.int64)))
    made = Graph(body.name, opsets=body.opsets)
    number, going = made.add_input("number", _INDEX), made.add_input("going", _TRUTH)
    instead = {value: made.add_input(value.name, value.type) for value in body.inputs[:own]}
    ops = Backward(made)
    for k, (piece, source) in enumerate(zip(body.inputs[own:], scanned)):
        at = number
        if k < len(back_in) and back_in[k]:
            at = ops.Sub(ops.Sub(length, number), ops.constant(np.asarray(1, np.int64)))
        taken = ops.Gather(source, at, axis=int(axes_in[k]) if axes_in else 0)
        taken.type = piece.type if taken.type is None or piece.type is None else piece.type.merge(taken.type)
        instead[piece] = taken
    found = copy_body(body, instead, made)
    made.outputs = [ops.Identity(going), *(ops.Identity(found.get(v, v)) for v in body.outputs)]
    results = [Value("", value.type) for value in node.outputs]
    while len(results) < own + outs:
        results.append(Value(""))
    loop = graph.add("Loop", [length, None, *node.inputs[:own]], {"body": made}, results, version=21, before=node)
    replaced = dict(zip(node.outputs, results))
    for k, old in enumerate(node.outputs[own:]):
        axis = int(axes_out[k]) if k < len(axes_out) else 0
        replaced[old] = _laid_out(b, results[own + k], old, axis, k < len(back_out) and bool(back_out[k]))
    for old, new in replaced.items():
        new.name, old.name = old.name, f"{old.name}.before"
        old.replace_by(new)
    graph.remove(node)
    return loop, replaced


def _laid_out(b: Backward, rows: Value, old: Value, axis: int, backwards: bool) -> Value:
    """Pieces that a loop put side by side, as a Scan does it: the last first, or along another axis."""
    if not backwards and not axis:
        return rows
    shape = old.type.shape if isinstance(old.type, TensorType) else None
    if shape is None:
        raise NotSupported(f"the gradient of {old.name!r} needs its number of dimensions, which is not known")
    axis %= len(shape)
    rows.type = TensorType(b.dtype(old), (shape[axis], *shape[:axis], *shape[axis + 1 :]))
    made = b.Slice(rows, b.whole(-1), b.whole(-(2**62)), b.whole(0), b.whole(-1)) if backwards else rows
    return b.Transpose(made, perm=[*range(1, axis + 1), 0, *range(axis + 1, len(shape))]) if axis else made
