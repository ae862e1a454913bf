"""Options of ``quantize_static``: what is honoured, what is refused by name, what is let be."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime.quantization
import pytest

import ranvier
import ranvier.quantization
from ranvier.errors import InvalidConfig, NotSupported
from ranvier.runtime.ort.errors import InvalidArgument
from tests.runtime.ort_quantization.nets import (
    activation_scales,
    activation_zeros,
    block,
    conv_net,
    images,
    kinds,
    normal,
    reader,
    tokens,
)

ours = ranvier.quantization
PACKAGES = [ranvier.quantization, onnxruntime.quantization]
both = pytest.mark.parametrize("package", PACKAGES, ids=["ranvier", "onnxruntime"])


def scale_of_image(package: ModuleType, folder: Path, feeds: list[dict[str, Any]], **given: Any) -> float:
    path = folder / "coded.onnx"
    package.quantize_static(conv_net(), path, reader(package, feeds), **given)
    return activation_scales(path)["image"]


@both
def test_the_range_of_samples(package: ModuleType, tmp_path: Path) -> None:
    feeds = [{"image": np.full((1, 3, 8, 8), value, np.float32)} for value in (-1.0, 2.0, 5.0, 8.0)]

    def scale(**extra: Any) -> float:
        return scale_of_image(package, tmp_path, feeds, extra_options=extra)

    assert scale() == pytest.approx(9 / 255)
    assert scale(CalibTensorRangeSymmetric=True) == pytest.approx(16 / 255)
    assert scale(CalibMovingAverage=True) == pytest.approx(3.5 / 255)
    assert scale(MinimumRealRange=100.0) == pytest.approx(100 / 255)


def test_parts_of_samples_come_into_the_average_with_a_weight(tmp_path: Path) -> None:
    feeds = [{"image": np.full((1, 3, 8, 8), value, np.float32)} for value in (1.0, 3.0, 10.0, 14.0)]
    extra = {"CalibMovingAverage": True, "CalibMovingAverageConstant": 0.5, "CalibStridedMinMax": 2}
    assert scale_of_image(ours, tmp_path, feeds, extra_options=extra) == pytest.approx((2 + 0.5 * 10) / 255)


@both
def test_a_percentile_leaves_outliers_out(package: ModuleType, tmp_path: Path) -> None:
    image = normal((64, 3, 8, 8))
    image[0, 0, 0, 0] = 1000.0
    feeds = [{"image": image}]
    method = package.CalibrationMethod.Percentile
    near, wide = (
        scale_of_image(package, tmp_path, feeds, calibrate_method=method, extra_options={"CalibPercentile": percent})
        for percent in (99.0, 100.0)
    )
    assert wide > 3.0
    assert near < wide / 2


@both
@pytest.mark.parametrize(("codes", "middle"), [("QInt8", 0), ("QUInt8", 128)])
def test_symmetric_activations(package: ModuleType, codes: str, middle: int, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    kind = package.QuantType[codes]
    given = {"activation_type": kind, "extra_options": {"ActivationSymmetric": True}}
    package.quantize_static(block(), path, reader(package, tokens()), **given)
    zeros = {int(zero) for zero in activation_zeros(path)}
    assert zeros <= {middle, middle - 1 if middle else 0}
    package.quantize_static(block(), path, reader(package, tokens()), activation_type=kind)
    assert len({int(zero) for zero in activation_zeros(path)} | zeros) > 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_type": ours.QuantType.QUInt8}, "weight_type: QuantType.QUInt8 is not supported.* QuantType.QInt8;"),
        ({"activation_type": ours.QuantType.QInt16}, "activation_type: QuantType.QInt16 is not supported"),
        ({"calibrate_method": ours.CalibrationMethod.Distribution}, "calibrate_method: .*Distribution"),
        ({"quant_format": "QDK"}, "quant_format: QDK is not supported, it must be QuantFormat.QOperator"),
        ({"calibration_cache_path": "ranges.json"}, "calibration_cache_path is not supported"),
        ({"extra_options": {"SmoothQuant": True}}, "SmoothQuant = True is not supported: .*ranvier quantize"),
        ({"extra_options": {"WeightSymmetric": False}}, "WeightSymmetric = False is not supported"),
        ({"extra_options": {"AddQDQPairToWeight": True}}, "AddQDQPairToWeight"),
        ({"extra_options": {"EnableSubgraph": True}}, "EnableSubgraph"),
        ({"extra_options": {"TensorQuantOverrides": {"x": [{"scale": 1.0}]}}}, "TensorQuantOverrides"),
        ({"extra_options": {"QDQOpTypePerChannelSupportToAxis": {"MatMul": 0}}}, "a scale for each output"),
        ({"extra_options": {"CalibPercentil": 99.0}}, r"'CalibPercentil' \(did you mean 'CalibPercentile'"),
        ({"extra_options": {"CalibPercentile": 101}}, "CalibPercentile must be a number from 50 to 100, got 101"),
        ({"extra_options": {"CalibStridedMinMax": 0}}, "CalibStridedMinMax must be a whole number of 1 or more, got 0"),
        ({"extra_options": ["CalibPercentile"]}, "extra_options must be a dict, got list"),
        ({"nodes_to_exclude": [1]}, "nodes_to_exclude must be a list of names, it holds 1"),
    ],
)
def test_what_cannot_be_had_is_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        ours.quantize_static(conv_net(), tmp_path / "o.onnx", reader(ours, images(1)), **given)
    assert isinstance(caught.value, InvalidArgument)  # as scripts catch it
    assert not list(tmp_path.iterdir())


def test_what_changes_nothing_is_let_be(tmp_path: Path) -> None:
    extra = {
        "DedicatedQDQPair": True,
        "ForceQuantizeNoInputCheck": True,
        "MatMulConstBOnly": True,
        "QDQKeepRemovableActivations": True,
        "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1, "Conv": 0},
        "SmoothQuant": False,
        "TensorQuantOverrides": {},
        "WeightSymmetric": True,
    }
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    ours.quantize_static(conv_net(), a, reader(ours, images(1)), extra_options=extra)
    ours.quantize_static(conv_net(), b, reader(ours, images(1)))
    assert a.read_bytes() == b.read_bytes()


def test_members_of_the_others_enumerations_will_do(tmp_path: Path) -> None:
    theirs, path = onnxruntime.quantization, tmp_path / "coded.onnx"
    kinds_given = {"activation_type": theirs.QuantType.QUInt8, "quant_format": theirs.QuantFormat.QOperator}
    ours.quantize_static(conv_net(), path, reader(theirs, images(1)), **kinds_given)
    assert kinds(path)["QLinearConv"] == 3 and {zero.dtype.name for zero in activation_zeros(path)} == {"uint8"}


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = [
    *("quantize", "quantize_static", "quantize_dynamic", "get_qdq_config", "quant_pre_process"),
    *("StaticQuantConfig", "DynamicQuantConfig"),
]


def arguments(package: ModuleType, name: str) -> list[tuple[str, str]]:
    found = inspect.signature(getattr(package, name)).parameters.values()
    return [(each.name, str(each.default)) for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_others(name: str) -> None:
    assert arguments(ours, name) == arguments(onnxruntime.quantization, name)


@pytest.mark.parametrize("name", ["QuantType", "QuantFormat", "CalibrationMethod"])
def test_members_are_the_others(name: str) -> None:
    mine, theirs = getattr(ours, name), getattr(onnxruntime.quantization, name)
    assert [(each.name, each.value, str(each)) for each in mine] == [
        (each.name, each.value, str(each)) for each in theirs
    ]


def test_types_of_codes() -> None:
    theirs = onnxruntime.quantization.QuantType
    assert [each.tensor_type for each in ours.QuantType] == [each.tensor_type for each in theirs]
    assert ours.QuantType.from_string("QInt8") is ours.QuantType.QInt8
    with pytest.raises(ValueError, match=r"QuantType has no 'QInt7' \(did you mean"):
        ours.QuantType.from_string("QInt7")


def test_every_name_is_there_or_says_what_to_use() -> None:
    theirs = onnxruntime.quantization
    for name, value in vars(theirs).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if name not in ours.__all__:
            with pytest.raises(NotSupported, match=f"ranvier.quantization.{name} is not supported: "):
                getattr(ours, name)
    assert not hasattr(ours, "no_such_name")


def test_it_is_a_part_of_the_package() -> None:
    assert ranvier.quantization.quantize_static is ours.quantize_static
    assert "quantization" in dir(ranvier)
    from ranvier.quantization.calibrate import CalibrationDataReader
    from ranvier.quantization.quant_utils import QuantType
    from ranvier.quantization.quantize import quantize_static
    from ranvier.quantization.shape_inference import quant_pre_process

    assert (CalibrationDataReader, QuantType) == (ours.CalibrationDataReader, ours.QuantType)
    assert (quantize_static, quant_pre_process) == (ours.quantize_static, ours.quant_pre_process)
    assert callable(ours.quantize)
