"""The functions of :mod:`ranvier.codegen.triton.native` for Triton's interpreter, by NumPy.

The interpreter has no library of the vendor's, and folds by calling Python once per element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Function = Callable[..., Any]


def _made(data: Any, like: Any) -> Any:
    """An interpreted tensor of the same element type as another one."""
    scalar = like.dtype
    shape = list(like.shape)
    data = np.asarray(data).astype(like.handle.data.dtype)
    kind = tl.block_type(scalar, list(data.shape)) if shape else scalar
    return tl.tensor(TensorHandle(data, scalar), kind)


def _elementwise(function: Function) -> Function:
    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            like = max(args, key=lambda a: len(a.shape))
            return _made(function(*(a.handle.data for a in args)), like)

    return call


def _across(function: Function) -> Function:
    def call(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return _made(function(x.handle.data, axis=1, keepdims=True), x)

    return call


def _running(function: Function) -> Function:
    def call(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return _made(function(x.handle.data, axis=1), x)

    return call


def as_bfloat16(x: Any) -> Any:
    """Rounded to the nearest, as GPUs do; the interpreter itself cuts bits off. It keeps the bits as uint16."""
    with np.errstate(all="ignore"):
        bits = x.handle.data.astype(ml_dtypes.bfloat16).view(np.uint16)
    shape = list(x.shape)
    kind = tl.block_type(tl.bfloat16, list(bits.shape)) if shape else tl.bfloat16
    return tl.tensor(TensorHandle(bits, tl.bfloat16), kind)


def dot_bfloat16(a: Any, b: Any, total: Any) -> Any:
    """The interpreter would multiply the bits."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total)


expm1, log, log1p = _elementwise(np.expm1), _elementwise(np.log), _elementwise(np.log1p)
tanh, sin, cos, tan = _elementwise(np.tanh), _elementwise(np.sin), _elementwise(np.cos), _elementwise(np.tan)
asin, acos, atan = _elementwise(np.arcsin), _elementwise(np.arccos), _elementwise(np.arctan)
sinh, cosh = _elementwise(np.sinh), _elementwise(np.cosh)
asinh, acosh, atanh = _elementwise(np.arcsinh), _elementwise(np.arccosh), _elementwise(np.arctanh)
rint, trunc, fmod = _elementwise(np.rint), _elementwise(np.trunc), _elementwise(np.fmod)
pow, atan2 = _elementwise(np.power), _elementwise(np.arctan2)
across_sum, across_prod = _across(np.add.reduce), _across(np.multiply.reduce)
across_max, across_min = _across(np.maximum.reduce), _across(np.minimum.reduce)
running_sum, running_prod = _running(np.add.accumulate), _running(np.multiply.accumulate)
running_max, running_min = _running(np.maximum.accumulate), _running(np.minimum.accumulate)
