"""What Triton has no operator of its own for, by the vendor's library; folds and scans along the second axis."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def expm1(x: Any) -> Any:
    return libdevice.expm1(x)


@triton.jit
def log(x: Any) -> Any:
    return libdevice.log(x)


@triton.jit
def log1p(x: Any) -> Any:
    return libdevice.log1p(x)


@triton.jit
def tanh(x: Any) -> Any:
    return libdevice.tanh(x)


@triton.jit
def sin(x: Any) -> Any:
    return libdevice.sin(x)


@triton.jit
def cos(x: Any) -> Any:
    return libdevice.cos(x)


@triton.jit
def tan(x: Any) -> Any:
    return libdevice.tan(x)


@triton.jit
def asin(x: Any) -> Any:
    return libdevice.asin(x)


@triton.jit
def acos(x: Any) -> Any:
    return libdevice.acos(x)


@triton.jit
def atan(x: Any) -> Any:
    return libdevice.atan(x)


@triton.jit
def sinh(x: Any) -> Any:
    return libdevice.sinh(x)


@triton.jit
def cosh(x: Any) -> Any:
    return libdevice.cosh(x)


@triton.jit
def asinh(x: Any) -> Any:
    return libdevice.asinh(x)


@triton.jit
def acosh(x: Any) -> Any:
    return libdevice.acosh(x)


@triton.jit
def atanh(x: Any) -> Any:
    return libdevice.atanh(x)


@triton.jit
def rint(x: Any) -> Any:
    return libdevice.rint(x)


@triton.jit
def trunc(x: Any) -> Any:
    return libdevice.trunc(x)


@triton.jit
def fmod(a: Any, b: Any) -> Any:
    a, b = tl.broadcast(a, b)
    return libdevice.fmod(a, b)


@triton.jit
def pow(a: Any, b: Any) -> Any:  # noqa: A001
    a, b = tl.broadcast(a, b)
    return libdevice.pow(a, b)


@triton.jit
def atan2(a: Any, b: Any) -> Any:
    a, b = tl.broadcast(a, b)
    return libdevice.atan2(a, b)


@triton.jit
def as_bfloat16(x: Any) -> Any:
    return x.to(tl.bfloat16)


@triton.jit
def _sum(a: Any, b: Any) -> Any:
    return a + b


@triton.jit
def _product(a: Any, b: Any) -> Any:
    return a * b


@triton.jit
def _largest(a: Any, b: Any) -> Any:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _least(a: Any, b: Any) -> Any:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def across_sum(x: Any) -> Any:
    return tl.reduce(x, 1, _sum, keep_dims=True)


@triton.jit
def across_prod(x: Any) -> Any:
    return tl.reduce(x, 1, _product, keep_dims=True)


@triton.jit
def across_max(x: Any) -> Any:
    return tl.reduce(x, 1, _largest, keep_dims=True)


@triton.jit
def across_min(x: Any) -> Any:
    return tl.reduce(x, 1, _least, keep_dims=True)


@triton.jit
def running_sum(x: Any) -> Any:
    return tl.associative_scan(x, 1, _sum)


@triton.jit
def running_prod(x: Any) -> Any:
    return tl.associative_scan(x, 1, _product)


@triton.jit
def running_max(x: Any) -> Any:
    return tl.associative_scan(x, 1, _largest)


@triton.jit
def running_min(x: Any) -> Any:
    return tl.associative_scan(x, 1, _least)
