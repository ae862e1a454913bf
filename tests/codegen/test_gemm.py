"""Matrix products against float64 NumPy: shapes, strides, batches, epilogues, instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Code
from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.gemm import matmul, pack_b
from ranvier.codegen.llvm.gemm.driver import driver_spec
from ranvier.codegen.llvm.gemm.gemv import dot_spec
from ranvier.codegen.llvm.gemm.micro import Micro
from ranvier.codegen.llvm.gemm.tiles import tile_of
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import KernelError
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


@isas
def test_random_sizes_and_layouts(isa: Isa) -> None:
    """Sizes from 0 to 70, both operands plain or transposed or with gaps, output plain or transposed."""
    rng = np.random.default_rng(7)

    def laid_out(shape: tuple[int, int], how: int, seed: int) -> Array:
        rows, columns = shape
        if how == 0:
            return random(shape, seed)
        if how == 1:
            return random((columns, rows), seed).T
        if how == 2:
            return random((rows, columns + 3), seed)[:, 1 : columns + 1]
        return random((rows, columns * 2), seed)[:, ::2]

    for case in range(90):
        m, n, k = (int(x) for x in rng.integers(0, 71, 3))
        a = laid_out((m, k), case % 4, case)
        b = laid_out((k, n), case // 4 % 4, case + 1000)
        out = poisoned((m, n)) if case % 3 else poisoned((n, m)).T
        check(product(a, b, isa, out=out, packed=case % 5 == 0, split=1 + case % 3), a, b)


@isas
def test_larger_with_k_blocks_and_threads(isa: Isa) -> None:
    for case, (m, n, k) in enumerate(((130, 101, 1300), (33, 70, 2700), (7, 300, 1500), (300, 17, 1281))):
        a, b = random((m, k), case), random((k, n), case + 10)
        plain = product(a, b, isa, packed=True)
        check(plain, a, b)
        # how the work is cut must not change a bit of the result
        for threads, split in ((1, 5), (4, 1), (4, 7)):
            assert np.array_equal(plain, product(a, b, isa, packed=True, threads=threads, split=split))
        check(product(a, b, isa), a, b)


@isas
def test_larger_layouts(isa: Isa) -> None:
    """Sizes at which operands are rearranged before they are used rather than read in place."""
    wide = random((300, 330), 1)
    for case, (m, n, k) in enumerate(((270, 210, 310), (90, 300, 330))):
        a, b = random((m, k), case), random((k, n), case + 1)
        for left in (a, np.asfortranarray(a), np.repeat(a, 2, axis=1)[:, ::2]):
            for right in (b, np.asfortranarray(b)):
                check(product(left, right, isa, split=3), a, b)
    check(product(wide[::-1, ::-1], wide.T[:, ::-1], isa), wide[::-1, ::-1], wide.T[:, ::-1])


@isas
def test_few_rows_against_a_transposed_matrix(isa: Isa) -> None:
    for m in (1, 2, 3, 4, 5, 8, 9, 23, 26):
        for n, k in ((1, 2), (5, 17), (130, 40), (300, 15), (16, 64)):
            a, b = random((2, m, k), m), random((2, n, k), n).swapaxes(1, 2)
            check(product(a, b, isa, threads=2, split=2), a, b)
            check(product(b.swapaxes(1, 2), a.swapaxes(1, 2), isa), b.swapaxes(1, 2), a.swapaxes(1, 2))


@isas
def test_one_column(isa: Isa) -> None:
    for m, k in ((1, 1), (5, 40), (70, 33), (300, 129)):
        for a in (random((2, m, k), m), random((2, k, m), m).swapaxes(1, 2)):
            b = random((k, 1), k)
            for packed in (True, False):
                check(product(a, b, isa, packed=packed), a, b)


@isas
def test_double(isa: Isa) -> None:
    for case, (m, n, k) in enumerate(((1, 5, 9), (13, 31, 40), (25, 64, 3), (6, 33, 0), (70, 70, 1400))):
        a, b = random((m, k), case, np.float64), random((k, n), case + 10, np.float64)
        for packed in (True, False):
            check(product(a, b, isa, packed=packed), a, b)
        check(product(a, b, isa, out=poisoned((n, m), np.float64).T), a, b)


@isas
def test_batches_broadcast(isa: Isa) -> None:
    shapes = [
        ((3, 5, 7), (3, 7, 9)),
        ((3, 5, 7), (7, 9)),
        ((5, 7), (3, 7, 9)),
        ((2, 1, 5, 7), (3, 7, 9)),
        ((2, 3, 1, 7), (1, 3, 7, 20)),
        ((4, 2, 2), (4, 2, 2)),
        ((2, 3, 40, 17), (2, 1, 17, 70)),
        ((0, 5, 7), (7, 9)),
    ]
    for case, (left, right) in enumerate(shapes):
        a, b = random(left, case), random(right, case + 10)
        for packed in (True, False):
            check(product(a, b, isa, packed=packed, split=2), a, b)
    heads = random((2, 9, 4, 8), 5).transpose(0, 2, 1, 3)  # attention: heads lie inside the rows
    keys = random((2, 11, 4, 8), 6).transpose(0, 2, 3, 1)
    out = poisoned((2, 9, 4, 11)).transpose(0, 2, 1, 3)
    check(product(heads, keys, isa, out=out, threads=3, split=3), heads, keys)


@isas
def test_unaligned_operands(isa: Isa) -> None:
    a, b, out = (poisoned(s, shift=4) for s in ((9, 20), (20, 37), (9, 37)))
    a[:], b[:] = random(a.shape, 1), random(b.shape, 2)
    check(product(a, b, isa, out=out), a, b)
    for m in (1, 40):
        wide = np.resize(a, (m, 20)).astype(np.float32)
        check(product(wide, b, isa), wide, b)


@isas
def test_nothing_else_is_written(isa: Isa) -> None:
    whole = poisoned((30, 60))
    before = whole.copy()
    a, b = random((20, 9), 1), random((9, 37), 2)
    product(a, b, isa, out=whole[5:25, 11:48])
    check(whole[5:25, 11:48], a, b)
    whole[5:25, 11:48] = before[5:25, 11:48]
    assert whole.tobytes() == before.tobytes()


def epilogues() -> list[tuple[str, Expr, DType, Any]]:
    """Name, expression, output type, and the same in NumPy over (accumulator, bias, residual, per row)."""
    bias, residual, per_row = Load(0, F32), Load(1, F32), Load(2, F32)
    zero, six, half = Const(0.0, F32), Const(6.0, F32), Const(0.5, F32)
    erf = op("erf", op("mul", op("add", ACC, bias), Const(0.7071067811865476, F32)))
    gelu = op("mul", op("mul", op("add", ACC, bias), half), op("add", erf, Const(1.0, F32)))
    from math import erf as exact

    def gelu_of(x: Array) -> Array:
        return x * 0.5 * (1.0 + np.vectorize(exact, otypes=[np.float64])(x * 0.7071067811865476))

    return [
        ("bias", op("add", ACC, bias), F32, lambda x, b, r, c: x + b),
        ("relu", op("max", op("add", bias, ACC), zero), F32, lambda x, b, r, c: np.maximum(x + b, 0)),
        (
            "relu6 of residual",
            op("min", op("max", op("add", op("add", ACC, bias), residual), zero), six),
            F32,
            lambda x, b, r, c: np.clip(x + b + r, 0, 6),
        ),
        ("residual", op("add", residual, ACC), F32, lambda x, b, r, c: x + r),
        ("gelu", gelu, F32, lambda x, b, r, c: gelu_of(x + b)),
        ("per row", op("add", ACC, per_row), F32, lambda x, b, r, c: x + c),
        ("double", Op("cast", (op("add", ACC, bias),), F64), F64, lambda x, b, r, c: x + b),
        (
            "scaled residual",
            op("add", op("mul", ACC, half), op("mul", residual, bias)),
            F32,
            lambda x, b, r, c: x * 0.5 + r * b,
        ),
    ]


@isas
@pytest.mark.parametrize("name", [e[0] for e in epilogues()])
def test_epilogues(isa: Isa, name: str) -> None:
    _, value, dtype, reference = next(e for e in epilogues() if e[0] == name)
    for case, (batch, m, n, k) in enumerate(((1, 9, 37, 20), (3, 5, 16, 7), (1, 40, 70, 1300), (2, 3, 33, 0))):
        a, b = random((batch, m, k), case), random((k, n), case + 1)
        bias, per_row = random((n,), 3), random((m,), 4)
        residual = random((batch, m, n), 5)
        made = [operand(bias, (0, 0, 1)), operand(residual, (m * n, n, 1)), operand(per_row, (0, 1, 0))]
        epilogue = Epilogue(value, tuple(o for o, _ in made))
        exact = reference(a.astype(np.float64) @ b.astype(np.float64), bias, residual, per_row[:, None])
        for transposed in (False, True):
            out = (
                poisoned((batch, n, m), dtype.numpy).swapaxes(1, 2)
                if transposed
                else poisoned((batch, m, n), dtype.numpy)
            )
            for packed in (True, False):
                operands = tuple(x for _, x in made)
                got = product(a, b, isa, out=out, packed=packed, epilogue=epilogue, operands=operands, split=2)
                check(got, a, b, exact)


@isas
def test_alpha(isa: Isa) -> None:
    for m, n, k in ((3, 20, 5), (40, 65, 2600)):
        a, b = random((m, k), 1), random((k, n), 2)
        check(product(a, b, isa, alpha=0.125), a, b, 0.125 * (a.astype(np.float64) @ b))


@isas
def test_nan_and_infinity(isa: Isa) -> None:
    a, b = random((9, 20), 1), random((20, 37), 2)
    a[2, 3], a[4, 5], a[6, 0], b[0, 0] = np.nan, np.inf, -np.inf, 0.0
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float64) @ b
    for relu in (False, True):
        epilogue = Epilogue(op("max", ACC, Const(0.0, F32))) if relu else None
        for packed in (True, False):
            got = product(a, b, isa, packed=packed, epilogue=epilogue)
            wanted = np.maximum(expected, 0) if relu else expected
            special = ~np.isfinite(wanted)
            assert np.array_equal(got[special], wanted[special].astype(np.float32), equal_nan=True)
            assert np.allclose(got[~special], wanted[~special], atol=1e-4)


@isas
def test_packed_once_serves_any_rows(isa: Isa) -> None:
    b = random((30, 90), 1)
    packed = pack_b(b, isa, rows_hint=1)
    assert packed.nbytes >= b.nbytes
    for m in (1, 5, 64):
        a, out = random((m, 30), m), poisoned((m, 90))
        av, ov = view_of(a), view_of(out, "output")
        Runner(matmul(av, packed, ov, isa), isa, {av.storage: a, ov.storage: out})()
        check(out, a, b)


def test_simple_epilogues_need_no_code_of_their_own() -> None:
    """Bias, clamp and residual, and any size, are arguments: the driver and the micro-kernels are all there is."""
    isa = ISAS[0]
    bias, _ = operand(random((64,), 1), (0, 0, 1))
    epilogue = Epilogue(op("max", op("add", ACC, Load(0, F32)), Const(0.0, F32)), (bias,))
    found: set[str] = set()
    for m, k, given in ((48, 10, None), (96, 500, epilogue)):
        views = [View.temporary(F32, s) for s in ((m, k), (m, 64))]
        packed = pack_b(random((k, 64), 1), isa, rows_hint=48)
        (launch,) = matmul(views[0], packed, views[1], isa, epilogue=given)
        found.add(repr([launch.spec.key, *(b.spec.key for b in launch.buffers if hasattr(b, "spec"))]))
    assert len(found) == 1


def test_mixed_types_are_refused() -> None:
    views = [View.temporary(t, (4, 4)) for t in (F32, F64, F32)]
    with pytest.raises(KernelError):
        matmul(*views, ISAS[0])


def test_code_for_arm() -> None:
    """Everything can be emitted for an architecture that this machine may not have, and stays in its registers."""
    neon = named("neon", "aarch64")
    tile = tile_of(neon, 4)
    for spec in (driver_spec(), dot_spec(F32, F32, 1), Micro("float", tile.rows, 4).spec()):
        text = compiler.assembly(library.source(spec, neon), neon)
        assert "ret" in text
    assert "fmla" in text
    assert "Folded Spill" not in text


def test_one_stream_is_walked_where_memory_follows_one() -> None:
    """A row times packed columns: every access to B is a fixed distance from one pointer, which moves by four steps."""
    neon = named("neon", "aarch64")
    text = compiler.assembly(library.source(Micro("float", 1, 4).spec(), neon), neon)
    loop = next(part for part in text.split(".LBB0_") if part.count("fmla") == 16)
    pairs = [line.split("[")[1].split("]")[0].split(",") for line in loop.splitlines() if "\tldp\tq" in line]
    assert len({base for base, *_ in pairs}) == 1
    assert sorted(int(offset[0].strip(" #")) if offset else 0 for _, *offset in pairs) == list(range(0, 256, 32))


def test_one_row_takes_long_pieces_of_a_matrix_in_place() -> None:
    """Where memory follows one stream, a row of B is left only after as much of it as registers can hold."""
    neon = named("neon", "aarch64")
    views = [View.temporary(F32, shape) for shape in ((1, 512), (512, 64), (1, 64))]
    (launch,) = matmul(views[0], views[1], views[2], neon)
    assert Code(Micro("float", 1, 16, "rows", packed=False).spec()) in launch.buffers
