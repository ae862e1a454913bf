"""Products with operands stored in 16 bits against float64 NumPy on the same rounded numbers, by every way there is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.amx.micro import TileMicro
from ranvier.codegen.llvm.amx.rows import rows_spec
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.gemm.driver import driver_spec
from ranvier.codegen.llvm.gemm.micro import Micro
from ranvier.codegen.llvm.isa import OPTIONAL, TILES, Isa, named, with_extensions
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
NARROW = (BF16, F16)
KEPT: dict[Any, Any] = {}  # compiled kernels: later cases use them again


def _ways() -> dict[str, Isa]:
    """Every instruction set of this machine, the best one also without what its extensions offer."""
    best = ISAS[0]
    found = {"tiles": best} if best.has("amx-bf16") else {}
    if best.has("avx512bf16"):
        found["pairs"] = with_extensions(best, best.extensions - TILES)
    found["plain"] = with_extensions(best, best.extensions - TILES - {"avx512bf16"})
    return found | {isa.name: isa for isa in ISAS[1:]}


WAYS = _ways()
ways = pytest.mark.parametrize("isa", WAYS.values(), ids=WAYS)


def random(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def poisoned(shape: tuple[int, ...], dtype: Any = F32, shift: int = 0) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return aligned(size, shift=shift).view(dtype).reshape(shape)


def product(
    a: Array,
    b: Array,
    isa: Isa,
    *,
    out: Array | None = None,
    packed: Any = None,
    epilogue: Epilogue | None = None,
    operands: tuple[tuple[View, Array], ...] = (),
    alpha: float = 1.0,
    threads: int = 1,
    split: int = 1,
) -> Array:
    """``packed``: the type that constant weights are packed in, or None for a B of the graph."""
    if out is None:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        out = poisoned((*batch, a.shape[-2], b.shape[-1]))
    av, ov = view_of(a), view_of(out, "output")
    bound = {av.storage: a, ov.storage: out, **{v.storage: x for v, x in operands}}
    if packed is not None:
        right: Any = pack_b(b, isa, rows_hint=a.shape[-2], dtype=packed)
    else:
        right = view_of(b)
        bound[right.storage] = b
    launches = matmul(av, right, ov, isa, epilogue=epilogue, threads=threads, alpha=alpha)
    runner = Runner(launches, isa, bound, split=split)
    KEPT.update({(isa.key, spec): kernel for spec, kernel in runner.kernels.items()})
    runner()
    return out


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def bound_of(a: Array, b: Array, out: Any = F32) -> Array:
    """What rounding of sums (float32) and of the result may add up to."""
    size = np.abs(wide(a)) @ np.abs(wide(b)) + 1e-30
    error = size * np.finfo(F32).eps * (4 + np.sqrt(a.shape[-1]))
    return error + (0 if out is F32 else np.abs(wide(a) @ wide(b)) * float(ml_dtypes.finfo(out).eps) / 2 + error)


def check(got: Array, a: Array, b: Array, expected: Array | None = None, scale: float = 1.0) -> None:
    expected = wide(a) @ wide(b) if expected is None else expected
    kind = F32 if got.dtype == F32 else got.dtype.type
    limit = bound_of(a, b, kind) * scale
    assert got.shape == expected.shape
    off = np.abs(wide(got) - expected)
    assert np.all(off <= limit), float(np.max(off / limit))


@ways
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("constant", [True, False])
def test_every_remainder(isa: Isa, dtype: Any, constant: bool) -> None:
    """Rows and columns around every tile, odd depths and depths around a step of tiles."""
    rows = (1, 2, 7, 12, 15, 16, 17, 31, 32, 33, 48, 49, 65)
    shapes = itertools.product(rows, ((1, 33), (5, 1), (16, 2), (17, 31), (31, 32), (32, 33), (33, 63), (70, 100)))
    for m, (n, k) in shapes:
        a, b = random((m, k), m, dtype), random((k, n), n, dtype)
        packed = (DType.bfloat16 if dtype is BF16 else DType.float16) if constant else None
        check(product(a, b, isa, packed=packed), a, b)


@ways
@pytest.mark.parametrize("dtype", NARROW)
def test_random_sizes_and_layouts(isa: Isa, dtype: Any) -> None:
    """Sizes from 0 to 70, operands plain, transposed, with gaps or strides; results in both types, also transposed."""
    rng = np.random.default_rng(7)

    def laid_out(shape: tuple[int, int], how: int, seed: int) -> Array:
        rows, columns = shape
        if how == 0:
            return random(shape, seed, dtype)
        if how == 1:
            return random((columns, rows), seed, dtype).T
        if how == 2:
            return random((rows, columns + 3), seed, dtype)[:, 1 : columns + 1]
        return random((rows, columns * 2), seed, dtype)[:, ::2]

    for case in range(80):
        m, n, k = (int(x) for x in rng.integers(0, 71, 3))
        a = laid_out((m, k), case % 4, case)
        b = laid_out((k, n), case // 4 % 4, case + 1000)
        kind = dtype if case % 2 else F32
        out = poisoned((m, n), kind) if case % 3 else poisoned((n, m), kind).T
        packed = None if case % 5 else DType.bfloat16 if dtype is BF16 else DType.float16
        check(product(a, b, isa, out=out, packed=packed, split=1 + case % 3, threads=1 + case % 2), a, b)


@ways
def test_operands_of_different_types(isa: Isa) -> None:
    """A float32 operand beside one of bfloat16 is as good as rounded to it, or better."""
    for (left, right), (m, n, k) in itertools.product(
        [(F32, BF16), (BF16, F32), (F32, F16), (F16, F32)], [(1, 40, 50), (40, 33, 70), (20, 50, 31)]
    ):
        narrow = BF16 if BF16 in (left, right) else F16
        a, b = random((m, k), m, narrow).astype(left), random((k, n), n, narrow).astype(right)
        check(product(a, b, isa), a, b)
        check(product(a, b, isa, packed=DType.bfloat16 if narrow is BF16 else DType.float16), a, b)


@ways
def test_a_float32_operand_is_rounded_once(isa: Isa) -> None:
    """Weights packed as bfloat16 from float32 are those nearest to it."""
    a, b = random((40, 64), 1), random((64, 48), 2, F32)
    check(product(a, b, isa, packed=DType.bfloat16), a, b.astype(BF16))


@ways
@pytest.mark.parametrize("dtype", NARROW)
def test_depth_in_blocks(isa: Isa, dtype: Any) -> None:
    """K so long that sums wait for the next block of it."""
    for m, n, k in ((70, 40, 5000), (33, 100, 4099), (3, 40, 6000)):
        a, b = random((m, k), 1, dtype), random((k, n), 2, dtype)
        for packed in (None, DType.bfloat16 if dtype is BF16 else DType.float16):
            check(product(a, b, isa, packed=packed), a, b)
            check(product(a, b, isa, packed=packed, alpha=-0.5, split=3, threads=2), a, b, wide(a) @ wide(b) * -0.5)


@ways
@pytest.mark.parametrize("out", [F32, BF16])
def test_many_rows(isa: Isa, out: Any) -> None:
    """Rows that every tile of work packs for itself: panels pass by them or they by panels, in a group or several."""
    for m, n, k in ((300, 130, 70), (290, 400, 50), (450, 640, 1200), (520, 130, 2100), (70, 130, 2700)):
        a, b = random((m, k + 3), 1)[:, :k], random((k, n), 2)
        found = []
        for threads, split in ((1, 1), (1, 4), (2, 3)):
            room = poisoned((m, n), out)
            found.append(product(a, b, isa, out=room, packed=DType.bfloat16, threads=threads, split=split))
        check(found[0], a, b)
        assert np.array_equal(found[0], found[1])
        check(found[2], a, b)
    a, b = random((2, 300, 70), 3), random((2, 70, 130), 4)
    check(product(a, b, isa, split=3), a, b)


@pytest.mark.skipif("tiles" not in WAYS, reason="this machine has no tiles")
def test_many_rows_of_tiles_are_the_same_for_all_threads_and_rounded_once() -> None:
    for m, n, k in ((300, 130, 70), (450, 640, 1200), (520, 130, 2100), (100, 130, 3000)):
        a, b = random((m, k), 1, F32), random((k, n), 2)
        found = [
            product(a, b, WAYS["tiles"], packed=DType.bfloat16, threads=threads, split=threads) for threads in (1, 2, 3)
        ]
        check(found[0], a.astype(BF16), b)
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@ways
@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("depth", [32, 160, 256, 640])
def test_rows_of_a_temporary_that_stay_near(isa: Isa, depth: int, kind: Any) -> None:
    """More than eight blocks of rows and twelve panels: rows are read where they lie, and whole blocks of sums are
    written while the next one is made. Beside them are a short block, and a narrow panel with columns that miss."""
    rows = poisoned((2, 300, depth), BF16)
    rows[:] = random(rows.shape, depth)
    b = random((depth, 395), 1)
    out = poisoned((2, 300, 1024 if kind is BF16 else 512), kind)
    view, ov = view_of(rows, "temp"), view_of(out[..., :395], "output")
    for threads, split in ((1, 1), (3, 1), (1, 7)):
        out[:] = -7.0
        launches = matmul(view, pack_b(b, isa, rows_hint=600), ov, isa, threads=threads)
        Runner(launches, isa, {view.storage: rows, ov.storage: out}, split=split)()
        check(out[..., :395], rows, b)
        assert np.all(out[..., 395:] == -7.0)


@ways
@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize(("depth", "columns"), [(704, 395), (704, 200), (1056, 48), (2080, 470)])
def test_rows_that_their_first_panel_packs(isa: Isa, depth: int, columns: int, kind: Any) -> None:
    """Dense rows of whole steps, too long to be read where they lie, and more than eight blocks of them: B stays near
    while they pass, or they stay while its panels do. The last block is short, a last panel narrow."""
    a, b = random((2, 300, depth), depth), random((depth, columns), 1)
    found = []
    for threads, split in ((1, 1), (1, 5), (2, 3)):
        room = poisoned((2, 300, columns), kind)
        found.append(product(a, b, isa, out=room, packed=DType.bfloat16, threads=threads, split=split))
    check(found[0], a, b)
    assert np.array_equal(found[0], found[1])
    check(found[2], a, b)


@pytest.mark.skipif("tiles" not in WAYS, reason="this machine has no tiles")
@pytest.mark.parametrize("shift", [0, 4])
def test_results_past_the_caches(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as ever, where rows begin at lines and where they do not; nothing beside them is touched."""
    a, b, isa = random((300, 704), 5), random((704, 395), 6), WAYS["tiles"]
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr("ranvier.codegen.llvm.gemm.narrow._PASSING_BYTES", least)
        room = poisoned((300, 512), shift=shift)
        room[:] = -7.0
        product(a, b, isa, out=room[:, :395], packed=DType.bfloat16, split=3)
        assert np.all(room[:, 395:] == -7.0)
        found.append(room[:, :395])
    check(found[0], a, b)
    assert np.array_equal(found[0], found[1])


@ways
@pytest.mark.parametrize("dtype", NARROW)
def test_batches(isa: Isa, dtype: Any) -> None:
    for left, right in (((3, 20), (3,)), ((3, 20), ()), ((2, 1, 20), (4,)), ((20,), (3,)), ((2, 3, 17), (2, 1))):
        a, b = random((*left, 35), 1, dtype), random((*right, 35, 50), 2, dtype)
        check(product(a, b, isa), a, b)
        check(product(a, b, isa, packed=DType.bfloat16 if dtype is BF16 else DType.float16), a, b)
        turned = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
        check(product(a, turned, isa), a, b)
    heads = random((2, 40, 3, 32), 5, dtype).transpose(0, 2, 1, 3)  # attention's queries and keys
    keys = random((2, 50, 3, 32), 6, dtype).transpose(0, 2, 3, 1)
    check(product(heads, keys, isa, alpha=0.25), heads, keys, wide(heads) @ wide(keys) * 0.25)


@ways
@pytest.mark.parametrize("kind", [F32, BF16])
def test_epilogues(isa: Isa, kind: Any) -> None:
    """Bias, residual and clamping, and an expression with operands of either type; poison stays outside."""
    acc = Result(0, DType.float32)
    for m, n, k in ((1, 33, 40), (17, 48, 33), (40, 70, 100), (64, 64, 64)):
        a, b = random((m, k), m), random((k, n), n)
        bias, residual = random((n,), 3, F32), random((m, n), 4, F32)
        gate = random((m, n), 5, BF16)
        views = view_of(bias), view_of(residual), view_of(gate)
        views[2].storage.stands_for = DType.float32
        rows = (Operand(views[0], (0, 0, 1)), Operand(views[1], (0, n, 1)), Operand(views[2], (0, n, 1)))
        loads = [Load(i, DType.float32) for i in range(3)]

        def op(name: str, *args: Expr) -> Op:
            return Op(name, args, DType.float32)

        added = op("add", op("add", acc, loads[0]), loads[1])
        clamped = op("min", op("max", added, Const(-1.0, DType.float32)), Const(2.0, DType.float32))
        simple = Epilogue(clamped, rows[:2])
        gated = Epilogue(op("mul", op("tanh", added), loads[2]), rows)
        total = wide(a) @ wide(b) + bias + residual
        cases = ((simple, np.clip(total, -1, 2)), (gated, np.tanh(total) * wide(gate)))
        for (epilogue, expected), packed in itertools.product(cases, (None, DType.bfloat16)):
            room = poisoned((m, n + 3), kind)
            bound = tuple(zip(views, (bias, residual, gate)))
            product(a, b, isa, out=room[:, :n], packed=packed, epilogue=epilogue, operands=bound)
            off = np.abs(wide(room[:, :n]) - expected)
            limit = bound_of(a, b) * 2 + np.abs(expected) * (2e-6 if kind is F32 else 2.0**-8) + 1e-6
            assert np.all(off <= limit)
            assert np.all(room[:, n:].view(np.uint8) == 0xA5)


@ways
@pytest.mark.parametrize("dtype", NARROW)
def test_nan_and_infinity_stay_in_their_rows_and_columns(isa: Isa, dtype: Any) -> None:
    """Neither padding of K nor rows and columns beside them may spread them."""
    for m, n, k in ((17, 20, 33), (40, 33, 31), (33, 40, 50)):
        a, b = random((m, k + 4), 1, dtype), random((k + 1, n), 2, dtype)
        a[:, k:] = np.nan  # what stands behind the rows
        b[k:] = np.inf
        a[1, 0], a[2, k - 1], b[k - 1, 3] = np.nan, np.inf, -np.inf
        with np.errstate(invalid="ignore"):
            expected = wide(a[:, :k]) @ wide(b[:k])
        for packed in (None, DType.bfloat16 if dtype is BF16 else DType.float16):
            got = product(a[:, :k], b[:k], isa, packed=packed)
            assert np.array_equal(np.isnan(got), np.isnan(expected))
            assert np.array_equal(np.isinf(got), np.isinf(expected))
            finite = np.isfinite(expected)
            assert np.array_equal(np.sign(got[~np.isnan(got)]), np.sign(expected[~np.isnan(expected)]))
            clean = (
                np.where(np.isfinite(wide(a[:, :k])), wide(a[:, :k]), 0),
                np.where(np.isfinite(wide(b[:k])), wide(b[:k]), 0),
            )
            assert np.all(np.abs(got[finite] - expected[finite]) <= bound_of(*clean)[finite])


@ways
def test_one_row(isa: Isa) -> None:
    """Depths with and without padding, in one block and in batches that share weights or do not."""
    for k, n in ((32, 40), (96, 33), (33, 50), (640, 100), (2000, 70)):
        a, b = random((3, 1, k), k), random((3, k, n), n)
        check(product(a[0], b[0], isa, packed=DType.bfloat16), a[0], b[0])
        check(product(a, b, isa, packed=DType.bfloat16), a, b)


@ways
@pytest.mark.parametrize("columns", [16, 80, 96])
def test_weights_packed_for_many_rows_serve_few(isa: Isa, columns: int) -> None:
    """Tiles that lie apart are nothing that one row can be multiplied with as vectors."""
    b = random((2, 64, columns), 1)
    packed = pack_b(b, isa, rows_hint=256)
    assert packed.apart == (isa is WAYS.get("tiles") and columns > 16)
    for rows in (1, 8, 40):
        a, out = random((2, rows, 64), rows), poisoned((2, rows, columns))
        av, ov = view_of(a), view_of(out, "output")
        Runner(matmul(av, packed, ov, isa), isa, {av.storage: a, ov.storage: out})()
        check(out, a, b)


@ways
def test_every_split_gives_the_same(isa: Isa) -> None:
    a, b = random((100, 300), 1), random((300, 130), 2)
    results = [
        product(a, b, isa, packed=DType.bfloat16, threads=threads, split=split)
        for threads, split in ((1, 1), (2, 2), (2, 7), (2, 1))
    ]
    assert all(np.array_equal(results[1], each) for each in results[2:])
    check(results[0], a, b)


def test_weights_take_two_bytes_where_that_is_quicker() -> None:
    b = random((64, 96), 1, F32)
    if "tiles" in WAYS:
        assert pack_b(b, WAYS["tiles"], rows_hint=64, dtype=DType.bfloat16).nbytes == b.nbytes // 2
    for dtype in (DType.bfloat16, DType.float16):
        assert pack_b(b, WAYS["plain"], rows_hint=8, dtype=dtype).nbytes == b.nbytes // 2
        assert pack_b(b, WAYS["plain"], rows_hint=64, dtype=dtype).nbytes == b.nbytes


def test_code_for_tiles_can_be_made_anywhere() -> None:
    """Emitted whether or not this machine has them: multiplications, and a release where the driver ends."""
    isa = with_extensions(named("avx512", "x86_64"), frozenset(OPTIONAL["avx512"]))
    instructions = {
        (DType.bfloat16, DType.bfloat16): "tdpbf16ps",
        (DType.int8, DType.int8): "tdpbssd",
        (DType.int8, DType.uint8): "tdpbsud",
        (DType.uint8, DType.int8): "tdpbusd",
        (DType.uint8, DType.uint8): "tdpbuud",
    }
    for (left, right), name in instructions.items():
        text = compiler.assembly(library.source(TileMicro(left, right, 2).spec(), isa), isa)
        assert text.count(name) >= 6 and "ldtilecfg" in text
        assert not (set(instructions.values()) - {name}) & set(text.split())
    driver = compiler.assembly(library.source(driver_spec(), isa), isa)
    assert "tilerelease" in driver and "sfence" in driver  # what went past the caches is there when the driver returns
    near = TileMicro(DType.bfloat16, DType.bfloat16, 2, near="a")
    assert "vmovntps" in compiler.assembly(library.source(near.spec(), isa), isa)
    kept = compiler.assembly(library.source(replace(near, keeps=True).spec(), isa), isa)
    assert kept.count("tilestored") > compiler.assembly(library.source(near.spec(), isa), isa).count("tilestored")
    assert "zmm" in compiler.assembly(library.source(rows_spec(), isa), isa)
    paired = Micro("float", 6, 4, stored="pairs").spec()
    assert "vdpbf16ps" in compiler.assembly(library.source(paired, isa), isa)
    plain = with_extensions(isa, frozenset())
    assert "tile" not in compiler.assembly(library.source(driver_spec(), plain), plain)
