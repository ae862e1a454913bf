"""Numbers of one element type as those of another: the nearest ones, within the range of the type where it is one of
eight bits or of whole numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import WeightError

Array = np.ndarray[Any, Any]
_EXACT = 1 << 53  # up to it float64 holds all whole numbers


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
    if target.is_float and target.bits <= 16 and target is not DType.float16:  # which NumPy itself has
        array = _narrowed(array, source)
        array = _within(array, target) if target.bits <= 8 else array
    elif target.is_integer and source.is_float:
        array = _whole(array.astype(np.float64), target)
    elif target.is_integer and source.is_integer:
        array = _cut(array, source, target)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what is out of reach is infinite
        return np.asarray(array).astype(target.numpy)


def _narrowed(array: Array, source: DType) -> Array:
    """Numbers in float32, by way of which ml_dtypes makes those of fewer bits. What float32 cannot hold becomes that
    one of its two neighbours whose last bit is set: the nearest might lie in the middle between two numbers of few
    bits, and nobody could tell any more on which side of it the number was."""
    if source is not DType.float64 and not source.is_integer:
        return array.astype(np.float32)
    if source.is_integer and source.bits > 32:
        large = array > _EXACT if source is DType.uint64 else (array > _EXACT) | (array < -_EXACT)
        # float64 holds those whose last bits say no more than that there are some
        array = np.where(large & (array % 4096 != 0), array - array % 4096 + 2048, array)
    array = array.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        near: Array = np.asarray(array.astype(np.float32))
    even = (near != array) & ~np.isnan(array) & (near.view(np.uint32) & 1 == 0)
    towards = np.where(near < array, np.float32(np.inf), np.float32(-np.inf))
    found: Array = np.where(even, np.nextafter(near, towards), near)
    return found


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


def product(tensor: str, array: Array, factor: Array, dtype: DType) -> Array:
    """Whole numbers times whole numbers: exactly that, or WeightError where the type of the tensor cannot hold it."""
    import ml_dtypes

    if not array.size:
        return array
    array = array.astype(np.int8) if dtype.bits < 8 else array
    own, others = ((int(each.min()), int(each.max())) for each in (array, factor))
    ends = [a * b for a in own for b in others]
    reach = min(*own, *others, *ends), max(*own, *others, *ends)
    fitting = [w for w in (np.int64, np.uint64) if np.iinfo(w).min <= reach[0] and reach[1] <= np.iinfo(w).max]
    wide = np.dtype(fitting[0] if fitting else object)
    found = np.asarray(array.astype(wide) * factor.astype(wide))
    limits = ml_dtypes.iinfo(dtype.numpy)
    for number in (int(found.min()), int(found.max())):
        if not limits.min <= number <= limits.max:
            raise WeightError(f"tensor {tensor!r}: scaled, it has the number {number}, which is none of {dtype}")
    return found.astype(np.uint64 if dtype is DType.uint64 else np.int64).astype(dtype.numpy)


def rounded_product(array: Array, factor: Array, dtype: DType) -> Array:
    """Whole numbers times others: the nearest whole ones within the range of the type of the tensor."""
    import ml_dtypes

    wide, factor = array.astype(np.float64), factor.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.asarray(wide * factor)
    found = converted(products, DType.float64, dtype)
    if dtype.bits <= 32:
        return found
    limits = ml_dtypes.iinfo(dtype.numpy)
    inexact = (np.abs(wide) >= _EXACT) | (np.abs(products) >= _EXACT)
    for at in map(tuple, np.argwhere(inexact & np.isfinite(factor))):  # the few that float64 does not hold
        number = round(int(array[at]) * Fraction(float(factor[at])))
        found[at] = min(max(number, limits.min), limits.max)
    return found


def _cut(array: Array, source: DType, target: DType) -> Array:
    """Whole numbers within the range of another type of them."""
    import ml_dtypes

    own, others = ml_dtypes.iinfo(source.numpy), ml_dtypes.iinfo(target.numpy)
    least, most = max(own.min, others.min), min(own.max, others.max)
    array = array.astype(np.int8) if source.bits < 8 else array  # not all of those become each other
    return array if (least, most) == (own.min, own.max) else np.clip(array, least, most)
