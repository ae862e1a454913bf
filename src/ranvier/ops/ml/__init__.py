"""The ai.onnx.ml domain: classical machine learning."""
