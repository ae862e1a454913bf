"""Which way a bfloat16 convolution finds its rows, and with how large blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ranvier.codegen import tuning
from ranvier.codegen.llvm.conv.bfloat_copy import Mode
from ranvier.codegen.llvm.conv.plan import pixels_even
from ranvier.codegen.llvm.conv.rows import is_thin
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Pixels
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

ROWS = 32  # the most rows of a tile
STEP = 32  # elements of the depth that are multiplied at once
LINE = 64  # bytes
TABLE_AT = ROWS * 2 * LINE  # in scratch, behind the sums of a tile: where segments begin
_NEAR = 384 << 10  # bytes of rows of a block, which should stay in the second cache
_MOST = 1 << 20  # bytes of a copy of which no less than a whole row of outputs is asked for
_WEIGHTS_NEAR = 768 << 10
_RESULTS_NEAR = 128 << 10  # bytes of results of a block: panel after panel writes a part of every pixel
_SLACK = 4 * LINE  # what a copied row may write beyond its end
_LEAST = 2e7  # operations that are worth a tile of their own
_MANY = 1 << 40
# numbers of the driver that an input which is read where it lies has no use for
_OF_A_COPY = (
    *("band", "spread", "pixel", "copy_line", "plane", "joined", "runs", "run", "row_bytes"),
    *("copy_at", "rows_at"),
)
# cycles
_TILE_STEP = 64.0  # of 32 rows, 32 columns and a step
_CALL = 260.0  # beside that: sums through scratch, epilogue, store
_COPY_LINE = 2.5
_FAR_LINE, _NEAR_LINE = 5.0, 1.5  # of weights


@dataclass(frozen=True)
class Depth:
    """How (tap, channel) is laid out along a row: what packed weights depend on.

    "lines"     every tap's channels, padded to whole lines: a segment per tap
    "gathered"  all taps' channels side by side, padded to whole lines: one segment
    "strip"     one to four channels, padded to two or four: a segment is the taps of a kernel row, or an even part of
                them, and need not be a whole line
    """

    kind: Literal["lines", "gathered", "strip"]
    pixel: int  # elements of a pixel
    segments: int
    segment: int  # elements of a segment

    @property
    def elements(self) -> int:
        return self.segments * self.segment


def depth_of(shape: ConvShape) -> Depth:
    (kh, kw), dilated = shape.kernel[1:], shape.dilations[2] > 1
    lines = Depth("lines", _lines(shape.depth) * STEP, shape.taps, _lines(shape.depth) * STEP)
    gathered = Depth("gathered", shape.depth, 1, _lines(shape.taps * shape.depth) * STEP)
    if is_thin(shape):
        pixel = 2 if shape.cin < 3 else 4
        run, count = (pixel, shape.taps) if dilated else (kw * pixel, kh)
        parts = _lines(run)
        if run % (2 * parts) == 0:
            return Depth("strip", pixel, count * parts, run // parts)
        return gathered  # what lies behind a window must not be read, not even to be multiplied by zero
    # cycles per pixel and 16 columns, and of copying a line
    spared = (lines.elements - gathered.elements) / STEP * -(-shape.width // 16)
    usual = gathered if spared > 2.0 * (gathered.elements / STEP + kh) else lines
    if shape.taps == 1:
        return usual
    either = {"lines": lines, "gathered": gathered}
    return tuning.choose("conv way", lambda: (*shape.key(), "bfloat16"), usual, lambda: either)


@dataclass(frozen=True)
class Plan:
    mode: Mode
    planes: int  # channels of the input that lie apart
    rows: int  # of a tile
    depth: Depth
    offsets: tuple[int, ...]  # bytes: of segments (padded), of runs (gathered)
    pixel_blocks: int
    panel_blocks: int
    block_panels: int
    columns_outside: bool
    scratch: int
    fields: dict[str, int]


def _lines(elements: int) -> int:
    return -(-elements // STEP)


def plan_of(
    x: View, out: View, shape: ConvShape, numbering: Numbering | None, weights: int, threads: int
) -> tuple[Plan, View, ConvShape]:
    """The plan, and the input and the shape that it is for: a 1x1 convolution of a stride sees every s-th pixel."""
    depth = depth_of(shape)
    plain = (numbering is None or numbering == Numbering.plain(shape.out)) and pixels_even(out, shape.out)
    inside = all((o - 1) * s < i for i, o, s in zip(shape.size, shape.out, shape.strides))
    if shape.taps == 1 and inside and shape.begin == (0, 0, 0) and shape.strides != (1, 1, 1):
        x, shape = _every(x, shape)
    if depth.kind == "lines" and _lies_evenly(x, shape):
        return _even(x, shape, depth, plain, weights, threads), x, shape
    return _copied(x, shape, depth, plain, weights, threads), x, shape


def _every(x: View, shape: ConvShape) -> tuple[View, ConvShape]:
    spatial = x.rank - 2
    steps, sizes = shape.strides[3 - spatial :], shape.out[3 - spatial :]
    strides = (*x.strides[:2], *(s * by for s, by in zip(x.strides[2:], steps)))
    seen = View(x.storage, x.dtype, (*x.shape[:2], *sizes), strides, x.offset)
    return seen, replace(shape, size=shape.out, strides=(1, 1, 1))


def _lies_evenly(x: View, shape: ConvShape) -> bool:
    pointwise = shape.taps == 1 and shape.strides == (1, 1, 1) and shape.begin == (0, 0, 0)
    lines = shape.depth % STEP == 0 and x.dtype is DType.bfloat16 and x.strides[1] == 1
    return pointwise and lines and shape.size == shape.out and pixels_even(x, shape.size)


def _even(x: View, shape: ConvShape, depth: Depth, plain: bool, weights: int, threads: int) -> Plan:
    """A plain product. Pixels count in order where the output's lie evenly too, else by rows."""
    height, width = shape.out[1:]
    if plain:
        height, width = 1, height * width
    pixels = height * width
    rows = min(ROWS, pixels)
    near = max(2 * ROWS, min(_NEAR // (shape.depth * 2), _results(shape, weights)) // ROWS * ROWS)
    sizes = {"half": max(2 * ROWS, near // 2 // ROWS * ROWS), "double": 2 * near, "fourfold": 4 * near}
    blocks, panel_blocks, block_panels, outside = tuning.choose(
        "conv blocks",
        lambda: (*shape.key(), "bfloat16"),
        _shares(shape, pixels, near, weights, threads),
        lambda: {name: _shares(shape, pixels, size, weights, threads) for name, size in sizes.items()},
    )
    block_rows, block_columns = 1, min(width, -(-pixels // blocks // ROWS) * ROWS or ROWS)
    if height > 1:
        block_rows, block_columns = max(1, min(height, -(-pixels // blocks) // width)), width
    cuts = -(-width // block_columns)
    fields = {
        "a_step": Pixels.of(x).w * 2,
        "line": width if height > 1 else _MANY,
        "block_rows": block_rows,
        "block_columns": block_columns,
        "column_cuts": cuts,
        "oh": height,
        "ow": width,
        **dict.fromkeys(_OF_A_COPY, 0),
    }
    count = -(-height // block_rows) * cuts
    scratch = TABLE_AT + LINE
    return Plan("even", 0, rows, depth, (0,), count, panel_blocks, block_panels, outside, scratch, fields)


def _results(shape: ConvShape, weights: int) -> int:
    """Pixels whose results are near until they are whole; all, where more blocks would cost more."""
    if shape.taps > 1 or weights > _WEIGHTS_NEAR // 2:
        return _MANY
    return _RESULTS_NEAR // (2 * shape.width)


def _panels(shape: ConvShape) -> int:
    return -(-shape.width // 32)


def _wanted(shape: ConvShape, threads: int) -> int:
    """Tiles of the launch that keep so many threads evenly busy."""
    return 1 if threads == 1 else max(1, min(6 * threads, int(shape.flops / _LEAST)))


def _shares(shape: ConvShape, pixels: int, near: int, weights: int, threads: int) -> tuple[int, int, int, bool]:
    """Blocks of pixels, blocks of panels, panels of a block, and whether panels stand outside."""
    panels, wanted = _panels(shape), _wanted(shape, threads)
    least = -(-pixels // near)
    parts, outside = 1, False
    if weights > _WEIGHTS_NEAR and least > 1 and shape.group == 1:
        parts, outside = min(panels, -(-weights // _WEIGHTS_NEAR)), True
    blocks = max(least, min(-(-wanted // (shape.n * shape.group * parts)), -(-pixels // (2 * ROWS))))
    if shape.n * shape.group * parts * blocks < wanted:
        parts = min(panels, -(-wanted // (shape.n * shape.group * blocks)))
    block_panels = -(-panels // parts)
    return blocks, -(-panels // block_panels), block_panels, outside


@dataclass(frozen=True)
class _Block:
    """A block of output rows and columns, and what its copy takes."""

    rows: int
    columns: int
    line: int  # pixels of a row of outputs, in the order in which they are computed
    copy_line: int  # bytes of a row of the copy
    plane: int
    copy: int  # bytes
    gathered: int
    band: int  # rows of the copy from one row of taps to the next, where they have bands of their own; else 0

    def count(self) -> int:
        return (self.rows - 1) * self.line + self.columns


def _block(shape: ConvShape, depth: Depth, rows: int, columns: int) -> _Block:
    (kh, kw), (sh, sw), (dh, dw) = shape.kernel[1:], shape.strides[1:], shape.dilations[1:]
    band = rows if kh > 1 and dh > rows and sh == 1 else 0
    height = (rows - 1) * sh + (kh - 1) * (band or dh) + 1
    width = (columns - 1) * sw + (kw - 1) * dw + 1
    pixel = depth.pixel * 2
    if depth.kind == "gathered":
        line = -(-(width * pixel + _SLACK) // LINE) * LINE
        room = rows * columns * _row_bytes(depth) + LINE
        return _Block(rows, columns, columns, sh * line, line, height * line + _SLACK, room, band)
    whole = -(-width // sw) * sw
    line, high = whole * pixel, -(-height // sh)
    plane = high * line + (_SLACK if depth.kind == "strip" else 0)
    # the rows of a last tile that do not exist are read too
    beyond = (ROWS + kw * dw) * sw * pixel + _SLACK
    return _Block(rows, columns, whole // sw, line, plane, sh * plane + beyond, 0, band)


def _row_bytes(depth: Depth) -> int:
    """Of a gathered row: not such that rows are in each other's way in the cache."""
    size = depth.elements * 2
    return size + LINE if size % 512 == 0 else size


def _copied(x: View, shape: ConvShape, depth: Depth, plain: bool, weights: int, threads: int) -> Plan:
    height, width = shape.out[1:]
    block = _best_block(shape, depth, weights, threads)
    if block.columns == width:
        block = tuning.choose(
            "conv blocks", lambda: (*shape.key(), "bfloat16"), block, lambda: _other_blocks(shape, depth, block.rows)
        )
    down, cuts = -(-height // block.rows), -(-width // block.columns)
    panels, wanted = _panels(shape), _wanted(shape, threads)
    parts = min(panels, -(-wanted // (shape.n * shape.group * down * cuts))) if threads > 1 else 1
    block_panels = -(-panels // parts)
    pixel, step = depth.pixel * 2, shape.strides[2] * depth.pixel * 2
    apart = is_thin(shape) and (x.strides[1] != 1 or shape.cin == 1)
    joined = Pixels.of(x).w * 2 == pixel and shape.depth == depth.pixel and shape.group == 1
    offsets, run = _offsets(shape, depth, block)
    if depth.kind == "gathered":
        step = _row_bytes(depth)
    copy_at = TABLE_AT + -(-depth.segments * 8 // LINE) * LINE
    rows_at = copy_at + -(-block.copy // LINE) * LINE
    fields = {
        "a_step": step,
        # all pixels follow each other in the output too, where none are computed for nothing
        "line": _MANY if plain and block.line == width else block.line,
        "block_rows": block.rows,
        "block_columns": block.columns,
        "column_cuts": cuts,
        "oh": height,
        "ow": width,
        "band": block.band or _MANY,
        "spread": block.band or shape.dilations[1],
        "pixel": pixel,
        "copy_line": block.copy_line,
        "plane": block.plane,
        "joined": int(joined),
        "runs": len(offsets) if run else 0,
        "run": run,
        "row_bytes": step if run else 0,
        "copy_at": copy_at,
        "rows_at": rows_at,
    }
    return Plan(
        "gathered" if depth.kind == "gathered" else "padded",
        shape.cin if apart else 0,
        ROWS if block.count() > ROWS // 2 else ROWS // 2,
        depth,
        offsets,
        down * cuts,
        -(-panels // block_panels),
        block_panels,
        False,
        # gathered rows of a last tile that do not exist are read too
        rows_at + block.gathered + (ROWS * step if block.gathered else 0),
        fields,
    )


def _offsets(shape: ConvShape, depth: Depth, block: _Block) -> tuple[tuple[int, ...], int]:
    """Where segments begin in the copy, seen from the first pixel of a row; or runs of elements, and how long those
    are, where windows are gathered."""
    (kh, kw), sh, (dh, dw) = shape.kernel[1:], shape.strides[1], shape.dilations[1:]
    dh = block.band or dh
    pixel = depth.pixel * 2
    across = 1 if dw == 1 and depth.kind != "lines" else kw
    if depth.kind == "gathered":
        found = tuple(k * dh * block.plane + j * dw * pixel for k in range(kh) for j in range(across))
        return found, kw // across * shape.depth
    parts = depth.segments // (kh * across)
    return tuple(
        (k * dh % sh) * block.plane + (k * dh // sh) * block.copy_line + j * dw * pixel + part * depth.segment * 2
        for k in range(kh)
        for j in range(across)
        for part in range(parts)
    ), 0


def _best_block(shape: ConvShape, depth: Depth, weights: int, threads: int) -> _Block:
    """Whole rows of outputs where a few of them fit; of all numbers of rows the one that takes the least time."""
    height, width = shape.out[1:]
    columns = width
    while columns > ROWS and _size(one := _block(shape, depth, 1, columns)) > _MOST:
        columns = -(-columns // 2)
        columns = -(-columns // ROWS) * ROWS
        if columns >= one.columns:
            break
    if columns < width:
        return _block(shape, depth, 1, columns)
    wanted = -(-_wanted(shape, threads) // (shape.n * shape.group))
    steps = depth.segments * _lines(depth.segment)
    panels, most = _panels(shape), _results(shape, weights)
    per_tile = panels * (steps * _TILE_STEP + _CALL)
    per_block = weights / shape.group / LINE * (_FAR_LINE if weights > _WEIGHTS_NEAR else _NEAR_LINE)

    def cost(block: _Block) -> float:
        count = -(-height // block.rows)
        if count < wanted and panels < -(-wanted // count) and block.rows > 1:
            return float("inf")
        last = _block(shape, depth, height - (count - 1) * block.rows, width)
        found = 0.0
        for times, each in ((count - 1, block), (1, last)):
            tiles = -(-each.count() // ROWS)
            found += times * (tiles * per_tile + _size(each) / LINE * _COPY_LINE + per_block)
        return found

    best = _block(shape, depth, 1, width)
    least = cost(best)
    for rows in range(2, height + 1):
        block = _block(shape, depth, rows, width)
        if _size(block) > _NEAR or block.count() > max(4 * ROWS, most):
            break
        if (found := cost(block)) < least:
            best, least = block, found
    whole = _block(shape, depth, height, width)
    if best.band and _size(whole) <= _MOST and cost(whole) < least:
        return whole  # which copies no row twice
    return best


def _other_blocks(shape: ConvShape, depth: Depth, rows: int) -> dict[str, _Block]:
    height, width = shape.out[1:]
    numbers = {"half": max(1, rows // 2), "double": min(height, 2 * rows), "fourfold": min(height, 4 * rows)}
    found = {name: _block(shape, depth, number, width) for name, number in numbers.items()}
    return {name: block for name, block in found.items() if _size(block) <= _MOST}


def _size(block: _Block) -> int:
    return block.copy + block.gathered
