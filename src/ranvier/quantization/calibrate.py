"""Readers of samples under the name of ONNX Runtime's module."""

from ranvier.runtime.ort.quantization.kinds import CalibrationMethod
from ranvier.runtime.ort.quantization.readers import CalibrationDataReader

__all__ = ["CalibrationDataReader", "CalibrationMethod"]
