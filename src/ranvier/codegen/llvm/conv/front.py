"""The choice of a kernel for a convolution with constant weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import depthwise, plan, rows
from ranvier.codegen.llvm.conv import winograd as winograd_kernels
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View


def takes_any_layout(shape: ConvShape) -> bool:
    """Whether the input may lie in any order (NCHW as a user's image does), not only channels-last."""
    return rows.is_thin(shape)


def packing(shape: ConvShape, isa: Isa, *, winograd: bool = True) -> str:
    """The kind of kernel for a shape: weights packed for one shape serve every other shape of the same kind."""
    if shape.is_depthwise:
        return "depthwise"
    m = _winograd_size(shape) if winograd else 0
    return f"winograd{m}" if m else "gemm"


def _winograd_size(shape: ConvShape) -> int:
    """The output square of Winograd's algorithm, or 0 where the direct way is quicker."""
    plain = shape.kernel == (1, 3, 3) and shape.strides == shape.dilations == (1, 1, 1) and shape.group == 1
    if not plain or shape.out[0] != 1 or min(shape.cin, shape.cout) < 32 or min(shape.out[1:]) < 12:
        return 0
    return 4


def pack_weights(w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, *, winograd: bool = True) -> Packed:
    """Weights [cout, cin/group, *kernel] in the order the kernel for this shape reads them."""
    kind = packing(shape, isa, winograd=winograd)
    dtype = dtypes.of(w)
    if kind == "depthwise":
        return depthwise.pack(w, isa, shape, dtype)
    if kind.startswith("winograd"):
        return winograd_kernels.pack(w, isa, shape, dtype, int(kind[-1]))
    return plan.pack(w, isa, shape, dtype)


def conv(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    numbering: Numbering | None = None,
) -> list[Launch]:
    """Launches that compute a convolution of ``x`` with packed weights into ``out``.

    Operands of the epilogue have axes (image, output pixel in row-major order, output channel); ``numbering`` is for
    outputs that are part of a larger one.
    """
    if shape.is_empty:
        return []
    if packed.kind == "depthwise":
        return depthwise.depthwise(x, packed, out, shape, isa, epilogue, threads, numbering)
    if packed.kind.startswith("winograd"):
        return winograd_kernels.winograd(x, packed, out, shape, isa, epilogue, threads)
    return rows.gemm_conv(x, packed, out, shape, isa, epilogue, threads, numbering)
