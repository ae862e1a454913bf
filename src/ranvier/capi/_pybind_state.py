"""Another name for the same module; ONNX Runtime has both."""

from ranvier.capi.onnxruntime_pybind11_state import *  # noqa: F403
from ranvier.capi.onnxruntime_pybind11_state import __all__  # noqa: F401
