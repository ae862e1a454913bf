"""ONNX Runtime's ways to quantize, for scripts that import them from there. Everything is defined elsewhere."""

from typing import Any

from ranvier.quantization.calibrate import CalibrationDataReader, CalibrationMethod
from ranvier.quantization.quant_utils import QuantFormat, QuantType
from ranvier.quantization.quantize import (
    DynamicQuantConfig,
    StaticQuantConfig,
    get_qdq_config,
    quantize,
    quantize_dynamic,
    quantize_static,
)
from ranvier.quantization.shape_inference import quant_pre_process
from ranvier.runtime.ort.errors import lacking

# Names ONNX Runtime has here and Ranvier does not, with what to use instead.
_LACKING = {
    "CalibraterBase": "quantize_static finds ranges itself, by calibrate_method and extra_options",
    "CudaQuantizer": "quantize_static writes a file for any provider",
    "MinMaxCalibrater": "quantize_static finds ranges itself, by calibrate_method and extra_options",
    "QDQQuantizer": "use quantize_static",
    "QuantizationMode": "use quantize_static or quantize_dynamic",
    "TensorData": "quantize_static finds ranges itself",
    "TensorsData": "quantize_static finds ranges itself",
    "create_calibrator": "quantize_static finds ranges itself, by calibrate_method and extra_options",
    "load_tensors_data": "quantize_static finds ranges itself",
    "save_tensors_data": "quantize_static finds ranges itself",
    "write_calibration_table": "quantize_static writes ranges into the model",
}


def __getattr__(name: str) -> Any:
    raise lacking("ranvier.quantization", name, _LACKING)


__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "DynamicQuantConfig",
    "QuantFormat",
    "QuantType",
    "StaticQuantConfig",
    "get_qdq_config",
    "quant_pre_process",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
]
