"""Elementwise and joining operators on quantized tensors against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import KernelError
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(29)
MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}
KINDS = [np.uint8, np.int8]


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype))


def parameters(dtype: type) -> list[Array]:
    return [np.asarray(RNG.uniform(0.01, 0.05), np.float32), codes(dtype)]


@pytest.mark.parametrize("kind", KINDS)
def test_binary(kind: type) -> None:
    for op in ("QLinearAdd", "QLinearMul"):
        for shape in ((3, 1, 7), (7,), ()):
            left = [codes(kind, 3, 5, 7), *parameters(kind)]
            check(op, [*left, codes(kind, *shape), *parameters(kind), *parameters(kind)], **MICROSOFT)
    check("QLinearAdd", [left[0], left[1], None, left[0], left[1], None, left[1]], **MICROSOFT)


@pytest.mark.parametrize("kind", KINDS)
def test_unary(kind: type) -> None:
    given = [codes(kind, 4, 50), *parameters(kind)]
    check("QLinearSigmoid", [*given, np.float32(1 / 256), codes(kind)], **MICROSOFT)
    check("QLinearLeakyRelu", [*given, *parameters(kind)], {"alpha": 0.2}, **MICROSOFT)


@pytest.mark.parametrize("kind", KINDS)
def test_where_and_concat(kind: type) -> None:
    x, y = [codes(kind, 4, 6), *parameters(kind)], [codes(kind, 4, 1), *parameters(kind)]
    check("QLinearWhere", [RNG.random((1, 6)) < 0.5, *x, *y, *parameters(kind)], **MICROSOFT)
    check("QLinearConcat", [*parameters(kind), *x, *y, *x], {"axis": 1}, **MICROSOFT)


@pytest.mark.parametrize("kind", KINDS)
def test_means(kind: type) -> None:
    given = [codes(kind, 2, 5, 4, 8), *parameters(kind), *parameters(kind)]
    check("QLinearGlobalAveragePool", given, **MICROSOFT)
    check("QLinearGlobalAveragePool", given, {"channels_last": 1}, **MICROSOFT)
    check("QLinearReduceMean", given, {"axes": [1, 3], "keepdims": 0}, **MICROSOFT)


def single(value: float, dtype: type = np.float32) -> Array:
    return np.asarray(value, dtype)


def test_numbers_between_two_codes_become_the_even_one() -> None:
    """Where scales say that a number lies halfway, no rounding of theirs may move it."""
    zero = single(0, np.uint8)
    left, right = np.arange(12, dtype=np.uint8), np.arange(12, dtype=np.uint8)[::-1] * np.uint8(2)
    expected = {
        "QLinearAdd": np.rint((left.astype(np.float64) + right) / 2),
        "QLinearMul": np.rint(left.astype(np.float64) * right / 4),
        "QLinearWhere": np.rint(left / 2),
        "QLinearConcat": np.rint(np.concatenate([left, right]) / 2),
    }
    for base in (0.1, 0.3, 0.7, 0.013):
        step, double = single(base), single(2 * np.float32(base))
        a, b = [left, step, zero], [right, step, zero]
        quarter = single(4 * step * step)
        given: dict[str, list[Any]] = {
            "QLinearAdd": [*a, *b, double, zero],
            "QLinearMul": [*a, *b, quarter, zero],
            "QLinearWhere": [np.ones(12, bool), *a, *b, double, zero],
            "QLinearConcat": [double, zero, *a, *b],
        }
        for op, inputs in given.items():
            attrs = {"axis": 0} if op == "QLinearConcat" else None
            (found,) = check(op, inputs, attrs, **MICROSOFT)
            np.testing.assert_array_equal(found, expected[op])
        image = np.stack([left, right], axis=1).reshape(1, 12, 1, 2)
        means = [image, step, zero, step, zero]
        for op, attrs in (("QLinearGlobalAveragePool", {}), ("QLinearReduceMean", {"axes": [2, 3]})):
            (found,) = check(op, means, attrs, **MICROSOFT)
            np.testing.assert_array_equal(found.ravel(), expected["QLinearAdd"])


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearSoftmax", "QLinearAveragePool"])
def test_many_scales_are_not_taken_for_one(op: str) -> None:
    x = codes(np.uint8, 1, 2, 3, 4)
    more = [single(0.1), single(0, np.uint8)]
    given = [x, np.full(4, 0.1, np.float32), *more[1:], *([x, *more] if op == "QLinearAdd" else []), *more]
    attrs = {"QLinearSoftmax": {"opset": 13}, "QLinearAveragePool": {"kernel_shape": [2, 2]}}.get(op, {})
    model = one_node(op, given, attrs, **MICROSOFT)
    with rv.load(model, providers=["cpu"], optimization="none") as session, pytest.raises(KernelError, match="reshape"):
        session.run({f"x{k}": each for k, each in enumerate(given)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opset", [12, 13])
def test_softmax(kind: type, opset: int) -> None:
    low = single(np.iinfo(kind).min, kind)
    for shape in ((4, 5, 7), (3, 300), (6,), (2, 0, 3)):
        for axis in range(-len(shape), len(shape)):
            given = [codes(kind, *shape), single(0.04), codes(kind), single(1 / 256), low]
            check("QLinearSoftmax", given, {"axis": axis, "opset": opset}, **MICROSOFT)


def test_softmax_of_extremes() -> None:
    ends = np.array([[0, 0, 0, 255], [255, 255, 255, 255], [0, 0, 0, 0], [254, 255, 0, 1]], np.uint8)
    for scale in (1e-3, 1.0, 100.0):
        given = [ends, single(scale), None, single(1 / 255), single(0, np.uint8)]
        (found,) = check("QLinearSoftmax", given, {"opset": 13}, **MICROSOFT)
        assert found[1].tolist() == [64] * 4
        given = [ends.view(np.int8), single(scale), None, single(1e-3), single(127, np.int8)]
        (found,) = check("QLinearSoftmax", given, {"opset": 13}, **MICROSOFT)
        assert found.max() == 127


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_codes(kind: type) -> None:
    x = codes(kind, 3, 4, 5)
    forms: list[dict[str, Any]] = [{"axes": [1]}, {"axes": [-1, 0], "keepdims": 0}, {"axes": [0, 1, 2]}, {}]
    for attrs in forms:
        (found,) = check("ReduceSumInteger", [x], attrs, **MICROSOFT)
        assert found.dtype == (np.uint32 if kind is np.uint8 else np.int32)
    check("ReduceSumInteger", [codes(kind, 3, 0)], {"axes": [1]}, **MICROSOFT)
    check("ReduceSumInteger", [codes(kind)], {}, **MICROSOFT)
    check("ReduceSumInteger", [np.full((2, 70000), np.iinfo(kind).min, kind)], {"axes": [1]}, **MICROSOFT)


@pytest.mark.parametrize("kind", KINDS)
def test_mul_integer(kind: type) -> None:
    check("MulInteger", [codes(kind, 3, 8), codes(kind), codes(kind, 8), codes(kind)], **MICROSOFT)
    check("MulInteger", [codes(kind, 3, 8), None, codes(kind, 8)], **MICROSOFT)
