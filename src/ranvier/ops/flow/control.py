"""Control flow: operators whose attributes are graphs. The runtime runs the bodies, through ``ctx.run``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.ir import Graph
from ranvier.graph.types import Type
from ranvier.ops.allocation import checked_shape
from ranvier.ops.operands import normal_axis, whole_number
from ranvier.ops.registry import Array, Call, op


@op("If", since=1)
def if_(cond: Array, *, then_branch: Graph, else_branch: Graph, ctx: Call) -> tuple[Any, ...]:
    branch = then_branch if _truth(cond, "If") else else_branch
    _check_outputs("If", branch, ctx.outputs)
    return tuple(ctx.run(branch, []))


@op("Loop", since=1)
def loop(trip_count: Array | None, cond: Array | None = None, *carried: Any, body: Graph, ctx: Call) -> tuple[Any, ...]:
    limit = None if trip_count is None else whole_number("Loop", "the trip count", trip_count)
    going = True if cond is None else _truth(cond, "Loop")
    state = list(carried)
    _check_outputs("Loop", body, 1 + max(len(state), ctx.outputs))
    collected: list[list[Array]] = [[] for _ in range(len(body.outputs) - 1 - len(state))]
    step = 0
    while going and (limit is None or step < limit):
        results = ctx.run(body, [np.array(step, np.int64), np.array(going), *state])
        going = _truth(results[0], "Loop")
        state = results[1 : 1 + len(state)]
        for sink, item in zip(collected, results[1 + len(state) :]):
            sink.append(item)
        step += 1
    declared = [v.type for v in body.outputs[1 + len(state) :]]
    return (*state, *(_stack(items, 0, t, "Loop") for items, t in zip(collected, declared)))


@op("Scan", since=9)
def scan(
    *operands: Any,
    body: Graph,
    num_scan_inputs: int,
    scan_input_axes: tuple[int, ...] = (),
    scan_input_directions: tuple[int, ...] = (),
    scan_output_axes: tuple[int, ...] = (),
    scan_output_directions: tuple[int, ...] = (),
    ctx: Call,
) -> tuple[Any, ...]:
    if not 0 < num_scan_inputs <= len(operands):
        raise InvalidValue(f"Scan: num_scan_inputs is {num_scan_inputs}, with {len(operands)} inputs", op="Scan")
    count = len(operands) - num_scan_inputs
    state = list(operands[:count])
    _check_outputs("Scan", body, max(count, ctx.outputs))
    outputs = len(body.outputs) - count
    in_axes = _per_value("scan_input_axes", scan_input_axes, num_scan_inputs)
    in_backwards = _per_value("scan_input_directions", scan_input_directions, num_scan_inputs)
    out_axes = _per_value("scan_output_axes", scan_output_axes, outputs)
    out_backwards = _per_value("scan_output_directions", scan_output_directions, outputs)
    scanned = [(x, normal_axis("Scan", a, x.ndim), d) for x, a, d in zip(operands[count:], in_axes, in_backwards)]
    sequences = [np.moveaxis(x, axis, 0)[:: -1 if backwards else 1] for x, axis, backwards in scanned]
    lengths = {len(s) for s in sequences}
    if len(lengths) != 1:
        raise ShapeMismatch(f"Scan: the scanned inputs have different lengths {sorted(lengths)}")
    collected: list[list[Array]] = [[] for _ in range(outputs)]
    for step in range(lengths.pop()):
        results = ctx.run(body, [*state, *(np.asarray(s[step]) for s in sequences)])
        state = results[:count]
        for sink, item in zip(collected, results[count:]):
            sink.append(item)
    declared = [v.type for v in body.outputs[count:]]
    stacked = [
        _stack(items[:: -1 if backwards else 1], axis, t, "Scan")
        for items, axis, backwards, t in zip(collected, out_axes, out_backwards, declared)
    ]
    return (*state, *stacked)


@op("Scan", since=8)
def scan_8(
    sequence_lens: Array | None,
    *operands: Any,
    body: Graph,
    num_scan_inputs: int,
    directions: tuple[int, ...] = (),
    ctx: Call,
) -> tuple[Any, ...]:
    """The first form: operands have a batch dimension, and each batch entry may have its own length."""
    if not 0 < num_scan_inputs <= len(operands):
        raise InvalidValue(f"Scan: num_scan_inputs is {num_scan_inputs}, with {len(operands)} inputs", op="Scan")
    count = len(operands) - num_scan_inputs
    if any(x.ndim < 1 for x in operands) or operands[-1].ndim < 2:
        raise ShapeMismatch(f"Scan: operands need a batch dimension, got {[list(x.shape) for x in operands]}")
    batch, longest = operands[-1].shape[:2]
    lengths = [longest] * batch if sequence_lens is None else [int(n) for n in sequence_lens.ravel()]
    if len(lengths) != batch or any(len(x) != batch for x in operands):
        raise ShapeMismatch(f"Scan: operands and lengths need a batch of {batch}, got {len(lengths)} lengths")
    if not all(0 <= n <= longest for n in lengths):
        raise InvalidValue(f"Scan: sequence_lens {lengths} are not lengths of at most {longest}", op="Scan")
    per_entry: list[tuple[Any, ...]] = []
    for entry in range(batch):
        given = [x[entry] for x in operands[:count]] + [x[entry][: lengths[entry]] for x in operands[count:]]
        results = scan.body(
            *given, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, ctx=ctx
        )
        padded = [_pad_end(r, longest) for r in results[count:]]
        per_entry.append((*results[:count], *padded))
    return tuple(np.stack(column) for column in zip(*per_entry))


@op("SequenceMap", since=17)
def sequence_map(sequence: list[Any], *others: Any, body: Graph, ctx: Call) -> tuple[Any, ...]:
    sinks: list[list[Any]] = [[] for _ in body.outputs]
    _check_outputs("SequenceMap", body, ctx.outputs)
    lengths = {len(x) for x in (sequence, *others) if isinstance(x, list)}
    if not isinstance(sequence, list) or len(lengths) > 1:
        raise InvalidValue(f"SequenceMap: needs sequences of one length, got {sorted(lengths)}", op="SequenceMap")
    for k, item in enumerate(sequence):
        given = [other[k] if isinstance(other, list) else other for other in others]
        for sink, result in zip(sinks, ctx.run(body, [item, *given])):
            sink.append(result)
    return tuple(sinks)


def _check_outputs(name: str, body: Graph, least: int) -> None:
    if len(body.outputs) < least:
        raise InvalidValue(f"{name}: graph {body.name!r} has {len(body.outputs)} outputs, needs {least}", op=name)


def _per_value(name: str, given: tuple[int, ...], count: int) -> tuple[int, ...]:
    """One number for each scanned value; all 0 where the attribute is left out."""
    if given and len(given) != count:
        raise InvalidValue(f"Scan: {name} has {len(given)} entries, expected {count}", op="Scan")
    return given or (0,) * count


def _truth(cond: Any, name: str) -> bool:
    condition = np.asarray(cond)
    if condition.size != 1:
        raise ShapeMismatch(f"{name}: the condition must hold one element, got shape {list(condition.shape)}")
    return bool(condition.item())


def _stack(items: list[Array], axis: int, declared: Type | None, name: str) -> Array:
    if not all(isinstance(x, np.ndarray) for x in items):
        raise InvalidValue(f"{name}: only tensors can be scan outputs", op=name)
    if items:
        axis = normal_axis(name, axis, items[0].ndim + 1)
        if len({x.shape for x in items}) > 1:
            shapes = sorted({x.shape for x in items})
            raise ShapeMismatch(f"{name}: a scan output changes its shape between steps: {shapes[:3]}")
        checked_shape((len(items), *items[0].shape), items[0].dtype, name)
        return np.stack(items, axis)
    # no step ran: the declared type is all there is to go by
    shape = getattr(declared, "shape", None) or ()
    dtype = getattr(declared, "dtype", None)
    sizes = [d if isinstance(d, int) else 0 for d in shape]
    sizes.insert(axis if axis >= 0 else axis + len(sizes) + 1, 0)
    kind = dtype.numpy if dtype is not None else np.dtype(np.float32)
    return np.zeros(checked_shape(sizes, kind, name), kind)


def _pad_end(result: Array, length: int) -> Array:
    """Fill a shorter result up to ``length`` steps with zeros at the end."""
    missing = length - result.shape[0]
    return result if missing == 0 else np.pad(result, [(0, missing)] + [(0, 0)] * (result.ndim - 1))
