"""Resize and Upsample by tables of positions and weights."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.providers.cpu.compare import Array, agree, check

RNG = np.random.default_rng(3)
MODES = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners")


def image(*shape: int, dtype: type = np.float32) -> Array:
    x = RNG.normal(size=shape) * 50
    return x.clip(0, 120).astype(dtype) if np.issubdtype(dtype, np.integer) else x.astype(dtype)


def scales(*values: float) -> Array:
    return np.array(values, np.float32)


@pytest.mark.parametrize(("mode", "rule"), list(itertools.product(("nearest", "linear", "cubic"), MODES)))
def test_coordinate_rules(mode: str, rule: str) -> None:
    for factors in ((1, 1, 2, 2.6), (1, 1, 0.6, 1.7)):
        attrs = {"mode": mode, "coordinate_transformation_mode": rule}
        check("Resize", [image(2, 3, 7, 9), None, scales(*factors)], attrs, constant=[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_rounding_of_positions(rounding: str) -> None:
    attrs = {"mode": "nearest", "nearest_mode": rounding}
    check("Resize", [image(1, 2, 5, 8), None, scales(1, 1, 1.5, 0.75)], attrs, constant=[2])


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_antialias_and_exclude_outside(mode: str) -> None:
    for attrs in ({"antialias": 1}, {"exclude_outside": 1}, {"antialias": 1, "exclude_outside": 1}):
        check(
            "Resize",
            [image(1, 3, 24, 19), None, None, np.array([1, 3, 5, 30], np.int64)],
            {"mode": mode, **attrs},
            constant=[3],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_crop_with_extrapolation(mode: str) -> None:
    roi = scales(0, 0, -0.2, 0.4, 1, 1, 0.7, 1.3)
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.5}
    sizes = np.array([1, 2, 6, 11], np.int64)
    check("Resize", [image(1, 2, 8, 8), roi, None, sizes], attrs, constant=[1, 3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8, np.uint8, np.int32])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_element_types(mode: str, dtype: type) -> None:
    x = image(1, 3, 6, 5, dtype=dtype)
    check("Resize", [x, None, scales(1, 1, 1.7, 2.2)], {"mode": mode}, constant=[2], rtol=2e-3, atol=1e-4)


def test_axes_policies_and_ranks() -> None:
    x = image(2, 6, 9)
    check("Resize", [x, None, scales(1.5)], {"mode": "linear", "axes": [1]}, constant=[2])
    for policy in ("not_larger", "not_smaller"):
        attrs = {"mode": "linear", "axes": [1, 2], "keep_aspect_ratio_policy": policy}
        check("Resize", [x, None, None, np.array([8, 20], np.int64)], attrs, constant=[3], rtol=1e-4, atol=1e-4)
    volume = image(1, 2, 4, 5, 6)
    check("Resize", [volume, None, scales(1, 1, 2, 0.5, 1.5)], {"mode": "linear"}, constant=[2], rtol=1e-4, atol=1e-4)
    check("Resize", [x, None, scales(1, 1, 1)], {"mode": "linear"}, constant=[2])


def test_older_versions() -> None:
    x = image(1, 2, 5, 7)
    for mode in ("nearest", "linear"):
        check("Resize", [x, scales(1, 1, 2, 0.6)], {"mode": mode}, constant=[1], opset=10)
        check("Upsample", [x, scales(1, 1, 2, 1.6)], {"mode": mode}, constant=[1], opset=9)
        check("Upsample", [x], {"mode": mode, "scales": [1.0, 1.0, 2.0, 3.0]}, opset=7)


@pytest.mark.parametrize("channels", [16, 40])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_between_channels_last_layers(mode: str, channels: int) -> None:
    """What a convolution leaves channels-last stays so; large results are made in one pass."""
    size = 90 if channels == 40 else 10
    weight = RNG.normal(size=(channels, 3, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Resize", ["b", "", "s"], ["c"], mode=mode),
        helper.make_node("Add", ["c", "one"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "resized",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, size, size])],
        [onnx.ValueInfoProto(name="y")],
        [
            onnx.numpy_helper.from_array(weight, "w"),
            onnx.numpy_helper.from_array(scales(1, 1, 2, 2), "s"),
            onnx.numpy_helper.from_array(scales(1), "one"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    agree(model, {"x": image(1, 3, size, size)}, rtol=1e-4, atol=1e-3)
