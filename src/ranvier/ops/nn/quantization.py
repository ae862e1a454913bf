"""Linear quantization of the standard: quantize, dequantize, and contractions over quantized operands.

Integer contractions are exact. They run as floating-point matrix products, which reach BLAS, in a type wide enough
for every partial sum to be a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import exact_carrier, from_carrier
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.window import convolve, per_axis, resolve_pads
from ranvier.ops.registry import Array, Cost, TypeCall, op

_SLICE = 256  # this many products of two 8-bit differences add up exactly in float32
_FLOAT8 = (DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2, DType.float8_e5m2fnuz)


# -- shared arithmetic ------------------------------------------------------------------------------------------------


def spread(parameter: Array, shape: Sequence[int], axis: int, block_size: int, name: str) -> Array:
    """A scale or zero point made broadcastable to ``shape``: per tensor, per axis or per block of one axis."""
    if parameter.size == 1 and parameter.ndim <= 1 and block_size == 0:
        return parameter.reshape(())
    rank = len(shape)
    if not -rank <= axis < rank:
        raise InvalidValue(f"{name}: axis {axis} is out of range for rank {rank}", op=name)
    axis %= rank
    if block_size > 0:
        expected = (*shape[:axis], -(-shape[axis] // block_size), *shape[axis + 1 :])
        if parameter.shape != expected:
            raise ShapeMismatch(
                f"{name}: blocks of {block_size} along axis {axis} of {list(shape)} need a scale of shape "
                f"{list(expected)}, got {list(parameter.shape)}"
            )
        return np.repeat(parameter, block_size, axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    if block_size < 0:
        raise InvalidValue(f"{name}: block_size must not be negative, got {block_size}", op=name)
    if parameter.shape != (shape[axis],):
        raise ShapeMismatch(
            f"{name}: per-axis quantization along axis {axis} of {list(shape)} needs a scale of shape "
            f"[{shape[axis]}], got {list(parameter.shape)}"
        )
    return parameter.reshape((-1,) + (1,) * (rank - axis - 1))


def saturate_to(y: Array, zero_point: Array | None, dtype: DType) -> Array:
    """Real codes rounded to the nearest (ties to even), shifted by the zero point and clipped to an integer type.

    A NaN becomes the lowest code, which is what compare-and-select hardware makes of it.
    """
    codes: Array = np.empty(y.shape, np.promote_types(y.dtype, np.float32))
    np.rint(y, out=codes)
    if zero_point is not None:
        codes += zero_point.astype(codes.dtype)
    limits = ml_dtypes.iinfo(dtype.numpy)
    np.fmax(codes, codes.dtype.type(limits.min), out=codes)
    np.fmin(codes, codes.dtype.type(limits.max), out=codes)
    # the sub-byte types are cast from int8, the one conversion of theirs that is a plain loop
    narrow: Array = codes.astype(np.int8 if limits.bits < 8 else dtype.numpy)
    return narrow.astype(dtype.numpy, copy=False)


def shifted(x: Array, zero_point: Array | None) -> Array:
    """``x - zero_point`` in a type that holds every difference; ``x`` itself where there is nothing to subtract."""
    if zero_point is None or not zero_point.any():
        return x
    wide = np.int16 if x.itemsize == 1 else np.int32 if x.itemsize == 2 else np.int64
    return np.subtract(x, zero_point, dtype=wide)


def integer_matmul(a: Array, b: Array, dtype: np.dtype[Any], name: str) -> Array:
    """The exact matrix product of two integer arrays, modulo the width of ``dtype``."""
    fits = a.ndim > 0 and b.ndim > 0 and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0]
    if not fits or any(1 not in pair and pair[0] != pair[1] for pair in zip(a.shape[-3::-1], b.shape[-3::-1])):
        raise ShapeMismatch(f"{name}: matrices of shape {list(a.shape)} and {list(b.shape)} do not multiply")
    inner = a.shape[-1]
    carrier = exact_carrier(a, b, inner)
    if carrier == np.float64 and min(a.ndim, b.ndim) > 1 and exact_carrier(a, b, _SLICE) == np.float32:
        # half the bytes to convert and twice the rate, in slices whose sums are exact in float32
        total: Array = np.zeros((), np.float64)
        for start in range(0, inner, _SLICE):
            part = slice(start, start + _SLICE)
            total = total + np.matmul(a[..., part].astype(np.float32), b[..., part, :].astype(np.float32))
    else:
        total = np.asarray(np.matmul(a.astype(carrier), b.astype(carrier)))
    return from_carrier(total, np.dtype(dtype))


def dynamic_range(x: Array) -> tuple[np.float32, np.uint8]:
    """Scale and zero point that map the range of ``x``, zero included, onto uint8."""
    low = np.float32(np.fmin.reduce(x, axis=None, initial=0))  # fmin and fmax pass over NaN
    high = np.float32(np.fmax.reduce(x, axis=None, initial=0))
    scale = np.float32((high - low) / np.float32(255)) if high > low else np.float32(1)
    zero_point = np.clip(np.rint(-low / scale), 0, 255)
    return scale, np.uint8(zero_point)


def quantize_dynamically(x: Array) -> tuple[Array, np.float32, np.uint8]:
    """``x`` as uint8 with the scale and zero point of its own range."""
    scale, zero_point = dynamic_range(x)
    return saturate_to(x / scale, np.asarray(zero_point), DType.uint8), scale, zero_point


# -- QuantizeLinear, DequantizeLinear ---------------------------------------------------------------------------------


@op("QuantizeLinear", since=10)
def quantize_linear(
    x: Array,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    axis: int = 1,
    saturate: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
) -> Array:
    target = of(int(output_dtype)) if output_dtype else DType.uint8 if y_zero_point is None else of(y_zero_point)
    if y_zero_point is not None and of(y_zero_point) is not target:
        raise DTypeMismatch(f"QuantizeLinear: output_dtype is {target}, but the zero point is {of(y_zero_point)}")
    scale = spread(y_scale, x.shape, axis, block_size, "QuantizeLinear")
    zero = None if y_zero_point is None else spread(y_zero_point, x.shape, axis, block_size, "QuantizeLinear")
    working = _division_dtype(y_scale.dtype, precision)
    ratio = np.asarray(x.astype(working, copy=False) / scale.astype(working, copy=False))
    if target.is_integer:
        return saturate_to(ratio, zero, target)
    if not (target in _FLOAT8 or target.bits < 8):
        raise DTypeMismatch(f"QuantizeLinear: cannot quantize to {target}")
    ratio = ratio.astype(np.float32)
    if zero is not None and zero.astype(np.float32).any():
        ratio = ratio + zero.astype(np.float32)
    if saturate and target in _FLOAT8:  # the four- and six-bit types have no infinity and saturate by themselves
        largest = np.float32(ml_dtypes.finfo(target.numpy).max)
        ratio = np.clip(ratio, -largest, largest)
    return ratio.astype(target.numpy)


def _division_dtype(scale: np.dtype[Any], precision: int) -> np.dtype[Any]:
    """The type in which ``x / y_scale`` is computed: ``precision``, or that of the scale."""
    if precision:
        return of(int(precision)).numpy
    kind = of(scale)
    if kind in (DType.float32, DType.float16, DType.bfloat16, DType.float64):
        return scale
    return np.dtype(np.float64 if kind.is_integer else np.float32)


@op("DequantizeLinear", since=10)
def dequantize_linear(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    if x_zero_point is not None and x_zero_point.dtype != x.dtype:
        raise DTypeMismatch(f"DequantizeLinear: x is {of(x)}, but its zero point is {of(x_zero_point)}")
    target = of(int(output_dtype)).numpy if output_dtype else x_scale.dtype
    scale = spread(x_scale, x.shape, axis, block_size, "DequantizeLinear")
    zero = None if x_zero_point is None else spread(x_zero_point, x.shape, axis, block_size, "DequantizeLinear")
    # one rounding: float32 holds every difference of narrow codes and every product of two half-precision numbers
    working = np.promote_types(target, np.float32) if of(target) is DType.float64 else np.dtype(np.float32)
    if x.dtype == np.int32:
        codes = shifted(x, zero).astype(working)
    else:
        codes = x.astype(working)
        if zero is not None and (shift := zero.astype(working)).any():
            codes -= shift
    codes *= scale.astype(working)
    return codes.astype(target, copy=False)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(x: Array) -> tuple[Array, Array, Array]:
    y, scale, zero_point = quantize_dynamically(x)
    return y, np.asarray(scale), np.asarray(zero_point)


# -- contractions -----------------------------------------------------------------------------------------------------


def by_row(parameter: Array, rank: int) -> Array:
    """A parameter of the left operand: a vector holds one entry per row, so it becomes a column."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 and rank > 1 else parameter


def by_column(parameter: Array) -> Array:
    """A parameter of the right operand: a vector holds one entry per column and broadcasts as it is."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


@op("MatMulInteger", since=10)
def matmul_integer(a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
    left = a if a_zero_point is None else shifted(a, by_row(a_zero_point, a.ndim))
    right = b if b_zero_point is None else shifted(b, by_column(b_zero_point))
    return integer_matmul(left, right, np.dtype(np.int32), "MatMulInteger")


@op("QLinearMatMul", since=10)
def qlinear_matmul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Array:
    row_scale, row_zero = by_row(a_scale, a.ndim), by_row(a_zero_point, a.ndim)
    column_scale, column_zero = by_column(b_scale), by_column(b_zero_point)
    out_scale, out_zero = by_row(y_scale, a.ndim), by_row(y_zero_point, a.ndim)
    multiplier = row_scale.astype(np.float32) * column_scale.astype(np.float32) / out_scale.astype(np.float32)
    if of(a).is_integer:
        total = integer_matmul(shifted(a, row_zero), shifted(b, column_zero), np.dtype(np.int64), "QLinearMatMul")
        return saturate_to(total.astype(np.float32) * multiplier, out_zero, of(y_zero_point))
    real = [v.astype(np.float32) - z.astype(np.float32) for v, z in ((a, row_zero), (b, column_zero))]
    largest = np.float32(ml_dtypes.finfo(y_zero_point.dtype).max)
    y: Array = np.clip(np.matmul(*real) * multiplier + out_zero.astype(np.float32), -largest, largest)
    return y.astype(out_zero.dtype)


@op("ConvInteger", since=10)
def conv_integer(
    x: Array,
    w: Array,
    x_zero_point: Array | None = None,
    w_zero_point: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    return integer_convolution(
        x, x_zero_point, w, w_zero_point, auto_pad, dilations, group, kernel_shape, pads, strides, "ConvInteger"
    )


def integer_convolution(
    x: Array,
    x_zero_point: Array | None,
    w: Array,
    w_zero_point: Array | None,
    auto_pad: str,
    dilations: Sequence[int] | None,
    group: int,
    kernel_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
    name: str,
) -> Array:
    """The exact int32 convolution of two shifted operands; padding stands for a real zero."""
    rank = x.ndim - 2
    if kernel_shape and tuple(kernel_shape) != w.shape[2:]:
        raise ShapeMismatch(f"{name}: kernel_shape {list(kernel_shape)} is not that of W {list(w.shape)}")
    steps = per_axis(strides, rank, "strides", name)
    gaps = per_axis(dilations, rank, "dilations", name)
    around = resolve_pads(auto_pad, pads, x.shape[2:], w.shape[2:], steps, gaps, op=name)
    zero = None if x_zero_point is None else x_zero_point.reshape(())
    w_zero = None if w_zero_point is None else per_filter(w_zero_point, w.ndim, w.shape[0], name)
    return convolve(
        shifted(x, zero),
        shifted(w, w_zero),
        strides=steps,
        dilations=gaps,
        pads=around,
        group=group,
        accumulate=np.dtype(np.int32),
        op=name,
    )


def per_filter(parameter: Array, rank: int, filters: int, name: str) -> Array:
    """A scalar, or one value per output channel along axis 0 of a rank-``rank`` array."""
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.shape != (filters,):
        raise ShapeMismatch(f"{name}: expected a scalar or {filters} values, got {list(parameter.shape)}")
    return parameter.reshape((-1,) + (1,) * (rank - 1))


@op("QLinearConv", since=10)
def qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    w: Array,
    w_scale: Array,
    w_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    total = integer_convolution(
        x, x_zero_point, w, w_zero_point, auto_pad, dilations, group, kernel_shape, pads, strides, "QLinearConv"
    )
    channels, rank = w.shape[0], x.ndim
    if b is not None:
        total = total + b.reshape((channels,) + (1,) * (rank - 2))
    scale = per_filter(w_scale, rank - 1, channels, "QLinearConv").astype(np.float32)
    multiplier = x_scale.reshape(()) * scale / y_scale.reshape(())
    return saturate_to(total.astype(np.float32) * multiplier, y_zero_point.reshape(()), of(y_zero_point))


# -- costs ------------------------------------------------------------------------------------------------------------


def matmul_flops(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Operations of a batched matrix product of these shapes."""
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    return 2.0 * max(math.prod(a[:-2]), math.prod(b[:-2])) * rows * (a[-1] if a else 1) * columns


def conv_flops(out: tuple[int, ...], w: tuple[int, ...]) -> float:
    """Operations of a convolution with this result and these filters."""
    return 2.0 * math.prod(out) * math.prod(w[1:])


def _result(call: TypeCall) -> tuple[int, ...]:
    return dims(call.result_types[0]) if call.result_types else ()


@matmul_integer.cost
def _(call: TypeCall) -> Cost:
    return Cost(matmul_flops(dims(call.type(0)), dims(call.type(1))), traffic(call))


@qlinear_matmul.cost
def _(call: TypeCall) -> Cost:
    return Cost(matmul_flops(dims(call.type(0)), dims(call.type(3))), traffic(call))


@conv_integer.cost
def _(call: TypeCall) -> Cost:
    return Cost(conv_flops(_result(call), dims(call.type(1))), traffic(call))


@qlinear_conv.cost
def _(call: TypeCall) -> Cost:
    return Cost(conv_flops(_result(call), dims(call.type(3))), traffic(call))
