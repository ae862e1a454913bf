"""The GPU suite: models in ONNX, and the same networks with the same weights as PyTorch modules."""
