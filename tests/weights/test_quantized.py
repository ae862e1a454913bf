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
from ranvier.weights.quantized import METHODS, quantized_layers

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


_FLOAT8 = {"weight": np.zeros((4, 8), ml_dtypes.float8_e4m3fn), "weight_scale": np.ones((4, 2), np.float32)}
_CODES = {"weight_packed": np.zeros((4, 1), np.int32), "weight_scale": np.ones((4, 1), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (_FLOAT8, {"config_groups": 3}),
        (_FLOAT8, {"config_groups": {"group": {"targets": [3]}}}),
        (_FLOAT8, {"weight_block_size": [0, 0]}),
        (_FLOAT8, {"weight_block_size": 128}),
        (_CODES | {"weight_shape": np.array([4, 8])}, {"config_groups": {"group": {"weights": {"num_bits": None}}}}),
        (_CODES | {"weight_global_scale": np.ones(0, np.float32)}, {}),
        (
            {"qweight": np.zeros((4, 8), np.int32), "qzeros": np.zeros((1, 1), np.int32), "scales": np.float16(1)},
            {"quant_method": "gptq"},
        ),
    ],
)
def test_settings_and_tensors_that_a_layout_does_not_expect(
    tmp_path: Path, tensors: dict[str, Array], config: dict[str, Any]
) -> None:
    with pytest.raises(WeightError, match=r"layer 'proj': its tensors (and its settings )?do not fit"):
        layer_of(tmp_path, tensors, config)


@pytest.mark.parametrize("pattern", ["(", r"(p)\1", "(?<=p)", "(?i)PROJ", "p++roj", "p" * 3000, "(" * 60 + ")" * 60])
def test_patterns_that_are_not_followed(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(WeightError, match=r"the pattern of names .* cannot be used"):
        layer_of(tmp_path, _FLOAT8, {"config_groups": {"group": {"targets": [f"re:{pattern}"]}}})


# -- what configurations leave to the tensors, or say in other words --------------------------------------------------


def gptq_tensors(
    codes: Array, stored: Array, scales: Array, bits: int, groups: Array | None = None
) -> dict[str, Array]:
    tensors = {
        "qweight": np.array([words_of(list(map(int, column)), bits) for column in codes.T], np.int32).T.copy(),
        "qzeros": np.array([words_of(list(map(int, row)), bits) for row in stored], np.int32),
        "scales": scales,
    }
    return tensors if groups is None else {**tensors, "g_idx": groups.astype(np.int32)}


@pytest.mark.parametrize("size", [-1, 32, 64, 128])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq_by_the_words_of_newer_tools(tmp_path: Path, size: int, form: str) -> None:
    """``method`` and ``format``; bits of single layers that differ (``dynamic``); groups of every size."""
    inputs, bits = 256, 8
    count = 1 if size == -1 else inputs // size
    codes, zeros = RNG.integers(0, 256, (inputs, OUTPUTS)), RNG.integers(0, 256, (count, OUTPUTS))
    scales = RNG.random((count, OUTPUTS)).astype(np.float16)
    tensors = gptq_tensors(codes, (zeros - 1) % 256 if form == "gptq" else zeros, scales, bits)
    config = {"method": "gptq", "format": form, "bits": 4, "group_size": 16, "dynamic": {"proj": {"bits": 8}}}
    got = layer_of(tmp_path, tensors, config)
    member = np.arange(inputs) // (inputs // count)
    expected = scales[member].astype(np.float32) * (codes - zeros[member])
    np.testing.assert_array_equal(got, expected.T.astype(np.float16))
    with pytest.raises(WeightError, match="of 4 bits"):
        layer_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(WeightError, match="gptq_p"):
        layer_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 8, "format": "gptq_p"})


def test_gptq_in_other_words(tmp_path: Path) -> None:
    codes, zeros = RNG.integers(0, 16, (INPUTS, OUTPUTS)), RNG.integers(0, 16, (1, OUTPUTS))
    scales = RNG.random((1, OUTPUTS)).astype(np.float16)
    qweight = (
        (codes.reshape(-1, 4, OUTPUTS) << (4 * np.arange(4))[None, :, None])
        .sum(axis=1)
        .astype(np.uint16)
        .view(np.int16)
    )
    qzeros = (zeros.reshape(1, -1, 4) << (4 * np.arange(4))).sum(axis=2).astype(np.uint16).view(np.int16)
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "pack_dtype": "int16"}
    got = layer_of(tmp_path, {"qweight": qweight, "qzeros": qzeros, "scales": scales}, config)
    np.testing.assert_array_equal(got, (scales.astype(np.float32) * (codes - zeros)).T.astype(np.float16))


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], **weights}}}


@pytest.mark.parametrize("groups", [1, 2])
def test_whole_numbers_with_zero_points(tmp_path: Path, groups: int) -> None:
    codes, zeros = (RNG.integers(-128, 128, shape).astype(np.int8) for shape in ((OUTPUTS, INPUTS), (OUTPUTS, groups)))
    scales = RNG.random((OUTPUTS, groups)).astype(np.float32)
    tensors = {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}
    got = layer_of(tmp_path, tensors, compressed())
    each = [np.repeat(array.astype(np.float32), INPUTS // groups, 1) for array in (zeros, scales)]
    np.testing.assert_array_equal(got, (codes - each[0]) * each[1])


def test_float8_in_blocks_by_another_name(tmp_path: Path) -> None:
    weight = RNG.standard_normal((OUTPUTS, INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.random((2, 4)).astype(np.float32)
    tensors = {"weight": weight, "weight_scale": scales}
    got = layer_of(tmp_path, tensors, compressed(weights={"block_structure": [8, 16]}))
    expected = weight.astype(np.float32) * np.repeat(np.repeat(scales, 8, 0), 16, 1)
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(WeightError, match="neither of rows nor of blocks"):
        layer_of(tmp_path, tensors, compressed())


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    exponents = RNG.integers(120, 135, (OUTPUTS, INPUTS // 32)).astype(np.uint8)
    wide = np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, 1)
    weight = RNG.standard_normal((OUTPUTS, INPUTS)).astype(ml_dtypes.float8_e4m3fn)
    got = layer_of(tmp_path, {"weight": weight, "weight_scale": exponents}, compressed())
    np.testing.assert_array_equal(got, weight.astype(np.float32) * wide)
    codes = RNG.integers(0, 16, (OUTPUTS, INPUTS))
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    config = {**compressed(), "format": "mxfp4-pack-quantized"}
    got = layer_of(tmp_path, {"weight_packed": packed, "weight_scale": exponents}, config)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    np.testing.assert_array_equal(got, values[codes & 7] * np.where(codes & 8, -1, 1) * wide)


def test_layers_have_the_settings_of_their_group(tmp_path: Path) -> None:
    codes = RNG.integers(-128, 128, (OUTPUTS, INPUTS))
    tensors = {
        "weight_packed": np.array([words_of([int(c) + 128 for c in row], 8) for row in codes], np.int32),
        "weight_scale": np.ones((OUTPUTS, 1), np.float32),
        "weight_shape": np.array([OUTPUTS, INPUTS], np.int64),
    }
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "group_1": {"targets": ["re:.*proj"], "weights": {"num_bits": 8}},
    }
    np.testing.assert_array_equal(layer_of(tmp_path, tensors, {"config_groups": groups}), codes)
    with pytest.raises(WeightError, match="do not fit"):
        layer_of(tmp_path, tensors, {"config_groups": {"group_0": groups["group_0"]}})
    with pytest.raises(WeightError, match="mxfp6"):
        layer_of(tmp_path, tensors, {"config_groups": groups, "format": "mxfp6-pack-quantized"})


def test_rows_of_bitsandbytes(tmp_path: Path) -> None:
    codes, largest = RNG.integers(-127, 128, (OUTPUTS, INPUTS)).astype(np.int8), RNG.random(OUTPUTS).astype(np.float32)
    got = layer_of(tmp_path, {"weight": codes, "SCB": largest}, {"quant_method": "bitsandbytes"})
    np.testing.assert_allclose(got, codes * largest[:, None] / 127, rtol=1e-6)


@pytest.mark.parametrize(
    "form", ["int-quantized", "naive-quantized", "float-quantized", "mxfp8-quantized", "marlin-24"]
)
def test_formats_of_weights_that_are_not_packed(tmp_path: Path, form: str) -> None:
    tensors = {"weight": np.ones((4, 4), np.int8), "weight_scale": np.ones((4, 1), np.float32)}
    if form != "marlin-24":
        np.testing.assert_array_equal(layer_of(tmp_path, tensors, {**compressed(), "format": form}), tensors["weight"])
        return
    for config in ({**compressed(), "format": form}, compressed(format=form)):
        with pytest.raises(WeightError, match=form):
            layer_of(tmp_path, tensors, config)


# -- what files of earlier releases, and other tools, have in other ways ----------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_zero_points_of_compressed_tensors_as_bytes(tmp_path: Path, bits: int, groups: int) -> None:
    half = 1 << (bits - 1)
    codes, zeros = RNG.integers(-half, half, (OUTPUTS, INPUTS)), RNG.integers(-half, half, (OUTPUTS, groups))
    tensors = {
        "weight_packed": np.array([words_of([int(c) + half for c in row], bits) for row in codes], np.int32),
        "weight_scale": np.full((OUTPUTS, groups), 0.5, np.float32),
        "weight_shape": np.array([OUTPUTS, INPUTS], np.int64),
        "weight_zero_point": zeros.astype(np.int8),
    }
    config = compressed(weights={"num_bits": bits, "symmetric": False})
    got = layer_of(tmp_path, tensors, config)
    np.testing.assert_array_equal(got, (codes - np.repeat(zeros, INPUTS // groups, 1)) * 0.5)
    one = {"weight_scale": np.array([0.5], np.float32), "weight_zero_point": np.array([-1], np.int8)}
    np.testing.assert_array_equal(layer_of(tmp_path, tensors | one, config), (codes + 1) * 0.5)
    for wrong in (zeros.astype(np.int8)[:8], np.zeros((3, groups), np.int32), zeros.astype(np.float32)):
        with pytest.raises(WeightError):
            layer_of(tmp_path, tensors | {"weight_zero_point": wrong}, config)
    del tensors["weight_zero_point"]
    with pytest.raises(WeightError, match=r"lacks its tensor 'proj\.weight_zero_point'"):
        layer_of(tmp_path, tensors, config)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_compressed_tensors_that_hold_whole_codes_alone(tmp_path: Path, bits: int) -> None:
    half, in_word, outputs = 1 << (bits - 1), 32 // bits, 40
    codes, zeros = RNG.integers(-half, half, (outputs, INPUTS)), RNG.integers(-half, half, (outputs, 1))

    def words(run: Array) -> list[int]:
        parts = [list(map(int, run[k : k + in_word])) for k in range(0, len(run), in_word)]
        return [words_of([code + half for code in part], bits)[0] for part in parts]

    tensors = {
        "weight_packed": np.array([words(row) for row in codes], np.int32),
        "weight_scale": np.ones((outputs, 1), np.float32),
        "weight_shape": np.array([outputs, INPUTS], np.int64),
        "weight_zero_point": np.array([words(zeros[:, 0])], np.int32).T.copy(),
    }
    got = layer_of(tmp_path, tensors, compressed(weights={"num_bits": bits, "symmetric": False}))
    np.testing.assert_array_equal(got, codes - zeros)


def test_groups_for_other_layers_are_not_for_this_one(tmp_path: Path) -> None:
    tensors = {
        "weight_packed": np.zeros((OUTPUTS, INPUTS // 8), np.int32),
        "weight_scale": np.ones((OUTPUTS, 1), np.float32),
        "weight_shape": np.array([OUTPUTS, INPUTS], np.int64),
    }
    other = {"targets": ["lm_head"], "weights": {"num_bits": 8}}
    own = {"targets": ["Linear"], "weights": {"num_bits": 4}}
    got = layer_of(tmp_path, tensors, {"config_groups": {"group_0": other, "group_1": own}})
    np.testing.assert_array_equal(got, np.full((OUTPUTS, INPUTS), -8))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_all_of_a_configuration(tmp_path: Path, name: str) -> None:
    codes, zeros = RNG.integers(0, 16, (INPUTS, OUTPUTS)), RNG.integers(0, 16, (1, OUTPUTS))
    tensors = gptq_tensors(codes, zeros, np.ones((1, OUTPUTS), np.float16), 4)
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}
    got = layer_of(tmp_path, tensors, {"model_type": "llama", name: config})
    np.testing.assert_array_equal(got, (codes - zeros).T)
    for odd in ([config], "gptq", 4):
        with pytest.raises(WeightError, match="a mapping"):
            quantized_layers({}, odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32])
def test_nf4_in_bytes_that_go_by_another_type(tmp_path: Path, dtype: Any) -> None:
    """As ``bnb_4bit_quant_storage`` has it."""
    codes, state = RNG.integers(0, 16, 256), {"quant_type": "nf4", "blocksize": 64, "shape": [4, 64]}
    stored = ((codes[::2] << 4) | codes[1::2]).astype(np.uint8).view(dtype)
    tensors = {
        "weight": stored[:, None],
        "weight.absmax": np.ones(4, np.float32),
        "weight.quant_map": np.arange(16, dtype=np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    np.testing.assert_array_equal(layer_of(tmp_path, tensors).reshape(-1), codes)
    with pytest.raises(WeightError, match="do not fit"):
        layer_of(tmp_path, tensors | {"weight": np.concatenate([stored, stored])})


def test_rows_of_bitsandbytes_in_tiles(tmp_path: Path) -> None:
    codes = RNG.integers(-127, 128, (OUTPUTS, INPUTS)).astype(np.int8)
    tensors = {"weight": codes, "SCB": np.full(OUTPUTS, 127, np.float32), "weight_format": np.uint8(0)}
    np.testing.assert_array_equal(layer_of(tmp_path, tensors), codes)
    with pytest.raises(WeightError, match=r"layer 'proj': weights in tiles .*weight_format \[2\]"):
        layer_of(tmp_path, tensors | {"weight_format": np.uint8(2)})


_GPTQ = gptq_tensors(np.zeros((32, 32), int), np.zeros((1, 32), int), np.ones((1, 32), np.float16), 4)
_SCALED = {"weight": np.zeros((4, 8), np.int8), "weight_scale": np.ones((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({**_GPTQ, "scales": np.ones((1, 32), np.int32)}, r"'proj\.scales' holds no scales: int32"),
        ({**_GPTQ, "g_idx": np.zeros(32, np.float32)}, "g_idx has the groups of 32 inputs, got float32"),
        ({name: _GPTQ[name] for name in ("qweight", "qzeros")}, r"lacks its tensor 'proj\.scales'"),
        ({name: _GPTQ[name] for name in ("qweight", "scales")}, r"lacks its tensor 'proj\.qzeros'"),
        ({"weight_packed": np.zeros((4, 1), np.int32)}, r"lacks its tensor 'proj\.weight_scale'"),
        ({**_CODES, "weight_scale": np.ones((1, 4), np.float32), "weight_shape": np.array([4, 8])}, "do not fit"),
        ({**_CODES, "weight_shape": np.array([4.0, 8.0])}, "shape"),
        ({**_SCALED, "weight_scale": np.ones((4, 2), np.int64)}, r"'proj\.weight_scale' holds no scales"),
        ({**_SCALED, "weight_zero_point": np.zeros((2, 4), np.int8)}, "do not fit"),
    ],
)
def test_tensors_of_wrong_types_and_shapes_are_named(tmp_path: Path, tensors: dict[str, Array], told: str) -> None:
    with pytest.raises(WeightError, match=told):
        layer_of(tmp_path, tensors, {"quant_method": "gptq"} if "qweight" in tensors else {})


def test_a_layer_is_found_without_looking_at_all_others() -> None:
    """Models with experts have tens of thousands."""

    class Counted(dict[str, Any]):
        seen = 0

        def __iter__(self) -> Any:
            type(self).seen += 1
            return super().__iter__()

    class Given:
        def __init__(self, array: Array) -> None:
            self.array = array

        def read(self) -> Array:
            return self.array

    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [1, 64]}).encode()
    tensors = Counted()
    for k in range(3):
        tensors[f"l{k}.weight"] = Given(np.zeros((32, 1), np.uint8))
        tensors[f"l{k}.weight.absmax"] = Given(np.ones(1, np.float32))
        tensors[f"l{k}.weight.quant_state.bitsandbytes__nf4"] = Given(np.frombuffer(state, np.uint8))
    layers = quantized_layers(tensors)
    for layer in layers.values():
        assert layer().shape == (1, 64)
    assert Counted.seen == 1


@pytest.mark.parametrize("method", ["exl2", "hqq", "quark"])
def test_methods_that_are_not_known_are_refused_by_name(method: str) -> None:
    with pytest.raises(WeightError, match=method):
        quantized_layers({}, {"quant_method": method})


def test_the_nearest_of_known_methods_is_told() -> None:
    for method in METHODS:
        assert quantized_layers({}, {"quant_method": method}) == {}
        with pytest.raises(WeightError, match=f"unknown quantization method '{method}x'.*{method}"):
            quantized_layers({}, {"quant_method": f"{method}x"})
