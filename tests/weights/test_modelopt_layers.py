"""Layers as NVIDIA ModelOpt stores them, written here by their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import WeightError
from tests.weights.test_quantized import layer_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
N, K = 12, 64
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def method(algorithm: str | None, **others: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **others}


def by_file(algorithm: str, **others: Any) -> dict[str, Any]:
    """As ``hf_quant_config.json`` has it."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **others}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}


def float4(group: int = 16) -> tuple[dict[str, Array], Array]:
    """Tensors, and the numbers that they stand for."""
    packed = RNG.integers(0, 256, (N, K // 2)).astype(np.uint8)
    scales = (RNG.random((N, K // group)) * 400).astype(ml_dtypes.float8_e4m3fn)
    overall = np.float32(0.0137)
    numbers = np.empty((N, K), np.float32)
    numbers[:, 0::2], numbers[:, 1::2] = VALUES[packed & 15], VALUES[packed >> 4]
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": np.array(overall)}
    return tensors, numbers * np.repeat(scales.astype(np.float32) * overall, group, 1)


def float8() -> Array:
    return RNG.standard_normal((N, K)).astype(ml_dtypes.float8_e4m3fn)


INPUTS = {"input_scale": np.array(0.25, np.float32)}  # what the layer's inputs are rounded by: nothing of its weights


@pytest.mark.parametrize(
    "config",
    [
        method("NVFP4", config_groups={"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}),
        method("MIXED_PRECISION", quantized_layers={"proj": {"quant_algo": "NVFP4", "group_size": 16}}),
        by_file("NVFP4", group_size=16),
        {},
    ],
)
def test_float4(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors, numbers = float4()
    np.testing.assert_array_equal(layer_of(tmp_path, tensors | INPUTS, config), numbers)


@pytest.mark.parametrize("config", [method("NVFP4", group_size=32), by_file("NVFP4", group_size=32)])
def test_groups_of_another_size(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors, numbers = float4(32)
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, config), numbers)
    with pytest.raises(WeightError, match="layer 'proj': its tensors do not fit"):
        layer_of(tmp_path, tensors, method("NVFP4"))


@pytest.mark.parametrize("shape", [(), (1,), (N,), (N, 1)])
@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_float8(tmp_path: Path, algorithm: str, shape: tuple[int, ...]) -> None:
    weight, scales = float8(), RNG.random(shape).astype(np.float32)
    tensors = {"weight": weight, "weight_scale": scales, **INPUTS}
    mixed = method("MIXED_PRECISION", quantized_layers={"proj": {"quant_algo": algorithm}})
    for config in (method(algorithm), by_file(algorithm), mixed):
        if algorithm != "FP8" and scales.size == 1:
            with pytest.raises(WeightError, match="layer 'proj': its tensors do not fit"):
                layer_of(tmp_path, tensors, config)
            continue
        each = scales.reshape(-1, 1)  # broadcasts along rows
        np.testing.assert_array_equal(layer_of(tmp_path, tensors, config), weight.astype(np.float32) * each)


def test_bytes_are_of_bitnet_where_nothing_else_is_told(tmp_path: Path) -> None:
    codes = RNG.integers(-1, 2, (N, K))
    packed = np.zeros((N // 4, K), np.uint8)
    for r in range(N):
        packed[r % (N // 4)] |= ((codes[r] + 1) << (2 * (r // (N // 4)))).astype(np.uint8)
    tensors: dict[str, Array] = {"weight": packed, "weight_scale": np.array([2.0], np.float32)}
    for config in ({}, {"quant_method": "bitnet"}):
        np.testing.assert_array_equal(layer_of(tmp_path, tensors, config), codes / 2)
    with pytest.raises(WeightError, match="layer 'proj': NVFP4 has scales of E4M3, not of float32"):
        layer_of(tmp_path, tensors, method("NVFP4"))
    with pytest.raises(WeightError, match="layer 'proj': weights of uint8 with a scale"):
        layer_of(tmp_path, tensors, {"quant_method": "fp8"})


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ", "FP8_PB_WO", "W8A16", "MXFP8", None])
def test_algorithms_that_are_not_known_are_refused_by_name(tmp_path: Path, algorithm: str | None) -> None:
    tensors, _ = float4()
    mixed = method("MIXED_PRECISION", quantized_layers={"proj": {"quant_algo": algorithm}})
    for config in (method(algorithm), mixed):
        with pytest.raises(WeightError, match=f"layer 'proj': unknown quant_algo of modelopt {algorithm!r}"):
            layer_of(tmp_path, tensors, config)


def test_settings_of_another_method(tmp_path: Path) -> None:
    tensors, _ = float4()
    with pytest.raises(WeightError, match="layer 'proj' has the tensors of modelopt, and its settings are of 'fp8'"):
        layer_of(tmp_path, tensors, {"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({"weight": np.zeros((N, K // 2 - 8), np.uint8)}, method("NVFP4")),
        ({"weight": np.zeros((N + 1, K // 2), np.uint8)}, method("NVFP4")),
        ({"weight": np.zeros((N, K // 2), np.int16)}, method("NVFP4")),
        ({"weight_scale": np.ones((N, K // 16), np.float32)}, method("NVFP4")),
        ({"weight_scale_2": np.ones(2, np.float32)}, method("NVFP4")),
        ({"weight_scale_2": np.ones(0, np.float32)}, {}),
        ({"pre_quant_scale": np.ones(K, np.float32)}, method("NVFP4")),
        ({}, method("MIXED_PRECISION", quantized_layers={"other": {"quant_algo": "NVFP4"}})),
        ({}, method("MIXED_PRECISION", quantized_layers=["proj"])),
        ({}, method("FP8")),  # bytes
        ({"weight": np.zeros((N, K), np.int8), "weight_scale": np.ones((N, 1), np.float32)}, method("FP8")),
        ({"weight": np.zeros((2, N, K), ml_dtypes.float8_e4m3fn)}, method("FP8")),
        ({"weight": np.zeros((N, K), ml_dtypes.float8_e4m3fn)}, method("FP8")),
        ({"weight": float8(), "weight_scale": np.ones((N, 1), np.uint8)}, method("FP8")),
        ({"weight": float8(), "weight_scale": np.ones(N - 1, np.float32)}, method("FP8")),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Array], config: dict[str, Any]) -> None:
    tensors, _ = float4()
    with pytest.raises(WeightError, match="layer 'proj'"):
        layer_of(tmp_path, tensors | change, config)
