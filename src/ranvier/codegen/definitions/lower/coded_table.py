"""Rows of a table that is stored as codes in blocks: GatherBlockQuantized. Only the rows asked for are decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import add, cast, compare, const, mul, op, sub, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.lower.movement import position
from ranvier.codegen.definitions.lower.narrow_cast import NARROW_INTEGERS, as_bytes, from_code
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import FLOATS
from ranvier.codegen.loops.ir import Expr, Index, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.ops.contrib.weight_only import WIDTHS

_NIBBLES = frozenset({DType.int4, DType.uint4})
_TAKEN = FLOATS | _NIBBLES | {DType.uint8, DType.int32, DType.int64}
_INT = DType.int32


@lowers("GatherBlockQuantized", domain="com.microsoft", dtypes=_TAKEN)
def gather_block_quantized(n: NodeView, b: Definitions) -> None:
    table = _Table(n)
    sources = [_bytes(b, n.input(0)), n.input(1), n.input(2)]
    if n.has(3):
        sources.append(_bytes(b, n.input(3)))

    def compute(nest: NestBuilder, views: list[View]) -> Expr:
        return table.number(nest, views)

    b.moved(sources, compute, n.out_dtype(), n.out_shape(), n.outputs[0])


def _bytes(b: Definitions, value: Value) -> Value:
    return as_bytes(b, value) if b.dtype(value) in NARROW_INTEGERS else value


class _Table:
    """Where codes, scales and zero points of an element of the result lie."""

    def __init__(self, n: NodeView) -> None:
        self.shape, self.picks, self.scales = n.shape(0), n.shape(1), n.shape(2)
        self.dtype, self.out = n.dtype(0), n.out_dtype()
        rank, bits = len(self.shape), int(n.attr("bits", 4))
        at, along = int(n.attr("gather_axis", 0)), int(n.attr("quantize_axis", 1))
        if self.dtype not in _NIBBLES | {DType.uint8} or not (-rank <= at < rank and -rank <= along < rank):
            raise Declined(f"codes of {self.dtype} along axis {along} of rank {rank}")
        self.at, self.along = at % rank, along % rank
        self.bits = bits if self.dtype is DType.uint8 else 0  # of codes that share a byte with others; 0: they do not
        if self.bits and (bits not in WIDTHS or self.along != rank - 1 or self.at == self.along):
            raise Declined(f"{bits} bits along axis {self.along}, gathered along axis {self.at}")
        width = self.shape[self.along] * 8 // (self.bits or 8)
        self.block = int(n.attr("block_size", 128)) or width
        blocks = -(-width // self.block)
        wanted = [(blocks,) if k == self.along else (1, size) for k, size in enumerate(self.shape)]
        if len(self.scales) != rank or any(size not in some for size, some in zip(self.scales, wanted)):
            raise Declined(f"scales of shape {list(self.scales)} for codes of {list(self.shape)}")
        stored = list(self.scales)
        stored[-1] = -(-stored[-1] * (self.bits or 8) // 8)
        if n.has(3) and (n.shape(3) != tuple(stored) or n.dtype(3) is not self.dtype):
            raise Declined(f"zero points of shape {list(n.shape(3))}")

    def number(self, nest: NestBuilder, views: Sequence[View]) -> Expr:
        codes, index, scales = views[:3]
        picked = nest.load(index, self._spread(index.strides, lambda k: 0))
        row = position(picked, self.shape[self.at])
        # the element's place along the axis of blocks, and its block
        place = row if self.along == self.at else Index(self._result_axis(self.along))
        block = op("floordiv", place, Size(self.block))
        code = self._code(nest, codes, row, place)
        factor = self._load(nest, scales, row, block)
        value = cast(code, DType.float32)
        if len(views) > 3:
            value = sub(value, cast(self._code(nest, views[3], row, block), DType.float32))
        elif self.bits:
            value = sub(value, const(float(1 << (self.bits - 1)), value))
        value = mul(value, cast(factor, DType.float32))
        size, wide = self.shape[self.at], cast(picked, DType.int64)
        below = compare("lt", add(wide, Size(size)), const(0, wide))
        above = compare("ge", wide, Size(size))
        value = where(below, const(0.0, value), where(above, const(0.0, value), value))
        return cast(value, self.out)

    def _code(self, nest: NestBuilder, view: View, row: Expr, place: Expr) -> Expr:
        """The code at a place along the axis of blocks: a byte of its own, or some bits of one."""
        if self.bits in (0, 8):
            return from_code(self._load(nest, view, row, place), self.dtype)
        if 8 % self.bits:
            at = mul(place, Size(self.bits))
            byte, shift = op("floordiv", at, Size(8)), cast(op("mod", at, Size(8)), _INT)
            after = op("min", add(byte, Size(1)), Size(view.shape[-1] - 1))  # what ends in the last byte needs no other
            low, high = (cast(self._load(nest, view, row, each), _INT) for each in (byte, after))
            found = op("bitor", low, mul(high, const(256, _INT)))
        else:
            in_byte = 8 // self.bits
            found = cast(self._load(nest, view, row, op("floordiv", place, Size(in_byte))), _INT)
            shift = mul(cast(op("mod", place, Size(in_byte)), _INT), const(self.bits, _INT))
        return op("bitand", op("shr", found, shift), const((1 << self.bits) - 1, _INT))

    def _load(self, nest: NestBuilder, view: View, row: Expr, place: Expr) -> Expr:
        """What stands in this row and place, and else where the result's element is; one element serves an axis."""
        own = [0 if size == 1 else stride for size, stride in zip(view.shape, view.strides)]
        offset = mul(place, Size(own[self.along]))
        if self.at != self.along:
            offset = add(offset, mul(row, Size(own[self.at])))
        strides = self._spread((0,) * len(self.picks), lambda k: 0 if k == self.along else own[k])
        return nest.load(view, strides, at=offset)

    def _spread(self, picks: Sequence[int], others: Callable[[int], int]) -> tuple[int, ...]:
        """Along the result's axes: these for the picks, ``others(axis of the table)`` before and behind them."""
        before = [others(k) for k in range(self.at)]
        return (*before, *picks, *(others(k) for k in range(self.at + 1, len(self.shape))))

    def _result_axis(self, axis: int) -> int:
        return axis if axis < self.at else axis + len(self.picks) - 1
