"""Creation, shapes, reductions, sorting and linear algebra against NumPy."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ranvier as rv
from ranvier import numpy as rnp
from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch

X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
NUMBERS = np.random.default_rng(1).integers(-9, 9, (3, 4, 5))
SHAPES = settings(max_examples=30, deadline=None)


def same(found: rv.Tensor, expected: Any, tolerance: float = 1e-5) -> None:
    assert found.shape == np.shape(expected)
    assert found.dtype.numpy == np.asarray(expected).dtype
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance)


# -- creation -------------------------------------------------------------------------------------------------------


def test_what_tensors_are_made_of() -> None:
    assert rv.Tensor([1.0, 2.0]).dtype is rnp.float32 and rv.Tensor([1, 2]).dtype is rnp.int64
    assert rv.Tensor([[True]]).dtype is rnp.bool and rv.Tensor(1j).dtype is rnp.complex64
    assert rv.Tensor(np.ones(2)).dtype is rnp.float64 and rv.Tensor([np.float64(1)]).dtype is rnp.float64
    assert rv.Tensor([rv.Tensor([1.0]), rv.Tensor([2.0])]).shape == (2, 1)
    assert rv.Tensor([1, 2], "bfloat16").dtype is rnp.bfloat16
    assert rv.Tensor(np.ones((4, 4))[::2, ::2]).shape == (2, 2)
    for bad in ([1.0, "a"], [[1], [2, 3]], object()):
        with pytest.raises((InvalidInput, DTypeMismatch)):
            rv.Tensor(bad)


def test_what_need_not_be_copied_is_not() -> None:
    x = rv.Tensor([1.0])
    assert rnp.asarray(x) is x and rnp.asarray(x, copy=False, dtype="float32") is x
    other = rnp.asarray(x, copy=True)
    x[0] = 2.0
    assert other.tolist() == [1.0]
    for source, options in ((x, {"dtype": "int32"}), (np.ones(2), {}), ([1.0], {})):
        with pytest.raises(ValueError, match="cop"):
            rnp.asarray(source, copy=False, **options)


def test_creation_functions() -> None:
    same(rnp.zeros((2, 3)), np.zeros((2, 3), np.float32))
    same(rnp.full((2,), 7), np.full((2,), 7))
    same(rnp.arange(3, 12, 4), np.arange(3, 12, 4))
    same(rnp.arange(0.0, 1.0, 0.25, dtype="float64"), np.arange(0.0, 1.0, 0.25))
    same(rnp.linspace(0, 1, 5), np.linspace(0, 1, 5, dtype=np.float32))
    same(rnp.eye(3, 4, k=1), np.eye(3, 4, 1, np.float32))
    same(rnp.ones_like(rv.Tensor(NUMBERS)), np.ones_like(NUMBERS))
    grids = rnp.meshgrid(rnp.arange(3), rnp.arange(2))
    for found, expected in zip(grids, np.meshgrid(np.arange(3), np.arange(2))):
        same(found, expected)
    with pytest.raises(InvalidInput):
        rnp.zeros((-1,))


def test_exchange_with_others() -> None:
    x = rv.Tensor(X)
    np.testing.assert_array_equal(np.asarray(x), X)
    np.testing.assert_array_equal(np.from_dlpack(x + 0), X)
    same(rnp.from_dlpack(X), X)
    same(pickle.loads(pickle.dumps(x * 2)), X * 2)
    assert x.__array_namespace__(api_version="2024.12") is rnp
    with pytest.raises(ValueError, match="2099"):
        x.__array_namespace__(api_version="2099.12")


def test_single_elements_are_numbers() -> None:
    x = rv.Tensor(2.5)
    assert float(x) == 2.5 and int(x) == 2 and bool(x) and f"{x:.2f}" == "2.50"
    assert [10, 20, 30][rv.Tensor(1)] == 20
    assert "float32" in repr(x) and "2.5" in repr(x)
    with pytest.raises(TypeError):
        bool(rv.Tensor([1.0, 2.0]))


# -- shapes ---------------------------------------------------------------------------------------------------------

MOVES = {
    "reshape": (lambda x: rnp.reshape(x, (5, -1)), lambda x: x.reshape(5, -1)),
    "transpose": (lambda x: rnp.permute_dims(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1)),
    "mT": (lambda x: x.mT, lambda x: x.swapaxes(1, 2)),
    "moveaxis": (lambda x: rnp.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, 0, -1)),
    "squeeze": (lambda x: rnp.squeeze(x[:1], 0), lambda x: x[0]),
    "expand": (lambda x: rnp.broadcast_to(x[:, :1], (2, 3, 4, 5)), lambda x: np.broadcast_to(x[:, :1], (2, 3, 4, 5))),
    "concat": (lambda x: rnp.concat([x, x[:, :1]], axis=1), lambda x: np.concatenate([x, x[:, :1]], 1)),
    "concat flat": (lambda x: rnp.concat([x, x], axis=None), lambda x: np.concatenate([x, x], None)),
    "stack": (lambda x: rnp.stack([x, x], axis=-1), lambda x: np.stack([x, x], -1)),
    "flip": (lambda x: rnp.flip(x, axis=(0, 2)), lambda x: np.flip(x, (0, 2))),
    "roll": (lambda x: rnp.roll(x, (1, -7), axis=(0, 2)), lambda x: np.roll(x, (1, -7), (0, 2))),
    "roll flat": (lambda x: rnp.roll(x, 4), lambda x: np.roll(x, 4)),
    "tile": (lambda x: rnp.tile(x, (2, 1, 1, 3)), lambda x: np.tile(x, (2, 1, 1, 3))),
    "repeat": (lambda x: rnp.repeat(x, 3, axis=1), lambda x: np.repeat(x, 3, 1)),
    "repeats": (lambda x: rnp.repeat(x, rv.Tensor([1, 0, 2]), axis=0), lambda x: np.repeat(x, [1, 0, 2], 0)),
    "pad": (lambda x: rnp.pad(x, [(1, 0), (0, 2), (0, 0)]), lambda x: np.pad(x, [(1, 0), (0, 2), (0, 0)])),
    "tril": (lambda x: rnp.tril(x, k=-1), lambda x: np.tril(x, -1)),
    "triu": (lambda x: rnp.triu(x, k=1), lambda x: np.triu(x, 1)),
    "along": (
        lambda x: rnp.take_along_axis(x, rnp.argsort(x, axis=1), axis=1),
        lambda x: np.take_along_axis(x, np.argsort(x, 1, kind="stable"), 1),
    ),
    "split": (lambda x: rnp.split(x, [1, 3], axis=1)[1], lambda x: x[:, 1:]),
}


@pytest.mark.parametrize("x", [X, NUMBERS, X > 0], ids=["floats", "integers", "bools"])
@pytest.mark.parametrize("name", MOVES)
def test_elements_go_where_numpy_puts_them(name: str, x: Any) -> None:
    found, expected = MOVES[name]
    same(found(rv.Tensor(x)), expected(x))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = rv.Tensor(X)
    for call in (
        lambda: x.reshape(7, -1),
        lambda: x.reshape(-1, -1),
        lambda: rnp.broadcast_to(x, (3, 4)),
        lambda: rnp.squeeze(x, 0),
        lambda: rnp.concat([x, x[:, :, :2]], axis=0),
        lambda: rnp.permute_dims(x, (0, 0, 1)),
        lambda: rnp.sum(x, axis=3),
        lambda: x @ x,
    ):
        with pytest.raises(ShapeMismatch):
            call()
    for call in (lambda: rnp.sum(x, axis=3), lambda: rnp.expand_dims(x, axis=-5), lambda: rnp.stack([x], axis=9)):
        with pytest.raises(IndexError):
            call()


# -- reductions -----------------------------------------------------------------------------------------------------


@SHAPES
@given(
    st.sampled_from(["sum", "prod", "max", "min", "mean", "var", "std", "any", "all"]),
    st.sampled_from([None, 0, -1, (0, 2), (0, 1, 2), ()]),
    st.booleans(),
    st.sampled_from(["float32", "float64", "int8", "int64", "uint8", "bool"]),
)
def test_reductions(name: str, axis: Any, keepdims: bool, kind: str) -> None:
    if kind not in ("float32", "float64") and name in ("mean", "var", "std"):
        return  # NumPy's become float64
    x = (X > 0) if kind == "bool" else (np.abs(X) * 3 if kind[0] == "u" else X).astype(kind)
    if kind == "bool" and name in ("max", "min"):
        return
    expected = getattr(np, name)(x, axis=axis, keepdims=keepdims)
    found = getattr(rnp, name)(rv.Tensor(x), axis=axis, keepdims=keepdims)
    same(found, expected, 1e-4)


@pytest.mark.parametrize("axis", [None, 0, 2])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_of_extremes(name: str, axis: int | None) -> None:
    for x in (X, NUMBERS):
        same(getattr(rnp, name)(rv.Tensor(x), axis=axis), getattr(np, name)(x, axis=axis))


def test_running_sums_and_differences() -> None:
    same(rnp.cumulative_sum(rv.Tensor(NUMBERS), axis=1), np.cumsum(NUMBERS, 1))
    same(rnp.cumulative_prod(rv.Tensor(X), axis=0), np.cumprod(X, 0))
    found = rnp.cumulative_sum(rv.Tensor([1, 2]), include_initial=True)
    assert found.tolist() == [0, 1, 3]
    same(rnp.diff(rv.Tensor(X), axis=1, n=2), np.diff(X, axis=1, n=2))


def test_means_of_integers_are_floats_and_of_nothing_nan() -> None:
    assert rnp.mean(rv.Tensor([1, 2])).dtype is rnp.float32
    assert np.isnan(rnp.mean(rnp.zeros((0,))).item())
    with pytest.raises(InvalidInput):
        rnp.max(rnp.zeros((0,)))
    same(rnp.average(rv.Tensor(X), axis=0, weights=np.abs(X)), np.average(X, 0, np.abs(X)))


# -- sorting and searching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("x", [X, NUMBERS, NUMBERS.astype(np.uint8), X > 0], ids=["float", "int", "uint8", "bool"])
def test_order(x: Any, axis: int) -> None:
    own = rv.Tensor(x)
    same(rnp.sort(own, axis=axis), np.sort(x, axis))
    same(rnp.argsort(own, axis=axis), np.argsort(x, axis, kind="stable"))
    same(rnp.sort(own, axis=axis, descending=True), np.flip(np.sort(x, axis), axis))


def test_the_largest_few() -> None:
    values, places = rnp.top_k(rv.Tensor([3.0, 1.0, 4.0, 1.0, 5.0]), 3)
    assert values.tolist() == [5.0, 4.0, 3.0] and places.tolist() == [4, 2, 0]


def test_what_depends_on_the_numbers() -> None:
    for found, expected in zip(rnp.nonzero(rv.Tensor(NUMBERS)), np.nonzero(NUMBERS)):
        same(found, expected)
    unique = rnp.unique_all(rv.Tensor(NUMBERS))
    values, places, inverse, counts = np.unique(NUMBERS, True, True, True)
    for found, expected in zip(unique, (values, places, inverse.reshape(NUMBERS.shape), counts)):
        same(found, expected)
    same(rnp.searchsorted(np.arange(5.0), np.array([1.5, 3.0])), np.searchsorted(np.arange(5.0), [1.5, 3.0]))
    same(rnp.count_nonzero(rv.Tensor(NUMBERS), axis=0), np.count_nonzero(NUMBERS, axis=0))
    same(rnp.isin(rv.Tensor(NUMBERS), rv.Tensor([1, 2])), np.isin(NUMBERS, [1, 2]))


# -- linear algebra -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 2)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((3, 0), (0, 2))],
)
@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int64"])
def test_products(shapes: Any, kind: str) -> None:
    draw = np.random.default_rng(3)
    a, b = (draw.integers(-5, 5, s).astype(kind) for s in shapes)
    same(rv.Tensor(a) @ rv.Tensor(b), a @ b)


def test_other_products() -> None:
    a, b = X[0], X[1]
    same(rnp.tensordot(rv.Tensor(X), rv.Tensor(X), axes=((0, 1), (0, 1))), np.tensordot(X, X, ((0, 1), (0, 1))), 1e-4)
    same(rnp.vecdot(rv.Tensor(a), rv.Tensor(b)), np.vecdot(a, b))
    same(rnp.outer(rv.Tensor(a[0]), rv.Tensor(b[0])), np.outer(a[0], b[0]))
    same(rnp.einsum("bij,bkj->ik", X, X), np.einsum("bij,bkj->ik", X, X), 1e-4)
    same(rnp.linalg.cross(rv.Tensor(X.T[:, :, :3]), rv.Tensor(X.T[:, :, :3] + 1)), np.cross(X.T, X.T + 1))


def test_decompositions() -> None:
    square = X[0, :, :4] + 4 * np.eye(4, dtype=np.float32)
    own = rv.Tensor(square)
    same(rnp.linalg.inv(own) @ own, np.eye(4, dtype=np.float32), 1e-4)
    same(rnp.linalg.det(own), np.linalg.det(square), 1e-4)
    same(rnp.linalg.solve(own, rv.Tensor(square[0])), np.linalg.solve(square, square[0]), 1e-4)
    u, s, vh = rnp.linalg.svd(rv.Tensor(X), full_matrices=False)
    same((u * s[:, None, :]) @ vh, X, 1e-4)
    q, r = rnp.linalg.qr(own)
    same(q @ r, square, 1e-4)
    for order in ("fro", 1, -1, 2, np.inf, "nuc"):
        same(rnp.linalg.matrix_norm(own, ord=order), np.linalg.norm(square, order), 1e-4)
    for order in (0, 1, 2, 3.0, np.inf, -np.inf):
        same(rnp.linalg.vector_norm(own[0], ord=order), np.linalg.norm(square[0], order), 1e-4)
    same(rnp.linalg.matrix_power(own, 3), np.linalg.matrix_power(square, 3), 1e-3)
    same(rnp.linalg.diagonal(own, offset=1), np.diagonal(square, 1))


def test_transforms() -> None:
    same(rnp.fft.ifft(rnp.fft.fft(rv.Tensor(X))), X.astype(np.complex64))
    same(rnp.fft.irfft(rnp.fft.rfft(rv.Tensor(X)), n=5), X)
    assert rnp.fft.fft(rv.Tensor(np.ones(3))).dtype is rnp.complex128


# -- types ----------------------------------------------------------------------------------------------------------


def test_questions_about_types() -> None:
    assert rnp.result_type(rnp.int8, rnp.uint8) is rnp.int16
    assert rnp.result_type(rv.Tensor([1.0]), 2, rnp.float64) is rnp.float64
    assert rnp.result_type(rnp.float16, rnp.bfloat16) is rnp.float32
    assert rnp.can_cast(rnp.int8, rnp.int64) and not rnp.can_cast(rnp.float64, rnp.float32)
    assert rnp.isdtype(rnp.int8, ("bool", "signed integer")) and not rnp.isdtype(rnp.float32, "integral")
    assert rnp.finfo(rnp.float32).eps == float(np.finfo(np.float32).eps) and rnp.iinfo("int8").max == 127
    with pytest.raises(InvalidInput):
        rnp.isdtype(rnp.int8, "whole")
    info = rnp.__array_namespace_info__()
    assert info.default_dtypes()["real floating"] is rnp.float32
    assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
    assert str(info.default_device()) in {str(d) for d in info.devices()}
