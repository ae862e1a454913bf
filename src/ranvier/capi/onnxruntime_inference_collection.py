"""Sessions, bindings and values under the name of ONNX Runtime's Python module."""

from ranvier.runtime.inference_session import InferenceSession
from ranvier.runtime.ort_binding import IOBinding
from ranvier.runtime.ort_value import OrtDevice, OrtValue

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue"]
