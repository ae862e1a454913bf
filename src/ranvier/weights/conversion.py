"""Numbers of one element type as those of another: the nearest ones, within the range of the type where it is one of
eight bits or of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import WeightError

Array = np.ndarray[Any, Any]


def check_convertible(tensor: str, source: DType, target: DType) -> None:
    """WeightError where nothing sensible would come of it."""
    if source is target:
        return
    if DType.string in (source, target):
        raise WeightError(f"tensor {tensor!r}: text and numbers do not become each other ({source} to {target})")
    if source.is_complex and not target.is_complex:
        raise WeightError(f"tensor {tensor!r} is {source}: as {target} it would lose its imaginary part")


def converted(array: Array, source: DType, target: DType) -> Array:
    """The same numbers in another type; of what is no number (NaN), zero where there are only whole ones."""
    array = np.asarray(array)  # what NumPy computes of an array without axes is none
    if array.dtype == target.numpy:
        return array
    if target.is_float and target.bits <= 8:
        array = _within(array.astype(np.float32), target)
    elif target.is_integer and source.is_float:
        array = _whole(array.astype(np.float64), target)
    elif target.is_integer and source.is_integer:
        array = _cut(array, source, target)
    return np.asarray(array).astype(target.numpy)


def _within(array: Array, target: DType) -> Array:
    import ml_dtypes

    most = float(ml_dtypes.finfo(target.numpy).max)
    return np.clip(array, -most, most)


def _whole(array: Array, target: DType) -> Array:
    """The nearest numbers of an integer type: NumPy would cut off what is behind the point, and turn over what does
    not fit."""
    import ml_dtypes

    limits = ml_dtypes.iinfo(target.numpy)
    most = float(limits.max)
    if int(most) > limits.max:  # of 64 bits
        most = float(np.nextafter(most, 0.0))
    found: Array = np.nan_to_num(np.clip(np.rint(array), float(limits.min), most))
    return found


def _cut(array: Array, source: DType, target: DType) -> Array:
    """Whole numbers within the range of another type of them."""
    import ml_dtypes

    own, others = ml_dtypes.iinfo(source.numpy), ml_dtypes.iinfo(target.numpy)
    least, most = max(own.min, others.min), min(own.max, others.max)
    array = array.astype(np.int8) if source.bits < 8 else array  # not all of those become each other
    return array if (least, most) == (own.min, own.max) else np.clip(array, least, most)
