"""Operators and functions of elements against NumPy: types, broadcasting, special numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch

quick = settings(max_examples=40, deadline=None)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, np.inf, -np.inf, np.nan, 1e-7, -1e-7, 20.0], np.float64)


def same(found: rv.Tensor, expected: Any, *, ulps: float = 8) -> None:
    assert found.dtype.numpy == np.asarray(expected).dtype
    assert found.shape == np.shape(expected)
    if np.asarray(expected).dtype.kind == "f":
        close = ulps * np.finfo(np.asarray(expected).dtype).eps
        np.testing.assert_allclose(found.numpy(), expected, rtol=close, atol=close)
    else:
        np.testing.assert_array_equal(found.numpy(), expected)


@st.composite
def pairs(draw: st.DrawFn, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3)).input_shapes
    kinds = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    return tuple(  # type: ignore[return-value]
        draw(hnp.arrays(kind, shape, elements=st.integers(0 if kind[0] == "u" else -9, 9)))
        for kind, shape in zip(kinds, shapes)
    )


@quick
@given(pairs(INTEGERS), st.sampled_from(["add", "sub", "mul"]))
def test_integers_have_the_type_and_shape_that_numpy_gives(both: tuple[Any, Any], name: str) -> None:
    a, b = both
    expected = getattr(operator, name)(a, b)
    if expected.dtype.kind == "f":
        return  # uint64 with signed numbers: left open by the standard
    same(getattr(operator, name)(rv.Tensor(a), rv.Tensor(b)), expected)


@quick
@given(pairs(INTEGERS), st.sampled_from(["floordiv", "mod"]))
def test_division_of_integers_rounds_down(both: tuple[Any, Any], name: str) -> None:
    a, b = both
    b = np.where(b == 0, np.ones_like(b), b)
    expected = getattr(operator, name)(a, b)
    if expected.dtype.kind == "f":
        return
    same(getattr(operator, name)(rv.Tensor(a), rv.Tensor(b)), expected)


def test_integers_divided_by_zero_are_zero_and_nothing_stops() -> None:
    assert (rv.Tensor([7, -7, 0]) // rv.Tensor([0, 0, 0])).tolist() == [0, 0, 0]


@quick
@given(pairs(FLOATS), st.sampled_from(["add", "sub", "mul", "truediv", "lt", "le", "eq", "ne", "gt", "ge"]))
def test_floats_have_the_type_and_shape_that_numpy_gives(both: tuple[Any, Any], name: str) -> None:
    a, b = both
    with np.errstate(all="ignore"):
        expected = getattr(operator, name)(a, b)
    same(getattr(operator, name)(rv.Tensor(a), rv.Tensor(b)), expected)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", ["and_", "or_", "xor", "lshift", "rshift"])
def test_bits_of_all_integers(name: str, op: str) -> None:
    low = 0 if name[0] == "u" else -100
    a = np.arange(low, low + 120, 7).astype(name)
    b = (np.arange(a.size) % 7).astype(name)
    same(getattr(operator, op)(rv.Tensor(a), rv.Tensor(b)), getattr(operator, op)(a, b))


def test_numbers_of_python_take_the_type_of_the_tensor() -> None:
    for name in [*INTEGERS, *FLOATS]:
        x = rv.Tensor(np.ones(2, name))
        assert (x + 1).dtype.name == name and (2 * x).dtype.name == name
    assert (rv.Tensor([1, 2]) + 0.5).dtype is rnp.float32
    assert (rv.Tensor([True]) + 1).dtype is rnp.int64
    assert (rv.Tensor([1], "int32") * rv.Tensor([0.5], "float32")).dtype is rnp.float32
    with pytest.raises(InvalidInput):
        rv.Tensor([1], "int8") + 1000


def test_arrays_of_numpy_stand_on_either_side() -> None:
    x, a = rv.Tensor([1.0, 2.0]), np.array([10.0, 20.0], np.float32)
    for found in (x + a, a + x):
        assert isinstance(found, rv.Tensor)
        assert found.tolist() == [11.0, 22.0]


def test_what_cannot_be_combined_says_so() -> None:
    with pytest.raises(ShapeMismatch, match=r"\[2\].*\[3\]"):
        rv.Tensor([1.0, 2.0]) + rv.Tensor([1.0, 2.0, 3.0])
    with pytest.raises(DTypeMismatch):
        rv.Tensor([True]) + rv.Tensor([False])
    with pytest.raises(TypeError):
        rv.Tensor([1.0]) + "text"


UNARY = [
    "exp", "log", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "arcsinh",
    "arccosh", "arctanh", "expm1", "log1p", "log2", "log10", "floor", "ceil", "trunc", "round", "sign", "abs",
    "square", "negative", "isnan", "isinf", "isfinite", "signbit",
]  # fmt: skip


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, kind: str) -> None:
    x = SPECIAL.astype(kind)
    own = name.replace("arc", "a")
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x)
    if name == "tan":
        x, expected = x[:7], expected[:7]
    same(getattr(rnp, own)(rv.Tensor(x)), expected, ulps=32)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "name", ["hypot", "arctan2", "copysign", "maximum", "minimum", "logaddexp", "nextafter", "remainder"]
)
def test_functions_of_two_numbers(name: str, kind: str) -> None:
    a, b = (x.ravel().astype(kind) for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(a, b)
    found = getattr(rnp, name.replace("arc", "a"))(rv.Tensor(a), rv.Tensor(b))
    same(found, expected, ulps=32)
    zero = expected == 0
    if name in ("maximum", "minimum"):  # of two zeros that differ by their sign either is right, and NumPy gives both
        zero &= np.signbit(a) == np.signbit(b)
    np.testing.assert_array_equal(np.signbit(found.numpy()[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize("x", [np.array([-5, 0, 5, 100]), np.array([-5.5, 0.0, np.nan, 9.0])])
def test_clip(x: Any) -> None:
    same(rnp.clip(rv.Tensor(x), -2, 3), np.clip(x, -2, 3))
    same(rnp.clip(rv.Tensor(x), max=3), np.clip(x, None, 3))


def test_complex_numbers_are_computed_too() -> None:
    a = np.array([1 + 2j, -3j], np.complex64)
    x = rv.Tensor(a)
    for found, expected in (
        (x * x, a * a),
        (abs(x), abs(a)),
        (rnp.exp(x), np.exp(a)),
        (rnp.conj(x), a.conj()),
        (x == x, a == a),
    ):
        same(found, expected)


def test_close_numbers() -> None:
    a, b = np.array([1.0, 1.0, np.inf, np.nan]), np.array([1.0 + 1e-9, 1.1, np.inf, np.nan])
    assert rnp.isclose(a, b).tolist() == np.isclose(a, b).tolist()
    assert rnp.isclose(a, b, equal_nan=True).tolist() == np.isclose(a, b, equal_nan=True).tolist()
