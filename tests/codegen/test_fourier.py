"""DFT and STFT, by passes and as matrix products, against NumPy's transforms in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.fourier import dft, fast, stft, unsupported
from ranvier.codegen.llvm.fourier.transform import Transform
from ranvier.codegen.llvm.isa import TABLE, Isa, named
from ranvier.codegen.llvm.library import source as source_of
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
    isa: Isa,
    x: Array,
    *,
    inverse: bool = False,
    onesided: bool = False,
    length: int | None = None,
    axis: int = -2,
    coarse: bool = False,
) -> None:
    """Along ``axis`` of x, through views that bring it next to the parts."""
    moved = np.moveaxis(x, axis, -2)
    expected = expected_dft(moved, inverse, onesided, length)
    out_shape = list(np.moveaxis(expected, -2, axis).shape)
    out = np.full(out_shape, np.nan, x.dtype)
    source, target = view_of(moved), view_of(np.moveaxis(out, axis, -2), "output")
    launches = dft(source, target, isa, inverse=inverse, onesided=onesided, length=length, coarse=coarse)
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


# Lengths whose passes are of every kind, lengths that only products take, and any other.
LENGTHS = st.one_of(
    st.sampled_from([16, 32, 48, 64, 75, 90, 128, 143, 160, 182, 200, 242, 256, 338, 400, 405, 512, 1000, 1024]),
    st.sampled_from([1, 2, 17, 34, 101, 323, 578]),
    st.integers(1, 300),
)
some = settings(max_examples=40, deadline=None)


@some
@given(
    isa=st.sampled_from(ISAS),
    length=LENGTHS,
    batch=st.lists(st.integers(1, 5), max_size=3),
    parts=st.sampled_from([1, 2]),
    way=st.sampled_from(["forward", "onesided", "inverse", "mirrored"]),
    stored=st.sampled_from(["dense", "axis first", "reversed", "apart"]),
    cut=st.integers(-3, 3),
    coarse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_transform(
    isa: Isa, length: int, batch: list[int], parts: int, way: str, stored: str, cut: int, coarse: bool, seed: int
) -> None:
    if way == "onesided":
        parts = 1
    inverse, onesided = way in ("inverse", "mirrored"), way in ("onesided", "mirrored")
    points = max(1, (length // 2 + 1 if way == "mirrored" else length) + cut)
    x = signal(seed, *batch, points, parts)
    if stored == "reversed":
        x = x[..., ::-1, :]
    elif stored == "apart":
        x = np.repeat(np.repeat(x, 2, axis=-2), 3, axis=-1)[..., ::2, ::3]
    axis = -2
    if stored == "axis first":
        x, axis = np.moveaxis(x, -2, 0).copy(), 0
    check_dft(isa, x, inverse=inverse, onesided=onesided, length=length, axis=axis, coarse=coarse)


@some
@given(
    isa=st.sampled_from(ISAS),
    length=LENGTHS,
    batch=st.integers(1, 3),
    more=st.integers(0, 200),
    step=st.integers(1, 70),
    parts=st.sampled_from([1, 2]),
    onesided=st.booleans(),
    window=st.sampled_from(["none", "constant", "given", "apart"]),
    wanted=st.sampled_from(["spectrum", "power", "power in bfloat16"]),
    coarse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_frames(
    isa: Isa,
    length: int,
    batch: int,
    more: int,
    step: int,
    parts: int,
    onesided: bool,
    window: str,
    wanted: str,
    coarse: bool,
    seed: int,
) -> None:
    onesided = onesided and parts == 1
    x, weights = signal(seed, batch, length + more, parts), signal(seed + 1, length)  # of no symmetry
    frames = np.lib.stride_tricks.sliding_window_view(as_complex(x), length, axis=1)[:, ::step]
    weighted = frames if window == "none" else frames * weights
    expected = as_pairs((np.fft.rfft if onesided else np.fft.fft)(weighted, axis=-1))
    if wanted != "spectrum":
        expected = np.square(expected).sum(axis=-1)
    out = np.full(expected.shape, np.nan, np.float32 if wanted != "power in bfloat16" else ml_dtypes.bfloat16)
    source, target = view_of(x), view_of(out, "output")
    target.storage.stands_for = None if out.dtype == np.float32 else DType.float32
    bound = {source.storage: x, target.storage: out}
    taken: View | None = None
    if window == "constant":
        taken = View.constant(weights, DType.float32)
    elif window != "none":
        held = weights if window == "given" else np.repeat(weights, 2)[::2]
        taken = view_of(held)
        bound[taken.storage] = held
    how = {"frame_step": step, "frame_length": length, "onesided": onesided, "coarse": coarse}
    run(stft(source, taken, target, isa, **how), isa, bound)
    if wanted == "power in bfloat16":
        size = expected + 1e-5 * np.abs(expected).max(initial=0)
        assert (np.abs(out.astype(np.float64) - expected) <= size * 2.0**-8).all()
        return
    check(out, expected, np.float32)


@each_isa
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 17, 33])
def test_signals_do_not_touch_each_other(isa: Isa, count: int) -> None:
    """Neither silence nor what is not a number spreads, and a signal's bits do not depend on its neighbours."""
    x = signal(14, count, 64, 1)
    x[count // 2] = 0
    x[-1] = np.nan if count > 2 else x[-1]
    out, alone = (np.full((count, 33, 2), 7, np.float32) for _ in range(2))
    for rows in (slice(None), *(slice(k, k + 1) for k in range(count))):
        result = out if rows == slice(None) else alone
        source, target = view_of(x[rows]), view_of(result[rows], "output")
        run(dft(source, target, isa, onesided=True), isa, {source.storage: x[rows], target.storage: result[rows]})
    np.testing.assert_array_equal(out, alone)
    assert not out[count // 2].any()
    assert np.isfinite(out[: count if count < 3 else -1]).all()


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("dtype, work", [(np.float32, "double"), (np.float64, "double"), (np.float32, "float")])
def test_vectors_of_any_width(lanes: int, dtype: Any, work: Any) -> None:
    """What other processors run, here made of several vectors or of a part of one: the same to the last bit."""
    isa = ISAS[0]
    for transform, points in (
        (Transform(96, 49, 1, 2, False, False), 96),
        (Transform(96, 96, 1, 2, False, False), 90),
        (Transform(225, 225, 2, 2, True, False), 225),
        (Transform(96, 96, 2, 1, True, True), 49),
    ):
        x = signal(16, 2, 21, points, transform.parts, dtype=dtype)
        found = []
        for width in (2, lanes):
            chosen = fast.passes(transform, 42, x.itemsize, isa, work)
            assert chosen is not None
            out = np.full((2, 21, transform.bins, transform.made), np.nan, dtype)
            source, target = view_of(x), view_of(out, "output")
            launch = fast.launch(transform, replace(chosen, lanes=width), source, None, target)
            run([launch], isa, {source.storage: x, target.storage: out}, split=3)
            found.append(out)
        np.testing.assert_array_equal(*found)


@each_isa
@pytest.mark.parametrize("n", [225, 400, 512])
@pytest.mark.parametrize("coarse", [False, True])
def test_soft_bins_beside_loud_ones(isa: Isa, n: int, coarse: bool) -> None:
    """Every bin is exact by itself, not only beside the loudest one: logarithms of spectra show both alike. Where
    float32 will do, bins are as exact as the loudest one's last digits."""
    loud = np.sin(np.arange(60 * n) * 0.7) * 1e4
    x = (signal(15, 60 * n, dtype=np.float64) + loud).astype(np.float32).reshape(60, n, 1)
    window = np.hanning(n).astype(np.float32)
    expected = np.fft.rfft(x[..., 0].astype(np.float64) * window, axis=-1)
    out = np.full((1, 60, n // 2 + 1, 2), np.nan, np.float32)
    source, target = view_of(x.reshape(1, -1)), view_of(out, "output")
    how = {"frame_step": n, "frame_length": n, "coarse": coarse}
    run(
        stft(source, View.constant(window, DType.float32), target, isa, **how),
        isa,
        {source.storage: x, target.storage: out},
    )
    errors = np.abs(as_complex(out)[0] - expected)
    if coarse:
        assert errors.max() < 2.0**-21 * np.abs(expected).max()
    else:
        assert (errors / np.abs(expected)).max() < 2.0**-23


def test_which_way() -> None:
    wide, narrow = named("avx512", "x86_64"), named("avx2", "x86_64")

    def real(n: int, isa: Isa = wide, count: int = 100, work: Any = "double") -> fast.Passes | None:
        return fast.passes(Transform(n, n // 2 + 1, 1, 2, False, False), count, 4, isa, work)

    def radices(n: int, isa: Isa = wide) -> tuple[int, ...]:
        found = real(n, isa)
        assert found is not None
        assert found.points == int(np.prod(found.radices)) == (n if n % 2 else n // 2)
        return found.radices

    assert radices(512) == (4, 8, 8)
    assert radices(512, narrow) == (4, 4, 4, 4)
    assert radices(400) == (5, 5, 8)
    assert radices(4 * 91) == (7, 13, 2)
    assert radices(225) == (3, 3, 5, 5)
    assert real(32) is None, "a product is quicker"
    assert real(34 * 34) is None, "17 is too large a prime"
    assert real(1 << 20) is None, "too much scratch memory"
    sides = [found and found.lanes for found in (real(512), real(512, count=7), real(512, count=1), real(1 << 14))]
    assert sides == [8, 8, 2, 2], "as wide as there are signals, and as stay near"
    coarse = [found and found.lanes for found in (real(512, work="float"), real(512, count=7, work="float"))]
    assert coarse == [16, 8], "twice as many fit a vector"


@pytest.mark.parametrize("isa", TABLE, ids=lambda isa: f"{isa.triple} {isa.name}")
@pytest.mark.parametrize("way", ["both sides", "odd", "inverse", "mirrored", "frames"])
def test_code_for_other_processors(isa: Isa, way: str) -> None:
    """Compiled, not run: what runs here is tested above."""
    n = {"odd": 5 * 7 * 11 * 13, "inverse": 3 * 128}.get(way, 1024)
    x = np.zeros((2, 20, 60, 1 if way in ("both sides", "odd") else 2), np.float32)
    if way == "frames":
        source, window = view_of(np.zeros((3, 3000), np.float32)), view_of(np.zeros(n, np.float32))
        out = view_of(np.zeros((3, (3000 - n) // 100 + 1, n // 2 + 1, 2), np.float32), "output")
        launches = stft(source, window, out, isa, frame_step=100, frame_length=n)
    else:
        inverse, onesided = way in ("inverse", "mirrored"), way in ("odd", "mirrored")
        bins = n // 2 + 1 if way == "odd" else n
        out = view_of(np.zeros((2, 20, bins, 1 if way == "mirrored" else 2), np.float32), "output")
        launches = dft(view_of(x), out, isa, inverse=inverse, onesided=onesided, length=n)
    (launch,) = launches
    code = compiler.compile_object(source_of(launch.spec, isa), isa)
    assert int.from_bytes(code[18:20], "little") == {"x86_64": 62, "aarch64": 183}[isa.triple]


def test_reasons() -> None:
    assert unsupported(DType.float32, 512) is None
    assert unsupported(DType.float32, 1 << 18) is None
    assert "10007" in (unsupported(DType.float32, 10007) or "")
    assert "float16" in (unsupported(DType.float16, 16) or "")
    assert "9 axes" in (unsupported(DType.float32, 16, 9) or "")
