"""Images sampled at computed positions: GridSample, AffineGrid, RoiAlign, DeformConv.

Positions become tensors of their own before anything is sampled: all channels of a point share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast, clamp, compare, const, div, mul, op, sub, where
from ranvier.codegen.definitions.lower.contraction import multiply
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between, total
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.lower.resample import along, is_channels_last, settled
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.nn.window import output_sizes, per_axis, resolve_pads

INT64, FLOAT64 = DType.int64, DType.float64
_MANY_CHANNELS = 8  # from here on turning an image round is cheaper than gathering from it
_NOWHERE = -2.0  # stands for a position that is outside of its axis
Tap = tuple[Expr, Expr]  # along one axis: a safe element, and its weight


def both(a: Expr, b: Expr) -> Expr:
    return op("and", a, b, dtype=DType.bool)


def channels_last(b: Definitions, image: Value) -> Value:
    """The image with its channels innermost: one position then serves a vector of them."""
    shape, dtype = b.shape(image), b.dtype(image)
    if shape[1] < _MANY_CHANNELS or is_channels_last(b, image):
        return image

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        nest.prefer((0, *range(2, len(shape)), 1))
        return nest.load(views[0])

    return b.moved([image], compute, dtype, shape)


# -- GridSample -----------------------------------------------------------------------------------------------------


def _known_sampling(node: Node) -> str | None:
    mode, padding = node.attrs.get("mode") or "linear", node.attrs.get("padding_mode") or "zeros"
    if mode not in ("linear", "bilinear", "nearest", "cubic", "bicubic"):
        return f"mode {mode!r}"
    return None if padding in ("zeros", "border", "reflection") else f"padding mode {padding!r}"


@lowers("GridSample", check=_known_sampling)
def grid_sample(n: NodeView, b: Definitions) -> None:
    shape, points, dtype = n.shape(0), n.shape(1), n.dtype(0)
    spatial, rank = shape[2:], len(shape) - 2
    given = n.attr("mode", "linear")
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(given, given)
    padding, align = n.attr("padding_mode", "zeros"), bool(n.attr("align_corners", 0))
    if rank < 1 or len(points) != len(shape) or points[0] != shape[0] or points[-1] != rank:
        raise Declined(f"GridSample: X {list(shape)} and grid {list(points)} do not fit")
    if 0 in spatial or (method == "cubic" and rank > 2):
        raise Declined(f"GridSample: {method} of {list(shape)}")
    carried = wide_type(dtype) if dtype in FLOATS else FLOAT64
    # a nearest element jumps: its position must not depend on how it was rounded
    kind = DType.float32 if carried is DType.float32 and method != "nearest" else FLOAT64
    positions = [
        _grid_positions(b, n.input(1), rank - 1 - axis, size, align, method, padding, kind)
        for axis, size in enumerate(spatial)
    ]
    out = n.out_shape()

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        image = views[0]
        nest.like(image)
        taps = []
        for size, view in zip(spatial, views[1:]):
            at = nest.load(view, (view.strides[0], 0, *view.strides[1:]))
            taps.append(_axis_taps(at, size, align, method, padding, carried))
        strides = (*image.strides[:2], *(0 for _ in spatial))
        if method == "nearest":
            inside = total_weight([axis[0] for axis in taps])
            value = nest.load(image, strides, at=_offset([t[0][0] for t in taps], image.strides[2:]))
            return where(compare("gt", inside, const(0.0, inside)), value, const(0, dtype))

        def sample(elements: list[Expr]) -> Expr:
            return cast(nest.load(image, strides, at=_offset(elements, image.strides[2:])), carried)

        return settled(weighted(taps, sample, []), dtype)

    # channels stay innermost while sampling; whoever wants them elsewhere has them turned as a whole
    turned = n.outputs[0].is_graph_output and shape[1] >= _MANY_CHANNELS
    sources = [channels_last(b, n.input(0)), *positions]
    made = b.moved(sources, compute, dtype, out, None if turned else n.outputs[0])
    if turned:
        b.identity(made, out=n.outputs[0])


def total_weight(taps: Sequence[Tap]) -> Expr:
    found = taps[0][1]
    for _, weight in taps[1:]:
        found = mul(found, weight)
    return found


def _offset(elements: Sequence[Expr], strides: Sequence[int]) -> Expr:
    found = total([mul(element, Size(stride)) for element, stride in zip(elements, strides)])
    assert found is not None
    return found


def weighted(taps: Sequence[Sequence[Tap]], sample: Callable[[list[Expr]], Expr], chosen: list[Expr]) -> Expr:
    """The sum over all combinations of taps, one axis inside the other."""
    if not taps:
        return sample(chosen)
    first, *others = taps
    terms = [mul(weighted(others, sample, [*chosen, element]), weight) for element, weight in first]
    found = total(terms)
    assert found is not None
    return found


def _bounds(size: int, align: bool, kind: DType) -> tuple[Expr, Expr, Expr]:
    """The lowest and highest position, and how far they are apart."""
    last = cast(Size(size - 1), kind)
    if align:
        return const(0.0, kind), last, last
    half = const(0.5, kind)
    return const(-0.5, kind), add(last, half), cast(Size(size), kind)


def _grid_positions(
    b: Definitions, grid: Value, column: int, size: int, align: bool, method: str, padding: str, kind: DType
) -> Value:
    """Positions along one axis from coordinates between -1 and 1, as the padding mode sees them."""
    shape = b.shape(grid)[:-1]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        low, high, span = _bounds(size, align, kind)
        point = cast(nest.load(views[0], views[0].strides[:-1], offset=column * views[0].strides[-1]), kind)
        at = add(mul(mul(add(point, const(1.0, kind)), const(0.5, kind)), span), low)
        finite = compare("le", op("abs", at), const(float(np.finfo(kind.numpy).max), kind))
        at = where(finite, at, sub(low, const(2.0, kind)))  # a point that is nowhere lies outside
        if method == "nearest":
            at = op("round", at)
        if padding == "border" and method != "cubic":
            outside = op("or", compare("lt", at, low), compare("gt", at, high), dtype=DType.bool)
            return where(outside, clamp(at, const(0.0, kind), cast(Size(size - 1), kind)), at)
        return _reflected(at, low, high, span) if padding == "reflection" else at

    return b.moved([grid], compute, kind, shape)


def _reflected(at: Expr, low: Expr, high: Expr, span: Expr) -> Expr:
    """Positions outside thrown back and forth between the ends until they lie inside."""
    below = compare("lt", at, low)
    beyond = where(below, sub(low, at), sub(at, high))
    turns = op("floor", div(beyond, span))
    rest = sub(beyond, mul(turns, span))
    even = compare("eq", turns, mul(op("floor", mul(turns, const(0.5, at))), const(2.0, at)))
    thrown = where(compare("eq", cast(even, INT64), cast(below, INT64)), add(low, rest), sub(high, rest))
    inside = both(compare("ge", at, low), compare("le", at, high))
    flat = compare("le", span, const(0.0, at))
    return where(flat, low, where(inside, at, thrown))


def _axis_taps(at: Expr, size: int, align: bool, method: str, padding: str, carried: DType) -> list[Tap]:
    """The elements one axis contributes to a point."""
    kind = at.dtype
    floor = op("floor", at)
    if method == "nearest":
        neighbours = [(at, const(1.0, kind))]
    elif method == "linear":
        part = sub(at, floor)
        neighbours = [(floor, sub(const(1.0, kind), part)), (add(floor, const(1.0, kind)), part)]
    else:
        part = sub(at, floor)
        neighbours = [
            (add(floor, const(float(k), kind)), _cubic(op("abs", sub(const(float(k), kind), part)), k in (0, 1)))
            for k in range(-1, 3)
        ]
    taps: list[Tap] = []
    low, high, span = _bounds(size, align, kind)
    last = cast(Size(size - 1), kind)
    for element, weight in neighbours:
        if padding == "reflection":
            element = op("trunc", _reflected(element, low, high, span))
        if padding == "zeros":
            exists = both(compare("ge", element, const(0.0, kind)), compare("le", element, last))
            weight = where(exists, weight, const(0.0, kind))
        taps.append((cast(clamp(element, const(0.0, kind), last), INT64), cast(weight, carried)))
    return taps


def _cubic(d: Expr, near: bool, a: float = -0.75) -> Expr:
    """Keys' cubic convolution at distance ``d``: at most 1 (near) or between 1 and 2."""

    def c(value: float) -> Expr:
        return const(value, d)

    if near:
        return add(mul(mul(sub(mul(c(a + 2), d), c(a + 3)), d), d), c(1.0))
    return sub(mul(add(mul(sub(mul(c(a), d), c(5 * a)), d), c(8 * a)), d), c(4 * a))


# -- AffineGrid -----------------------------------------------------------------------------------------------------


@lowers("AffineGrid", values=(1,), dtypes=FLOATS | {INT64})
def affine_grid(n: NodeView, b: Definitions) -> None:
    size, dtype = n.ints(1), n.dtype(0)
    spatial = size[2:]
    rank = len(spatial)
    if rank not in (2, 3) or n.shape(0) != (size[0], rank, rank + 1):
        raise Declined(f"AffineGrid: theta {list(n.shape(0))} and size {list(size)} do not fit")
    align = bool(n.attr("align_corners", 0))
    lines = [np.linspace(-1, 1, d) if align and d > 1 else (2 * np.arange(d) + 1) / max(d, 1) - 1 for d in spatial]

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        theta = views[0]
        steps = (theta.strides[0], *(0 for _ in spatial), theta.strides[1])
        terms: list[Expr] = []
        for column in range(rank + 1):
            value = cast(nest.load(theta, steps, offset=column * theta.strides[2]), FLOAT64)
            if column < rank:  # the last axis comes first
                axis = rank - 1 - column
                value = mul(value, nest.load(View.constant(lines[axis], FLOAT64), along(1 + axis, rank + 2)))
            terms.append(value)
        found = total(terms)
        assert found is not None
        return cast(found, dtype)

    b.moved([n.input(0)], compute, dtype, n.out_shape(), n.outputs[0])


# -- RoiAlign -------------------------------------------------------------------------------------------------------


def _fixed_samples(node: Node) -> str | None:
    if node.attrs.get("sampling_ratio", 0) < 1:
        return "the number of samples depends on the regions"
    mode = node.attrs.get("mode") or "avg"
    rule = node.attrs.get("coordinate_transformation_mode") or "half_pixel"
    if mode not in ("avg", "max") or rule not in ("half_pixel", "output_half_pixel"):
        return f"mode {mode!r}, {rule!r}"
    return None


@lowers("RoiAlign", dtypes=FLOATS | {INT64}, check=_fixed_samples, since=10)
def roi_align(n: NodeView, b: Definitions) -> None:
    shape, regions, dtype = n.shape(0), n.shape(1), n.dtype(0)
    wide, out = wide_type(dtype), n.out_shape()
    if len(shape) != 4 or 0 in shape or regions[1:] != (4,) or n.shape(2) != regions[:1]:
        raise Declined(f"RoiAlign: X {list(shape)} and regions {list(regions)}")
    ratio, average = int(n.attr("sampling_ratio")), n.attr("mode", "avg") == "avg"
    half = n.version >= 16 and n.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    scale = float(n.attr("spatial_scale", 1.0))
    _check_regions(n, b)
    positions = [
        _roi_positions(b, n.input(1), 1 - k, out[2 + k], ratio, shape[2 + k], scale, half, wide) for k in (0, 1)
    ]

    def gather(nest: NestBuilder, views: list[View]) -> list[Expr]:
        image, batch, *places = views
        taps = []
        for k, place in enumerate(places):
            steps = [place.strides[0], 0, 0, 0, 0, 0]
            steps[2 + k], steps[4 + k] = place.strides[1], place.strides[2]
            taps.append(_roi_taps(nest.load(place, steps), shape[2 + k]))
        own = cast(nest.load(batch, (batch.strides[0], 0, 0, 0, 0, 0)), INT64)
        start = mul(clamp(own, const(0, INT64), Size(shape[0] - 1)), Size(image.strides[0]))

        def sample(elements: list[Expr]) -> Expr:
            at = add(_offset(elements, image.strides[2:]), start)
            return cast(nest.load(image, (0, image.strides[1], 0, 0, 0, 0), at=at), wide)

        if average:
            return [weighted(taps, sample, [])]
        best: Expr | None = None
        for row, down in taps[0]:
            for column, across in taps[1]:
                value = mul(sample([row, column]), mul(down, across))
                best = value if best is None else op("max", best, value)
        assert best is not None
        return [best]

    def build(e: list[Expr]) -> RowBody:
        found: Expr = Result(0, wide)
        if average:
            found = div(found, const(float(ratio * ratio), wide))
        return RowBody([Reduce("sum" if average else "max", e[0], wide)], finals={0: cast(found, dtype)})

    b.rows(
        [],
        [4, 5],
        build,
        [(dtype, False)],
        domain=(*out, ratio, ratio),
        keepdims=False,
        results=[n.outputs[0]],
        sources=[channels_last(b, n.input(0)), n.input(2), *positions],
        gather=gather,
    )


def _check_regions(n: NodeView, b: Definitions) -> None:
    if not n.shape(1)[0]:
        return

    def endless(e: list[Expr]) -> RowBody:
        value = cast(e[0], DType.float32)
        bad = op("or", op("isnan", value, dtype=DType.bool), op("isinf", value, dtype=DType.bool), dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    def missing(e: list[Expr]) -> RowBody:
        inside = between(const(0, INT64), cast(e[0], INT64), Size(n.shape(0)[0]))
        bad = op("not", inside, dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([n.input(1)], [0, 1], endless, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: a region is not finite")
    (flag,) = b.rows([n.input(2)], [0], missing, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: an image is out of range for a batch of {n.shape(0)[0]}")


def _roi_positions(
    b: Definitions, rois: Value, column: int, bins: int, ratio: int, size: int, scale: float, half: bool, wide: DType
) -> Value:
    """Where the samples of every region lie along one axis, [regions, bins, samples]; -2 for those outside."""

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        view = views[0]

        def edge(k: int) -> Expr:
            value = cast(nest.load(view, (view.strides[0], 0, 0), offset=k * view.strides[1]), wide)
            value = mul(value, const(float(np.float32(scale)) if wide is DType.float32 else scale, wide))
            return cast(sub(value, const(0.5, wide)) if half else value, FLOAT64)

        start = edge(column)
        extent = sub(edge(column + 2), start)
        if not half:
            extent = op("max", extent, const(1.0, FLOAT64))
        step = div(extent, cast(Size(bins), FLOAT64))
        sample = div(add(cast(Index(2), FLOAT64), const(0.5, FLOAT64)), const(float(ratio), FLOAT64))
        at = add(start, mul(add(cast(Index(1), FLOAT64), sample), step))
        inside = both(compare("ge", at, const(-1.0, at)), compare("le", at, cast(Size(size), FLOAT64)))
        held = clamp(at, const(0.0, at), cast(Size(size - 1), FLOAT64))
        return cast(where(inside, held, const(_NOWHERE, at)), wide)

    return b.moved([rois], compute, wide, (b.shape(rois)[0], bins, ratio))


def _roi_taps(at: Expr, size: int) -> list[Tap]:
    nothing, one = const(0.0, at), const(1.0, at)
    inside = compare("ge", at, nothing)
    held = clamp(at, nothing, cast(Size(size - 1), at.dtype))
    low = op("floor", held)
    part = sub(held, low)
    element = cast(low, INT64)
    beside = op("min", add(element, const(1, INT64)), Size(size - 1))
    return [(element, where(inside, sub(one, part), nothing)), (beside, where(inside, part, nothing))]


# -- DeformConv -----------------------------------------------------------------------------------------------------


@lowers("DeformConv", dtypes=FLOATS, since=19)
def deform_conv(n: NodeView, b: Definitions) -> None:
    """Every value the filters meet is sampled first; the rest is a matrix product."""
    shape, weights, dtype = n.shape(0), n.shape(1), n.dtype(0)
    kernel, rank, wide = weights[2:], len(weights) - 2, wide_type(n.dtype(0))
    steps = per_axis(n.attr("strides"), rank, "strides", n.op)
    spread = per_axis(n.attr("dilations"), rank, "dilations", n.op)
    edges = resolve_pads("NOTSET", n.attr("pads"), shape[2:], kernel, steps, spread, op=n.op)
    counts = output_sizes(shape[2:], kernel, steps, spread, edges, op=n.op)
    group, offset_group = int(n.attr("group", 1)), int(n.attr("offset_group", 1))
    batch, channels = shape[:2]
    taps_count, own = math.prod(kernel), channels // max(1, offset_group)
    offsets = (batch, offset_group * taps_count * rank, *counts)
    masks = (batch, offset_group * taps_count, *counts)
    fits = n.shape(2) == offsets and (not n.has(4) or n.shape(4) == masks)
    if not fits or channels != weights[1] * group or weights[0] % group or channels % offset_group or 0 in shape:
        raise Declined(f"DeformConv: X {list(shape)}, W {list(weights)} and offset {list(n.shape(2))} do not fit")
    grids = np.indices(kernel).reshape(rank, taps_count)
    # axes of what is sampled: image, offset group, channel in it, tap, output position …
    domain = (batch, offset_group, own, taps_count, *counts)
    image = b.reshape(n.input(0), (batch, offset_group, own, *shape[2:]))
    moves = b.reshape(n.input(2), (batch, offset_group, taps_count, rank, *counts))
    sources = [image, moves]
    if n.has(4):
        sources.append(b.reshape(n.input(4), (batch, offset_group, taps_count, *counts)))

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        view, shift = views[:2]
        taps: list[list[Tap]] = []
        for axis in range(rank):
            tap = nest.load(View.constant(grids[axis] * float(spread[axis]), FLOAT64), along(3, len(domain)))
            start = sub(mul(Index(4 + axis), Size(steps[axis])), Size(edges[axis]))
            s = shift.strides
            moved = nest.load(shift, (s[0], s[1], 0, s[2], *s[4:]), offset=axis * s[3])
            at = add(add(cast(start, wide), cast(tap, wide)), cast(moved, wide))
            taps.append(_axis_taps(at, shape[2 + axis], True, "linear", "zeros", wide))
        strides = (*view.strides[:3], *(0 for _ in range(1 + rank)))

        def sample(elements: list[Expr]) -> Expr:
            return cast(nest.load(view, strides, at=_offset(elements, view.strides[3:])), wide)

        value = weighted(taps, sample, [])
        if n.has(4):
            m = views[2].strides
            value = mul(value, cast(nest.load(views[2], (m[0], m[1], 0, *m[2:])), wide))
        return value

    sampled = b.moved(sources, compute, wide, domain)
    depth, positions = weights[1] * taps_count, math.prod(counts)
    columns = b.reshape(sampled, (batch, group, depth, positions))
    filters = b.reshape(n.input(1), (group, weights[0] // group, depth))
    if dtype in HALVES:
        filters = b.pointwise([filters], lambda e: cast(e[0], wide), wide)
    product = multiply(b, filters, columns, (batch, group, weights[0] // group, positions))
    made = b.reshape(product, n.out_shape())
    operands: list[Value | Use] = [made]
    if n.has(3):
        operands.append(Use(n.input(3), (weights[0], *(1 for _ in counts))))

    def finish(e: list[Expr]) -> Expr:
        value: Any = e[0]
        return cast(add(value, cast(e[1], wide)) if len(e) > 1 else value, dtype)

    b.pointwise(operands, finish, dtype, shape=n.out_shape(), out=n.outputs[0])
