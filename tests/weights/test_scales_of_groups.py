"""How many weights of a row share a scale: where groups do not divide a row, settings tell it and shapes do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.errors import WeightError
from tests.weights.test_quantized import compressed, gptq_tensors, layer_of, words_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)
ROWS = 32
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def scales_of(columns: int, group: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """One for each group [ROWS, groups], and the group of each column."""
    return (RNG.random((ROWS, -(-columns // group))) + 0.5).astype(dtype), np.arange(columns) // group


def packed_rows(codes: Array, bits: int) -> Array:
    return np.array([words_of([int(c) + (1 << (bits - 1)) for c in row], bits) for row in codes], np.int32)


def whole_numbers(bits: int, columns: int, group: int) -> tuple[dict[str, Array], Array, Array]:
    codes = RNG.integers(-(1 << (bits - 1)), 1 << (bits - 1), (ROWS, columns))
    scales, member = scales_of(columns, group)
    shape = np.array(codes.shape, np.int64)
    tensors: dict[str, Array] = {
        "weight_packed": packed_rows(codes, bits),
        "weight_scale": scales,
        "weight_shape": shape,
    }
    return tensors, codes, member


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("columns", "group"), [(160, 128), (72, 32), (50, 16), (8, 32)])
def test_words_of_compressed_tensors(tmp_path: Path, bits: int, columns: int, group: int) -> None:
    tensors, codes, member = whole_numbers(bits, columns, group)
    got = layer_of(tmp_path, tensors, compressed(weights={"num_bits": bits, "group_size": group}))
    np.testing.assert_array_equal(got, codes.astype(np.float32) * tensors["weight_scale"][:, member])


@pytest.mark.parametrize(("columns", "group"), [(160, 128), (50, 16)])
def test_bytes_of_compressed_tensors(tmp_path: Path, columns: int, group: int) -> None:
    scales, member = scales_of(columns, group)
    codes = RNG.integers(-128, 128, (ROWS, columns)).astype(np.int8)
    settings = compressed(weights={"group_size": group})
    got = layer_of(tmp_path, {"weight": codes, "weight_scale": scales}, settings)
    np.testing.assert_array_equal(got, codes * scales[:, member])


def test_powers_of_two_for_32_weights(tmp_path: Path) -> None:
    exponents, member = RNG.integers(120, 135, (ROWS, 3)).astype(np.uint8), np.arange(72) // 32
    wide = 2.0 ** (exponents.astype(np.float32) - 127)[:, member]
    weight = RNG.standard_normal((ROWS, 72)).astype(ml_dtypes.float8_e4m3fn)
    codes = RNG.integers(0, 16, (ROWS, 72))
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    for scales in (exponents, exponents.view(ml_dtypes.float8_e8m0fnu)):
        got = layer_of(tmp_path, {"weight": weight, "weight_scale": scales}, compressed())
        np.testing.assert_array_equal(got, weight.astype(np.float32) * wide)
        got = layer_of(tmp_path, {"weight_packed": packed, "weight_scale": scales}, compressed())
        np.testing.assert_array_equal(got, LEVELS[codes & 7] * np.where(codes & 8, -1, 1) * wide)


def test_float8_for_16_weights(tmp_path: Path) -> None:
    scales, member = scales_of(72, 16, ml_dtypes.float8_e4m3fn)
    codes = RNG.integers(0, 16, (ROWS, 72))
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": np.array([2.0], np.float32)}
    got = layer_of(tmp_path, tensors, compressed())
    expected = LEVELS[codes & 7] * np.where(codes & 8, -1, 1) * scales.astype(np.float32)[:, member] / 2
    np.testing.assert_array_equal(got, expected)
    tensors["weight_global_scale"] = np.zeros(1, np.float32)
    with pytest.raises(WeightError, match="weight_global_scale of zero"):
        layer_of(tmp_path, tensors, compressed())


@pytest.mark.parametrize("named", [{}, {"proj": {"bits": 4}}, {"-:x": {}, r"+:p.*\w": {"group_size": 64}}])
def test_gptq_with_settings_of_single_layers(tmp_path: Path, named: dict[str, Any]) -> None:
    codes, zeros = RNG.integers(0, 16, (96, ROWS)), RNG.integers(0, 16, (2, ROWS))
    scales, member = RNG.random((2, ROWS)).astype(np.float16), np.arange(96) // 64
    own = any("group_size" in settings for settings in named.values())
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32 if own else 64, "dynamic": named}
    expected = (scales[member].astype(np.float32) * (codes - zeros[member])).T.astype(np.float16)
    for groups in (None, member):
        got = layer_of(tmp_path, gptq_tensors(codes, (zeros - 1) % 16, scales, 4, groups), config)
        np.testing.assert_array_equal(got, expected)


def test_groups_that_nobody_tells(tmp_path: Path) -> None:
    """Equal parts, or none: 160 weights with two scales are 80 each where nothing says 128, 160 with three are none."""
    tensors, codes, _ = whole_numbers(4, 160, 80)
    got = layer_of(tmp_path, tensors, compressed(weights={"num_bits": 4}))
    np.testing.assert_array_equal(got, codes.astype(np.float32) * np.repeat(tensors["weight_scale"], 80, 1))
    tensors, _, _ = whole_numbers(4, 160, 64)
    with pytest.raises(WeightError, match="layer 'proj': 3 groups of None weights do not make up a row of 160"):
        layer_of(tmp_path, tensors, compressed(weights={"num_bits": 4}))


def test_groups_that_are_not_told_as_they_are(tmp_path: Path) -> None:
    words = np.zeros((64, 1), np.int32)
    tensors = {"qweight": words, "qzeros": words[:2], "scales": np.ones((2, 8), np.float16)}
    assert layer_of(tmp_path, tensors, {"quant_method": "awq", "group_size": 32}).shape == (8, 64)
    with pytest.raises(WeightError, match=r"\[2\] where \[4\] was expected"):
        layer_of(tmp_path, tensors, {"quant_method": "awq", "group_size": 16})


def test_an_order_that_is_missing(tmp_path: Path) -> None:
    codes, zeros = np.zeros((64, ROWS), np.int64), np.ones((2, ROWS), np.int64)
    tensors = gptq_tensors(codes, zeros, np.ones((2, ROWS), np.float16), 4)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert layer_of(tmp_path, tensors, config).shape == (ROWS, 64)
    with pytest.raises(WeightError, match="layer 'proj' lacks its g_idx"):
        layer_of(tmp_path, tensors, {**config, "desc_act": True})


@pytest.mark.parametrize(
    "order", [np.repeat([-1, 0], 32), np.append(np.zeros(63, int), 2), np.zeros(63, int), np.zeros(64, np.float32)]
)
def test_orders_that_are_none(tmp_path: Path, order: Array) -> None:
    tensors, _, _ = whole_numbers(4, 64, 32)
    config = compressed(weights={"num_bits": 4, "group_size": 32, "actorder": "group"})
    with pytest.raises(WeightError, match="layer 'proj': weight_g_idx"):
        layer_of(tmp_path, {**tensors, "weight_g_idx": order}, config)
    tensors["weight_g_idx"] = np.full(64, -1, np.int32)
    assert layer_of(tmp_path, tensors, config).shape == (ROWS, 64)
