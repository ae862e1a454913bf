"""The mlx package, imported when something of it is first used, and arrays on their way in and out."""

from __future__ import annotations

import importlib
import os
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.codegen.storage import row_major
from ranvier.dtypes import DType
from ranvier.providers.base import Array


class _Library:
    """``mlx.core`` by the same names. Importing it wakes the driver of the GPU, so nobody pays for a table of
    operators with that."""

    def __getattr__(self, name: str) -> Any:
        # float32 means float32: where the hardware offers fewer bits of mantissa for products, mlx would take them
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        found = getattr(importlib.import_module("mlx.core"), name)
        self.__dict__[name] = found
        return found


mx: Any = _Library()

_NAMES = {DType.bool: "bool_"}  # elsewhere the names are ours


def dtype_of(dtype: DType) -> Any:
    """mlx's name for an element type."""
    return getattr(mx, _NAMES.get(dtype, dtype.name))


def to_mlx(array: Array) -> Any:
    """An array of mlx with the same content; NumPy's has no bfloat16 that others understand, so it goes as bits."""
    array = row_major(array)
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def to_numpy(array: Any) -> Array:
    """A copy that belongs to the caller: what mlx computed may be a view of a weight or of another result."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16), order="C").view(ml_dtypes.bfloat16)
    return np.array(array, order="C")
