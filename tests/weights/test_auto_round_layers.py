"""Layers as AutoRound packs them: words of GPTQ and of AWQ, written here one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.errors import WeightError
from tests.weights.test_quantized import gptq_tensors, layer_of, words_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(8)
INPUTS, OUTPUTS, GROUP = 96, 32, 32
LESS_ONE = ["auto_round:auto_gptq", "auto_round:gptq", "auto", None]


def method(packing: str | None, bits: int = 4, **others: Any) -> dict[str, Any]:
    config = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": True, "data_type": "int"}
    return {**config, **({} if packing is None else {"packing_format": packing}), **others}


def random_layer(bits: int) -> tuple[Array, Array, Array, Array]:
    """Codes, zeros, scales, and the numbers [out, in] of those."""
    codes = RNG.integers(0, 1 << bits, (INPUTS, OUTPUTS))
    zeros = RNG.integers(1, 1 << bits, (INPUTS // GROUP, OUTPUTS))
    scales = RNG.random((INPUTS // GROUP, OUTPUTS)).astype(np.float16)
    numbers = np.repeat(scales, GROUP, 0).astype(np.float32) * (codes - np.repeat(zeros, GROUP, 0))
    return codes, zeros, scales, numbers.T.astype(np.float16)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("packing", [*LESS_ONE, "auto_round"])
def test_words_of_gptq(tmp_path: Path, packing: str | None, bits: int) -> None:
    """Zeros are stored less one in the packing that is called after GPTQ, and as they are in AutoRound's own."""
    codes, zeros, scales, numbers = random_layer(bits)
    tensors = gptq_tensors(codes, zeros - (packing in LESS_ONE), scales, bits)
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, method(packing, bits)), numbers)


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_words_of_awq(tmp_path: Path, packing: str) -> None:
    codes, zeros, scales, numbers = random_layer(4)

    def packed(array: Array) -> Array:
        turns = [0, 2, 4, 6, 1, 3, 5, 7]
        rows = [[int(row[8 * (k // 8) + turns[k % 8]]) for k in range(OUTPUTS)] for row in array]
        return np.array([words_of(row, 4) for row in rows], np.int32)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, method(packing)), numbers)
    with pytest.raises(WeightError, match="layer 'proj': unknown packing 'gemm' of 8 bits"):
        layer_of(tmp_path, tensors, method(packing, 8))


@pytest.mark.parametrize("name", ["proj", "^pro", ".*roj.*", r"pr\wj$", "(x|oj)"])
def test_settings_of_single_layers(tmp_path: Path, name: str) -> None:
    codes, zeros, scales, numbers = random_layer(8)
    tensors = gptq_tensors(codes, zeros - 1, scales, 8)
    extra: dict[str, Any] = {"other": {"bits": 2}, "pro": {"bits": 16}, "^roj": {"bits": 3}, "pro?": {}}
    extra[name] = {"bits": 8, "group_size": GROUP}
    config = method("auto_round:auto_gptq", group_size=INPUTS, extra_config=extra)
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, config), numbers)
    del extra[name]
    with pytest.raises(WeightError, match="layer 'proj': unknown packing of 4 bits"):
        layer_of(tmp_path, tensors, config)


def test_a_name_comes_before_patterns(tmp_path: Path) -> None:
    codes, zeros, scales, numbers = random_layer(8)
    extra = {"p.*": {"bits": 2}, "proj": {"bits": 8}}
    got = layer_of(tmp_path, gptq_tensors(codes, zeros, scales, 8), method("auto_round", sym=False, extra_config=extra))
    np.testing.assert_array_equal(got, numbers)


PACKINGS = ["gptqmodel", "llm_compressor", "llm_compressor_nvfp4_e5m3", "fp8_static", "exllamav2", "mlx", "fake"]


@pytest.mark.parametrize("packing", [f"auto_round:{packing}" for packing in PACKINGS])
def test_packings_that_are_not_known_are_refused_by_name(tmp_path: Path, packing: str) -> None:
    """Also where other layouts have tensors of the same names."""
    codes, zeros, scales, _ = random_layer(4)
    float4: dict[str, Array] = {
        "weight_packed": np.zeros((4, 16), np.uint8),
        "weight_scale": np.zeros((4, 1), np.uint8),
    }
    float8: dict[str, Array] = {"weight": np.zeros((4, 4), np.int8), "weight_scale": np.ones((4, 1), np.float32)}
    for tensors in (gptq_tensors(codes, zeros, scales, 4), float4, float8):
        with pytest.raises(WeightError, match=f"layer 'proj': unknown packing_format of auto-round '{packing}'"):
            layer_of(tmp_path, tensors, method(packing))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data_type": "mx_fp"}, "mx_fp"),
        ({"act_bits": 8}, "inputs of 8 bits"),
        ({"extra_config": {"proj": {"data_type": "int_asym_dq"}}}, "int_asym_dq"),
        ({"rotation_config": {"hadamard_type": "random"}}, "rotation_config"),
        ({"packing_format": None, "backend": "auto_round:exllamav2"}, "auto_round:exllamav2"),
        ({"bits": 8}, "of 8 bits"),
        ({"group_size": 48}, "do not fit"),
        ({"extra_config": ["proj"]}, "do not fit"),
        ({"extra_config": {"(": {"bits": 8}}}, "cannot be used"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    codes, zeros, scales, numbers = random_layer(4)
    tensors = gptq_tensors(codes, zeros - 1, scales, 4)
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, method("auto_round:auto_gptq")), numbers)
    with pytest.raises(WeightError, match=told):
        layer_of(tmp_path, tensors, method("auto_round:auto_gptq") | settings)


def test_tensors_of_another_packing(tmp_path: Path) -> None:
    codes, zeros, scales, _ = random_layer(4)
    tensors = gptq_tensors(codes, zeros, scales, 4)
    with pytest.raises(WeightError, match="layer 'proj': its tensors do not fit"):
        layer_of(tmp_path, tensors, method("auto_round:auto_awq"))
    plain: dict[str, Array] = {"weight": np.zeros((4, 4), np.int8), "weight_scale": np.ones((4, 1), np.float32)}
    with pytest.raises(WeightError, match=r"lacks its tensor 'proj\.qweight'"):
        layer_of(tmp_path, plain, method("auto_round:auto_gptq"))
