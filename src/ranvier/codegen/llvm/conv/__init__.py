"""Convolutions of float32, float64, bfloat16 and float16 over channels-last tensors, as launches of generated kernels.

    conv            weights packed at load by ``pack_weights``
    conv_transpose  weights packed at load by ``pack_transposed``
    conv_dynamic    weights that are a tensor of the graph, packed at every run
    conv_few_outputs  the same where filters are larger than results, as in gradients by weights

Inputs and outputs are logical (N, C, *spatial) views whose channels lie side by side (stride 1); the other strides
are free, so a view may be a slice of channels of a larger buffer. The input of a convolution with few channels
(:func:`takes_any_layout`) may lie in any order.

bfloat16 inputs meet weights packed for ``dtype=bfloat16``; sums and epilogues are float32, results are rounded once,
when they are stored. Where there is no kernel for them (:func:`takes_bfloat`) they are widened first. The same holds of
float16 where the machine has its arithmetic (:func:`takes_halves`); sums are float16 for some steps then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ranvier.codegen.llvm.conv.front import (
    conv,
    pack_weights,
    packing,
    panel_width,
    takes_any_layout,
    takes_bfloat,
    takes_halves,
)
from ranvier.codegen.llvm.conv.shape import ConvShape, Packed
from ranvier.codegen.llvm.conv.side_by_side import (
    joined,
    joined_weights,
    pixels_in_vectors,
    pixels_together,
)

if TYPE_CHECKING:
    from ranvier.codegen.llvm.conv.bands import chained
    from ranvier.codegen.llvm.conv.dynamic import conv_dynamic
    from ranvier.codegen.llvm.conv.few_outputs import conv_few_outputs, has_few_outputs
    from ranvier.codegen.llvm.conv.transpose import (
        conv_transpose,
        conv_transpose_dynamic,
        pack_transposed,
        transposed_takes_bfloat,
    )

# what few models need is imported when somebody first does
_HOMES = {
    "bands": "chained",
    "dynamic": "conv_dynamic",
    "few_outputs": "conv_few_outputs has_few_outputs",
    "transpose": "conv_transpose conv_transpose_dynamic pack_transposed transposed_takes_bfloat",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


__all__ = [
    "ConvShape",
    "Packed",
    "chained",
    "conv",
    "conv_dynamic",
    "conv_few_outputs",
    "conv_transpose",
    "conv_transpose_dynamic",
    "has_few_outputs",
    "joined",
    "joined_weights",
    "pack_transposed",
    "pack_weights",
    "packing",
    "panel_width",
    "pixels_in_vectors",
    "pixels_together",
    "takes_any_layout",
    "takes_bfloat",
    "takes_halves",
    "transposed_takes_bfloat",
]
