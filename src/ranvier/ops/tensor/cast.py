"""Cast between all element types: numbers, strings, and the narrow formats with their saturation rules."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidValue
from ranvier.ops.registry import Array, op

# Formats that the `saturate` attribute speaks about, beside float8_e8m0fnu.
_FLOAT8 = frozenset([DType.float8_e4m3fn, DType.float8_e4m3fnuz, DType.float8_e5m2, DType.float8_e5m2fnuz])


@op("Cast", since=1, traits=("elementwise",))
def cast_(x: Array, *, to: int | str, saturate: int = 1, round_mode: str = "up") -> Array:
    """At opset 1 ``to`` is the type's name in capitals, later its number."""
    return cast(x, dtypes.of(to.lower() if isinstance(to, str) else to), bool(saturate), round_mode)


@op("CastLike", since=15, traits=("elementwise",))
def cast_like(x: Array, target: Array, *, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, dtypes.of(target), bool(saturate), round_mode, op_name="CastLike")


def cast(x: Array, target: DType, saturate: bool = True, round_mode: str = "up", *, op_name: str = "Cast") -> Array:
    """A new array with the elements of ``x`` as ``target``.

    Floats are cut toward zero on their way to integers; integers lose their upper bits. ``saturate`` bounds what is
    too large for a float8; ``round_mode`` is for float8_e8m0fnu alone.
    """
    source = dtypes.of(x)
    if DType.string in (source, target):
        if source is target:
            return x.copy()
        if target is DType.string:
            return _printed(x, source, op_name)
        return _parsed(x, target, saturate, round_mode, op_name)
    if source.is_complex and not target.is_complex:
        raise DTypeMismatch(f"{op_name}: {source} cannot become {target}")
    if target is DType.float8_e8m0fnu and source is not target:
        return _powers_of_two(x, saturate, round_mode, op_name)
    if target in _FLOAT8 and saturate:
        largest = float(ml_dtypes.finfo(target.numpy).max)
        x = np.asarray(np.clip(x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32), -largest, largest))
    elif 1 not in (x.dtype.isbuiltin, target.numpy.isbuiltin) and source is not target:
        # ml_dtypes converts to and from NumPy's own types, but not between each pair of its own
        x = x.astype(np.float32)  # holds every value of the narrow formats
    return x.astype(target.numpy)


def _powers_of_two(x: Array, saturate: bool, round_mode: str, op_name: str) -> Array:
    """Rounding to float8_e8m0fnu, which is an exponent alone: bytes 0 to 254 stand for 2^-127 to 2^127, 255 for NaN.

    The sign is dropped. Zero is below the range, as every value under 2^-127.
    """
    values = np.abs(x.astype(np.float64))
    fraction, exponent = np.frexp(values)  # values = fraction * 2^exponent with fraction in [1/2, 1)
    if round_mode == "up":
        exponent = np.where(fraction > 0.5, exponent, exponent - 1)
    elif round_mode == "down":
        exponent = exponent - 1
    elif round_mode == "nearest":
        exponent = np.where(fraction >= 0.75, exponent, exponent - 1)
    else:
        raise InvalidValue(f"{op_name}: round_mode must be up, down or nearest, got {round_mode!r}", op=op_name)
    exponent = np.where(values == 0, -128, np.where(np.isinf(values), 128, exponent))
    invalid = np.isnan(values)
    if not saturate:
        invalid |= (exponent < -127) | (exponent > 127)
    code = np.where(invalid, 255, np.clip(exponent, -127, 127) + 127)
    return code.astype(np.uint8).view(DType.float8_e8m0fnu.numpy)


# -- strings --------------------------------------------------------------------------------------------------------


def _printed(x: Array, source: DType, op_name: str) -> Array:
    """Numbers as text: plain decimals with the fewest digits that read back the same, NaN, INF and -INF."""
    if source is DType.bool:
        texts = ["1" if value else "0" for value in x.ravel()]
    elif source.is_integer:
        texts = [str(int(value)) for value in x.ravel()]
    elif source.is_float:
        values = x if x.dtype.kind == "f" and x.dtype.itemsize > 1 else x.astype(np.float32)
        texts = [_decimal(value) for value in values.ravel()]
    else:
        raise DTypeMismatch(f"{op_name}: {source} cannot become a string")
    return _strings(texts, x.shape)


def _decimal(value: np.floating[Any]) -> str:
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "INF" if value > 0 else "-INF"
    return np.format_float_positional(value, unique=True, trim="-")


def _strings(texts: list[str], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array.reshape(shape)


def _parsed(x: Array, target: DType, saturate: bool, round_mode: str, op_name: str) -> Array:
    texts = [str(text).strip() for text in x.ravel()]
    if target.is_integer:
        whole = [_integer(text, target, op_name) & (1 << 64) - 1 for text in texts]
        numbers = np.array(whole, dtype=np.uint64)  # what a narrower integer cannot hold is cut off by the cast
    else:
        numbers = np.array([_number(text, target, op_name) for text in texts], dtype=np.float64)
    return cast(numbers.reshape(x.shape), target, saturate, round_mode, op_name=op_name)


def _integer(text: str, target: DType, op_name: str) -> int:
    if text.lstrip("+-").isdecimal():
        return int(text)  # exact where a float is not
    number = _number(text, target, op_name)
    if not math.isfinite(number):
        raise InvalidValue(f"{op_name}: {text!r} has no value in {target}", op=op_name)
    return int(number)


def _number(text: str, target: DType, op_name: str) -> float:
    try:
        if "_" in text:  # Python's literals allow it, the standard's do not
            raise ValueError
        return float(text)
    except ValueError:
        raise InvalidValue(f"{op_name}: {text!r} is not a number, so it cannot become {target}", op=op_name) from None
