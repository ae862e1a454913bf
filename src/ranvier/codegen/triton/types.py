"""Element types as Triton has them, in memory and in registers."""

from __future__ import annotations

import math

import numpy as np

from ranvier.codegen.loops.ir import Scalar
from ranvier.dtypes import DType
from ranvier.errors import NotSupported

# memory -> (Triton's name, torch's name); a bool is a byte that is not 0
_MEMORY: dict[DType, tuple[str, str]] = {
    DType.bool: ("int8", "int8"),
    DType.float8_e4m3fn: ("float8e4nv", "float8_e4m3fn"),
    DType.float8_e5m2: ("float8e5", "float8_e5m2"),
    **{d: (d.name, d.name) for d in (DType.float16, DType.bfloat16, DType.float32, DType.float64)},
    **{d: (d.name, d.name) for d in (DType.int8, DType.int16, DType.int32, DType.int64)},
    **{d: (d.name, d.name) for d in (DType.uint8, DType.uint16, DType.uint32, DType.uint64)},
}
# computed in float32; rounded where they are stored, and by casts
NARROW = frozenset({DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.float8_e5m2})


def memory(dtype: DType) -> str:
    """The element type of a pointer: ``tl.…``."""
    return f"tl.{_names(dtype)[0]}"


def torch_name(dtype: DType) -> str:
    """The torch dtype that stands for the elements in memory."""
    return _names(dtype)[1]


def _names(dtype: DType) -> tuple[str, str]:
    found = _MEMORY.get(dtype)
    if found is None:
        raise NotSupported(f"no Triton code for {dtype}")
    return found


def register(dtype: DType) -> str:
    """The type that values have while they are computed with: ``tl.…``."""
    if dtype in NARROW:
        return "tl.float32"
    return "tl.int1" if dtype is DType.bool else memory(dtype)


def folded(dtype: DType) -> str:
    """The type in which values are folded: integers of less than 32 bits, and bools, in 32."""
    if dtype is DType.bool:
        return "tl.int32"
    if dtype.is_integer and dtype.bits < 32:
        return "tl.int32" if is_signed(dtype) else "tl.uint32"
    return register(dtype)


def is_signed(dtype: DType) -> bool:
    return dtype.name.startswith("int")


def literal(value: Scalar, dtype: DType) -> str:
    """A number as Python writes it, rounded to what the type can hold."""
    if dtype is DType.bool:
        return str(bool(value))
    if not dtype.is_float:
        return str(int(value)) if value >= 0 else f"({int(value)})"
    number = float(np.asarray(value).astype(dtype.numpy))
    if math.isnan(number) or math.isinf(number):
        return f'float("{number}")'
    return repr(number) if math.copysign(1.0, number) > 0 else f"({number!r})"


def constant(value: Scalar, dtype: DType) -> str:
    """The number as a value of its register type."""
    return f"tl.full((), {literal(value, dtype)}, {register(dtype)})"
