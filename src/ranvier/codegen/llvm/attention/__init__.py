"""Scaled dot-product attention as a template: tiled with an online softmax, or one pass over a cache."""

from ranvier.codegen.llvm.attention.append import append
from ranvier.codegen.llvm.attention.lower import attention, supported

__all__ = ["append", "attention", "supported"]
