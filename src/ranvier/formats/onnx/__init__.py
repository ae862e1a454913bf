"""ONNX in and out. ``read`` makes a Graph of a model, ``write`` makes a model of a Graph; nothing here runs one."""

from ranvier.formats.onnx.reader import read
from ranvier.formats.onnx.writer import save, to_proto

__all__ = ["read", "save", "to_proto"]
