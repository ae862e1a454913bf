"""Rotary embeddings: features turned by the angles of their tokens."""

from __future__ import annotations

import math

from ranvier.codegen.definitions.defs import Declined, Use
from ranvier.codegen.definitions.exprs import HALVES, add, cast, mul, op
from ranvier.codegen.definitions.lower.contraction import MICROSOFT
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import in_range, position
from ranvier.codegen.definitions.lower.tables import no_other, rows_at
from ranvier.codegen.definitions.lower.views import sliced
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value

INT64 = DType.int64
_TYPES = frozenset({DType.float32, DType.float16, DType.bfloat16, DType.int32, DType.int64})


def turned(b: Definitions, x: Value, cos: Value, sin: Value, pairs: bool) -> Value:
    """Features of [batch, time, heads, size] turned by the angles of their tokens, [batch or 1, time, half]."""
    batch, time, heads, width = b.shape(x)
    lead, _, half = b.shape(cos)
    dtype, step = b.dtype(x), 2 if pairs else 1
    work = DType.float32 if dtype in HALVES else dtype

    def piece(start: int, size: int, stride: int = 1) -> Value:
        shape = (batch, time, heads, size)
        return b.alias(x, lambda view: sliced(view, (0, 0, 0, start), (1, 1, 1, stride), shape), shape)

    real, imaginary = piece(0, half, step), piece(1 if pairs else half, half, step)

    def combine(sign: str, first: Value, second: Value) -> Value:
        def compute(e: list[Expr]) -> Expr:
            a, c, d, s = (cast(t, work) for t in e)
            return cast(op(sign, mul(a, c), mul(d, s)), dtype)

        angles = (lead, time, 1, half)
        return b.pointwise([first, Use(cos, angles), second, Use(sin, angles)], compute, dtype)

    parts = [combine("sub", real, imaginary), combine("add", imaginary, real)]
    if pairs:
        wide = (batch, time, heads, half, 1)
        both = b.joined([b.reshape(each, wide) for each in parts], 4, (*wide[:4], 2))
        parts = [b.reshape(both, (batch, time, heads, 2 * half))]
    if 2 * half < width:
        parts.append(piece(2 * half, width - 2 * half))
    return parts[0] if len(parts) == 1 else b.joined(parts, 3, (batch, time, heads, width))


@lowers("RotaryEmbedding", domain=MICROSOFT, dtypes=_TYPES)
def rotary_by_position(n: NodeView, b: Definitions) -> None:
    shape, cache = n.shape(0), n.shape(2)
    packed = len(shape) == 3
    half, width = cache[1], int(n.attr("rotary_embedding_dim", 0))
    if packed:
        heads = int(n.attr("num_heads", 0))
        size = shape[2] // heads if heads else width or 2 * half
        if not size or shape[2] % size:
            raise Declined(f"{n.op}: {shape[2]} features in heads of {size}")
        x = b.reshape(n.input(0), (shape[0], shape[1], shape[2] // size, size))
    else:
        x = b.transpose(n.input(0), (0, 2, 1, 3))
    batch, time, _, size = b.shape(x)
    if 2 * half != (width or size) or 2 * half > size or n.shape(3) != cache:
        raise Declined(f"{n.op}: tables of shape {cache} for heads of {size}")
    given = n.shape(1)
    if len(given) < 2 and math.prod(given) == 1:
        first = b.reshape(n.input(1), (1,))
        no_other(b, first, 0, max(0, cache[0] - time) + 1, f"{n.op}: a position is outside [0, {cache[0]})")
        positions = counted(b, first, time)
    elif given == (batch, time):
        positions = n.input(1)
        no_other(b, positions, 0, cache[0], f"{n.op}: a position is outside [0, {cache[0]})")
    else:
        raise Declined(f"{n.op}: positions of shape {given}")
    cos, sin = (rows_at(n, b, n.input(k), positions) for k in (2, 3))
    made = turned(b, x, cos, sin, bool(n.attr("interleaved", 0)))
    if packed:
        b.reshape(made, shape, out=n.outputs[0])
    else:
        b.transpose(made, (0, 2, 1, 3), out=n.outputs[0])


def counted(b: Definitions, first: Value, time: int) -> Value:
    """[k] as [k, time]: every entry and the numbers after it."""

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        return add(cast(nest.load(views[0], (views[0].strides[0], 0)), INT64), Index(1))

    return b.moved([first], compute, INT64, (b.shape(first)[0], time))


@lowers("RotaryEmbedding", dtypes=FLOATS | {INT64})
def rotary(n: NodeView, b: Definitions) -> None:
    x, packed = n.input(0), n.rank(0) == 3
    if packed:
        batch, time, hidden = n.shape(0)
        heads = int(n.attr("num_heads", 0))
        x = b.reshape(x, (batch, time, heads, hidden // heads))  # time before heads
    else:
        x = b.transpose(x, (0, 2, 1, 3))
    batch, time, _, width = b.shape(x)
    half = (int(n.attr("rotary_embedding_dim", 0)) or width) // 2
    cos, sin = (_angles(n, b, k, batch, time, half) for k in (1, 2))
    made = turned(b, x, cos, sin, bool(n.attr("interleaved", 0)))
    if packed:
        b.reshape(made, n.out_shape(), out=n.outputs[0])
    else:
        b.transpose(made, (0, 2, 1, 3), out=n.outputs[0])


def _angles(n: NodeView, b: Definitions, operand: int, batch: int, time: int, half: int) -> Value:
    """Rows of a cache for every token, [batch, time, half]."""
    cache = n.input(operand)
    if not n.has(3):
        return cache
    rows = b.shape(cache)[0]
    in_range(n, b, n.input(3), rows, n.known(3))

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        table, places = views
        at = mul(position(nest.load(places, (*places.strides, 0)), rows), Size(table.strides[0]))
        return nest.load(table, (0, 0, table.strides[1]), at=at)

    return b.moved([cache, n.input(3)], compute, b.dtype(cache), (batch, time, half))
