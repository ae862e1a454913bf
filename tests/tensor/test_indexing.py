"""Parts of tensors, read and assigned, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ranvier as rv
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch

SHAPE = (4, 3, 5)
ARRAY = np.arange(60.0, dtype=np.float32).reshape(SHAPE)


def lazy(array: Any = ARRAY) -> rv.Tensor:
    """A tensor that is not computed yet, so that its parts are operators."""
    return rv.Tensor(array) + 0.0


def tensors(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(tensors(k) for k in key)
    return rv.Tensor(key) if isinstance(key, np.ndarray) else key


@settings(max_examples=60, deadline=None)
@given(hnp.basic_indices(SHAPE, allow_newaxis=True, allow_ellipsis=True))
def test_numbers_slices_and_new_axes(key: Any) -> None:
    expected = ARRAY[key]
    for x in (rv.Tensor(ARRAY), lazy()):
        found = x[key]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)


ARRAYS = [
    np.array([2, 0, -1]),
    np.array([[1, 2], [0, 3]]),
    (slice(None), np.array([1, 0])),
    (np.array([0, 3]), np.array([1, 2])),
    (np.array([[0], [3]]), np.array([1, 2])),
    (np.array([0, 3]), slice(None), np.array([1, 4])),
    (slice(1, None), np.array([0, 2]), np.array([1, 4])),
    (np.array([0, 3]), 1),
    (1, slice(None), np.array([0, -1])),
    (slice(None), None, np.array([0, 1])),
    (Ellipsis, np.array([0, 4, 4])),
    np.zeros(0, np.int64),
    ARRAY > 30,
    ARRAY[:, :, 0] > 20,
    (np.array([True, False, True, False]), slice(None), 2),
    (slice(None), np.array([True, False, True])),
    np.zeros(SHAPE, bool),
    np.array(True),
    np.array(False),
]


@pytest.mark.parametrize("key", ARRAYS, ids=lambda k: str(np.shape(k)) if isinstance(k, np.ndarray) else str(len(k)))
def test_arrays_of_indices_and_masks(key: Any) -> None:
    expected = ARRAY[key]
    for x in (rv.Tensor(ARRAY), lazy()):
        for asked in (key, tensors(key)):
            found = x[asked]
            assert found.shape == expected.shape
            np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    "key", [0, -1, slice(1, 3), (slice(None), 1), (Ellipsis, slice(None, None, -2)), *ARRAYS], ids=str
)
def test_assignment(key: Any) -> None:
    part = ARRAY[key]
    for value in (np.float32(7.0), np.arange(part.size, dtype=np.float32).reshape(part.shape)):
        expected = ARRAY.copy()
        expected[key] = value
        x = lazy()
        before = x.copy()
        x[tensors(key)] = rv.Tensor(value)
        np.testing.assert_array_equal(x.numpy(), expected)
        np.testing.assert_array_equal(before.numpy(), ARRAY)  # what had the value keeps it


def test_an_assigned_number_takes_the_type_of_the_tensor() -> None:
    x = rv.Tensor([1, 2, 3], "int8")
    x[1] = 9
    assert x.tolist() == [1, 9, 3] and x.dtype.name == "int8"
    with pytest.raises(DTypeMismatch):
        x[0] = 0.5


def test_operators_in_place_change_the_name_and_not_the_value() -> None:
    x = rv.Tensor([1.0, 2.0])
    y = x.copy()
    same = x
    x += 1
    x *= 2
    assert x is same and x.tolist() == [4.0, 6.0] and y.tolist() == [1.0, 2.0]
    with pytest.raises(ShapeMismatch):
        x += rv.Tensor(np.ones((3, 2), np.float32))
    counts = rv.Tensor([1, 2])
    with pytest.raises(DTypeMismatch):
        counts += 0.5


@pytest.mark.parametrize("x", [rv.Tensor(ARRAY), lazy()], ids=["computed", "lazy"])
def test_what_is_no_index_says_so(x: rv.Tensor) -> None:
    for key in (4, -5, (0, 3), (0, 0, 0, 0), (..., 0, ...), rv.Tensor([True, False])):
        with pytest.raises(IndexError) as caught:
            x[key]
        assert isinstance(caught.value, InvalidValue)
    with pytest.raises(DTypeMismatch):
        x[rv.Tensor([0.5])]


def test_rows_are_what_iteration_gives() -> None:
    assert [row.shape for row in lazy()] == [(3, 5)] * 4
    with pytest.raises(TypeError):
        len(rv.Tensor(1.0))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2), st.lists(st.integers(-3, 2), min_size=1, max_size=4))
def test_take_counts_from_both_ends(axis: int, places: list[int]) -> None:
    found = rv.numpy.take(lazy(), rv.Tensor(places), axis=axis)
    np.testing.assert_array_equal(found.numpy(), np.take(ARRAY, places, axis=axis))
