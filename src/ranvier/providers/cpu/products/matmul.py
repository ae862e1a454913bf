"""Matrix products on the CPU: weights are packed once, everything else is addressed where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.exprs import HALVES
from ranvier.codegen.definitions.products import folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.gemm import PackedB, matmul, pack_b
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.codegen.llvm.gemm.pack import multiplies_pairs, tuned_vectors
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.tensors import Same
from ranvier.providers.cpu.narrow.rates import Pace, product_pace
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Target
from ranvier.varying import value_at

Array = np.ndarray[Any, Any]


def content(view: View) -> Array:
    """The data of a view of a constant."""
    base = view.storage.array
    assert base is not None
    flat = base.reshape(-1).view(view.dtype.numpy)[view.offset :]
    item = view.dtype.numpy.itemsize
    return np.lib.stride_tricks.as_strided(flat, view.shape, [s * item for s in view.strides], writeable=False)


def _rows_class(m: int) -> int:
    """Weights are packed for a kind of M, not for each: a few forms at most are kept."""
    return 1 if m <= 1 else 8 if m <= 16 else 256


def packed_b(r: Realiser, b: View, m: int, dtype: DType | None = None, *, halves: bool = False) -> PackedB:
    if halves:  # one form serves any number of rows
        key: tuple[object, ...] = ("halves of b", Same(b.storage.array), b.offset, b.shape, b.strides)
        return r.packs.get(key, lambda: pack_b(content(b), r.isa, rows_hint=1, dtype=dtype, halves=True))
    hint = _rows_class(m)
    vectors = tuned_vectors(m, b.shape, dtype or b.dtype, r.isa)
    key = ("b", Same(b.storage.array), b.offset, b.shape, b.strides, hint, dtype, vectors)
    return r.packs.get(key, lambda: pack_b(content(b), r.isa, rows_hint=hint, dtype=dtype, vectors=vectors))


def multiply(
    b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
) -> Value:
    """``alpha`` times x [..., M, K] times y [..., K, N], of floats."""
    dtype, left = b.dtype(x), b.shape(x)
    result = tuple(shape)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        left, right = views
        halves = r.multiplies is DType.float16 and multiplies_halves(r.isa)
        rows = left.shape[-2] * (math.prod(left.shape[:-2]) if right.rank == 2 else 1)
        factor: View | PackedB = right
        if right.storage.kind == "const" and right.size > 256:
            factor = packed_b(r, right, rows, left.dtype if left.dtype in HALVES else None, halves=halves)
        how: dict[str, Any] = {"epilogue": epilogue, "threads": r.threads, "alpha": alpha, "halves": halves}
        return matmul(left, factor, target, r.isa, **how)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        batch = folded_stride(result[:-2], strides[:-2])
        return None if batch is None else (batch, strides[-2], strides[-1])

    flops = 2.0 * math.prod(result) * left[-1]
    narrow = _narrow if dtype is DType.float32 else None

    def pace(target: Target) -> Pace:
        (depth,) = value_at([left[-1]], 0)
        return product_pace(target.isa, target.narrow or DType.bfloat16, max(1, depth))

    return b.contraction([x, y], realise, fold, dtype, result, out, flops=flops, narrow=narrow, pace=pace)


def _narrow(target: Target) -> str | None:
    """Why a product cannot be had of operands of 16 bits. Where float16 has no arithmetic it is widened by the
    micro-kernel: that saves bytes."""
    if target.narrow is DType.bfloat16 and not multiplies_pairs(target.isa):
        return f"{target.isa.name} multiplies no bfloat16"
    return None
