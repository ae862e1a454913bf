"""Operators with codes of eight bits on both sides: computed as float32, coded once.

What is linear in the codes is a whole number times one factor, a scale by another: a number halfway between two codes
is one here too, and becomes the even code.
"""

from __future__ import annotations

import math
from typing import Any

from ranvier.dtypes import DType
from ranvier.errors import ShapeMismatch
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.pooling import averaged
from ranvier.providers.cuda.ops.quantization import less, real, saturated
from ranvier.providers.cuda.table import BOOL, CONTRIB, Call, lowers

_TYPES = frozenset({DType.int8, DType.uint8, DType.float32})


def rounded(call: Call, y: Any, zero: Any) -> Any:
    """The nearest codes of numbers in steps of their scale."""
    return saturated(y, None if zero is None else zero.reshape(()), call.dtype())


def coded(call: Call, y: Any, scale: Any, zero: Any) -> Any:
    return rounded(call, y / scale.reshape(()), zero)


def steps(x: Any, scale: Any, zero: Any, step: Any) -> Any:
    """The numbers that codes stand for, in steps of another scale."""
    return real(x, scale.reshape(()) / step.reshape(()), zero)


def _differences(x: Any, zero: Any) -> Any:
    return less(x, None if zero is None else zero.reshape(()))


@lowers("QLinearAdd", domain=CONTRIB, types=_TYPES)
def qlinear_add(call: Call, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sc: Any, zc: Any = None) -> Any:
    return rounded(call, steps(a, sa, za, sc) + steps(b, sb, zb, sc), zc)


@lowers("QLinearMul", domain=CONTRIB, types=_TYPES)
def qlinear_mul(call: Call, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sc: Any, zc: Any = None) -> Any:
    product = _differences(a, za) * _differences(b, zb)
    return rounded(call, product.float() * (sa.reshape(()) * sb.reshape(()) / sc.reshape(())), zc)


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
    return rounded(call, torch.where(condition, steps(x, sx, zx, sz), steps(y, sy, zy, sz)), zz)


@lowers("QLinearConcat", domain=CONTRIB, types=_TYPES)
def qlinear_concat(call: Call, sy: Any, zy: Any, *inputs: Any) -> Any:
    triples = zip(inputs[::3], inputs[1::3], inputs[2::3])
    return torch.cat([rounded(call, steps(*each, sy), zy) for each in triples], dim=call.attr("axis"))


@lowers("QLinearSoftmax", domain=CONTRIB, types=_TYPES)
def qlinear_softmax(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any) -> Any:
    """Along one axis, or before opset 13 over all axes from it on."""
    axis = call.attr("axis", -1) % x.ndim
    if x.numel() == 0:
        return x
    rows = x
    if call.attr("opset") < 13:
        rows, axis = x.reshape(math.prod(x.shape[:axis]), -1), 1
    codes = rows.to(torch.int32)
    weights = torch.exp(real(codes - codes.amax(dim=axis, keepdim=True), sx, None))  # a zero point would cancel
    return coded(call, weights / weights.sum(dim=axis, keepdim=True), sy, zy).reshape(x.shape)


# -- means ------------------------------------------------------------------------------------------------------------


def _mean(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any, axes: tuple[int, ...], keep: bool) -> Any:
    """Of sums that are exact. The number of codes is on the device: by one of the host it would multiply the
    reciprocal."""
    total = _differences(x, zx).sum(dim=axes, keepdim=keep, dtype=torch.int64).to(torch.float64)
    count = math.prod(x.shape[axis] for axis in axes)
    return rounded(call, steps(total / total.new_full((), count), sx, None, sy), zy)


@lowers("QLinearReduceMean", domain=CONTRIB, types=_TYPES)
def qlinear_reduce_mean(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    axes = tuple(call.attr("axes") or range(x.ndim))
    return _mean(call, x, sx, zx, sy, zy, axes, call.flag("keepdims", 1))


@lowers("QLinearGlobalAveragePool", domain=CONTRIB, types=_TYPES)
def qlinear_global_average_pool(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any) -> Any:
    if x.ndim < 3:
        raise ShapeMismatch(f"QLinearGlobalAveragePool: expected spatial axes, got {list(x.shape)}")
    spatial = tuple(range(1, x.ndim - 1) if call.flag("channels_last") else range(2, x.ndim))
    return _mean(call, x, sx, zx, sy, zy, spatial, True)


@lowers("QLinearAveragePool", domain=CONTRIB, types=_TYPES)
def qlinear_average_pool(call: Call, x: Any, sx: Any, zx: Any, sy: Any, zy: Any = None) -> Any:
    last = call.flag("channels_last")
    codes = _differences(x, zx).to(torch.float64)  # which rounds no sum of them
    y = rounded(call, steps(averaged(call, codes.movedim(-1, 1) if last else codes), sx, None, sy), zy)
    return y.movedim(1, -1) if last else y
