"""ONNX Runtime's Python surface, over a session."""
