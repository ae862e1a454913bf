"""Products of every type and layout with epilogues, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from ranvier import dtypes
from ranvier.codegen.loops.ir import Const, Epilogue, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.codegen.triton.gemm import Tile, product, tile_for, tiles
from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from tests.codegen.nest_oracle import strided
from tests.torch.codegen.checking import run

Array = np.ndarray[Any, Any]
F32 = DType.float32
SMALL = Tile(16, 32, 32, 4, 2)
TOLERANCE = {DType.float32: 1e-5, DType.float16: 4e-3, DType.bfloat16: 3e-2, DType.int8: 0.0}


def multiplied(
    a: Array,
    b: Array,
    *,
    tile: Tile | None = SMALL,
    out_dtype: DType | None = None,
    epilogue: Epilogue | None = None,
    more: dict[Any, Array] | None = None,
) -> Array:
    va, sa, base_a = strided(a)
    vb, sb, base_b = strided(b)
    batch, m, n = a.shape[0], a.shape[1], b.shape[2]
    dtype = out_dtype or (DType.int32 if va.dtype is DType.int8 else va.dtype)
    out = View.temporary(dtype, (batch, m, n))
    made = product(va, vb, out, epilogue, tile=tile)
    memory = {sa: base_a, sb: base_b, out.storage: np.zeros(out.shape, dtype.numpy), **(more or {})}
    return run(made, memory)[out.storage].view(dtype.numpy).reshape(out.shape)


def matrices(dtype: DType, *shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if dtype is DType.int8:
        return rng.integers(-100, 100, shape).astype(np.int8)
    return rng.normal(size=shape).astype(dtype.numpy)


def close(got: Array, a: Array, b: Array, tolerance: float) -> None:
    wide = np.int64 if a.dtype == np.int8 else np.float64
    want = a.astype(wide) @ b.astype(wide)
    scale = 1 if wide is np.int64 else np.sqrt(a.shape[-1])
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (16, 32, 64), (33, 31, 70), (5, 65, 129)])
def test_sizes(dtype: DType, m: int, n: int, k: int) -> None:
    a, b = matrices(dtype, 1, m, k), matrices(dtype, 1, k, n, seed=1)
    close(multiplied(a, b), a, b, TOLERANCE[dtype])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_transposed_operands_and_batches(left: bool, right: bool) -> None:
    a = matrices(F32, 3, 40, 20).transpose(0, 2, 1) if left else matrices(F32, 3, 20, 40)
    b = matrices(F32, 1, 24, 40, seed=1).transpose(0, 2, 1) if right else matrices(F32, 1, 40, 24, seed=1)
    b = np.broadcast_to(b, (3, *b.shape[1:]))
    close(multiplied(a, b), a, b, 1e-5)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("k", [64, 130, 257])
def test_k_in_parts(parts: int, k: int) -> None:
    a, b = matrices(F32, 2, 3, k), matrices(F32, 2, k, 40, seed=1)
    bias = matrices(F32, 40, seed=2)
    view = View.dense(View.temporary(F32, (40,)).storage, F32, (40,))
    added = Op("add", (Result(0, F32), Load(0, F32)), F32)
    epilogue = Epilogue(Op("max", (added, Const(0.0, F32)), F32), (Operand(view, (0, 0, 1)),))
    tile = Tile(16, 32, 32, 4, 2, parts)
    got = multiplied(a, b, tile=tile, epilogue=epilogue, more={view.storage: bias})
    want = np.maximum(a.astype(np.float64) @ b.astype(np.float64) + bias, 0)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_epilogue_with_bias_residual_and_gelu() -> None:
    m, n, k = 20, 45, 50
    a, b = matrices(DType.float16, 1, m, k), matrices(DType.float16, 1, k, n, seed=1)
    bias, residual = matrices(F32, n, seed=2), matrices(DType.float16, m, n, seed=3)
    vb, vr = View.temporary(F32, (n,)), View.temporary(DType.float16, (m, n))
    x = Op("add", (Result(0, F32), Load(0, F32)), F32)
    scaled = Op("mul", (x, Const(0.7071067811865476, F32)), F32)
    gelu = Op(
        "mul", (Op("mul", (x, Const(0.5, F32)), F32), Op("add", (Op("erf", (scaled,), F32), Const(1.0, F32)), F32)), F32
    )
    value = Op("add", (gelu, Op("cast", (Load(1, DType.float16),), F32)), F32)
    epilogue = Epilogue(value, (Operand(vb, (0, 0, 1)), Operand(vr, (0, n, 1))))
    got = multiplied(a, b, epilogue=epilogue, more={vb.storage: bias, vr.storage: residual})
    from math import erf

    sums = (a.astype(np.float64) @ b.astype(np.float64) + bias)[0]
    want = sums * 0.5 * (1 + np.vectorize(erf)(sums / np.sqrt(2))) + residual
    np.testing.assert_allclose(got[0].astype(np.float64), want, atol=2e-2, rtol=2e-3)


def test_integers_are_scaled_by_the_epilogue() -> None:
    a, b = matrices(DType.int8, 1, 18, 40), matrices(DType.int8, 1, 40, 33, seed=1)
    scale = np.abs(matrices(F32, 33, seed=2))
    view = View.temporary(F32, (33,))
    value = Op("mul", (Op("cast", (Result(0, DType.int32),), F32), Load(0, F32)), F32)
    epilogue = Epilogue(value, (Operand(view, (0, 0, 1)),))
    got = multiplied(a, b, out_dtype=F32, epilogue=epilogue, more={view.storage: scale})
    np.testing.assert_allclose(got, (a.astype(np.int64) @ b.astype(np.int64)) * scale.astype(np.float64), rtol=1e-6)


def test_sums_of_nothing() -> None:
    a, b = matrices(F32, 1, 3, 0), matrices(F32, 1, 0, 5)
    value = Op("add", (Result(0, F32), Const(2.0, F32)), F32)
    np.testing.assert_array_equal(multiplied(a, b, epilogue=Epilogue(value)), np.full((1, 3, 5), 2.0))


def test_tiles_fit_the_product() -> None:
    assert tile_for(1, 4096, 4096, 4096, 2).rows == 128
    few = tile_for(1, 1, 4096, 4096, 2)
    assert few.rows == 16 and few.parts > 1
    assert tile_for(1, 4096, 4096, 4096, 4).columns <= 128
    assert tile_for(1, 1, 16, 16, 2).parts == 1
    assert len(set(tiles(1, 512, 512, 512, 2))) == len(tiles(1, 512, 512, 512, 2)) > 4


def test_other_types_are_declined() -> None:
    a = View.temporary(dtypes.of("float16"), (1, 4, 4))
    with pytest.raises(NotSupported, match="float16 and float32"):
        product(a, View.temporary(F32, (1, 4, 4)), View.temporary(F32, (1, 4, 4)))
