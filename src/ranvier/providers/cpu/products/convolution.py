"""Convolutions: channels-last inside, whatever the model says outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.exprs import HALVES, cast
from ranvier.codegen.definitions.products import Window, folded_stride
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import conv as kernels
from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.graph.tensors import Same
from ranvier.providers.cpu.narrow.rates import Pace, depthwise_pace, window_pace
from ranvier.providers.cpu.products.matmul import content
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Target

BF16, F16 = DType.bfloat16, DType.float16
_SIDE_BY_SIDE = 16  # images from which on it pays to let them lie next to each other
_PHASES = 64  # the largest stride of a transposed convolution: each residue is a convolution of its own


def channels_last(rank: int) -> tuple[int, ...]:
    """The axes of [N, C, …] from outermost to innermost in memory."""
    return (0, *range(2, rank), 1)


def _fold(shape: Sequence[int]) -> Any:
    out = tuple(shape)

    def fold(strides: Sequence[int]) -> tuple[int, int, int] | None:
        pixels = folded_stride(out[2:], strides[2:])
        return None if pixels is None else (strides[0], pixels, strides[1])

    return fold


def _widened(b: Definitions, x: Value, w: Value) -> tuple[Value, Value]:
    """Operands that kernels take: bfloat16 with constant weights as it is, other 16-bit types as float32."""
    if b.dtype(x) is BF16 and _is_constant(b, w):
        return x, w
    return _as_float(b, x), _as_float(b, w)


def _as_float(b: Definitions, value: Value) -> Value:
    if b.dtype(value) not in HALVES:
        return value
    return b.pointwise([value], lambda e: cast(e[0], DType.float32), DType.float32)


def convolve(
    b: Definitions, x: Value, w: Value, out_shape: Sequence[int], window: Window, out: Value | None = None
) -> Value:
    """Convolutions of 16 bits are float32 inside, and rounded where they go to ``out``."""
    if window.transposed and max(window.strides, default=1) > _PHASES:
        raise Declined(f"ConvTranspose: strides {window.strides}")
    make = ConvShape.transpose if window.transposed else ConvShape.conv
    more: dict[str, Any] = {"output_padding": window.output_padding} if window.transposed else {}
    shape = make(
        b.shape(x),
        b.shape(w),
        strides=window.strides,
        dilations=window.dilations,
        pads=window.pads,
        group=window.group,
        **more,
    )
    dtype = b.dtype(x)
    wide = dtype in HALVES
    made = _convolved(b, *_widened(b, x, w), out_shape, shape, None if wide else out, transposed=window.transposed)
    if not wide or out is None:
        return made
    return b.pointwise([made], lambda e: cast(e[0], dtype), dtype, shape=out_shape, out=out)


def _convolved(
    b: Definitions,
    x: Value,
    w: Value,
    out_shape: Sequence[int],
    shape: ConvShape,
    out: Value | None = None,
    *,
    transposed: bool = False,
) -> Value:
    """The bare convolution of float32 or float64 tensors, or of bfloat16 ones with constant weights: then the result is
    float32."""
    rank = len(out_shape)
    if not transposed and not _is_constant(b, w) and kernels.has_few_outputs(shape):
        return _few_outputs(b, x, w, out_shape, shape, out)
    takes_narrow = kernels.transposed_takes_bfloat if transposed else kernels.takes_bfloat

    def narrow(target: Target) -> str | None:
        if not _is_constant(b, w):
            return "its weights are not constant"
        if target.narrow is F16:
            able = not transposed and kernels.takes_halves(shape, target.isa)
            return None if able else "there is no float16 kernel for its shape"
        return None if takes_narrow(shape, target.isa) else "no bfloat16 kernel for its shape is quicker"

    def pace(target: Target) -> Pace:
        if shape.is_depthwise:
            return depthwise_pace(target.narrow or BF16, shape.cout)
        plain = shape.kernel == (1, 3, 3) and shape.strides == shape.dilations == (1, 1, 1) and shape.group == 1
        transformed = plain and target.winograd and not transposed and min(shape.cin, shape.cout) >= 16
        sizes = max(1, shape.taps), max(1, shape.depth), max(1, shape.width)
        return window_pace(target.isa, target.narrow or BF16, *sizes, transformed=transformed)

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        image, weights = views
        constant = weights.storage.kind == "const"
        free = constant and not transposed and r.target.winograd  # of the two ways that mix neighbours, this is one
        if free and image.dtype is DType.float32 and r.multiplies is None:
            made = _side_by_side(r, image, weights, target, epilogue, shape)
            if made is not None:
                return made
        if not (kernels.takes_any_layout(shape) and not transposed):
            image = r.ordered(image, channels_last(rank))
        how: dict[str, Any] = {"epilogue": epilogue, "threads": r.threads}
        dtype = BF16 if BF16 in (image.dtype, r.multiplies) else r.multiplies
        if transposed:
            if not constant:
                how["winograd"] = r.target.winograd
                return kernels.conv_transpose_dynamic(image, weights, target, shape, r.isa, **how)
            key = ("transposed", dtype, Same(weights.storage.array), weights.offset, weights.strides, shape)
            phases = r.packs.get(key, lambda: kernels.pack_transposed(_array(weights), r.isa, shape, dtype=dtype))
            return kernels.conv_transpose(image, phases, target, shape, r.isa, **how)
        if not constant:
            how["winograd"] = r.target.winograd
            return kernels.conv_dynamic(image, weights, target, shape, r.isa, **how)
        winograd = r.target.winograd
        kind = kernels.packing(shape, r.isa, item=max(4, weights.dtype.numpy.itemsize), winograd=winograd, dtype=dtype)
        wide = kernels.panel_width(shape, r.isa, kind, item=max(4, weights.dtype.numpy.itemsize))
        place = ("conv", kind, wide, Same(weights.storage.array), weights.offset, weights.strides)
        packed = r.packs.get(
            place, lambda: kernels.pack_weights(_array(weights), r.isa, shape, winograd=winograd, dtype=dtype)
        )
        return kernels.conv(image, packed, target, shape, r.isa, **how)

    return b.contraction(
        [x, w],
        realise,
        _fold(out_shape),
        DType.float32 if b.dtype(x) is BF16 else b.dtype(x),
        out_shape,
        out,
        order=channels_last(rank),
        unit_axis=1,
        flops=shape.flops,
        narrow=narrow,
        rounds=True,
        pace=pace,
    )


def _few_outputs(
    b: Definitions, x: Value, w: Value, out_shape: Sequence[int], shape: ConvShape, out: Value | None
) -> Value:
    """Filters larger than results: the gradient of another convolution by its weights, whose order the result has."""
    rank = len(out_shape)
    innermost = (*range(1, rank), 0)

    def lying(r: Realiser, view: View) -> View:
        return r.ordered(view, innermost) if view.shape[0] >= _SIDE_BY_SIDE else view

    def realise(r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        assert epilogue is None
        image, filters = (lying(r, view) for view in views)
        how: dict[str, Any] = {"threads": r.threads, "winograd": r.target.winograd}
        return kernels.conv_few_outputs(image, filters, target, shape, r.isa, **how)

    def fold(strides: Sequence[int]) -> None:
        return None

    dtype = b.dtype(x)
    return b.contraction([x, w], realise, fold, dtype, out_shape, out, order=(1, 0, *range(2, rank)), flops=shape.flops)


def _side_by_side(
    r: Realiser, image: View, weights: View, target: View, epilogue: Epilogue | None, shape: ConvShape
) -> Sequence[Launch] | None:
    """The launches with neighbouring pixels taken as one, where that is quicker and everything lies as it needs."""
    p = kernels.pixels_together(shape, r.isa)
    found = kernels.joined(shape, target, epilogue, p)
    if found is None:
        return None
    wide, out, after = found
    if not kernels.takes_any_layout(wide):
        image = r.ordered(image, channels_last(image.rank))
    kind = kernels.packing(wide, r.isa, winograd=False)
    place = ("joined conv", p, kind, kernels.panel_width(wide, r.isa, kind), Same(weights.storage.array))
    packed = r.packs.get(
        (*place, weights.offset, weights.strides, shape.strides),
        lambda: kernels.pack_weights(kernels.joined_weights(_array(weights), shape, p), r.isa, wide, winograd=False),
    )
    return kernels.conv(image, packed, out, wide, r.isa, epilogue=after, threads=r.threads)


def _is_constant(b: Definitions, value: Value) -> bool:
    return value.const is not None or value in b.known


def _array(view: View) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(content(view))
