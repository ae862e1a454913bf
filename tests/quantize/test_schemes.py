"""Schemes against their definitions, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidConfig
from ranvier.quantize import (
    Float8,
    Integers,
    Nf4,
    Quantized,
    Ternary,
    register_scheme,
    scheme,
    scheme_names,
    token_codes,
)
from ranvier.quantize.blocks import block_of, counts, expand, reduce

Array = np.ndarray[Any, Any]
MATRICES = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 9), st.integers(1, 20)), elements=st.floats(-1e3, 1e3, width=32)
)


def block_at(quantized: Quantized, place: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i // b for i, b in zip(place, quantized.block))


@settings(max_examples=200, deadline=None)
@given(MATRICES, st.sampled_from(["tensor", "channel", "group", "block"]), st.integers(1, 7), st.sampled_from([0, 1]))
def test_blocks(array: Array, granularity: Any, group: int, axis: int) -> None:
    block = block_of(array.shape, granularity, axis, group)
    largest = reduce(array, block, np.max)
    assert largest.shape == counts(array.shape, block)
    wide = expand(largest, block, array.shape)
    for place in np.ndindex(array.shape):
        corner = tuple(slice(i // b * b, i // b * b + b) for i, b in zip(place, block))
        assert wide[place] == array[corner].max()


@settings(max_examples=300, deadline=None)
@given(
    MATRICES,
    st.integers(2, 8),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["tensor", "channel", "group"]),
    st.sampled_from(["minmax", "mse"]),
)
def test_integers(array: Array, bits: int, symmetric: bool, signed: bool, granularity: Any, fit: str) -> None:
    chosen = Integers(bits, symmetric, granularity, 5, signed=signed, fit=fit)
    found = chosen.quantize(array)
    low, high = chosen.limits
    assert found.codes.min() >= low and found.codes.max() <= high
    zeros = np.full(found.scales.shape, chosen.middle) if found.zeros is None else found.zeros
    back = found.dequantize()
    for place in np.ndindex(array.shape):
        at = block_at(found, place)
        scale, zero = float(found.scales[at]), int(zeros[at])
        nearest = np.clip(np.rint(float(array[place]) / scale) + zero, low + (symmetric and bits > 1), high)
        assert found.codes[place] == nearest
        assert back[place] == pytest.approx((int(found.codes[place]) - zero) * scale, rel=1e-6, abs=1e-12)
        if fit == "minmax":
            # half a step, and as much again where the zero point was rounded
            assert abs(back[place] - array[place]) <= scale * (0.5 if symmetric else 1.0) * (1 + 1e-5) + 1e-12


def test_cutting_ranges_lessens_the_error() -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_t(3, (16, 128)).astype(np.float32)
    errors = {}
    for fit in ("minmax", "mse"):
        back = Integers(4, granularity="group", group=32, fit=fit).quantize(array).dequantize()
        errors[fit] = float(((back - array) ** 2).mean())
    assert errors["mse"] < 0.95 * errors["minmax"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_has_no_code(bad: float) -> None:
    with pytest.raises(InvalidConfig, match="infinite or NaN"):
        Integers().quantize(np.array([[1.0, bad]], np.float32))


@settings(max_examples=150, deadline=None)
@given(MATRICES, st.sampled_from(["e4m3", "e5m2"]), st.sampled_from(["tensor", "channel", "block"]))
def test_float8(array: Array, kind: str, granularity: Any) -> None:
    found = Float8(kind, granularity, 4).quantize(array)
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    most = float(ml_dtypes.finfo(dtype).max)
    scales = expand(found.scales, found.block, array.shape)
    assert np.isfinite(found.codes.astype(np.float32)).all()
    expected = np.clip(array / scales, -most, most).astype(dtype)
    assert found.codes.tobytes() == expected.tobytes()
    step = {"e4m3": 2**-3, "e5m2": 2**-2}[kind]
    np.testing.assert_allclose(found.dequantize(), array, rtol=step, atol=float(scales.max()) * 2**-6)


@settings(max_examples=100, deadline=None)
@given(MATRICES, st.integers(1, 40), st.booleans())
def test_nf4(array: Array, group: int, nested: bool) -> None:
    found = Nf4(group, nested, 4).quantize(array)
    assert found.codes.shape == array.shape and found.codes.max() < 16
    flat, codes = array.reshape(-1), found.codes.reshape(-1)
    back = found.dequantize().reshape(-1)
    levels = found.table
    assert levels is not None
    for k in range(flat.size):
        scale = found.scales[k // group]
        assert back[k] == np.float32(levels[codes[k]] * scale)
        if scale == 0:
            continue
        distances = np.abs(levels - flat[k] / scale)
        assert distances[codes[k]] <= distances.min() * (1 + 1e-5) + 1e-6
    if nested:
        np.testing.assert_array_equal(found.extra["nested"].numbers(), found.scales)


def test_ternary_is_the_definition() -> None:
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((64, 256)).astype(np.float32)
    found = Ternary().quantize(weights)
    scale = np.abs(weights).mean(dtype=np.float64).astype(np.float32)
    np.testing.assert_array_equal(found.codes, np.clip(np.rint(weights / scale), -1, 1))
    assert found.scales.item() == scale and set(np.unique(found.codes)) == {-1, 0, 1}
    # the same codes as another implementation of ternary blocks, where one scale serves both
    packed = gguf.quants.quantize(found.codes.astype(np.float32), gguf.GGMLQuantizationType.TQ2_0)
    back = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.TQ2_0)
    np.testing.assert_array_equal(back, found.codes)


def test_tokens() -> None:
    tokens = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    tokens[2] = 0
    codes, scales = token_codes(tokens)
    assert codes.dtype == np.int8 and scales.shape == (5, 1) and not codes[2].any()
    assert (np.abs(codes).max(axis=1)[[0, 1, 3, 4]] == 127).all()
    np.testing.assert_allclose(codes * scales, tokens, atol=float(scales.max()) / 2 * 1.001)


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int4", "uint4", "int2", "uint2", "fp8", "fp8_e5m2", "nf4", "ternary"]
)
def test_by_name(name: str) -> None:
    array = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    found = scheme(name).quantize(array)
    error = np.abs(found.dequantize() - array).mean()
    assert error < {8: 0.08, 4: 0.2, 2: 0.6}[found.bits]
    assert found.nbytes < array.nbytes / (32 / found.bits) * 2 + 64


def test_others_and_mistakes() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'int8'"):
        scheme("int 8")
    with pytest.raises(InvalidConfig, match="bits"):
        scheme("int8", bits=99)
    with pytest.raises(InvalidConfig, match="unknown option 'colour'"):
        scheme("int8", colour="red")
    from ranvier.quantize import schemes

    register_scheme("mine", lambda: Integers(3))
    try:
        assert "mine" in scheme_names() and scheme("mine").name == "int3"
    finally:
        del schemes._added["mine"]


def _raises(**options: Any) -> Any:
    raise ZeroDivisionError("once more")


@pytest.mark.parametrize("make", [_raises, lambda: None, object, lambda: Integers])
def test_schemes_of_others_that_are_none(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    from ranvier.quantize import schemes

    monkeypatch.setattr(schemes, "_added", {"theirs": make})
    with pytest.raises(InvalidConfig, match="scheme 'theirs'"):
        scheme("theirs")


@pytest.mark.parametrize("group", [1, 2, 256])
@pytest.mark.filterwarnings("error")
def test_nested_scales_near_the_largest_number(group: int) -> None:
    for numbers in ([3.4e38, 1.0], [3.4e38, -3.4e38, 3.4e38, 0.0, 0.0], [1e-45, 3e38, 1e-30, 1e-10]):
        array = np.array([*numbers, np.finfo(np.float32).max], np.float32)
        back = Nf4(1, nested=True, nested_group=group).quantize(array).dequantize()
        assert np.isfinite(back).all()
        np.testing.assert_allclose(back[-1], array[-1], rtol=1e-2)


def test_lists_that_are_no_array() -> None:
    with pytest.raises(DTypeMismatch):
        Integers(8).quantize([[1.0], [2.0, 3.0]])  # type: ignore[arg-type]


SCHEMES = [*scheme_names(), "nested nf4", "fp8 blocks"]


def scheme_of(name: str) -> Any:
    if name == "nested nf4":
        return Nf4(nested=True)
    return Float8(granularity="channel") if name == "fp8 blocks" else scheme(name)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.filterwarnings("error")
def test_what_no_scheme_takes(name: str) -> None:
    chosen = scheme_of(name)
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        with pytest.raises(InvalidConfig, match="infinite or NaN, or beyond"):
            chosen.quantize(np.array([[1.0, bad, 2.0]]))
    for odd in (np.ones((2, 2), np.complex64), np.array([["a"]])):
        with pytest.raises(DTypeMismatch, match="real numbers"):
            chosen.quantize(odd)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.filterwarnings("error")
def test_little_and_odd_arrays(name: str) -> None:
    chosen = scheme_of(name)
    wide = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    for array in (
        np.zeros((0, 4), np.float32),
        np.zeros((4, 0), np.float32),
        np.array(1.5, np.float32),
        np.zeros((2, 3), np.float32),
        np.full((4, 32), 1e-42, np.float32),
        np.full((2, 3), 3e38, np.float32),
        wide[::2, ::-3],
        np.asfortranarray(wide),
    ):
        back = chosen.quantize(array).dequantize()
        assert back.shape == array.shape and back.dtype == array.dtype and np.isfinite(back).all()
        same = chosen.quantize(np.ascontiguousarray(array)).dequantize().reshape(array.shape)
        np.testing.assert_array_equal(back, same)


def test_whole_numbers_and_lists_read_back_as_float32() -> None:
    back = Integers(8).quantize(np.array([[100, 1, 50]])).dequantize()
    assert back.dtype == np.float32 and back[0, 1] == pytest.approx(100 / 127)
    assert Integers(8).quantize([[1.0, 2.0]]).dequantize().dtype == np.float64  # as NumPy has it


def test_a_block_of_zeros_has_the_code_that_kernels_take_for_zero() -> None:
    found = Integers(4, False, "group", 2, signed=False).quantize(np.array([[0.0, 0.0, 1.0, 2.0]], np.float32))
    assert found.zeros is not None and found.zeros[0, 0] == 8 and (found.codes[0, :2] == 8).all()


def test_scales_of_few_bits() -> None:
    few = Integers(8, scale_dtype=DType.float16)
    small = few.quantize(np.full((2, 8), 1e-6, np.float32))
    assert small.scales.dtype == np.float16 and (small.scales > 0).all()
    with pytest.raises(InvalidConfig, match="beyond the range of float16"):
        few.quantize(np.full((2, 8), 1e10, np.float32))
    with pytest.raises(InvalidConfig, match="floating-point"):
        Integers(8, scale_dtype=DType.int8)


def test_bytes_of_nested_scales_are_those_that_are_kept() -> None:
    array = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    plain, nested = (Nf4(nested=on).quantize(array).nbytes for on in (False, True))
    assert plain == array.size // 2 + 4 * array.size // 64
    assert nested == array.size // 2 + 1024 + 4 * 256 + 4 * 4 + 4  # codes of 8 bits, their table, absmax, offset


@pytest.mark.parametrize(
    "make",
    [
        lambda: block_of((4, 4), "channel", 2),
        lambda: block_of((4, 4), "channel", -3),
        lambda: block_of((4, 4), "channel", 0.5),  # type: ignore[arg-type]
        lambda: block_of((4, 4), "block", 0, (2.5, 2)),  # type: ignore[arg-type]
        lambda: block_of((4, 4), "block", 0, None),  # type: ignore[arg-type]
        lambda: block_of((4, 4), "block", 0, 1.5),  # type: ignore[arg-type]
        lambda: block_of((4, 4), "block", 0, True),
        lambda: Integers(symmetric="no"),  # type: ignore[arg-type]
        lambda: Nf4(nested="no"),  # type: ignore[arg-type]
        lambda: scheme(8),  # type: ignore[arg-type]
        lambda: scheme(["int8"]),  # type: ignore[arg-type]
        lambda: register_scheme("mine", 3),  # type: ignore[arg-type]
        lambda: register_scheme(3, Nf4),  # type: ignore[arg-type]
    ],
)
def test_options_out_of_range(make: Any) -> None:
    with pytest.raises(InvalidConfig):
        make()


@settings(max_examples=40, deadline=None)
@given(MATRICES, st.integers(2, 5), st.booleans())
def test_no_other_cut_has_less_error(array: Array, bits: int, symmetric: bool) -> None:
    """Block by block, against every cut by the definition of codes."""
    chosen = Integers(bits, symmetric, "group", 6, signed=False, fit="mse")
    found = chosen.quantize(array)
    for row in range(array.shape[0]):
        for k in range(found.scales.shape[1]):
            part = array[row, 6 * k : 6 * k + 6].astype(np.float64)
            low, high = min(part.min(), 0.0), max(part.max(), 0.0)
            errors = []
            for factor in np.linspace(1.0, 0.5, 41):
                scale, zero = chosen.parameters(np.array(low * factor), np.array(high * factor))
                back = (chosen.codes(part, scale, zero).astype(np.float64) - zero) * scale.astype(np.float64)
                errors.append(float(((back - part) ** 2).sum()))
            scale, zero = found.scales[row, k].astype(np.float64), found.zeros[row, k]  # type: ignore[index]
            back = (found.codes[row, 6 * k : 6 * k + 6].astype(np.float64) - zero) * scale
            assert float(((back - part) ** 2).sum()) <= min(errors) * (1 + 1e-9) + 1e-30


@pytest.mark.parametrize("make", [lambda g: Integers(4, granularity="group", group=g, fit="mse"), lambda g: Nf4(g)])
def test_groups_larger_than_an_array_hold_all_of_it(make: Any) -> None:
    """Whatever they could hold: nothing is allocated for it."""
    array = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    large, whole = make(1 << 60).quantize(array), make(array.size).quantize(array)
    assert np.array_equal(large.codes, whole.codes) and np.array_equal(large.scales, whole.scales)
    assert np.array_equal(large.dequantize(), whole.dequantize())


@pytest.mark.parametrize("symmetric", [False, True])
def test_one_number_has_a_range_to_cut(symmetric: bool) -> None:
    for number in (1.5, -0.25, 0.0):
        found = Integers(4, symmetric, "tensor", fit="mse").quantize(np.array(number, np.float32))
        assert found.codes.shape == () and found.dequantize() == pytest.approx(number, rel=0.1)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16, DType.float32])
@pytest.mark.filterwarnings("error")
def test_the_largest_numbers_of_a_type_read_back_as_numbers(name: str, dtype: DType) -> None:
    most = float(ml_dtypes.finfo(dtype.numpy).max)
    array = (np.array([[1.0, -1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.25], [-1.0, 1.0, 0.0, 0.0]]) * most).astype(dtype.numpy)
    found = scheme_of(name).quantize(array)
    back = found.dequantize()
    assert back.dtype == array.dtype and np.isfinite(back.astype(np.float64)).all()
    if found.scales.size:
        odd = replace(found, scales=np.full_like(found.scales, np.inf))
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(odd.dequantize().astype(np.float64)).all()  # what a file has is not made finite
