"""Neighbouring output pixels as one with more channels, where a convolution has fewer of them than a vector has lanes.

In memory that is channels-last, ``p`` pixels of ``c`` channels are one pixel of ``p * c``. So a convolution with ``p``
times the stride whose kernels are the same one, each moved on by one pixel's stride among zeros, writes the same bytes,
by whole vectors. The zeros are multiplied as well, so it pays where kernels are wide and channels are few.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.llvm.conv.narrow import dots_are_quicker, is_narrow
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Index, Operand, walk
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
_GAIN = 1.3  # that is expected of it at least: weights grow, and kernels run over more columns
_MOST = 16  # pixels


def pixels_together(shape: ConvShape, isa: Isa) -> int:
    """How many pixels of floats to take as one; 1 where that is not worth it."""
    p = pixels_in_vectors(shape, isa)
    as_dots = p > 1 and is_narrow(shape, isa, 4)
    return 1 if as_dots and dots_are_quicker(shape, joined_shape(shape, p), p, isa) else p


def pixels_in_vectors(shape: ConvShape, isa: Isa) -> int:
    """The same of a product whose sums have 32 bits, and which has no other way for few columns."""
    lanes = isa.lanes(4)
    if shape.group > 1 or shape.cout >= lanes or shape.dilations[2] != 1 or shape.is_empty:
        return 1
    kernel, stride, width = shape.kernel[2], shape.strides[2], shape.out[2]
    plain = shape.cout / lanes

    def used(p: int) -> float:
        """The part of all multiplications that is wanted."""
        vectors = -(-p * shape.cout // lanes)
        return p * shape.cout / (vectors * lanes) * kernel / (kernel + (p - 1) * stride)

    best = max((p for p in range(1, _MOST + 1) if width % p == 0), key=used)
    return best if used(best) >= _GAIN * plain else 1


def joined_shape(shape: ConvShape, p: int) -> ConvShape:
    deep, high, width = shape.out
    k_deep, k_high, kernel = shape.kernel
    s_deep, s_high, stride = shape.strides
    return replace(
        shape,
        cout=p * shape.cout,
        out=(deep, high, width // p),
        kernel=(k_deep, k_high, kernel + (p - 1) * stride),
        strides=(s_deep, s_high, p * stride),
    )


def joined(
    shape: ConvShape, out: View, epilogue: Epilogue | None, p: int
) -> tuple[ConvShape, View, Epilogue | None] | None:
    """The convolution with ``p`` pixels taken as one, None where ``out`` or the epilogue's operands lie otherwise."""
    target = joined_output(out, p) if p > 1 else None
    if target is None:
        return None
    try:
        return joined_shape(shape, p), target, joined_epilogue(epilogue, shape.cout, p)
    except ValueError:
        return None


def joined_weights(w: Array, shape: ConvShape, p: int, nothing: int = 0) -> Array:
    """[cout, cin, *kernel] for the joined shape: one copy per pixel, each a stride further on, among what is multiplied
    as zeros."""
    kernel, stride = shape.kernel[2], shape.strides[2]
    made = np.full((p * w.shape[0], *w.shape[1:-1], kernel + (p - 1) * stride), nothing, w.dtype)
    for j in range(p):
        made[j * w.shape[0] : (j + 1) * w.shape[0], ..., j * stride : j * stride + kernel] = w
    return made


def joined_output(out: View, p: int) -> View | None:
    """The same memory with fewer, longer pixels; None where pixels of a row do not follow one another."""
    channels, width = out.shape[1], out.shape[-1]
    if out.strides[-1] != channels or (channels > 1 and out.strides[1] != 1):
        return None
    shape = (out.shape[0], p * channels, *out.shape[2:-1], width // p)
    strides = (out.strides[0], 1, *out.strides[2:-1], p * channels)
    return View(out.storage, out.dtype, shape, strides, out.offset)


def joined_epilogue(epilogue: Epilogue | None, channels: int, p: int) -> Epilogue | None:
    """The epilogue over joined pixels; ValueError where it cannot be had."""
    if epilogue is None:
        return None
    if any(isinstance(e, Index) for e in walk(epilogue.value)):
        raise ValueError("positions are part of the value")
    return Epilogue(epilogue.value, tuple(_joined_operand(o, channels, p) for o in epilogue.operands))


def _joined_operand(operand: Operand, channels: int, p: int) -> Operand:
    image, pixel, channel = operand.strides
    if pixel == channel * channels:  # pixels follow one another, or there is one value for all
        return replace(operand, strides=(image, p * pixel, channel))
    array = operand.view.storage.array
    if pixel or image or array is None or operand.at is not None or operand.guard is not None:
        raise ValueError("an operand lies otherwise")
    start = operand.view.offset + operand.offset
    flat = array.reshape(-1).view(operand.dtype.numpy)[start : start + (channels - 1) * channel + 1 : channel]
    repeated = View.dense(Storage.constant(np.tile(flat, p)), operand.dtype, (p * channels,))
    return Operand(repeated, (0, 0, 1))
