"""Conversions from and to element types of less than a machine's width."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from ranvier.codegen.definitions.lower.narrow_cast import FORMATS, NARROW, NARROW_INTEGERS
from ranvier.dtypes import DType
from tests.providers.cpu.compare import Array, run

RNG = np.random.default_rng(5)
STANDARD = [d for d in sorted(NARROW, key=str) if not d.name.startswith("float6")]


def converted(x: Array, to: DType, provider: str, **attrs: object) -> Array:
    """Fed and fetched as bytes where the type is narrow, so that nothing else converts."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    node = helper.make_node("Cast", ["x"], ["y"], to=to.onnx, **attrs)
    given = helper.make_tensor_value_info("x", kind, x.shape)
    made = helper.make_tensor_value_info("y", to.onnx, x.shape)
    graph = helper.make_graph([node], "cast", [given], [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
    onnx.checker.check_model(model)
    return run(model, {"x": x}, provider)[0]


def numbers() -> Array:
    """All magnitudes, ties, both zeros, and what is not a number."""
    spread = RNG.normal(size=4000) * 2.0 ** RNG.integers(-30, 20, 4000)
    fine = np.concatenate([np.arange(-40, 41) / 8, np.arange(-64, 65) * 2.0**-12, [448, 449, 464, 465, 480, 57344]])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 61440.0, 61439.0, 1e30, -1e30, 6.0, 7.0, 2.0**-127, 3e-39, 0.75]
    return np.concatenate([spread, fine, special]).astype(np.float32)


def same(a: Array, b: Array) -> None:
    x, y = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(np.signbit(x[~np.isnan(x)]), np.signbit(y[~np.isnan(y)]))


@pytest.mark.parametrize("to", [d for d in STANDARD if d in FORMATS], ids=str)
@pytest.mark.parametrize("saturate", [1, 0])
def test_floats_round_half_to_even(to: DType, saturate: int) -> None:
    x = numbers()
    if to.bits < 8:
        x = x[np.isfinite(x)]  # these formats have no code for the rest
    same(converted(x, to, "cpu", saturate=saturate), converted(x, to, "reference", saturate=saturate))


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_exponents(mode: str) -> None:
    x, to = numbers(), DType.float8_e8m0fnu
    same(converted(x, to, "cpu", round_mode=mode), converted(x, to, "reference", round_mode=mode))


@pytest.mark.parametrize("source", STANDARD, ids=str)
def test_every_code(source: DType) -> None:
    codes = np.arange(1 << min(8, source.bits), dtype=np.uint8).view(source.numpy)
    same(converted(codes, DType.float32, "cpu"), converted(codes, DType.float32, "reference"))
    finite = codes[np.isfinite(codes.astype(np.float32))]
    same(converted(finite, DType.float16, "cpu"), converted(finite, DType.float16, "reference"))


@pytest.mark.parametrize("to", sorted(NARROW_INTEGERS, key=str), ids=str)
@pytest.mark.parametrize("source", [np.float32, np.int32, np.uint8, np.int64])
def test_integers_lose_their_upper_bits(to: DType, source: type) -> None:
    x = np.concatenate([np.arange(100), -np.arange(0 if source is np.uint8 else 100)]).astype(source)
    if source is np.float32:
        x = x + np.float32(0.75)
    found, wanted = converted(x, to, "cpu"), converted(x, to, "reference")
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def test_largest_numbers() -> None:
    for dtype, form in FORMATS.items():
        assert np.uint8(form.largest).view(dtype.numpy) == ml_dtypes.finfo(dtype.numpy).max
