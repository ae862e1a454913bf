"""Which way a convolution finds its rows, with how large blocks."""

from __future__ import annotations

from dataclasses import replace

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import planes
from ranvier.codegen.llvm.conv.implicit import EvenRows, TableRows
from ranvier.codegen.llvm.conv.lines import LineRows
from ranvier.codegen.llvm.conv.narrow import NarrowRows, along_pixels
from ranvier.codegen.llvm.conv.plan import (
    Blocks,
    Panels,
    Rows,
    blocks_of,
    gemm_launch,
    panels_of,
    pixels_even,
    rows_used,
    work_pieces,
)
from ranvier.codegen.llvm.conv.shape import (
    ConvShape,
    Numbering,
    Packed,
    Pixels,
    Shuffle,
    require_channels_last,
    sums_of,
)
from ranvier.codegen.llvm.conv.strip import StripRows
from ranvier.codegen.llvm.gemm.halves import half_tile
from ranvier.codegen.llvm.gemm.tiles import Tile, tile_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

_TABLE = 48 << 10  # bytes of row pointers of one block
_STRIP = 96 << 10  # bytes of one strip
_THIN = 4  # up to so many input channels the kernel makes its own channels-last copy, strip by strip
_ANYWHERE = 1 << 40


def is_thin(shape: ConvShape) -> bool:
    """Few input channels: rows come from strips, and the input may lie in any order."""
    return shape.cin <= _THIN and shape.group == 1 and shape.is_flat


def gemm_conv(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None = None,
    shuffle: Shuffle | None = None,
) -> list[Launch]:
    """A convolution through the micro-kernels."""
    item = x.dtype.numpy.itemsize
    tile = half_tile(isa) if packed.kind == "halves" else tile_of(isa, packed.block)
    cut = panels_of(shape, packed.block, isa, sums_of(x.dtype).numpy.itemsize)
    require_channels_last(out, "the output")
    numbering = numbering or Numbering.plain(shape.out)
    if is_thin(shape) and shuffle is None and planes.suits(x, shape, cut, isa, epilogue):
        return [planes.planes_conv(x, packed, out, shape, isa, epilogue, cut, threads, numbering)]
    if is_thin(shape):
        by_lines = shape.dilations[2] == 1 and shape.out[2] >= tile.rows
        tile = replace(tile, rows=tile.strided_rows) if by_lines else tile
        rows = _strip(x, out, shape, cut, tile, item, isa, threads, by_lines)
    else:
        require_channels_last(x, "the input")
        pointwise = shape.taps == 1 and shape.size == shape.out and shape.strides == (1, 1, 1)
        if pointwise and shape.begin == (0, 0, 0) and pixels_even(x, shape.size):
            tile = replace(tile, rows=tile.strided_rows)
            rows = _even(x, shape, cut, tile, item, threads)
        else:
            rows = _table(x, shape, cut, tile, item, threads)
    return [gemm_launch(x, packed, out, shape, isa, epilogue, cut, tile, rows, numbering, shuffle)]


def _even(x: View, shape: ConvShape, cut: Panels, tile: Tile, item: int, threads: int) -> Rows:
    blocks = blocks_of(shape, cut, tile, item, threads, _ANYWHERE)
    place = Pixels.of(x)
    fields = {
        "xn": place.n,
        "xw": place.w,
        "block_pixels": blocks.pixels,
        "pixels": shape.pixels,
        "taps": 1,
        "a_step": place.w * item,
        "k": shape.depth,
        "segments": 1,
    }
    return Rows(EvenRows, "rows", blocks, rows_used(shape.pixels, blocks.pixels, tile.rows), 0, 0, fields)


def _table(x: View, shape: ConvShape, cut: Panels, tile: Tile, item: int, threads: int) -> Rows:
    pitch = _pitch(tile)
    per_tile = shape.taps * pitch * 8
    blocks = blocks_of(shape, cut, tile, item, threads, max(1, _TABLE // per_tile) * tile.rows)
    zeros = -(-shape.depth * item // 64) * 64
    tiles = -(-blocks.pixels // tile.rows)
    place = Pixels.of(x)
    fields = {
        **dict(zip(("xn", "xd", "xh", "xw"), place.numbers)),
        "block_pixels": blocks.pixels,
        "pixels": shape.pixels,
        "pitch": pitch,
        "zero_bytes": zeros,
        **dict(zip(("d", "h", "w"), shape.size)),
        **dict(zip(("kd", "kh", "kw"), shape.kernel)),
        **dict(zip(("sd", "sh", "sw"), shape.strides)),
        **dict(zip(("dd", "dh", "dw"), shape.dilations)),
        **dict(zip(("pd", "ph", "pw"), shape.begin)),
        "taps": shape.taps,
        "a_step": pitch * 8,
        "k": shape.depth,
        "segments": shape.taps,
    }
    used = rows_used(shape.pixels, blocks.pixels, tile.rows)
    return Rows(TableRows, "table", blocks, used, zeros, zeros + tiles * per_tile, fields)


def narrow_conv(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None = None,
    shuffle: Shuffle | None = None,
) -> list[Launch]:
    """A convolution with few output channels, by dot products along the input channels."""
    require_channels_last(x, "the input")
    require_channels_last(out, "the output")
    item = x.dtype.numpy.itemsize
    lanes = isa.lanes(item)
    tile = Tile(0, lanes, 1, 1.0)
    # a panel is one channel; its "columns" are the lanes of the scratch tile
    cut = Panels(1, shape.cout, 1, lanes, shape.taps * (packed.block // lanes))
    rows = replace(_table(x, shape, cut, tile, item, threads), driver=NarrowRows, dots=True)
    whole = replace(rows.blocks, panels=shape.cout, columns=1, columns_outside=False)
    swapped = along_pixels(epilogue)
    numbering = numbering or Numbering.plain(shape.out)
    rows = replace(rows, blocks=whole)
    return [gemm_launch(x, packed, out, shape, isa, swapped, cut, tile, rows, numbering, shuffle)]


def _strip(
    x: View,
    out: View,
    shape: ConvShape,
    cut: Panels,
    tile: Tile,
    item: int,
    isa: Isa,
    threads: int,
    by_lines: bool,
) -> Rows:
    (_, height, width), (_, kh, kw) = shape.out, shape.kernel
    (_, sh, sw), (_, dh, dw) = shape.strides, shape.dilations
    across = 1 if dw == 1 else kw
    segments = kh * across
    pitch = _pitch(tile)

    def bytes_for(rows: int, columns: int) -> tuple[int, int, int]:
        """Elements of a strip row, bytes of the strip, bytes of the table."""
        line = ((columns - 1) * sw + (kw - 1) * dw + 1) * shape.cin
        line = -(-line // 16) * 16 + isa.lanes(item) * shape.cin
        strip = line * ((rows - 1) * sh + (kh - 1) * dh + 1) * item
        table = 0 if by_lines else -(-rows * columns // tile.rows) * segments * pitch * 8
        return line, -(-strip // 64) * 64, table

    def fits(rows: int, columns: int) -> bool:
        _, strip, table = bytes_for(rows, columns)
        return strip <= _STRIP and table <= _TABLE

    # rows may only be joined where the output lies evenly across their ends and a whole row is taken
    wanted = -(-work_pieces(shape, threads) // shape.n)
    rows = max(1, height // wanted) if pixels_even(out, shape.out) else 1
    while rows > 1 and not fits(rows, width):
        rows -= 1
    columns = width
    if rows == 1:
        columns = max(min(width, 4 * tile.rows), -(-width // -(-wanted // height)))
        while columns > tile.rows and not fits(1, columns):
            columns = -(-columns // 2)
    line, strip, table = bytes_for(rows, columns)
    cuts = -(-width // columns)
    down = -(-height // rows)
    used: set[int] = set()
    for r in {rows, height - (down - 1) * rows}:
        for c in {columns, width - (cuts - 1) * columns}:
            pixels = c if by_lines else r * c
            used |= rows_used(pixels, pixels, tile.rows)
    blocks = Blocks(rows * columns, down * cuts, cut.count, 1, False)
    n, _, h, w = x.strides[0], *_spatial(x)
    fields = {
        "xn": n,
        "xc": x.strides[1],
        "xh": h,
        "xw": w,
        "cin": shape.cin,
        "h": shape.size[1],
        "w": shape.size[2],
        "kh": kh,
        "kw": kw,
        "sh": sh,
        "sw": sw,
        "dh": dh,
        "dw": dw,
        "ph": shape.begin[1],
        "pw": shape.begin[2],
        "block_rows": rows,
        "block_columns": columns,
        "column_cuts": cuts,
        "strip_pitch": line,
        "pitch": pitch,
        "across": across,
        "taps": segments,
        "a_step": pitch * 8,
        "segments": segments,
        "k": kw * shape.cin if dw == 1 else shape.cin,
    }
    if by_lines:
        fields |= {"a_step": sw * shape.cin * item, "segment_step": dh * line * item}
        return Rows(LineRows, "lines", blocks, used, strip, strip, fields, shape.cin)
    return Rows(StripRows, "table", blocks, used, strip, strip + table, fields, shape.cin)


def _spatial(x: View) -> tuple[int, int, int]:
    d, h, w = (0,) * (5 - x.rank) + x.strides[2:]
    return d, h, w


def _pitch(tile: Tile) -> int:
    """Pointers per tap in the table: whole groups of 8."""
    return -(-tile.rows // 8) * 8
