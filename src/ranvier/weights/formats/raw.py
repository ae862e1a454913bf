"""Plain bytes whose type and shape the caller knows."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import WeightError
from ranvier.weights.blob import Blob
from ranvier.weights.formats.base import Checkpoint, Opening
from ranvier.weights.stored import Stored, TensorInfo, checked_size


class Raw:
    """Elements and nothing else; ``dtype`` and ``shape`` are options, ``offset`` and ``name`` may be."""

    name = "raw"
    suffixes = (".raw",)
    options = ("dtype", "shape", "offset", "name")

    def matches(self, head: bytes, name: str) -> bool:
        return name.endswith(self.suffixes)

    def open(self, blob: Blob, opening: Opening) -> Checkpoint:
        options = opening.options
        if options.get("dtype") is None or options.get("shape") is None:
            raise WeightError(f"{blob.name!r}: raw data needs the options dtype and shape (and may have offset, name)")
        dtype, big_endian = _element(options["dtype"], blob.name)
        try:
            shape = tuple(map(operator.index, options["shape"]))
            offset = operator.index(options.get("offset", 0))
        except TypeError as error:
            raise WeightError(f"{blob.name!r}: shape is a tuple of whole numbers, offset one: {error}") from None
        name = str(options.get("name", "tensor"))
        nbytes = checked_size(name, shape, dtype.bits, opening.tensor_bytes)
        if offset < 0 or offset + nbytes > blob.size:
            raise WeightError(
                f"{blob.name!r}: {dtype}{list(shape)} takes bytes {offset} to {offset + nbytes} of {blob.size}"
            )
        info = TensorInfo(name, dtype, shape, nbytes, source=blob.name)
        return Checkpoint({name: Stored(info, blob, offset, big_endian=big_endian)}, {}, repr(blob.name))


def _element(given: Any, file: str) -> tuple[DType, bool]:
    """The element type, and whether it is written with the highest byte first (``'>f4'``)."""
    dtype = dtypes.of(given)
    if dtype is DType.string:
        raise WeightError(f"{file!r}: raw data holds numbers, not {given!r}")
    ordered = isinstance(given, np.dtype) or (isinstance(given, str) and given[:1] in "<>=|")
    return dtype, ordered and np.dtype(given).str.startswith(">")
