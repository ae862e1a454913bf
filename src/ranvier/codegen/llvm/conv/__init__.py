"""Convolutions of float32 and float64 over channels-last tensors, as launches of generated kernels.

    conv            weights packed at load by ``pack_weights``
    conv_transpose  weights packed at load by ``pack_transposed``
    conv_dynamic    weights that are a tensor of the graph, packed at every run

Inputs and outputs are logical (N, C, *spatial) views whose channels lie side by side (stride 1); the other strides
are free, so a view may be a slice of channels of a larger buffer. The input of a convolution with few channels
(:func:`takes_any_layout`) may lie in any order.
"""

from __future__ import annotations

from ranvier.codegen.llvm.conv.dynamic import conv_dynamic
from ranvier.codegen.llvm.conv.front import conv, pack_weights, packing, takes_any_layout
from ranvier.codegen.llvm.conv.shape import ConvShape, Packed
from ranvier.codegen.llvm.conv.transpose import conv_transpose, conv_transpose_dynamic, pack_transposed

__all__ = [
    "ConvShape",
    "Packed",
    "conv",
    "conv_dynamic",
    "conv_transpose",
    "conv_transpose_dynamic",
    "pack_transposed",
    "pack_weights",
    "packing",
    "takes_any_layout",
]
