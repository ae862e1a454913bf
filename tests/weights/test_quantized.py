"""Quantized layers in the layouts of real checkpoints, written here by their definitions, word by word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers

Array = np.ndarray[Any, Any]
INPUTS, OUTPUTS, GROUP = 64, 16, 32
RNG = np.random.default_rng(11)


def layer_of(tmp_path: Path, tensors: dict[str, Array], config: dict[str, Any] | None = None) -> Array:
    save_safetensors(tmp_path / "m.safetensors", {f"proj.{name}": array for name, array in tensors.items()})
    layers = quantized_layers(WeightLoader(offline=True).open(tmp_path / "m.safetensors"), config)
    assert list(layers) == ["proj"]
    return layers["proj"]().dequantize()


def words_of(codes: list[int], bits: int) -> list[int]:
    """A run of codes as 32-bit words, low bits first."""
    whole = sum(c << (k * bits) for k, c in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [int(np.uint32((whole >> (32 * k)) & 0xFFFFFFFF).view(np.int32)) for k in range(count)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(tmp_path: Path, bits: int, form: str, shuffled: bool) -> None:
    codes = RNG.integers(0, 1 << bits, (INPUTS, OUTPUTS))
    zeros = RNG.integers(0, 1 << bits, (INPUTS // GROUP, OUTPUTS))
    scales = RNG.random((INPUTS // GROUP, OUTPUTS)).astype(np.float16)
    groups = np.arange(INPUTS) // GROUP
    if shuffled:
        RNG.shuffle(groups)
    stored = (zeros - 1) % (1 << bits) if form == "gptq" else zeros
    tensors = {
        "qweight": np.array([words_of(list(map(int, codes[:, n])), bits) for n in range(OUTPUTS)], np.int32).T.copy(),
        "qzeros": np.array([words_of(list(map(int, row)), bits) for row in stored], np.int32),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": form}
    got = layer_of(tmp_path, tensors, config)
    expected = scales[groups].astype(np.float32) * (codes - zeros[groups])
    np.testing.assert_allclose(got.astype(np.float32), expected.T, rtol=1e-3)


def test_awq(tmp_path: Path) -> None:
    codes = RNG.integers(0, 16, (INPUTS, OUTPUTS))
    zeros = RNG.integers(0, 16, (INPUTS // GROUP, OUTPUTS))
    scales = RNG.random((INPUTS // GROUP, OUTPUTS)).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers: Array) -> Array:
        rows = [[int(row[8 * (k // 8) + order[k % 8]]) for k in range(OUTPUTS)] for row in numbers]
        return np.array([words_of(row, 4) for row in rows], np.int32)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    got = layer_of(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"})
    expected = np.repeat(scales, GROUP, 0).astype(np.float32) * (codes - np.repeat(zeros, GROUP, 0))
    np.testing.assert_allclose(got.astype(np.float32), expected.T, rtol=1e-3)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors(tmp_path: Path, bits: int, asymmetric: bool) -> None:
    half = 1 << (bits - 1)
    codes = RNG.integers(-half, half, (OUTPUTS, 50))
    scales = RNG.random((OUTPUTS, 2)).astype(ml_dtypes.bfloat16)
    zeros = RNG.integers(-half, half, (OUTPUTS, 2)) if asymmetric else np.zeros((OUTPUTS, 2), np.int64)
    tensors = {
        "weight_packed": np.array([words_of([int(c) + half for c in row], bits) for row in codes], np.int32),
        "weight_scale": scales,
        "weight_shape": np.array([OUTPUTS, 50], np.int64),
    }
    if asymmetric:
        columns = [words_of([int(z) + half for z in zeros[:, g]], bits) for g in range(2)]
        tensors["weight_zero_point"] = np.array(columns, np.int32).T.copy()
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": 25, "symmetric": not asymmetric}}},
    }
    got = layer_of(tmp_path, tensors, config)
    expected = (codes - np.repeat(zeros, 25, 1)) * np.repeat(scales, 25, 1).astype(np.float32)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=1e-2)


def test_nvfp4(tmp_path: Path) -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = RNG.integers(0, 16, (OUTPUTS, INPUTS))
    scales = RNG.random((OUTPUTS, INPUTS // 16)).astype(ml_dtypes.float8_e4m3fn)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": np.array([4.0], np.float32)}
    got = layer_of(tmp_path, tensors, {"quant_method": "compressed-tensors"})
    numbers = np.array([values[c & 7] * (-1 if c & 8 else 1) for c in codes.reshape(-1)]).reshape(codes.shape)
    np.testing.assert_allclose(got, numbers * np.repeat(scales.astype(np.float32), 16, 1) / 4.0, rtol=1e-6)


@pytest.mark.parametrize("scale", ["one", "rows", "blocks"])
def test_float8(tmp_path: Path, scale: str) -> None:
    weight = RNG.standard_normal((OUTPUTS, INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    wide = weight.astype(np.float32)
    if scale == "one":
        tensors, expected = {"weight_scale": np.array(0.5, np.float32)}, wide * 0.5
    elif scale == "rows":
        scales = RNG.random((OUTPUTS, 1)).astype(np.float32)
        tensors, expected = {"weight_scale": scales}, wide * scales
    else:
        scales = RNG.random((2, 4)).astype(np.float32)
        tensors = {"weight_scale_inv": scales}  # multiplied, despite its name
        expected = wide * np.repeat(np.repeat(scales, 8, 0), 16, 1)
    got = layer_of(tmp_path, {"weight": weight, **tensors}, {"quant_method": "fp8", "weight_block_size": [8, 16]})
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(tmp_path: Path, nested: bool) -> None:
    table = np.linspace(-1, 1, 16).astype(np.float32)
    codes = RNG.integers(0, 16, OUTPUTS * INPUTS)
    absmax = RNG.random(OUTPUTS * INPUTS // 64).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [OUTPUTS, INPUTS]}
    tensors: dict[str, Array] = {"weight.absmax": absmax}
    if nested:
        levels, inner = np.linspace(-1, 1, 256).astype(np.float32), RNG.random(1).astype(np.float32)
        kept = RNG.integers(0, 256, absmax.size).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_offset": 0.75, "nested_dtype": "float32"}
        tensors = {"weight.absmax": kept, "weight.nested_absmax": inner, "weight.nested_quant_map": levels}
        absmax = levels[kept] * inner[0] + np.float32(0.75)
    tensors |= {
        "weight": ((codes[::2] << 4) | codes[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    got = layer_of(tmp_path, tensors)
    np.testing.assert_allclose(got, (table[codes] * np.repeat(absmax, 64)).reshape(OUTPUTS, INPUTS), rtol=1e-6)


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(tmp_path: Path, kind: str) -> None:
    codes = RNG.integers(-1, 2, (OUTPUTS, INPUTS))
    packed = np.zeros((OUTPUTS // 4, INPUTS), np.uint8)
    for r in range(OUTPUTS):
        packed[r % (OUTPUTS // 4)] |= ((codes[r] + 1) << (2 * (r // (OUTPUTS // 4)))).astype(np.uint8)
    scale = np.array([1.5], ml_dtypes.bfloat16)
    got = layer_of(
        tmp_path, {"weight": packed, "weight_scale": scale}, {"quant_method": "bitnet", "linear_class": kind}
    )
    np.testing.assert_allclose(got, codes * (1.5 if kind == "autobitlinear" else 1 / 1.5), rtol=1e-6)


def packed(outputs: int, scales: int, rows: int = 8) -> dict[str, Array]:
    return {
        "qweight": np.zeros((rows, outputs), np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.zeros((1, scales), np.float16),
    }


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (packed(4, 5), {"quant_method": "gptq"}),
        (packed(4, 4), {"quant_method": "gptq", "checkpoint_format": "planar"}),
        (packed(1, 8), {"quant_method": "awq", "version": "gemv"}),
        (packed(1, 8), {"quant_method": "quip"}),
        ({"weight": np.zeros((4, 4), np.float32), "weight_scale": np.ones((4, 1), np.float32)}, {}),
        ({"weight": np.full((1, 4), 255, np.uint8), "weight_scale": np.ones(1, np.float32)}, {}),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, Array], config: dict[str, Any]) -> None:
    with pytest.raises(WeightError):
        layer_of(tmp_path, tensors, config)
