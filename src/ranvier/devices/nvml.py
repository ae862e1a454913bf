"""NVIDIA's management library through ctypes: what GPUs there are, without a framework that takes seconds to load."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ranvier.records import dataclass

_NAMES = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1", "libnvidia-ml.so")
_TEXT = 96  # bytes; the library's longest texts (names, identifiers) fit
# What the commonest failures mean to somebody who cannot see the library's source.
_MEANINGS = {
    9: "the NVIDIA driver is not loaded",
    12: "a library of the NVIDIA driver is missing",
    4: "this process may not use the NVIDIA driver",
    15: "the GPU has fallen off the bus",
    18: "the NVIDIA driver and its libraries are of different versions",
}


class NvmlError(Exception):
    """The library is absent, or refuses; the text says why."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU as the library tells of it; ``problem`` where it would not answer."""

    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    problem: str = ""


class GpuLibrary(Protocol):
    """What detection asks of the library."""

    def read(self) -> tuple[str, list[NvmlGpu]]:
        """Version of the driver, and all GPUs in the order of the bus; NvmlError where it refuses."""
        ...


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The library itself, given as a loaded one."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def read(self) -> tuple[str, list[NvmlGpu]]:
        with self._started():  # which takes the driver 10 to 20 ms: once for everything
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            return self._driver(), [self._gpu(index) for index in range(count.value)]

    def _driver(self) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        try:
            self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(_TEXT))
        except NvmlError:
            return ""
        return text.value.decode(errors="replace")

    def _gpu(self, index: int) -> NvmlGpu:
        handle = ctypes.c_void_p()
        name = ""
        try:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            name = self._text("nvmlDeviceGetName", handle)
            major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
            self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            uuid = self._text("nvmlDeviceGetUUID", handle)
        except NvmlError as error:
            return NvmlGpu(name or "NVIDIA GPU", problem=str(error))
        try:
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        except NvmlError:  # machines whose GPU shares the memory of the host have no answer
            return NvmlGpu(name, uuid, None, (major.value, minor.value))
        return NvmlGpu(name, uuid, memory.total, (major.value, minor.value))

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._call(function, handle, text, ctypes.c_uint(_TEXT))
        return text.value.decode(errors="replace")

    @contextmanager
    def _started(self) -> Iterator[None]:
        self._call("nvmlInit_v2")
        try:
            yield
        finally:
            self._call("nvmlShutdown")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"the NVIDIA driver's library has no {function}: it is too old") from None
        if code:
            raise NvmlError(_MEANINGS.get(code, f"the NVIDIA driver's library answers {function} with error {code}"))


def open_nvml() -> Nvml:
    """The library of this machine; NvmlError where there is none."""
    for name in _NAMES:
        try:
            return Nvml(ctypes.CDLL(name))
        except OSError:
            continue
    raise NvmlError(f"the NVIDIA driver's library {_NAMES[0]} cannot be loaded")


__all__ = ["GpuLibrary", "Nvml", "NvmlError", "NvmlGpu", "open_nvml"]
