"""BitNet layers of Hugging Face checkpoints that are not what their layout takes for granted: refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier import nn
from ranvier.errors import WeightError
from ranvier.quantize import Quantized
from ranvier.quantize.packing import pack_ternary
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
OUTPUTS, INPUTS = 8, 12
CODES = RNG.integers(-1, 2, (OUTPUTS, INPUTS)).astype(np.int8)
BITNET = {"quant_method": "bitnet"}
ONE = np.ones(1, np.float32)


def opened(folder: Path, **tensors: Array) -> Any:
    save_safetensors(folder / "m.safetensors", {f"proj.{name}": array for name, array in tensors.items()})
    return WeightLoader(offline=True).open(folder / "m.safetensors")


def layer(folder: Path, config: dict[str, Any], **tensors: Array) -> Quantized:
    return quantized_layers(opened(folder, **tensors), config)["proj"]()


def with_a_three() -> Array:
    packed = pack_ternary(CODES)
    packed[1, 2] = 0xFF
    return packed


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (with_a_three(), ONE, r"'proj\.weight': .*3 was found"),
        (pack_ternary(CODES).view(np.int8), ONE, r"'proj\.weight' holds no matrix of bytes.*int8\[2, 12\]"),
        (CODES, ONE, r"'proj\.weight' holds no matrix of bytes.*int8\[8, 12\]"),
        (CODES.astype(np.float32), ONE, r"'proj\.weight' holds no matrix of bytes.*float32"),
        (pack_ternary(CODES).astype(np.int32), ONE, r"'proj\.weight' holds no matrix of bytes.*int32"),
        (pack_ternary(CODES).reshape(-1), ONE, r"'proj\.weight' holds no matrix of bytes.*\[24\]"),
        (pack_ternary(CODES), np.ones(OUTPUTS, np.float32), r"'proj\.weight_scale'.* one scale, not 8"),
        (pack_ternary(CODES), np.ones(0, np.float32), r"'proj\.weight_scale'.* one scale, not 0"),
    ],
)
def test_tensors_that_are_something_else(tmp_path: Path, weight: Array, scale: Array, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        layer(tmp_path, BITNET, weight=weight, weight_scale=scale)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e300, np.nan, np.inf, -2.0])
def test_scales_that_make_no_numbers(tmp_path: Path, kind: str, scale: float) -> None:
    """Nothing is divided by zero, which would be a warning."""
    given = {"weight": pack_ternary(CODES), "weight_scale": np.array([scale])}
    config = {**BITNET, "linear_class": kind}
    if scale == -2.0 or (abs(scale) < 1 and kind == "autobitlinear"):
        factor = np.float32(scale if kind == "autobitlinear" else 1 / scale)
        np.testing.assert_array_equal(layer(tmp_path, config, **given).dequantize(), CODES * factor)
    else:
        with pytest.raises(WeightError, match=r"'proj\.weight_scale': sums cannot be"):
            layer(tmp_path, config, **given)


def test_kinds_of_layers_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"layer 'proj': unknown kind of BitNet layer 'bitblas'$"):
        layer(tmp_path, {**BITNET, "linear_class": "bitblas"}, weight=pack_ternary(CODES), weight_scale=ONE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(INPUTS, OUTPUTS, bias=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_mode": "online", "linear_class": "autobitlinear"}, "online"),
        ({"use_rms_norm": True}, "rms_norm"),
    ],
)
def test_settings_that_change_what_layers_compute(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    """A model of plain float layers, or without its norms, would be another one."""
    floats = opened(tmp_path, weight=RNG.standard_normal((OUTPUTS, INPUTS)).astype(np.float32))
    with pytest.raises(WeightError, match=message):
        nn.load_quantized_(Model(), floats, {**BITNET, **config})


def test_settings_that_change_nothing(tmp_path: Path) -> None:
    config = {**BITNET, "quantization_mode": "offline", "use_rms_norm": False, "modules_to_not_convert": None}
    scale = np.array([0.5], ml_dtypes.bfloat16)
    found = layer(tmp_path, config, weight=pack_ternary(CODES), weight_scale=scale)
    np.testing.assert_array_equal(found.dequantize(), CODES * np.float32(2))


def test_norms_of_a_layer_are_not_left_out(tmp_path: Path) -> None:
    tensors = {"weight": pack_ternary(CODES), "weight_scale": ONE, "rms_norm.weight": np.ones(INPUTS, np.float32)}
    with pytest.raises(WeightError, match="layer 'proj' normalises"):
        nn.load_quantized_(Model(), opened(tmp_path, **tensors), BITNET)


def test_codes_without_a_scale(tmp_path: Path) -> None:
    """By what is missing, not by a shape that is no quarter of what it should be."""
    with pytest.raises(WeightError, match=r"lacks its tensor 'proj\.weight_scale'"):
        nn.load_quantized_(Model(), opened(tmp_path, weight=pack_ternary(CODES)), BITNET)


def test_what_online_checkpoints_are_told_to_do(tmp_path: Path) -> None:
    """Read without settings and quantized here, they are the arithmetic that they are trained with."""
    weight = RNG.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    model = Model()
    nn.load_quantized_(model, opened(tmp_path, weight=weight))
    assert nn.quantize_(model, "ternary") == ["proj"]
    scale = np.float32(np.abs(weight).mean(dtype=np.float64))
    codes = np.clip(np.rint(weight / scale), -1, 1).astype(np.int64)
    x = RNG.standard_normal((3, INPUTS)).astype(np.float32)
    by = np.float32(127) / np.abs(x).max(axis=1, keepdims=True)
    sums = np.rint(x * by).astype(np.int64) @ codes.T
    np.testing.assert_array_equal(model.proj(x).numpy(), sums.astype(np.float32) * (scale / by))
