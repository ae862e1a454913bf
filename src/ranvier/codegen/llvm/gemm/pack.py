"""B in the order the micro-kernels read it: panel after panel, k after k, whole vectors, zeros past the last column.

bfloat16 weights are packed in pairs along K where an instruction multiplies pairs, and tiles (``amx``) want K padded
with zeros besides; elsewhere weights of 16 bits are packed as they are, and widened by the micro-kernel, or multiplied
as float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ranvier import dtypes
from ranvier.codegen import tuning
from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.amx import micro as amx
from ranvier.codegen.llvm.builder import Fn, Module, Val, vector
from ranvier.codegen.llvm.control import Launched, batch_offsets
from ranvier.codegen.llvm.elements import NARROW
from ranvier.codegen.llvm.gemm.blocks import Panels, best_tile
from ranvier.codegen.llvm.gemm.halves import PANEL, multiplies_halves
from ranvier.codegen.llvm.gemm.tiles import tiles
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_WIDENED_ROWS = 16
_ROWS_AT_ONCE = 8
_WHOLE_ROWS = 16  # up to so many rows of A, those of a panel of tiles stay whole: one row of A reads them as vectors


@dataclass(frozen=True)
class PackedB:
    """A packed matrix, or a dense stack of them."""

    storage: Storage
    dtype: DType
    batch: tuple[int, ...]
    k: int
    n: int
    panels: Panels
    deep: int  # K as it is packed: elements, or pairs and zeros behind them
    pairs: bool = False
    apart: bool = False  # tiles of wide panels follow each other, as ``amx/micro.py`` describes
    halves: bool = False  # to be multiplied as float16

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def entry(self) -> int:
        """Elements, or pairs, of one matrix."""
        return self.k if self.n == 1 else self.panels.packed_elements(self.deep)

    @property
    def column(self) -> View:
        """The one column there is: it is kept as it is, for products that are dots rather than a vector of zeros."""
        return View.dense(self.storage, self.dtype, (*self.batch, self.k, self.n))


def pack_b(
    b: Array, isa: Isa, *, rows_hint: int, dtype: DType | None = None, vectors: int = 0, halves: bool = False
) -> PackedB:
    """Constant weights [..., K, N] packed once. ``rows_hint`` is the M they will usually meet, ``vectors`` the width of
    panels where that was decided elsewhere.

    ``dtype`` is the type they are multiplied in, their own where it is not given: float32 weights may become bfloat16.
    Those of 16 bits that every use would have to widen are widened now if they meet many rows: then it is the
    arithmetic that takes the time, and not their way through memory. With ``halves``, float16 arithmetic multiplies
    float16 weights.
    """
    dtype = dtype or dtypes.of(b)
    b = b.astype(dtype.numpy, copy=False)
    *batch, k, n = b.shape
    item = 8 if dtype is DType.float64 else 4  # of sums
    lanes = isa.lanes(item)
    pairs = dtype is DType.bfloat16 and n > 1 and multiplies_pairs(isa)
    halves = halves and dtype is DType.float16 and n > 1 and multiplies_halves(isa)
    if halves:
        vectors = PANEL
    elif dtype in NARROW and not pairs and rows_hint > _WIDENED_ROWS:
        dtype = DType.float32
        b = b.astype(np.float32)
    deep = pair_depth(k, isa) if pairs else k
    panels = Panels.of(n, lanes, vectors or panel_vectors(max(1, rows_hint), n, k, isa, item, pairs))
    tiled = pairs and amx.suits(isa, DType.bfloat16, DType.bfloat16)
    apart = tiled and rows_hint > _WHOLE_ROWS and panels.cut.size == amx.VECTORS
    if n == 1:
        return PackedB(Storage.packed(np.ascontiguousarray(b)), dtype, tuple(batch), k, n, panels, k)
    flat = b.reshape(math.prod(batch), k, n)
    unit = np.dtype(np.int32) if pairs else b.dtype
    packed = packed_empty((len(flat), panels.packed_elements(deep)), unit)
    width = panels.cut.size * lanes
    for each, target in zip(flat, packed):
        source = _paired(each, deep) if pairs else each
        wide = panels.cut.large * width
        _fill(source[:, :wide], target[: wide * deep], width)
        _fill(source[:, wide:], target[wide * deep :], width - lanes)
        if apart:
            _take_apart(target[: wide * deep], width, lanes)
    return PackedB(Storage.constant(packed), dtype, tuple(batch), k, n, panels, deep, pairs, apart, halves)


def multiplies_pairs(isa: Isa) -> bool:
    """Whether an instruction multiplies bfloat16 two at a time."""
    return amx.suits(isa, DType.bfloat16, DType.bfloat16) or isa.has("avx512bf16")


def pair_depth(k: int, isa: Isa) -> int:
    """Pairs along K as they are packed."""
    pairs = -(-k // 2)
    return amx.padded_groups(pairs) if amx.suits(isa, DType.bfloat16, DType.bfloat16) else pairs


def panel_vectors(m: int, n: int, k: int, isa: Isa, item: int, pairs: bool) -> int:
    """The width of the panels for a product."""
    if pairs and amx.suits(isa, DType.bfloat16, DType.bfloat16):
        return amx.VECTORS
    return best_tile(m, n, k, isa, item).vectors


def tuned_vectors(m: int, shape: tuple[int, ...], dtype: DType, isa: Isa) -> int:
    """The width of the panels of weights of this shape that meet ``m`` rows, where it was measured; else 0."""
    tiled = dtype is DType.bfloat16 and amx.suits(isa, DType.bfloat16, DType.bfloat16)
    if not tuning.consulted() or tiled or shape[-1] == 1:
        return 0
    k, n = shape[-2:]
    usual = panel_vectors(max(1, m), n, k, isa, 8 if dtype is DType.float64 else 4, pairs=False)

    def others() -> dict[str, int]:
        return {f"{t.rows} x {t.vectors}": t.vectors for t in tiles(isa) if t.vectors != usual}

    return tuning.choose("product panels", lambda: (m, *shape, dtype.name, "constant"), 0, others)


def _paired(b: Array, deep: int) -> Array:
    """[K, N] of 16 bits as [``deep``, N] of 32: two along K beside each other, zeros behind the last."""
    k, n = b.shape
    found = np.zeros((deep, n, 2), np.uint16)
    bits = b.view(np.uint16)
    found[: -(-k // 2), :, 0] = bits[::2]
    found[: k // 2, :, 1] = bits[1::2]
    return found.view(np.int32)[:, :, 0]


def _fill(source: Array, target: Array, width: int) -> None:
    """Columns into panels of one width."""
    k, n = source.shape
    if not target.size:
        return
    out = target.reshape(-1, k, width)
    whole = n // width
    # rows that lie one after the other are taken a few at a time: NumPy would walk down single panels, far from each
    # other in every row; columns are walked along in any case
    step = _ROWS_AT_ONCE if source.strides[1] == source.itemsize else max(1, k)
    for start in range(0, k, step):
        rows = source[start : start + step, : whole * width]
        out[:whole, start : start + step] = rows.reshape(len(rows), whole, width).transpose(1, 0, 2)
    if whole < len(out):
        rest = n - whole * width
        out[whole, :, :rest] = source[:, whole * width :]
        out[whole, :, rest:] = 0


def _take_apart(panels: Array, width: int, lanes: int) -> None:
    """Tiles that lie beside each other in a panel one after the other."""
    tiles = panels.reshape(-1, amx.STEP, width // lanes, lanes)
    tiles.reshape(-1, width // lanes, amx.STEP, lanes)[:] = tiles.swapaxes(1, 2).copy()


# -- at run time ------------------------------------------------------------------------------------------------------

Order = Literal["rows", "columns", "any"]
# positions in dims
_RANK, _PANELS, _WIDE, _LARGE, _N, _K, _STEP_K, _STEP_N, _CHUNK, _CHUNKS, _DEEP, _SOURCE_K, _BATCH = range(13)
_PER_BATCH = 3  # extent, stride of the source, stride of the target (elements)
_BESIDE = 2  # square blocks along columns taken at a time: lines of a cache are fetched in pairs
_CHUNK_K = 256  # k steps per tile: enough to be worth a call, few enough to spread over threads …
_CHUNK_ELEMENTS, _LEAST_K = 1 << 16, 64  # … and fewer of long rows, but not so few that columns become short


def pack_launch(
    b: View, panels: Panels, batch: tuple[tuple[int, int, int], ...], target: Storage, deep: int | None = None
) -> Launch:
    """Packs the last two axes of ``b``; ``batch`` lists (extent, source stride, target stride) of outer axes.

    Panels are ``deep`` steps of K, where that is more than ``b`` has; zeros follow.
    """
    k, n = b.shape[-2:]
    deep = k if deep is None else deep
    step_k, step_n = b.strides[-2:]
    item = b.dtype.numpy.itemsize
    order: Order = "rows" if step_n == 1 or n == 1 else "columns" if step_k == 1 or k == 1 else "any"
    entries = 1
    for extent, _, _ in batch:
        entries *= extent
    dims, tiles = pack_dims(panels, batch, n, k, (step_k, step_n), deep, k)
    elements = entries * panels.packed_elements(deep)
    return Launch(
        _pack_spec(order, item, panels.lanes),
        (At(b.storage, b.offset * item), At(target)),
        dims,
        tiles=entries * tiles,
        writes=(target,),
        traffic=2.0 * elements * item,
        label="pack",
    )


def pack_dims(
    panels: Panels,
    batch: tuple[tuple[int, int, int], ...],
    n: int,
    k: int,
    steps: tuple[int, int],
    deep: int,
    source_k: int,
) -> tuple[tuple[int, ...], int]:
    """The numbers of a packing kernel, and its tiles per matrix; ``k`` are steps of panels, ``source_k`` of the B."""
    chunk = min(deep, _CHUNK_K, max(_LEAST_K, _CHUNK_ELEMENTS // max(1, panels.cut.size * panels.lanes)))
    chunks = -(-deep // chunk)
    dims = (
        *(len(batch), panels.cut.count, panels.cut.size * panels.lanes, panels.cut.large),
        *(n, k, *steps, chunk, chunks, deep, source_k),
        *(x for each in batch for x in each),
    )
    return dims, panels.cut.count * chunks


def _pack_spec(order: Order, item: int, lanes: int) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        Packer(module.kernel(symbol), order, f"i{item * 8}", lanes).emit()

    return KernelSpec(f"pack {order} {item * 8}", ("gemm pack", 2, order, item, lanes), emit)


class Packer(Launched):
    """Writes a kernel that packs; ``lanes`` are those of a vector of a panel."""

    def __init__(self, fn: Fn, order: Order, element: str, lanes: int, source: str | None = None) -> None:
        super().__init__(fn)
        self.order, self.element, self.lanes = order, element, lanes
        self.source = source or element
        self.kind = vector(element, self.lanes)

    def source_k(self) -> Val:
        return self.dim(_SOURCE_K)

    def emit(self) -> None:
        f, lanes = self.fn, self.lanes
        source, target = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(2))
        wide, large, k_all, n = self.dim(_WIDE), self.dim(_LARGE), self.dim(_K), self.dim(_N)
        self.step_k, self.step_n = self.dim(_STEP_K), self.dim(_STEP_N)
        panels, chunk, chunks, deep = self.dim(_PANELS), self.dim(_CHUNK), self.dim(_CHUNKS), self.dim(_DEEP)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            k0 = f.rem(tile, chunks) * chunk
            end = f.min_(k0 + chunk, deep)
            k1 = f.min_(end, k_all)
            rest = f.div(tile, chunks)
            panel = f.rem(rest, panels)
            from_, to = batch_offsets(f, self.dim, f.div(rest, panels), _RANK, _BATCH, 2)
            narrow = f.max_(panel - large, 0)
            column = panel * wide - narrow * lanes
            self.width = f.select(f.cmp("slt", panel, large), wide, wide - lanes)
            self.count = f.min_(self.width, n - column)
            here = f.gep(source, from_ + column * self.step_n, self.source)
            there = f.gep(target, to + column * deep, self.element)
            if self.order == "columns":
                with f.if_(f.cmp("slt", k0, k1)):
                    self._blocks(here, there, k0, k1)
            else:
                self.steps(here, there, k0, k1)
            with f.loop(f.max_(k0, k_all), end) as k, f.loop(0, self.width, lanes) as j:
                f.store(f.zero(self.kind), f.gep(there, k * self.width + j, self.element))
        f.ret()

    def steps(self, here: Val, there: Val, k0: Val, k1: Val) -> None:
        """k after k; every step is a row of the panel."""
        f = self.fn
        with f.loop(k0, k1) as k:
            row = f.gep(here, k * self.step_k, self.element)
            self._row(lambda j: row if j is None else f.gep(row, j * self.step_n, self.element), there, k)

    def _row(self, at: Callable[[Val | None], Val], there: Val, k: Val) -> None:
        """One k: the columns that exist, then zeros up to the width."""
        f, lanes = self.fn, self.lanes
        target = f.gep(there, k * self.width, self.element)
        whole = f.and_(self.count, -lanes)
        if self.order == "rows":
            with f.loop(0, whole, lanes) as j:
                f.store(f.load(self.kind, f.gep(at(None), j, self.element)), f.gep(target, j, self.element))
            with f.loop(whole, self.count) as j:
                f.store(f.load(self.element, f.gep(at(None), j, self.element)), f.gep(target, j, self.element))
        else:
            with f.loop(0, self.count) as j:
                f.store(f.load(self.element, at(j)), f.gep(target, j, self.element))
        with f.loop(self.count, self.width) as j:
            f.store(f.const(self.element, 0), f.gep(target, j, self.element))

    def _blocks(self, here: Val, there: Val, k0: Val, k1: Val) -> None:
        """Square blocks read along k, transposed in registers and written along n."""
        f, lanes = self.fn, self.lanes
        k_whole = k0 + f.and_(k1 - k0, -lanes)
        n_whole = f.and_(self.count, -lanes)
        with f.loop(k0, k_whole, _BESIDE * lanes) as begun:
            past = f.min_(begun + _BESIDE * lanes, k_whole)
            with f.loop(0, n_whole, lanes) as j, f.loop(begun, past, lanes) as k:
                block = []
                for lane in range(lanes):
                    column = f.gep(here, (j + lane) * self.step_n + k, self.element)
                    block.append(f.load(self.kind, column))
                for lane, value in enumerate(transposed(f, block)):
                    f.store(value, f.gep(there, (k + lane) * self.width + j, self.element))
            with f.loop(begun, past) as row:
                self._elements(here, there, row, n_whole)
        with f.loop(k_whole, k1) as k:
            self._elements(here, there, k, f.i64(0))

    def _elements(self, here: Val, there: Val, k: Val, start: Val) -> None:
        f = self.fn
        target = f.gep(there, k * self.width, self.element)
        with f.loop(start, self.count) as j:
            f.store(
                f.load(self.element, f.gep(here, j * self.step_n + k, self.element)), f.gep(target, j, self.element)
            )
        with f.loop(self.count, self.width) as j:
            f.store(f.const(self.element, 0), f.gep(target, j, self.element))


def transposed(f: Fn, block: list[Val]) -> list[Val]:
    """A square block of vectors with rows and lanes exchanged: one bit of both indices at a time."""
    lanes, bit = len(block), 1
    block = list(block)
    while bit < lanes:
        for i in range(lanes):
            if i & bit:
                continue
            a, b = block[i], block[i | bit]
            block[i] = f.shuffle(a, b, [lanes + (l ^ bit) if l & bit else l for l in range(lanes)])
            block[i | bit] = f.shuffle(a, b, [lanes + l if l & bit else l ^ bit for l in range(lanes)])
        bit *= 2
    return block
