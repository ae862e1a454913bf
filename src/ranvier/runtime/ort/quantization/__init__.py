"""What ``onnxruntime.quantization`` does, in the ways of this runtime; scripts import ``ranvier.quantization``."""
