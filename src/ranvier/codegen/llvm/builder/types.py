"""Types and constants as LLVM spells them."""

from __future__ import annotations

import struct
from typing import Any

FLOAT_TYPES = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


def vector(element: str, lanes: int) -> str:
    """The vector type, or the scalar one for a single lane."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def lanes_of(kind: str) -> int:
    return int(kind[1 : kind.index(" ")]) if kind[0] == "<" else 1


def element_of(kind: str) -> str:
    return kind[kind.index(" x ") + 3 : -1] if kind[0] == "<" else kind


def size_of(element: str) -> int:
    """Bytes of a scalar type in memory."""
    if element in FLOAT_TYPES:
        return FLOAT_TYPES[element] // 8
    if element == "ptr":
        return 8
    return max(1, int(element[1:]) // 8)


def literal(element: str, value: Any) -> str:
    """A constant as LLVM writes it; floats by their bits, so nothing is lost. Integers may have a sign or not."""
    if element == "float":
        bits = struct.unpack("<f", struct.pack("<f", _clamped(value)))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', bits))[0]:016X}"
    if element == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"
    if element == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', float(value)))[0]:04X}"
    if element == "bfloat":
        bits32 = struct.unpack("<I", struct.pack("<f", _clamped(value)))[0]
        return f"0xR{bits32 >> 16:04X}"
    if element == "i1":
        return "true" if value else "false"
    if element == "ptr":
        return "null"
    number, width = int(value), int(element[1:])
    return str(number - (1 << width) if 1 << (width - 1) <= number < 1 << width else number)  # by the same bits


def _clamped(value: float) -> float:
    """float(value), with what does not fit float32 as an infinity instead of an error."""
    value = float(value)
    if value != value or abs(value) <= 3.4028235677973366e38:
        return value
    return float("inf") if value > 0 else float("-inf")


def mangled(kind: str) -> str:
    """The suffix of overloaded intrinsics: ``<16 x float>`` is ``v16f32``."""
    element = element_of(kind)
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}.get(element, element)
    return f"v{lanes_of(kind)}{short}" if kind[0] == "<" else short
