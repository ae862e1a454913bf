"""Operands of integer products in the form the micro-kernels read.

A is rows of unsigned bytes (or 16-bit words), B panels of signed ones; codes of the other sign are moved by 128, and
whoever asks for the product takes that out of the result again (:func:`moved_left`, :func:`moved_right`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.gemm.blocks import Panels, best_tile
from ranvier.codegen.llvm.gemm.pack import pack_launch
from ranvier.codegen.llvm.integer.dots import dot_of, shapes_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Map, Nest, Op, Operand, Size
from ranvier.codegen.storage import Storage, View, aligned_empty, dense_strides
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
HALF = 128


def moved_left(dtype: DType) -> int:
    """What is added to codes of A before they are multiplied."""
    return HALF if dtype is DType.int8 else 0


def moved_right(dtype: DType) -> int:
    """What is added to codes of B before they are multiplied."""
    return -HALF if dtype is DType.uint8 else 0


def turned(x: Expr) -> Expr:
    """Signed codes as unsigned ones and the reverse: the highest bit stands for 128 in the one, -128 in the other."""
    other = DType.uint8 if x.dtype is DType.int8 else DType.int8
    return Op(
        "bits", (Op("bitxor", (x, Const(HALF - 256 if x.dtype is DType.int8 else HALF, x.dtype)), x.dtype),), other
    )


def signed(b: Array) -> Array:
    """Codes of B as the product sees them."""
    return b if b.dtype == np.int8 else (b ^ np.uint8(HALF)).view(np.int8)


def groups(k: int, isa: Isa) -> int:
    """32-bit groups that K codes fill."""
    return -(-k // dot_of(isa).group)


@dataclass(frozen=True)
class PackedCodes:
    """A packed matrix of codes, or a dense stack of them: panel after panel, group after group of K."""

    storage: Storage
    batch: tuple[int, ...]
    k: int  # groups
    n: int
    panels: Panels

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def entry(self) -> int:
        """Groups of one matrix."""
        return self.panels.packed_elements(self.k)


def grouped(b: Array, isa: Isa) -> Array:
    """Codes [..., K, N] as int32 groups [..., K / group, N], zeros behind the last."""
    dot = dot_of(isa)
    *batch, k, n = b.shape
    deep = groups(k, isa)
    padded = np.zeros((*batch, deep * dot.group, n), dot.right.numpy)
    padded[..., :k, :] = signed(b)
    beside = padded.reshape(*batch, deep, dot.group, n).swapaxes(-1, -2)
    words: Array = np.ascontiguousarray(beside).view(np.int32)[..., 0]
    return words


def panels_for(m: int, n: int, deep: int, isa: Isa) -> Panels:
    return Panels.of(n, isa.lanes(4), best_tile(max(1, m), n, deep, shapes_of(isa), 4).vectors)


def pack_codes(b: Array, isa: Isa, *, rows_hint: int) -> PackedCodes:
    """Constant codes [..., K, N] packed once. ``rows_hint`` is the M they will usually meet."""
    words = grouped(b, isa)
    *batch, deep, n = words.shape
    panels = panels_for(rows_hint, n, deep, isa)
    packed = aligned_empty((*batch, panels.packed_elements(deep)), np.dtype(np.int32))
    packed[...] = 0
    for k in range(panels.cut.count):
        first, end = (panels.cut.start(x) * panels.lanes for x in (k, k + 1))
        room = packed[..., first * deep : end * deep].reshape(*batch, deep, end - first)
        part = words[..., first : min(end, n)]
        room[..., : part.shape[-1]] = part
    return PackedCodes(Storage.packed(packed), tuple(batch), deep, n, panels)


def pack_at_run(b: View, m: int, isa: Isa, threads: int) -> tuple[PackedCodes, list[Launch]]:
    """Codes that are a tensor of the graph [..., K, N]: grouped by one pass, put into panels by a second."""
    dot = dot_of(isa)
    *batch, k, n = b.shape
    deep, entries = groups(k, isa), math.prod(batch)
    extents = (*batch, deep, n, dot.group)
    target = View.temporary(dot.right, extents)
    strides = (*b.strides[:-2], dot.group * b.strides[-2], b.strides[-1], b.strides[-2])
    guard, other = None, 0
    if k % dot.group:
        axis = len(batch)
        place = Op("add", (Op("mul", (Index(axis), Size(dot.group)), DType.int64), Index(axis + 2)), DType.int64)
        guard, other = Op("lt", (place, Size(k)), DType.bool), -moved_right(b.dtype)
    value: Expr = Load(0, b.dtype)
    value = _cast(turned(value) if b.dtype is DType.uint8 else value, dot.right)
    operands = (Operand(b, strides, guard=guard, other=other), Operand(target, target.strides))
    launches = nests.launches(Nest(extents, operands, (Map(((1, value),)),), label="group"), isa, threads)
    panels = panels_for(m, n, deep, isa)
    size = panels.packed_elements(deep)
    storage = Storage.temporary(entries * size * 4, "packed")
    words = View(target.storage, DType.int32, (deep, n), (n, 1))
    table = ((entries, deep * n, size),) if entries > 1 else ()
    if size and entries:
        launches.append(pack_launch(words, panels, table, storage))
    return PackedCodes(storage, tuple(batch), deep, n, panels), launches


def _cast(x: Expr, dtype: DType) -> Expr:
    return x if x.dtype is dtype else Op("cast", (x,), dtype)


def left_codes(a: View, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """Rows of A as 32-bit groups: where they lie if they can be read there, else in a temporary."""
    dot = dot_of(isa)
    *outer, k = a.shape
    deep = groups(k, isa)
    if a.dtype is dot.left and k % dot.group == 0 and (a.strides[-1] == 1 or k == 1):
        steps = [s if d != 1 else 0 for s, d in zip(a.strides[:-1], outer)]
        if not any(s % 4 for s in steps) and a.offset % 4 == 0:
            return View(a.storage, DType.int32, (*outer, deep), (*(s // 4 for s in steps), 1), a.offset // 4), []
    room = (*outer, deep * dot.group)
    target = View.dense(Storage.temporary(math.prod(room) * dot.left.numpy.itemsize), dot.left, room)
    value: Expr = Load(0, a.dtype)
    value = _cast(turned(value) if a.dtype is DType.int8 else value, dot.left)
    # what stands behind the last code of a row meets zeros of B
    operands = (Operand(a, a.strides), Operand(target, target.strides))
    launches = nests.launches(Nest(a.shape, operands, (Map(((1, value),)),), label="codes"), isa, threads)
    words = (*outer, deep)
    return View(target.storage, DType.int32, words, dense_strides(words)), launches
