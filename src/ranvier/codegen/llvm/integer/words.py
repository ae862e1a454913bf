"""Products and convolutions of 16-bit codes with constant ones of 16 bits or fewer, their int32 sums exact.

VNNI multiplies pairs of such codes, twice as many in an instruction as floats. To whatever moves them they are two
bytes, so that images and rows are those of bytes with twice as many channels; only the micro-kernels and the packed
operand know better. Sums have to fit 32 bits for all codes there are, which the weights alone decide.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv.shape import ConvShape
from ranvier.codegen.llvm.gemm.problem import Problem, folded
from ranvier.codegen.llvm.integer.convolution import in_lines
from ranvier.codegen.llvm.integer.dots import BYTES, PAIRS, dot_of
from ranvier.codegen.llvm.integer.matmul import PIXELS
from ranvier.codegen.llvm.integer.pack import PackedCodes, pack_words, reach_of_words
from ranvier.codegen.llvm.integer.padded import begins_lines, padded_conv, suits_strips
from ranvier.codegen.llvm.integer.product import launch_of, problem_of
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Load, Map, Nest, Operand
from ranvier.codegen.storage import Storage, View, dense_strides
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
_ITEM = 2  # bytes of a code
_LARGEST = (1 << 31) - 1
_MANY_ROWS = 256  # that packed filters are for


def multiplies_words(isa: Isa) -> bool:
    """Whether codes of 16 bits are multiplied faster than floats, and windows of them can be read."""
    return dot_of(isa) is BYTES and isa.masks


def sums_fit(b: Array) -> bool:
    """Whether int32 holds sums of any codes of 16 bits times these [K, N]."""
    return bool((reach_of_words(b) <= _LARGEST).all())


def suits_words(shape: ConvShape, isa: Isa) -> bool:
    """Convolutions in one plane and one group, whose windows are segments."""
    return multiplies_words(isa) and suits_strips(in_bytes(shape), isa)


def in_bytes(shape: ConvShape) -> ConvShape:
    return replace(shape, cin=shape.cin * _ITEM)


def as_bytes(x: View) -> View:
    """An image [N, C, …] of codes that lies channels-last: its pixels as twice as many bytes."""
    count, channels, *size = x.shape
    strides = [step * _ITEM for step in x.strides]
    strides[1] = 1
    return View(x.storage, DType.int8, (count, channels * _ITEM, *size), tuple(strides), x.offset * _ITEM)


def pack_word_filters(w: Array, isa: Isa, shape: ConvShape) -> PackedCodes:
    """Filters [cout, cin, *kernel] as a matrix of taps and channels by outputs."""
    by_tap = w.reshape(shape.cout, shape.cin, shape.taps).swapaxes(-1, -2)
    if begins_lines(in_bytes(shape), PAIRS, isa):
        by_tap = in_lines(by_tap, shape, PAIRS)
    return pack_words(by_tap.reshape(shape.cout, -1).swapaxes(-1, -2), isa, rows_hint=_MANY_ROWS)


def word_conv(
    x: View,
    zero: View,
    packed: PackedCodes,
    out: View,
    shape: ConvShape,
    isa: Isa,
    *,
    epilogue: Epilogue | None = None,
    threads: int = 1,
) -> list[Launch]:
    """``out = epilogue(conv(x))`` of codes int16: ``x`` lies channels-last, the pixels of ``out`` evenly apart, and
    borders are padded with the one code of ``zero``."""
    if shape.is_empty:
        return []
    made = padded_conv(as_bytes(x), zero, packed, out, in_bytes(shape), isa, epilogue, threads, packed.reach)
    return [made]


def word_matmul(
    a: View, b: PackedCodes, out: View, isa: Isa, *, epilogue: Epilogue | None = None, threads: int = 1
) -> list[Launch]:  # fmt: skip
    """``out = epilogue(a @ b)`` of codes int16 [..., M, K] and a packed matrix."""
    if 0 in out.shape:
        return []
    if a.strides[-1] == 1 and a.shape[-1]:
        p = folded(problem_of(_rows(a), b, out, epilogue))
        if p.m >= PIXELS and not p.batch and isa.masks:
            return _as_pixels(p, a.shape[-1], b, isa, threads)
    a, copying = _lying(a, isa, threads)
    return [*copying, launch_of(folded(problem_of(_rows(a), b, out, epilogue)), b, a, isa, threads)]


def _as_pixels(p: Problem, k: int, b: PackedCodes, isa: Isa, threads: int) -> list[Launch]:
    """Rows are the pixels of an image, codes of a row its channels."""
    shape = ConvShape.conv((1, k, p.m), (p.n, k, 1))
    image = View(p.a.storage, DType.int16, (1, k, p.m), (0, 1, p.a_strides[0] // _ITEM), p.a.offset // _ITEM)
    target = View(p.out.storage, p.out.dtype, (1, p.n, p.m), (0, p.out_strides[1], p.out_strides[0]), p.out.offset)
    zero = View(image.storage, DType.int16, (1,), (1,), image.offset)  # no window leaves the image
    return word_conv(image, zero, b, target, shape, isa, epilogue=p.epilogue, threads=threads)


def _rows(a: View) -> View:
    """Rows of codes as rows of bytes."""
    steps = (*(step * _ITEM for step in a.strides[:-1]), 1)
    return View(a.storage, DType.uint8, (*a.shape[:-1], a.shape[-1] * _ITEM), steps, a.offset * _ITEM)


def _lying(a: View, isa: Isa, threads: int) -> tuple[View, list[Launch]]:
    """Rows whose codes lie side by side and fill groups: where they are, or copied. What stands behind the last code of
    a copied row meets zeros."""
    *outer, k = a.shape
    if (a.strides[-1] == 1 or k == 1) and k % PAIRS.group == 0:
        return a, []
    room = (*outer, PAIRS.groups(k) * PAIRS.group)
    storage = Storage.temporary(math.prod(room) * _ITEM)
    target = View(storage, DType.int16, a.shape, dense_strides(room))
    copy = (Map(((1, Load(0, DType.int16)),)),)
    nest = Nest(a.shape, (Operand(a, a.strides), Operand(target, target.strides)), copy, label="codes")
    return target, nests.launches(nest, isa, threads)
