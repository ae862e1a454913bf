"""Resize and Upsample: tables of positions and weights per axis, made by the reference's own rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Contraction, Declined, Joined, Pointwise, RowBody, Rows
from ranvier.codegen.definitions.exprs import HALVES, add, cast, clamp, compare, const, mul, op, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import take, total
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import INTEGERS
from ranvier.codegen.loops.ir import Expr, Reduce, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.ir import Value
from ranvier.ops.nn.resample import AxisSampling, resize_steps, scaled_steps

Array = np.ndarray[Any, Any]
_UNROLLED = 4  # taps written out; more of them are a loop
_LARGE = 2 << 20  # bytes of a result that leaves the cache before it is read
_WIDE = 32  # channels
_STEPS_BACK = 16
_ATTRIBUTES = (
    "antialias",
    "axes",
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "keep_aspect_ratio_policy",
    "mode",
    "nearest_mode",
)


@lowers("Resize", values=(1, 2, 3), since=10)
def resize(n: NodeView, b: Definitions) -> None:
    try:
        if n.version < 11:
            steps = scaled_steps(n.shape(0), [float(s) for s in n.need(1).reshape(-1)], n.attr("mode", "nearest"), n.op)
        else:
            given = [n.need(k) if n.has(k) else None for k in (1, 2, 3)]
            attributes = {name: n.attr(name) for name in _ATTRIBUTES if n.attr(name) is not None}
            _, steps = resize_steps(n.shape(0), *given, **attributes)
    except RanvierError as error:
        raise Declined(str(error)) from None
    _resample(n, b, steps, float(n.attr("extrapolation_value", 0.0)))


@lowers("Upsample", values=(1,))
def upsample(n: NodeView, b: Definitions) -> None:
    if n.version >= 9:
        scales = [float(s) for s in n.need(1).reshape(-1)]
    elif n.version >= 7:
        scales = [float(s) for s in n.attr("scales")]
    else:
        scales = [1.0, 1.0, float(n.attr("height_scale")), float(n.attr("width_scale"))]
    try:
        steps = scaled_steps(n.shape(0), scales, n.attr("mode", "nearest"), n.op)
    except RanvierError as error:
        raise Declined(str(error)) from None
    if min(scales, default=1) < 1:
        raise Declined("Upsample: scales must be at least 1")
    _resample(n, b, steps, 0.0)


def _resample(n: NodeView, b: Definitions, steps: list[AxisSampling], fill: float) -> None:
    dtype, shape, out = n.dtype(0), n.shape(0), n.out_shape()
    if 0 in out:
        b.moved([], lambda nest, views: const(0, dtype), dtype, out, n.outputs[0])
        return
    if 0 in shape:
        raise Declined(f"{n.op}: nothing to sample")
    active = [s for s in steps if not s.same]
    beyond = {s.axis: s.outside for s in steps if s.outside is not None and s.outside.any()}
    if not active and not beyond:
        b.identity(n.input(0), out=n.outputs[0])
    elif not any(s.weights is not None for s in active):
        _nearest(n, b, active, beyond, fill)
    else:
        _interpolated(n, b, active, beyond, fill)


def _outside(nest: NestBuilder, beyond: dict[int, Array]) -> Expr | None:
    """Does this point of the result lie beyond the crop along any axis?"""
    found: Expr | None = None
    for axis, mask in beyond.items():
        here = nest.load(View.constant(mask, DType.bool), along(axis, len(nest.domain)))
        found = here if found is None else op("or", found, here, dtype=DType.bool)
    return found


def _nearest(n: NodeView, b: Definitions, steps: list[AxisSampling], beyond: dict[int, Array], fill: float) -> None:
    dtype = n.dtype(0)
    tables: list[Array | None] = [None] * n.rank(0)
    for step in steps:
        tables[step.axis] = step.index

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        nest.like(views[0])
        value = take(nest, views[0], tables)
        outside = _outside(nest, beyond)
        if outside is None:
            return value
        return where(outside, const(np.asarray(fill).astype(dtype.numpy).item(), dtype), value)

    b.moved([n.input(0)], compute, dtype, n.out_shape(), n.outputs[0])


def _interpolated(
    n: NodeView, b: Definitions, steps: list[AxisSampling], beyond: dict[int, Array], fill: float
) -> None:
    dtype = n.dtype(0)
    carried = DType.float32 if dtype in (DType.float32, *HALVES) else DType.float64

    def finish(nest: NestBuilder, value: Expr) -> Expr:
        outside = _outside(nest, beyond)
        if outside is not None:
            value = where(outside, const(fill, value), value)
        return settled(value, dtype)

    value, shape = n.input(0), list(n.shape(0))
    if _at_once(b, value, steps, math.prod(n.out_shape()) * carried.numpy.itemsize):

        def corners(nest: NestBuilder, views: list[View]) -> Expr:
            nest.like(views[0])
            return finish(nest, _corners(nest, views[0], steps, [None] * len(shape), carried))

        b.moved([value], corners, dtype, n.out_shape(), n.outputs[0])
        return
    steps = _ordered(steps, shape)
    for k, step in enumerate(steps):
        shape[step.axis] = len(step.index)
        last = k == len(steps) - 1
        made = (dtype if last else carried, tuple(shape), n.outputs[0] if last else None)
        value = _pass(b, value, step, carried, finish if last else None, made)


def _at_once(b: Definitions, source: Value, steps: list[AxisSampling], nbytes: int) -> bool:
    """All corners in one pass, or one axis after the other? A pass per axis takes fewer instructions, one pass less
    memory traffic: it pays for large results whose channels, which stay, fill the lanes."""
    shape = b.shape(source)
    if len(steps) > 2 or any(s.index.shape[1:] != (2,) or s.axis < 2 for s in steps):
        return False
    return nbytes > _LARGE and len(shape) > 2 and shape[1] >= _WIDE and is_channels_last(b, source)


def is_channels_last(b: Definitions, value: Value) -> bool:
    """Will the tensor have its channels innermost: does it stem from a product that writes them so?"""
    makers = {made: each for each in b.defs for made in each.outputs}
    for _ in range(_STEPS_BACK):
        each = makers.get(value)
        if isinstance(each, Contraction):
            return each.order is not None and each.order[-1] == 1
        if not isinstance(each, Pointwise | Rows | Joined) or not each.operands:
            return False
        value = max(each.operands, key=lambda v: math.prod(b.shape(v)))
    return False


def _corners(
    nest: NestBuilder, view: View, steps: list[AxisSampling], tables: list[Array | None], carried: DType
) -> Expr:
    """The weighted sum of the elements around a position: along the first axis of sums along the others."""
    if not steps:
        return cast(take(nest, view, tables), carried)
    step, *others = steps
    weights = step.weights
    assert weights is not None
    terms: list[Expr] = []
    for tap in range(weights.shape[1]):
        tables = [step.index[:, tap] if k == step.axis else t for k, t in enumerate(tables)]
        factor = nest.load(View.constant(weights[:, tap].astype(carried.numpy), carried), along(step.axis, len(tables)))
        terms.append(mul(_corners(nest, view, others, tables, carried), factor))
    value = total(terms)
    assert value is not None
    return value


def _ordered(steps: list[AxisSampling], shape: Sequence[int]) -> list[AxisSampling]:
    """Axes that shrink come first, the outermost before the others, because whole rows are cheaper to add than
    neighbours in a row; axes that grow come last, and among them the outermost at the very end."""
    shrinking = [s for s in steps if len(s.index) < shape[s.axis]]
    growing = [s for s in steps if len(s.index) >= shape[s.axis]]
    return sorted(shrinking, key=lambda s: s.axis) + sorted(growing, key=lambda s: -s.axis)


Finish = Callable[[NestBuilder, Expr], Expr]


def _pass(
    b: Definitions,
    source: Value,
    step: AxisSampling,
    carried: DType,
    finish: Finish | None,
    made: tuple[DType, tuple[int, ...], Value | None],
) -> Value:
    """Weighted sums along one axis."""
    dtype, shape, out = made
    axis, weights = step.axis, step.weights
    assert weights is not None
    weights = weights.astype(carried.numpy)
    taps = weights.shape[1]
    if taps > _UNROLLED:
        return _long_pass(b, source, step, weights, carried, finish, made)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        nest.like(views[0])
        terms: list[Expr] = []
        for tap in range(taps):
            tables: list[Array | None] = [None] * len(shape)
            tables[axis] = step.index[:, tap]
            factor = nest.load(View.constant(weights[:, tap], carried), along(axis, len(shape)))
            terms.append(mul(cast(take(nest, views[0], tables), carried), factor))
        value = total(terms)
        assert value is not None
        return value if finish is None else finish(nest, value)

    return b.moved([source], compute, dtype, shape, out)


def _long_pass(
    b: Definitions,
    source: Value,
    step: AxisSampling,
    weights: Array,
    carried: DType,
    finish: Finish | None,
    made: tuple[DType, tuple[int, ...], Value | None],
) -> Value:
    """Many taps: a sum over an axis of their own."""
    dtype, shape, out = made
    axis, rank, taps = step.axis, len(shape), weights.shape[1]

    def gather(nest: NestBuilder, views: list[View]) -> list[Expr]:
        view = views[0]
        where_ = View.constant(step.index.astype(np.int64) * view.strides[axis], DType.int64)
        steps = tuple(taps if k == axis else 1 if k == rank else 0 for k in range(rank + 1))
        strides = tuple(0 if k == axis else s for k, s in enumerate(view.strides))
        found = nest.load(view, (*strides, 0), at=nest.load(where_, steps))
        return [found, nest.load(View.constant(weights, carried), steps)]

    (summed,) = b.rows(
        [],
        [rank],
        lambda e: RowBody([Reduce("sum", mul(cast(e[0], carried), e[1]), carried)], finals={0: Result(0, carried)}),
        [(carried, False)],
        domain=(*shape, taps),
        keepdims=False,
        results=[out if finish is None else None],
        sources=[source],
        gather=gather,
    )
    if finish is None:
        return summed
    return b.moved([summed], lambda nest, views: finish(nest, nest.load(views[0])), dtype, shape, out)


def along(axis: int, rank: int) -> tuple[int, ...]:
    """Strides of a table that belongs to one axis."""
    return tuple(int(k == axis) for k in range(rank))


def settled(value: Expr, dtype: DType) -> Expr:
    """Back to the operand's type: integers are cut off, within their range; rounding noise must not cost a unit."""
    if dtype is DType.bool:
        return compare("ne", value, const(0.0, value))
    if dtype not in INTEGERS:
        return cast(value, dtype)
    nudge = where(compare("lt", value, const(0.0, value)), const(-1e-9, value), const(1e-9, value))
    limits = np.iinfo(dtype.numpy)
    cut = op("trunc", add(value, nudge))
    return cast(clamp(cut, const(float(limits.min), cut), const(float(limits.max), cut)), dtype)
