"""Matrix products against float64 NumPy: shapes, strides, batches, epilogues, instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier import dtypes
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
F32, F64 = DType.float32, DType.float64
KEPT: dict[Any, Any] = {}  # compiled kernels: later cases use them again
isas = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def random(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def poisoned(shape: tuple[int, ...], dtype: Any = np.float32, shift: int = 0) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return aligned(size, shift=shift).view(dtype).reshape(shape)


def product(
    a: Array,
    b: Array,
    isa: Isa,
    *,
    out: Array | None = None,
    packed: bool = False,
    epilogue: Epilogue | None = None,
    operands: tuple[tuple[View, Array], ...] = (),
    alpha: float = 1.0,
    threads: int = 1,
    split: int = 1,
) -> Array:
    if out is None:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = poisoned((*batch, a.shape[-2], b.shape[-1]), a.dtype)
    av, ov = view_of(a), view_of(out, "output")
    bound = {av.storage: a, ov.storage: out, **{v.storage: x for v, x in operands}}
    if packed:
        right: Any = pack_b(b, isa, rows_hint=a.shape[-2])
    else:
        right = view_of(b)
        bound[right.storage] = b
    launches = matmul(av, right, ov, isa, epilogue=epilogue, threads=threads, alpha=alpha)
    runner = Runner(launches, isa, bound, split=split)
    KEPT.update({(isa.name, spec): kernel for spec, kernel in runner.kernels.items()})
    runner()
    return out


def check(got: Array, a: Array, b: Array, expected: Array | None = None) -> None:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    expected = wide_a @ wide_b if expected is None else expected
    bound = (np.abs(wide_a) @ np.abs(wide_b) + 1.0) * np.finfo(a.dtype).eps * (4 + np.sqrt(a.shape[-1]))
    assert got.shape == expected.shape
    assert np.all(np.abs(got - expected) <= bound), float(np.max(np.abs(got - expected) / bound))


def operand(array: Array, strides: tuple[int, int, int]) -> tuple[Operand, tuple[View, Array]]:
    view = view_of(array)
    return Operand(view, strides), (view, array)


ACC = Result(0, F32)


def op(name: str, *args: Expr, dtype: DType = F32) -> Op:
    return Op(name, args, dtype)


@isas
@pytest.mark.parametrize("packed", [True, False])
def test_every_small_size(isa: Isa, packed: bool) -> None:
    for m in (1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25, 49):
        for n, k in ((1, 3), (7, 5), (16, 1), (17, 16), (33, 9), (48, 2), (63, 31), (65, 4), (70, 70)):
            a, b = random((m, k), m), random((k, n), n)
            check(product(a, b, isa, packed=packed), a, b)
