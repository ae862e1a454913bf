"""Elementwise and joining operators on quantized tensors against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.providers.cpu.compare import Array, check

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


@pytest.mark.parametrize("kind", KINDS)
def test_mul_integer(kind: type) -> None:
    check("MulInteger", [codes(kind, 3, 8), codes(kind), codes(kind, 8), codes(kind)], **MICROSOFT)
    check("MulInteger", [codes(kind, 3, 8), None, codes(kind, 8)], **MICROSOFT)
