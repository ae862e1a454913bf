"""Elements and rows placed by position, and the best of every row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(5)
TYPES: list[Any] = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64]


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    if np.dtype(dtype).kind == "f" or dtype is ml_dtypes.bfloat16:
        return RNG.normal(size=shape).astype(dtype)
    return RNG.integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements(axis: int, reduction: str) -> None:
    data, picks = numbers((5, 9, 7)), (4, 6, 7)
    index = RNG.integers(-data.shape[axis], data.shape[axis], picks)
    attrs = {"axis": axis, "reduction": reduction}
    check("ScatterElements", [data, index, numbers(picks)], attrs)


@pytest.mark.parametrize("dtype", TYPES)
def test_scatter_of_every_type(dtype: Any) -> None:
    data, index = numbers((40, 3), dtype), RNG.integers(0, 40, (70, 1))
    for reduction in ("none", "add", "max"):
        check("ScatterND", [data, index, numbers((70, 3), dtype)], {"reduction": reduction}, rtol=2e-2)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_nd(reduction: str) -> None:
    for shape, depth in (((6, 5, 70), 1), ((6, 5, 70), 2), ((6, 5, 4), 3)):
        picks = (2, 11)
        index = np.stack([RNG.integers(-s, s, picks) for s in shape[:depth]], axis=-1)
        updates = numbers((*picks, *shape[depth:]))
        check("ScatterND", [numbers(shape), index, updates], {"reduction": reduction})


def test_scatter_nd_with_long_rows_in_parts() -> None:
    index = RNG.integers(0, 4, (30, 1))
    check("ScatterND", [numbers((4, 5003)), index, numbers((30, 5003))], {"reduction": "add"})


def test_bools_and_nan() -> None:
    flags, index = RNG.random(20) > 0.5, RNG.integers(0, 20, 33)
    for reduction in ("none", "add", "mul"):
        check("ScatterElements", [flags, index, RNG.random(33) > 0.5], {"reduction": reduction})
    updates = numbers((33,))
    updates[::5] = np.nan
    for reduction in ("max", "min", "add"):
        check("ScatterElements", [numbers((20,)), index, updates], {"reduction": reduction})


def test_nothing_to_scatter() -> None:
    check("ScatterElements", [numbers((3, 4)), np.zeros((0, 4), np.int64), numbers((0, 4))])
    check("ScatterND", [numbers((3, 4)), np.zeros((0, 1), np.int64), numbers((0, 4))])
    check("Scatter", [numbers((6,)), np.array([5, 0]), numbers((2,))], opset=10)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_a_position_out_of_range_is_an_error(op: str) -> None:
    index = np.array([1, 99]) if op == "ScatterElements" else np.array([[1], [-99]])
    inputs = [numbers((6,)), index, numbers((2,))]
    with rv.load(one_node(op, inputs), providers=["cpu"]) as session, pytest.raises(rv.errors.InvalidValue):
        session.run({f"x{k}": x for k, x in enumerate(inputs)})


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode: str) -> None:
    past, update = numbers((3, 2, 8, 5)), numbers((3, 2, 3, 5))
    starts = np.array([0, 5, 2]) if mode == "linear" else np.array([7, 6, 15])
    check("TensorScatter", [past, update, starts], {"mode": mode})
    check("TensorScatter", [past, update, None], {"mode": mode})
    if mode == "linear":
        inputs = [past, update, np.array([0, 6, 2])]
        model = one_node("TensorScatter", inputs, {"mode": mode})
        with rv.load(model, providers=["cpu"]) as session, pytest.raises(rv.errors.InvalidValue):
            session.run({f"x{k}": x for k, x in enumerate(inputs)})


# -- TopK -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("ordered", [0, 1])
def test_top_k(largest: int, ordered: int) -> None:
    for shape, axis, k in (((3, 100), -1, 7), ((4, 37, 5), 1, 3), ((2, 50), 1, 50), ((500,), 0, 60), ((6, 3), 0, 1)):
        attrs = {"axis": axis, "largest": largest, "sorted": ordered}
        x = numbers(shape).round(1)  # ties
        check("TopK", [x, np.array([k])], attrs, outputs=2, constant=[1])


@pytest.mark.parametrize("dtype", [*TYPES, np.uint64])
def test_top_k_of_every_type(dtype: Any) -> None:
    x = numbers((4, 61), dtype)
    if x.dtype.kind == "i":
        x = -x
    for largest in (0, 1):
        check("TopK", [x, np.array([9])], {"largest": largest}, outputs=2, constant=[1])


def test_top_k_of_special_values() -> None:
    x = np.array([[0.0, -0.0, np.nan, np.inf, -np.inf, 1, -np.nan, 0.0, -1, np.inf]], np.float32).repeat(3, 0)
    for largest in (0, 1):
        for dtype in (np.float32, np.float64):
            check("TopK", [x.astype(dtype), np.array([10])], {"largest": largest}, outputs=2, constant=[1])
    check("TopK", [x, np.array([0])], outputs=2, constant=[1])
