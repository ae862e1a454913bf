"""Transposed convolution as ordinary ones.

Output positions fall into phases by their remainder modulo the stride. All positions of one phase read the same taps,
at input positions that advance by one: each phase is a convolution of stride 1 with some of the taps (reversed), and
writes every s-th pixel of the output. No zeros are inserted and nothing is computed twice.

Where the kernel is the stride, every phase has one tap and all read the same input: one product with the taps side by
side as columns, shuffled into pixels as it is stored, reads the input once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import rows
from ranvier.codegen.llvm.conv.dynamic import WeightView, conv_dynamic
from ranvier.codegen.llvm.conv.front import conv, pack_weights, takes_bfloat
from ranvier.codegen.llvm.conv.shape import ConvShape, Numbering, Packed, Pixels, Shuffle
from ranvier.codegen.llvm.conv.widen import widened
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass


@dataclass(frozen=True)
class _Axis:
    """One phase along one axis: outputs ``first``, ``first + stride`` …, and the taps they read."""

    first: int
    count: int
    tap: int  # the first tap, and
    step: int  # how far apart they are
    taps: int
    dilation: int
    begin: int


@dataclass(frozen=True)
class _Phase:
    axes: tuple[_Axis, ...]
    shape: ConvShape
    numbering: Numbering

    def output(self, out: View, shape: ConvShape) -> View:
        """The pixels of this phase as a view."""
        spatial = out.rank - 2
        axes, strides = self.axes[3 - spatial :], shape.strides[3 - spatial :]
        offset = out.offset + sum(a.first * s for a, s in zip(axes, out.strides[2:]))
        return View(
            out.storage,
            out.dtype,
            (*out.shape[:2], *(a.count for a in axes)),
            (*out.strides[:2], *(s * by for s, by in zip(out.strides[2:], strides))),
            offset,
        )


def _along(size: int, out: int, kernel: int, stride: int, dilation: int, begin: int) -> Iterator[_Axis]:
    common = math.gcd(stride, dilation)
    step, spread = stride // common, dilation // common
    for r in range(stride):
        lowest = -((r - begin) // stride)  # the first position whose output is not negative
        first = r - begin + stride * lowest
        count = -(-(out - first) // stride)
        if count <= 0:
            continue
        reads = [k for k in range(min(kernel, step)) if (k * dilation - r) % stride == 0]
        if not reads:
            # nothing reaches these outputs: a tap that is always outside the input makes them zero
            yield _Axis(first, count, 0, 1, 0, 1, size + count + 1)
            continue
        taps = -(-(kernel - reads[0]) // step)
        start = lowest + (r - reads[0] * dilation) // stride - (taps - 1) * spread
        yield _Axis(first, count, reads[0], step, taps, spread, -start)


def _phases(shape: ConvShape) -> Iterator[_Phase]:
    per_axis = [
        list(_along(i, o, k, s, d, b))
        for i, o, k, s, d, b in zip(
            shape.size, shape.out, shape.kernel, shape.strides, shape.dilations, shape.begin, strict=True
        )
    ]
    for axes in itertools.product(*per_axis):
        d, h, w = axes
        plain = ConvShape(
            shape.n,
            shape.group,
            shape.cin,
            shape.cout,
            shape.size,
            (d.count, h.count, w.count),
            (max(1, d.taps), max(1, h.taps), max(1, w.taps)),
            (1, 1, 1),
            (d.dilation, h.dilation, w.dilation),
            (d.begin, h.begin, w.begin),
        )
        (sd, sh, sw), (_, height, width) = shape.strides, shape.out
        first = (d.first * height + h.first) * width + w.first
        yield _Phase(axes, plain, Numbering(sd * height * width, sh * width, sw, first))


def _tiles_output(shape: ConvShape) -> bool:
    """Kernel and stride agree, so that every output pixel has one tap."""
    return (
        shape.group == 1
        and shape.kernel == shape.strides
        and (shape.dilations, shape.begin) == ((1, 1, 1), (0, 0, 0))
        and shape.out == tuple(i * s for i, s in zip(shape.size, shape.strides))
    )


def _product(shape: ConvShape) -> ConvShape:
    """The 1x1 convolution with all taps as columns."""
    one = (1, 1, 1)
    columns = shape.cout * shape.taps
    return ConvShape(shape.n, 1, shape.cin, columns, shape.size, shape.size, one, one, one, (0, 0, 0))


def _shuffled(
    x: View,
    packed: Packed,
    out: View,
    shape: ConvShape,
    isa: Isa,
    epilogue: Epilogue | None,
    threads: int,
) -> list[Launch]:
    place = Pixels.of(out)
    (sd, sh, sw), (_, height, width) = shape.strides, shape.out
    numbers = (height * width, width, 1)
    shuffle = Shuffle(shape.cout, shape.kernel, (place.d, place.h, place.w), numbers)
    numbering = Numbering(sd * numbers[0], sh * width, sw, 0)
    spatial = out.rank - 2
    # the pixels of the first tap: as many as the input has
    first = View(
        out.storage,
        out.dtype,
        (*out.shape[:2], *shape.size[3 - spatial :]),
        (*out.strides[:2], *(s * by for s, by in zip(out.strides[2:], shape.strides[3 - spatial :]))),
        out.offset,
    )
    kernel = rows.narrow_conv if packed.kind == "narrow" else rows.gemm_conv
    return kernel(x, packed, first, _product(shape), isa, epilogue, threads, numbering, shuffle)


def transposed_takes_bfloat(shape: ConvShape, isa: Isa) -> bool:
    """Whether bfloat16 inputs are multiplied as they are in every phase."""
    return all(takes_bfloat(phase.shape, isa) for phase in _phases(shape))


def pack_transposed(
    w: np.ndarray[Any, Any], isa: Isa, shape: ConvShape, *, dtype: DType | None = None
) -> tuple[Packed, ...]:
    """Weights [cin, cout/group, *kernel] of a ConvTranspose, packed phase by phase; ``dtype`` as for ``pack_weights``.

    bfloat16 products are so quick that reading the input once per phase costs less than sums that wait to be shuffled.
    """
    if dtype is DType.bfloat16 and not transposed_takes_bfloat(shape, isa):
        dtype = None
    if _tiles_output(shape) and dtype is not DType.bfloat16:
        columns = w.reshape(shape.cin, shape.cout, shape.taps).transpose(2, 1, 0)
        flat = np.ascontiguousarray(columns).reshape(shape.taps * shape.cout, shape.cin, 1, 1, 1)
        return (pack_weights(flat, isa, _product(shape), winograd=False),)
    full = w.reshape(shape.group, shape.depth, shape.width, *shape.kernel)
    full = full.transpose(0, 2, 1, 3, 4, 5).reshape(shape.cout, shape.depth, *shape.kernel)
    found: list[Packed] = []
    for phase in _phases(shape):
        taps = tuple(slice(a.tap, None, a.step) for a in phase.axes)
        part = full[:, :, *taps][:, :, ::-1, ::-1, ::-1]
        if any(a.taps == 0 for a in phase.axes):
            part = np.zeros((shape.cout, shape.depth, *phase.shape.kernel), w.dtype)
        found.append(pack_weights(np.ascontiguousarray(part), isa, phase.shape, winograd=False, dtype=dtype))
    return tuple(found)


def conv_transpose(
    x: View,
    packed: tuple[Packed, ...],
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """Launches of a ConvTranspose; ``shape`` from :meth:`ConvShape.transpose`, weights from ``pack_transposed``."""
    if shape.is_empty:
        return []
    found: list[Launch] = []
    if x.dtype is not DType.float32 and any(p.dtype is DType.float32 and p.kind != "depthwise" for p in packed):
        x, found = widened(x, DType.float32, isa, threads)
    if _tiles_output(shape) and len(packed) == 1:
        return [*found, *_shuffled(x, packed[0], out, shape, isa, epilogue, threads)]
    for phase, weights in zip(_phases(shape), packed, strict=True):
        target = phase.output(out, shape)
        found += conv(
            x, weights, target, phase.shape, isa, epilogue=epilogue, threads=threads, numbering=phase.numbering
        )
    return found


def conv_transpose_dynamic(
    x: View,
    w: View,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
    winograd: bool = False,
) -> list[Launch]:
    """A ConvTranspose whose weights [cin, cout/group, *kernel] are a tensor of the graph."""
    if shape.is_empty:
        return []
    whole = WeightView.transpose(w, shape)
    found: list[Launch] = []
    for phase in _phases(shape):
        # the taps of a phase, last first
        last = [a.tap + max(0, a.taps - 1) * a.step for a in phase.axes]
        (d, h, w_axis), (td, th, tw) = phase.axes, whole.taps
        part = replace(
            whole,
            offset=whole.offset + sum(k * s for k, s in zip(last, whole.taps)),
            taps=(-d.step * td, -h.step * th, -w_axis.step * tw),
            zero=any(a.taps == 0 for a in phase.axes),
        )
        target = phase.output(out, shape)
        found += conv_dynamic(
            *(x, part, target, phase.shape, isa),
            epilogue=epilogue,
            threads=threads,
            numbering=phase.numbering,
            winograd=winograd,
        )
    return found
