"""What schemes take: real numbers, all of them finite and within reach of float32, which scales are kept in."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType, of
from ranvier.errors import DTypeMismatch, InvalidConfig
from ranvier.quantize.blocks import Array


def any_numbers(array: Any) -> tuple[Array, DType]:
    """An array of real numbers, infinite ones and NaN too, and their type."""
    try:
        given = np.asarray(array)
    except ValueError as error:  # lists of different lengths
        raise DTypeMismatch(f"no array of numbers can be made of {type(array).__name__}: {error}") from None
    dtype = of(given)
    if dtype.is_complex or dtype is DType.string:
        raise DTypeMismatch(f"real numbers can be quantized, {dtype} cannot")
    return given, dtype


def real_numbers(array: Any, kind: Any = np.float64) -> tuple[Array, DType]:
    """The numbers to be coded, as ``kind``, and the type that they are to be read back in.

    Whole numbers read back as float32: what a code stands for is seldom a whole number.
    """
    given, dtype = any_numbers(array)
    with np.errstate(over="ignore"):
        values: Array = given.astype(kind)
    most = float(np.finfo(np.float32).max)
    if values.size and not (-most <= float(values.min()) and float(values.max()) <= most):  # NaN is in no order
        raise InvalidConfig("numbers that are infinite or NaN, or beyond the range of float32, cannot be quantized")
    return values, dtype if dtype.is_float else DType.float32
