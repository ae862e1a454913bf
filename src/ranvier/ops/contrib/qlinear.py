"""com.microsoft operators with quantized operands and a quantized result: QLinearAdd and its relatives.

Each computes in float32 what the operator without ``QLinear`` computes, and quantizes the result once. What is linear
in the codes is multiplied by one factor, a scale by another, which makes a number between two codes one where the
scales do. Functions of one operand go through a table with an entry per code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, Shape, TensorType, Type
from ranvier.ops.contrib.activation import sigmoid
from ranvier.ops.contrib.fused import to_channels_first, to_channels_last
from ranvier.ops.contrib.rules import (
    MICROSOFT,
    at,
    broadcast,
    broadcasting,
    plus,
    same_as,
    tensor,
    window_shape,
)
from ranvier.ops.costs import dims, traffic
from ranvier.ops.nn.quantization import conv_flops, qlinear_conv, saturate_to, shifted
from ranvier.ops.operands import common_shape, normal_axes, normal_axis
from ranvier.ops.registry import Array, Cost, TypeCall, evaluate, op


def real(x: Array, scale: Array, zero_point: Array | None) -> Array:
    """The numbers that 8-bit codes stand for."""
    codes = x if zero_point is None else shifted(x, zero_point.reshape(()))
    return np.asarray(codes.astype(np.float32) * scale.reshape(()))


def coded(y: Array, scale: Array, zero_point: Array | None, dtype: np.dtype[Any]) -> Array:
    """Numbers as 8-bit codes."""
    return rounded(y / scale.reshape(()), zero_point, dtype)


def steps(x: Array, scale: Array, zero_point: Array | None, step: Array) -> Array:
    """The numbers that 8-bit codes stand for, in steps of another scale."""
    return real(x, scale.reshape(()) / step.reshape(()), zero_point)


def rounded(y: Array, zero_point: Array | None, dtype: np.dtype[Any]) -> Array:
    """The nearest codes of numbers in steps of their scale."""
    return saturate_to(y, None if zero_point is None else zero_point.reshape(()), of(dtype))


# -- element by element -----------------------------------------------------------------------------------------------


@op("QLinearAdd", domain=MICROSOFT)
def qlinear_add(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    c_scale: Array,
    c_zero_point: Array | None = None,
) -> Array:
    common_shape("QLinearAdd", a, b)
    total = steps(a, a_scale, a_zero_point, c_scale) + steps(b, b_scale, b_zero_point, c_scale)
    return rounded(total, c_zero_point, a.dtype)


@op("QLinearMul", domain=MICROSOFT)
def qlinear_mul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    c_scale: Array,
    c_zero_point: Array | None = None,
) -> Array:
    common_shape("QLinearMul", a, b)
    one = np.ones((), np.float32)
    product = real(a, one, a_zero_point) * real(b, one, b_zero_point)  # of whole numbers: exact
    factor = a_scale.reshape(()) * b_scale.reshape(()) / c_scale.reshape(())
    return rounded(product * factor, c_zero_point, a.dtype)


def _by_table(
    function: Callable[[Array], Array],
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None,
) -> Array:
    codes = np.arange(256, dtype=np.uint8).view(x.dtype)
    table = coded(function(real(codes, x_scale, x_zero_point)), y_scale, y_zero_point, x.dtype)
    return table[x.view(np.uint8)]


@op("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(
    x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None
) -> Array:
    return _by_table(sigmoid, x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    alpha: float = 0.01,
) -> Array:
    def leaky(v: Array) -> Array:
        return np.where(v >= 0, v, v * float(alpha))

    return _by_table(leaky, x, x_scale, x_zero_point, y_scale, y_zero_point)


@op("QLinearWhere", domain=MICROSOFT)
def qlinear_where(
    condition: Array,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y: Array,
    y_scale: Array,
    y_zero_point: Array,
    z_scale: Array,
    z_zero_point: Array,
) -> Array:
    common_shape("QLinearWhere", condition, x, y)
    chosen = np.where(condition, steps(x, x_scale, x_zero_point, z_scale), steps(y, y_scale, y_zero_point, z_scale))
    return rounded(chosen, z_zero_point, x.dtype)


# -- along axes -------------------------------------------------------------------------------------------------------


@op("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array,
    *,
    axis: int = -1,
    opset: int,
) -> Array:
    """Softmax along one axis, or before opset 13 over all axes from ``axis`` on."""
    at_axis = normal_axis("QLinearSoftmax", axis, x.ndim)
    if x.size == 0:
        return x.copy()
    rows = x.reshape(*x.shape[:at_axis], math.prod(x.shape[at_axis:])) if opset < 13 else np.moveaxis(x, at_axis, -1)
    below = np.subtract(rows, rows.max(axis=-1, keepdims=True), dtype=np.int16)  # a zero point would cancel
    weights = np.exp(real(below, x_scale, None))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    shares = weights.reshape(x.shape) if opset < 13 else np.moveaxis(weights, -1, at_axis)
    return coded(shares, y_scale, y_zero_point, x.dtype)


@op("QLinearReduceMean", domain=MICROSOFT)
def qlinear_reduce_mean(
    data: Array,
    data_scale: Array,
    data_zero_point: Array | None,
    reduced_scale: Array,
    reduced_zero_point: Array | None = None,
    *,
    axes: Sequence[int] = (),
    keepdims: int = 1,
) -> Array:
    over = normal_axes("QLinearReduceMean", axes, data.ndim) if axes else None
    mean = _differences(data, data_zero_point).mean(axis=over, keepdims=bool(keepdims))
    return rounded(steps(np.asarray(mean), data_scale, None, reduced_scale), reduced_zero_point, data.dtype)


def _differences(x: Array, zero_point: Array | None) -> Array:
    """Codes less their zero point in a type that rounds no sum of them."""
    return (x if zero_point is None else shifted(x, zero_point.reshape(()))).astype(np.float64)


@op("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(y_scale: Array, y_zero_point: Array, *inputs: Array, axis: int) -> Array:
    """``inputs`` are triples of codes, scale and zero point."""
    if not inputs or len(inputs) % 3:
        raise InvalidValue(f"QLinearConcat: expected triples of tensor, scale, zero point, got {len(inputs)} inputs")
    parts = []
    for x, scale, zero in zip(inputs[::3], inputs[1::3], inputs[2::3]):
        parts.append(rounded(steps(x, scale, zero, y_scale), y_zero_point, x.dtype))
    at_axis = normal_axis("QLinearConcat", axis, parts[0].ndim)
    first = parts[0].shape
    for part in parts[1:]:
        if part.ndim != len(first) or any(a != b for k, (a, b) in enumerate(zip(first, part.shape)) if k != at_axis):
            raise ShapeMismatch(f"QLinearConcat: {list(part.shape)} does not join {list(first)} along axis {at_axis}")
    return np.concatenate(parts, axis=at_axis)


# -- windows ----------------------------------------------------------------------------------------------------------


@op("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    channels_last: int = 0,
    **window: Any,  # the attributes of AveragePool
) -> Array:
    codes = _differences(x, x_zero_point)
    mean: Array = evaluate("AveragePool", to_channels_first(codes) if channels_last else codes, **window)
    y = rounded(steps(mean, x_scale, None, y_scale), y_zero_point, x.dtype)
    return to_channels_last(y) if channels_last else y


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    *,
    channels_last: int = 0,
) -> Array:
    if x.ndim < 3:
        raise ShapeMismatch(f"QLinearGlobalAveragePool: expected spatial axes, got {list(x.shape)}")
    spatial = tuple(range(1, x.ndim - 1) if channels_last else range(2, x.ndim))
    mean = _differences(x, x_zero_point).mean(axis=spatial, keepdims=True)
    return rounded(steps(mean, x_scale, None, y_scale), y_zero_point, x.dtype)


@op("NhwcMaxPool", domain=MICROSOFT)
def nhwc_max_pool(x: Array, **window: Any) -> Array:
    """MaxPool with its attributes, channels last."""
    pooled: Array = evaluate("MaxPool", np.ascontiguousarray(to_channels_first(x)), **window)
    return to_channels_last(pooled)


@op("QLinearConv", domain=MICROSOFT)
def contrib_qlinear_conv(
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
    channels_last: int = 0,
    **window: Any,  # the attributes of Conv
) -> Array:
    """The standard's QLinearConv, with the channels of input and result last where asked; filters stay as they are."""
    planar = to_channels_first(x) if channels_last else x
    y: Array = qlinear_conv(planar, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, b, **window)
    return to_channels_last(y) if channels_last else y


# -- types and costs --------------------------------------------------------------------------------------------------

for _op in (qlinear_add, qlinear_mul):
    _op.infer(broadcasting(0, 3))
for _op in (qlinear_sigmoid, qlinear_leaky_relu, qlinear_softmax):
    _op.infer(same_as(0))


@qlinear_where.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    shape = broadcast(*(tensor(call, p).shape for p in (0, 1, 4)))
    return [TensorType(tensor(call, 1).dtype, shape)]


@qlinear_reduce_mean.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    data, axes, keep = tensor(call, 0), call.attr("axes") or (), bool(call.attr("keepdims", 1))
    if data.shape is None:
        return [TensorType(data.dtype, None)]
    rank = len(data.shape)
    over = {a % rank for a in axes} if axes else set(range(rank))
    kept: Shape = tuple(1 if k in over else d for k, d in enumerate(data.shape) if keep or k not in over)
    return [TensorType(data.dtype, kept)]


@qlinear_concat.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    parts = [tensor(call, p) for p in range(2, len(call.types), 3)]
    shapes = [p.shape for p in parts if p.shape is not None]
    if not shapes or len(shapes) < len(parts):
        return [TensorType(tensor(call, 1).dtype, None)]
    axis = call.attr("axis") % len(shapes[0])
    total: Dim = 0
    for shape in shapes:
        total = plus(total, at(shape, axis))
    return [TensorType(parts[0].dtype, (*shapes[0][:axis], total, *shapes[0][axis + 1 :]))]


def _pool_types(call: TypeCall, last: bool) -> Sequence[Type | None]:
    x, kernel = tensor(call, 0), tuple(call.attr("kernel_shape"))
    return [TensorType(x.dtype, window_shape(call, x.shape, kernel, at(x.shape, -1 if last else 1), last=last))]


@qlinear_average_pool.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _pool_types(call, bool(call.attr("channels_last", 0)))


@nhwc_max_pool.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return _pool_types(call, True)


@qlinear_global_average_pool.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x = tensor(call, 0)
    if x.shape is None:
        return [TensorType(x.dtype, None)]
    channels = len(x.shape) - 1 if call.attr("channels_last", 0) else 1
    return [TensorType(x.dtype, tuple(d if k in (0, channels) else 1 for k, d in enumerate(x.shape)))]


@contrib_qlinear_conv.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    w = tensor(call, 3).shape
    last = bool(call.attr("channels_last", 0))
    shape = window_shape(call, tensor(call, 0).shape, None if w is None else w[2:], at(w, 0), last=last)
    return [TensorType(tensor(call, 7).dtype, shape)]


@contrib_qlinear_conv.cost
def _(call: TypeCall) -> Cost:
    y = dims(call.result_types[0]) if call.result_types else ()
    return Cost(conv_flops(y, dims(call.type(3))), traffic(call))


@qlinear_average_pool.cost
@nhwc_max_pool.cost
def _(call: TypeCall) -> Cost:
    y = dims(call.result_types[0]) if call.result_types else ()
    return Cost(float(math.prod(y) * math.prod(call.attr("kernel_shape") or (1,))), traffic(call))
