"""Convolution as matrix product: panels of weights, blocks of work, and the launch that runs them."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.launch import Code as CodeAt
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.conv.driver import COMMON, MOST_ROWS, Code, Driver, Finish
from ranvier.codegen.llvm.conv.epilogues import Tail
from ranvier.codegen.llvm.conv.shape import (
    NO_SHUFFLE,
    ConvShape,
    Numbering,
    Packed,
    Pixels,
    Shuffle,
    packed_constant,
    sums_of,
)
from ranvier.codegen.llvm.conv.taps_abreast import taps_abreast
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.gemm.epilogue import Simple, place_of, simple_form
from ranvier.codegen.llvm.gemm.halves import PANEL, HalfMicro
from ranvier.codegen.llvm.gemm.micro import CLAMP, ROUND, Layout, Micro, number_bits
from ranvier.codegen.llvm.gemm.tiles import Tile, tiles
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_NEAR = 768 << 10  # bytes of weights that stay in the second cache beside the pixels they meet
_PIXELS_NEAR = 256 << 10  # bytes of input that a block of pixels reads
_OTHERS_NEAR = tuple((f << 10, p << 10) for f, p in ((768, 64), (768, 1024), (256, 256), (1536, 256), (1536, 64)))
_CODES = 2 * MOST_ROWS
_CHUNK, _DEEP = 1024, 1536  # k steps of a chunk, and how many are still one
_OTHER_CHUNKS = ((384, 576), (768, 1152), (2048, 3072), (1 << 30, 1 << 30))
_LEAST = 1e6  # floating-point operations that are worth a tile of their own


@dataclass(frozen=True)
class Panels:
    """How the columns of one group are cut."""

    vectors: int  # of a whole panel
    count: int
    rest: int  # vectors of the last panel
    lanes: int
    depth: int  # rows of a panel: taps times channels

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    def panel_bytes(self, item: int) -> int:
        return self.depth * self.columns * item

    def group_elements(self) -> int:
        return self.depth * self.lanes * ((self.count - 1) * self.vectors + self.rest)


def best_tile(width: int, isa: Isa, item: int) -> Tile:
    """The tile that takes the fewest cycles per row for so many columns."""
    vectors = -(-width // isa.lanes(item))

    def cycles(tile: Tile) -> tuple[float, int]:
        whole, rest = divmod(vectors, tile.vectors)
        cost = whole * _cycles(tile.rows, tile.vectors) + (_cycles(tile.rows, rest) if rest else 0.0)
        return cost / tile.score, -tile.vectors

    return min(tiles(isa), key=cycles)


def panel_vectors(shape: ConvShape, isa: Isa, item: int) -> int:
    """The width of panels of constant filters."""
    usual = best_tile(shape.width, isa, item).vectors

    def others() -> dict[str, int]:
        return {f"{t.rows} x {t.vectors}": t.vectors for t in tiles(isa)}

    return tuning.choose("conv panels", lambda: (*shape.key(), item), usual, others)


def _cycles(rows: int, vectors: int) -> float:
    """Per row and k: two FMAs or two loads a cycle, and enough independent sums to hide their latency."""
    return max(rows * vectors, rows + vectors, 8) / (2.0 * rows)


def panels_of(shape: ConvShape, vectors: int, isa: Isa, item: int) -> Panels:
    lanes = isa.lanes(item)
    wide = -(-shape.width // lanes)
    count = -(-wide // vectors)
    return Panels(vectors, count, wide - (count - 1) * vectors, lanes, shape.taps * shape.depth)


def pack(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, dtype: DType) -> Packed:
    """[group][panel][tap][channel][column], columns padded to whole vectors of sums. float16 is for its arithmetic."""
    halves = dtype is DType.float16
    item = sums_of(dtype).numpy.itemsize
    vectors = PANEL if halves else panel_vectors(shape, isa, item)
    cut = panels_of(shape, vectors, isa, item)
    flat = w.reshape(shape.group, shape.width, shape.depth, shape.taps).transpose(0, 3, 2, 1)
    packed = packed_empty((shape.group, cut.group_elements()), dtype.numpy)
    pack_panels(packed, flat.reshape(shape.group, cut.depth, shape.width), cut)
    return packed_constant("halves" if halves else "gemm", packed, dtype, vectors)


def pack_panels(target: np.ndarray[Any, Any], matrices: np.ndarray[Any, Any], cut: Panels) -> None:
    """Cut [group, depth, width] matrices into panels, each dense, one after another."""
    at = 0
    for k in range(cut.count):
        columns = (cut.rest if k == cut.count - 1 else cut.vectors) * cut.lanes
        piece = matrices[:, :, k * cut.columns : k * cut.columns + columns]
        place = target[:, at : at + cut.depth * columns].reshape(target.shape[0], cut.depth, columns)
        place[:, :, : piece.shape[2]] = piece
        place[:, :, piece.shape[2] :] = 0
        at += cut.depth * columns


@dataclass(frozen=True)
class Blocks:
    """Tiles of a launch: blocks of pixels times blocks of panels."""

    pixels: int  # of a block
    count: int  # blocks of an image
    panels: int  # of a block
    columns: int  # blocks of panels
    columns_outside: bool


def blocks_of(shape: ConvShape, cut: Panels, tile: Tile, item: int, threads: int, pixels_at_most: int) -> Blocks:
    def made(filters_near: int, pixels_near: int) -> Blocks:
        return _blocks(shape, cut, tile, item, threads, pixels_at_most, filters_near, pixels_near)

    def others() -> dict[str, Blocks]:
        return {f"{f >> 10} KB of filters, {p >> 10} KB of pixels": made(f, p) for f, p in _OTHERS_NEAR}

    return tuning.choose("conv blocks", lambda: (*shape.key(), item), made(_NEAR, _PIXELS_NEAR), others)


def _blocks(
    shape: ConvShape,
    cut: Panels,
    tile: Tile,
    item: int,
    threads: int,
    pixels_at_most: int,
    filters_near: int,
    pixels_near: int,
) -> Blocks:
    wanted = work_pieces(shape, threads)
    near = max(8 * tile.rows, pixels_near // (shape.depth * item))
    most = max(tile.rows, min(near, pixels_at_most))
    least = -(-shape.pixels // most)
    panels, outside = cut.count, False
    if cut.panel_bytes(item) * cut.count > filters_near and shape.group == 1:
        enough = cut.count * shape.n * least // wanted  # more panels a block, and threads would wait for each other
        panels, outside = max(1, min(filters_near // cut.panel_bytes(item), enough)), True
    columns = -(-cut.count // panels)
    count = max(least, min(-(-wanted // (shape.n * shape.group * columns)), -(-shape.pixels // (2 * tile.rows))))
    block = _even(shape.pixels, count, tile.rows, most)
    return Blocks(block, -(-shape.pixels // block), panels, columns, outside)


def work_pieces(shape: ConvShape, threads: int) -> int:
    """How many tiles keep so many threads evenly busy, none of them too small to be worth its start."""
    return max(1, min(8 * threads, int(shape.flops / _LEAST)))


def _even(pixels: int, count: int, rows: int, most: int) -> int:
    """Pixels of a block: an even share, or the next multiple of a tile's rows if that makes fewer tiles."""
    share = -(-pixels // count)
    rounded = min(-(-share // rows) * rows, max(rows, most // rows * rows))

    def made(block: int) -> int:
        whole, rest = divmod(pixels, block)
        return whole * -(-block // rows) + -(-rest // rows)

    return min((rounded, share), key=lambda b: (made(b), b != rounded))


def rows_used(pixels: int, block: int, most: int) -> set[int]:
    """Row counts of the micro-kernels that blocks of so many pixels call (as ``Driver.even_rows`` shares them)."""
    found: set[int] = set()
    for count in {min(block, pixels), pixels % block or block}:
        number = -(-count // most)
        found.add(count // number)
        if count % number:
            found.add(count // number + 1)
    return found


@dataclass(frozen=True)
class Rows:
    """How a convolution finds its rows: the driver, its blocks, its arguments and the scratch it wants."""

    driver: type[Driver]
    a: Literal["rows", "table", "lines"]
    blocks: Blocks
    used: set[int]  # row counts of micro-kernels
    table_at: int
    tile_at: int
    fields: dict[str, int]  # of the driver, and "k" and "segments" of a whole row
    structure: int = 0  # what else the driver's code depends on
    dots: bool = False  # the driver multiplies itself and calls no micro-kernel


def gemm_launch(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    cut: Panels,
    tile: Tile,
    rows: Rows,
    numbering: Numbering,
    shuffle: Shuffle | None = None,
) -> Launch:
    """The launch that multiplies the rows of ``x`` with packed weights and finishes into ``out``."""
    sums, item = sums_of(x.dtype), x.dtype.numpy.itemsize
    wide = sums.numpy.itemsize
    uniform = shuffle is None and pixels_even(out, shape.out) and numbering == Numbering.plain(shape.out)
    known = simple_form(epilogue, sums) if uniform and not rows.dots else None
    finish: Finish = "driver"
    if known is not None and out.dtype in (sums, x.dtype):
        finish = "micro" if isa.masks or shape.width % cut.lanes == 0 else "last"
    known = known or Simple()
    tail = Tail.of(epilogue, sums)
    place = Pixels.of(out)
    abreast = 0 if rows.dots else taps_abreast(shuffle, place, tail, cut.lanes, cut.count)
    code = Code(sums, out.dtype, finish, uniform, tail, shuffle is not None, abreast, sums is not x.dtype)
    driver, blocks = rows.driver, rows.blocks
    extra = rows.structure

    def emit(module: Module, symbol: str, target: Isa) -> None:
        driver(module, symbol, target, code, extra).function()

    spec = KernelSpec(f"conv {driver.__name__} {x.dtype}", ("conv", 1, driver.__name__, extra, code.key), emit)
    residual = known.residual
    numbers: dict[str, int] = {
        "pixel_blocks": blocks.count,
        "column_blocks": blocks.columns,
        "inner": shape.n * blocks.count if blocks.columns_outside else shape.group * blocks.columns,
        "columns_outside": int(blocks.columns_outside),
        "panels": cut.count,
        "block_panels": blocks.panels,
        "panel_columns": cut.columns,
        "panel_bytes": cut.panel_bytes(item),
        "group_bytes": cut.group_elements() * item,
        "width": shape.width,
        "last_columns": (shape.width - 1) % cut.lanes + 1,
        "depth": shape.depth,
        "most_rows": tile.rows,
        **dict(zip(("od", "oh", "ow"), shape.out)),
        **dict(zip(("yn", "yd", "yh", "yw"), place.numbers)),
        **numbering.fields,
        **(shuffle or NO_SHUFFLE).fields,
        "with_bias": int(known.bias is not None),
        "with_residual": int(residual is not None),
        "residual_n": residual.strides[0] if residual is not None else 0,
        "residual_p": residual.strides[1] if residual is not None else 0,
        "flags": (CLAMP if known.clamps else 0) | (ROUND if out.dtype is not sums else 0),
        "low": number_bits(known.low, wide),
        "high": number_bits(known.high, wide),
        "table_at": rows.table_at,
        "tile_at": rows.tile_at,
        **rows.fields,
        **_chunks(rows, cut, tile, item, wide, shape),
    }
    weights = At(packed.storage)
    operands = [place_of(o) if o else weights for o in (known.bias, residual)]
    by_driver = finish != "micro"
    codes = micro_codes(x.dtype, rows.used, cut, rows.a) if not rows.dots else (weights,) * _CODES
    return Launch(
        spec,
        (
            At(x.storage, x.offset * item),
            weights,
            At.of(out),
            *operands,
            *codes,
            *(tail.buffers if by_driver else ()),
        ),
        (*(numbers[name] for name in (*COMMON, *driver.fields)), *(tail.dims if by_driver else ())),
        tiles=shape.n * blocks.count * shape.group * blocks.columns,
        writes=(out.storage,),
        scratch=numbers["partial_at"]
        + (numbers["chunks"] > 1) * -(-blocks.pixels // tile.rows) * numbers["partial_bytes"],
        flops=shape.flops,
        traffic=float(x.nbytes + out.nbytes + packed.storage.nbytes),
        label="conv",
    )


def _cut(rows: Rows, chunk: int, deep: int) -> tuple[int, int, int]:
    """The chunks of a deep panel, of about ``chunk`` steps, and the steps and segments of one: of whole segments, or of
    a part of the only one."""
    k, segments = rows.fields["k"], rows.fields["segments"]
    if k * segments <= deep or rows.dots:
        return 1, k, segments
    if rows.a == "rows":
        by_k = -(-k // -(-k // chunk))
        return -(-k // by_k), by_k, segments
    by_segments = max(1, chunk // k)
    return -(-segments // by_segments), k, by_segments


_SEGMENT_STEPS = {"table": "a_step", "lines": "segment_step"}  # where bytes between segments stand


def _chunks(rows: Rows, cut: Panels, tile: Tile, item: int, wide: int, shape: ConvShape) -> dict[str, int]:
    """``item`` and ``wide``: bytes of an operand and of a sum."""
    k, segments = rows.fields["k"], rows.fields["segments"]
    chunks, by_k, by_segments = tuning.choose(
        "conv depth",
        lambda: (*shape.key(), item),
        _cut(rows, _CHUNK, _DEEP),
        lambda: {f"about {chunk}": _cut(rows, chunk, deep) for chunk, deep in _OTHER_CHUNKS},
    )
    # behind the scratch tile, whose last vector may begin late
    after = rows.tile_at + (tile.rows * cut.columns + cut.lanes) * wide
    return {
        "chunks": chunks,
        "chunk_a": by_k * item if rows.a == "rows" else by_segments * rows.fields[_SEGMENT_STEPS[rows.a]],
        "chunk_depth": by_k * by_segments,
        "chunk_k": by_k,
        "chunk_segments": by_segments,
        "last_k": k - (chunks - 1) * by_k if rows.a == "rows" else k,
        "last_segments": segments if rows.a == "rows" else segments - (chunks - 1) * by_segments,
        "partial_at": -(-after // 64) * 64,
        "partial_bytes": tile.rows * cut.columns * wide,
    }


def micro_codes(dtype: DType, used: set[int], cut: Panels, a: Layout) -> tuple[CodeAt, ...]:
    """Micro-kernels by rows - 1, for whole panels and then for the last one; places nobody calls repeat another."""
    return _micro_codes(dtype, frozenset(used), cut.vectors if cut.count > 1 else cut.rest, cut.rest, a)


@functools.cache
def _micro_codes(dtype: DType, used: frozenset[int], whole: int, rest: int, a: Layout) -> tuple[CodeAt, ...]:
    found: list[CodeAt] = []
    for vectors in (whole, rest):
        for rows in range(1, MOST_ROWS + 1):
            near = min(used, key=lambda u: abs(u - rows))
            found.append(_micro(dtype, near, vectors, a))
    return tuple(found)


@functools.cache
def _micro(dtype: DType, rows: int, vectors: int, a: Layout) -> CodeAt:
    if dtype is DType.float16:
        return CodeAt(HalfMicro(rows, vectors, a).spec())
    return CodeAt(Micro(register_type(dtype), rows, vectors, a).spec())


def pixels_even(view: View, sizes: tuple[int, int, int]) -> bool:
    """Whether a view's pixels lie evenly apart, across the ends of rows too."""
    place = Pixels.of(view)
    return (sizes[1] == 1 or place.h == place.w * sizes[2]) and (
        sizes[0] == 1 or place.d == place.w * sizes[2] * sizes[1]
    )
