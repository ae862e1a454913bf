"""Kernels written as Python functions over the loop IR, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Load, Map, Nest, Operand
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, InvalidInput
from ranvier.providers.cpu.custom import Buffer, CpuKernels, Local, Scalar, Signature, Size, Tensor
from tests.codegen.harness import ISAS
from tests.providers.cpu.custom_kernels import F32, SAXPY_SIGNATURE, saxpy

F64, I64 = DType.float64, DType.int64
MATRIX = Signature((Tensor("x", F32, ("m", "n")), Tensor("out", F32, ("m", "n"), "out")))
ROWS = Signature((Tensor("x", F32, ("m", "n")), Tensor("out", F32, ("m",), "out")))


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.key)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    isa: Isa = request.param
    return CpuKernels(isa=isa, threads=2)


@pytest.fixture(scope="module")
def any_kernels() -> CpuKernels:
    return CpuKernels(threads=1)


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


# -- what they compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 100, 70_001])
def test_elementwise_with_a_scalar(kernels: CpuKernels, n: int) -> None:
    handle = kernels.load(saxpy, "saxpy", SAXPY_SIGNATURE)
    for a in (2.5, -1.0):  # one program serves both
        x, y = random(n), random(n)
        expected = np.float32(a) * x + y
        kernels.launch(handle, None, None, [x, y, a])
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_tensors_may_lie_in_memory_as_they_like(kernels: CpuKernels) -> None:
    handle = kernels.load(saxpy, "saxpy", SAXPY_SIGNATURE)
    x, whole = random(40)[::-2], random(60)
    y = whole[::3]
    expected, between = x * np.float32(3) + y, whole[1::3].copy()
    kernels.launch(handle, None, None, [x, y, 3])
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_array_equal(whole[1::3], between)


def test_softmax(kernels: CpuKernels) -> None:
    def softmax(loops: Any, x: Any, out: Any) -> Nest:
        loops.over(*x.shape, row=(1,))
        e = loops.exp(x - loops.fold("max", x))
        return loops.store(out, e / loops.sum(e))

    handle = kernels.load(softmax, "softmax", MATRIX)
    for m, n in ((1, 5), (33, 65), (2, 4001)):
        x = random(m, n)
        out = np.full_like(x, np.nan)
        kernels.launch(handle, args=[x, out])
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=2e-6)


def test_one_result_for_a_row(kernels: CpuKernels) -> None:
    def norm(loops: Any, x: Any, out: Any) -> Nest:
        loops.over(*x.shape, row=[-1])
        return loops.store_row(out, loops.sqrt(loops.sum(x * x)))

    handle = kernels.load(norm, "norm", ROWS)
    x = random(37, 129)
    out = np.empty(37, np.float32)
    kernels.launch(handle, args=[x, out])
    np.testing.assert_allclose(out, np.linalg.norm(x.astype(np.float64), axis=1), rtol=1e-5)


def test_positions_are_computed_and_guarded(kernels: CpuKernels) -> None:
    """A shift reads beyond both ends: 0 stands there."""

    def shifted(loops: Any, x: Any, out: Any, by: Any) -> Nest:
        (i,) = loops.over(*out.shape)
        return loops.store(out, x[i + by])

    signature = Signature((Tensor("x", F32, ("n",)), Tensor("out", F32, ("m",), "out"), Scalar("by", I64)))
    handle = kernels.load(shifted, "shifted", signature)
    x = np.arange(1, 11, dtype=np.float32)
    for by in (-3, 0, 4, 1 << 40, -(1 << 40)):
        out = np.full(12, np.nan, np.float32)
        kernels.launch(handle, args=[x, out, by])
        at = np.arange(12) + by
        expected = np.where((at >= 0) & (at < 10), x[np.clip(at, 0, 9)], 0)
        np.testing.assert_array_equal(out, expected)


def test_a_gather_along_rows(kernels: CpuKernels) -> None:
    def gather(loops: Any, table: Any, index: Any, out: Any) -> Nest:
        _, j = loops.over(*out.shape)
        return loops.store(out, table[index[loops.axis(0)], j])

    params = (Tensor("table", F32, ("v", "d")), Tensor("index", I64, ("n",)), Tensor("out", F32, ("n", "d"), "out"))
    handle = kernels.load(gather, "gather", Signature(params))
    table = random(7, 20)
    index = np.array([6, 0, 3, 3, 7, -1])  # the last two are no rows
    out = np.empty((6, 20), np.float32)
    kernels.launch(handle, args=[table, index, out])
    np.testing.assert_array_equal(out[:4], table[index[:4]])
    np.testing.assert_array_equal(out[4:], 0)


def test_a_transposed_read_and_broadcasting(kernels: CpuKernels) -> None:
    def kernel(loops: Any, x: Any, bias: Any, out: Any) -> Nest:
        i, j = loops.over(*out.shape)
        return loops.store(out, loops.where(x[j, i] > 0, x[j, i] + bias, -bias))

    params = (Tensor("x", F32, ("n", "m")), Tensor("bias", F32, ("n",)), Tensor("out", F32, ("m", "n"), "out"))
    handle = kernels.load(kernel, "kernel", Signature(params))
    x, bias = random(9, 30), random(9)
    out = np.empty((30, 9), np.float32)
    kernels.launch(handle, args=[x, bias, out])
    np.testing.assert_allclose(out, np.where(x.T > 0, x.T + bias, -bias), rtol=1e-6)


def test_several_outputs_types_and_operators(kernels: CpuKernels) -> None:
    def kernel(loops: Any, x: Any, n: int, same: Any, whole: Any, flag: Any) -> Nest:
        (i,) = loops.over(n)
        bits = (x & 6) ^ (i % 4)
        big = (abs(-x) + 2) // 3
        value = (1.0 - x.cast(F64)) / (2.0 + x.cast(F64) ** 2)
        return loops.store(same, value, whole, bits * big, flag, (x >= 2) & ~(x == 5) | (x != x))

    params = (
        Tensor("x", I64, ("n",)),
        Size("n"),
        Tensor("same", F64, ("n",), "out"),
        Tensor("whole", I64, ("n",), "out"),
        Tensor("flag", DType.bool, ("n",), "out"),
    )
    handle = kernels.load(kernel, "kernel", Signature(params))
    x = np.arange(-20, 60)
    same, whole, flag = np.empty(80), np.empty(80, np.int64), np.empty(80, np.bool_)
    kernels.launch(handle, args=[x, same, whole, flag])
    np.testing.assert_allclose(same, (1.0 - x) / (2.0 + x.astype(np.float64) ** 2), rtol=1e-12)
    np.testing.assert_array_equal(whole, ((x & 6) ^ (np.arange(80) % 4)) * ((np.abs(x) + 2) // 3))
    np.testing.assert_array_equal(flag, (x >= 2) & (x != 5))


def test_a_nest_put_together_by_hand(any_kernels: CpuKernels) -> None:
    def twice(loops: Any, x: Any, out: Any) -> Nest:
        operands = (Operand(x.view, x.view.strides), Operand(out.view, out.view.strides))
        return Nest(out.shape, operands, (Map(((1, Load(0, F32)),)),))

    handle = any_kernels.load(twice, "twice", MATRIX)
    x, out = random(3, 4), np.empty((3, 4), np.float32)
    any_kernels.launch(handle, args=[x, out])
    np.testing.assert_array_equal(out, x)


def test_info_shows_the_code_of_the_newest_launch(any_kernels: CpuKernels) -> None:
    handle = any_kernels.load(saxpy, "saxpy", SAXPY_SIGNATURE)
    assert any_kernels.info(handle).source.startswith("no loops yet")
    any_kernels.launch(handle, args=[random(4), random(4), 1.0])
    info = any_kernels.info(handle)
    assert (info.kind, info.launches) == ("loops", 1)
    assert "define void @rv_" in info.source


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "signature", "said"),
    [
        (lambda loops, x: None, MATRIX, r"the function must take \(loops, x, out\)"),
        (lambda loops, x, out, more: None, MATRIX, r"the function must take \(loops, x, out\)"),
        (saxpy, Signature((Buffer("x"), Local("y"))), "'x': loops work on tensors"),
        (lambda loops, x: None, Signature((Tensor("x", F32, ("n",)),)), "no tensor is written to"),
        (lambda loops, x: None, Signature((Tensor("x", F32, ("n",), "out"),), axes=2), "scheduled by themselves"),
    ],
)
def test_functions_and_signatures_that_do_not_fit(
    any_kernels: CpuKernels, function: Any, signature: Signature, said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        any_kernels.load(function, "k", signature)


def by_hand(loops: Any, x: Any, out: Any, *, strides: tuple[int, int], offset: int = 0) -> Nest:
    operands = (Operand(x.view, strides, offset), Operand(out.view, out.view.strides))
    return Nest(out.shape, operands, (Map(((1, Load(0, F32)),)),))


def to_one_place(loops: Any, x: Any, out: Any) -> Nest:
    operands = (Operand(x.view, x.view.strides), Operand(out.view, (0, 1)))
    return Nest(out.shape, operands, (Map(((1, Load(0, F32)),)),))


def to_the_input(loops: Any, x: Any, out: Any) -> Nest:
    operands = (Operand(out.view, out.view.strides), Operand(x.view, x.view.strides))
    return Nest(out.shape, operands, (Map(((1, Load(0, F32)),)),))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda k, x, out: None, "must return the nest, got NoneType"),
        (lambda k, x, out: k.store(out, 1.0), "'out' holds float32, got 1.0"),
        (lambda k, x, out: k.store(out, k.axis(0)), "holds float32, got int64; cast it"),
        (lambda k, x, out: k.store(out, x + k.axis(0)), "add on float32 and int64: cast one"),
        (lambda k, x, out: k.store(out), "tensors and values, in turns"),
        (lambda k, x, out: k.store(x, x), "stores to 'x', which is only read"),
        (lambda k, x, out: k.store(out, out + x), "'out' is only written to"),
        (lambda k, x, out: k.store(out, k.sum(x)), "sum needs row axes"),
        (lambda k, x, out: k.store(out, k.tanhh(x)), "no operation 'tanhh' .*'tanh'"),
        (lambda k, x, out: k.store(out, k.op("tanhh", x)), "no operation 'tanhh' .*'tanh'"),
        (lambda k, x, out: k.store(out, k.add(x)), "add takes 2 operands, got 1"),
        (lambda k, x, out: k.store(out, x[0]), "'x' has 2 axes, got 1"),
        (lambda k, x, out: k.store(out, x[0, 4]), "'x' has size 4, no element 4"),
        (lambda k, x, out: k.store(out, x[0, 1.5]), "a position is a term of int64"),
        (lambda k, x, out: k.store(out, x & 1), "do not go together|works on integers"),
        (lambda k, x, out: k.store(out, x if x > 0 else -x), r"use where\(\)"),
        (lambda k, x, out: list(x), "not gone through element by element"),
        (lambda k, x, out: (k.store(out, x), k.over(3)), r"over\(\) comes before"),
        (lambda k, x, out: (k.over(5, 4, row=[0]), k.store(out, k.sum(x)))[1], r"'x': .*does not broadcast"),
        (lambda k, x, out: (k.over(2, 3, 4), k.store(out, x))[1], r"'out' has shape \(3, 4\), the loops \(2, 3, 4\)"),
        (lambda k, x, out: (k.over(3, 4, row=[2]), k.store(out, x))[1], "are no axes of 2"),
        (lambda k, x, out: (k.over(3, 4, row=[1]), k.store_row(out, k.sum(x)))[1], "without their rows"),
        (lambda k, x, out: by_hand(k, x, out, strides=(4, 2)), "reach beyond 'x'"),
        (lambda k, x, out: by_hand(k, x, out, strides=(4, 1), offset=-1), "reach beyond 'x'"),
        (to_one_place, "several tiles store to the same element"),
        (to_the_input, "stores to 'x', which is only read"),
    ],
)
def test_loops_that_are_refused(any_kernels: CpuKernels, function: Any, said: str) -> None:
    handle = any_kernels.load(function, "k", MATRIX)
    with pytest.raises((InvalidConfig, AttributeError), match=said):
        any_kernels.launch(handle, args=[random(3, 4), np.empty((3, 4), np.float32)])


def test_what_is_updated_in_place_is_read_where_it_is_written(any_kernels: CpuKernels) -> None:
    signature = Signature((Tensor("x", F32, ("n", "n"), "inout"),))

    def transposed(loops: Any, x: Any) -> Nest:
        i, j = loops.over(*x.shape)
        return loops.store(x, x[j, i])

    handle = any_kernels.load(transposed, "transposed", signature)
    with pytest.raises(InvalidConfig, match="other tiles may have written there"):
        any_kernels.launch(handle, args=[random(4, 4)])


def test_an_output_that_is_forgotten(any_kernels: CpuKernels) -> None:
    params = (Tensor("x", F32, ("n",)), Tensor("out", F32, ("n",), "out"), Tensor("more", F32, ("n",), "out"))
    handle = any_kernels.load(lambda k, x, out, more: k.store(out, -x), "k", Signature(params))
    with pytest.raises(InvalidConfig, match="'more' is an output and nothing is stored to it"):
        any_kernels.launch(handle, args=[random(4), random(4), random(4)])


def test_loops_have_no_grid(any_kernels: CpuKernels) -> None:
    handle = any_kernels.load(saxpy, "saxpy", SAXPY_SIGNATURE)
    with pytest.raises(InvalidInput, match="grid and block are None"):
        any_kernels.launch(handle, 4, 16, [random(4), random(4), 1.0])


def test_outputs_that_show_one_element_several_times(any_kernels: CpuKernels) -> None:
    handle = any_kernels.load(saxpy, "saxpy", SAXPY_SIGNATURE)
    y = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4,), (0,))
    with pytest.raises(InvalidInput, match="shows one element several times"):
        any_kernels.launch(handle, None, None, [random(4), y, 1.0])
