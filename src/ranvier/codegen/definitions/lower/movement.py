"""Operators that move elements: concat, pad, gather, resize, tile, one-hot …

Where positions along each axis are known beforehand (pad by reflection, resize, tile), they are tables of offsets,
one per axis, that the loops add up; a table that only counts upwards is a stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import add, cast, compare, const, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import INTEGERS, NUMERIC
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.varying import varies

Array = np.ndarray[Any, Any]
INT64 = DType.int64


def total(exprs: Sequence[Expr]) -> Expr | None:
    found: Expr | None = None
    for each in exprs:
        found = each if found is None else add(found, each)
    return found


def take(nest: NestBuilder, view: View, tables: Sequence[Array | None], **how: Any) -> Expr:
    """The element of ``view`` at ``tables[a][i_a]`` along every axis ``a`` (None: at ``i_a`` itself)."""
    strides, offset, at = [0] * len(nest.domain), 0, []
    for axis, table in enumerate(tables):
        step = view.strides[axis]
        if table is None:
            strides[axis] = step
            continue
        slope = line(table)
        if slope is not None:
            strides[axis], offset = slope * step, offset + (int(table[0]) * step if len(table) else 0)
            continue
        offsets = View.constant(np.asarray(table, np.int64) * step, INT64)
        at.append(nest.load(offsets, _only(axis, len(nest.domain))))
    return nest.load(view, strides, offset=offset, at=total(at), **how)


def line(table: Array) -> int | None:
    """The slope of a table whose entries lie on a line, else None."""
    if len(table) < 2:
        return 0
    slope = int(table[1]) - int(table[0])
    return slope if np.all(np.diff(table) == slope) else None


def _only(axis: int, rank: int, step: int = 1) -> tuple[int, ...]:
    return tuple(step if k == axis else 0 for k in range(rank))


def between(low: Expr, x: Expr, high: Expr) -> Expr:
    """low <= x < high"""
    return op("and", compare("ge", x, low), compare("lt", x, high), dtype=DType.bool)


# -- concat, pad, tile ----------------------------------------------------------------------------------------------


@lowers("Concat")
def concat(n: NodeView, b: Definitions) -> None:
    sources = [n.input(k) for k in range(len(n.inputs))]
    axis = n.attr("axis", 1 if n.version < 4 else 0) % max(1, len(n.out_shape()))
    if len(sources) == 1:
        b.identity(sources[0], out=n.outputs[0])
        return
    b.joined(sources, axis, n.out_shape(), out=n.outputs[0])


@lowers("Pad", values=(1, 3), since=2)
def pad(n: NodeView, b: Definitions) -> None:
    rank, mode = n.rank(0), n.attr("mode", "constant")
    if isinstance(mode, bytes):
        mode = mode.decode()
    amounts = [int(p) for p in (n.attr("pads") if n.version < 11 else n.ints(1))]
    axes = [a % rank for a in n.ints(3)] if n.has(3) else list(range(rank))
    before, after = [0] * rank, [0] * rank
    for k, axis in enumerate(axes):
        before[axis], after[axis] = amounts[k], amounts[k + len(axes)]
    if any(min(p, q) < 0 and d < max(-p, 0) + max(-q, 0) for d, p, q in zip(n.shape(0), before, after)):
        raise Declined("Pad: more is cut off than there is")
    if not any(before) and not any(after):
        b.identity(n.input(0), out=n.outputs[0])
        return
    if mode == "constant":
        _pad_constant(n, b, before)
        return
    shape = n.shape(0)
    tables = [_mirrored(d, p, q, mode) if p or q else None for d, p, q in zip(shape, before, after)]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        nest.like(views[0])
        return take(nest, views[0], tables)

    b.moved([n.input(0)], compute, n.dtype(0), n.out_shape(), n.outputs[0])


def _pad_constant(n: NodeView, b: Definitions, before: Sequence[int]) -> None:
    shape, out = n.shape(0), n.out_shape()
    fill = n.attr("value", 0.0) if n.version < 11 else 0
    filler: Value | None = None
    if n.has(2):
        known = n.known(2)
        if known is not None:
            fill = known.reshape(-1)[0].item()
        else:
            filler = n.input(2)
    if n.dtype(0) in INTEGERS:
        fill = int(fill)
    sources = [n.input(0), *([filler] if filler is not None else [])]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        view = views[0]
        inside: Expr | None = None
        for axis, (d, wide, p) in enumerate(zip(shape, out, before)):
            if p <= 0 and wide - p <= d:  # nothing is added here; the axis may be cut
                continue
            here = between(Size(p), Index(axis), Size(p + d))
            inside = here if inside is None else op("and", inside, here, dtype=DType.bool)
        offset = -sum(p * s for p, s in zip(before, view.strides))
        value = nest.load(view, view.strides, offset=offset, guard=inside, other=fill)
        if filler is None or inside is None:
            return value
        return where(inside, value, nest.load(views[1].reshaped(()) or views[1], (0,) * len(out)))

    b.moved(sources, compute, n.dtype(0), out, n.outputs[0])


def _mirrored(size: int, before: int, after: int, mode: str) -> Array:
    """Source positions along one axis; amounts below zero cut off."""
    core = np.arange(max(0, -before), size - max(0, -after))
    width = (max(0, before), max(0, after))
    if not len(core):
        raise Declined(f"Pad: nothing to repeat in mode {mode!r}")
    if mode not in ("reflect", "edge", "wrap"):
        raise Declined(f"Pad: mode {mode!r}")
    return np.pad(core, width, mode=mode)  # type: ignore[call-overload,no-any-return]


@lowers("Tile", values=(1,), since=6)
def tile(n: NodeView, b: Definitions) -> None:
    shape, out = n.shape(0), n.out_shape()
    tables = [
        None if d == w else np.zeros(w, np.int64) if d == 1 else np.arange(w) % max(1, d) for d, w in zip(shape, out)
    ]
    b.moved([n.input(0)], lambda nest, views: take(nest, views[0], tables), n.dtype(0), out, n.outputs[0])


@lowers("CenterCropPad", values=(1,))
def center_crop_pad(n: NodeView, b: Definitions) -> None:
    shape, out = n.shape(0), n.out_shape()
    shifts = [(w - d) // 2 if w >= d else -((d - w) // 2) for d, w in zip(shape, out)]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        inside: Expr | None = None
        for axis, (d, w, p) in enumerate(zip(shape, out, shifts)):
            if w > d:
                here = between(Size(p), Index(axis), Size(p + d))
                inside = here if inside is None else op("and", inside, here, dtype=DType.bool)
        offset = -sum(p * s for p, s in zip(shifts, views[0].strides))
        return nest.load(views[0], views[0].strides, offset=offset, guard=inside)

    b.moved([n.input(0)], compute, n.dtype(0), out, n.outputs[0])


@lowers("Trilu", values=(1,))
def trilu(n: NodeView, b: Definitions) -> None:
    k = n.ints(1)[0] if n.has(1) else 0
    upper, rank = n.attr("upper", 1), n.rank(0)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        x = nest.load(views[0])
        shifted = sub(Index(rank - 1), Index(rank - 2))
        kept = compare("ge" if upper else "le", shifted, Size(max(-(1 << 40), min(1 << 40, k))))
        return where(kept, x, const(0, x))

    b.moved([n.input(0)], compute, n.dtype(0), n.out_shape(), n.outputs[0])


# -- creation -------------------------------------------------------------------------------------------------------


@lowers("ConstantOfShape", values=(0,))
def constant_of_shape(n: NodeView, b: Definitions) -> None:
    value = n.attr("value")
    fill = np.asarray(value if value is not None else np.zeros(1, np.float32)).reshape(())
    out = n.out_shape()
    b.alias(b.constant(fill, n.out_dtype()), lambda view: view.expanded(out), out, n.outputs[0])


@lowers("Range", values=(0, 1, 2), dtypes=NUMERIC)
def range_(n: NodeView, b: Definitions) -> None:
    start, dtype = n.need(0).reshape(-1)[0], n.out_dtype()
    moving = varies(start)  # a number of the launch then, not a constant

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        by, *rest = (nest.load(v.reshaped(()) or v, (0,)) for v in views)
        first = cast(Size(start), dtype) if moving else rest[0]
        return add(first, mul(cast(Index(0), dtype), by))

    sources = [n.input(2), *([] if moving else [n.input(0)])]
    b.moved(sources, compute, dtype, n.out_shape(), n.outputs[0])


@lowers("EyeLike")
def eye_like(n: NodeView, b: Definitions) -> None:
    k, dtype = int(n.attr("k", 0)), n.out_dtype()

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        on = compare("eq", sub(Index(1), Index(0)), Size(k))
        return where(on, const(1, dtype), const(0, dtype))

    b.moved([], compute, dtype, n.out_shape(), n.outputs[0])


@lowers("Shape", "Size")
def shape_of(n: NodeView, b: Definitions) -> None:
    shape = np.array(n.shape(0), np.int64)
    found = shape[slice(n.attr("start", 0), n.attr("end"))] if n.op == "Shape" else shape.prod()
    b.identity(b.constant(np.asarray(found, np.int64)), out=n.outputs[0])


@lowers("Constant", check=lambda node: None if "value" in node.attrs else "no tensor")
def constant(n: NodeView, b: Definitions) -> None:
    b.identity(b.constant(np.asarray(n.attr("value"))), out=n.outputs[0])


# -- gather ---------------------------------------------------------------------------------------------------------


def in_range(n: NodeView, b: Definitions, index: Value, size: int, known: Array | None) -> None:
    """Positions outside [-size, size) end the run with an error; memory is safe either way (positions are clamped).

    An axis of size 0 has no position to clamp to, so such nodes are declined.
    """
    if size == 0 and 0 not in b.shape(index):
        raise Declined(f"{n.op}: an index into an axis of size 0")
    if known is not None:
        if known.size and (known.min() < -size or known.max() >= size):
            raise Declined(f"{n.op}: an index is out of range")
        return
    shape = b.shape(index)
    if 0 in shape:
        return

    def outside(x: list[Expr]) -> RowBody:
        position = cast(x[0], INT64)
        bad = op("not", between(Size(-size), position, Size(size)), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([index], range(len(shape)), outside, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: an index is out of range for an axis of size {size}")


def position(x: Expr, size: int) -> Expr:
    """An index as a safe position: counted from the end where negative, clamped into the axis."""
    x = cast(x, INT64)
    wrapped = where(compare("lt", x, const(0, INT64)), add(x, Size(size)), x)
    return op("max", op("min", wrapped, Size(size - 1)), const(0, INT64))


@lowers("Gather")
def gather(n: NodeView, b: Definitions) -> None:
    data, index = n.input(0), n.input(1)
    shape, picks = n.shape(0), n.shape(1)
    axis = n.attr("axis", 0) % max(1, len(shape))
    size = shape[axis]
    known = n.known(1)
    if known is not None and known.size == 1:  # one position: a view
        where_ = int(known.reshape(-1)[0])
        if not -size <= where_ < size:
            raise Declined("Gather: an index is out of range")
        out = n.out_shape()

        def pick(view: View) -> View | None:
            strides = (*view.strides[:axis], *(1 for _ in picks), *view.strides[axis + 1 :])
            return View(view.storage, view.dtype, out, strides, view.offset + where_ % size * view.strides[axis])

        b.alias(data, pick, out, n.outputs[0])
        return
    in_range(n, b, index, size, known)
    rank = len(n.out_shape())

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, positions = views
        steps = (*(0 for _ in range(axis)), *positions.strides, *(0 for _ in range(rank - axis - len(picks))))
        at = mul(position(nest.load(positions, steps), size), Size(source.strides[axis]))
        strides = (*source.strides[:axis], *(0 for _ in picks), *source.strides[axis + 1 :])
        return nest.load(source, strides, at=at)

    b.moved([data, index], compute, n.dtype(0), n.out_shape(), n.outputs[0])


@lowers("GatherElements")
def gather_elements(n: NodeView, b: Definitions) -> None:
    shape = n.shape(0)
    axis = n.attr("axis", 0) % max(1, len(shape))
    in_range(n, b, n.input(1), shape[axis], n.known(1))

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, positions = views
        at = mul(position(nest.load(positions), shape[axis]), Size(source.strides[axis]))
        strides = tuple(0 if k == axis else s for k, s in enumerate(source.strides))
        return nest.load(source, strides, at=at)

    b.moved([n.input(0), n.input(1)], compute, n.dtype(0), n.out_shape(), n.outputs[0])


@lowers("GatherND")
def gather_nd(n: NodeView, b: Definitions) -> None:
    shape, picks = n.shape(0), n.shape(1)
    batch, depth = int(n.attr("batch_dims", 0)), n.shape(1)[-1]
    lead, out = len(picks) - 1, n.out_shape()
    known = n.known(1)
    for k in range(depth):
        column = b.alias(n.input(1), _column(k), picks[:-1])
        in_range(n, b, column, shape[batch + k], known=None if known is None else known[..., k])

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, positions = views
        steps = (*positions.strides[:-1], *(0 for _ in range(len(out) - lead)))
        at = []
        for k in range(depth):
            index = nest.load(positions, steps, offset=k * positions.strides[-1])
            at.append(mul(position(index, shape[batch + k]), Size(source.strides[batch + k])))
        strides = (*source.strides[:batch], *(0 for _ in range(lead - batch)), *source.strides[batch + depth :])
        return nest.load(source, strides, at=total(at))

    b.moved([n.input(0), n.input(1)], compute, n.dtype(0), out, n.outputs[0])


def _column(k: int) -> Any:
    def view(whole: View) -> View:
        offset = whole.offset + k * whole.strides[-1]
        return View(whole.storage, whole.dtype, whole.shape[:-1], whole.strides[:-1], offset)

    return view


@lowers("OneHot", values=(1,))
def one_hot(n: NodeView, b: Definitions) -> None:
    depth = int(np.ravel(n.need(1))[0])
    rank = len(n.out_shape())
    axis = n.attr("axis", -1) % rank
    dtype = n.out_dtype()

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        index, values = views
        steps = (*index.strides[:axis], 0, *index.strides[axis:])
        hot = cast(nest.load(index, steps), INT64)
        if n.version >= 11:  # before, indices below zero were outside
            hot = where(compare("lt", hot, const(0, INT64)), add(hot, Size(depth)), hot)
        off = nest.load(values, (0,) * rank)
        on = nest.load(values, (0,) * rank, offset=values.strides[0])
        return where(compare("eq", Index(axis), hot), on, off)

    b.moved([n.input(0), n.input(2)], compute, dtype, n.out_shape(), n.outputs[0])


@lowers("ReverseSequence")
def reverse_sequence(n: NodeView, b: Definitions) -> None:
    time, batch = int(n.attr("time_axis", 0)), int(n.attr("batch_axis", 1))
    if {time, batch} != {0, 1} or n.rank(0) < 2 or n.shape(1) != (n.shape(0)[batch],):
        raise Declined(f"ReverseSequence: {n.shape(0)} along axis {time} by {n.shape(1)} lengths along axis {batch}")
    steps = n.shape(0)[time]

    def outside(x: list[Expr]) -> RowBody:
        bad = op("not", between(Size(0), cast(x[0], INT64), Size(steps + 1)), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    if n.shape(1)[0]:
        (flag,) = b.rows([n.input(1)], [0], outside, [(DType.bool, False)], keepdims=False)
        b.check(flag, f"ReverseSequence: lengths must be in [0, {steps}]")

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        source, lengths = views
        length = cast(nest.load(lengths, _only(batch, len(nest.domain), lengths.strides[0])), INT64)
        length = op("min", op("max", length, const(0, INT64)), Size(steps))  # memory is safe either way
        step = Index(time)
        inside = compare("lt", step, length)
        back = sub(sub(length, const(1, INT64)), step)
        at = mul(where(inside, back, step), Size(source.strides[time]))
        strides = tuple(0 if k == time else s for k, s in enumerate(source.strides))
        return nest.load(source, strides, at=at)

    b.moved([n.input(0), n.input(1)], compute, n.dtype(0), n.out_shape(), n.outputs[0])
