"""Matrix products of quantized operands: MatMulInteger, QLinearMatMul and their relatives.

The kernels multiply codes of A by signed codes of B. What unsigned codes of B and the zero points add to such a sum
depends on row sums of A and column sums of B; taking it out again is elementwise work on the result, which fuses
with whatever follows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, const, div, mul, sub
from ranvier.codegen.definitions.lower.quantization import DERIVED, quantized_dynamically, saturated
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES, FLOATS, Check
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.integer import (
    PackedCodes,
    column_sums,
    integer_matmul,
    moved_right,
    pack_codes,
    pack_words,
    tuned_dot,
    word_matmul,
)
from ranvier.codegen.loops.ir import Epilogue, Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import Same
from ranvier.graph.types import TensorType
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.products.matmul import content
from ranvier.providers.cpu.realise import Realiser

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
INT, FLOAT = DType.int32, DType.float32
QUANTIZED = BYTES | FLOATS | {INT}
_LONGEST = 1 << 15  # products of two codes, less zero points, that int32 holds the sum of


def known(b: Definitions, value: Value) -> Array | None:
    return value.const.numpy() if value.const is not None else b.known.get(value)


class ZeroPoint:
    """A zero point in terms of the codes that are multiplied: ``moved`` by 128 where those are."""

    def __init__(self, b: Definitions, value: Value | None, moved: int, shape: Sequence[int]) -> None:
        self.value, self.moved, self.shape = value, moved, tuple(shape)
        content = None if value is None else known(b, value)
        self.array: Array | None = None  # where it is known
        if value is None:
            self.array = np.full((), moved, np.int32)
        elif content is not None:
            self.array = content.astype(np.int32).reshape(self.shape) + np.int32(moved)

    @property
    def is_zero(self) -> bool:
        return self.array is not None and not self.array.any()

    def use(self, b: Definitions) -> Use:
        """An operand that broadcasts to the product; :meth:`number` makes of it what is meant."""
        if self.array is not None:
            return Use(b.constant(self.array))
        assert self.value is not None
        return Use(self.value, self.shape)

    def number(self, e: Expr) -> Expr:
        code = cast(e, INT)
        return code if self.array is not None or not self.moved else add(code, const(self.moved, INT))


def sums(b: Definitions, x: Value, axis: int, moved: int) -> Value:
    """int32 sums of codes over an axis, which stays with size 1."""
    array, shape = known(b, x), b.shape(x)
    axis %= len(shape)
    if array is not None:

        def make() -> Array:
            total = np.expand_dims(column_sums(np.moveaxis(array, axis, -2)), axis)
            return np.asarray(total + np.int32(moved * shape[axis]), np.int32)

        return b.constant(DERIVED.get([array], ("sums", axis, moved), make))
    count = shape[axis]

    def build(e: list[Expr]) -> RowBody:
        total: Expr = Result(0, INT)
        if moved:
            total = add(total, mul(cast(Size(count), INT), const(moved, INT)))
        return RowBody([Reduce("sum", cast(e[0], INT), INT)], finals={0: total})

    return b.rows([x], [axis], build, [(INT, False)])[0]


def corrected(
    b: Definitions,
    raw: Value,
    depth: int,
    left: ZeroPoint,
    right: ZeroPoint,
    row_sums: Value | None,
    column_sums: Use | None,
    out: Value | None,
) -> Value:
    """What the sum of products would be without zero points and moved codes.

    ``row_sums`` are those of A (None where ``right`` is zero), ``column_sums`` those of B (None where ``left`` is).
    """
    uses: list[Use] = [Use(raw)]
    places: dict[str, int] = {}
    columns_known = None if column_sums is None or column_sums.shape is not None else known(b, column_sums.value)
    if columns_known is not None and left.array is not None and right.array is not None:
        # all that depends on columns alone is one constant
        constant = -left.array * (columns_known - right.array * np.int32(depth))
        given = [("constant", Use(b.constant(np.asarray(constant, np.int32))))]
    else:
        given = [] if left.is_zero else [("left", left.use(b))]
        given += [("columns", column_sums)] if column_sums is not None else []
    given += [] if right.is_zero else [("right", right.use(b))]
    given += [("rows", Use(row_sums))] if row_sums is not None else []
    for name, use in given:
        places[name] = len(uses)
        uses.append(use)

    def compute(e: list[Expr]) -> Expr:
        total = add(e[0], e[places["constant"]]) if "constant" in places else e[0]
        shift = left.number(e[places["left"]]) if "left" in places else None
        zero = right.number(e[places["right"]]) if "right" in places else None
        if shift is not None:
            columns = e[places["columns"]]
            if zero is not None:
                columns = sub(columns, mul(zero, cast(Size(depth), INT)))
            total = sub(total, mul(shift, columns))
        if zero is not None:
            total = sub(total, mul(zero, e[places["rows"]]))
        return total

    return b.pointwise(uses, compute, INT, shape=b.shape(raw), out=out)


def packed_codes(r: Realiser, w: View, m: int) -> PackedCodes:
    hint = _hint(m)
    dot = tuned_dot(r.isa, hint, w.shape[-2], (m, *w.shape, w.dtype.name))
    key = ("codes", Same(w.storage.array), w.offset, w.shape, w.strides, hint, dot)
    return r.packs.get(key, lambda: pack_codes(np.ascontiguousarray(content(w)), r.isa, rows_hint=hint, dot=dot))


def _hint(rows: int) -> int:
    """Weights are packed for one of three numbers of rows."""
    return 1 if rows < 4 else 8 if rows <= 16 else 256


def _packed_words(r: Realiser, w: View, m: int) -> PackedCodes:
    key = ("words", Same(w.storage.array), w.offset, w.shape, w.strides, _hint(m))
    return r.packs.get(key, lambda: pack_words(np.ascontiguousarray(content(w)), r.isa, rows_hint=_hint(m)))


def raw_product(b: Definitions, x: Value, w: Value, shape: Sequence[int], out: Value | None = None) -> Value:
    """Sums of codes as the kernels multiply them; both operands of rank 2 or more. Codes int16 meet constant ones."""
    result = tuple(shape)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        left, right = views
        if left.dtype is DType.int16:
            packed = _packed_words(r, right, math.prod(left.shape[:-1]))
            return word_matmul(left, packed, target, r.isa, epilogue=epilogue, threads=r.threads)
        factor: View | PackedCodes = right
        if right.storage.kind == "const":
            rows = left.shape[-2] * (math.prod(left.shape[:-2]) if right.rank == 2 else 1)
            factor = packed_codes(r, right, rows)
        return integer_matmul(left, factor, target, r.isa, epilogue=epilogue, threads=r.threads)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        batch = folded_stride(result[:-2], strides[:-2])
        return None if batch is None else (batch, strides[-2], strides[-1])

    return b.contraction([x, w], realise, fold, INT, result, out)


def by_row(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """How a parameter of A broadcasts: a vector has one entry per row."""
    if math.prod(shape) == 1:
        return ()
    return (shape[0], 1) if len(shape) == 1 and rank > 1 else tuple(shape)


def by_column(shape: Sequence[int]) -> tuple[int, ...]:
    return () if math.prod(shape) == 1 else tuple(shape)


def multiply(
    b: Definitions,
    x: Value,
    w: Value,
    x_zero: Value | None,
    w_zero: Value | None,
    out: Value | None = None,
    out_shape: Sequence[int] | None = None,
) -> Value:
    """The int32 product of two quantized tensors by NumPy's rule for matmul."""
    rank = len(b.shape(x))
    left = ZeroPoint(b, x_zero, 0, () if x_zero is None else by_row(b.shape(x_zero), rank))
    right = ZeroPoint(b, w_zero, moved_right(b.dtype(w)), () if w_zero is None else by_column(b.shape(w_zero)))
    p, q = b.shape(x), b.shape(w)
    if left.shape[-1:] not in ((), (1,)) or right.shape[-2:-1] not in ((), (1,)) or (len(q) == 1 and right.shape):
        raise Declined(f"zero points {list(left.shape)} and {list(right.shape)}, other ones along the sum")
    vectors = len(p) == 1 or len(q) == 1
    if len(p) == 1:
        x = b.reshape(x, (1, *p))
    if len(q) == 1:
        w = _reshaped(b, w, (*q, 1))
    p, q = b.shape(x), b.shape(w)
    if p[-1] != q[-2]:  # kernels pad both with zeros, and would not notice
        raise Declined(f"matrices of {list(p)} and {list(q)} do not multiply")
    shape = (*np.broadcast_shapes(p[:-2], q[:-2]), p[-2], q[-1])
    plain = left.is_zero and right.is_zero
    raw = raw_product(b, x, w, shape, out if plain and not vectors else None)
    total = raw
    if not plain:
        total = corrected(
            b,
            raw,
            p[-1],
            left,
            right,
            None if right.is_zero else sums(b, x, -1, 0),
            None if left.is_zero else Use(sums(b, w, -2, right.moved)),
            None if vectors else out,
        )
    if vectors:
        assert out_shape is not None
        total = b.reshape(total, out_shape, out=out)
    return total


def _reshaped(b: Definitions, value: Value, shape: Sequence[int]) -> Value:
    """A reshape that leaves constants constant."""
    array = known(b, value)
    if array is None:
        return b.reshape(value, shape)
    return b.constant(DERIVED.get([array], ("reshaped", tuple(shape)), lambda: array.reshape(tuple(shape)).copy()))


# -- operators --------------------------------------------------------------------------------------------------------


def operand_type(node: Node, k: int) -> DType | None:
    value = node.input(k)
    return value.type.dtype if value is not None and isinstance(value.type, TensorType) else None


def _bytes_at(*positions: int) -> Check:
    def check(node: Node) -> str | None:
        for k in positions:
            found = operand_type(node, k)
            if found is not None and found not in BYTES:
                return f"operand {k} of {found}"
        return None

    return check


@lowers("MatMulInteger", dtypes=BYTES | {INT}, check=_bytes_at(0, 1))
def matmul_integer(n: NodeView, b: Definitions) -> None:
    zeros = [n.input(k) if n.has(k) else None for k in (2, 3)]
    multiply(b, n.input(0), n.input(1), zeros[0], zeros[1], n.outputs[0], n.out_shape())


def product_of_scales(b: Definitions, *factors: tuple[Value, tuple[int, ...]], divisor: Value | None = None) -> Value:
    """Scales multiplied (and divided by a single one) in float32: a tensor of its own, a constant where all are."""
    values = [v for v, _ in factors] + ([divisor] if divisor is not None else [])
    arrays = [known(b, v) for v in values]
    count = len(factors)
    if all(a is not None for a in arrays):
        numbers = [np.asarray(a).astype(np.float32) for a in arrays]
        total: Array = np.ones((), np.float32)
        for number, (_, shape) in zip(numbers, factors):
            total = np.asarray(total * number.reshape(shape))
        return b.constant(total if divisor is None else np.asarray(total / numbers[-1].reshape(())))
    uses = [Use(v, s) for v, s in factors]
    if divisor is not None:
        uses.append(Use(divisor, ()))

    def compute(e: list[Expr]) -> Expr:
        total = cast(e[0], FLOAT)
        for each in e[1:count]:
            total = mul(total, cast(each, FLOAT))
        return total if divisor is None else div(total, cast(e[-1], FLOAT))

    return b.pointwise(uses, compute, FLOAT)


@lowers("QLinearMatMul", dtypes=QUANTIZED, check=_bytes_at(0, 3, 7))
def qlinear_matmul(n: NodeView, b: Definitions) -> None:
    rank = n.rank(0)
    totals = _totals(n, b, n.input(0), n.input(3), n.input(2), n.input(5))
    rows, columns = (n.input(1), by_row(n.shape(1), rank)), (n.input(4), by_column(n.shape(4)))
    out_scale = by_row(n.shape(6), rank)
    scale = product_of_scales(b, rows, columns, divisor=None if out_scale else n.input(6))
    target = n.out_dtype()
    uses = [Use(n.input(7), by_row(n.shape(7), rank)), Use(scale), *map(Use, totals)]
    if out_scale:
        uses.append(Use(n.input(6), out_scale))

    def compute(e: list[Expr]) -> Expr:
        factor = div(e[1], cast(e[-1], FLOAT)) if out_scale else e[1]
        return saturated(mul(_joined(e[2 : 2 + len(totals)]), factor), e[0], target)

    b.pointwise(uses, compute, target, shape=n.out_shape(), out=n.outputs[0])


def _totals(
    n: NodeView, b: Definitions, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None
) -> list[Value]:  # fmt: skip
    """Sums that make up the product of two quantized tensors together, mostly one: int32 holds each of them."""
    return [multiply(b, left, right, x_zero, w_zero, None, n.out_shape()) for left, right in _pieces(b, x, w)]


def _joined(totals: list[Expr]) -> Expr:
    return functools.reduce(add, [cast(each, FLOAT) for each in totals])


def _pieces(b: Definitions, x: Value, w: Value) -> list[tuple[Value, Value]]:
    """Operands of products whose sums int32 holds; mostly those that are given."""
    depth = b.shape(x)[-1]
    if depth <= _LONGEST:
        return [(x, w)]
    axis = max(0, len(b.shape(w)) - 2)
    ends = [(start, min(start + _LONGEST, depth)) for start in range(0, depth, _LONGEST)]
    return [(_part(b, x, len(b.shape(x)) - 1, *each), _part(b, w, axis, *each)) for each in ends]


def _part(b: Definitions, value: Value, axis: int, start: int, stop: int) -> Value:
    array, shape = known(b, value), list(b.shape(value))
    shape[axis] = stop - start
    if array is not None:
        return b.constant(np.take(array, range(start, stop), axis))

    def seen(view: View) -> View:
        return View(view.storage, view.dtype, tuple(shape), view.strides, view.offset + start * view.strides[axis])

    return b.alias(value, seen, shape)


def _scaled(
    n: NodeView, b: Definitions, totals: list[Value], scale: Value, bias: Value | None, dtype: DType = FLOAT
) -> None:  # fmt: skip
    """What ``totals`` add up to, times ``scale``, plus ``bias`` as the result of a node."""
    uses = [Use(scale), *map(Use, totals), *([Use(bias)] if bias is not None else [])]

    def compute(e: list[Expr]) -> Expr:
        value = mul(_joined(e[1 : 1 + len(totals)]), e[0])
        return cast(value if bias is None else add(value, cast(e[-1], FLOAT)), dtype)

    b.pointwise(uses, compute, dtype, shape=n.out_shape(), out=n.outputs[0])


def _dynamic(node: Node) -> str | None:
    return _bytes_at(1)(node) or (None if operand_type(node, 0) is FLOAT else "operand 0 is not float32")


@lowers("DynamicQuantizeMatMul", domain=MICROSOFT, dtypes=QUANTIZED, check=_dynamic)
def dynamic_quantize_matmul(n: NodeView, b: Definitions) -> None:
    codes, step, shift = quantized_dynamically(b, n.input(0))
    totals = _totals(n, b, codes, n.input(1), shift, n.input(3) if n.has(3) else None)
    scale = product_of_scales(b, (step, ()), (n.input(2), by_column(n.shape(2))))
    _scaled(n, b, totals, scale, n.input(4) if n.has(4) else None)


@lowers("MatMulIntegerToFloat", domain=MICROSOFT, dtypes=QUANTIZED, check=_bytes_at(0, 1))
def matmul_integer_to_float(n: NodeView, b: Definitions) -> None:
    zeros = [n.input(k) if n.has(k) else None for k in (4, 5)]
    totals = _totals(n, b, n.input(0), n.input(1), zeros[0], zeros[1])
    rows, columns = (n.input(2), by_row(n.shape(2), n.rank(0))), (n.input(3), by_column(n.shape(3)))
    _scaled(n, b, totals, product_of_scales(b, rows, columns), n.input(6) if n.has(6) else None, n.out_dtype())


@lowers("QGemm", domain=MICROSOFT, dtypes=QUANTIZED, check=_bytes_at(0, 3, 8))
def qgemm(n: NodeView, b: Definitions) -> None:
    if any(n.has(k) and math.prod(n.shape(k)) != 1 for k in (1, 2, 7, 8)):
        raise Declined(f"{n.op}: scales and zero points of A and of the result are single numbers")
    x = b.transpose(n.input(0), (1, 0)) if n.attr("transA", 0) else n.input(0)
    w = n.input(3)
    if n.attr("transB", 0):
        array = known(b, w)
        w = b.transpose(w, (1, 0)) if array is None else b.constant(turned(array))
    totals = _totals(n, b, x, w, n.input(2), n.input(5))
    alpha = np.asarray(n.attr("alpha", 1.0), np.float32)
    rows, columns = (n.input(1), ()), (n.input(4), by_column(n.shape(4)))
    scale = product_of_scales(b, (b.constant(alpha), ()), rows, columns)
    target, quantizes = n.out_dtype(), n.has(7) and n.has(8)
    uses = [Use(scale), *map(Use, totals)]
    if n.has(6):
        uses.append(Use(n.input(6)))
    if quantizes:
        uses += [Use(n.input(7), ()), Use(n.input(8), ())]

    def compute(e: list[Expr]) -> Expr:
        sums = e[1 : 1 + len(totals)]
        if n.has(6):
            sums = [add(sums[0], e[1 + len(totals)]), *sums[1:]]
        value = mul(_joined(sums), e[0])
        return saturated(div(value, cast(e[-2], FLOAT)), e[-1], target) if quantizes else value

    b.pointwise(uses, compute, target, shape=n.out_shape(), out=n.outputs[0])


def turned(array: Array) -> Array:
    """The transposed weights, the same array each time: what is packed is known by it."""
    return DERIVED.get([array], "transposed", lambda: np.ascontiguousarray(array.T))
