"""Products, convolutions and sums of codes: exact, whatever the device multiplies them in.

float32 holds every whole number up to 2²⁴ and float64 up to 2⁵³; products of two codes of eight bits stay below 2¹⁶, so
sums of up to 256 of them are exact in float32, and all that occur in float64.
"""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.ops.convolution import convolved
from ranvier.providers.cuda.ops.products import whole_product
from ranvier.providers.cuda.ops.quantization import FLOAT8, dynamic_codes, less, saturated
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

_CODES = frozenset({DType.int8, DType.uint8, DType.int32})
_MIXED = _CODES | FLOATS
_SHORT = frozenset({DType.int16, DType.uint16, DType.int32, DType.uint32})


def by_row(parameter: Any, rank: int) -> Any:
    """A parameter of the left operand: a vector has one for each row."""
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 and rank > 1 else parameter


def by_column(parameter: Any) -> Any:
    return parameter.reshape(()) if parameter.numel() == 1 else parameter


def exact_product(a: Any, b: Any) -> Any:
    """The product of whole numbers, as int64."""
    exact = torch.float32 if a.shape[-1] <= 128 else torch.float64
    return torch.matmul(a.to(exact), b.to(exact)).to(torch.int64)


@lowers("MatMulInteger", since=10, types=_CODES)
def matmul_integer(call: Call, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    left = less(a, None if a_zero is None else by_row(a_zero, a.ndim))
    return exact_product(left, less(b, None if b_zero is None else by_column(b_zero)))


@lowers("MatMulInteger16", domain=CONTRIB, types=_SHORT)
def matmul_integer16(call: Call, a: Any, b: Any) -> Any:
    return whole_product(a, b)


@lowers("ReduceSumInteger", domain=CONTRIB, types=_CODES | {DType.uint32})
def reduce_sum_integer(call: Call, x: Any) -> Any:
    axes = tuple(call.attr("axes") or range(x.ndim))
    return x.sum(dim=axes, keepdim=call.flag("keepdims", 1), dtype=torch.int64)


@lowers("QLinearMatMul", since=10, types=_MIXED | FLOAT8)
def qlinear_matmul(
    call: Call, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    rank = a.ndim
    ratio = by_row(a_scale, rank).float() * by_column(b_scale).float() / by_row(y_scale, rank).float()
    if a.dtype.is_floating_point:
        left, right = (v.float() - z.float() for v, z in ((a, by_row(a_zero, rank)), (b, by_column(b_zero))))
        largest = torch.finfo(call.result_type()).max
        return (torch.matmul(left, right) * ratio + by_row(y_zero, rank).float()).clamp(-largest, largest)
    total = exact_product(less(a, by_row(a_zero, rank)), less(b, by_column(b_zero)))
    return saturated(total.float() * ratio, by_row(y_zero, rank), call.dtype())


@lowers("DynamicQuantizeMatMul", domain=CONTRIB, types=_MIXED)
def dynamic_quantize_matmul(call: Call, a: Any, b: Any, b_scale: Any, b_zero: Any = None, bias: Any = None) -> Any:
    y = quantized_product(a, less(b, None if b_zero is None else by_column(b_zero)), by_column(b_scale))
    return y if bias is None else y + bias


def quantized_product(x: Any, differences: Any, scale: Any) -> Any:
    """``x`` times a matrix of codes, by way of codes that span the range of ``x``."""
    codes, own, zero = dynamic_codes(x)
    return exact_product(codes - zero.to(torch.int32), differences).float() * (own * scale)


@lowers("MatMulIntegerToFloat", domain=CONTRIB, types=_MIXED)
def matmul_integer_to_float(
    call: Call, a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any = None, b_zero: Any = None, bias: Any = None
) -> Any:
    left = less(a, None if a_zero is None else by_row(a_zero, a.ndim))
    total = exact_product(left, less(b, None if b_zero is None else by_column(b_zero))).float()
    y = total * (by_row(a_scale.float(), a.ndim) * by_column(b_scale.float()))
    return y if bias is None else y + bias.float()


@lowers("QGemm", domain=CONTRIB, types=_MIXED)
def qgemm(
    call: Call,
    a: Any,
    a_scale: Any,
    a_zero: Any,
    b: Any,
    b_scale: Any,
    b_zero: Any,
    c: Any = None,
    y_scale: Any = None,
    y_zero: Any = None,
) -> Any:
    left = less(a.mT if call.flag("transA") else a, a_zero.reshape(()))
    total = exact_product(left, less(b.mT if call.flag("transB") else b, by_column(b_zero)))
    if c is not None:
        total = total + c
    y = total.float() * (call.attr("alpha", 1.0) * a_scale.reshape(()) * by_column(b_scale))
    if y_scale is None or y_zero is None:
        return y
    return saturated(y / y_scale.reshape(()), y_zero.reshape(()), call.dtype())


@lowers("MulInteger", domain=CONTRIB, types=_CODES)
def mul_integer(call: Call, a: Any, a_zero: Any, b: Any, b_zero: Any = None) -> Any:
    return less(a, None if a_zero is None else a_zero.reshape(())) * less(
        b, None if b_zero is None else b_zero.reshape(())
    )


# -- convolutions -----------------------------------------------------------------------------------------------------


def _per_filter(parameter: Any, rank: int) -> Any:
    return parameter.reshape(()) if parameter.numel() == 1 else parameter.reshape(-1, *[1] * (rank - 1))


def exact_convolution(call: Call, x: Any, x_zero: Any, w: Any, w_zero: Any) -> Any:
    left = less(x, None if x_zero is None else x_zero.reshape(()))
    right = less(w, None if w_zero is None else _per_filter(w_zero, w.ndim))
    return convolved(call, left.to(torch.float64), right.to(torch.float64), op=call.node.op).to(torch.int64)


@lowers("ConvInteger", since=10, types=_CODES)
def conv_integer(call: Call, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None) -> Any:
    return exact_convolution(call, x, x_zero, w, w_zero)


def _qlinear_conv(
    call: Call,
    x: Any,
    x_scale: Any,
    x_zero: Any,
    w: Any,
    w_scale: Any,
    w_zero: Any,
    y_scale: Any,
    y_zero: Any,
    bias: Any = None,
) -> Any:
    total = exact_convolution(call, x, x_zero, w, w_zero)
    if bias is not None:
        total = total + bias.reshape(-1, *[1] * (x.ndim - 2))
    ratio = x_scale.reshape(()) * _per_filter(w_scale, x.ndim - 1).float() / y_scale.reshape(())
    return saturated(total.float() * ratio, y_zero.reshape(()), call.dtype())


lowers("QLinearConv", since=10, types=_MIXED)(_qlinear_conv)


@lowers("QLinearConv", domain=CONTRIB, types=_MIXED)
def contrib_qlinear_conv(call: Call, x: Any, *others: Any) -> Any:
    if not call.flag("channels_last"):
        return _qlinear_conv(call, x, *others)
    return _qlinear_conv(call, x.movedim(-1, 1), *others).movedim(1, -1)
