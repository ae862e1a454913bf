"""Transformations against the same done by NumPy on the whole array, and what they cost."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.quantize import scheme
from ranvier.weights import Cast, Quantize, Reshape, Scale, Slice, Transpose, apply
from ranvier.weights import blob as blob_module
from ranvier.weights import stored as stored_module
from ranvier.weights.blob import Bytes, MemoryBlob, check_range, gathered
from ranvier.weights.stored import Decoded, Stored, TensorInfo

Array = np.ndarray[Any, Any]


class Counted(MemoryBlob):
    """Bytes that are far away, as it were, and count how many are asked for."""

    near = False
    asked = 0

    def read(self, start: int, stop: int) -> Bytes:
        check_range(self, start, stop)
        self.asked += stop - start
        return super().read(start, stop)


def stored(array: Array) -> tuple[Stored, Counted]:
    blob = Counted("x", b"\7" * 5 + array.tobytes())
    info = TensorInfo("x", DType[array.dtype.name], array.shape, array.nbytes)
    return Stored(info, blob, 5), blob


@st.composite
def chains(draw: st.DrawFn) -> tuple[Array, list[Any]]:
    """An array and steps over it that fit."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    array = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape).astype(np.float32)
    steps: list[Any] = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["slice", "transpose", "reshape", "cast", "scale"]))
        if kind == "slice":
            part = tuple(
                slice(*sorted((draw(st.integers(0, d)), draw(st.integers(0, d)))), draw(st.integers(1, 3)))
                for d in shape
            )
            steps.append(Slice(part))
            shape = np.empty(shape)[part].shape
        elif kind == "transpose":
            axes = tuple(draw(st.permutations(range(len(shape)))))
            steps.append(Transpose(axes))
            shape = tuple(shape[a] for a in axes)
        elif kind == "reshape":
            steps.append(Reshape((-1,)) if np.prod(shape) else Reshape((*shape, 1)))
            shape = (int(np.prod(shape)),) if np.prod(shape) else (*shape, 1)
        elif kind == "cast":
            steps.append(Cast(draw(st.sampled_from(["float32", "float64", "float16"]))))
        else:
            steps.append(Scale(draw(st.sampled_from([0.5, np.full(shape[-1:], 2.0)]))))
    return array, steps


def by_numpy(array: Array, step: Any) -> Array:
    if isinstance(step, Slice):
        return array[step.part]
    if isinstance(step, Transpose):
        return array.transpose(step.axes)
    if isinstance(step, Reshape):
        return array.reshape(step.shape)
    if isinstance(step, Cast):
        return array.astype(step.dtype)
    return (array * step.factor).astype(array.dtype)


@settings(max_examples=300, deadline=None)
@given(chains())
def test_chains(chain: tuple[Array, list[Any]]) -> None:
    array, steps = chain
    weight = apply(stored(array)[0], *steps)
    expected = array
    for step in steps:
        expected = by_numpy(expected, step)
    assert weight.info.shape == expected.shape
    got = weight.read()
    assert got.dtype == expected.dtype == weight.info.dtype.numpy
    np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=2e-3)


TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "int64", "uint64", "int4", "bool"]


@settings(max_examples=300, deadline=None)
@given(chains(), st.sampled_from(TYPES), st.sampled_from(TYPES), st.booleans(), st.data())
def test_a_part_is_that_of_the_whole(
    chain: tuple[Array, list[Any]], stored_as: str, cast_to: str, fortran: bool, data: st.DataObject
) -> None:
    """Whatever the types, and however the elements lie: a part that moved to the file gives the same bytes."""
    numbers = np.clip(chain[0] * 40, -100, 100) if "u" not in stored_as else np.abs(chain[0] * 40)
    array = numbers.astype(DType[stored_as].numpy)
    blob = Counted("x", b"\7" * 3 + array.tobytes("F" if fortran else "C"))
    steps = (1, *np.cumprod(array.shape[:-1]).tolist()) if fortran else ()
    info = TensorInfo("x", DType[stored_as], array.shape, array.nbytes)
    near = MemoryBlob("x", array.tobytes())
    position = data.draw(st.integers(0, len(chain[1])))
    over = [*chain[1][:position], Cast(cast_to), Scale(0.75), *chain[1][position:]]
    whole = apply(Stored(info, near, 0, packed=False), *over).read()
    part = tuple(
        slice(data.draw(st.integers(0, d)), data.draw(st.integers(0, d)), data.draw(st.integers(1, 3)))
        for d in whole.shape
    )
    got = apply(Stored(info, blob, 3, steps, packed=False), *over, Slice(part)).read()
    assert got.dtype == whole.dtype and got.shape == whole[part].shape
    assert got.tobytes() == whole[part].tobytes()


def test_a_part_of_a_transposed_cast_costs_the_part() -> None:
    array = np.arange(1000 * 64, dtype=np.float32).reshape(1000, 64)
    weight, blob = stored(array)
    got = apply(weight, Transpose(), Cast("float64"), Scale(2.0), Slice((slice(None), slice(500, 510)))).read()
    np.testing.assert_array_equal(got, array.T[:, 500:510] * 2.0)
    assert blob.asked == 10 * 64 * 4


def test_a_part_of_a_reshaped_one_costs_the_part() -> None:
    array = np.arange(4096, dtype=np.float32)
    weight, blob = stored(array)
    got = apply(weight, Reshape((64, -1)), Slice(slice(3, 5))).read()
    np.testing.assert_array_equal(got, array.reshape(64, 64)[3:5])
    assert blob.asked == 2 * 64 * 4


def test_a_part_of_what_is_reshaped_later_costs_its_rows() -> None:
    array = np.arange(1000 * 64, dtype=np.float32).reshape(1000, 64)
    weight, blob = stored(array)
    got = apply(weight, Cast("float64"), Reshape((1, 2000, 32)), Slice((slice(None), slice(1001, 1005, 2)))).read()
    np.testing.assert_array_equal(got, array.reshape(1, 2000, 32)[:, 1001:1005:2])
    assert blob.asked == 2 * 64 * 4
    assert apply(weight, Transpose(), Reshape((-1,)), Slice(slice(5, 5))).read().shape == (0,)
    assert blob.asked == 2 * 64 * 4, "of nothing, nothing is read"


@pytest.mark.parametrize("kind", [MemoryBlob, Counted])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_bytes_that_are_neither_true_nor_false(kind: type[MemoryBlob], shape: tuple[int, ...]) -> None:
    weight = Stored(TensorInfo("x", DType.bool, shape, 4), kind("x", b"\0\1\2\xff"), 0)
    for found in (weight.read(), apply(weight, Transpose(), Transpose(), Slice(...)).read()):
        assert found.dtype == np.bool_ and found.view(np.uint8).reshape(-1).tolist() == [0, 1, 1, 1]
    one = Stored(TensorInfo("x", DType.bool, (), 1), kind("x", b"\2"), 0).read()
    assert isinstance(one, np.ndarray) and one.view(np.uint8) == 1


@pytest.mark.parametrize("near", [False, True])
def test_steps_of_any_size(near: bool) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    weight = stored_unpacked(array) if near else stored(array)[0]
    part = (slice(1, None, 10**30), slice(2, 10**30, 10**18))
    assert apply(weight, Slice(part)).read().tolist() == [[6.0]]
    assert apply(weight, Slice(part), Slice(part[::-1])).read().shape == (0, 0)
    assert apply(weight, Transpose(), Slice(part)).read().tolist() == [[9.0]]


def test_rows_far_apart_cost_the_rows() -> None:
    array = np.arange(400 * 30_000, dtype=np.float32).reshape(400, 30_000)
    weight, blob = stored(array)
    np.testing.assert_array_equal(apply(weight, Slice(slice(7, None, 100))).read(), array[7::100])
    assert blob.asked == 4 * 30_000 * 4


def test_columns_of_what_lies_in_another_order_cost_the_columns() -> None:
    """As those of a .npy in Fortran's order, or of a transposed tensor that PyTorch saved."""
    array = np.arange(30_000 * 60, dtype=np.float32).reshape(30_000, 60)
    blob = Counted("x", np.asfortranarray(array).tobytes("F"))
    weight = Stored(TensorInfo("x", DType.float32, array.shape, array.nbytes), blob, 0, (1, 30_000))
    part = (slice(10, 20), slice(0, None, 20))
    np.testing.assert_array_equal(apply(weight, Slice(part)).read(), array[part])
    assert blob.asked == 10 * 3 * 4


def test_columns_of_packed_elements_cost_the_columns() -> None:
    codes = np.random.default_rng(0).integers(0, 256, (30, 80_000)).astype(np.uint8)
    blob = Counted("x", codes.tobytes())
    weight = Stored(TensorInfo("x", DType.uint4, (30, 160_000), codes.nbytes), blob, 0)
    whole = weight.read()
    blob.asked = 0
    part = (slice(2, 30, 9), slice(1001, 1010, 2))
    np.testing.assert_array_equal(apply(weight, Slice(part)).read(), whole[part])
    assert blob.asked == 4 * 5


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_parts_by_any_strides(data: st.DataObject) -> None:
    """In order, transposed, with gaps, with elements that are seen many times; near and far, in few ranges and many."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    strides = tuple(data.draw(st.sampled_from([0, 1, 2, 6, 35])) for _ in shape)
    reach = 1 + sum((d - 1) * step for d, step in zip(shape, strides))
    flat = np.arange(reach, dtype=np.int16)
    array = np.lib.stride_tricks.as_strided(flat, shape, [2 * step for step in strides])
    part = tuple(
        slice(*sorted((data.draw(st.integers(0, d)), data.draw(st.integers(0, d)))), data.draw(st.integers(1, 3)))
        for d in shape
    )
    blob = data.draw(st.sampled_from([MemoryBlob, Counted]))("x", flat.tobytes())
    weight = Stored(TensorInfo("x", DType.int16, shape, 2 * reach), blob, 0, strides)
    gap = data.draw(st.sampled_from([0, 4, 1 << 16]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_module, "GAP", gap)
        patch.setattr(blob_module, "gathered", lambda ranges: gathered(ranges, gap))
        patch.setattr(stored_module, "_MOST_RANGES", data.draw(st.sampled_from([1, 4, 4096])))
        np.testing.assert_array_equal(apply(weight, Slice(part)).read(), array[part])


def test_a_cast_to_float8_keeps_to_its_range() -> None:
    weight, _ = stored(np.array([1.0, 1e6, -1e6], np.float32))
    got = apply(weight, Cast("float8_e4m3fn")).read()
    np.testing.assert_array_equal(got.astype(np.float32), [1.0, 448.0, -448.0])
    assert got.dtype == ml_dtypes.float8_e4m3fn


def test_a_cast_to_whole_numbers_takes_the_nearest() -> None:
    weight, _ = stored(np.array([0.9, -0.9, 1.5, 2.5, -3.4], np.float32))
    assert apply(weight, Cast("int8")).read().tolist() == [1, -1, 2, 2, -3]
    assert apply(weight, Cast("bool")).read().all(), "what is not zero is true"
    far, _ = stored(np.array([300.4, -300.0, 1e30, -1e30], np.float32))
    assert apply(far, Cast("int8")).read().tolist() == [127, -128, 127, -128]
    assert apply(far, Cast("uint4")).read().astype(int).tolist() == [15, 0, 15, 0]
    largest, least = apply(far, Cast("int64")).read()[2:].tolist()
    assert largest >= 2**63 - 2**11 and least == -(2**63)


def test_a_cast_between_whole_numbers_keeps_to_the_range() -> None:
    weight, _ = stored(np.array([300, -300, 100, -1, 0], np.int32))
    assert apply(weight, Cast("int8")).read().tolist() == [127, -128, 100, -1, 0]
    assert apply(weight, Cast("uint8")).read().tolist() == [255, 0, 100, 0, 0]
    assert apply(weight, Cast("int4")).read().astype(int).tolist() == [7, -8, 7, -1, 0]
    assert apply(weight, Cast("uint64")).read().tolist() == [300, 0, 100, 0, 0]
    assert apply(weight, Cast("int4"), Cast("uint4")).read().astype(int).tolist() == [7, 0, 7, 0, 0]
    assert apply(weight, Cast("uint2"), Cast("int4")).read().astype(int).tolist() == [3, 0, 3, 0, 0]
    large, _ = stored(np.array([2**64 - 1, 5], np.uint64))
    assert apply(large, Cast("int64")).read().tolist() == [2**63 - 1, 5]


@pytest.mark.parametrize("dtype", ["float32", "int8", "int32", "float8_e4m3fn", "float64"])
def test_a_single_number_stays_an_array(dtype: str) -> None:
    weight, _ = stored(np.array(2.6, np.float64))
    for got in (apply(weight, Cast(dtype)).read(), apply(weight, Cast(dtype), Scale(2), Cast("int8")).read()):
        assert isinstance(got, np.ndarray) and got.shape == ()
    assert apply(weight, Scale(2)).read().tolist() == 5.2


def test_what_is_no_number_is_zero_among_whole_ones() -> None:
    weight, _ = stored(np.array([np.nan, np.inf, -np.inf, 1.0], np.float32))
    with warnings.catch_warnings(action="error"):
        assert apply(weight, Cast("int16")).read().tolist() == [0, 2**15 - 1, -(2**15), 1]


@pytest.mark.parametrize(
    ("array", "factor", "wanted"),
    [
        (np.array([1, 200, 7], np.uint8), -0.5, [0, 0, 0]),
        (np.array([1, 200, 7], np.uint8), 1.6, [2, 255, 11]),
        (np.array([2**30 + 1, -5], np.int32), 1, [2**30 + 1, -5]),
        (np.array([2**52 + 1, -5], np.int64), 2, [2**53 + 2, -10]),
        (np.array([448.0, 1.0], ml_dtypes.float8_e4m3fn), 10.0, [448.0, 10.0]),
        (np.array([1 + 2j, -1j], np.complex64), 2.0, [2 + 4j, -2j]),
        (np.array([1 + 2j, -1j], np.complex128), 1j, [-2 + 1j, 1]),
    ],
    ids=str,
)
def test_scaled_numbers_are_cast_back_as_others_are(array: Array, factor: Any, wanted: list[Any]) -> None:
    for weight in (apply(stored(array)[0], Scale(factor)), apply(stored(array)[0], Scale(factor), Slice(slice(0, 9)))):
        got = weight.read()
        assert got.dtype == array.dtype
        assert got.astype(complex if np.iscomplexobj(array) else object).tolist() == wanted


def test_types_that_do_not_become_each_other() -> None:
    words = Decoded(TensorInfo("words", DType.string, (2,), 2), lambda: np.array(["a", "b"], object))
    pairs, numbers = stored(np.ones(2, np.complex64))[0], stored(np.ones(2, np.float32))[0]
    for weight, step in (
        (words, Cast("float32")),
        (words, Scale(2.0)),
        (numbers, Cast("str")),
        (numbers, Scale("2")),
        (numbers, Scale(1j)),
        (numbers, Scale({})),
        (pairs, Cast("float32")),
        (pairs, Cast("int8")),
    ):
        with pytest.raises(WeightError, match=r"tensor '(x|words)'"):
            apply(weight, step)
    assert apply(words, Cast("str")).read().tolist() == ["a", "b"]


def test_nothing_but_a_part_comes_after_quantize() -> None:
    weight, _ = stored(np.arange(8, dtype=np.float32).reshape(2, 4))
    coded = Quantize(scheme("int8"))
    part: Any = apply(weight, coded, Slice(slice(1, 2))).read()
    assert part.shape == (1, 4)
    for step in (Cast("float16"), Scale(2.0), Transpose(), Reshape((8,)), coded):
        with pytest.raises(WeightError, match="after Quantize"):
            apply(weight, coded, step)


def test_quantize_hands_on_what_the_scheme_makes() -> None:
    class Halves:
        def quantize(self, array: Array) -> Any:
            return {"codes": np.round(array * 2).astype(np.int8), "scale": 0.5}

    weight, _ = stored(np.array([[0.4, 1.6], [2.0, -1.0]], np.float32))
    got: Any = apply(weight, Slice(slice(0, 1)), Quantize(Halves())).read()
    assert got["codes"].tolist() == [[1, 3]]


@pytest.mark.parametrize(
    "step",
    [
        Transpose((0, 0)),
        Reshape((5, 5)),
        Reshape((-1, -1)),
        Slice((0, 1)),
        Slice((slice(None, None, -1),)),
        Scale(np.ones(3)),
        Scale([[1], [1, 2]]),
        Reshape(-1),  # type: ignore[arg-type]
        Reshape((2.0, 5)),  # type: ignore[arg-type]
        Transpose((1.0, 0)),  # type: ignore[arg-type]
        Transpose("ab"),  # type: ignore[arg-type]
        Transpose,
        "transpose",
        Quantize("int8"),  # type: ignore[arg-type]
    ],
)
def test_steps_that_do_not_fit(step: Any) -> None:
    with pytest.raises(WeightError, match="'x'"):
        apply(stored(np.zeros((2, 4), np.float32))[0], step)


@pytest.mark.parametrize("steps", [[], [Scale(2.0)]])
def test_shapes_that_no_array_has(steps: list[Any]) -> None:
    for shape, sizes in (((0,), (0, 1 << 62)), ((0,), (1 << 40, 0, 1 << 40)), ((1,), (1,) * 65)):
        with pytest.raises(WeightError, match="'x'"):
            apply(stored(np.zeros(shape, np.float32))[0], *steps, Reshape(sizes))


def test_numbers_out_of_reach_are_infinite_and_nobody_is_warned() -> None:
    """Where warnings are errors, as in many a program's tests, the tensor could not be had."""
    large = np.array([1e300, -1e300, 1e-300, np.inf], np.float64)
    for dtype in (np.float32, np.float16):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = apply(stored(large)[0], Cast(dtype)).read()
            half = np.array([60000, -60000, 1e-7, np.inf], np.float16)
            scaled = apply(stored(half)[0], Scale([1e10, 1e10, 1e-10, 0.0])).read()
            product = apply(stored(large[:3])[0], Scale(1e300)).read()
        assert got.dtype == dtype and got.tolist() == [np.inf, -np.inf, 0, np.inf]
        assert scaled[:3].tolist() == [np.inf, -np.inf, 0] and np.isnan(scaled[3])
        assert product.tolist() == [np.inf, -np.inf, 1.0]


@pytest.mark.parametrize("dtype", ["int8", "int4", "uint16", "int32", "uint32", "int64", "uint64"])
def test_whole_numbers_times_whole_ones_are_exact_or_an_error(dtype: str) -> None:
    """Against Python's own numbers, near everything that could overflow on the way."""
    kind = DType[dtype].numpy
    limits = ml_dtypes.iinfo(kind)
    edges = {0, 1, 3, limits.max, limits.max - 1, limits.max // 3, limits.max // 2 + 1, limits.min, limits.min // 3}
    numbers = sorted(n for n in {*edges, 2**53 + 1, 2**31 + 1, -5} if limits.min <= n <= limits.max)
    for factor in (1, 2, 3, -1, 0, 2**40 + 1, 2**63 - 1, 2**64 - 1, -(2**63)):
        exact = [n * factor for n in numbers]
        array = np.array(numbers, object).astype(np.uint64 if dtype == "uint64" else np.int64).astype(kind)
        fit = np.array([limits.min <= n <= limits.max for n in exact])
        got = apply(stored_unpacked(array[fit]), Scale(factor)).read()
        assert got.dtype == kind and got.astype(object).tolist() == [n for n in exact if limits.min <= n <= limits.max]
        for k in np.flatnonzero(~fit):
            with pytest.raises(WeightError, match=f"tensor 'x': scaled, it has the number {exact[k]}"):
                apply(stored_unpacked(array[k]), Scale(factor)).read()


def stored_unpacked(array: Array) -> Stored:
    info = TensorInfo("x", DType[array.dtype.name], array.shape, array.nbytes)
    return Stored(info, MemoryBlob("x", array.tobytes()), 0, packed=False)


def test_whole_numbers_times_several_whole_ones() -> None:
    """The largest number need not meet the largest factor."""
    array = np.array([[2**62, 1], [5, -(2**62)]], np.int64)
    factor = np.array([[1, 2**62], [2**40, 2]], np.int64)
    got = apply(stored(array)[0], Scale(factor)).read()
    assert got.tolist() == (array.astype(object) * factor.astype(object)).tolist()
    assert apply(stored(np.array(7, np.int64))[0], Scale(np.uint64(3))).read().tolist() == 21
    assert apply(stored(np.zeros((0, 2), np.int64))[0], Scale(3)).read().shape == (0, 2)


@given(st.integers(-(2**63), 2**63 - 1), st.floats(-4.0, 4.0))
@settings(max_examples=200, deadline=None)
def test_large_whole_numbers_times_others_are_the_nearest(number: int, factor: float) -> None:
    exact = round(number * Fraction(factor))
    got = int(apply(stored(np.array([number], np.int64))[0], Scale(factor)).read()[0])
    assert got == min(max(exact, -(2**63)), 2**63 - 1) or (abs(exact) < 2**53 and abs(got - exact) <= 1)


def test_factors_that_are_no_numbers() -> None:
    array = np.array([2**62 + 1, 3, 0, 2**60], np.int64)
    got = apply(stored(array)[0], Scale(np.array([np.inf, -np.inf, np.inf, np.nan]))).read()
    assert got.tolist()[1:] == [-(2**63), 0, 0] and got[0] >= 2**63 - 2**11


SHORT = [d for d in DType if d.is_float and d.bits <= 16]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_a_cast_to_few_bits_rounds_once(dtype: DType) -> None:
    """Between every two numbers of a type: the middle of them, and what float64 has beside it."""
    width = f"u{dtype.numpy.itemsize}"
    codes = np.arange(1 << dtype.bits, dtype=np.uint32).astype(width)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype.numpy).astype(np.float64)
    codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    order = np.argsort(values, kind="stable")
    codes, values = codes[order], values[order]
    once = np.concatenate([[True], np.diff(values) > 0])  # of both zeros one
    codes, values = codes[once], values[once]
    if dtype is DType.float8_e8m0fnu:  # of which ml_dtypes makes the least number of no other
        codes, values = codes[1:], values[1:]
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    # a type without a fraction has no even numbers: ml_dtypes takes the larger one
    even = np.where((codes[:-1] & 1 == 0) & (dtype is not DType.float8_e8m0fnu), low, high)
    for numbers, expected in (
        (np.nextafter(middle, -np.inf), low),
        (middle, even),
        (np.nextafter(middle, np.inf), high),
        (values, values),
    ):
        got = apply(stored(numbers)[0], Cast(dtype)).read()
        assert got.dtype == dtype.numpy
        np.testing.assert_array_equal(got.astype(np.float64), expected)


@pytest.mark.parametrize("kind", ["int64", "uint64", "int32"])
def test_a_cast_of_whole_numbers_to_few_bits_rounds_once(kind: str) -> None:
    limits = np.iinfo(kind)
    for exponent in range(10, limits.bits - 2):
        low, step = 1 << exponent, 1 << (exponent - 7)
        middles = [low + step * k + step // 2 for k in (0, 1, 126)]
        sign = -1 if limits.min and exponent % 2 else 1
        for middle, even in zip(middles, (low, low + 2 * step, low + 126 * step)):
            for number, expected in ((middle - 1, even if even < middle else even - step), (middle, even)):
                got = apply(stored(np.array([sign * number], kind))[0], Cast("bfloat16")).read()
                assert int(got[0]) == sign * expected
            above = even if even > middle else even + step
            assert (
                int(apply(stored(np.array([sign * (middle + 1)], kind))[0], Cast("bfloat16")).read()[0]) == sign * above
            )


def test_a_cast_to_few_bits_of_what_is_out_of_reach() -> None:
    numbers = np.array([1e300, -1e300, 1e-300, -1e-300, np.inf, -np.inf, np.nan, 3.4e38, -0.0])
    with warnings.catch_warnings(action="error"):
        got = apply(stored(numbers)[0], Cast("bfloat16")).read().astype(np.float64)
    np.testing.assert_array_equal(got, [np.inf, -np.inf, 0, 0, np.inf, -np.inf, np.nan, np.inf, 0])
    assert np.signbit(got).tolist() == [False, True, False, True, False, True, False, False, True]


def test_scaled_numbers_of_few_bits_round_once() -> None:
    """Products near the middle of two numbers: float32 holds the middle of them, and not on which side they are."""
    array = np.arange(128, 256).astype(ml_dtypes.bfloat16)
    middles = (np.arange(128, 255) + 0.5) / 128
    factor = (middles[None] / array.astype(np.float64)[:, None]).astype(np.float32)
    exact = array.astype(np.float64)[:, None] * factor  # of 32 bits
    below = np.arange(128, 255)[None] / 128
    expected = np.where(exact < middles, below, below + 1 / 128)
    odd = exact != middles
    whole = np.broadcast_to(array[:, None], factor.shape).copy()
    got = apply(stored(whole)[0], Scale(factor)).read().astype(np.float64)
    np.testing.assert_array_equal(got[odd], expected[odd])
