"""Laws of the elementwise operators, activations, casts and reductions, checked on random operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ranvier.ops.tensor.activation
import ranvier.ops.tensor.cast
import ranvier.ops.tensor.elementwise
import ranvier.ops.tensor.reduction  # noqa: F401
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.registry import evaluate, find, get

HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
MODERATE = st.floats(-20, 20, width=32)
FLOAT8 = [DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2, DType.float8_e5m2fnuz]


def law(*strategies):
    """``@given`` with few enough examples that the whole file stays quick."""
    return lambda test: settings(max_examples=40, deadline=None)(given(*strategies)(test))


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # as the runtime does around every body
        yield


def floats(shape=SHAPES, elements=MODERATE):
    return hnp.arrays(np.float32, shape, elements=elements)


def int32s(shape, low=-100, high=100):
    return hnp.arrays(np.int32, shape, elements=st.integers(low, high))


pairs = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=4)


# -- unary ----------------------------------------------------------------------------------------------------------

UNARY_ORACLES: list[tuple[str, Callable[[float], float], float, float]] = [
    ("Acos", math.acos, -1, 1),
    ("Acosh", math.acosh, 1, 50),
    ("Asin", math.asin, -1, 1),
    ("Asinh", math.asinh, -50, 50),
    ("Atan", math.atan, -50, 50),
    ("Atanh", math.atanh, -0.99, 0.99),
    ("Ceil", math.ceil, -50, 50),
    ("Cos", math.cos, -50, 50),
    ("Cosh", math.cosh, -20, 20),
    ("Erf", math.erf, -6, 6),
    ("Exp", math.exp, -50, 50),
    ("Floor", math.floor, -50, 50),
    ("Log", math.log, 1e-3, 50),
    ("Reciprocal", lambda v: 1 / v, 0.01, 50),
    ("Round", round, -50, 50),  # Python, too, rounds halves to even
    ("Sin", math.sin, -50, 50),
    ("Sinh", math.sinh, -20, 20),
    ("Sqrt", math.sqrt, 0, 50),
    ("Tan", math.tan, -1.5, 1.5),
    ("Tanh", math.tanh, -50, 50),
    ("Sigmoid", lambda v: 1 / (1 + math.exp(-v)), -50, 50),
    ("Softplus", lambda v: math.log1p(math.exp(v)), -20, 20),
    ("Softsign", lambda v: v / (1 + abs(v)), -50, 50),
    ("Elu", lambda v: v if v > 0 else math.expm1(v), -50, 50),
    ("Gelu", lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))), -4, 20),
    ("Mish", lambda v: v * math.tanh(math.log1p(math.exp(v))), -20, 20),
    ("HardSwish", lambda v: v * min(max(v / 6 + 0.5, 0), 1), -20, 20),
]


@pytest.mark.parametrize(("name", "oracle", "low", "high"), UNARY_ORACLES, ids=[row[0] for row in UNARY_ORACLES])
def test_unary_agrees_with_the_math_library(name, oracle, low, high):
    points = np.linspace(low, high, 301)
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 2e-6)):
        x = points.astype(dtype)
        expected = np.array([oracle(float(v)) for v in x])
        result = evaluate(name, x)
        assert result.dtype == dtype
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol)


UNARY_NAMES = [row[0] for row in UNARY_ORACLES] + ["Abs", "Neg", "Sign", "Relu", "LeakyRelu", "Selu", "Celu", "Swish"]


@pytest.mark.parametrize("name", UNARY_NAMES)
@pytest.mark.parametrize("dtype", [*HALVES, np.dtype(np.float64)], ids=str)
def test_unary_keeps_dtype_and_shape(name, dtype):
    for shape in [(), (0, 2), (2, 3)]:
        x = np.full(shape, 0.75).astype(dtype)
        result = np.asarray(evaluate(name, x))
        assert (result.dtype, result.shape) == (dtype, shape)
        wide = np.asarray(evaluate(name, x.astype(np.float32)))
        np.testing.assert_allclose(result.astype(np.float32), wide, rtol=1e-2)


def test_erf_is_within_one_ulp_in_float32():
    x = np.concatenate([np.linspace(-5, 5, 20001), np.logspace(-30, 0, 500)]).astype(np.float32)
    exact = np.array([math.erf(float(v)) for v in x])
    error = np.abs(evaluate("Erf", x) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert error.max() <= 1
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(evaluate("Erf", special), np.array([1, -1, np.nan], np.float32))


@law(floats())
def test_activation_identities(x):
    x = x.astype(np.float64)
    sigmoid, softplus, swish = evaluate("Sigmoid", x), evaluate("Softplus", x), evaluate("Swish", x)
    np.testing.assert_allclose(sigmoid + evaluate("Sigmoid", -x), np.ones_like(x), atol=1e-12)
    np.testing.assert_allclose(softplus - evaluate("Softplus", -x), x, atol=1e-12)
    np.testing.assert_allclose(swish, x * sigmoid, atol=1e-12)
    np.testing.assert_allclose(evaluate("SwiGLU", x, x, alpha=1.0), swish * x, atol=1e-9)
    np.testing.assert_allclose(evaluate("Gelu", x) - evaluate("Gelu", -x), x, atol=1e-12)
    np.testing.assert_array_equal(evaluate("Relu", x) - evaluate("Relu", -x), x)
    np.testing.assert_array_equal(evaluate("PRelu", x, np.array(0.25)), evaluate("LeakyRelu", x, alpha=0.25))
    np.testing.assert_allclose(evaluate("Celu", x, alpha=1.0), evaluate("Elu", x, alpha=1.0), atol=1e-12)


def test_is_inf_looks_where_it_is_told():
    x = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    assert evaluate("IsInf", x).tolist() == [True, True, False, False]
    assert evaluate("IsInf", x, detect_negative=0).tolist() == [True, False, False, False]
    assert evaluate("IsInf", x, detect_positive=0).tolist() == [False, True, False, False]


def test_experimental_operators_of_opset_1():
    x = np.arange(60, dtype=np.float32).reshape(1, 3, 4, 5)
    scaled = evaluate("ImageScaler", x, scale=2.0, bias=(1.0, 2.0, 3.0))
    np.testing.assert_array_equal(scaled, 2 * x + np.array([1, 2, 3], np.float32).reshape(1, 3, 1, 1))
    np.testing.assert_array_equal(evaluate("Crop", x, border=(1, 0, 2, 1)), x[:, :, 0:3, 1:3])
    np.testing.assert_array_equal(evaluate("Crop", x, border=(1, 1, 0, 0), scale=(2, 3)), x[:, :, 1:3, 1:4])
    np.testing.assert_allclose(evaluate("ScaledTanh", x, alpha=2.0, beta=0.5), 2 * np.tanh(0.5 * x), rtol=1e-6)
    np.testing.assert_array_equal(evaluate("Affine", x, alpha=2.0, beta=1.0), 2 * x + 1)
    with pytest.raises(InvalidValue, match="Crop: window"):
        evaluate("Crop", x, border=(0, 0, 9, 0))


# -- binary ---------------------------------------------------------------------------------------------------------


@law(pairs.flatmap(lambda p: st.tuples(*(floats(s) for s in p.input_shapes), st.just(p.result_shape))))
def test_arithmetic_broadcasts_as_numpy(operands):
    a, b, shape = operands
    for name, function in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Max", np.maximum)):
        result = np.asarray(evaluate(name, a, b))
        assert (result.shape, result.dtype) == (shape, np.float32)
        np.testing.assert_array_equal(result, function(a, b))
    for name in ("Add", "Mul", "Equal", "Max", "Min", "Sum", "Mean"):
        assert "commutative" in get("", name).traits
        np.testing.assert_array_equal(evaluate(name, a, b), evaluate(name, b, a))
    np.testing.assert_array_equal(evaluate("Less", a, b), evaluate("Greater", b, a))
    np.testing.assert_array_equal(evaluate("LessOrEqual", a, b), ~np.asarray(evaluate("Greater", a, b)))


@law(int32s(st.just((7,)), -(2**31), 2**31 - 1), int32s(st.just((7,)), -50, 50).filter(np.all))
def test_integer_division_cuts_toward_zero(a, b):
    a = np.where((a == -(2**31)) & (b == -1), 0, a)  # the one quotient that int32 cannot hold
    quotient = evaluate("Div", a, b)
    assert quotient.tolist() == [math.trunc(Fraction(int(n), int(d))) for n, d in zip(a, b)]
    np.testing.assert_array_equal(quotient * b + evaluate("Mod", a, b, fmod=1), a)
    assert evaluate("Mod", a, b).tolist() == [int(n) % int(d) for n, d in zip(a, b)]


@law(hnp.arrays(np.uint8, 5), hnp.arrays(np.uint8, 5, elements=st.integers(0, 12)))
def test_bit_shift_drops_what_leaves_the_width(x, y):
    left, right = (evaluate("BitShift", x, y, direction=d).tolist() for d in ("LEFT", "RIGHT"))
    assert left == [(int(v) << int(s)) & 255 for v, s in zip(x, y)]
    assert right == [int(v) >> int(s) for v, s in zip(x, y)]


def test_pow_has_the_type_of_its_base():
    for base in (np.int32, np.float32, np.float64, ml_dtypes.bfloat16):
        for exponent in (np.int64, np.float32):
            result = evaluate("Pow", np.array([1, 2, 3]).astype(base), np.array([2], exponent))
            assert result.dtype == base
            assert result.astype(np.float64).tolist() == [1, 4, 9]
    np.testing.assert_allclose(evaluate("Pow", np.array([1.5, -2.0]), np.array(3.0)), [3.375, -8])
    assert evaluate("Pow", np.array([1, -1, -1, 4]), np.array([-5, -2, -3, -1])).tolist() == [1, 1, -1, 0]


@law(floats(hnp.array_shapes(min_dims=3, max_dims=3, max_side=4)), st.data())
def test_attribute_broadcast_of_old_opsets(a, data):
    start = data.draw(st.integers(0, 2))
    stop = data.draw(st.integers(start + 1, 3))
    b = data.draw(floats(st.just(a.shape[start:stop])))
    widened = b.reshape(b.shape + (1,) * (3 - stop))
    for name in ("Add", "Sub", "Mul", "Pow", "Less"):
        old = evaluate(name, a, b, version=1, axis=start, broadcast=1)
        np.testing.assert_array_equal(old, evaluate(name, a, widened, version=7))
    suffix = data.draw(floats(st.just(a.shape[1:])))
    np.testing.assert_array_equal(evaluate("Add", a, suffix, version=6, broadcast=1), a + suffix)


@law(floats(), st.floats(-5, 5, width=32), st.floats(-5, 5, width=32))
def test_clip_ends_at_its_upper_bound(x, low, high):
    low, high = np.float32(low), np.float32(high)
    clipped = evaluate("Clip", x, np.asarray(low), np.asarray(high))
    np.testing.assert_array_equal(clipped, np.minimum(np.maximum(x, low), high))
    np.testing.assert_array_equal(evaluate("Clip", x, version=6, min=float(low), max=float(high)), clipped)
    np.testing.assert_array_equal(evaluate("Clip", x), x)


def test_where_and_equal_take_strings():
    x, y = np.array(["a", "b"], object), np.array(["c"], object)
    chosen = evaluate("Where", np.array([True, False]), x, y)
    assert chosen.dtype == object and chosen.tolist() == ["a", "c"]
    assert evaluate("Equal", x, np.array(["a", "a"], object)).tolist() == [True, False]


def test_half_precision_mean_does_not_overflow_on_the_way():
    x = np.full(3, 60000, np.float16)
    np.testing.assert_array_equal(evaluate("Mean", x, x, x), x)


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div", "Exp", "Relu", "Clip", "Less", "Mod"])
def test_out_is_used_where_it_fits_and_only_there(name):
    definition = find("", name)
    x = np.array([[1.5, -2.0], [0.5, 3.0]], np.float32)
    operands = [x] if name in ("Exp", "Relu", "Clip") else [x, np.float32([2, 4])]
    assert definition.takes_out
    expected = definition.body(*operands)
    out = np.full_like(expected, 7)
    assert definition.body(*operands, out=out) is out
    np.testing.assert_array_equal(out, expected)
    for wrong in (np.zeros((3, 2, 2), expected.dtype), np.zeros((2, 2), np.complex64)):
        result = definition.body(*operands, out=wrong)
        assert result is not wrong
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "error", "message"),
    [
        ("Add", [np.zeros(2), np.zeros(3)], {}, ShapeMismatch, r"Add: shapes \[2\] and \[3\] do not broadcast"),
        ("Add", [np.zeros(2), np.zeros(2, np.float32)], {}, DTypeMismatch, "Add: operands of one element type"),
        ("Div", [np.array([4]), np.array([0])], {}, InvalidValue, "Div: integer division by zero"),
        ("Mod", [np.array([4]), np.array([0])], {}, InvalidValue, "Mod: integer division by zero"),
        ("BitShift", [np.array([4]), np.array([1])], {"direction": "UP"}, InvalidValue, "BitShift: direction"),
        ("PRelu", [np.zeros(2), np.zeros((3, 2))], {}, ShapeMismatch, "PRelu: slope"),
        ("Gelu", [np.zeros(2)], {"approximate": "exact"}, InvalidValue, "Gelu: approximate"),
        ("Clip", [np.zeros(2), np.zeros(2)], {}, ShapeMismatch, "Clip: min must be a scalar"),
        ("BitCast", [np.zeros(2)], {"to": 1}, DTypeMismatch, "BitCast: float64 has 64 bits"),
        ("Cast", [np.array(["tree"], object)], {"to": 1}, InvalidValue, "Cast: 'tree' is not a number"),
        ("Cast", [np.array(["NaN"], object)], {"to": 7}, InvalidValue, "Cast: 'NaN' has no value in int64"),
        ("ReduceSum", [np.zeros(2), np.array([1])], {}, InvalidValue, "ReduceSum: axis 1 is out of range for rank 1"),
        ("ReduceSum", [np.zeros(2), np.array([0, -1])], {}, InvalidValue, "ReduceSum: an axis is repeated"),
        ("TopK", [np.zeros(3), np.array([4])], {}, InvalidValue, "TopK: k is 4, and axis 0 has 3 elements"),
        ("ArgMax", [np.zeros((0, 2))], {}, InvalidValue, "ArgMax: axis 0 has size 0"),
        ("Softmax", [np.zeros(2)], {"axis": 1}, InvalidValue, "Softmax: axis 1"),
    ],
)
def test_bad_operands_are_named(name, operands, attrs, error, message):
    with pytest.raises(error, match=message):
        evaluate(name, *operands, **attrs)


def test_old_forms_without_broadcast_want_equal_shapes():
    with pytest.raises(ShapeMismatch, match="without broadcast=1"):
        evaluate("Add", np.zeros((2, 3)), np.zeros(3), version=6)
    with pytest.raises(ShapeMismatch, match=r"does not fit into \[2, 3\] at axis 0"):
        evaluate("Add", np.zeros((2, 3)), np.zeros(3), version=6, broadcast=1, axis=0)


# -- casts ----------------------------------------------------------------------------------------------------------

NARROW = [d for d in DType if d.bits <= 8 and d not in (DType.bool,)]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_narrow_value_survives_a_wider_type(dtype):
    codes = np.arange(1 << dtype.bits, dtype=np.uint8).view(dtype.numpy)
    for wide in (DType.float32, DType.float64):
        back = evaluate("Cast", evaluate("Cast", codes, to=wide.onnx), to=dtype.onnx, saturate=0)
        np.testing.assert_array_equal(back.astype(np.float32), codes.astype(np.float32))


@law(hnp.arrays(np.int64, 6), st.sampled_from([d for d in DType if d.is_integer]))
def test_integers_lose_their_upper_bits(x, target):
    kept = [int(v) & (1 << target.bits) - 1 for v in x]
    if target.name.startswith("int"):
        kept = [v - (1 << target.bits) if v >> (target.bits - 1) else v for v in kept]
    assert evaluate("Cast", x, to=target.onnx).astype(object).tolist() == kept


@pytest.mark.parametrize("target", FLOAT8, ids=str)
def test_float8_saturates_only_when_asked(target):
    largest = float(ml_dtypes.finfo(target.numpy).max)
    x = np.array([1e9, -1e9, np.inf, np.nan, 1.0], np.float32)
    bounded = evaluate("Cast", x, to=target.onnx).astype(np.float32)
    np.testing.assert_array_equal(bounded, np.float32([largest, -largest, largest, np.nan, 1]))
    free = evaluate("Cast", x, to=target.onnx, saturate=0).astype(np.float32)
    lost = np.inf if target is DType.float8_e5m2 else np.nan
    np.testing.assert_array_equal(np.abs(free), np.float32([lost, lost, lost, np.nan, 1]))


@pytest.mark.parametrize(
    ("mode", "expected"), [("up", [2, 4, 4, 4, 2]), ("down", [2, 2, 2, 2, 1]), ("nearest", [2, 2, 4, 4, 1])]
)
def test_powers_of_two_round_as_asked(mode, expected):
    x = np.array([2, 2.5, 3, 3.5, 1.25], np.float32)
    result = evaluate("Cast", x, to=DType.float8_e8m0fnu.onnx, round_mode=mode)
    assert result.astype(np.float32).tolist() == expected
    edges = np.array([0, np.inf, 1e-45], np.float32)
    codes = evaluate("Cast", edges, to=DType.float8_e8m0fnu.onnx, round_mode=mode).view(np.uint8)
    assert codes.tolist() == [0, 254, 0]
    unbounded = evaluate("Cast", edges, to=DType.float8_e8m0fnu.onnx, round_mode=mode, saturate=0)
    assert unbounded.view(np.uint8).tolist() == [255, 255, 255]


@law(hnp.arrays(np.float32, 5))
def test_floats_survive_as_text(x):
    text = evaluate("Cast", x, to=DType.string.onnx)
    assert text.dtype == object
    np.testing.assert_array_equal(evaluate("Cast", text, to=DType.float32.onnx), x)


def test_text_follows_the_standard():
    values = np.array([np.nan, np.inf, -np.inf, 314.15926, 1e10, 0.5], np.float64)
    assert evaluate("Cast", values, to=8).tolist() == ["NaN", "INF", "-INF", "314.15926", "10000000000", "0.5"]
    texts = np.array(["+inf", "-INF", "nan", "1e-5", " 42 "], object)
    np.testing.assert_array_equal(evaluate("Cast", texts, to=11), [np.inf, -np.inf, np.nan, 1e-5, 42])
    exact = np.array([str(2**63 - 1), "-7", "100.5"], object)
    assert evaluate("Cast", exact, to=7).tolist() == [2**63 - 1, -7, 100]


def test_cast_by_name_and_by_example():
    x = np.array([1.75, -1.75], np.float32)
    assert evaluate("Cast", x, to="INT32", version=1).tolist() == [1, -1]
    assert evaluate("CastLike", x, np.zeros(1, np.float16)).dtype == np.float16


@law(hnp.arrays(np.uint16, 5), st.sampled_from([DType.int16, DType.float16, DType.bfloat16]))
def test_bit_cast_and_back_is_identity(x, through):
    there = evaluate("BitCast", x, to=through.onnx)
    assert there.dtype == through.numpy
    np.testing.assert_array_equal(evaluate("BitCast", there, to=DType.uint16.onnx), x)


# -- reductions -----------------------------------------------------------------------------------------------------

EXACT_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, axis, keepdims: np.sum(np.abs(x), axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis, keepdims=keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x * x, axis, keepdims=keepdims),
    "ReduceLogSum": lambda x, axis, keepdims: np.log(np.sum(x, axis, keepdims=keepdims)),
    "ReduceLogSumExp": lambda x, axis, keepdims: np.log(np.sum(np.exp(x), axis, keepdims=keepdims)),
}


@law(
    floats(hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), st.floats(0.5, 2, width=32)),
    st.sampled_from(sorted(EXACT_REDUCTIONS)),
    st.booleans(),
    st.data(),
)
def test_reductions_agree_with_float64(x, name, keepdims, data):
    axes = tuple(data.draw(st.sets(st.integers(0, x.ndim - 1), min_size=1)))
    expected = EXACT_REDUCTIONS[name](x.astype(np.float64), axis=axes, keepdims=keepdims)
    new = evaluate(name, x, np.array(axes), keepdims=int(keepdims))
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)
    old = evaluate(name, x, version=1, axes=axes, keepdims=int(keepdims))
    np.testing.assert_array_equal(new, old)
    for half in HALVES:
        short = x.astype(half)
        rounded_once = evaluate(name, short.astype(np.float32), np.array(axes), keepdims=int(keepdims)).astype(half)
        np.testing.assert_array_equal(evaluate(name, short, np.array(axes), keepdims=int(keepdims)), rounded_once)


def test_reductions_over_nothing_are_neutral():
    empty = np.zeros((0, 2), np.float32)
    axes = np.array([0])
    neutral = {"ReduceSum": 0, "ReduceProd": 1, "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceLogSum": -np.inf}
    for name, value in neutral.items():
        assert evaluate(name, empty, axes).tolist() == [[value, value]]
    assert evaluate("ReduceMax", np.zeros((0, 1), np.int32), axes).tolist() == [[-(2**31)]]
    assert evaluate("ReduceMin", np.zeros((0, 1), bool), axes).tolist() == [[True]]


def test_no_axes_means_all_or_none():
    x = np.array([[1, -2], [3, 4]], np.float32)
    none = np.zeros(0, np.int64)
    assert evaluate("ReduceSum", x, none, keepdims=0) == 6
    np.testing.assert_array_equal(evaluate("ReduceSum", x, none, noop_with_empty_axes=1), x)
    np.testing.assert_array_equal(evaluate("ReduceL1", x, noop_with_empty_axes=1), np.abs(x))


def test_log_sum_exp_holds_far_from_zero():
    x = np.array([1000, 1000, -np.inf], np.float32)
    np.testing.assert_allclose(evaluate("ReduceLogSumExp", x, keepdims=0), 1000 + math.log(2), rtol=1e-6)
    assert evaluate("ReduceLogSumExp", np.full(2, -np.inf, np.float32), keepdims=0) == -np.inf
    assert evaluate("ReduceLogSumExp", np.float32([np.inf, 0]), keepdims=0) == np.inf


def test_integer_mean_is_cut_toward_zero():
    assert evaluate("ReduceMean", np.array([-3, -4], np.int32), keepdims=0) == -3


@law(hnp.arrays(np.int8, hnp.array_shapes(min_dims=1, max_dims=2, max_side=6), elements=st.integers(0, 3)), st.data())
def test_top_k_and_arg_max_break_ties_by_index(x, data):
    x = x.astype(np.float32)
    row = x.reshape(-1)
    k = data.draw(st.integers(0, row.size))
    for largest in (0, 1):
        order = sorted(range(row.size), key=lambda i: (-row[i] if largest else row[i], i))[:k]
        values, indices = evaluate("TopK", row, np.array([k]), outputs=2, largest=largest)
        assert indices.tolist() == order
        np.testing.assert_array_equal(values, row[order])
    axis = data.draw(st.integers(0, x.ndim - 1))
    first = evaluate("ArgMax", x, axis=axis)
    np.testing.assert_array_equal(first, np.argmax(x, axis, keepdims=True))
    last = evaluate("ArgMax", x, axis=axis, select_last_index=1)
    assert np.all(first <= last)
    np.testing.assert_array_equal(np.take_along_axis(x, last, axis), np.max(x, axis, keepdims=True))


def test_top_k_puts_nan_on_top():
    x = np.array([1, np.nan, 3], np.float32)
    values, indices = evaluate("TopK", x, np.array([2]), outputs=2)
    assert indices.tolist() == [1, 2] and np.isnan(values[0])
    assert evaluate("TopK", x, np.array([2]), outputs=2, largest=0)[1].tolist() == [0, 2]


@law(floats(hnp.array_shapes(min_dims=2, max_dims=3, max_side=4)), st.data())
def test_softmax_family(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    soft = evaluate("Softmax", x, axis=axis)
    np.testing.assert_allclose(soft.sum(axis), np.ones_like(soft.sum(axis)), rtol=1e-5)
    np.testing.assert_allclose(evaluate("Softmax", x + np.float32(3), axis=axis), soft, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(np.exp(evaluate("LogSoftmax", x, axis=axis)), soft, rtol=1e-4, atol=1e-6)
    hard = evaluate("Hardmax", x, axis=axis)
    np.testing.assert_array_equal(np.argmax(hard, axis), np.argmax(x, axis))
    np.testing.assert_array_equal(hard.sum(axis), np.ones_like(hard.sum(axis)))
    split = axis % x.ndim
    rows = x.reshape(math.prod(x.shape[:split]), -1)
    old = evaluate("Softmax", x, axis=split, version=11)
    np.testing.assert_array_equal(old, evaluate("Softmax", rows, axis=1).reshape(x.shape))


@law(int32s(hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)), st.data())
def test_running_sums(x, data):
    axis = np.array(data.draw(st.integers(-x.ndim, x.ndim - 1)))
    total = evaluate("CumSum", x, axis)
    assert total.dtype == x.dtype
    np.testing.assert_array_equal(total, np.cumsum(x, int(axis)))
    np.testing.assert_array_equal(evaluate("CumSum", x, axis, exclusive=1) + x, total)
    backwards = evaluate("CumSum", x, axis, reverse=1)
    np.testing.assert_array_equal(
        backwards + evaluate("CumSum", x, axis, exclusive=1), x.sum(int(axis), keepdims=True) + np.zeros_like(x)
    )


@law(floats(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)), st.sampled_from([1, 2]))
def test_lp_normalization_gives_unit_norms_and_keeps_zeros(x, p):
    result = evaluate("LpNormalization", x, p=p).astype(np.float64)
    norms = np.linalg.norm(result, ord=p, axis=-1)
    zero = np.all(x * x == 0, axis=-1) if p == 2 else np.all(x == 0, axis=-1)
    np.testing.assert_allclose(norms[~zero], np.ones_like(norms[~zero]), rtol=1e-2)
    np.testing.assert_array_equal(norms[zero], 0)
