"""Convolutions of quantized operands: ConvInteger, QLinearConv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody, Use
from ranvier.codegen.definitions.exprs import add, cast, const, mul, op, sub
from ranvier.codegen.definitions.lower.movement import between
from ranvier.codegen.definitions.lower.quantization import DERIVED, saturated
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.products import folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import BYTES, Check
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv import ConvShape, joined, joined_weights, pixels_in_vectors
from ranvier.codegen.llvm.conv.plan import pixels_even
from ranvier.codegen.llvm.conv.shape import Pixels
from ranvier.codegen.llvm.integer import (
    PackedCodes,
    begins_lines,
    dot_of_filters,
    finishes_together,
    integer_conv,
    integer_depthwise,
    integer_matmul,
    is_unrolled,
    lengthwise,
    moved_right,
    pack_at_run,
    pack_depthwise,
    pack_filters,
    pack_squares,
    pixels_hint,
    reads_padded,
    squares_conv,
    suits_squares,
    takes_triples,
)
from ranvier.codegen.llvm.integer.dots import TILES
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Expr, Index, Map, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType, of
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import Same
from ranvier.graph.types import TensorType
from ranvier.ops.nn.window import per_axis, resolve_pads
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.lower.integer_product import (
    FLOAT,
    INT,
    QUANTIZED,
    ZeroPoint,
    known,
    operand_type,
    product_of_scales,
)
from ranvier.providers.cpu.products.convolution import channels_last
from ranvier.providers.cpu.products.matmul import content
from ranvier.providers.cpu.realise import Realiser

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
_THIN = 4


class Convolution:
    """One quantized convolution [N, C, …]: its sums of codes, and what zero points add to them."""

    def __init__(
        self,
        b: Definitions,
        x: Value,
        w: Value,
        x_zero: Value | None,
        w_zero: Value | None,
        shape: ConvShape,
        spatial: int,
    ) -> None:
        self.b, self.x, self.w, self.shape, self.spatial = b, x, w, shape, spatial
        self.x_zero, self.w_zero = x_zero, w_zero
        self.out_shape = (shape.n, shape.cout, *shape.out[3 - spatial :])
        self.weights = known(b, w)
        self.weights_zero = np.zeros((), np.int32) if w_zero is None else known(b, w_zero)
        self.depthwise = (
            shape.is_depthwise and shape.width == 1 and self.weights is not None and self.weights_zero is not None
        )
        self.pointwise = (
            shape.taps == 1 and shape.group == 1 and shape.size == shape.out and shape.strides == (1, 1, 1)
        ) and not any(shape.begin)

    def result(self, out: Value | None, bias: Value | None = None) -> Value:
        """The int32 convolution of what the codes stand for, in units of the scales, and a bias per filter."""
        b, filters = self.b, (self.shape.cout, *(1,) * self.spatial)
        left = ZeroPoint(b, self.x_zero, 0, ())
        if self.depthwise:
            right = ZeroPoint(b, None, 0, ())
        else:
            single = self.w_zero is None or b.types[self.w_zero].size == 1
            right = ZeroPoint(b, self.w_zero, moved_right(b.dtype(self.w)), () if single else filters)
        plain = left.is_zero and right.is_zero and bias is None
        raw = self.raw(out if plain else None)
        if plain:
            return raw
        uses, constant = [Use(raw)], np.zeros((), np.int32)
        shifts = not left.is_zero
        if shifts:
            sums = self.filter_sums(right.moved)
            array = known(b, sums)
            if array is not None and left.array is not None:
                constant, shifts = -left.array * array.reshape(filters), False
            else:
                uses += [left.use(b), Use(sums, filters)]
        if not right.is_zero:
            uses += [right.use(b), Use(self.window_sums())]
        numbers = None if bias is None else known(b, bias)
        if numbers is not None:
            constant = constant + numbers.reshape(filters)
        elif bias is not None:
            uses.append(Use(bias, filters))
        if constant.any():
            uses.append(Use(b.constant(np.asarray(constant, np.int32))))

        def compute(e: list[Expr]) -> Expr:
            total, rest = e[0], e[1:]
            if shifts:
                total = sub(total, mul(left.number(rest[0]), rest[1]))
                rest = rest[2:]
            if not right.is_zero:
                # window sums are of codes less their zero point, so nothing is taken out twice
                total = sub(total, mul(right.number(rest[0]), rest[1]))
                rest = rest[2:]
            for term in rest:
                total = add(total, term)
            return total

        return b.pointwise(uses, compute, INT, shape=self.out_shape, out=out)

    # -- sums -------------------------------------------------------------------------------------------------------

    def filter_sums(self, moved: int) -> Value:
        """One number per output channel: the sum of its filter as the kernels multiply it."""
        b, shape, w, zero = self.b, self.shape, self.weights, self.weights_zero
        count = shape.depth * shape.taps
        if w is not None:
            centre = np.reshape(zero, (-1,)).astype(np.int32) if self.depthwise and zero is not None else -moved

            def make() -> Array:
                total = w.reshape(shape.cout, -1).sum(axis=1, dtype=np.int32)
                return np.asarray(total - count * np.asarray(centre), np.int32)

            return b.constant(DERIVED.get([w, zero], ("filters", moved, self.depthwise), make))
        flat = b.reshape(self.w, (shape.cout, count))

        def build(e: list[Expr]) -> RowBody:
            total: Expr = Result(0, INT)
            if moved:
                total = add(total, mul(cast(Size(count), INT), cast(Size(moved), INT)))
            return RowBody([Reduce("sum", cast(e[0], INT), INT)], finals={0: total})

        return b.rows([flat], [1], build, [(INT, False)], keepdims=False)[0]

    def window_sums(self) -> Value:
        """Sums of what lies under the windows, less the zero point, of every group: they broadcast to the result."""
        b, shape = self.b, self.shape
        size, sizes = b.shape(self.x), (shape.n, shape.group)
        zero = [] if self.x_zero is None else [Use(self.x_zero, ())]

        def loads(nest: NestBuilder, views: list[View]) -> list[Expr]:
            (view,) = views
            channel = view.strides[1]
            return [nest.load(view, (view.strides[0], channel * shape.depth, *view.strides[2:], channel))]

        def build(e: list[Expr]) -> RowBody:
            number = cast(e[-1], INT)
            if len(e) > 1:
                number = sub(number, cast(e[0], INT))
            return RowBody([Reduce("sum", number, INT)], finals={0: Result(0, INT)})

        domain = (*sizes, *size[2:], shape.depth)
        how: dict[str, Any] = {"keepdims": False, "sources": [self.x], "gather": loads}
        (total,) = b.rows(zero, [len(domain) - 1], build, [(INT, False)], domain=domain, **how)
        if not self.pointwise:
            total = self._under_windows(total)
        if shape.group == 1:
            return total

        def spread(nest: NestBuilder, views: list[View]) -> Expr:
            (view,) = views
            group = mul(op("floordiv", Index(1), Size(shape.width)), Size(view.strides[1]))
            return nest.load(view, (view.strides[0], 0, *view.strides[2:]), at=group)

        return b.moved([total], spread, INT, self.out_shape)

    def _under_windows(self, sums: Value) -> Value:
        """Sums of a map with one channel per group over the taps of every window."""
        shape, spatial = self.shape, self.spatial
        skip = 3 - spatial
        kernel, strides, dilations = shape.kernel[skip:], shape.strides[skip:], shape.dilations[skip:]
        begin, size, out = shape.begin[skip:], shape.size[skip:], shape.out[skip:]

        def loads(nest: NestBuilder, views: list[View]) -> list[Expr]:
            (view,) = views
            inner = view.strides[2:]
            steps = (*view.strides[:2], *(s * t for s, t in zip(inner, strides)))
            guard: Expr | None = None
            for axis in range(spatial):
                place = add(
                    mul(Index(2 + axis), Size(strides[axis])),
                    sub(mul(Index(2 + spatial + axis), Size(dilations[axis])), Size(begin[axis])),
                )
                here = between(Size(0), place, Size(size[axis]))
                guard = here if guard is None else op("and", guard, here, dtype=DType.bool)
            offset = -sum(p * s for p, s in zip(begin, inner))
            taps = tuple(s * d for s, d in zip(inner, dilations))
            return [nest.load(view, (*steps, *taps), offset=offset, guard=guard)]

        def build(e: list[Expr]) -> RowBody:
            return RowBody([Reduce("sum", e[0], INT)], finals={0: Result(0, INT)})

        domain = (shape.n, shape.group, *out, *kernel)
        row = range(2 + spatial, 2 + 2 * spatial)
        how: dict[str, Any] = {"keepdims": False, "sources": [sums], "gather": loads}
        return self.b.rows([], row, build, [(INT, False)], domain=domain, **how)[0]

    # -- kernels ----------------------------------------------------------------------------------------------------

    def raw(self, out: Value | None) -> Value:
        b, shape, out_shape = self.b, self.shape, self.out_shape
        rank = 2 + self.spatial
        zero = self.x_zero
        if zero is None:
            zero = b.constant(np.zeros((), b.dtype(self.x).numpy))
        if self.weights is None:
            filters = self._matrix()
        else:  # of an input whose content is known, what is known
            filters = self.w if self.w.const is not None else b.constant(self.weights, b.dtype(self.w))

        def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
            image = views[0]
            if not self._thin(image):
                image = r.ordered(image, channels_last(rank))
            even = pixels_even(target, shape.out)
            made = target if even else View.temporary(target.dtype, target.shape, channels_last(rank))
            launches = self._launches(r, [image, *views[1:]], made, epilogue)
            if even:
                return launches
            r.add(launches)
            r.copy(made, target)
            return []

        def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
            pixels = folded_stride(out_shape[2:], strides[2:])
            return None if pixels is None else (strides[0], pixels, strides[1])

        sources = [self.x, filters, zero]
        return b.contraction(sources, realise, fold, INT, out_shape, out, order=channels_last(rank), unit_axis=1)

    def _matrix(self) -> Value:
        """Filters that are a tensor of the graph as [group, taps and channels, outputs]."""
        b, shape = self.b, self.shape
        cut = b.reshape(self.w, (shape.group, shape.width, shape.depth, shape.taps))
        return b.reshape(b.transpose(cut, (0, 3, 2, 1)), (shape.group, shape.taps * shape.depth, shape.width))

    def _launches(self, r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        image, filters, zero = views
        shape, isa = self.shape, r.isa
        how: dict[str, Any] = {"epilogue": epilogue, "threads": r.threads}
        if self.depthwise:
            centre = np.asarray(self.weights_zero)
            along = lengthwise(shape, isa)
            packed_for = (centre.tobytes(), along.kernel, is_unrolled(along))
            key = ("depthwise codes", Same(filters.storage.array), filters.offset, *packed_for)
            kept = r.packs.get(key, lambda: _Kept(pack_depthwise(_array(filters), centre, isa, shape)))
            return integer_depthwise(image, zero, kept.storage, target, shape, isa, **how)
        if self._mixes_neighbours(r, target):
            known_by = ("code squares", image.dtype, Same(filters.storage.array), filters.offset)
            squares = r.packs.get(known_by, lambda: pack_squares(_array(filters), image.dtype, isa, shape))
            if squares.storage is not None:
                return squares_conv(image, zero, squares, target, shape, isa, **how)
        shape, target, how["epilogue"], p = self._side_by_side(isa, target, epilogue)
        before: list[Launch] = []
        if self._thin(image):
            image, before = _interleaved(image, r)
            if takes_triples(shape, dot_of_filters(isa, shape)):
                image = View(image.storage, image.dtype, (image.shape[0], shape.cin, *image.shape[2:]), image.strides)
            else:
                shape = replace(shape, cin=_THIN)
        if self.weights is not None:
            rows = pixels_hint(shape)
            dot = dot_of_filters(isa, shape)
            kind = (shape.group, shape.depth, rows, dot, begins_lines(shape, dot, isa), p, self.shape.strides)
            place = ("filter codes", Same(filters.storage.array), filters.offset, *kind)
            packed = r.packs.get(place, lambda: pack_filters(self._moved(_array(filters), shape.depth, p), isa, shape))
        else:
            packed, packing = pack_at_run(filters, shape.pixels, image.dtype, isa, r.threads)
            before += packing
        rows_apart = reads_padded(shape, packed, isa) or (finishes_together(packed) and self.weights is not None)
        if self.pointwise and pixels_even(image, shape.size) and not rows_apart:
            return [*before, *self._product(image, packed, target, r, how)]
        return [*before, *integer_conv(image, zero, packed, target, shape, isa, **how)]

    def _mixes_neighbours(self, r: Realiser, target: View) -> bool:
        """Whether outputs may be worked out some at a time: not where sums are the result, which are exact."""
        free = r.target.winograd and self.weights is not None and target.dtype is not INT
        return free and suits_squares(self.shape, r.isa)

    def _side_by_side(
        self, isa: Isa, target: View, epilogue: Epilogue | None
    ) -> tuple[ConvShape, View, Epilogue | None, int]:
        """Neighbouring pixels taken as one, as many as are returned last, where that fills vectors of outputs."""
        p = pixels_in_vectors(self.shape, isa) if self.weights is not None else 1
        found = joined(self.shape, target, epilogue, p)
        if found is None or dot_of_filters(isa, found[0]) is TILES:
            return self.shape, target, epilogue, 1
        return *found, p

    def _moved(self, filters: Array, depth: int, p: int) -> Array:
        """Filters for so many channels and pixels taken as one."""
        padded = _padded(filters, depth)
        return padded if p == 1 else joined_weights(padded, self.shape, p, -moved_right(of(filters)))

    def _thin(self, image: View) -> bool:
        """Few channels that lie in planes: cheaper put side by side four at a time than one after the other."""
        shape = self.shape
        apart = 1 < shape.cin <= _THIN and image.strides[1] != 1
        return apart and shape.group == 1 and shape.taps > 1 and self.weights is not None

    def _product(
        self, image: View, packed: PackedCodes, target: View, r: Realiser, how: dict[str, Any]
    ) -> list[Launch]:
        """A 1x1 convolution: pixels are the rows of a matrix product."""
        shape = self.shape

        def rows(view: View, channels: int) -> View:
            place = Pixels.of(view)
            steps = (place.n, place.w, view.strides[1] if channels > 1 else 1)
            return View(view.storage, view.dtype, (shape.n, shape.pixels, channels), steps, view.offset)

        return integer_matmul(rows(image, shape.cin), packed, rows(target, shape.cout), r.isa, **how)


def _interleaved(image: View, r: Realiser) -> tuple[View, list[Launch]]:
    """Planes of up to four channels as pixels of four bytes; what is missing is nothing, and meets zeros."""
    count, channels, *size = image.shape
    nest = NestBuilder((count, *size))
    value: Expr | None = None
    for c in range(channels):
        steps = (image.strides[0], *image.strides[2:])
        plane = View(image.storage, DType.uint8, (count, *size), steps, image.offset + c * image.strides[1])
        code = cast(nest.load(plane), INT)
        code = op("shl", code, const(8 * c, code)) if c else code
        value = code if value is None else op("bitor", value, code)
    assert value is not None
    words = View.temporary(INT, (count, *size))
    launches = nests.launches(nest.nest([Map(((nest.store(words), value),))]), r.isa, r.threads)
    strides = (words.strides[0] * _THIN, 1, *(s * _THIN for s in words.strides[1:]))
    return View(words.storage, image.dtype, (count, _THIN, *size), strides), launches


def _padded(filters: Array, depth: int) -> Array:
    """Filters with more channels, of codes that are multiplied as zeros."""
    if filters.shape[1] == depth:
        return filters
    more = [(0, depth - d if k == 1 else 0) for k, d in enumerate(filters.shape)]
    return np.pad(filters, more, constant_values=-moved_right(of(filters)))


class _Kept:
    """Packed data among the others, which say how large they are."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    @property
    def nbytes(self) -> int:
        return int(self.storage.nbytes)


def _array(view: View) -> Array:
    return np.ascontiguousarray(content(view))


# -- operators --------------------------------------------------------------------------------------------------------


def _checked(x: int, w: int, out: int | None = None) -> Check:
    def check(node: Node) -> str | None:
        for k in (x, w, *(() if out is None else (out,))):
            if operand_type(node, k) not in BYTES:
                return f"operand {k} of {operand_type(node, k)}"
        filters = node.input(w)
        shape = filters.type.shape if filters is not None and isinstance(filters.type, TensorType) else None
        if shape is not None and not 3 <= len(shape) <= 5:
            return f"{len(shape) - 2} spatial axes"
        return None

    return check


def shape_of(n: NodeView, image: Sequence[int], filters: Sequence[int]) -> ConvShape:
    rank = len(image) - 2
    strides = per_axis(n.attr("strides"), rank, "strides", n.op)
    dilations = per_axis(n.attr("dilations"), rank, "dilations", n.op)
    auto = text_of(n.attr("auto_pad", "NOTSET"))
    pads = resolve_pads(auto, n.attr("pads"), image[2:], filters[2:], strides, dilations, op=n.op)
    if min(pads, default=0) < 0:
        raise Declined(f"{n.op}: negative pads")
    group = int(n.attr("group", 1))
    return ConvShape.conv(image, filters, strides=strides, dilations=dilations, pads=pads, group=group)


@lowers("ConvInteger", dtypes=BYTES | {INT}, check=_checked(0, 1))
def conv_integer(n: NodeView, b: Definitions) -> None:
    shape = shape_of(n, n.shape(0), n.shape(1))
    zeros = [n.input(k) if n.has(k) else None for k in (2, 3)]
    Convolution(b, n.input(0), n.input(1), zeros[0], zeros[1], shape, n.rank(0) - 2).result(n.outputs[0])


@lowers("QLinearConv", dtypes=QUANTIZED, check=_checked(0, 3, 7))
@lowers("QLinearConv", domain=MICROSOFT, dtypes=QUANTIZED, check=_checked(0, 3, 7))
def qlinear_conv(n: NodeView, b: Definitions) -> None:
    x, rank = n.input(0), n.rank(0)
    last = bool(n.attr("channels_last", 0))
    if last:
        x = b.transpose(x, (0, rank - 1, *range(1, rank - 1)))
    shape = shape_of(n, b.shape(x), n.shape(3))
    whole = Convolution(b, x, n.input(3), n.input(2), n.input(5), shape, rank - 2)
    total = whole.result(None, n.input(8) if n.has(8) else None)
    spread = () if int(np.prod(n.shape(4))) == 1 else (shape.cout, *(1,) * (rank - 2))
    scale = product_of_scales(b, (n.input(1), ()), (n.input(4), spread), divisor=n.input(6))
    target, zero = n.out_dtype(), known(b, n.input(7))
    uses = [Use(total), Use(scale)]
    if zero is None or zero.any():
        uses.append(Use(n.input(7), ()))

    def compute(e: list[Expr]) -> Expr:
        return saturated(mul(cast(e[0], FLOAT), e[1]), e[2] if len(e) > 2 else None, target)

    made = b.pointwise(uses, compute, target, shape=whole.out_shape, out=None if last else n.outputs[0])
    if last:
        b.transpose(made, (0, *range(2, rank), 1), out=n.outputs[0])
