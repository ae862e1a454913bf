"""The choice of a kernel for a convolution with constant weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen import tuning
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import depthwise, narrow, plan, rows
from ranvier.codegen.llvm.conv import winograd as winograd_kernels
from ranvier.codegen.llvm.conv.origin import origin
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed
from ranvier.codegen.llvm.conv.squares import can_be_squares
from ranvier.codegen.llvm.conv.widen import widened
from ranvier.codegen.llvm.gemm.halves import multiplies_halves
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType


def takes_any_layout(shape: ConvShape) -> bool:
    """Whether the input may lie in any order (NCHW as a user's image does), not only channels-last."""
    return rows.is_thin(shape)


def takes_bfloat(shape: ConvShape, isa: Isa) -> bool:
    """Whether bfloat16 inputs are multiplied as they are, and not widened first."""
    return shape.is_depthwise or _bfloat_kind(shape, isa) is not None


def takes_halves(shape: ConvShape, isa: Isa) -> bool:
    """Whether float16 inputs are multiplied by float16 arithmetic, and not widened first."""
    if shape.is_depthwise:
        return depthwise.takes_halves(shape, isa)
    return multiplies_halves(isa) and not rows.is_thin(shape) and not narrow.is_narrow(shape, isa, 4)


def _bfloat_kind(shape: ConvShape, isa: Isa) -> str | None:
    from ranvier.codegen.llvm.conv.bfloat import kind_of  # here and below: most sessions have none of them

    return kind_of(shape, isa)


def packing(
    shape: ConvShape,
    isa: Isa,
    *,
    item: int = 4,
    winograd: bool = True,
    dtype: DType | None = None,
    packed_at_run: bool = False,
) -> str:
    """The kind of kernel for a shape: weights packed for one shape serve every other shape of the same kind.

    ``item`` is the size of an element in bytes. ``dtype`` asks for products of bfloat16 or float16; where there is no
    kernel for them the weights stay as they are, for one that widens its input. ``packed_at_run``: the weights are a
    tensor of the graph, and packing them counts.
    """
    if dtype is DType.bfloat16 and (kind := _bfloat_kind(shape, isa)) is not None:
        return kind
    if dtype is DType.float16 and takes_halves(shape, isa):
        return "depthwise halves" if shape.is_depthwise else "halves"
    if shape.is_depthwise:
        return "depthwise"
    usual = "gemm"
    if narrow.is_narrow(shape, isa, item) and not takes_any_layout(shape):
        usual = "narrow"
    elif winograd and (m := _winograd_size(shape, isa.pace, packed_at_run)):
        usual = f"winograd{m}"

    def others() -> dict[str, str]:
        ways = ["gemm", *(f"winograd{m}" for m in WINOGRAD if winograd and can_be_squares(shape))]
        return {way: way for way in ways}

    return tuning.choose("conv way", lambda: (*shape.key(), item), usual, others)


def panel_width(shape: ConvShape, isa: Isa, kind: str, *, item: int = 4) -> int:
    """What weights of one kind may still differ in: the width of their panels; 0 where they have none to choose."""
    return plan.panel_vectors(shape, isa, item) if kind.startswith(("gemm", "winograd")) else 0


WINOGRAD = (2, 4, 6)  # squares there are kernels for; the largest wins seldom, and only where it is measured (tuning)
# Nanoseconds on the reference machine; only their proportions matter for the choice. Arithmetic, also that of the
# transforms, takes longer where its pace is less; bytes do not.
_FLOP = 1 / 150.0
_BYTE = 1 / 20.0  # of weights, which a network's other layers have pushed out of the near caches
_PACKED_BYTE = 1 / 10.0  # of panels that are made at every run
_TOGETHER = 0.3  # weights arrive while others are used: so much of the shorter of both is still waited for
_TRANSFORM = {2: (0.9, 0.6), 4: (2.0, 1.5)}  # per square and channel, into and out of the transformed domain
_GAIN = {2: 1.1, 4: 1.15}  # Winograd's weights take more memory: it has to be worth it


def _time(flops: float, weights: float, pace: float) -> float:
    work, wait = flops * _FLOP / pace, weights * _BYTE
    return max(work, wait) + _TOGETHER * min(work, wait)


def _winograd_size(shape: ConvShape, pace: float, packed_at_run: bool = False) -> int:
    """The output square of Winograd's algorithm (2 or 4), or 0 where the direct way is as quick."""
    if not can_be_squares(shape):
        return 0
    weights = shape.cin * shape.cout
    packing_byte = _PACKED_BYTE if packed_at_run else 0.0
    chosen, least = 0, _time(shape.flops, 9.0 * 4 * weights, pace) + 9.0 * 4 * weights * packing_byte
    for m in (2, 4):
        squares = shape.n * -(-shape.out[1] // m) * -(-shape.out[2] // m)
        into, back = _TRANSFORM[m]
        positions = (m + 2) ** 2
        cost = _time(2.0 * positions * squares * weights, 4.0 * positions * weights, pace)
        cost += squares * (shape.cin * into + shape.cout * back) / pace + 4.0 * positions * weights * packing_byte
        if cost * _GAIN[m] < least:
            chosen, least = m, cost
    return chosen


def pack_weights(
    w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, *, winograd: bool = True, dtype: DType | None = None
) -> Packed:
    """Weights [cout, cin/group, *kernel] in the order the kernel for this shape reads them; ``dtype`` as above."""
    kind = packing(shape, isa, item=max(4, w.itemsize), winograd=winograd, dtype=dtype)
    if kind.startswith("bfloat"):
        from ranvier.codegen.llvm.conv.bfloat import pack

        return pack(w, isa, shape)
    if kind == "halves":
        return plan.pack(w.astype(np.float16), isa, shape, DType.float16)
    if dtypes.of(w) is DType.bfloat16:  # kernels that widen their input have float32 weights
        w = w.astype(np.float32)
    dtype = dtypes.of(w)
    if kind == "depthwise halves":
        return depthwise.pack(w.astype(np.float16), isa, shape, DType.float16)
    if kind == "depthwise":
        return depthwise.pack(w, isa, shape, dtype)
    if kind == "narrow":
        return narrow.pack(w, isa, shape, dtype)
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

    ``x`` may be of 16 bits where the weights are float32, and either where they are of that type; ``out`` may be of 16
    bits.

    Operands of the epilogue have axes (image, output pixel in row-major order, output channel); ``numbering`` is for
    outputs that are part of a larger one.
    """
    launches = _launches(x, packed, out, shape, isa, epilogue, threads, numbering)
    if len(launches) == 1 and numbering is None:
        launches[0].origin = origin(x, packed, out, shape, epilogue)
    return launches


def _launches(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
    numbering: Numbering | None,
) -> list[Launch]:
    if shape.is_empty:
        return []
    if packed.kind.startswith("bfloat"):
        from ranvier.codegen.llvm.conv.bfloat import bfloat_conv

        return bfloat_conv(x, packed, out, shape, isa, epilogue, threads, numbering)
    if packed.kind == "depthwise":
        return depthwise.depthwise(x, packed, out, shape, isa, epilogue, threads, numbering)
    before: list[Launch] = []
    if x.dtype is not packed.dtype:
        x, before = widened(x, packed.dtype, isa, threads)
    if packed.kind == "depthwise halves":
        return [*before, *depthwise.depthwise(x, packed, out, shape, isa, epilogue, threads, numbering)]
    if packed.kind.startswith("winograd"):
        return [*before, *winograd_kernels.winograd(x, packed, out, shape, isa, epilogue, threads)]
    product = rows.narrow_conv if packed.kind == "narrow" else rows.gemm_conv
    return [*before, *product(x, packed, out, shape, isa, epilogue, threads, numbering)]
