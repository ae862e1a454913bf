"""com.microsoft matrix products and convolutions with transposes, a residual or an activation folded in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import Dim, Shape, TensorType, Type
from ranvier.ops.accumulate import wide_matmul, widened
from ranvier.ops.contrib.activation import tanh_gelu, with_bias
from ranvier.ops.contrib.rules import MICROSOFT, at, matmul_shape, rounded, tensor, times, window_shape
from ranvier.ops.costs import dims, traffic
from ranvier.ops.operands import integers
from ranvier.ops.registry import Array, Cost, OpDef, TypeCall, evaluate, op

_PLAIN = {"Relu", "Tanh", "Sigmoid", "HardSwish", "Softplus", "Softsign", "Identity"}
_PARAMETRIC = {"LeakyRelu", "HardSigmoid", "Celu", "Elu", "Selu", "ThresholdedRelu"}
_ROWWISE = {"Softmax", "LogSoftmax", "Hardmax"}


def activated(name: str, y: Array, activation: str | None, **attrs: Any) -> Array:
    """``y`` through a standard activation; attributes that are None keep the activation's own defaults."""
    if not activation:
        return y
    if activation not in _PLAIN | _PARAMETRIC | _ROWWISE:
        raise InvalidValue(f"{name}: unknown activation {activation!r}", op=name)
    result: Array = evaluate(activation, y, **{k: v for k, v in attrs.items() if v is not None})
    return result


# -- matrix products --------------------------------------------------------------------------------------------------


def _transposed(x: Array, last_two: int, batch: int) -> Array:
    """A matrix operand as the product takes it; ``batch`` moves the first axis in front of the last."""
    if batch and x.ndim > 2:
        x = np.moveaxis(x, 0, -2)
    return np.swapaxes(x, -1, -2) if last_two and x.ndim > 1 else x


def _scaled_matmul(
    name: str, a: Array, b: Array, alpha: float, trans_a: int, trans_b: int, batch_a: int = 0, batch_b: int = 0
) -> Array:
    left, right = _transposed(a, trans_a, batch_a), _transposed(b, trans_b, batch_b)
    depth = right.shape[-2] if right.ndim > 1 else right.shape[0] if right.ndim else None
    if left.ndim == 0 or left.shape[-1] != depth:
        raise ShapeMismatch(f"{name}: operands of shape {list(left.shape)} and {list(right.shape)} do not multiply")
    y = wide_matmul(widened(left), widened(right))
    return rounded(y if alpha == 1 else y * float(alpha), a.dtype)


@op("FusedMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Array,
    b: Array,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    return _scaled_matmul("FusedMatMul", a, b, alpha, transA, transB, transBatchA, transBatchB)


@op("TransposeMatMul", domain=MICROSOFT)
def transpose_matmul(a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    return _scaled_matmul("TransposeMatMul", a, b, alpha, transA, transB)


@op("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(
    a: Array,
    b: Array,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    activation_axis: int | None = None,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    y = _scaled_matmul("FusedMatMulActivation", a, b, alpha, transA, transB, transBatchA, transBatchB)
    return activated(
        "FusedMatMulActivation",
        y,
        activation,
        alpha=activation_alpha,
        beta=activation_beta,
        gamma=activation_gamma,
        axis=activation_axis,
    )


@op("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> Array:
    y: Array = evaluate("Gemm", a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated("FusedGemm", y, activation, alpha=activation_alpha, beta=activation_beta, gamma=activation_gamma)


@op("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(x: Array, w: Array, bias: Array | None = None) -> Array:
    y = _scaled_matmul("GemmFastGelu", widened(x), w, 1.0, 0, 0)
    return rounded(tanh_gelu(with_bias("GemmFastGelu", y, bias)), x.dtype)


# -- convolutions -----------------------------------------------------------------------------------------------------


def _conv_activated(
    name: str,
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    activation: str,
    params: Sequence[float] | None,
    **window: Any,
) -> Array:
    y: Array = evaluate("Conv", widened(x), widened(w), None if bias is None else widened(bias), **window)
    if residual is not None:
        if residual.shape != y.shape:
            raise ShapeMismatch(f"{name}: Z must have the result's shape {list(y.shape)}, got {list(residual.shape)}")
        y = y + widened(residual)
    return rounded(_conv_activation(name, y, activation, params or ()), x.dtype)


def _conv_activation(name: str, y: Array, activation: str, params: Sequence[float]) -> Array:
    """The activations a convolution carries; their parameters come in one list."""
    expected = {"LeakyRelu": 1, "Clip": 2, "HardSigmoid": 2}.get(activation, 0)
    if len(params) != expected and expected:
        raise InvalidValue(f"{name}: {activation} takes {expected} activation_params, got {list(params)}", op=name)
    if activation == "Clip":
        return np.clip(y, float(params[0]), float(params[1]))
    named = dict(zip(("alpha", "beta"), map(float, params[:expected])))
    return activated(name, y, activation, **named)


@op("FusedConv", domain=MICROSOFT)
def fused_conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    z: Array | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] | None = None,
    **window: Any,  # the attributes of Conv
) -> Array:
    return _conv_activated("FusedConv", x, w, b, z, activation, activation_params, **window)


@op("NhwcFusedConv", domain=MICROSOFT)
def nhwc_fused_conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    z: Array | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] | None = None,
    **window: Any,  # the attributes of Conv
) -> Array:
    rest = None if z is None else to_channels_first(z)
    y = _conv_activated("NhwcFusedConv", to_channels_first(x), w, b, rest, activation, activation_params, **window)
    return to_channels_last(y)


@op("NhwcConv", domain=MICROSOFT)
def nhwc_conv(x: Array, w: Array, b: Array | None = None, **window: Any) -> Array:
    """Input and result have their channels last; so have the filters, ``[M, *kernel, C / group]``."""
    return to_channels_last(
        _conv_activated("NhwcConv", to_channels_first(x), to_channels_first(w), b, None, "", None, **window)
    )


@op("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def conv_transpose_with_dynamic_pads(
    x: Array, w: Array, pads: Array | None = None, b: Array | None = None, **window: Any
) -> Array:
    """The standard's ConvTranspose with its attributes, except that the pads are an operand."""
    if pads is not None:
        window["pads"] = integers("ConvTransposeWithDynamicPads", pads)
    result: Array = evaluate("ConvTranspose", x, w, b, **window)
    return result


def to_channels_first(x: Array) -> Array:
    """``[N, *spatial, C]`` as ``[N, C, *spatial]``."""
    return np.moveaxis(x, -1, 1)


def to_channels_last(x: Array) -> Array:
    """``[N, C, *spatial]`` as ``[N, *spatial, C]``."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


# -- types and costs --------------------------------------------------------------------------------------------------


def _turned(shape: Shape | None, last_two: int, batch: int) -> Shape | None:
    """What :func:`_transposed` does to a shape."""
    if shape is None:
        return None
    if batch and len(shape) > 2:
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if last_two and len(shape) > 1 else shape


def _operands(call: TypeCall) -> tuple[Shape | None, Shape | None]:
    a = _turned(tensor(call, 0).shape, call.attr("transA", 0), call.attr("transBatchA", 0))
    return a, _turned(tensor(call, 1).shape, call.attr("transB", 0), call.attr("transBatchB", 0))


def _matmul_type(call: TypeCall) -> Sequence[Type | None]:
    return [TensorType(tensor(call, 0).dtype, matmul_shape(*_operands(call)))]


def _matmul_cost(call: TypeCall) -> Cost:
    a, b = (tuple(d if isinstance(d, int) else 1 for d in shape or ()) for shape in _operands(call))
    rows, columns = a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1
    batch = max(math.prod(a[:-2]), math.prod(b[:-2]))
    return Cost(2.0 * batch * rows * columns * (a[-1] if a else 1), traffic(call))


for _op in (fused_matmul, transpose_matmul, fused_matmul_activation, fused_gemm, gemm_fast_gelu):
    _op.infer(_matmul_type)
    _op.cost(_matmul_cost)


def _declare_conv(definition: OpDef, last: bool, filters_last: bool) -> None:
    @definition.infer
    def _(call: TypeCall) -> Sequence[Type | None]:
        x, w = tensor(call, 0), tensor(call, 1).shape
        kernel: Shape | None = None if w is None else w[1:-1] if filters_last else w[2:]
        channels: Dim = at(w, 0)
        return [TensorType(x.dtype, window_shape(call, x.shape, kernel, channels, last=last))]

    @definition.cost
    def _(call: TypeCall) -> Cost:
        y = dims(call.result_types[0]) if call.result_types else ()
        return Cost(2.0 * math.prod(y) * math.prod(dims(call.type(1))[1:]), traffic(call))


@conv_transpose_with_dynamic_pads.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, w = tensor(call, 0), tensor(call, 1).shape
    if x.shape is None:
        return [TensorType(x.dtype, None)]
    channels = times(at(w, 1), int(call.attr("group", 1)))
    return [TensorType(x.dtype, (x.shape[0], channels, *(None for _ in x.shape[2:])))]


@conv_transpose_with_dynamic_pads.cost
def _(call: TypeCall) -> Cost:
    x, w = dims(call.type(0)), dims(call.type(1))
    return Cost(2.0 * math.prod(x) * math.prod(w[1:]), traffic(call))


_declare_conv(fused_conv, last=False, filters_last=False)
_declare_conv(nhwc_fused_conv, last=True, filters_last=False)
_declare_conv(nhwc_conv, last=True, filters_last=True)
