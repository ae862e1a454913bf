"""Sessions, bindings and values under the name of ONNX Runtime's Python module."""

from ranvier.runtime.ort.binding import IOBinding
from ranvier.runtime.ort.inference_session import InferenceSession
from ranvier.runtime.ort.value import OrtDevice, OrtValue

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue"]
