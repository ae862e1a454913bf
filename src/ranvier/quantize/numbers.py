"""What schemes take: real numbers, all of them finite and within reach of float32, which scales are kept in."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidConfig
from ranvier.quantize.blocks import Array


def real_numbers(array: Any, kind: Any = np.float64) -> tuple[Array, DType]:
    """The numbers to be coded, as ``kind``, and the type that they are to be read back in.

    Whole numbers read back as float32: what a code stands for is seldom a whole number.
    """
    given = np.asarray(array)
    dtype = of(given)
    if dtype.is_complex or dtype is DType.string:
        raise DTypeMismatch(f"real numbers can be quantized, {dtype} cannot")
    with np.errstate(over="ignore"):
        values: Array = given.astype(kind)
    most = float(np.finfo(np.float32).max)
    if values.size and not (-most <= float(values.min()) and float(values.max()) <= most):  # NaN is in no order
        raise InvalidConfig("numbers that are infinite or NaN, or beyond the range of float32, cannot be quantized")
    return values, dtype if dtype.is_float else DType.float32
