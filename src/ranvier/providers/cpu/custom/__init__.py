"""Kernels of the user's own on the CPU: LLVM IR text, or a Python function that writes a loop nest."""

from __future__ import annotations

from ranvier.providers.cpu.custom.builder import LoopBuilder
from ranvier.providers.cpu.custom.kernels import CpuKernels
from ranvier.providers.cpu.custom.lowering import lower_op, unlower_op
from ranvier.providers.cpu.custom.signature import Buffer, Local, Param, Scalar, Signature, Size, Tensor
from ranvier.providers.cpu.custom.terms import Term

__all__ = [
    "Buffer",
    "CpuKernels",
    "Local",
    "LoopBuilder",
    "Param",
    "Scalar",
    "Signature",
    "Size",
    "Tensor",
    "Term",
    "lower_op",
    "unlower_op",
]
