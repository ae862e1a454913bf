"""What comes before quantization, under the name of ONNX Runtime's module."""

from ranvier.runtime.ort.quantization.preparing import quant_pre_process

__all__ = ["quant_pre_process"]
