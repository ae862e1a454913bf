"""Winograd's algorithm for 3x3 convolutions of stride 1, whatever its numbers are: blocks of output squares.

A tile of a launch is a block of output squares times a block of channel panels, and stays in the second cache from the
first load to the last store: the input squares are transformed (vectors run along the channels), one matrix product
per transformed position accumulates them with the transformed weights, the products are transformed back, finished by
the epilogue and stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.conv.driver import MOST_ROWS
from ranvier.codegen.llvm.conv.epilogues import Fields, Lanes, Tail, TailCode, channel_pieces
from ranvier.codegen.llvm.conv.plan import Panels, rows_used
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels, require_channels_last
from ranvier.codegen.llvm.elements import memory_type, register_type
from ranvier.codegen.llvm.gemm.micro import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_FIELDS = (
    *("h", "w", "oh", "ow", "cin", "k", "cout", "ph", "pw", "xn", "xh", "xw", "yn", "yh", "yw"),
    *("down", "across", "squares", "block", "columns", "block_panels", "panels", "panel_columns", "panel_groups"),
    *("rest_columns", "most_rows", "v_pitch", "v_plane", "m_plane", "v_at", "m_at"),
)
_CODES_FROM = 4  # position of the micro-kernels among the buffers: after x, w, y and the border
# Bytes of transformed inputs and products of one block: few where the weights stay in the second cache beside them,
# more where the weights come from further away and should be used often once they are here.
_NEAR_SMALL, _NEAR_LARGE = 256 << 10, 1200 << 10
_SMALL_WEIGHTS = 768 << 10
_OTHERS_NEAR = (128 << 10, 512 << 10, 2048 << 10)


@dataclass(frozen=True)
class Numbers:
    """Types on the way: of the image, transformed, and of sums; ``group`` transformed channels meet weights at once."""

    image: DType
    inner: DType
    sums: DType
    group: int = 1

    @property
    def unit(self) -> int:
        """Bytes of such a group."""
        return self.group * self.inner.numpy.itemsize


def can_be_squares(shape: ConvShape) -> bool:
    """3x3 of stride 1 in one plane and one group, with enough channels for a vector of them."""
    plain = shape.kernel == (1, 3, 3) and shape.strides == shape.dilations == (1, 1, 1) and shape.group == 1
    flat = shape.size[0] == 1 and shape.out[0] == 1 and not shape.is_empty
    return plain and flat and min(shape.cin, shape.cout) >= 16


@dataclass(frozen=True)
class Kind:
    """What squares of ``m`` by ``m`` outputs of some numbers are made by.

    ``spec`` is the driver for an epilogue; ``codes`` has micro-kernels for so many squares at a time, ``most_rows`` at
    most, as the driver wants them: by rows - 1, for whole panels and then for the last one.
    """

    m: int
    numbers: Numbers
    spec: Callable[[Tail], KernelSpec]
    codes: Callable[[set[int]], Sequence[Code]]
    most_rows: int
    label: str


def squares_launch(
    kind: Kind,
    x: View,
    weights: Storage,
    cut: Panels,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    border: View | None = None,
) -> Launch:
    """The launch of a driver on weights [panel][position][group of channels][column]. ``border`` is the element of the
    image that stands for nothing, where that is not always zero."""
    numbers, m, most_rows = kind.numbers, kind.m, kind.most_rows
    require_channels_last(x, "the input")
    require_channels_last(out, "the output")
    image, inner, sums = (each.numpy.itemsize for each in (numbers.image, numbers.inner, numbers.sums))
    positions = (m + 2) ** 2
    down, across = -(-shape.out[1] // m), -(-shape.out[2] // m)
    squares = shape.n * down * across
    lanes = isa.lanes(inner)
    v_pitch = -(-shape.cin // lanes) * lanes
    per_square = positions * (v_pitch * inner + cut.columns * sums)
    near = _NEAR_SMALL if weights.nbytes <= _SMALL_WEIGHTS else _NEAR_LARGE

    def blocks(size: int) -> tuple[int, int]:
        return _blocks(squares, cut.count, max(most_rows, size // per_square), most_rows, threads)

    sizes = {f"{size >> 10} KB": size for size in _OTHERS_NEAR}
    block, block_panels = tuning.choose(
        "conv blocks",
        lambda: (*shape.key(), m, inner),
        blocks(near),
        lambda: {name: blocks(size) for name, size in sizes.items()},
    )
    count, columns = -(-squares // block), -(-cut.count // block_panels)
    v_plane, m_plane = _odd_lines(block * v_pitch, inner), _odd_lines(block * cut.columns, sums)
    v_at = -(-v_pitch * image // 64) * 64  # behind a pixel of borders
    m_at = v_at + positions * v_plane * inner
    place, target = Pixels.of(x), Pixels.of(out)
    dims = {
        **dict(zip(("h", "w"), shape.size[1:])),
        **dict(zip(("oh", "ow"), shape.out[1:])),
        "cin": shape.cin,
        "k": cut.depth,
        "cout": shape.cout,
        "ph": shape.begin[1],
        "pw": shape.begin[2],
        "xn": place.n,
        "xh": place.h,
        "xw": place.w,
        "yn": target.n,
        "yh": target.h,
        "yw": target.w,
        "down": down,
        "across": across,
        "squares": squares,
        "block": block,
        "columns": columns,
        "block_panels": block_panels,
        "panels": cut.count,
        "panel_columns": cut.columns,
        "panel_groups": positions * cut.depth * cut.columns,
        "rest_columns": cut.rest * cut.lanes,
        "most_rows": most_rows,
        "v_pitch": v_pitch,
        "v_plane": v_plane,
        "m_plane": m_plane,
        "v_at": v_at,
        "m_at": m_at,
    }
    tail = Tail.of(epilogue, numbers.sums)
    return Launch(
        kind.spec(tail),
        (
            At(x.storage, x.offset * image),
            At(weights),
            At.of(out),
            At(x.storage) if border is None else At.of(border),
            *kind.codes(rows_used(squares, block, most_rows)),
            *tail.buffers,
        ),
        (*(dims[name] for name in _FIELDS), *tail.dims),
        tiles=count * columns,
        writes=(out.storage,),
        scratch=m_at + positions * m_plane * sums,
        flops=2.0 * squares * positions * shape.cin * shape.cout,
        traffic=float(x.nbytes + out.nbytes + weights.nbytes),
        label=kind.label,
    )


def position_panels(shape: ConvShape, vectors: int, isa: Isa, item: int, group: int = 1) -> Panels:
    """How the columns are cut, ``vectors`` of sums of ``item`` bytes to a panel; a position's panels are as deep as
    there are groups of channels."""
    lanes = isa.lanes(item)
    wide = -(-shape.cout // lanes)
    count = -(-wide // vectors)
    return Panels(vectors, count, wide - (count - 1) * vectors, lanes, -(-shape.cin // group))


def _blocks(squares: int, panels: int, most: int, rows: int, threads: int) -> tuple[int, int]:
    """Squares and panels of a block: as many squares as stay near, and enough blocks for all threads.

    Panels are cut before squares: weights are then still read once, and the inputs transformed again are few.
    """
    wanted = 1 if threads == 1 else 4 * threads

    def shared(count: int) -> int:
        """An even share of the squares; of several, a whole number of a tile's rows."""
        share = -(-squares // count)
        return share if count == 1 else -(-share // rows) * rows

    block = shared(-(-squares // most))
    columns = min(panels, -(-wanted // -(-squares // block)))
    if -(-squares // block) * columns < 2 * threads:
        block = min(block, shared(max(1, min(-(-wanted // columns), squares // (2 * rows)))))
    return block, -(-panels // columns)


def _odd_lines(elements: int, item: int) -> int:
    """Elements of a plane, rounded up to an odd number of cache lines: planes then begin in different cache sets."""
    lines = -(-elements * item // 64)
    return (lines + 1 - lines % 2) * 64 // item


class Squares:
    """The driver. Subclasses say how squares of the image become vectors, and what both transforms do with them."""

    def __init__(
        self, module: Module, symbol: str, isa: Isa, m: int, numbers: Numbers, out_dtype: DType, tail: Tail
    ) -> None:
        self.isa, self.m, self.out_dtype, self.tail = isa, m, out_dtype, tail
        self.edge = m + 2
        self.image, self.out_element = memory_type(numbers.image), memory_type(out_dtype)
        self.inner, self.sums = register_type(numbers.inner), register_type(numbers.sums)
        self.inner_bytes, self.sums_bytes = (each.numpy.itemsize for each in (numbers.inner, numbers.sums))
        self.out_bytes, self.unit = out_dtype.numpy.itemsize, numbers.unit
        self.f = f = module.kernel(symbol)
        self.at = Fields(f, f.args["dims"], _FIELDS)
        self.bufs = f.args["bufs"]
        self.x, self.w, self.y, self.border = (f.load("ptr", f.gep(self.bufs, k, "ptr")) for k in range(_CODES_FROM))
        self.code = TailCode(f, isa, tail, self.bufs, _CODES_FROM + 2 * MOST_ROWS, f.args["dims"], len(_FIELDS))
        self.control = f.stack("i64", SLOTS)
        self.pointers = f.stack("ptr", self.edge * self.edge)
        self.held = f.stack(self.sums, m * m * isa.lanes(self.sums_bytes))
        self.outside = f.args["scratch"]
        self.v = f.gep(f.args["scratch"], self.at["v_at"])
        self.products = f.gep(f.args["scratch"], self.at["m_at"])

    # -- what numbers are -------------------------------------------------------------------------------------------

    def nothing(self) -> Val:
        """An element of the image that stands for what lies outside."""
        raise NotImplementedError

    def loaded(self, address: Val, piece: Lanes) -> Val:
        """Channels of a pixel as numbers that are transformed."""
        raise NotImplementedError

    def transformed(self, lines: list[list[Val]]) -> list[list[Val]]:
        """A square of the image in the domain of the products."""
        raise NotImplementedError

    def returned(self, lines: list[list[Val]]) -> list[list[Val]]:
        """A square of outputs from its products."""
        raise NotImplementedError

    # -- the blocks -------------------------------------------------------------------------------------------------

    def function(self) -> None:
        f, at = self.f, self.at
        nothing = self.nothing()
        with f.loop(0, at["v_pitch"]) as k:
            f.store(nothing, f.gep(self.outside, k, self.image))
        for slot in (Slot.PARTIAL, Slot.BIAS, Slot.RESIDUAL, Slot.B_STEP, Slot.ALPHA, Slot.FLAGS, Slot.LOW, Slot.HIGH):
            write_slot(f, self.control, slot, 0)
        write_slot(f, self.control, Slot.K, at["k"])
        write_slot(f, self.control, Slot.SEGMENTS, 1)
        write_slot(f, self.control, Slot.A_STEP, at["v_pitch"] * self.inner_bytes)
        write_slot(f, self.control, Slot.OUT_STEP, at["panel_columns"] * self.sums_bytes)
        write_slot(f, self.control, Slot.COLUMNS, self.isa.lanes(self.sums_bytes))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            first = f.div(tile, at["columns"]) * at["block"]
            count = f.min_(at["squares"] - first, at["block"])
            self.each_square(first, count, self.transform_input)
            column = f.rem(tile, at["columns"]) * at["block_panels"]
            with f.loop(column, f.min_(column + at["block_panels"], at["panels"])) as panel:
                last = f.cmp("eq", panel, at["panels"] - 1)
                columns = f.select(last, at["rest_columns"], at["panel_columns"])
                self.multiply(panel, last, columns, count)
                channel = panel * at["panel_columns"]
                self.each_square(first, count, functools.partial(self.transform_output, channel))
        f.ret()

    def each_square(self, first: Val, count: Val, body: Callable[[Val, Val, Val, Val], None]) -> None:
        """``body`` for the squares of a block: number in the block, image, and its first row and column of outputs."""
        f, at = self.f, self.at
        line = f.div(first, at["across"])
        image, row = f.var("i64", f.div(line, at["down"])), f.var("i64", f.rem(line, at["down"]) * self.m)
        column = f.var("i64", f.rem(first, at["across"]) * self.m)
        with f.loop(0, count) as square:
            body(square, image.get(), row.get(), column.get())
            # counted, because divisions would take as long as some transforms
            column.set(column.get() + self.m)
            with f.if_(f.cmp("sge", column.get(), at["ow"])):
                column.set(0)
                row.set(row.get() + self.m)
                with f.if_(f.cmp("sge", row.get(), at["oh"])):
                    row.set(0)
                    image.set(image.get() + 1)

    def transform_input(self, square: Val, image: Val, oh: Val, ow: Val) -> None:
        f, at, edge = self.f, self.at, self.edge
        top, left = oh - at["ph"], ow - at["pw"]
        corner = f.gep(self.x, image * at["xn"] + top * at["xh"] + left * at["xw"], self.image)
        inside = [f.cmp("ult", left + c, at["w"]) for c in range(edge)]
        with f.loop(0, edge) as r:
            there = f.cmp("ult", top + r, at["h"])
            line = f.gep(corner, r * at["xh"], self.image)
            row = f.gep(self.pointers, r * edge, "ptr")
            for c in range(edge):
                address = f.gep(line, at["xw"] * c, self.image)
                f.store(f.select(f.and_(there, inside[c]), address, self.outside), f.gep(row, c, "ptr"))
        target = f.gep(self.v, square * at["v_pitch"], self.inner)

        def body(piece: Lanes) -> None:
            def source(r: int, c: int) -> Val:
                pixel = f.load("ptr", f.gep(self.pointers, r * edge + c, "ptr"))
                return self.loaded(f.gep(pixel, piece.channel, self.image), piece)

            found = self.transformed([[source(r, c) for c in range(edge)] for r in range(edge)])
            plane = f.gep(target, piece.channel, self.inner)
            for y in range(edge):
                for x in range(edge):
                    # whole vectors: a row has room for them
                    f.store(found[y][x], plane)
                    plane = f.gep(plane, at["v_plane"], self.inner)

        channel_pieces(f, self.isa, self.inner_bytes, f.i64(0), at["cin"], body)

    def multiply(self, panel: Val, last: Val, columns: Val, count: Val) -> None:
        """All positions of a panel: products[position] = v[position] x w[panel, position]."""
        f, at = self.f, self.at
        codes = f.gep(self.bufs, f.select(last, f.i64(MOST_ROWS), f.i64(0)) + (_CODES_FROM - 1), "ptr")
        weights = f.gep(self.w, panel * at["panel_groups"] * self.unit)
        tiles = f.div(count + at["most_rows"] - 1, at["most_rows"])
        rows = f.div(count, tiles)
        extra = count - rows * tiles
        size, slice_ = at["k"] * columns * self.unit, at["k"] * 64
        with f.loop(0, self.edge * self.edge) as position:
            b = f.gep(weights, position * size)
            a = f.gep(self.v, position * at["v_plane"], self.inner)
            target = f.gep(self.products, position * at["m_plane"], self.sums)
            with f.loop(0, tiles) as tile:
                first = tile * rows + f.min_(tile, extra)
                number = rows + f.cast(f.cmp("slt", tile, extra), "i64")
                write_slot(f, self.control, Slot.OUT, f.gep(target, first * at["panel_columns"], self.sums))
                # positions follow each other in memory: rows fetch some lines of the next one each
                fetched = size + f.min_(tile * slice_, f.max_(size - slice_, 0))
                write_slot(f, self.control, Slot.FETCH, f.gep(b, fetched))
                code = f.load("ptr", f.gep(codes, number, "ptr"))
                f.call_pointer(code, "void", [f.gep(a, first * at["v_pitch"], self.inner), b, self.control])

    def transform_output(self, channel: Val, square: Val, image: Val, oh: Val, ow: Val) -> None:
        f, at, m, edge = self.f, self.at, self.m, self.edge
        rows, columns = f.min_(at["oh"] - oh, m), f.min_(at["ow"] - ow, m)
        whole = f.and_(f.cmp("eq", rows, m), f.cmp("eq", columns, m))
        place = image * at["yn"] + oh * at["yh"] + ow * at["yw"] + channel
        target = f.gep(self.y, place, self.out_element)
        pixel = oh * at["ow"] + ow
        source = f.gep(self.products, square * at["panel_columns"], self.sums)
        corner = self.code.rows(image, pixel)
        narrows = self.out_bytes < self.sums_bytes  # a mask makes storing narrowed elements many times slower

        def body(piece: Lanes) -> None:
            kind = vector(self.sums, piece.count)
            start = f.gep(source, piece.channel, self.sums)
            lines = [
                [f.load(kind, f.gep(start, at["m_plane"] * (y * edge + x), self.sums)) for x in range(edge)]
                for y in range(edge)
            ]
            found = self.returned(lines)
            values = {(y, x): found[y][x] for y in range(m) for x in range(m)}
            here = f.gep(target, piece.channel, self.out_element)
            if self.tail.is_cheap and not (narrows and piece.mask is not None):
                with f.if_else(whole) as otherwise:
                    fixed = self.code.fixed(corner, channel + piece.channel, piece)
                    for (y, x), value in values.items():
                        self.store(value, f.i64(y), f.i64(x), here, corner, channel, piece, fixed)
                    otherwise()
                    self.some(values, rows, columns, here, corner, channel, piece)
            else:
                self.some(values, rows, columns, here, corner, channel, piece)

        left = f.min_(at["cout"] - channel, at["panel_columns"])
        channel_pieces(f, self.isa, self.sums_bytes, f.i64(0), left, body, apart=narrows)

    def some(
        self,
        values: dict[tuple[int, int], Val],
        rows: Val,
        columns: Val,
        here: Val,
        corner: list[Val],
        channel: Val,
        piece: Lanes,
    ) -> None:
        """Through memory, so that the epilogue stands once, in a loop over the outputs there are."""
        f, m = self.f, self.m
        kind = vector(self.sums, piece.count)
        for (y, x), value in values.items():
            f.store(value, f.gep(self.held, (y * m + x) * piece.count, self.sums))
        fixed = self.code.fixed(corner, channel + piece.channel, piece)
        with f.loop(0, rows) as row, f.loop(0, columns) as column:
            value = f.load(kind, f.gep(self.held, (row * m + column) * piece.count, self.sums))
            self.store(value, row, column, here, corner, channel, piece, fixed)

    def store(
        self,
        value: Val,
        y: Val,
        x: Val,
        here: Val,
        corner: list[Val],
        channel: Val,
        piece: Lanes,
        fixed: dict[int, Val],
    ) -> None:
        f, at = self.f, self.at
        address = f.gep(here, y * at["yh"] + x * at["yw"], self.out_element)
        rows = self.code.moved(corner, y * at["ow"] + x)
        self.code.store(value, rows, channel + piece.channel, address, self.out_dtype, piece.mask, fixed)
