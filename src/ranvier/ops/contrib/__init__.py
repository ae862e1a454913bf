"""The com.microsoft domain: operators that ONNX Runtime's tools write into models."""
