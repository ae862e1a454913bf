"""Pools over codes: QLinearAveragePool and NhwcMaxPool against the reference, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier.errors import ShapeMismatch
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(31)
MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}
KINDS = [np.uint8, np.int8]
WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": [2, 3]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [0, 1, 2, 0], "ceil_mode": 1},
    {"kernel_shape": [4, 3], "strides": [3, 2], "ceil_mode": 1},
    {"kernel_shape": [3, 4], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 4], "strides": [1, 3], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [3, 2], "strides": [2, 1], "auto_pad": "VALID"},
]


def codes(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return np.asarray(RNG.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype))


def single(value: float, dtype: type = np.float32) -> Array:
    return np.asarray(value, dtype)


def parameters(dtype: type, zero: int, scale: float = 0.02, out: float = 0.015) -> list[Array]:
    low = int(np.iinfo(dtype).min)
    return [single(scale), single(low + zero, dtype), single(out), single(low + 255 - zero, dtype)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("last", [0, 1])
def test_average_of_codes(window: dict[str, Any], last: int) -> None:
    for kind in KINDS:
        x = codes(kind, 2, 7, 8, 5) if last else codes(kind, 2, 5, 7, 8)
        for zero, pads in ((0, 0), (255, 1), (97, 1)):
            attrs = {**window, "channels_last": last, "count_include_pad": pads}
            check("QLinearAveragePool", [x, *parameters(kind, zero)], attrs, **MICROSOFT)


@pytest.mark.parametrize("kind", KINDS)
def test_average_of_codes_along_one_and_three_axes(kind: type) -> None:
    given = parameters(kind, 100)
    check("QLinearAveragePool", [codes(kind, 2, 3, 9), *given], {"kernel_shape": [4], "pads": [2, 1]}, **MICROSOFT)
    attrs = {"kernel_shape": [2, 3, 2], "pads": [1, 1, 0, 0, 1, 1], "channels_last": 1}
    check("QLinearAveragePool", [codes(kind, 2, 4, 5, 3, 6), *given], attrs, **MICROSOFT)


def test_average_without_zero_points_of_constants_and_of_nothing() -> None:
    x, (step, zero, out, shift) = codes(np.uint8, 1, 3, 6, 6), parameters(np.uint8, 9)
    attrs = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    check("QLinearAveragePool", [x, step, None, out], attrs, **MICROSOFT)
    check("QLinearAveragePool", [x, step, zero, out, shift], attrs, constant=[1, 2, 3, 4], **MICROSOFT)
    check("QLinearAveragePool", [x[:0], step, zero, out, shift], attrs, **MICROSOFT)


def test_averages_between_two_codes_are_even() -> None:
    """Scales that are equal cancel: a mean that lies halfway stays there."""
    x = np.array([[[[0, 1, 2, 1, 4, 5, 6, 3]]]], np.uint8)
    for scale in (0.1, 0.3, 0.7):
        given = [x, single(scale), single(0, np.uint8), single(scale), single(0, np.uint8)]
        attrs = {"kernel_shape": [1, 2], "strides": [1, 2]}
        (found,) = check("QLinearAveragePool", given, attrs, **MICROSOFT)
        assert found.ravel().tolist() == [0, 2, 4, 4]


def test_sizes_that_change_from_run_to_run() -> None:
    given = [codes(np.uint8, 1, 3, 8, 9), *parameters(np.uint8, 120)]
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    model = one_node("QLinearAveragePool", given, attrs, constant=[1, 2, 3, 4], **MICROSOFT)
    for k, axis in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        axis.dim_param = f"d{k}"
    with rv.load(model, providers=["cpu"]) as session, rv.load(model, providers=["reference"]) as oracle:
        for shape in ((1, 3, 8, 9), (2, 3, 8, 9), (1, 3, 11, 12), (1, 3, 12, 13), (1, 5, 13, 14), (1, 3, 14, 15)):
            feeds = {"x0": codes(np.uint8, *shape)}
            np.testing.assert_array_equal(session.run(feeds)["y0"], oracle.run(feeds)["y0"])


@pytest.mark.parametrize("dilations", [None, [2, 1]])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_largest_of_codes(window: dict[str, Any], dilations: list[int] | None) -> None:
    attrs = window if dilations is None else {**window, "dilations": dilations}
    for kind in KINDS:
        check("NhwcMaxPool", [codes(kind, 2, 9, 8, 5)], attrs, **MICROSOFT)
        check("NhwcMaxPool", [np.full((1, 7, 4, 2), np.iinfo(kind).min, kind)], attrs, **MICROSOFT)


def test_windows_that_do_not_fit() -> None:
    given = [codes(np.uint8, 1, 2, 3, 3), *parameters(np.uint8, 0)]
    for op, inputs in (("QLinearAveragePool", given), ("NhwcMaxPool", given[:1])):
        model = one_node(op, inputs, {"kernel_shape": [5, 5]}, **MICROSOFT)
        with (
            rv.load(model, providers=["cpu"], optimization="none") as session,
            pytest.raises(ShapeMismatch, match=f"{op if op == 'NhwcMaxPool' else 'AveragePool'}|window"),
        ):
            session.run({f"x{k}": x for k, x in enumerate(inputs)})
