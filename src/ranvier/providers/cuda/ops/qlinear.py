"""Operators with codes of eight bits on both sides: computed as float32, coded once."""

from __future__ import annotations

from typing import Any

from ranvier.dtypes import DType
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.quantization import saturated
from ranvier.providers.cuda.table import BOOL, CONTRIB, Call, lowers

_TYPES = frozenset({DType.int8, DType.uint8, DType.float32})


def real(x: Any, scale: Any, zero: Any) -> Any:
    codes = x.float() if zero is None else x.float() - zero.reshape(()).float()
    return codes * scale.reshape(())


def coded(call: Call, y: Any, scale: Any, zero: Any) -> Any:
    return saturated(y / scale.reshape(()), None if zero is None else zero.reshape(()), call.dtype())


def _binary(function: Any) -> Any:
    def run(call: Call, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sc: Any, zc: Any = None) -> Any:
        return coded(call, function(real(a, sa, za), real(b, sb, zb)), sc, zc)

    return run


lowers("QLinearAdd", domain=CONTRIB, types=_TYPES)(_binary(lambda a, b: a + b))
lowers("QLinearMul", domain=CONTRIB, types=_TYPES)(_binary(lambda a, b: a * b))


@lowers("QLinearSigmoid", domain=CONTRIB, types=_TYPES)
def qlinear_sigmoid(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    return coded(call, torch.sigmoid(real(x, sx, zx)), sy, zy)


@lowers("QLinearLeakyRelu", domain=CONTRIB, types=_TYPES)
def qlinear_leaky_relu(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    return coded(call, functional.leaky_relu(real(x, sx, zx), call.attr("alpha", 0.01)), sy, zy)


@lowers("QLinearWhere", domain=CONTRIB, types=_TYPES | BOOL)
def qlinear_where(
    call: Call, condition: Any, x: Any, sx: Any, zx: Any, y: Any, sy: Any, zy: Any, sz: Any, zz: Any
) -> Any:
    return coded(call, torch.where(condition, real(x, sx, zx), real(y, sy, zy)), sz, zz)


@lowers("QLinearReduceMean", domain=CONTRIB, types=_TYPES)
def qlinear_reduce_mean(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    axes = tuple(call.attr("axes") or range(x.ndim))
    return coded(call, real(x, sx, zx).mean(dim=axes, keepdim=call.flag("keepdims", 1)), sy, zy)


@lowers("QLinearConcat", domain=CONTRIB, types=_TYPES)
def qlinear_concat(call: Call, sy: Any, zy: Any, *inputs: Any) -> Any:
    parts = []
    for x, scale, zero in zip(inputs[::3], inputs[1::3], inputs[2::3]):
        same = (scale.reshape(()) == sy.reshape(())) & (zero.reshape(()) == zy.reshape(()))
        parts.append(torch.where(same, x.to(torch.int32), coded(call, real(x, scale, zero), sy, zy)))
    return torch.cat(parts, dim=call.attr("axis"))


@lowers("QLinearGlobalAveragePool", domain=CONTRIB, types=_TYPES)
def qlinear_global_average_pool(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any) -> Any:
    spatial = tuple(range(1, x.ndim - 1) if call.flag("channels_last") else range(2, x.ndim))
    return coded(call, real(x, sx, zx).mean(dim=spatial, keepdim=True), sy, zy)
