"""The driver of NVIDIA's GPUs: machine code loaded, and what it answers to calls."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

USUAL_SHARED = 48 << 10  # bytes of a block; more has to be asked for
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = (pointer, *([number] * 7), pointer, pointer, pointer)
    return library


def call(name: str, *args: Any) -> None:
    code = getattr(cuda(), name)(*args)
    if code:
        raise failed(name, code)


def failed(name: str, code: int) -> RuntimeError:
    """As torch and Triton raise what the driver says."""
    text = ctypes.c_char_p()
    cuda().cuGetErrorString(code, ctypes.byref(text))
    return RuntimeError(f"{name}: CUDA error {code}: {(text.value or b'').decode()}")


def enter(device: int) -> None:
    """Make the device's own context, which torch uses as well, that of this thread, where it has none."""
    current = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        number = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(number), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(current), number)
        call("cuCtxSetCurrent", current)


def function(code: bytes, name: str) -> ctypes.c_void_p:
    """A kernel of machine code, loaded into the context of this thread. It stays as long as the process."""
    module, found = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
    return found


def allow_shared(kernel: ctypes.c_void_p, size: int) -> None:
    call("cuFuncSetAttribute", kernel, _MAX_DYNAMIC_SHARED, size)
