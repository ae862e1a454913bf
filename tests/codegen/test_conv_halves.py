"""Convolutions by float16 arithmetic against a plain definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ranvier.codegen.llvm import conv as kernels
from ranvier.codegen.llvm.gemm.halves import CHUNK, multiplies_halves
from ranvier.codegen.llvm.isa import with_extensions
from ranvier.codegen.loops.ir import Const, Epilogue, Load, Op, Operand, Result
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, aligned, view_of

Array = np.ndarray[Any, Any]
ISA = ISAS[0]
F32 = DType.float32
KEPT: dict[Any, Any] = {}
needs_halves = pytest.mark.skipif(not multiplies_halves(ISA), reason="this machine has no float16 arithmetic")


def channels_last(shape: tuple[int, ...], dtype: Any, seed: int | None = None) -> Array:
    """Logically (N, C, H, W)."""
    n, c, h, w = shape
    found: Array = (
        aligned(n * c * h * w * np.dtype(dtype).itemsize).view(dtype).reshape(n, h, w, c).transpose(0, 3, 1, 2)
    )
    if seed is not None:
        found[...] = np.random.default_rng(seed).standard_normal(shape)
    return found


def defined(x: Array, w: Array, shape: kernels.ConvShape) -> Array:
    """Taps one after the other."""
    (_, sh, sw), (_, dh, dw), (_, top, left) = shape.strides, shape.dilations, shape.begin
    (_, oh, ow), (_, kh, kw) = shape.out, shape.kernel
    room = np.zeros((*x.shape[:2], (oh - 1) * sh + (kh - 1) * dh + 1, (ow - 1) * sw + (kw - 1) * dw + 1))
    h, wide = (min(a, b - c) for a, b, c in zip(x.shape[2:], room.shape[2:], (top, left)))
    room[:, :, top : top + h, left : left + wide] = x[:, :, :h, :wide]
    found = np.zeros((x.shape[0], w.shape[0], oh, ow))
    per_in, per_out = w.shape[1], w.shape[0] // shape.group
    for g in range(shape.group):
        for i in range(kh):
            for j in range(kw):
                part = room[:, g * per_in : (g + 1) * per_in, i * dh :: sh, j * dw :: sw][:, :, :oh, :ow]
                taps = w[g * per_out : (g + 1) * per_out, :, i, j].astype(np.float64)
                found[:, g * per_out : (g + 1) * per_out] += np.einsum("nchw,oc->nohw", part, taps)
    return found


def run(
    x: Array, w: Array, shape: kernels.ConvShape, out: Array, epilogue: Epilogue | None = None, **bound: Any
) -> str:
    packed = kernels.pack_weights(w, ISA, shape, dtype=DType.float16)
    xv, yv = view_of(x, "temp"), view_of(out, "output")
    memory = {xv.storage: x, yv.storage: out, **bound.get("operands", {})}
    runner = Runner(kernels.conv(xv, packed, yv, shape, ISA, epilogue=epilogue), ISA, memory)
    KEPT.update(runner.kernels)
    runner()
    return packed.kind


def limit(x: Array, w: Array, shape: kernels.ConvShape) -> Array:
    """Sums of some products are rounded to eleven bits, each at random; results may be rounded once more."""
    found: Array = defined(np.abs(x), np.abs(w), shape) * np.finfo(np.float16).eps * (np.sqrt(CHUNK) / 2 + 1) + 1e-5
    return found


def drawn_window(data: st.DataObject, *, most: int, padding: int) -> tuple[Any, Any, dict[str, Any]]:
    """A kernel of at most ``most`` by ``most``, an image that has a place for it, and how it goes over that."""
    kernel, stride, dilation = (data.draw(st.tuples(*[st.integers(1, m)] * 2)) for m in (most, 3, 2))
    size = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    pads = tuple(data.draw(st.integers(0, padding)) for _ in range(4))
    assume(all(s + pads[k] + pads[k + 2] >= (kernel[k] - 1) * dilation[k] + 1 for k, s in enumerate(size)))
    return kernel, size, {"strides": stride, "dilations": dilation, "pads": pads}


@needs_halves
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_shapes(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from((1, 1, 1, 3)))
    cin, cout = (group * data.draw(st.integers(low, high)) for low, high in ((5, 40), (2, 45)))
    kernel, size, how = drawn_window(data, most=4, padding=2)
    n = data.draw(st.integers(1, 2))
    shape = kernels.ConvShape.conv((n, cin, *size), (cout, cin // group, *kernel), group=group, **how)
    assume(kernels.takes_halves(shape, ISA) and not shape.is_depthwise)
    w = np.random.default_rng(1).standard_normal((cout, cin // group, *kernel)).astype(np.float16).astype(np.float32)
    x = channels_last((n, cin, *size), np.float16, 2)
    out = channels_last((n, cout, *shape.out[1:]), data.draw(st.sampled_from((np.float16, np.float32))))
    assert run(x, w, shape, out) == "halves"
    assert np.all(np.abs(out - defined(x, w, shape)) <= limit(x, w, shape))


@needs_halves
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bias_and_residual_are_added_to_float32_sums(kernel: int, dtype: Any) -> None:
    """Deep ones, whose sums wait in scratch between chunks."""
    shape = kernels.ConvShape.conv((1, 600, 5, 7), (40, 600, kernel, kernel), pads=(kernel // 2,) * 4)
    x = channels_last((1, 600, 5, 7), np.float16, 1)
    w = np.random.default_rng(2).standard_normal((40, 600, kernel, kernel)).astype(np.float16).astype(np.float32)
    bias, residual = (
        np.random.default_rng(s).standard_normal(n).astype(np.float32) for s, n in ((3, 40), (4, 35 * 40))
    )
    views = view_of(bias, index=5), view_of(residual, index=6)
    value = Op("add", (Op("add", (Result(0, F32), Load(0, F32)), F32), Load(1, F32)), F32)
    epilogue = Epilogue(
        Op("max", (value, Const(0.0, F32)), F32), (Operand(views[0], (0, 0, 1)), Operand(views[1], (0, 40, 1)))
    )
    out = channels_last((1, 40, 5, 7), dtype)
    run(x, w, shape, out, epilogue, operands={v.storage: a for v, a in zip(views, (bias, residual))})
    beside = residual.reshape(5, 7, 40).transpose(2, 0, 1)
    expected = np.maximum(defined(x, w, shape) + bias[:, None, None] + beside, 0)
    assert np.all(np.abs(out - expected) <= limit(x, w, shape))


@needs_halves
def test_float32_pixels_are_rounded_first() -> None:
    shape = kernels.ConvShape.conv((1, 24, 6, 6), (16, 24, 1, 1))
    x = channels_last((1, 24, 6, 6), np.float32, 1)
    w = np.random.default_rng(2).standard_normal((16, 24, 1, 1)).astype(np.float32)
    out, same = channels_last((1, 16, 6, 6), np.float32), channels_last((1, 16, 6, 6), np.float32)
    rounded = channels_last((1, 24, 6, 6), np.float16)
    rounded[...] = x
    run(x, w, shape, out)
    run(rounded, w, shape, same)
    assert np.array_equal(out, same)


@needs_halves
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_channel_at_a_time(data: st.DataObject) -> None:
    kernel, size, how = drawn_window(data, most=5, padding=3)
    channels = data.draw(st.integers(2, 70))
    shape = kernels.ConvShape.conv((1, channels, *size), (channels, 1, *kernel), group=channels, **how)
    w = np.random.default_rng(1).standard_normal((channels, 1, *kernel)).astype(np.float16).astype(np.float32)
    x = channels_last((1, channels, *size), np.float16, 2)
    out = channels_last((1, channels, *shape.out[1:]), data.draw(st.sampled_from((np.float16, np.float32))))
    assert kernels.takes_halves(shape, ISA) and run(x, w, shape, out) == "depthwise halves"
    assert np.all(np.abs(out - defined(x, w, shape)) <= limit(x, w, shape))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_large_windows_are_widened(dtype: Any) -> None:
    """So they are everywhere without the arithmetic."""
    shape = kernels.ConvShape.conv((1, 37, 9, 9), (37, 1, 7, 7), pads=(3,) * 4, group=37)
    x, out = channels_last((1, 37, 9, 9), np.float16, 1), channels_last((1, 37, 9, 9), dtype)
    w = np.random.default_rng(2).standard_normal((37, 1, 7, 7)).astype(np.float32)
    assert not kernels.takes_halves(shape, ISA) and run(x, w, shape, out) == "depthwise"
    np.testing.assert_allclose(out, defined(x, w, shape), rtol=2e-3 if dtype is np.float16 else 1e-5, atol=2e-3)


def test_shapes_that_stay_in_float32() -> None:
    """First layers, whose strips are float32, results of few channels, and machines without the arithmetic."""
    made = kernels.ConvShape.conv
    usual = made((1, 32, 8, 8), (32, 32, 3, 3))
    for shape in (made((1, 3, 8, 8), (32, 3, 3, 3)), made((1, 64, 8, 8), (1, 64, 1, 1))):
        assert not kernels.takes_halves(shape, ISA)
        assert kernels.packing(shape, ISA, dtype=DType.float16) != "halves"
    plain = with_extensions(ISA, ISA.extensions - {"fullfp16"})
    assert not kernels.takes_halves(usual, plain) and kernels.packing(usual, plain, dtype=DType.float16) != "halves"
