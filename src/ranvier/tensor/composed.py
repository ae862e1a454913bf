"""Functions of single elements that no one operator is: put together from several, so that they fuse and have
gradients."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.tensor.core import Tensor, as_tensor, both, call
from ranvier.tensor.elementwise import abs as absolute
from ranvier.tensor.elementwise import (
    add,
    atan,
    ceil,
    divide,
    equal,
    exp,
    floor,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    logical_and,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    positive,
    sqrt,
    square,
    subtract,
    where,
)
from ranvier.tensor.expr import spec
from ranvier.tensor.host import hosted
from ranvier.tensor.manipulate import astype, broadcast_to
from ranvier.tensor.types import COMPLEX, FLOATS, floating, kind_of

_WORDS = {16: DType.int16, 32: DType.int32, 64: DType.int64}


def trunc(x: Any, /) -> Tensor:
    """Each element without what stands behind its point."""
    own = as_tensor(x)
    return positive(own) if kind_of(own.dtype) == 1 else where(less(own, 0), ceil(own), floor(own))


def expm1(x: Any, /) -> Tensor:
    """exp(x) - 1, exact for small x too."""
    own = _float(x)
    if own.dtype in COMPLEX:
        return hosted(np.expm1, own)
    grown = exp(own)
    less_one = subtract(grown, 1)
    # the rounding of exp(x) is in both factors, and goes out
    exact = multiply(less_one, divide(own, log(grown)))
    plain = logical_or(equal(less_one, -1), logical_or(isinf(grown), isnan(grown)))
    return where(equal(grown, 1), own, where(plain, less_one, exact))


def log1p(x: Any, /) -> Tensor:
    """log(1 + x), exact for small x too."""
    own = _float(x)
    if own.dtype in COMPLEX:
        return hosted(np.log1p, own)
    more = add(own, 1)
    plain = log(more)
    exact = multiply(plain, divide(own, subtract(more, 1)))
    return where(equal(more, 1), own, where(isinf(more), plain, exact))


def logaddexp(x1: Any, x2: Any, /) -> Tensor:
    """log(exp(x1) + exp(x2)), without leaving the range of numbers on the way."""
    x, y, _, _ = _floats(x1, x2)
    larger = maximum(x, y)
    apart = where(equal(x, y), 0.0, negative(absolute(subtract(x, y))))
    return add(larger, log1p(exp(apart)))


def hypot(x1: Any, x2: Any, /) -> Tensor:
    """The square root of the sum of squares, without leaving the range of numbers on the way."""
    x, y, _, _ = _floats(x1, x2)
    a, b = absolute(x), absolute(y)
    longer, shorter = maximum(a, b), minimum(a, b)
    ratio = divide(shorter, where(equal(longer, 0), 1.0, longer))
    found = multiply(longer, sqrt(add(square(ratio), 1)))
    return where(logical_or(isinf(a), isinf(b)), math.inf, found)


def signbit(x: Any, /) -> Tensor:
    """Whether the sign is set: also that of zeros and of NaN."""
    own = as_tensor(x)
    if own.dtype not in FLOATS:
        return less(own, 0)
    word = _WORDS[own.dtype.bits]
    return less(call(spec("BitCast", (("to", word.onnx),)), (own,), word, own.shape), 0)


def copysign(x1: Any, x2: Any, /) -> Tensor:
    """The first with the sign of the second."""
    x, y, _, _ = _floats(x1, x2)
    size = absolute(x)
    return where(signbit(y), negative(size), size)


def nextafter(x1: Any, x2: Any, /) -> Tensor:
    """The number next to the first on the way to the second."""
    x, y, _, _ = _floats(x1, x2)
    return hosted(np.nextafter, x, y)


def atan2(x1: Any, x2: Any, /) -> Tensor:
    """The angle of the point (x2, x1), in all four quadrants."""
    y, x, _, _ = _floats(x1, x2)
    endless = logical_and(isinf(x), isinf(y))
    top, bottom = where(endless, copysign(1.0, y), y), where(endless, copysign(1.0, x), x)
    origin = logical_and(equal(y, 0), equal(x, 0))
    angle = atan(divide(top, where(origin, 1.0, bottom)))
    behind = signbit(x)
    turned = add(angle, copysign(math.pi, y))
    at_origin = where(behind, copysign(math.pi, y), y)
    return where(origin, at_origin, where(behind, turned, angle))


def clip(x: Any, /, min: Any = None, max: Any = None) -> Tensor:
    """Each element, at least ``min`` and at most ``max``."""
    own = as_tensor(x)
    found = positive(own) if min is None and max is None else own
    kind = own.dtype
    for bound, chosen in ((min, maximum), (max, minimum)):
        if bound is not None:
            limit = bound if isinstance(bound, int | float) and not isinstance(bound, bool) else as_tensor(bound)
            found = chosen(found, _inside(limit, kind))
    return found if found.dtype is kind else astype(found, kind)


def _inside(limit: Any, kind: DType) -> Any:
    """A bound that the type can hold: others let everything pass on their side."""
    if kind_of(kind) != 1 or not isinstance(limit, int | float):
        return limit
    info = np.iinfo(kind.numpy)
    return int(builtins.min(builtins.max(limit, info.min), info.max))


def isclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Whether elements are equal up to a tolerance."""
    x, y, _, shape = _floats(x1, x2)
    near = less_equal(absolute(subtract(x, y)), add(multiply(absolute(y), rtol), atol))
    found = logical_or(equal(x, y), logical_and(near, logical_and(isfinite(x), isfinite(y))))
    if equal_nan:
        found = logical_or(found, logical_and(isnan(x), isnan(y)))
    return broadcast_to(found, shape)


def _float(x: Any) -> Tensor:
    own = as_tensor(x)
    return astype(own, floating(own.dtype))


def _floats(x1: Any, x2: Any) -> tuple[Tensor, Tensor, DType, tuple[int, ...]]:
    x, y, dtype, shape = both(x1, x2)
    kind = floating(dtype)
    return astype(x, kind), astype(y, kind), kind, shape


_OF_TENSORS = True
