"""Elements and slices written to computed places: Scatter, ScatterElements, ScatterND, TensorScatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import HALVES, cast, compare, const, mul, op, sub, where
from ranvier.codegen.definitions.lower.movement import between, in_range, position, total
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import scatter as kernels
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Expr, Index, Reduce, Result, Size
from ranvier.codegen.storage import View, dense_strides
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.realise import Realiser

INT64 = DType.int64
Kernel = Callable[[View, View, View, kernels.Combine, Isa], list[Launch]]
# what the arithmetic of bools comes to
_OF_BOOLS: dict[str, kernels.Combine] = {"add": "max", "mul": "min", "max": "max", "min": "min"}


def _known_reduction(node: Node) -> str | None:
    name = node.attrs.get("reduction") or "none"
    return None if name in ("none", *_OF_BOOLS) else f"reduction {name!r}"


def _placed(
    n: NodeView, b: Definitions, places: Value, kernel: Kernel, shape: Sequence[int], out: Value | None = None
) -> None:
    """The result: the data, with updates (seen as ``shape``) put where ``places`` says."""
    dtype = n.dtype(0)
    combine: kernels.Combine = n.attr("reduction", "none")
    if dtype is DType.bool and combine != "none":
        combine = _OF_BOOLS[combine]
    data, updates = n.input(0), n.input(2)
    # narrow floats are combined as wide ones and rounded once, at the end
    carried = DType.float32 if dtype in HALVES and combine != "none" else dtype
    if carried is not dtype:
        data, updates = (b.pointwise([v], lambda e: cast(e[0], carried), carried) for v in (data, updates))
    updates = b.reshape(updates, shape)

    def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
        r.copy(views[0], outs[0])
        return kernel(outs[0], views[1], views[2], combine, r.isa)

    results = [n.outputs[0] if carried is dtype else None]
    (made,) = b.opaque([data, places, updates], realise, [(carried, n.out_shape())], results)
    if carried is not dtype:
        b.pointwise([made], lambda e: cast(e[0], dtype), dtype, out=n.outputs[0])


@lowers("Scatter", "ScatterElements", check=_known_reduction)
def scatter_elements(n: NodeView, b: Definitions) -> None:
    shape, picks = n.shape(0), n.shape(1)
    axis = int(n.attr("axis", 0)) % max(1, len(shape))
    if len(shape) != len(picks) or picks != n.shape(2):
        raise Declined(f"{n.op}: indices {list(picks)} and updates {list(n.shape(2))} do not fit {list(shape)}")
    if any(p > d for k, (p, d) in enumerate(zip(picks, shape)) if k != axis):
        raise Declined(f"{n.op}: indices {list(picks)} reach beyond {list(shape)}")
    if not shape:
        raise Declined(f"{n.op}: of a scalar")
    in_range(n, b, n.input(1), shape[axis], n.known(1))
    steps = dense_strides(shape)

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        parts = [
            mul(position(nest.load(views[0]), shape[axis]) if k == axis else Index(k), Size(step))
            for k, step in enumerate(steps)
        ]
        found = total(parts)
        assert found is not None
        return found

    places = b.moved([n.input(1)], compute, INT64, picks)
    folded = (math.prod(picks[:axis]), picks[axis], math.prod(picks[axis + 1 :]))
    _placed(n, b, b.reshape(places, folded), kernels.scatter_elements, folded)


@lowers("ScatterND", check=_known_reduction)
def scatter_nd(n: NodeView, b: Definitions) -> None:
    shape, picks = n.shape(0), n.shape(1)
    depth = picks[-1] if picks else 0
    if not 1 <= depth <= len(shape) or n.shape(2) != (*picks[:-1], *shape[depth:]):
        raise Declined(f"ScatterND: indices {list(picks)} and updates {list(n.shape(2))} do not fit {list(shape)}")
    known, steps = n.known(1), dense_strides(shape)
    for k in range(depth):
        column = b.alias(n.input(1), _column(k), picks[:-1])
        in_range(n, b, column, shape[k], None if known is None else known[..., k])

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        view = views[0]
        parts = [
            mul(position(nest.load(view, view.strides[:-1], offset=k * view.strides[-1]), shape[k]), Size(steps[k]))
            for k in range(depth)
        ]
        found = total(parts)
        assert found is not None
        return found

    count, length = math.prod(picks[:-1]), math.prod(shape[depth:])
    places = b.reshape(b.moved([n.input(1)], compute, INT64, picks[:-1]), (count,))
    if length > 1:
        _placed(n, b, places, kernels.scatter_rows, (count, length))
    else:
        _placed(n, b, b.reshape(places, (1, count, 1)), kernels.scatter_elements, (1, count, 1))


def _column(k: int) -> Callable[[View], View]:
    def view(whole: View) -> View:
        offset = whole.offset + k * whole.strides[-1]
        return View(whole.storage, whole.dtype, whole.shape[:-1], whole.strides[:-1], offset)

    return view


@lowers("TensorScatter")
def tensor_scatter(n: NodeView, b: Definitions) -> None:
    """Every place of the cache asks which entry of the update, if any, falls on it."""
    shape, given = n.shape(0), n.shape(1)
    rank = len(shape)
    axis = int(n.attr("axis", -2)) % max(1, rank)
    capacity, length = shape[axis], given[axis]
    circular = n.attr("mode", "linear") == "circular"
    if length > capacity or axis == 0:
        raise Declined(f"TensorScatter: {length} entries along axis {axis} of {list(shape)}")
    if n.has(2) and not circular and length and shape[0]:

        def outside(e: list[Expr]) -> RowBody:
            fits = between(const(0, INT64), cast(e[0], INT64), Size(capacity - length + 1))
            bad = op("not", fits, dtype=DType.bool)
            return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

        (flag,) = b.rows([n.input(2)], [0], outside, [(DType.bool, False)], keepdims=False)
        b.check(flag, f"TensorScatter: {length} entries do not fit into {capacity} places from a write index on")

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        entry: Expr = Index(axis)
        if n.has(2):
            steps = (views[2].strides[0], *(0 for _ in shape[1:]))
            entry = sub(entry, cast(nest.load(views[2], steps), INT64))
        if circular:
            entry = op("mod", entry, Size(max(1, capacity)))
        fresh = between(const(0, INT64), entry, Size(length))
        update = views[1]
        strides = tuple(0 if k == axis else s for k, s in enumerate(update.strides))
        safe = where(compare("lt", entry, const(0, INT64)), const(0, INT64), entry)
        at = mul(op("min", safe, Size(max(0, length - 1))), Size(update.strides[axis]))
        loaded = nest.load(update, strides, at=at, guard=fresh) if length else None
        past = nest.load(views[0])
        return past if loaded is None else where(fresh, loaded, past)

    sources = [n.input(k) for k in range(3) if n.has(k)]
    b.moved(sources, compute, n.dtype(0), shape, n.outputs[0])
