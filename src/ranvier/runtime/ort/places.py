"""Devices by ONNX Runtime's names, and the memories of providers that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ranvier.devices import CPU, Device
from ranvier.errors import InvalidConfig, NotSupported, ProviderUnavailable, nearest
from ranvier.providers.own_memory import DeviceArray, LendsMemory
from ranvier.providers.registry import REGISTRY

_GPU = ("cuda", "gpu")
_ELSEWHERE = ("npu", "dml", "cann", "webgpu", "hip", "rocm", "openvino", "qnn", "tpu")
_DLPACK_CUDA = 2  # kDLCUDA


def device_of(device_type: str, device_id: int = 0) -> Device:
    """A device by its name and number; NotSupported for one that values cannot be kept on."""
    name = str(device_type).lower()
    if name in _ELSEWHERE:
        raise NotSupported(f"device {device_type!r}: values are kept in the memory of the host ('cpu') or of a GPU")
    if name not in ("cpu", *_GPU):
        raise InvalidConfig(f"unknown device {device_type!r}{nearest(name, ['cpu', *_GPU, *_ELSEWHERE])}")
    if isinstance(device_id, bool) or not isinstance(device_id, int) or device_id < 0:
        raise InvalidConfig(f"the number of a device is 0 or more, got {device_id!r}")
    if name in _GPU:
        return Device("cuda", device_id)
    if device_id != 0:
        raise InvalidConfig(f"device 'cpu' has the index 0, got {device_id!r}")
    return CPU


def memory_among(device: Device, providers: Iterable[Any]) -> LendsMemory | None:
    """The first of these providers that has the memory of the device."""
    return next((p for p in providers if isinstance(p, LendsMemory) and p.space == str(device)), None)


def memory_of(device: Device) -> LendsMemory:
    """The memory of a GPU: that of a session that uses it, else of the GPU by itself."""
    found = memory_among(device, _in_use())
    if found is not None:
        return found
    try:
        made = REGISTRY.get(f"cuda:{device.index}" if device.index else "cuda")
    except ProviderUnavailable as error:
        raise NotSupported(f"device '{device}': {error.reason}") from error
    assert isinstance(made, LendsMemory)
    return made


def holder_of(x: Any) -> tuple[DeviceArray, LendsMemory] | None:
    """What stands for a tensor in the memory of a GPU, and the provider with that memory; None for one of the host."""
    if not hasattr(x, "__dlpack_device__"):
        return None
    kind, index = map(int, x.__dlpack_device__())
    candidates = [p for p in _in_use() if isinstance(p, LendsMemory)]
    if kind == _DLPACK_CUDA:
        candidates = [memory_of(Device("cuda", index))]
    for memory in candidates:
        there = memory.adopt(x)
        if there is not None:
            return there, memory
    return None


def _in_use() -> Iterator[Any]:
    for user in REGISTRY.users():
        yield from user.providers


__all__ = ["device_of", "holder_of", "memory_among", "memory_of"]
