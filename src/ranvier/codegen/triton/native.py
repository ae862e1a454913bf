"""What Triton has no operator of its own for, by the vendor's library; folds and scans along the second axis."""
# Triton looks annotations up when it compiles a function, so what kernels call has none.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def rint(x):
    return libdevice.rint(x)


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def fmod(a, b):
    a, b = tl.broadcast(a, b)
    return libdevice.fmod(a, b)


@triton.jit
def pow(a, b):
    a, b = tl.broadcast(a, b)
    return libdevice.pow(a, b)


@triton.jit
def atan2(a, b):
    a, b = tl.broadcast(a, b)
    return libdevice.atan2(a, b)


@triton.jit
def as_bfloat16(x):
    return x.to(tl.bfloat16)


@triton.jit
def dot_bfloat16(a, b, total):
    return tl.dot(a, b, total)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def across_sum(x):
    return tl.reduce(x, 1, _sum, keep_dims=True)


@triton.jit
def across_prod(x):
    return tl.reduce(x, 1, _product, keep_dims=True)


@triton.jit
def across_max(x):
    return tl.reduce(x, 1, _largest, keep_dims=True)


@triton.jit
def across_min(x):
    return tl.reduce(x, 1, _least, keep_dims=True)


@triton.jit
def running_sum(x):
    return tl.associative_scan(x, 1, _sum)


@triton.jit
def running_prod(x):
    return tl.associative_scan(x, 1, _product)


@triton.jit
def running_max(x):
    return tl.associative_scan(x, 1, _largest)


@triton.jit
def running_min(x):
    return tl.associative_scan(x, 1, _least)
