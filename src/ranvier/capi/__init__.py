"""Where ONNX Runtime keeps its classes, for scripts that import them from there. Everything is defined elsewhere."""

from ranvier.capi import _pybind_state, onnxruntime_inference_collection, onnxruntime_pybind11_state

__all__ = ["_pybind_state", "onnxruntime_inference_collection", "onnxruntime_pybind11_state"]
