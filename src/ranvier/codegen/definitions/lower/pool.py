"""Pooling: reductions over windows that slide, and over whole images."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import add, cast, const, div, mul, op, sub
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.reduction import wide_type
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES, FLOATS
from ranvier.codegen.loops.fold import identity
from ranvier.codegen.loops.ir import Expr, Fold, Index, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.ops.nn.window import extents, per_axis, resolve_pads

MICROSOFT = "com.microsoft"


class Windows:
    """The geometry of a pool over the spatial axes of its operand: 2 …, or with the channels ``last`` 1 …

    Axes of the nest: the result's, then the window's.
    """

    def __init__(self, n: NodeView, *, last: bool = False) -> None:
        shape = n.shape(0)
        if len(shape) < 3:
            raise Declined(f"{n.op}: no spatial axes in {list(shape)}")
        rank = self.rank = len(shape) - 2
        first = self.first = 1 if last else 2
        self.spatial = shape[first : first + rank]
        self.kernel = per_axis(n.attr("kernel_shape"), rank, "kernel_shape", n.op)
        self.strides = per_axis(n.attr("strides"), rank, "strides", n.op)
        self.dilations = per_axis(n.attr("dilations"), rank, "dilations", n.op)
        auto = n.attr("auto_pad", "NOTSET")
        self.pads = resolve_pads(
            auto.decode() if isinstance(auto, bytes) else auto,
            n.attr("pads"),
            self.spatial,
            self.kernel,
            self.strides,
            self.dilations,
            op=n.op,
        )
        self.out = n.out_shape()
        self.sizes = self.out[first : first + rank]
        self.domain = (*self.out, *self.kernel)
        self.row = tuple(range(2 + rank, 2 + 2 * rank))

    def place(self, axis: int, at: int, tap: int) -> Expr:
        """The position in the operand along spatial axis ``axis``; outside of it in the pads."""
        step = mul(Index(at + axis), Size(self.strides[axis]))
        reach = mul(Index(tap + axis), Size(self.dilations[axis]))
        return sub(add(step, reach), Size(self.pads[axis]))

    def guard(self, *, with_pads: bool = False, alone: bool = False) -> Expr | None:
        """Is this position inside the operand (or its pads)? None where it always is. ``alone``: in a nest of the
        spatial axes and the window's only."""
        at, tap = (0, self.rank) if alone else (self.first, 2 + self.rank)
        found: Expr | None = None
        spans = extents(self.kernel, self.dilations)
        for axis in range(self.rank):
            size = self.spatial[axis]
            low, high = (self.pads[axis], self.pads[axis + self.rank]) if with_pads else (0, 0)
            last = (self.sizes[axis] - 1) * self.strides[axis] - self.pads[axis] + spans[axis]
            if self.pads[axis] <= low and last <= size + high:
                continue
            here = between(Size(-low), self.place(axis, at, tap), Size(size + high))
            found = here if found is None else op("and", found, here, dtype=DType.bool)
        return found

    def load(self, nest: NestBuilder, view: View, other: float | int, *, padded: bool = False) -> Expr:
        """The element of the operand at this position; ``padded``: the pads are part of it."""
        spatial = view.strides[self.first : self.first + self.rank]
        steps = [s * t for s, t in zip(spatial, self.strides)]
        taps = [s * d for s, d in zip(spatial, self.dilations)]
        offset = 0 if padded else -sum(p * s for p, s in zip(self.pads, spatial))
        strides = (*view.strides[: self.first], *steps, *view.strides[self.first + self.rank :], *taps)
        return nest.load(view, strides, offset=offset, guard=None if padded else self.guard(), other=other)


@lowers("MaxPool")
def max_pool(n: NodeView, b: Definitions) -> None:
    windows = Windows(n)
    if n.wants(1):
        _max_pool_with_positions(n, b, windows)
    else:
        _largest(n, b, windows)


@lowers("NhwcMaxPool", domain=MICROSOFT, dtypes=BYTES)
def nhwc_max_pool(n: NodeView, b: Definitions) -> None:
    _largest(n, b, Windows(n, last=True))


def _largest(n: NodeView, b: Definitions, windows: Windows) -> None:
    dtype = n.dtype(0)
    b.rows(
        [],
        windows.row,
        lambda e: RowBody([Reduce("max", e[0], dtype)], finals={0: Result(0, dtype)}),
        [(dtype, False)],
        domain=windows.domain,
        keepdims=False,
        results=[n.outputs[0]],
        sources=[n.input(0)],
        gather=lambda nest, views: [windows.load(nest, views[0], identity("max", dtype))],
    )


def _max_pool_with_positions(n: NodeView, b: Definitions, windows: Windows) -> None:
    """Also where each window's first maximum stands, counted through the whole operand."""
    dtype, rank, spatial = n.dtype(0), windows.rank, windows.spatial

    def build(e: list[Expr]) -> RowBody:
        left: Expr = Result(1, DType.int64)
        places: list[Expr] = []
        for axis in reversed(range(rank)):
            size = Size(windows.kernel[axis])
            above = op("floordiv", left, size)
            tap = sub(left, mul(above, size))
            left = above
            start = sub(mul(Index(2 + axis), Size(windows.strides[axis])), Size(windows.pads[axis]))
            place = add(start, mul(tap, Size(windows.dilations[axis])))
            # a window of nothing but the lowest value may have found it in the pads
            places.insert(0, op("max", op("min", place, Size(spatial[axis] - 1)), const(0, DType.int64)))
        order = range(rank)[::-1] if n.attr("storage_order", 0) else range(rank)
        found: Expr = add(mul(Index(0), Size(n.shape(0)[1])), Index(1))
        for axis in order:
            found = add(mul(found, Size(spatial[axis])), places[axis])
        reduces = [Reduce("max", e[0], dtype), Reduce("argmax", e[0], DType.int64)]
        return RowBody(reduces, finals={0: Result(0, dtype), 1: found})

    b.rows(
        [],
        windows.row,
        build,
        [(dtype, False), (DType.int64, False)],
        domain=windows.domain,
        keepdims=False,
        results=[n.outputs[0], n.outputs[1]],
        sources=[n.input(0)],
        gather=lambda nest, views: [windows.load(nest, views[0], identity("max", dtype))],
    )


@lowers("AveragePool", "LpPool", dtypes=FLOATS)
def sum_pool(n: NodeView, b: Definitions) -> None:
    windows, dtype, wide = Windows(n), n.dtype(0), wide_type(n.dtype(0))
    average, p = n.op == "AveragePool", float(n.attr("p", 2))
    counted = windows.guard(with_pads=bool(n.attr("count_include_pad", 0))) if average else None

    def build(e: list[Expr]) -> RowBody:
        x = cast(e[0], wide)
        if not average:
            x = op("abs", x)
            x = mul(x, x) if p == 2 else x if p == 1 else op("pow", x, const(p, x))
        stages = [Reduce("sum", x, wide)]
        total = Result(0, wide)
        if not average:
            root = op("sqrt", total) if p == 2 else total if p == 1 else op("pow", total, const(1 / p, total))
            return RowBody(stages, finals={0: cast(root, dtype)})
        size: Expr = cast(Size(math.prod(windows.kernel)), wide)
        if counted is not None:
            stages.append(Reduce("sum", cast(counted, wide), wide))
            size = Result(1, wide)
        return RowBody(stages, finals={0: cast(div(total, size), dtype)})

    b.rows(
        [],
        windows.row,
        build,
        [(dtype, False)],
        domain=windows.domain,
        keepdims=False,
        results=[n.outputs[0]],
        sources=[n.input(0)],
        gather=lambda nest, views: [windows.load(nest, views[0], 0.0)],
    )


@lowers("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", dtypes=FLOATS)
def global_pool(n: NodeView, b: Definitions) -> None:
    shape, dtype, wide = n.shape(0), n.dtype(0), wide_type(n.dtype(0))
    count, p = math.prod(shape[2:]), float(n.attr("p", 2))
    fold: Fold = "max" if n.op == "GlobalMaxPool" else "sum"

    def build(e: list[Expr]) -> RowBody:
        x, result = cast(e[0], wide), Result(0, wide)
        made: Expr = result
        if n.op == "GlobalLpPool":
            x = op("pow", op("abs", x), const(p, x)) if p != 2 else mul(x, x)
            made = op("sqrt", result) if p == 2 else op("pow", result, const(1 / p, result))
        elif n.op == "GlobalAveragePool":
            made = div(result, cast(Size(count), wide))
        return RowBody([Reduce(fold, x, wide)], finals={0: cast(made, dtype)})

    axes = tuple(range(2, len(shape)))
    b.rows([n.input(0)], axes, build, [(dtype, False)], domain=shape, results=[n.outputs[0]])
