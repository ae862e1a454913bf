"""DLPack in and out for every element type it can express, the ones NumPy's own DLPack refuses included.

NumPy exchanges integers, floats, complex numbers and bools by itself. For bfloat16, float8 and the other types of
ml_dtypes the exchange still goes through NumPy, which owns the lifetimes in C, with unsigned integers of the same
width; this module only writes the real element type into the capsule, or reads it from there.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.errors import DeviceMismatch, DTypeMismatch, InvalidInput

Array = np.ndarray[Any, Any]
Version = tuple[int, int]

VERSION: Version = (1, 1)  # the newest DLPack this module reads and writes
HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: memory the CPU can read
CPU_DEVICE = (1, 0)

_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
_PADDED = 4  # the bit of DLManagedTensorVersioned.flags for sub-byte elements that take a byte each
_INT, _UINT, _FLOAT, _COMPLEX, _BOOL = 0, 1, 2, 5, 6

# (type code, bits) of types that NumPy's own DLPack does not know
_EXTENSION: dict[tuple[int, int], np.dtype[Any]] = {
    (4, 16): np.dtype(ml_dtypes.bfloat16),
    (7, 8): np.dtype(ml_dtypes.float8_e3m4),
    (8, 8): np.dtype(ml_dtypes.float8_e4m3),
    (9, 8): np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    (10, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (11, 8): np.dtype(ml_dtypes.float8_e4m3fnuz),
    (12, 8): np.dtype(ml_dtypes.float8_e5m2),
    (13, 8): np.dtype(ml_dtypes.float8_e5m2fnuz),
    (14, 8): np.dtype(ml_dtypes.float8_e8m0fnu),
    (15, 6): np.dtype(ml_dtypes.float6_e2m3fn),
    (16, 6): np.dtype(ml_dtypes.float6_e3m2fn),
    (17, 4): np.dtype(ml_dtypes.float4_e2m1fn),
    (_INT, 4): np.dtype(ml_dtypes.int4),
    (_UINT, 4): np.dtype(ml_dtypes.uint4),
    (_INT, 2): np.dtype(ml_dtypes.int2),
    (_UINT, 2): np.dtype(ml_dtypes.uint2),
}
_CODES = {dtype: key for key, dtype in _EXTENSION.items()}
_NATIVE = {
    (code, bits)
    for code, widths in {
        _INT: (8, 16, 32, 64),
        _UINT: (8, 16, 32, 64),
        _FLOAT: (16, 32, 64),
        _COMPLEX: (64, 128),
        _BOOL: (8,),
    }.items()
    for bits in widths
}


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Contents:
    """What lies in a capsule that nobody has taken yet. Valid while the capsule, or what was made of it, lives."""

    __slots__ = ("capsule", "managed", "tensor")

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule
        self.managed: _ManagedVersioned | None = None
        if _is_valid(capsule, _VERSIONED):
            self.managed = _ManagedVersioned.from_address(_pointer(capsule, _VERSIONED))
            if self.managed.major != VERSION[0]:
                found = f"{self.managed.major}.{self.managed.minor}"
                raise InvalidInput(f"DLPack version {found} is not readable here: expected {VERSION[0]}.x")
            self.tensor: _Tensor = self.managed.tensor
        elif _is_valid(capsule, _LEGACY):  # DLManagedTensor begins with its DLTensor
            self.tensor = _Tensor.from_address(_pointer(capsule, _LEGACY))
        else:
            raise InvalidInput(f"not a DLPack capsule, or one that was taken already: {capsule!r}")

    @property
    def padded(self) -> bool:
        return self.managed is not None and bool(self.managed.flags & _PADDED)


class _Once:
    """Hands a capsule to ``np.from_dlpack``, which only takes exporters."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


def check_host(device: Sequence[Any]) -> None:
    """DeviceMismatch where a DLPack device, given as (kind, index), has memory of its own."""
    if int(device[0]) not in HOST_DEVICES:
        raise DeviceMismatch(f"the tensor is on DLPack device ({device[0]}, {device[1]}); move it to the CPU first")


def from_dlpack(x: Any) -> Array:
    """A NumPy array over the memory of ``x``, an object with ``__dlpack__`` or a capsule; nothing is copied.

    The array is read-only where the exporter says so, and where it speaks a DLPack too old to say. Packed elements
    of less than a byte are the one exception: here each takes a byte of its own, so they are copied.
    """
    if not hasattr(x, "__dlpack__"):
        return array_from_capsule(x)
    if hasattr(x, "__dlpack_device__"):
        check_host(x.__dlpack_device__())  # before asking for the capsule: making one may wait for a device
    try:
        capsule = x.__dlpack__(max_version=VERSION)
    except TypeError:  # an exporter from before versions
        capsule = x.__dlpack__()
    return array_from_capsule(capsule)


def array_from_capsule(capsule: Any) -> Array:
    """A NumPy array over the tensor of a capsule, which is taken: its deleter runs when the last view is gone."""
    if type(capsule).__name__ != "PyCapsule":
        raise InvalidInput(f"expected an object with __dlpack__ or a DLPack capsule, got {type(capsule).__name__}")
    contents = _Contents(capsule)
    check_host((contents.tensor.device_type, contents.tensor.device_id))
    kind = contents.tensor.dtype
    key = (kind.code, kind.bits)
    if key in _NATIVE and kind.lanes == 1:
        return np.from_dlpack(_Once(capsule))
    dtype = _EXTENSION.get(key)
    if dtype is None or (kind.lanes != 1 and kind.bits >= 8):
        raise DTypeMismatch(f"no element type for DLPack type code {kind.code}, {kind.bits} bits, {kind.lanes} lanes")
    if kind.bits < 8 and not contents.padded:
        return _unpacked(contents, dtype)
    return _retyped(contents, dtype)


def _retyped(contents: _Contents, dtype: np.dtype[Any]) -> Array:
    """Import as unsigned integers of the same width, then read those as ``dtype``."""
    kind = contents.tensor.dtype
    before = kind.code, kind.bits
    kind.code, kind.bits = _UINT, dtype.itemsize * 8
    try:
        array = np.from_dlpack(_Once(contents.capsule))
    finally:
        kind.code, kind.bits = before  # the exporter's deleter may look at what it exported
    return array.view(dtype)


def _unpacked(contents: _Contents, dtype: np.dtype[Any]) -> Array:
    """A copy of packed elements, one byte each. The capsule stays as it is and frees its tensor by itself."""
    tensor = contents.tensor
    bits, lanes = tensor.dtype.bits, tensor.dtype.lanes
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    if bits not in (2, 4):
        raise DTypeMismatch(f"DLPack: packed elements of {bits} bits ({dtype}) cannot be read; export them padded")
    expected = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
    if tensor.strides and tuple(tensor.strides[k] for k in range(tensor.ndim)) != expected and math.prod(shape):
        raise InvalidInput(f"DLPack: packed elements ({dtype}) must be contiguous")
    if lanes != 1:  # several elements stand for one of the shape's: the last axis grows
        shape = (*shape[:-1], shape[-1] * lanes) if shape else (lanes,)
    count = math.prod(shape)
    data = ctypes.string_at((tensor.data or 0) + tensor.byte_offset, (count * bits + 7) // 8) if count else b""
    packed = np.frombuffer(data, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = ((packed[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
    return codes.view(dtype).reshape(shape)


def to_dlpack(x: Any, *, max_version: Version | None = None) -> Any:
    """A DLPack capsule over the memory of an array; nothing is copied.

    Without ``max_version`` the capsule is an old, unversioned one, which every consumer reads. Read-only arrays and
    elements of less than a byte cannot be expressed there: pass ``max_version=(1, 1)``.
    """
    array = np.asarray(x)
    key = _CODES.get(array.dtype)
    if key is None:
        try:
            return array.__dlpack__(max_version=max_version)
        except BufferError as error:
            raise _refused(array, error) from None
    code, bits = key
    versioned = max_version is not None and max_version[0] >= 1
    if bits < 8 and not versioned:
        raise DTypeMismatch(f"DLPack: {array.dtype} needs a versioned capsule; pass max_version={VERSION}")
    integers = np.dtype(f"u{array.dtype.itemsize}")
    try:
        capsule = array.view(integers).__dlpack__(max_version=max_version)
    except BufferError as error:
        raise _refused(array, error) from None
    contents = _Contents(capsule)
    contents.tensor.dtype.code, contents.tensor.dtype.bits = code, bits
    if contents.managed is not None:
        contents.managed.minor = max(contents.managed.minor, VERSION[1])  # these type codes came with 1.1
        if bits < 8:
            contents.managed.flags |= _PADDED
    return capsule


def _refused(array: Array, error: BufferError) -> Exception:
    if not array.flags.writeable:
        return InvalidInput(f"DLPack: a read-only array needs a versioned capsule; pass max_version={VERSION}")
    return DTypeMismatch(f"DLPack cannot express {array.dtype} as it lies in memory: {error}")


__all__ = ["CPU_DEVICE", "HOST_DEVICES", "VERSION", "array_from_capsule", "from_dlpack", "to_dlpack"]
