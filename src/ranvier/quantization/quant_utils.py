"""Types of codes and forms of files under the name of ONNX Runtime's module."""

from ranvier.runtime.ort.quantization.kinds import QuantFormat, QuantType

__all__ = ["QuantFormat", "QuantType"]
