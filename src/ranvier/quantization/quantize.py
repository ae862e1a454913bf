"""Functions that quantize a model, and their configs, under the name of ONNX Runtime's module."""

from ranvier.runtime.ort.quantization.configs import (
    DynamicQuantConfig,
    QuantConfig,
    StaticQuantConfig,
    get_qdq_config,
    quantize,
)
from ranvier.runtime.ort.quantization.dynamic import quantize_dynamic
from ranvier.runtime.ort.quantization.kinds import CalibrationMethod, QuantFormat, QuantType
from ranvier.runtime.ort.quantization.readers import CalibrationDataReader
from ranvier.runtime.ort.quantization.static import quantize_static

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "DynamicQuantConfig",
    "QuantConfig",
    "QuantFormat",
    "QuantType",
    "StaticQuantConfig",
    "get_qdq_config",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
]
