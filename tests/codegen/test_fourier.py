"""DFT and STFT as matrix products against NumPy's transforms in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.fourier import dft, stft, unsupported
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Array, Runner, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
_kept: list[object] = []  # kernels of earlier cases: most cases share them, and each is compiled once


def run(launches: Sequence[Launch], isa: Isa, bound: Mapping[Storage, Array], *, split: int = 1) -> None:
    runner = Runner(launches, isa, bound, split=split)
    _kept.append(runner.kernels)
    runner()


def signal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def as_complex(x: Array) -> Array:
    wide = x.astype(np.float64)
    return wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]


def as_pairs(z: Array) -> Array:
    return np.stack([z.real, z.imag], axis=-1)


def expected_dft(x: Array, inverse: bool, onesided: bool, length: int | None) -> Array:
    z = as_complex(x)
    if inverse and onesided:
        return np.fft.irfft(z, n=length, axis=-1)[..., None]
    transform = np.fft.ifft if inverse else np.fft.rfft if onesided else np.fft.fft
    return as_pairs(transform(z, n=length, axis=-1))


def check(found: Array, expected: Array, dtype: Any) -> None:
    """Errors count against the size of the whole result: that is what rounding of the inputs moves."""
    assert found.shape == expected.shape
    error = np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
    assert error < (1e-14 if dtype == np.float64 else 2e-6), error


def check_dft(
    isa: Isa, x: Array, *, inverse: bool = False, onesided: bool = False, length: int | None = None, axis: int = -2
) -> None:
    """Along ``axis`` of x, through views that bring it next to the parts."""
    moved = np.moveaxis(x, axis, -2)
    expected = expected_dft(moved, inverse, onesided, length)
    out_shape = list(np.moveaxis(expected, -2, axis).shape)
    out = np.full(out_shape, np.nan, x.dtype)
    source, target = view_of(moved), view_of(np.moveaxis(out, axis, -2), "output")
    launches = dft(source, target, isa, inverse=inverse, onesided=onesided, length=length)
    run(launches, isa, {source.storage: moved, target.storage: out}, split=2)
    check(np.moveaxis(out, axis, -2), expected, x.dtype)


@each_isa
@pytest.mark.parametrize("n", [1, 2, 5, 16, 37, 128])
@pytest.mark.parametrize("parts", [1, 2])
def test_short_transforms(isa: Isa, n: int, parts: int) -> None:
    x = signal(0, 3, n, parts)
    check_dft(isa, x)
    check_dft(isa, x, inverse=True)
    if parts == 1:
        check_dft(isa, x, onesided=True)
    if n > 1:
        check_dft(isa, x, inverse=True, onesided=True)


@each_isa
@pytest.mark.parametrize("n", [1024, 1200, 2 * 3 * 5 * 7 * 11])
def test_long_transforms(isa: Isa, n: int) -> None:
    check_dft(isa, signal(1, 2, n, 1), onesided=True)
    check_dft(isa, signal(2, 2, n, 2))
    check_dft(isa, signal(3, 1, n, 2), inverse=True)
    check_dft(isa, signal(4, 3, n // 2 + 1, 2), inverse=True, onesided=True)
    check_dft(isa, signal(5, 1, n // 2 + 1, 2), inverse=True, onesided=True, length=n + 1)


@each_isa
@pytest.mark.parametrize("length", [7, 20, 1500])
def test_cut_and_padded(isa: Isa, length: int) -> None:
    for parts in (1, 2):
        x = signal(6, 2, 13, parts)
        check_dft(isa, x, length=length)
        check_dft(isa, x, inverse=True, length=length)
        check_dft(isa, x, inverse=True, onesided=True, length=length)


@each_isa
def test_axes_and_batches(isa: Isa) -> None:
    for parts in (1, 2):
        x = signal(7, 2, 6, 3, 10, parts)
        for axis in (0, 1, 2, 3):
            check_dft(isa, x, axis=axis)
        check_dft(isa, signal(8, 40, 1, parts), axis=0)
        check_dft(isa, signal(9, 1024, 3, parts), axis=0)
    check_dft(isa, signal(10, 12, 1), onesided=True)


@each_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float64_and_accuracy(isa: Isa, dtype: Any) -> None:
    for n in (400, 512, 2048):
        check_dft(isa, signal(11, 2, n, 1, dtype=dtype), onesided=True)


@each_isa
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shape", [(16, 5, 100), (400, 160, 1000), (1024, 256, 3000)], ids=str)
def test_stft(isa: Isa, constant: bool, shape: tuple[int, int, int]) -> None:
    length, step, total = shape
    window = np.hanning(length).astype(np.float32)
    for parts, onesided, windowed in ((1, True, True), (1, False, False), (2, False, True)):
        x = signal(12, 2, total, parts)
        frames = np.lib.stride_tricks.sliding_window_view(as_complex(x), length, axis=1)[:, ::step]
        weighted = frames * window if windowed else frames
        expected = as_pairs((np.fft.rfft if onesided else np.fft.fft)(weighted, axis=-1))
        out = np.full(expected.shape, np.nan, np.float32)
        source, target = view_of(x), view_of(out, "output")
        bound = {source.storage: x, target.storage: out}
        given: View | None = None
        if windowed:
            given = View.constant(window, DType.float32) if constant else view_of(window)
            if not constant:
                bound[given.storage] = window
        launches = stft(source, given, target, isa, frame_step=step, frame_length=length, onesided=onesided)
        run(launches, isa, bound)
        check(out, expected, np.float32)


def test_signal_without_parts_axis() -> None:
    x = signal(13, 3, 50)
    out = np.full((3, 5, 9, 2), np.nan, np.float32)
    source, target = view_of(x), view_of(out, "output")
    launches = stft(source, None, target, ISAS[0], frame_step=8, frame_length=16)
    run(launches, ISAS[0], {source.storage: x, target.storage: out})
    frames = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), 16, axis=1)[:, ::8]
    check(out, as_pairs(np.fft.rfft(frames, axis=-1)), np.float32)


def test_reasons() -> None:
    assert unsupported(DType.float32, 512) is None
    assert unsupported(DType.float32, 1 << 18) is None
    assert "10007" in (unsupported(DType.float32, 10007) or "")
    assert "float16" in (unsupported(DType.float16, 16) or "")
    assert "9 axes" in (unsupported(DType.float32, 16, 9) or "")
