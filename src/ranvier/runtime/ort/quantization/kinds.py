"""The names by which scripts say what codes, files and ranges are to be like."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from onnx import TensorProto

from ranvier.errors import InvalidConfig, nearest

Kind = TypeVar("Kind", bound=enum.Enum)
Named = TypeVar("Named", bound="_Named")


class _Named(enum.Enum):
    """Shown by its name, and found by it."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls: type[Named], text: str) -> Named:
        if text not in cls.__members__:
            raise InvalidConfig(f"{cls.__name__} has no {text!r}{nearest(str(text), cls.__members__)}")
        return cls[text]


class QuantType(_Named):
    """Numbers that codes are. Activations and weights take those of 8 bits."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    @property
    def tensor_type(self) -> int:
        """ONNX's number for it."""
        found: int = TensorProto.DataType.Value(self.name.removeprefix("Q").upper())
        return found


class QuantFormat(_Named):
    """QDQ: float operators between QuantizeLinear and DequantizeLinear. QOperator: operators on codes."""

    QOperator = 0
    QDQ = 1


class CalibrationMethod(enum.Enum):
    """How ranges of activations are found."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


def kind_of(kind: type[Kind], option: str, value: Any, allowed: tuple[Kind, ...], hint: str = "") -> Kind:
    """An option's value, if it can be had; that of another package's enumeration with the same names will do."""
    name = getattr(value, "name", value)
    found = kind.__members__.get(name) if isinstance(name, str) else None
    if found not in allowed:
        told = ", ".join(f"{kind.__name__}.{each.name}" for each in allowed)
        shown = value if found is None else f"{kind.__name__}.{found.name}"
        raise InvalidConfig(f"{option}: {shown} is not supported, it must be {told}{f'; {hint}' if hint else ''}")
    return found


__all__ = ["CalibrationMethod", "QuantFormat", "QuantType", "kind_of"]
