"""Kernels given as LLVM IR: what they compute, and what of them is refused before anything runs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.errors import (
    DTypeMismatch,
    InvalidConfig,
    InvalidInput,
    InvalidValue,
    KernelError,
    RanvierError,
    ShapeMismatch,
)
from ranvier.providers.base import KernelHandle, OffersKernels
from ranvier.providers.cpu.custom import Buffer, CpuKernels, Local, Scalar, Signature, Size, Tensor
from ranvier.providers.cpu.provider import CpuProvider
from ranvier.providers.reference import ReferenceProvider
from tests.codegen.harness import ISAS
from tests.providers.cpu.custom_kernels import F32, ONE, SAXPY, SAXPY_SIGNATURE, around


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def pair(n: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    made = np.random.default_rng(seed)
    return made.random(n, np.float32), made.random(n, np.float32)


# -- what they compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.key)
@pytest.mark.parametrize("n", [0, 1, 17, 4096, 100_003])
def test_a_kernel_over_tiles(isa: Isa, n: int) -> None:
    own = CpuKernels(isa=isa, threads=2)
    handle = own.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    x, y = pair(n)
    expected = x * np.float32(2.5) + y
    own.launch(handle, -(-n // 1024), 1024, [x, y, 2.5])
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_tiles_that_the_grid_leaves_out_are_left_alone(kernels: CpuKernels) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    x, y = pair(100)
    before = y.copy()
    kernels.launch(handle, 3, 10, [x, y, 1.0])
    np.testing.assert_array_equal(y[:30], before[:30] + x[:30])
    np.testing.assert_array_equal(y[30:], before[30:])
    kernels.launch(handle, 0, 10, [x, y, 1.0])
    np.testing.assert_array_equal(y[30:], before[30:])


def test_a_grid_of_three_axes_names_every_tile_once(kernels: CpuKernels) -> None:
    text = """
define void @count(ptr %out, i64 %n, i64 %i, i64 %j, i64 %k, i64 %bi, i64 %bj, i64 %bk) {
  %a = mul i64 %i, 100
  %b = mul i64 %j, 10
  %c = add i64 %a, %b
  %d = add i64 %c, %k
  %e = mul i64 %bi, %bj
  %f = mul i64 %e, %bk
  %g = mul i64 %f, 1000
  %h = add i64 %d, %g
  %r0 = mul i64 %i, 12
  %r1 = mul i64 %j, 4
  %r2 = add i64 %r0, %r1
  %r = add i64 %r2, %k
  %at = getelementptr i64, ptr %out, i64 %r
  %old = load i64, ptr %at
  %new = add i64 %old, %h
  store i64 %new, ptr %at
  ret void
}
"""
    signature = Signature((Tensor("out", DType.int64, ("n",), "inout"), Size("n")), axes=3)
    handle = kernels.load(text, "count", signature)
    out = np.zeros(24, np.int64)
    kernels.launch(handle, (2, 3, 4), (2, 3, 5), [out])
    i, j, k = np.indices((2, 3, 4))
    np.testing.assert_array_equal(out.reshape(2, 3, 4), 100 * i + 10 * j + k + 30_000)


@pytest.mark.parametrize(
    ("dtype", "kind", "value"),
    [
        (DType.float16, "half", -1.5),
        (DType.float32, "float", 0.1),
        (DType.float64, "double", 1e300),
        (DType.int8, "i8", -128),
        (DType.uint8, "i8", 255),
        (DType.int32, "i32", -(2**31)),
        (DType.uint64, "i64", 2**64 - 1),
        (DType.bool, "i8", True),
    ],
)
def test_scalars_of_every_type_arrive(kernels: CpuKernels, dtype: DType, kind: str, value: Any) -> None:
    text = around(f"  store {kind} %a, ptr %x", f"i64 %pad, {kind} %a, ptr %x, i64 %tile, i64 %block")
    params = (Scalar("pad", DType.int64), Scalar("a", dtype), Tensor("x", dtype, (1,), "out"))
    handle = kernels.load(text, "k", Signature(params))
    x = np.zeros(1, dtype.numpy)
    kernels.launch(handle, 1, 1, [-1, value, x])
    assert x[0] == dtype.numpy.type(value)


def test_buffers_and_local_memory(kernels: CpuKernels) -> None:
    """Bytes are copied by way of two pieces of local memory, which must not overlap."""
    text = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define void @twice(ptr %from, ptr %to, i64 %bytes, ptr %one, ptr %other, i64 %tile, i64 %block) {
  call void @llvm.memcpy.p0.p0.i64(ptr %one, ptr %from, i64 %bytes, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %other, ptr %one, i64 %bytes, i1 false)
  store i8 120, ptr %one
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %other, i64 %bytes, i1 false)
  ret void
}
"""
    params = (Buffer("source", length="bytes"), Buffer("to", "out", "bytes"), Size("bytes"), Local("one"), Local("two"))
    handle = kernels.load(text, "twice", Signature(params))
    target = bytearray(11)
    kernels.launch(handle, 1, 1, [b"hello world", target, 100, 11])
    assert target == b"hello world"
    for wrong in (bytearray(10), b"hello world"):
        with pytest.raises(RanvierError, match="'to'"):
            kernels.launch(handle, 1, 1, [b"hello world", wrong, 100, 11])
    with pytest.raises(InvalidInput, match=r"'source' must lend its memory"):
        kernels.launch(handle, 1, 1, ["hello world", target, 100, 11])


@pytest.mark.parametrize("local", [-1, 1.5, True, None, 1 << 40])
def test_local_memory_is_a_number_of_bytes(kernels: CpuKernels, local: Any) -> None:
    handle = kernels.load(around("  store i8 0, ptr %x"), "k", Signature((Local("scratch"),)))
    with pytest.raises(RanvierError, match=r"argument 0 'scratch'"):
        kernels.launch(handle, 1, 1, [local])


def test_functions_of_the_process_that_are_allowed(kernels: CpuKernels) -> None:
    body = "  %v = load float, ptr %x\n  %e = call float @expf(float %v)\n  store float %e, ptr %x"
    handle = kernels.load(around(body, before="declare float @expf(float)"), "k", ONE)
    x = np.float32([1.5])
    kernels.launch(handle, 1, 1, [x])
    np.testing.assert_allclose(x, np.exp(np.float32([1.5])), rtol=1e-6)


def test_kernels_that_define_the_same_names_do_not_meet(kernels: CpuKernels) -> None:
    def text(number: float) -> str:
        helper = f"@factor = global float {number}\ndefine float @helper() {{\n  ret float {number}\n}}"
        return around("  %v = call float @helper()\n  store float %v, ptr %x", before=helper)

    handles = [kernels.load(text(number), "k", ONE) for number in (1.0, 2.0, 3.0)]
    for handle, number in zip(handles, (1.0, 2.0, 3.0)):
        x = np.zeros(1, np.float32)
        kernels.launch(handle, 1, 1, [x])
        assert x[0] == number


def test_a_kernel_may_keep_a_variable(kernels: CpuKernels) -> None:
    """Memory of the code itself that is written to needs another loader than code alone."""
    body = "  %old = atomicrmw add ptr @count, i64 1 seq_cst\n  store i64 %old, ptr %x"
    signature = Signature((Tensor("x", DType.int64, (1,), "out"),))
    handle = kernels.load(around(body, before="@count = global i64 7"), "k", signature)
    x = np.zeros(1, np.int64)
    kernels.launch(handle, 3, 1, [x])
    kernels.launch(handle, 1, 1, [x])
    assert x[0] == 10


def test_many_threads_launch_one_kernel(kernels: CpuKernels) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for n in (5, 1000, 4096):
            x, y = pair(n, seed)
            expected = x * np.float32(seed) + y
            kernels.launch(handle, -(-n // 64), 64, [x, y, float(seed)])
            if not np.allclose(y, expected, rtol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kernels.info(handle).launches >= 24


# -- texts that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("define void @k(", r"line 1"),
        ("define void @k() {\n  ret i32 0\n}\n", r"line 2, column 7: value doesn't match function result type"),
        ("define void @k() {\n\n  %x = add i64 %y, 1\n  ret void\n}", r"line 3, column 16: use of undefined value"),
        ("hello", r"line 1, column 1"),
    ],
)
def test_text_that_does_not_parse_is_told_with_its_line(kernels: CpuKernels, text: str, said: str) -> None:
    with pytest.raises(KernelError, match=rf"kernel 'k': {said}"):
        kernels.load(text, "k", Signature(()))


def test_text_that_llvm_finds_wrong_after_parsing(kernels: CpuKernels) -> None:
    text = "define void @k(i64 %a, i64 %b) {\nx:\n  %p = phi i64 [ 0, %x ]\n  br label %x\n}"
    with pytest.raises(KernelError, match="kernel 'k': "):
        kernels.load(text, "k", Signature(()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (around("", "ptr %x"), r"must be void \(ptr, i64, i64\), it is void \(ptr\)"),
        (around("", "ptr %x, i32 %t, i64 %b"), r"it is void \(ptr, i32, i64\)"),
        (around("", "float %x, i64 %t, i64 %b"), r"it is void \(float, i64, i64\)"),
        ("define i64 @k(ptr %x, i64 %t, i64 %b) {\n  ret i64 0\n}", r"it is i64 \("),
        ("define void @kk(ptr %x, i64 %t, i64 %b) {\n  ret void\n}", r"defines no function of this name .*'kk'"),
        ("declare void @k(ptr, i64, i64)", r"defines no function of this name"),
    ],
)
def test_functions_that_do_not_fit_the_signature(kernels: CpuKernels, text: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        kernels.load(text, "k", ONE)


@pytest.mark.parametrize(
    ("before", "body", "said"),
    [
        ("declare i32 @system(ptr)", "  %r = call i32 @system(ptr %x)", "'system'"),
        ("declare void @exit(i32)", "  call void @exit(i32 1)", "'exit'"),
        ("declare void @llvm.trap()", "  call void @llvm.trap()", r"'llvm\.trap'"),
        ("@environ = external global ptr", "  %e = load ptr, ptr @environ", "'environ'"),
        ("", '  call void asm sideeffect "syscall", ""()', "assembly"),
        ('module asm "nop"', "", "assembly"),
        ("@other = alias void (ptr, i64, i64), ptr @k", "", "other names"),
    ],
)
def test_what_reaches_beyond_the_kernel_is_refused(kernels: CpuKernels, before: str, body: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        kernels.load(around(body, before=before), "k", ONE)


def test_names_that_look_like_assembly_are_not(kernels: CpuKernels) -> None:
    body = "  %asm = load float, ptr %x\n  store float %asm, ptr %x ; asm"
    assert kernels.load(around(body), "k", ONE).name == "k"


@pytest.mark.parametrize(
    ("source", "name", "signature", "said"),
    [
        (5, "k", ONE, "LLVM IR text or a function, got int"),
        (SAXPY, "", ONE, "needs a name"),
        (SAXPY, "saxpy", "float*", "must be a Signature, got str"),
    ],
)
def test_what_load_takes(kernels: CpuKernels, source: Any, name: str, signature: Any, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        kernels.load(source, name, signature)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Signature((Tensor("x", F32, ("n",)), Scalar("x", F32))), "two parameters are called 'x'"),
        (lambda: Signature((Size("n"),)), "'n' is no symbol"),
        (lambda: Signature((Tensor("x", F32, ("n",), "write"),)), "access must be one of in, out, inout"),  # type: ignore[arg-type]
        (lambda: Signature((Tensor("x", DType.string, ("n",)),)), "no address"),
        (lambda: Signature((Tensor("x", DType.int4, ("n",)),)), "no address"),
        (lambda: Signature((Tensor("x", F32, (-1,)),)), "a size is a number"),
        (lambda: Signature((Tensor("x", F32, ("a b",)),)), "a size is a number"),
        (lambda: Signature((Scalar("a", DType.complex64),)), "cannot be of complex64"),
        (lambda: Signature((Scalar("a-b", F32),)), "identifier"),
        (lambda: Signature(("x",)), "a parameter is"),  # type: ignore[arg-type]
        (lambda: Signature((), axes=4), "axes must be 1, 2 or 3"),
        (lambda: Signature((), work=-1), "work must be 0 or more"),
    ],
)
def test_signatures_are_checked_when_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make()


# -- arguments that are refused -------------------------------------------------------------------------------------


def read_only(n: int) -> np.ndarray[Any, Any]:
    made = np.zeros(n, np.float32)
    made.flags.writeable = False
    return made


def unaligned(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(4 * n + 1, np.uint8)[1:].view(np.float32)


GOOD = np.zeros(8, np.float32)


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ([], InvalidInput, r"takes 3 arguments \(x, y, a\), got 0"),
        ([GOOD, GOOD.copy(), 1.0, 2.0], InvalidInput, "takes 3 arguments"),
        (GOOD, InvalidInput, "arguments are a list, got ndarray"),
        ([[0.0] * 8, GOOD, 1.0], InvalidInput, "argument 0 'x' must be a NumPy array, got list"),
        ([GOOD.astype(np.float64), GOOD, 1.0], DTypeMismatch, "argument 0 'x' must be of float32, got float64"),
        ([GOOD.astype(">f4"), GOOD, 1.0], (DTypeMismatch, InvalidInput), "argument 0 'x'"),
        ([GOOD.reshape(2, 4), GOOD, 1.0], ShapeMismatch, r"must have 1 axes, got shape \[2, 4\]"),
        ([GOOD, GOOD[:7].copy(), 1.0], ShapeMismatch, r"'y', axis 0: n is 8 elsewhere, here it is 7"),
        ([np.zeros(16, np.float32)[::2], GOOD, 1.0], InvalidInput, "'x' must be contiguous"),
        ([GOOD[::-1], GOOD.copy(), 1.0], InvalidInput, "'x' must be contiguous"),
        ([unaligned(8), GOOD, 1.0], InvalidInput, "multiples of their size"),
        ([GOOD, read_only(8), 1.0], InvalidInput, "'y' is written to, and its memory is read-only"),
        ([GOOD, GOOD, 1.0], InvalidInput, "'y' is written to and shares memory with 'x'"),
        ([GOOD, GOOD.copy(), "1"], DTypeMismatch, "argument 2 'a' must be a number, got '1'"),
        ([GOOD, GOOD.copy(), True], DTypeMismatch, "argument 2 'a'"),
        ([GOOD, GOOD.copy(), 1e39], InvalidValue, "beyond what float32 holds"),
    ],
)
def test_arguments_that_do_not_fit(kernels: CpuKernels, args: Any, error: Any, said: str) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    with pytest.raises(error, match=said):
        kernels.launch(handle, 1, 8, args)


@pytest.mark.parametrize(
    ("scalar", "value", "error", "said"),
    [
        (Scalar("a", DType.int8), 128, InvalidValue, "from -128 to 127 as int8, got 128"),
        (Scalar("a", DType.uint32), -1, InvalidValue, "from 0 to 4294967295"),
        (Scalar("a", DType.int64), 1.0, DTypeMismatch, "whole number"),
        (Scalar("a", DType.bool), 1, DTypeMismatch, "True or False"),
        (Scalar("a", F32, low=0.0), -0.5, InvalidValue, "at least 0.0, got -0.5"),
        (Scalar("a", F32, low=0.0, high=1.0), 1.5, InvalidValue, "at least 0.0 and at most 1.0"),
        (Scalar("a", F32, high=1.0), float("nan"), InvalidValue, "at most 1.0, got nan"),
    ],
)
def test_scalars_outside_their_range(
    kernels: CpuKernels, scalar: Scalar, value: Any, error: type[Exception], said: str
) -> None:
    kind = {"int8": "i8", "uint32": "i32", "int64": "i64", "bool": "i8", "float32": "float"}[scalar.dtype.name]
    handle = kernels.load(around("", f"{kind} %a, i64 %t, i64 %b"), "k", Signature((scalar,)))
    with pytest.raises(error, match=said):
        kernels.launch(handle, 1, 1, [value])


@pytest.mark.parametrize(
    ("grid", "block"),
    [(-1, 1), (1, 0), (1.5, 1), ((1, 1), 1), (None, 1), (1, None), (True, 1), (1 << 40, 1), (1, (2, 2))],
)
def test_grids_and_blocks_that_are_none(kernels: CpuKernels, grid: Any, block: Any) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    with pytest.raises(InvalidInput, match=r"kernel 'saxpy': (grid|block)"):
        kernels.launch(handle, grid, block, [GOOD, GOOD.copy(), 1.0])


# -- handles --------------------------------------------------------------------------------------------------------


def test_a_kernel_that_was_unloaded_is_gone(kernels: CpuKernels) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    assert handle in kernels.handles()
    kernels.unload(handle)
    assert handle not in kernels.handles()
    for use in (lambda: kernels.launch(handle, 1, 8, [GOOD, GOOD.copy(), 1.0]), lambda: kernels.info(handle)):
        with pytest.raises(KernelError, match="'saxpy' is unloaded"):
            use()
    with pytest.raises(KernelError, match="unloaded"):
        kernels.unload(handle)


def test_handles_of_others(kernels: CpuKernels) -> None:
    with pytest.raises(KernelError, match="of provider 'cuda'"):
        kernels.launch(KernelHandle("cuda", "saxpy", 1), 1, 1, [])
    with pytest.raises(InvalidInput, match="what load\\(\\) returned, got int"):
        kernels.launch(1, 1, 1, [])  # type: ignore[arg-type]


def test_info_tells_what_a_kernel_is(kernels: CpuKernels) -> None:
    handle = kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    kernels.launch(handle, 1, 8, [GOOD, GOOD.copy(), 1.0])
    info = kernels.info(handle)
    assert (info.name, info.kind, info.launches) == ("saxpy", "llvm", 1)
    assert info.signature == "(in x: float32[n], inout y: float32[n], a: float32, n: size)"
    assert "define internal void @saxpy" in info.source


def test_the_cpu_provider_offers_kernels_and_closing_it_unloads_them() -> None:
    provider = CpuProvider()
    assert isinstance(provider, OffersKernels) and not isinstance(ReferenceProvider(), OffersKernels)
    assert provider.capability().custom_kernels == {"llvm", "loops"}
    handle = provider.kernels.load(SAXPY, "saxpy", SAXPY_SIGNATURE)
    provider.close()
    with pytest.raises(KernelError, match="unloaded"):
        provider.kernels.launch(handle, 1, 1, [])
