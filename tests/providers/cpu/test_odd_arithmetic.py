"""Integer powers and means, batch statistics, optimizers, features of classical models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(23)
TRAINING, ML = "ai.onnx.preview.training", "ai.onnx.ml"


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("base", [np.int32, np.int64])
@pytest.mark.parametrize("exponent", [np.int8, np.int32, np.int64, np.uint8])
def test_integer_powers(base: Any, exponent: Any) -> None:
    x = RNG.integers(1, 5, (40,)).astype(base)
    x[::3], x[::4] = -1, 1
    y = RNG.integers(-4, 5, (40,)) if np.issubdtype(exponent, np.signedinteger) else RNG.integers(0, 5, (40,))
    y = y.astype(exponent)
    check("Pow", [x, y])


def test_zero_to_a_negative_power_is_an_error() -> None:
    inputs = [np.array([2, 0], np.int32), np.array([1, -1], np.int32)]
    with rv.load(one_node("Pow", inputs), providers=["cpu"]) as session, pytest.raises(rv.errors.InvalidValue):
        session.run({"x0": inputs[0], "x1": inputs[1]})


@pytest.mark.parametrize("divisor", [6.0, -7.0, 0.1, 8.0, 41.0, 1e-30, 0.0, np.inf, np.nan, 1e-42])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_division_by_one_number_is_exact(divisor: float, shape: tuple[int, ...]) -> None:
    """Also where it is known, and no division is made."""
    x = np.concatenate([41.0 * np.arange(50), numbers(500), [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38]])
    x, y = x.astype(np.float32).reshape(2, -1), np.full(shape, divisor, np.float32)
    with np.errstate(all="ignore"):
        want = x / y
    with rv.load(one_node("Div", [x, y], constant=[1]), providers=["cpu"]) as session:
        (got,) = session.run({"x0": x}).values()
    np.testing.assert_array_equal(np.asarray(got), want)
    there = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(np.asarray(got)[there]), np.signbit(want[there]))


@pytest.mark.parametrize("bounds", [(-1.0, 2.0), (2.0, -1.0), (np.nan, 1.0), (-1.0, np.nan), (-np.inf, np.inf)])
def test_clip_keeps_nan(bounds: tuple[float, float]) -> None:
    x = np.concatenate([numbers(70) * 3, [np.nan, np.inf, -np.inf]]).astype(np.float32)
    check("Clip", [x, *(np.array(end, np.float32) for end in bounds)], constant=[1, 2], opset=13)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_reductions_of_integers(op: str) -> None:
    low = 1 if op == "ReduceLogSum" else -30
    for dtype in (np.int32, np.int64, np.uint32):
        x = RNG.integers(max(low, 0) if dtype is np.uint32 else low, 30, (5, 9)).astype(dtype)
        check(op, [x, np.array([1])], constant=[1], opset=18)


@pytest.mark.parametrize("beta", [0.5, 0.75, 1.0, 0.3])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_local_responses(beta: float, size: int) -> None:
    """Also of windows that are larger than there are channels."""
    for shape in ((2, 7, 5, 6), (1, 40, 3), (3, 1, 4, 4, 2)):
        attrs = {"size": size, "beta": beta, "alpha": 0.02, "bias": 1.5}
        check("LRN", [4 * numbers(*shape)], attrs, rtol=1e-5, atol=1e-6)


def test_batch_norm_in_training() -> None:
    for shape in ((4, 3, 5, 6), (8, 5), (3, 2, 7)):
        c = shape[1]
        inputs = [numbers(*shape), numbers(c), numbers(c), numbers(c), abs(numbers(c))]
        attrs = {"training_mode": 1, "momentum": 0.7, "epsilon": 1e-3}
        check("BatchNormalization", inputs, attrs, outputs=3, rtol=1e-4, atol=1e-5, opset=15)
        check("BatchNormalization", inputs, {"momentum": 0.7}, outputs=5, rtol=1e-4, atol=1e-5, opset=9)


@pytest.mark.parametrize("count", [0, 3])
def test_optimizers(count: int) -> None:
    rate, step = np.array(0.1, np.float32), np.array(count)
    state = [numbers(3, 5), numbers(7), numbers(3, 5), numbers(7), abs(numbers(3, 5)), abs(numbers(7))]
    common: dict[str, Any] = {"domain": TRAINING, "rtol": 1e-4, "atol": 1e-5}
    check("Adagrad", [rate, step, *state], {"decay_factor": 0.1, "norm_coefficient": 0.01}, outputs=4, **common)
    more = [*state, abs(numbers(3, 5)), abs(numbers(7))]
    check("Adam", [rate, step, *more], {"norm_coefficient": 0.01, "alpha": 0.95}, outputs=6, **common)
    for mode in ("standard", "nesterov"):
        attrs = {"alpha": 0.9, "beta": 0.5, "mode": mode, "norm_coefficient": 0.01}
        check("Momentum", [rate, step, *state], attrs, outputs=4, **common)


def test_features() -> None:
    x = numbers(6, 4).round(1)
    check("Binarizer", [x], {"threshold": 0.3}, domain=ML)
    check("Scaler", [x], {"offset": [0.1, 0.2, 0.3, 0.4], "scale": [2.0]}, domain=ML)
    check("Scaler", [(x * 10).astype(np.int64)], {"scale": [2.0, 1.0, 0.5, 3.0]}, domain=ML)
    for norm in ("MAX", "L1", "L2"):
        check("Normalizer", [x], {"norm": norm}, domain=ML)
    gaps = x.copy()
    gaps[1, 2] = np.nan
    attrs = {"imputed_value_floats": [1.0, 2.0, 3.0, 4.0], "replaced_value_float": float("nan")}
    check("Imputer", [gaps], attrs, domain=ML)
    check("Imputer", [(x * 3).astype(np.int64)], {"imputed_value_int64s": [7], "replaced_value_int64": 0}, domain=ML)
    check("ArrayFeatureExtractor", [x, np.array([[3, 0, 3]])], domain=ML)
    check("ArrayFeatureExtractor", [x[0], np.array([1, 2])], domain=ML)
    for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
        attrs = {"coefficients": numbers(12).tolist(), "intercepts": [0.1, 0.2, 0.3], "targets": 3}
        check("LinearRegressor", [x], {**attrs, "post_transform": transform}, domain=ML)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_determinants(dtype: Any) -> None:
    for shape in ((1, 1), (3, 3), (2, 5, 4, 4), (0, 3, 3), (40, 9, 9)):
        check("Det", [numbers(*shape, dtype=dtype)], rtol=1e-2 if dtype is np.float16 else 1e-4, atol=1e-4)
    singular = np.array([[[0, 0], [0, 1]], [[0, 2], [3, 0]], [[1, np.nan], [0, 1]]], dtype)
    check("Det", [singular])
