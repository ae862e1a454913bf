"""Layers of experts in MXFP4, as gpt-oss stores them, written here by their definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.ops.contrib.levels import E2M1_LEVELS
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers

Array = np.ndarray[Any, Any]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def layers_of(tmp_path: Path, tensors: dict[str, Array], config: dict[str, Any] | None = None) -> dict[str, Any]:
    save_safetensors(tmp_path / "m.safetensors", tensors)
    return quantized_layers(WeightLoader(offline=True).open(tmp_path / "m.safetensors"), config or CONFIG)


def random_bytes(seed: int, *shape: int) -> dict[str, Array]:
    """Any codes, with exponents that float32 has numbers for, the least among them."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 250, shape).astype(np.uint8)
    scales.reshape(-1)[:3] = 0, 1, 249
    return {"_blocks": rng.integers(0, 256, (*shape, 16)).astype(np.uint8), "_scales": scales}


def defined(blocks: Array, scales: Array) -> Array:
    """Number after number."""
    rows = []
    for row, exponents in zip(blocks.reshape(-1, *blocks.shape[-2:]), scales.reshape(-1, scales.shape[-1])):
        numbers: list[float] = []
        for block, exponent in zip(row, exponents):
            for byte in map(int, block):
                for code in (byte & 15, byte >> 4):
                    numbers.append((-1 if code & 8 else 1) * VALUES[code & 7] * 2.0 ** (int(exponent) - 127))
        rows.append(numbers)
    return np.array(rows).reshape(*blocks.shape[:-2], -1)


@pytest.mark.parametrize("shape", [(3, 4, 2), (1, 2, 5), (4, 3)])
def test_experts_and_matrices(tmp_path: Path, shape: tuple[int, ...]) -> None:
    down = "model.layers.0.mlp.experts.down_proj"
    parts = {layer: random_bytes(seed, *shape) for seed, layer in enumerate((NAME, down))}
    tensors = {layer + part: array for layer, both in parts.items() for part, array in both.items()}
    others = {f"{NAME}_bias": np.ones((3, 4), np.float32), "lm_head.weight": np.ones((4, 4), np.float32)}
    layers = layers_of(tmp_path, tensors | others)
    assert layers.keys() == parts.keys()
    for layer, both in parts.items():
        coded = layers[layer]()
        expected = defined(both["_blocks"], both["_scales"])
        np.testing.assert_array_equal(coded.dequantize(), expected)
        assert coded.dequantize().dtype == np.float32 and coded.shape == (*shape[:-1], shape[-1] * 32)
        assert coded.scheme == "mxfp4" and coded.bits == 4 and coded.scales.shape == shape
        assert coded.block == (*(1 for _ in shape[:-1]), 32) and coded.axis == len(shape) - 1
        assert coded.scales.dtype == np.float32 and coded.codes.dtype == np.uint8
        assert coded.nbytes == sum(array.nbytes for array in both.values())
        np.testing.assert_array_equal(coded.table, E2M1_LEVELS)


def test_names_are_no_layers_by_themselves(tmp_path: Path) -> None:
    """Models have blocks and scales of many kinds: only their configuration says that these are codes."""
    tensors = {NAME + part: array for part, array in random_bytes(0, 2, 3, 1).items()}
    assert layers_of(tmp_path, tensors, {"quant_method": "gptq"}) == {}
    assert layers_of(tmp_path, {f"{NAME}_blocks": tensors[f"{NAME}_blocks"]}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"_scales": np.zeros((3, 4, 1), np.uint8)},
        {"_scales": np.zeros((3, 4), np.uint8)},
        {"_scales": np.zeros((3, 4, 2), np.float32)},
        {"_scales": np.zeros((3, 4, 2), np.int8)},
        {"_blocks": np.zeros((3, 4, 2, 15), np.uint8)},
        {"_blocks": np.zeros((3, 4, 2, 16), np.int32)},
        {"_blocks": np.zeros((2, 16), np.uint8), "_scales": np.zeros(2, np.uint8)},
        {"_blocks": np.zeros((1, 3, 4, 2, 16), np.uint8), "_scales": np.zeros((1, 3, 4, 2), np.uint8)},
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Array]) -> None:
    tensors = {NAME + part: array for part, array in (random_bytes(0, 3, 4, 2) | change).items()}
    layers = layers_of(tmp_path, tensors)
    with pytest.raises(WeightError, match=f"layer '{NAME}'"):
        layers[NAME]()
