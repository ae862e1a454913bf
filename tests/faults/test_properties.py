"""Hypothesis, with a fixed seed: any bytes, any arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ranvier as rv
from ranvier.errors import RanvierError
from tests.faults.corpus import SHAPES
from tests.faults.models import model

SETTINGS = settings(derandomize=True, max_examples=200, deadline=None, database=None)


@SETTINGS
@given(st.binary(max_size=400))
def test_any_bytes_are_no_model(data: bytes) -> None:
    try:
        rv.load(data)
    except RanvierError as error:
        assert str(error)


@functools.cache
def session() -> rv.Session:
    return rv.load(model(SHAPES.partition(">\n")[2]))


ANYTHING = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.floats() | st.integers(), max_size=4),
    arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)),
)


@SETTINGS
@given(st.dictionaries(st.sampled_from(["x", "target", "other"]), ANYTHING))
def test_any_inputs_give_a_result_or_a_typed_error(inputs: dict[str, Any]) -> None:
    try:
        session().run(inputs)
    except RanvierError as error:
        assert str(error)


@SETTINGS
@given(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=3)),
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=1)),
)
def test_any_indices_give_elements_or_an_error(x: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    flat = x.reshape(-1)
    try:
        found = session().run({"x": x, "target": target})["picked"]
    except RanvierError as error:
        assert "Gather" in str(error) or "Reshape" in str(error)
        return
    np.testing.assert_array_equal(found, flat[target])
