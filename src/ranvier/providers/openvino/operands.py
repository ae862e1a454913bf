"""What is asked about the operands of nodes, and about the processor."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType
from ranvier.providers.claims import SMALL


def small_content(value: Value | None) -> np.ndarray[Any, Any] | None:
    """What a small constant holds."""
    const = value.const if value is not None else None
    return const.numpy() if const is not None and const.size <= SMALL else None


def element_type(value: Value | None) -> np.dtype[Any] | None:
    if value is None or not isinstance(value.type, TensorType) or value.type.dtype is None:
        return None
    return value.type.dtype.numpy


def on_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


__all__ = ["element_type", "on_arm", "small_content"]
