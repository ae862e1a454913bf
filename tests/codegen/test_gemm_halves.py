"""Products by float16 arithmetic against float64 NumPy on the same rounded numbers."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.gemm.halves import CHUNK, HalfMicro, multiplies_halves, rows_for
from ranvier.codegen.llvm.isa import TABLE, with_extensions
from ranvier.codegen.loops.ir import Const, Epilogue, Load, Op, Operand, Result
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
F16, F32 = np.float16, np.float32
ISA = ISAS[0]
HALVES = with_extensions(next(i for i in TABLE if i.name == "neon"), frozenset({"dotprod", "fullfp16"}))
needs_halves = pytest.mark.skipif(not multiplies_halves(ISA), reason="this machine has no float16 arithmetic")
KEPT: dict[Any, Any] = {}  # compiled kernels: later cases use them again


def random(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F16)


def product(
    a: Array,
    b: Array,
    *,
    constant: bool,
    out: Array | None = None,
    epilogue: Epilogue | None = None,
    operands: tuple[tuple[Any, Array], ...] = (),
    alpha: float = 1.0,
    threads: int = 1,
) -> Array:
    if out is None:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])
        out = aligned(int(np.prod(shape)) * 4).view(F32).reshape(shape)
    av, ov = view_of(a), view_of(out, "output")
    bound = {av.storage: a, ov.storage: out, **{v.storage: x for v, x in operands}}
    if constant:
        right: Any = pack_b(b, ISA, rows_hint=a.shape[-2], dtype=DType.float16, halves=True)
    else:
        right = view_of(b)
        bound[right.storage] = b
    launches = matmul(av, right, ov, ISA, epilogue=epilogue, threads=threads, alpha=alpha, halves=True)
    runner = Runner(launches, ISA, bound, split=threads)
    KEPT.update(runner.kernels)
    runner()
    return out


def check(got: Array, a: Array, b: Array, expected: Array | None = None, scale: float = 1.0) -> None:
    """Sums of some steps are float16: each addition rounds to its eleven bits."""
    wide = [x.astype(np.float64) for x in (a, b)]
    expected = wide[0] @ wide[1] if expected is None else expected
    # the first product of a chunk is in CHUNK sums that are rounded, the last in one; errors are random
    limit = np.abs(wide[0]) @ np.abs(wide[1]) * scale * np.finfo(F16).eps / 2 * np.sqrt(CHUNK) + 1e-6
    if got.dtype == F16:
        limit = limit + np.abs(expected) * np.finfo(F16).eps
    assert got.shape == expected.shape
    off = np.abs(got.astype(np.float64) - expected)
    assert np.all(off <= limit), float(np.max(off / limit))


@needs_halves
@pytest.mark.parametrize("constant", [True, False])
def test_every_remainder(constant: bool) -> None:
    """Rows and columns around every tile, depths around a chunk."""
    rows = (1, 2, 5, 6, 7, 12, 13, 50)
    for m, (n, k) in itertools.product(
        rows, ((2, 33), (4, 1), (5, 2), (28, 63), (31, 64), (32, 65), (33, 200), (70, 129))
    ):
        a, b = random((m, k), m), random((k, n), n)
        check(product(a, b, constant=constant), a, b)


@needs_halves
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layouts_batches_and_threads(data: st.DataObject) -> None:
    """Operands plain, transposed, with gaps; batches on either side; results in both types."""

    def laid_out(rows: int, columns: int, seed: int) -> Array:
        how = data.draw(st.sampled_from(("plain", "transposed", "gaps")))
        if how == "transposed":
            return random((columns, rows), seed).T
        return random((rows, columns), seed) if how == "plain" else random((rows, columns + 3), seed)[:, 1:-2]

    m, n, k = (data.draw(st.integers(1, most)) for most in (40, 90, 150))
    a, b = laid_out(m, k, 1), laid_out(k, n, 2)
    if data.draw(st.booleans()):
        a = np.stack([a, a[::-1]])
    kind = data.draw(st.sampled_from((F32, F16)))
    out = aligned(max(1, a[..., 0].size * n) * 4)[: a[..., 0].size * n * np.dtype(kind).itemsize].view(kind)
    out = out.reshape(*a.shape[:-1], n)
    check(product(a, b, constant=data.draw(st.booleans()), out=out, threads=data.draw(st.integers(1, 3))), a, b)


@needs_halves
def test_everything_that_follows_is_float32() -> None:
    """A factor, a bias, a residual and a clamp, of sums that went through several chunks and blocks of K."""
    m, k, n = 20, 3000, 72
    a, b = random((m, k), 1), random((k, n), 2)
    bias, residual = (np.random.default_rng(s).standard_normal(shape).astype(F32) for s, shape in ((3, n), (4, (m, n))))
    views = view_of(bias, index=5), view_of(residual, index=6)
    value = Op(
        "add",
        (Op("add", (Result(0, DType.float32), Load(0, DType.float32)), DType.float32), Load(1, DType.float32)),
        DType.float32,
    )
    value = Op(
        "min",
        (Op("max", (value, Const(-30.0, DType.float32)), DType.float32), Const(30.0, DType.float32)),
        DType.float32,
    )
    epilogue = Epilogue(value, (Operand(views[0], (0, 0, 1)), Operand(views[1], (0, n, 1))))
    expected = np.clip(0.5 * (a.astype(np.float64) @ b.astype(np.float64)) + bias + residual, -30, 30)
    got = product(a, b, constant=True, epilogue=epilogue, operands=tuple(zip(views, (bias, residual))), alpha=0.5)
    check(got, a, b, expected, 0.5)


@needs_halves
def test_long_sums_are_no_worse_than_short_ones() -> None:
    """Whole sums in float16 would lose most of their bits: here terms all have one sign."""
    k = 4096
    a, b = np.full((3, k), 1.0, F16), np.full((k, 40), 0.25, F16)
    assert np.array_equal(product(a, b, constant=True), np.full((3, 40), k / 4, F32))


def test_without_its_arithmetic_float16_is_widened() -> None:
    isa = with_extensions(ISA, ISA.extensions - {"fullfp16"})
    packed = pack_b(random((64, 64), 1), isa, rows_hint=64, dtype=DType.float16, halves=True)
    assert not packed.halves and packed.dtype is DType.float32


@pytest.mark.parametrize("vectors", [1, 2, 7, 8])
def test_a_step_is_one_instruction_for_eight_columns(vectors: int) -> None:
    """Emitted for a machine that has it, whatever this one is."""
    rows = rows_for(vectors)
    module = Module(extremes=HALVES.extremes)
    HalfMicro(rows, vectors).spec().emit(module, "kernel", HALVES)
    code = compiler.assembly(str(module), HALVES)
    assert len(re.findall(r"fmla\s+v\d+\.8h", code)) >= rows * -(-vectors // 2)
    assert not re.search(r"fmla\s+v\d+\.4h", code)
