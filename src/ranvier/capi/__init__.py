"""Where ONNX Runtime keeps its classes, for scripts that import them from there. Everything is defined elsewhere."""
