"""How to quantize, as an object: what ``quantize`` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

from ranvier.errors import InvalidConfig, nearest
from ranvier.records import dataclass
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.quantization.dynamic import quantize_dynamic
from ranvier.runtime.ort.quantization.kinds import CalibrationMethod, QuantFormat, QuantType
from ranvier.runtime.ort.quantization.readers import CalibrationDataReader
from ranvier.runtime.ort.quantization.static import quantize_static

_ARGUMENTS = {
    "symmetric": "CalibTensorRangeSymmetric",
    "moving_average": "CalibMovingAverage",
    "averaging_constant": "CalibMovingAverageConstant",
    "max_intermediate_outputs": "CalibMaxIntermediateOutputs",
    "percentile": "CalibPercentile",
}


class QuantConfig:
    """Root of both."""


@dataclass
class StaticQuantConfig(QuantConfig):
    """Arguments of ``quantize_static`` but for the files."""

    calibration_data_reader: CalibrationDataReader
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax
    quant_format: QuantFormat = QuantFormat.QDQ
    activation_type: QuantType = QuantType.QInt8
    weight_type: QuantType = QuantType.QInt8
    op_types_to_quantize: Sequence[str] | None = None
    nodes_to_quantize: Sequence[str] | None = None
    nodes_to_exclude: Sequence[str] | None = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    calibration_providers: Any = None
    extra_options: Mapping[str, Any] | None = None


@dataclass
class DynamicQuantConfig(QuantConfig):
    """Arguments of ``quantize_dynamic`` but for the files."""

    weight_type: QuantType = QuantType.QInt8
    op_types_to_quantize: Sequence[str] | None = None
    nodes_to_quantize: Sequence[str] | None = None
    nodes_to_exclude: Sequence[str] | None = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    extra_options: Mapping[str, Any] | None = None


@raises_ort
def quantize(
    model_input: str | os.PathLike[str] | ModelProto, model_output: str | os.PathLike[str], quant_config: QuantConfig
) -> None:
    """Quantize as a config says."""
    if isinstance(quant_config, StaticQuantConfig):
        quantize_static(model_input, model_output, **_arguments(quant_config))
    elif isinstance(quant_config, DynamicQuantConfig):
        quantize_dynamic(model_input, model_output, **_arguments(quant_config))
    else:
        raise InvalidConfig(
            f"quant_config must be a StaticQuantConfig or a DynamicQuantConfig, got {type(quant_config).__name__}"
        )


def _arguments(config: StaticQuantConfig | DynamicQuantConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


@raises_ort
def get_qdq_config(
    model_input: str | os.PathLike[str] | ModelProto,
    calibration_data_reader: CalibrationDataReader,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibrate_args: Mapping[str, Any] | None = None,
    activation_type: QuantType = QuantType.QUInt8,
    weight_type: QuantType = QuantType.QInt8,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    keep_removable_activations: bool = False,
    min_real_range: float | None = None,
    tensor_quant_overrides: Mapping[str, Any] | None = None,
    calibration_providers: Any = None,
    op_types_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | Callable[[ModelProto, NodeProto], bool] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> StaticQuantConfig:
    """A config for QDQ, from what is said by arguments here and by ``extra_options`` there."""
    extra: dict[str, Any] = {
        "ActivationSymmetric": activation_symmetric,
        "MinimumRealRange": min_real_range,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "TensorQuantOverrides": tensor_quant_overrides or {},
        "WeightSymmetric": weight_symmetric,
    }
    for name, value in (calibrate_args or {}).items():
        if name not in _ARGUMENTS:
            raise InvalidConfig(f"calibrate_args: unknown option {name!r}{nearest(name, _ARGUMENTS)}")
        extra[_ARGUMENTS[name]] = value
    if callable(nodes_to_exclude):
        loaded = model_input
        if not isinstance(loaded, ModelProto):
            loaded = onnx.load(os.fspath(loaded), load_external_data=False)
        nodes_to_exclude = [node.name for node in loaded.graph.node if nodes_to_exclude(loaded, node)]
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method,
        QuantFormat.QDQ,
        activation_type,
        weight_type,
        op_types_to_quantize,
        None,
        nodes_to_exclude,
        per_channel,
        reduce_range,
        False,
        calibration_providers,
        {**extra, **(extra_options or {})},
    )


__all__ = ["DynamicQuantConfig", "QuantConfig", "StaticQuantConfig", "get_qdq_config", "quantize"]
