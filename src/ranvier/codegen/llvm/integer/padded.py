"""Convolutions of codes that read their rows from a padded copy of the image.

The input under a block of output rows is copied with its padding. A tap is an offset there, and nothing is copied once
per tap. With a stride, rows whose numbers leave the same remainder lie together. Of a 1x1 convolution rows are the
pixels where they lie, or where they were put side by side if it has a stride.

Tiles of the matrix unit want rows one step apart. A row of the copy holds as many pixels as its outputs times the
stride, so that stepping over the end of one row of outputs leads to the next, at the price of some columns at the end
of every row that are computed and dropped. Few channels are a step of less than a line: a whole row of taps where a
line holds it. Sums wait in one of two blocks of scratch, so that a tile is finished while the next one is multiplied.

Vector units take pixels from wherever they lie, one after the other, and a row of taps is a run of any length, packed
so that it begins with a group of its own. Sums of many pixels and some panels wait, and are finished together. Codes of
16 bits are two bytes to all but the products, so that shapes count bytes where they say channels (``words.py``).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.plan import pixels_even
from ranvier.codegen.llvm.conv.shape import ConvShape, Pixels
from ranvier.codegen.llvm.gemm.blocks import TILE_US, Cut, grain
from ranvier.codegen.llvm.integer.dots import BYTES, PAIRS, TILES, Dot
from ranvier.codegen.llvm.integer.frame import Frame, finish_of, in_order
from ranvier.codegen.llvm.integer.pack import PackedCodes
from ranvier.codegen.llvm.integer.padded_copy import NAMES, OPERANDS
from ranvier.codegen.llvm.integer.padded_strips import NAMES_OF_STRIPS, StripDriver
from ranvier.codegen.llvm.integer.padded_tiles import TileDriver
from ranvier.codegen.llvm.integer.product import FINISH_US, most_rows
from ranvier.codegen.llvm.integer.reach import Array
from ranvier.codegen.llvm.integer.segments import segments_spec
from ranvier.codegen.llvm.integer.strip import Strip
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_TILE_GOPS, _GOPS = 1500.0, 400.0  # rough speed of one core
_NEAR = 96 << 10  # bytes of a block, of its results and of what is added to them …
_FAR = 384 << 10  # … and where filters are too large to be read again for every block
_REREAD = 512 << 10
_OTHERS = tuple(size << 10 for size in (32, 64, 192, 384, 768))
_GROUP = 4  # bytes that are multiplied at once
_LEAST_OF_MANY = 32  # bytes of a step of more channels than one step multiplies
_MANY = 1 << 40
_SUMS_BYTES, _PANELS = 16 << 10, 4  # of strips, that are finished together


def reads_padded(shape: ConvShape, packed: PackedCodes, isa: Isa) -> bool:
    """Whether packed filters have their depth in segments that a padded copy has."""
    if packed.dot is TILES:
        return suits_tiles(shape)
    alike = not begins_lines(shape, BYTES, isa) or packed.lined
    return packed.dot is BYTES and alike and suits_strips(shape, isa)


def suits_tiles(shape: ConvShape) -> bool:
    """Lines of channels for every tap, or less than a line for every tap or row of taps."""
    if not _is_flat(shape):
        return False
    if shape.depth % tiles.LINE == 0:
        return True
    # where many channels come in steps of a few, rows that are put together are quicker
    least = _LEAST_OF_MANY if shape.depth > tiles.LINE else _GROUP
    return shape.depth % _GROUP == 0 and shape.taps > 1 and _segment(shape, TILES) >= least


def suits_strips(shape: ConvShape, isa: Isa) -> bool:
    """Whole groups of channels for every tap, or rows of taps."""
    return isa.masks and _is_flat(shape) and (shape.depth % _GROUP == 0 or _is_joined(shape, BYTES))


def begins_lines(shape: ConvShape, dot: Dot, isa: Isa) -> bool:
    """Whether filters are packed with every line of taps at the beginning of a group, so that it is a segment."""
    joined = _is_flat(shape) and _is_joined(shape, dot) and shape.kernel[1] > 1
    return joined and dot in (BYTES, PAIRS) and isa.masks and shape.kernel[2] * shape.depth % _GROUP != 0


def _is_flat(shape: ConvShape) -> bool:
    """An image in one plane, one group of channels."""
    return shape.group == 1 and shape.kernel[0] == 1 and shape.size[0] == 1 and shape.begin[0] == 0


def _is_joined(shape: ConvShape, dot: Dot) -> bool:
    """Whether a row of taps is one segment: its pixels lie side by side, and a step of tiles holds them."""
    return shape.dilations[2] == 1 and (dot is not TILES or shape.kernel[2] * shape.depth <= tiles.LINE)


def _segment(shape: ConvShape, dot: Dot) -> int:
    """Bytes that are multiplied in one go: a row of taps, or a pixel; with tiles a line at most, or an equal part of a
    pixel."""
    if _is_joined(shape, dot):
        return shape.kernel[2] * shape.depth
    if dot is not TILES:
        return shape.depth
    groups = shape.depth // _GROUP
    return _GROUP * max(part for part in range(1, tiles.LINE // _GROUP + 1) if groups % part == 0)


def _every(x: View, shape: ConvShape) -> tuple[View, ConvShape]:
    """A 1x1 convolution without its stride: it sees every s-th pixel only."""
    inside = all((o - 1) * s < i for i, o, s in zip(shape.size, shape.out, shape.strides))
    if shape.taps > 1 or shape.begin != (0, 0, 0) or not inside:
        return x, shape
    spatial = x.rank - 2
    steps, sizes = shape.strides[3 - spatial :], shape.out[3 - spatial :]
    strides = (*x.strides[:2], *(s * by for s, by in zip(x.strides[2:], steps)))
    seen = View(x.storage, x.dtype, (*x.shape[:2], *sizes), strides, x.offset)
    shape = replace(shape, size=shape.out, strides=(1, 1, 1))
    if pixels_even(seen, shape.size):
        # in order, one after the other
        column = (1, shape.pixels, 1)
        place = Pixels.of(seen)
        seen = View(x.storage, x.dtype, (*x.shape[:2], shape.pixels, 1), (place.n, 1, place.w, place.w), x.offset)
        shape = replace(shape, size=column, out=column)
    return seen, shape


@dataclass(frozen=True)
class _Block:
    """A block of output rows and what its copy takes."""

    line: int  # output pixels of a row, those that are dropped included
    copy_line: int  # bytes of a row of the copy
    plane: int  # … and of all rows that leave the same remainder
    nbytes: int

    @classmethod
    def of(cls, shape: ConvShape, rows: int) -> _Block:
        (kh, kw), (sh, sw), (dh, dw) = shape.kernel[1:], shape.strides[1:], shape.dilations[1:]
        line = -(-((shape.out[2] - 1) * sw + (kw - 1) * dw + 1) // sw)
        copy_line = line * sw * shape.depth
        high = -(-((rows - 1) * sh + (kh - 1) * dh + 1) // sh)
        plane = high * copy_line + tiles.LINE  # a last pixel may write more than itself
        beyond = (tiles.ROWS // shape.out[2] + 1) * copy_line  # rows of a last tile that do not exist are read too
        return cls(line, copy_line, plane, sh * plane + beyond)

    def pixels(self, shape: ConvShape, rows: int) -> int:
        return (rows - 1) * self.line + shape.out[2]


def padded_conv(
    x: View,
    zero: View,
    packed: PackedCodes,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    reach: Array | None = None,
) -> Launch:
    dot = packed.dot
    flops, traffic = shape.flops * dot.group / _GROUP, float(x.nbytes + packed.nbytes + out.nbytes)
    target = Pixels.of(out)
    x, shape = _every(x, shape)
    place = Pixels.of(x)
    # rows of one pixel, as above: those that lie evenly need no copy
    in_place = shape.taps == 1 and shape.strides == (1, 1, 1) and shape.size == shape.out and shape.out[2] == 1
    in_place = in_place and shape.begin == (0, 0, 0) and not dot.turns(x.dtype) and shape.depth % _GROUP == 0
    cut = packed.panels.cut
    work = shape.flops / (_TILE_GOPS if dot is TILES else _GOPS) / 1e3 + shape.n * shape.cout * shape.pixels * FINISH_US
    wanted = 1 if threads == 1 else max(1, min(int(work / TILE_US), 8 * threads))
    block_rows = tuning.choose(
        "integer rows",
        lambda: (*shape.key(), "pairs" if dot is PAIRS else x.dtype.name),
        _rows_within(_FAR if packed.nbytes > _REREAD else _NEAR, shape, out.dtype, epilogue, wanted, in_place),
        lambda: {
            f"{size >> 10} KB": _rows_within(size, shape, out.dtype, epilogue, wanted, in_place) for size in _OTHERS
        },
    )
    blocks = -(-shape.out[1] // block_rows)
    block = _Block.of(shape, block_rows)
    panel_group = cut.count
    if shape.n * blocks < wanted:
        panel_group = max(1, cut.count * shape.n * blocks // wanted)
    panel_groups = -(-cut.count // panel_group)
    offsets, groups = _segments(shape, block, dot)
    wide = cut.size * isa.vector_bytes
    if dot is TILES:
        way = _by_tiles(x.dtype, packed, block.pixels(shape, block_rows), _segment(shape, dot), in_place, isa)
    else:
        way = _in_strips(x.dtype, packed, block_rows * shape.out[2], panel_group, in_place, isa)
    dropped = block.line > shape.out[2]
    numbers = {
        **dict(zip(("xn", "xh", "xw"), (place.n, place.h, place.w))),
        "yn": target.n * out.dtype.numpy.itemsize,
        **dict(zip(("h", "w"), shape.size[1:])),
        **dict(zip(("oh", "ow"), shape.out[1:])),
        **dict(zip(("kh", "kw"), shape.kernel[1:])),
        **dict(zip(("sh", "sw"), shape.strides[1:])),
        **dict(zip(("dh", "dw"), shape.dilations[1:])),
        **dict(zip(("ph", "pw"), shape.begin[1:])),
        "pixel": shape.depth,
        "joined": int(place.w == shape.depth),
        "line": block.line,
        # results follow each other without end where none are dropped
        "line_apart": block.line if dropped else _MANY,
        "line_results": shape.out[2] if dropped else _MANY,
        "copy_line": block.copy_line,
        "plane": block.plane,
        "a_step": place.h if in_place else shape.strides[2] * shape.depth,
        "block_rows": block_rows,
        "blocks": blocks,
        "segments": len(offsets),
        "groups": groups,
        "k": packed.k,
        "panels": cut.count,
        "wide": wide,
        "wide_panels": cut.large,
        "panel_group": panel_group,
        "panel_groups": panel_groups,
        "width": shape.width,
        **way.numbers,
    }
    done = finish_of(epilogue, out, reach)
    count = shape.n * blocks * panel_groups
    return Launch(
        way.driver,
        (
            *(At.of(x), At(packed.storage), At.of(out), At.of(zero), At(_offsets(offsets))),
            *map(Code, way.micro),
            Code(done.spec),
            *done.buffers,
        ),
        (*in_order(way.names, numbers), *done.dims),
        tiles=count,
        writes=(out.storage,),
        grain=grain(count, work, threads),
        scratch=way.sums + (0 if in_place else -(-block.nbytes // tiles.LINE) * tiles.LINE),
        flops=flops,
        traffic=traffic,
        label="integer conv",
    )


@dataclass(frozen=True)
class _Way:
    """Who multiplies: a driver with the names of its numbers, those that it alone has among them, and kernels for wide
    panels and others."""

    driver: KernelSpec
    names: tuple[str, ...]
    numbers: dict[str, int]
    micro: tuple[KernelSpec, ...]
    sums: int  # bytes of scratch


def _widths(cut: Cut) -> tuple[int, int]:
    """Vectors of wide panels and of others."""
    return cut.size, cut.size - 1 if cut.large < cut.count else cut.size


def _by_tiles(codes: DType, packed: PackedCodes, pixels: int, segment: int, in_place: bool, isa: Isa) -> _Way:
    """``pixels`` of a block; ``segment``: bytes of one."""
    cut, short = packed.panels.cut, segment < tiles.LINE
    rows = Cut.of(pixels, tiles.ROWS).size
    kinds = (segments_spec(codes, packed.dot.right, width, short=short, groups=packed.k) for width in _widths(cut))
    return _Way(_tile_driver(in_place), NAMES, {"rows": rows}, tuple(kinds), 2 * rows * cut.size * isa.vector_bytes)


def _in_strips(codes: DType, packed: PackedCodes, pixels: int, group: int, in_place: bool, isa: Isa) -> _Way:
    """``pixels`` of a block, ``group`` panels of a tile."""
    cut = packed.panels.cut
    rows = Cut.of(pixels, most_rows(isa, cut.size)).size
    together = min(_PANELS, group)
    step = together * cut.size * isa.vector_bytes
    finished = min(-(-pixels // rows), max(1, _SUMS_BYTES // (rows * step))) * rows
    numbers = {"rows": rows, "step": step, "together": together, "finished": finished}
    pairs = packed.dot is PAIRS
    micro = tuple(Strip(rows, width, not in_place, pairs).spec() for width in _widths(cut))
    driver = _strip_driver(in_place, packed.dot.turns(codes), pairs)
    return _Way(driver, NAMES_OF_STRIPS, numbers, micro, (rows + finished) * step)


def _rows_within(
    nbytes: int, shape: ConvShape, out: DType, epilogue: Epilogue | None, wanted: int, in_place: bool
) -> int:
    """Output rows of a block, all that belongs to which takes so many bytes."""
    given = () if epilogue is None else epilogue.operands
    beside = sum(o.dtype.numpy.itemsize for o in given if o.strides[1] and o.strides[2])
    results = shape.out[2] * shape.cout * (out.numpy.itemsize + beside)
    high = shape.out[1]
    if in_place:
        most = nbytes // (shape.depth + results)
    else:
        most = max(
            [rows for rows in range(1, high + 1) if _Block.of(shape, rows).nbytes + rows * results <= nbytes] or [1]
        )
    most = max(1, min(most, high * shape.n // wanted))
    if in_place and most < high:
        return max(1, most // tiles.ROWS) * tiles.ROWS
    return Cut.of(high, most).size


def _segments(shape: ConvShape, block: _Block, dot: Dot) -> tuple[tuple[int, ...], int]:
    """Bytes from the first pixel of a row to its segments, and 32-bit groups of each."""
    (kh, kw), sh, (dh, dw) = shape.kernel[1:], shape.strides[1], shape.dilations[1:]
    size = _segment(shape, dot)
    if size == tiles.LINE and not _is_joined(shape, dot):
        size = shape.depth  # whole steps, one after the other
    rows = [(k * dh % sh) * block.plane + (k * dh // sh) * block.copy_line for k in range(kh)]
    if not _is_joined(shape, dot):
        rows = [
            at + j * dw * shape.depth + first for at in rows for j in range(kw) for first in range(0, shape.depth, size)
        ]
    return tuple(rows), -(-size // _GROUP)


@functools.lru_cache(1024)
def _offsets(values: tuple[int, ...]) -> Storage:
    return Storage.constant(np.array(values, np.int64), "offsets of taps")


def _tile_driver(in_place: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        TileDriver(Frame(module, symbol, isa, NAMES, OPERANDS), in_place).emit()

    name = f"integer conv {'in place' if in_place else 'padded'}"
    return KernelSpec(name, (name,), emit, "int8 tiles")


def _strip_driver(in_place: bool, turns: bool, pairs: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        StripDriver(Frame(module, symbol, isa, NAMES_OF_STRIPS, OPERANDS), in_place, turns, pairs).emit()

    name = f"integer conv {'in place' if in_place else 'padded'} strips"
    return KernelSpec(name, (name, turns, pairs), emit)
