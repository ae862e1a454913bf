"""``OrtValue``: a value with ONNX Runtime's interface around it. Tensors are NumPy arrays and are never copied here."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dlpack, dtypes
from ranvier.dtypes import DType
from ranvier.errors import (
    DTypeMismatch,
    InvalidConfig,
    InvalidInput,
    NotSupported,
    ShapeMismatch,
    nearest,
)
from ranvier.graph.types import MapType, SequenceType, TensorType, Type
from ranvier.interop import to_array
from ranvier.records import dataclass
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.meta import type_name

Array = np.ndarray[Any, Any]

_ELSEWHERE = ("cuda", "gpu", "npu", "dml", "cann", "webgpu", "hip", "rocm", "openvino", "qnn", "tpu")


def check_cpu(device_type: str, device_id: int = 0) -> None:
    """Tensors handed to and from a session live in host memory; NotSupported for another device."""
    name = str(device_type).lower()
    if name in _ELSEWHERE:
        raise NotSupported(f"device {device_type!r}: values live in host memory here; use device_type='cpu'")
    if name != "cpu":
        raise InvalidConfig(f"unknown device {device_type!r}{nearest(name, ['cpu', *_ELSEWHERE])}")
    if device_id != 0:
        raise InvalidConfig(f"device 'cpu' has the index 0, got {device_id!r}")


@dataclass(frozen=True)
class OrtDevice:
    """A device by ONNX Runtime's numbers; there is one, the CPU."""

    name: str = "cpu"
    index: int = 0

    @staticmethod
    @raises_ort
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        check_cpu(ort_device_name, device_id)
        return OrtDevice(str(ort_device_name).lower(), device_id)

    @staticmethod
    def cpu() -> int:
        return 0

    @staticmethod
    def default_memory() -> int:
        return 0

    def device_id(self) -> int:
        return self.index

    def device_type(self) -> int:
        return 0

    def device_mem_type(self) -> int:
        return 0

    def device_vendor_id(self) -> int:
        return 0


class OrtValue:
    """A tensor, a sequence, a map, or nothing."""

    __slots__ = ("_type", "_value")

    def __init__(self, value: Any, value_type: Type | None = None) -> None:
        self._value = value
        self._type = _type_of(value) if value_type is None else value_type

    # -- making one ---------------------------------------------------------------------------------------------------

    @staticmethod
    @raises_ort
    def ortvalue_from_numpy(
        numpy_obj: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value over the memory of an array, which is copied only where it is not contiguous."""
        check_cpu(device_type, device_id)
        array = to_array(numpy_obj)
        return OrtValue(array if array.flags.c_contiguous else np.ascontiguousarray(array))

    @staticmethod
    @raises_ort
    def ortvalue_from_numpy_with_onnx_type(data: Any, onnx_element_type: int) -> OrtValue:
        """Like ``ortvalue_from_numpy``, reading the bytes as an element type NumPy may lack."""
        array = np.ascontiguousarray(data)
        wanted = dtypes.from_onnx(int(onnx_element_type)).numpy
        if wanted.itemsize != array.itemsize:
            raise DTypeMismatch(f"{array.dtype} elements take {array.itemsize} bytes, {wanted} takes {wanted.itemsize}")
        return OrtValue(array.view(wanted))

    @staticmethod
    @raises_ort
    def ortvalue_from_shape_and_type(
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: Any = None,
    ) -> OrtValue:
        """A tensor of zeros; ``element_type`` is a NumPy dtype or an ONNX number."""
        check_cpu(device_type, device_id)
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise ShapeMismatch(f"a shape has sizes of 0 or more, got {list(sizes)}")
        dtype = dtypes.of(element_type)
        return OrtValue(np.full(sizes, "", object) if dtype is DType.string else np.zeros(sizes, dtype.numpy))

    @staticmethod
    @raises_ort
    def ort_value_from_sparse_tensor(sparse_tensor: Any) -> OrtValue:
        raise NotSupported("sparse tensors cannot be handed over; make them dense")

    @classmethod
    @raises_ort
    def from_dlpack(cls, data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """A value over the memory of an object with ``__dlpack__`` or of a capsule.

        ``is_bool_tensor`` reads uint8 as bool, for exporters from before DLPack had bools.
        """
        array = dlpack.from_dlpack(data)
        return cls(array.view(np.bool_) if is_bool_tensor and array.dtype == np.uint8 else array)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        """What a session takes and gives: an array, a list, a dict or None."""
        return self._value

    def data_type(self) -> str:
        """``tensor(float)``, ``seq(tensor(int64))`` …"""
        return type_name(self._type)

    @raises_ort
    def element_type(self) -> int:
        """The ONNX number of the elements."""
        return dtypes.of(self._tensor()).onnx

    @raises_ort
    def shape(self) -> list[int]:
        return list(self._tensor().shape)

    @raises_ort
    def tensor_size_in_bytes(self) -> int:
        return int(self._tensor().nbytes)

    def device_name(self) -> str:
        return "cpu"

    def has_value(self) -> bool:
        return self._value is not None

    def is_tensor(self) -> bool:
        return isinstance(self._value, np.ndarray)

    def is_tensor_sequence(self) -> bool:
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        return False

    @raises_ort
    def as_sparse_tensor(self) -> Any:
        raise NotSupported("this value is no sparse tensor: values are dense here")

    # -- its data -----------------------------------------------------------------------------------------------------

    @raises_ort
    def numpy(self) -> Array:
        """The array itself, not a copy."""
        return self._tensor()

    @raises_ort
    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self._tensor().ctypes.data)

    @raises_ort
    def update_inplace(self, np_arr: Any) -> None:
        """Copy ``np_arr`` into the memory of this tensor; element type and shape must be the same."""
        target, source = self._tensor(), to_array(np_arr)
        copy_into(target, source, "update_inplace")

    def __dlpack__(
        self, *, stream: Any = None, max_version: dlpack.Version | None = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if dl_device is not None:
            dlpack.check_host(dl_device)
        array = self._tensor()
        return dlpack.to_dlpack(array.copy() if copy else array, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._tensor(), dtype=dtype, copy=copy)

    def _tensor(self) -> Array:
        if not isinstance(self._value, np.ndarray):
            held = self.data_type() or type(self._value).__name__
            raise InvalidInput(f"this OrtValue holds no tensor but {held}; see its .value")
        return self._value

    def __repr__(self) -> str:
        return f"<OrtValue {self._type}>"


def _type_of(value: Any) -> Type | None:
    if isinstance(value, np.ndarray):
        return TensorType(dtypes.of(value), value.shape)
    if isinstance(value, list):
        return SequenceType(_type_of(value[0]) if value else None)
    if isinstance(value, Mapping):
        for key, item in value.items():
            return MapType(dtypes.of(np.asarray(key)), TensorType(dtypes.of(np.asarray(item)), ()))
    return None


def unwrap(x: Any) -> Any:
    """The value a session takes: an OrtValue's, or ``x`` itself."""
    return x.value if isinstance(x, OrtValue) else x


def copy_into(target: Array, source: Array, what: str) -> None:
    """Copy between tensors of one type; the error starts with ``what``."""
    if target.shape != source.shape:
        raise ShapeMismatch(f"{what}: expected shape {list(target.shape)}, got {list(source.shape)}")
    if dtypes.of(target) is not dtypes.of(source):
        raise DTypeMismatch(f"{what}: expected {dtypes.of(target)}, got {dtypes.of(source)}")
    if not target.flags.writeable:
        raise InvalidInput(f"{what}: the memory is read-only")
    np.copyto(target, source)


def array_at(pointer: int, element_type: Any, shape: Sequence[int], what: str) -> Array:
    """A view of memory that somebody else owns and keeps alive."""
    dtype = dtypes.of(element_type)
    sizes = tuple(int(size) for size in shape)
    if dtype is DType.string:
        raise NotSupported(f"{what}: strings have no address")
    if any(size < 0 for size in sizes):
        raise ShapeMismatch(f"{what}: a shape has sizes of 0 or more, got {list(sizes)}")
    nbytes = dtype.nbytes(math.prod(sizes))
    if nbytes == 0:
        return np.empty(sizes, dtype.numpy)
    if not pointer:
        raise InvalidInput(f"{what}: buffer_ptr is null")
    memory = (ctypes.c_uint8 * nbytes).from_address(int(pointer))
    return np.frombuffer(memoryview(memory), np.uint8).view(dtype.numpy).reshape(sizes)


__all__ = ["OrtDevice", "OrtValue", "array_at", "check_cpu", "copy_into", "unwrap"]
