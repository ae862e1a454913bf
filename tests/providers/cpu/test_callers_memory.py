"""Memory that callers bring: read wherever it lies, written to only where generated code may."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.providers.cpu.compare import one_node

Array = np.ndarray[Any, Any]
SHAPE = (3, 5)


def shifted(array: Array) -> Array:
    """The same numbers, one byte away from where such elements belong."""
    raw = np.empty(array.nbytes + 1, np.uint8)
    found = raw[1:].view(array.dtype).reshape(array.shape)
    found[...] = array
    assert not found.flags.aligned
    return found


def frozen(array: Array) -> Array:
    found = array.copy()
    found.flags.writeable = False
    return found


def wide(array: Array) -> Array:
    """The same numbers with gaps between them."""
    found = np.zeros((array.shape[0], 2 * array.shape[1]), array.dtype)[:, ::2]
    found[...] = array
    return found


X = np.arange(15, dtype=np.float32).reshape(SHAPE)
LAYOUTS = {"dense": np.copy, "turned": np.asfortranarray, "wide": wide, "shifted": shifted, "frozen": frozen}


@pytest.fixture(scope="module")
def session() -> Any:
    with rv.load(one_node("Add", [X, X]), providers=["cpu"]) as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_may_lie_anywhere(session: Any, layout: str) -> None:
    given = LAYOUTS[layout](X)
    np.testing.assert_array_equal(session.run({"x0": given, "x1": X})["y0"], X + X)
    np.testing.assert_array_equal(given, X)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_written_only_where_they_fit(session: Any, layout: str) -> None:
    target = LAYOUTS[layout](np.zeros(SHAPE, np.float32))
    found = session.run({"x0": X, "x1": X}, into={"y0": target})["y0"]
    np.testing.assert_array_equal(found, X + X)
    assert (found is target) == (layout == "dense")
    np.testing.assert_array_equal(target, X + X if layout == "dense" else 0)


@pytest.mark.parametrize("target", [np.zeros(15, np.float32), np.zeros(SHAPE, np.float64)], ids=["shape", "type"])
def test_memory_for_something_else_is_left_alone(session: Any, target: Array) -> None:
    found = session.run({"x0": X, "x1": X}, into={"y0": target})["y0"]
    np.testing.assert_array_equal(found, X + X)
    assert not target.any()
