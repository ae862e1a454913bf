"""``OrtValue``: a value with ONNX Runtime's interface around it. Tensors of the host are NumPy arrays and are never
copied here; those of a GPU are tensors of its provider, and stay there until somebody asks for their elements."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dlpack, dtypes
from ranvier.devices import CPU, Device
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, InvalidInput, NotSupported, ShapeMismatch
from ranvier.graph.types import MapType, SequenceType, TensorType, Type
from ranvier.interop import to_array
from ranvier.providers.own_memory import DeviceArray, LendsMemory
from ranvier.records import dataclass
from ranvier.runtime.ort.errors import raises_runtime_error
from ranvier.runtime.ort.meta import type_name
from ranvier.runtime.ort.places import device_of, holder_of, memory_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class OrtDevice:
    """A device by ONNX Runtime's numbers: the CPU, or a GPU."""

    name: str = "cpu"
    index: int = 0

    @staticmethod
    @raises_runtime_error
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        found = device_of(ort_device_name, device_id)
        return OrtDevice(found.kind, found.index)

    @staticmethod
    def cpu() -> int:
        return 0

    @staticmethod
    def cuda() -> int:
        return 1

    @staticmethod
    def default_memory() -> int:
        return 0

    def device_id(self) -> int:
        return self.index

    def device_type(self) -> int:
        return self.cpu() if self.name == "cpu" else self.cuda()

    def device_mem_type(self) -> int:
        return 0

    def device_vendor_id(self) -> int:
        return 0


class OrtValue:
    """A tensor, a sequence, a map, or nothing."""

    __slots__ = ("_memory", "_there", "_type", "_value")

    def __init__(self, value: Any, value_type: Type | None = None) -> None:
        self._value = value
        self._there: DeviceArray | None = None  # stands for a tensor of a GPU …
        self._memory: LendsMemory | None = None  # … in this memory
        self._type = _type_of(value) if value_type is None else value_type

    @classmethod
    def of_device(cls, tensor: Any, memory: LendsMemory) -> OrtValue:
        """A value around a tensor in the memory of a GPU."""
        there = memory.adopt(tensor)
        assert there is not None
        made = cls(tensor, TensorType(dtypes.of(there), there.shape))
        made._there, made._memory = there, memory
        return made

    # -- making one ---------------------------------------------------------------------------------------------------

    @staticmethod
    @raises_runtime_error
    def ortvalue_from_numpy(
        numpy_obj: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value over the memory of an array, which is copied only where it is not contiguous, or to a GPU."""
        device = device_of(device_type, device_id)
        array = to_array(numpy_obj)
        whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        return OrtValue(whole) if device == CPU else _brought(whole, device)

    @staticmethod
    @raises_runtime_error
    def ortvalue_from_numpy_with_onnx_type(data: Any, onnx_element_type: int) -> OrtValue:
        """Like ``ortvalue_from_numpy``, reading the bytes as an element type NumPy may lack."""
        array = np.ascontiguousarray(data)
        wanted = dtypes.from_onnx(int(onnx_element_type)).numpy
        if wanted.itemsize != array.itemsize:
            raise DTypeMismatch(f"{array.dtype} elements take {array.itemsize} bytes, {wanted} takes {wanted.itemsize}")
        return OrtValue(array.view(wanted))

    @staticmethod
    @raises_runtime_error
    def ortvalue_from_shape_and_type(
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: Any = None,
    ) -> OrtValue:
        """A tensor of zeros; ``element_type`` is a NumPy dtype or an ONNX number."""
        device = device_of(device_type, device_id)
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise ShapeMismatch(f"a shape has sizes of 0 or more, got {list(sizes)}")
        dtype = dtypes.of(element_type)
        made = np.full(sizes, "", object) if dtype is DType.string else np.zeros(sizes, dtype.numpy)
        return OrtValue(made) if device == CPU else _brought(made, device)

    @staticmethod
    @raises_runtime_error
    def ort_value_from_sparse_tensor(sparse_tensor: Any) -> OrtValue:
        raise NotSupported("sparse tensors cannot be handed over; make them dense")

    @classmethod
    @raises_runtime_error
    def from_dlpack(cls, data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """A value over the memory of an object with ``__dlpack__`` or of a capsule.

        ``is_bool_tensor`` reads uint8 as bool, for exporters from before DLPack had bools.
        """
        held = holder_of(data)
        if held is not None:
            there, memory = held
            return cls.of_device(there.tensor, memory)
        array = dlpack.from_dlpack(data)
        return cls(array.view(np.bool_) if is_bool_tensor and array.dtype == np.uint8 else array)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def value(self) -> Any:
        """What a session takes and gives: an array, a tensor of a GPU, a list, a dict or None."""
        return self._value

    def data_type(self) -> str:
        """``tensor(float)``, ``seq(tensor(int64))`` …"""
        return type_name(self._type)

    @raises_runtime_error
    def element_type(self) -> int:
        """The ONNX number of the elements."""
        return dtypes.of(self._described()).onnx

    @raises_runtime_error
    def shape(self) -> list[int]:
        return list(self._described().shape)

    @raises_runtime_error
    def tensor_size_in_bytes(self) -> int:
        return int(self._described().nbytes)

    @property
    def device(self) -> Device:
        if self._memory is None:
            return CPU
        kind, _, index = self._memory.space.partition(":")
        return Device(kind, int(index))

    @property
    def memory(self) -> LendsMemory | None:
        """Where its tensor is, if not on the host."""
        return self._memory

    def device_name(self) -> str:
        return self.device.kind

    def has_value(self) -> bool:
        return self._value is not None

    def is_tensor(self) -> bool:
        return isinstance(self._value, np.ndarray) or self._there is not None

    def is_tensor_sequence(self) -> bool:
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        return False

    @raises_runtime_error
    def as_sparse_tensor(self) -> Any:
        raise NotSupported("this value is no sparse tensor: values are dense here")

    # -- its data -----------------------------------------------------------------------------------------------------

    @raises_runtime_error
    def numpy(self) -> Array:
        """The array itself, not a copy; of a tensor on a GPU, its elements."""
        return self._tensor() if self._there is None else self._there.fetched()

    @raises_runtime_error
    def data_ptr(self) -> int:
        """The address of the first element."""
        if self._memory is not None:
            return self._memory.address(self._value)
        return int(self._tensor().ctypes.data)

    @raises_runtime_error
    def update_inplace(self, np_arr: Any) -> None:
        """Copy ``np_arr`` into the memory of this tensor; element type and shape must be the same."""
        self.receive(OrtValue(to_array(np_arr)), "update_inplace")

    def receive(self, source: OrtValue, what: str) -> None:
        """Copy the tensor of another value into the memory of this one; an error starts with ``what``."""
        if self._memory is None:
            copy_into(self._tensor(), source.numpy(), what)
            return
        check_alike(self._described(), source._described(), what)
        self._memory.fill(self._value, source.value if source.device == self.device else source.numpy())

    def __dlpack__(
        self, *, stream: Any = None, max_version: dlpack.Version | None = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if self._there is not None:
            return self._value.__dlpack__(stream=stream)
        if dl_device is not None:
            dlpack.check_host(dl_device)
        array = self._tensor()
        return dlpack.to_dlpack(array.copy() if copy else array, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._there is not None:
            kind, index = self._value.__dlpack_device__()
            return int(kind), int(index)
        return dlpack.CPU_DEVICE

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def _described(self) -> Array:
        """What has the tensor's type and shape."""
        return self._tensor() if self._there is None else self._there

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


def _brought(array: Array, device: Device) -> OrtValue:
    """A value on a GPU with the elements of an array."""
    if array.dtype.hasobject:
        raise NotSupported(f"device '{device}': strings are kept on the host")
    memory = memory_of(device)
    return OrtValue.of_device(memory.bring(array), memory)


def check_alike(target: Array, source: Array, what: str) -> None:
    """Raise where type and shape are not the same; the error starts with ``what``."""
    if target.shape != source.shape:
        raise ShapeMismatch(f"{what}: expected shape {list(target.shape)}, got {list(source.shape)}")
    if dtypes.of(target) is not dtypes.of(source):
        raise DTypeMismatch(f"{what}: expected {dtypes.of(target)}, got {dtypes.of(source)}")


def copy_into(target: Array, source: Array, what: str) -> None:
    """Copy between tensors of one type; the error starts with ``what``."""
    check_alike(target, source, what)
    if not target.flags.writeable:
        raise InvalidInput(f"{what}: the memory is read-only")
    np.copyto(target, source)


def described_at(pointer: int, element_type: Any, shape: Sequence[int], what: str) -> tuple[DType, tuple[int, ...]]:
    """Type and shape of a tensor that lies at an address."""
    dtype = dtypes.of(element_type)
    sizes = tuple(int(size) for size in shape)
    if dtype is DType.string:
        raise NotSupported(f"{what}: strings have no address")
    if any(size < 0 for size in sizes):
        raise ShapeMismatch(f"{what}: a shape has sizes of 0 or more, got {list(sizes)}")
    if not pointer and 0 not in sizes:
        raise InvalidInput(f"{what}: buffer_ptr is null")
    return dtype, sizes


def array_at(pointer: int, element_type: Any, shape: Sequence[int], what: str) -> Array:
    """A view of the host's memory that somebody else owns and keeps alive."""
    dtype, sizes = described_at(pointer, element_type, shape, what)
    nbytes = dtype.nbytes(math.prod(sizes))
    if nbytes == 0:
        return np.empty(sizes, dtype.numpy)
    memory = (ctypes.c_uint8 * nbytes).from_address(int(pointer))
    return np.frombuffer(memoryview(memory), np.uint8).view(dtype.numpy).reshape(sizes)


__all__ = ["OrtDevice", "OrtValue", "array_at", "check_alike", "copy_into", "described_at", "unwrap"]
