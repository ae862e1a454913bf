"""A B of the graph packed in pairs of bfloat16 along K, as tiles and the instruction for pairs want it.

Rows along N are taken two at a time and woven together; columns along K hold their pairs already, and are packed as
matrices of 32-bit elements. Whatever lies otherwise is first copied, and converted on the way.
"""

from __future__ import annotations

import math

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import nests, vmath
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.gemm.blocks import Panels
from ranvier.codegen.llvm.gemm.pack import Packer, pack_dims, pack_launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Expr, Index, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType

_SOURCES = {DType.bfloat16: "i16", DType.float32: "float"}
Batch = tuple[tuple[int, int, int], ...]  # extent, stride of the source, stride of the target


def pack_pairs(
    b: View, panels: Panels, batch: Batch, target: Storage, deep: int, isa: Isa, threads: int
) -> list[Launch]:
    """Packs the last two axes [K, N] of ``b``; target strides of ``batch`` count pairs."""
    k, n = b.shape
    steps = [stride for _, stride, _ in batch]
    if (b.strides[1] == 1 or n == 1) and b.dtype in _SOURCES:
        return [_woven(b, panels, batch, target, deep)]
    if not _holds_pairs(b, steps):
        extents = tuple(extent for extent, _, _ in batch)
        source = View(b.storage, b.dtype, (*extents, n, k), (*steps, b.strides[1], b.strides[0]), b.offset)
        copy, launches = converted(source, DType.bfloat16, isa, threads, even=True)
        batch = tuple((extent, s, to) for (extent, _, to), s in zip(batch, copy.strides))
        b = View(copy.storage, copy.dtype, (k, n), (1, copy.strides[-2]))
    else:
        launches = []
    words = View(b.storage, DType.int32, (-(-k // 2), n), (1, b.strides[1] // 2), b.offset // 2)
    halved = tuple((extent, s // 2, to) for extent, s, to in batch)
    return [*launches, pack_launch(words, panels, halved, target, deep)]


def _holds_pairs(b: View, steps: list[int]) -> bool:
    k, n = b.shape
    numbers = [k, b.offset, *steps, *([b.strides[1]] if n > 1 else [])]
    return b.dtype is DType.bfloat16 and (b.strides[0] == 1) and not any(x % 2 for x in numbers)


def converted(a: View, dtype: DType, isa: Isa, threads: int, *, even: bool = False) -> tuple[View, list[Launch]]:
    """A dense copy in another type; ``even`` rounds rows up to pairs, with a zero where there is nothing."""
    *outer, k = a.shape
    room = (*outer, k + k % 2) if even else a.shape
    target = View.dense(Storage.temporary(math.prod(room) * dtype.numpy.itemsize), dtype, room)
    guard = None
    if room != a.shape:
        guard = Op("lt", (Index(len(outer)), Size(k)), DType.bool)
    value: Expr = Load(0, a.element)
    if a.element is not dtype:
        value = Op("cast", (value,), dtype)
    operands = (Operand(a, a.strides, guard=guard, other=0), Operand(target, target.strides))
    return target, nests.launches(Nest(room, operands, (Map(((1, value),)),), label="convert"), isa, threads)


def _woven(b: View, panels: Panels, batch: Batch, target: Storage, deep: int) -> Launch:
    k, n = b.shape
    item = b.dtype.numpy.itemsize
    pairs = -(-k // 2)
    entries = math.prod(extent for extent, _, _ in batch)
    dims, tiles = pack_dims(panels, batch, n, pairs, (b.strides[0], 1), deep, k)
    return Launch(
        _weave_spec(b.dtype, panels.lanes),
        (At(b.storage, b.offset * item), At(target)),
        dims,
        tiles=entries * tiles,
        writes=(target,),
        traffic=float(entries * (k * n * item + panels.packed_elements(deep) * 4)),
        label="pack",
    )


def _weave_spec(dtype: DType, lanes: int) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Weaver(module, symbol, isa, dtype, lanes).emit()

    return KernelSpec(f"pack pairs {dtype.name}", ("gemm pack pairs", dtype.name, lanes), emit)


class _Weaver(Packer):
    """Two rows of B become one of pairs."""

    def __init__(self, module: Module, symbol: str, isa: Isa, dtype: DType, lanes: int) -> None:
        super().__init__(module.kernel(symbol), "rows", "i32", lanes, _SOURCES[dtype])
        self.isa, self.dtype = isa, dtype

    def steps(self, here: Val, there: Val, k0: Val, k1: Val) -> None:
        f, lanes = self.fn, self.lanes
        last = self.source_k() - 1
        whole = f.and_(self.count, -lanes)
        with f.loop(k0, k1) as k:
            upper = f.gep(here, k * 2 * self.step_k, self.source)
            # a last row without a second meets itself, and then zeros
            lower = f.gep(here, f.min_(k * 2 + 1, last) * self.step_k, self.source)
            alone = f.cmp("eq", k * 2, last)
            kept = f.select(alone, f.const("i32", 0), f.const("i32", -1))
            target = f.gep(there, k * self.width, self.element)

            def weave(j: Val, count: int, upper: Val = upper, lower: Val = lower, kept: Val = kept) -> Val:
                words = [self._words(f.gep(row, j, self.source), count) for row in (upper, lower)]
                second = f.and_(f.shl(words[1], 16), f.splat(kept, count))
                return f.or_(words[0], second)

            with f.loop(0, whole, lanes) as j:
                f.store(weave(j, lanes), f.gep(target, j, self.element))
            with f.loop(whole, self.count) as j:
                f.store(weave(j, 1), f.gep(target, j, self.element))
            with f.loop(self.count, self.width) as j:
                f.store(f.const(self.element, 0), f.gep(target, j, self.element))

    def _words(self, at: Val, count: int) -> Val:
        """Elements as the low halves of 32 bits."""
        f = self.fn
        raw = f.load(vector(self.source, count), at)
        if self.dtype is DType.float32:
            raw = vmath.float_to_bfloat(f, raw, self.isa)
        return f.cast(raw, "i32", signed=False)
