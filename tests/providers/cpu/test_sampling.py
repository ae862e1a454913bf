"""Images sampled at computed positions, windows put back, pools that tell where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ranvier as rv
from tests.providers.cpu.compare import Array, check, one_node

RNG = np.random.default_rng(17)


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str) -> None:
    for align in (0, 1):
        attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
        grid = (RNG.random((2, 4, 6, 2)) * 3 - 1.5).astype(np.float32)
        check("GridSample", [numbers(2, 3, 7, 5), grid], attrs, rtol=1e-3, atol=1e-4)
        if mode != "cubic":
            volume = (RNG.random((1, 2, 3, 4, 3)) * 3 - 1.5).astype(np.float32)
            check("GridSample", [numbers(1, 2, 4, 5, 3), volume], attrs, rtol=1e-3, atol=1e-4)


def test_grid_sample_far_away_and_other_types() -> None:
    grid = np.array([[np.nan, 0], [np.inf, 0.1], [-1e30, 3], [0, 0]], np.float32).reshape(1, 2, 2, 2)
    for padding in ("zeros", "border"):
        check("GridSample", [numbers(1, 2, 3, 4), grid], {"padding_mode": padding}, rtol=1e-4, atol=1e-5)
    grid = (RNG.random((1, 3, 5, 2)) * 2 - 1).astype(np.float32)
    for dtype in (np.float16, np.float64, np.int32):
        x = (RNG.random((1, 2, 6, 6)) * 90).astype(dtype)
        check("GridSample", [x, grid.astype(np.float64)], {"mode": "linear"}, rtol=2e-3, atol=1e-3)
        check("GridSample", [x, grid], {"mode": "nearest"})


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 1, 1, 3)])
def test_affine_grid(size: tuple[int, ...]) -> None:
    rank = len(size) - 2
    for align in (0, 1):
        theta = numbers(2, rank, rank + 1)
        check("AffineGrid", [theta, np.array(size)], {"align_corners": align}, constant=[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("rule", ["half_pixel", "output_half_pixel"])
def test_roi_align(mode: str, rule: str) -> None:
    rois = np.array([[0, 0, 9, 9], [2.5, 1, 6, 20], [-5, -5, 3, 3], [4, 4, 4.2, 4.1]], np.float32)
    attrs = {
        "mode": mode,
        "coordinate_transformation_mode": rule,
        "output_height": 3,
        "output_width": 2,
        "sampling_ratio": 2,
        "spatial_scale": 0.7,
    }
    images = np.array([0, 1, 1, 0])
    check("RoiAlign", [numbers(2, 5, 10, 12), rois, images], attrs, rtol=1e-3, atol=1e-4)
    inputs = [numbers(2, 5, 10, 12), rois, np.array([0, 2, 1, 0])]
    model = one_node("RoiAlign", inputs, attrs)
    with rv.load(model, providers=["cpu"]) as session, pytest.raises(rv.errors.InvalidValue):
        session.run({f"x{k}": x for k, x in enumerate(inputs)})


@pytest.mark.parametrize("masked", [False, True])
def test_deform_conv(masked: bool) -> None:
    x, w = numbers(2, 4, 7, 6), numbers(6, 2, 3, 2)
    offset, mask = numbers(2, 2 * 6 * 2, 4, 3) * 2, numbers(2, 2 * 6, 4, 3)
    attrs = {"group": 2, "offset_group": 2, "pads": [1, 0, 1, 1], "strides": [2, 2], "kernel_shape": [3, 2]}
    check("DeformConv", [x, w, offset, numbers(6), mask if masked else None], attrs, rtol=1e-3, atol=1e-4)
    check("DeformConv", [x, w, offset], attrs, rtol=1e-3, atol=1e-4)


def test_col2im() -> None:
    for block, steps, spread, pads in (((2, 3), (1, 1), (1, 1), (0, 0, 0, 0)), ((2, 2), (2, 1), (2, 1), (1, 0, 1, 2))):
        image = (7, 8)
        counts = [
            (d + pads[k] + pads[k + 2] - (block[k] - 1) * spread[k] - 1) // steps[k] + 1 for k, d in enumerate(image)
        ]
        x = numbers(2, 3 * block[0] * block[1], counts[0] * counts[1])
        attrs = {"strides": steps, "dilations": spread, "pads": pads}
        check("Col2Im", [x, np.array(image), np.array(block)], attrs, constant=[1, 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [0, 1])
def test_max_pool_tells_where(order: int) -> None:
    for shape, kernel, steps, pads in (((2, 3, 8, 9), (3, 2), (2, 2), (1, 1, 1, 0)), ((1, 2, 11), (3,), (1,), (1, 1))):
        attrs = {"kernel_shape": kernel, "strides": steps, "pads": pads, "storage_order": order}
        check("MaxPool", [numbers(*shape)], attrs, outputs=2)
        check("MaxPool", [RNG.integers(0, 4, shape).astype(np.int8)], attrs, outputs=2)


def test_max_unpool() -> None:
    x, places = numbers(1, 2, 2, 3), RNG.permutation(48)[:12].reshape(1, 2, 2, 3)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    check("MaxUnpool", [x, places], attrs)
    check("MaxUnpool", [x, places, np.array([1, 2, 5, 7])], attrs, constant=[2])
    inputs = [x, places + 40]
    with (
        rv.load(one_node("MaxUnpool", inputs, attrs), providers=["cpu"]) as session,
        pytest.raises(rv.errors.InvalidValue),
    ):
        session.run({"x0": inputs[0], "x1": inputs[1]})


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_window_functions(op: str) -> None:
    for periodic in (0, 1):
        check(op, [np.array(13)], {"periodic": periodic})
        check(op, [np.array(8)], {"periodic": periodic, "output_datatype": 11}, constant=[0])


def test_mel_weights() -> None:
    inputs: list[Array | None] = [np.array(8), np.array(16), np.array(8192)]
    check("MelWeightMatrix", [*inputs, np.array(0, np.float32), np.array(4096, np.float32)], constant=range(5))
