"""torch, imported when something of it is first used, and arrays on their way into tensors and back.

Element types that torch has no arithmetic for travel as bits in a carrier: ``int4`` in ``int8``, one element a byte, as
NumPy has them too. What an element means is said by the graph, so a carrier is never mistaken for a number.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from ranvier.codegen.storage import row_major
from ranvier.dtypes import DType
from ranvier.dtypes import of as dtype_named
from ranvier.providers.base import Array


class _Library:
    """A package by its own names. Importing torch takes seconds, so nobody pays for a table of operators with that."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__dict__["_name"]), name)
        self.__dict__[name] = found
        return found


torch: Any = _Library("torch")
functional: Any = _Library("torch.nn.functional")


def installed(name: str = "torch") -> bool:
    return importlib.util.find_spec(name) is not None


_SAME = (
    *("float32", "float64", "float16", "bfloat16", "bool", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
TORCH_NAMES = {DType[name]: name for name in _SAME} | {
    DType.int4: "int8",
    DType.uint4: "uint8",
    DType.int2: "int8",
    DType.uint2: "uint8",
    DType.float4_e2m1fn: "uint8",
    DType.float8_e8m0fnu: "uint8",
    DType.float6_e2m3fn: "uint8",
    DType.float6_e3m2fn: "uint8",
}
# how NumPy can be asked for the same bits where torch does not know the type of the array
_BITS: dict[int, np.dtype[Any]] = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "i2"), (4, "i4"), (8, "i8"))}
_NUMBERS_IN = {
    DType.int4.numpy: np.int8,
    DType.int2.numpy: np.int8,
    DType.uint4.numpy: np.uint8,
    DType.uint2.numpy: np.uint8,
}
_PLAIN = {np.dtype(n) for n in ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"]}


def torch_type(dtype: DType) -> Any:
    """The element type of the tensors that carry ``dtype``."""
    return getattr(torch, TORCH_NAMES[dtype])


def numpy_type(tensor: Any) -> np.dtype[Any]:
    """What a tensor's own element type is in NumPy."""
    return DType[str(tensor.dtype).removeprefix("torch.")].numpy


def tensor_over(array: Array) -> Any:
    """A tensor of the host over the memory of an array that nobody writes to while the tensor is used."""
    array = row_major(array)
    if array.dtype in _NUMBERS_IN:  # above the bits of an element anything may stand
        array = array.astype(_NUMBERS_IN[array.dtype])
    if array.dtype not in _PLAIN:
        carried = torch_type(dtype_named(array.dtype))
        return torch.from_numpy(_writable(array.view(_BITS[array.dtype.itemsize]))).view(carried)
    return torch.from_numpy(_writable(array))


def _writable(array: Array) -> Array:
    """torch warns about memory that it could write to and must not; kernels here never write to their operands."""
    if array.flags.writeable:
        return array
    if array.nbytes == 0:
        return np.empty(array.shape, array.dtype)
    address = array.__array_interface__["data"][0]
    return np.asarray(_Memory(array, address))


class _Memory:
    """The memory of an array without its flags; keeps the array alive."""

    def __init__(self, array: Array, address: int) -> None:
        self._array = array
        self.__array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def array_over(tensor: Any, dtype: np.dtype[Any] | None = None) -> Array:
    """An array over the memory of a tensor of the host."""
    tensor = tensor.detach().contiguous()
    wanted = numpy_type(tensor) if dtype is None else dtype
    if wanted in _PLAIN:
        found: Array = tensor.numpy()
        return found
    bits = _BITS[tensor.element_size()]
    found = tensor.view(getattr(torch, bits.name)).numpy()
    return found.view(wanted)


_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # which torch moves and does not compute with
_AS_BITS = {
    "uint16": "int16",
    "uint32": "int32",
    "uint64": "int64",
}  # and what it moves everywhere


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def widened(tensor: Any) -> Any:
    """Unsigned numbers in a type that torch computes with; those of 64 bits keep their bits."""
    name = _name(tensor)
    if name not in _WIDER:
        return tensor
    return tensor.view(torch.int64) if name == "uint64" else tensor.to(getattr(torch, _WIDER[name]))


def as_bits(tensor: Any) -> Any:
    """The same elements as something that every function of torch moves."""
    name = _name(tensor)
    if name in _AS_BITS:
        return tensor.view(getattr(torch, _AS_BITS[name]))
    return tensor.view(torch.uint8) if name.startswith("float8") else tensor


def fitted(tensor: Any, dtype: Any, *, bits: bool = False) -> Any:
    """A result in the type that the graph says it has: its elements taken as they are, or converted. Of whole numbers
    that do not fit, the lowest bits stay."""
    if tensor.dtype == dtype:
        return tensor
    if bits or (dtype == torch.uint64 and tensor.dtype == torch.int64):
        return tensor.view(dtype)
    return tensor.to(dtype)
