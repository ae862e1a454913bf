"""Numbers as codes of a few bits, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from ranvier.dtypes import DType
from ranvier.dtypes import of as dtype_of
from ranvier.graph.ir import Node
from ranvier.graph.types import TensorType
from ranvier.ops.contrib.levels import E2M1_LEVELS
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.ops.movement import to_float8
from ranvier.providers.cuda.table import CONTRIB, FLOATS, INTEGERS, Call, lowers

SMALL = frozenset({DType.int4, DType.uint4, DType.int2, DType.uint2})
FLOAT8 = frozenset({DType.float8_e4m3fn, DType.float8_e5m2})
CODES = INTEGERS | SMALL | FLOAT8
_TYPES = CODES | FLOATS | {DType.float4_e2m1fn}


def limits(dtype: DType) -> tuple[int, int]:
    found = ml_dtypes.iinfo(dtype.numpy)
    return int(found.min), int(found.max)


def saturated(y: Any, zero: Any, dtype: DType) -> Any:
    """Rounded to the nearest code, ties to even, and within the range of the type; no number is the lowest code."""
    low, high = limits(dtype)
    codes = torch.round(y)
    if zero is not None:
        codes = codes + zero.to(codes.dtype)
    return (
        torch.nan_to_num(codes, nan=float(low), posinf=float(high), neginf=float(low)).clamp(low, high).to(torch.int32)
    )


def less(x: Any, zero: Any) -> Any:
    """``x - zero`` with room for every difference."""
    x = x.to(torch.int32)
    return x if zero is None else x - zero.to(torch.int32)


def real(x: Any, scale: Any, zero: Any) -> Any:
    """The numbers that codes with one scale and one zero point stand for."""
    codes = x.float() if zero is None else x.float() - zero.reshape(()).float()
    return codes * scale.reshape(())


def spread(parameter: Any, x: Any, axis: int, block: int) -> Any:
    """A scale or zero point as it broadcasts against ``x``: for all, for each along an axis, or for blocks of it."""
    if parameter.numel() == 1 and parameter.ndim <= 1 and block == 0:
        return parameter.reshape(())
    axis %= x.ndim
    if block:
        return parameter.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
    return parameter.reshape(-1, *[1] * (x.ndim - axis - 1))


def _refuses_quantize(node: Node) -> str | None:
    to = node.outputs[0].type
    dtype = to.dtype if isinstance(to, TensorType) else None
    if dtype is DType.float4_e2m1fn:
        return "codes of float4 are not made by torch"
    kinds = [v.type.dtype for v in node.inputs[:2] if v is not None and isinstance(v.type, TensorType)]
    if any(kind is not None and not kind.is_float and k == 1 for k, kind in enumerate(kinds)):
        return "whole scales are not lowered to torch"
    return None


def _quantized(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    axis, block = call.attr("axis", 1), call.attr("block_size", 0)
    precision = call.attr("precision", 0)
    working = getattr(torch, dtype_of(int(precision)).name) if precision else scale.dtype
    if not working.is_floating_point:
        working = torch.float32
    ratio = x.to(working) / spread(scale, x, axis, block).to(working)
    offset = None if zero is None else spread(zero, x, axis, block)
    target = call.dtype()
    ratio = ratio.to(torch.float32) if ratio.dtype != torch.float64 else ratio
    if target.is_integer:
        return saturated(ratio, offset, target)
    if offset is not None:
        ratio = ratio + offset.to(torch.float32)
    return to_float8(ratio, target, saturate=call.flag("saturate", 1))


def _levels(call: Call, x: Any, dtype: DType) -> Any:
    """Codes as numbers of float32."""
    if dtype is DType.float4_e2m1fn:
        levels = call.constant(lambda: E2M1_LEVELS)
        return torch.take(levels, (x & 15).to(torch.int64))  # an index of one element alone would be read by the host
    return x.to(torch.float32)


def _refuses_dequantize(node: Node) -> str | None:
    scale = node.inputs[1]
    kind = scale.type.dtype if scale is not None and isinstance(scale.type, TensorType) else None
    return None if kind is None or (kind.is_float and kind.bits >= 16) else "its scale is not lowered to torch"


def _dequantized(call: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    axis, block = call.attr("axis", 1), call.attr("block_size", 0)
    dtype = call.operand_dtype(0)
    factor = spread(scale, x, axis, block)
    working = torch.float64 if factor.dtype == torch.float64 else torch.float32
    if dtype in (DType.int32, DType.uint32):
        codes = x.to(torch.int64)
        if zero is not None:
            codes = codes - spread(zero, x, axis, block).to(torch.int64)
        return codes.to(working) * factor.to(working)
    codes = _levels(call, x, dtype).to(working)
    if zero is not None:
        codes = codes - _levels(call, spread(zero, x, axis, block), dtype).to(working)
    return codes * factor.to(working)


lowers("QuantizeLinear", since=10, types=_TYPES, refuses=_refuses_quantize)(_quantized)
lowers("QuantizeLinear", domain=CONTRIB, types=_TYPES, refuses=_refuses_quantize)(_quantized)
lowers("DequantizeLinear", since=10, types=_TYPES, refuses=_refuses_dequantize)(_dequantized)
lowers("DequantizeLinear", domain=CONTRIB, types=_TYPES, refuses=_refuses_dequantize)(_dequantized)


def dynamic_codes(x: Any) -> tuple[Any, Any, Any]:
    """Codes of eight bits, scale and zero point for the range of ``x``, zero included."""
    known = torch.nan_to_num(x, nan=0.0)
    if x.numel():
        low, high = known.amin().clamp(max=0), known.amax().clamp(min=0)
    else:
        low = high = x.new_zeros(())
    scale = torch.where(high > low, (high - low) / 255, torch.ones_like(high))
    zero = torch.round(-low / scale).clamp(0, 255)
    return saturated(x / scale, zero, DType.uint8), scale, zero


@lowers("DynamicQuantizeLinear", since=11, types=FLOATS | {DType.uint8})
def dynamic_quantize_linear(call: Call, x: Any) -> Any:
    return dynamic_codes(x)
