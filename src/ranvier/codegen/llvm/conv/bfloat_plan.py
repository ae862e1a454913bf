"""Which way a bfloat16 convolution finds its rows, and with how large blocks."""

from __future__ import annotations

from ranvier.codegen.llvm.conv.bfloat_copy import Mode
from ranvier.codegen.llvm.conv.plan import pixels_even
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Pixels
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

ROWS = 32  # the most rows of a tile
STEP = 32  # elements of the depth that are multiplied at once
LINE = 64  # bytes
_NEAR = 384 << 10  # bytes of rows of a block, which should stay in the second cache
_MOST = 1 << 20  # bytes of a copy of which no less than a whole row of outputs is asked for
_WEIGHTS_NEAR = 768 << 10
_SLACK = 2 * LINE  # what a copied row may write beyond its end
_LEAST = 2e7  # operations that are worth a tile of their own
_MANY = 1 << 40
# cycles
_TILE_STEP = 64.0  # of 32 rows, 32 columns and a step
_CALL = 260.0  # beside that: sums through scratch, epilogue, store
_COPY_LINE = 2.5
_FAR_LINE, _NEAR_LINE = 5.0, 1.5  # of weights


@dataclass(frozen=True)
class Plan:
    mode: Mode
    structure_planes: bool  # the input's channels lie apart
    rows: int  # of a tile
    segments: int
    depth: int  # elements of a row, padded
    offsets: tuple[int, ...]  # bytes: of taps (padded), of runs (gathered)
    pixel_blocks: int
    panel_blocks: int
    block_panels: int
    columns_outside: bool
    scratch: int
    fields: dict[str, int]


def _lines(elements: int) -> int:
    return -(-elements // STEP)


def plan_of(
    x: View, out: View, shape: ConvShape, gathers: bool, numbering: Numbering | None, weights: int, threads: int
) -> Plan:
    plain = numbering is None or numbering == Numbering.plain(shape.out)
    if not gathers and _lies_evenly(x, shape):
        return _even(x, out, shape, plain, weights, threads)
    return _copied(x, shape, gathers, weights, threads)


def _lies_evenly(x: View, shape: ConvShape) -> bool:
    pointwise = shape.taps == 1 and shape.strides == (1, 1, 1) and shape.begin == (0, 0, 0)
    lines = shape.depth % STEP == 0 and x.dtype is DType.bfloat16 and x.strides[1] == 1
    return pointwise and lines and shape.size == shape.out and pixels_even(x, shape.size)


def _even(x: View, out: View, shape: ConvShape, plain: bool, weights: int, threads: int) -> Plan:
    """A plain product. Pixels count in order where the output's lie evenly too, else by rows."""
    height, width = shape.out[1:]
    if plain and pixels_even(out, shape.out):
        height, width = 1, height * width
    pixels = height * width
    rows = min(ROWS, pixels)
    near = max(2 * ROWS, _NEAR // (shape.depth * 2) // ROWS * ROWS)
    blocks, panel_blocks, block_panels, outside = _shares(shape, pixels, near, weights, threads)
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
        **dict.fromkeys(("pixel", "copy_line", "plane", "joined", "runs", "run", "row_bytes", "copy_at", "rows_at"), 0),
    }
    scratch = ROWS * 2 * LINE + LINE
    count = -(-height // block_rows) * cuts
    return Plan("even", False, rows, 1, shape.depth, (0,), count, panel_blocks, block_panels, outside, scratch, fields)


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

    def count(self) -> int:
        return (self.rows - 1) * self.line + self.columns


def _block(shape: ConvShape, gathers: bool, rows: int, columns: int) -> _Block:
    (kh, kw), (sh, sw), (dh, dw) = shape.kernel[1:], shape.strides[1:], shape.dilations[1:]
    height = (rows - 1) * sh + (kh - 1) * dh + 1
    width = (columns - 1) * sw + (kw - 1) * dw + 1
    if gathers:
        line = -(-(width * shape.depth * 2 + _SLACK) // LINE) * LINE
        room = rows * columns * _row_bytes(shape) + LINE
        return _Block(rows, columns, columns, sh * line, line, height * line + _SLACK, room)
    pixel = _lines(shape.depth) * LINE
    whole = -(-width // sw) * sw
    line, high = whole * pixel, -(-height // sh)
    # the rows of a last tile that do not exist are read too
    beyond = (ROWS + kw * dw) * sw * pixel
    return _Block(rows, columns, whole // sw, line, high * line, sh * high * line + beyond, 0)


def _row_bytes(shape: ConvShape) -> int:
    """Of a gathered row: not such that rows are in each other's way in the cache."""
    size = _lines(shape.taps * shape.depth) * LINE
    return size + LINE if size % 512 == 0 else size


def _copied(x: View, shape: ConvShape, gathers: bool, weights: int, threads: int) -> Plan:
    height, width = shape.out[1:]
    block = _best_block(shape, gathers, weights, threads)
    down, cuts = -(-height // block.rows), -(-width // block.columns)
    panels, wanted = _panels(shape), _wanted(shape, threads)
    parts = min(panels, -(-wanted // (shape.n * shape.group * down * cuts))) if threads > 1 else 1
    block_panels = -(-panels // parts)
    (kh, kw), (sh, sw), (dh, dw) = shape.kernel[1:], shape.strides[1:], shape.dilations[1:]
    planes = x.strides[1] != 1 and shape.cin > 1
    pixel = shape.depth * 2 if gathers else _lines(shape.depth) * LINE
    joined = Pixels.of(x).w * 2 == pixel and shape.depth * 2 == pixel
    across = 1 if dw == 1 else kw
    if gathers:
        offsets = tuple(k * dh * block.plane + j * dw * pixel for k in range(kh) for j in range(across))
        run = (kw if dw == 1 else 1) * shape.depth
        depth, segments, step = _lines(shape.taps * shape.depth) * STEP, 1, _row_bytes(shape)
    else:
        offsets = tuple(
            (k * dh % sh) * block.plane + (k * dh // sh) * block.copy_line + j * dw * pixel
            for k in range(kh)
            for j in range(kw)
        )
        run, segments, step = 0, shape.taps, sw * pixel
        depth = segments * _lines(shape.depth) * STEP
    copy_at = ROWS * 2 * LINE + -(-segments * 8 // LINE) * LINE
    rows_at = copy_at + -(-block.copy // LINE) * LINE
    fields = {
        "a_step": step,
        "line": block.line,
        "block_rows": block.rows,
        "block_columns": block.columns,
        "column_cuts": cuts,
        "oh": height,
        "ow": width,
        "pixel": pixel,
        "copy_line": block.copy_line,
        "plane": block.plane,
        "joined": int(joined),
        "runs": kh * across,
        "run": run,
        "row_bytes": step if gathers else 0,
        "copy_at": copy_at,
        "rows_at": rows_at,
    }
    # gathered rows of a last tile that do not exist are read too
    scratch = rows_at + block.gathered + (ROWS * step if gathers else 0)
    return Plan(
        "gathered" if gathers else "padded",
        planes,
        ROWS if block.count() > ROWS // 2 else ROWS // 2,
        segments,
        depth,
        offsets,
        down * cuts,
        -(-panels // block_panels),
        block_panels,
        False,
        scratch,
        fields,
    )


def _best_block(shape: ConvShape, gathers: bool, weights: int, threads: int) -> _Block:
    """Whole rows of outputs where a few of them fit; of all numbers of rows the one that takes the least time."""
    height, width = shape.out[1:]
    columns = width
    while columns > ROWS and _size(one := _block(shape, gathers, 1, columns)) > _MOST:
        columns = -(-columns // 2)
        columns = -(-columns // ROWS) * ROWS
        if columns >= one.columns:
            break
    if columns < width:
        return _block(shape, gathers, 1, columns)
    wanted = -(-_wanted(shape, threads) // (shape.n * shape.group))
    steps = _lines(shape.taps * shape.depth) if gathers else shape.taps * _lines(shape.depth)
    panels = _panels(shape)
    per_tile = panels * (steps * _TILE_STEP + _CALL)
    per_block = weights / shape.group / LINE * (_FAR_LINE if weights > _WEIGHTS_NEAR else _NEAR_LINE)
    best, least = _block(shape, gathers, 1, width), float("inf")
    for rows in range(1, height + 1):
        block = _block(shape, gathers, rows, width)
        if rows > 1 and _size(block) > _NEAR:
            break
        count = -(-height // rows)
        if count < wanted and panels < -(-wanted // count) and rows > 1:
            continue
        last = _block(shape, gathers, height - (count - 1) * rows, width)
        cost = 0.0
        for times, each in ((count - 1, block), (1, last)):
            tiles = -(-each.count() // ROWS)
            lines = (each.copy + each.gathered) / LINE
            cost += times * (tiles * per_tile + lines * _COPY_LINE + per_block)
        if cost < least:
            best, least = block, cost
    return best


def _size(block: _Block) -> int:
    return block.copy + block.gathered
