"""Launches of machine code by the driver itself.

Triton launches through a module in C that it compiles for every list of types, one after the other, which takes longer
than compiling a small kernel does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.codegen.triton.images import Image, Order

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
_USUAL_SHARED = 48 << 10  # more has to be asked for
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread that has not used the device yet
_WARP = 32
_64_BITS = (1 << 64) - 1

_loaded: dict[tuple[str, int], ctypes.c_void_p] = {}  # functions by image and device


def launcher(
    image: Image,
    order: Order,
    numbers: Sequence[int],
    grid: tuple[int, int, int],
    device: int,
    stream: Callable[[], int],
) -> Callable[[Sequence[int]], None]:
    """What launches a kernel when it is given the addresses. All parameters lie in places of 8 bytes; of those that are
    shorter the driver reads the first bytes."""
    if 0 in grid:
        return lambda addresses: None
    entry = _function(image, device)
    pointers = sum(kind[0] == "*" for kind in order.kinds)
    taken = [n for n, kind in zip(numbers, order.kinds[pointers:]) if kind != "constexpr"]
    rest = (*(n & _64_BITS for n in taken), 0, 0)  # behind them the scratch memory that no kernel of ours asks for
    count = pointers + len(rest)
    values, places = ctypes.c_uint64 * count, ctypes.c_void_p * count
    offsets = tuple(range(0, 8 * count, 8))
    threads, shared = image.warps * _WARP, image.shared
    call = _cuda().cuLaunchKernel
    x, y, z = grid

    def launch(addresses: Sequence[int]) -> None:
        held = values(*addresses, *rest)
        start = ctypes.addressof(held)
        where = places(*[start + offset for offset in offsets])
        code = call(entry, x, y, z, threads, 1, 1, shared, stream(), where, None)
        if code == _NO_CONTEXT:
            _enter(device)
            code = call(entry, x, y, z, threads, 1, 1, shared, stream(), where, None)
        if code:
            raise _failed("cuLaunchKernel", code)

    return launch


def _function(image: Image, device: int) -> ctypes.c_void_p:
    found = _loaded.get((image.key, device))
    if found is None:
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        _enter(device)
        _driver("cuModuleLoadData", ctypes.byref(module), image.code)
        _driver("cuModuleGetFunction", ctypes.byref(found), module, image.name.encode())
        if image.shared > _USUAL_SHARED:
            _driver("cuFuncSetCacheConfig", found, _PREFER_SHARED)
            _driver("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, image.shared)
        _loaded[image.key, device] = found
    return found


def _enter(device: int) -> None:
    """Make the device's own context, which torch uses as well, that of this thread, where it has none."""
    current = ctypes.c_void_p()
    _driver("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        number = ctypes.c_int()
        _driver("cuDeviceGet", ctypes.byref(number), device)
        _driver("cuDevicePrimaryCtxRetain", ctypes.byref(current), number)
        _driver("cuCtxSetCurrent", current)


@functools.cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = (pointer, *([number] * 7), pointer, pointer, pointer)
    return library


def _driver(name: str, *args: Any) -> None:
    code = getattr(_cuda(), name)(*args)
    if code:
        raise _failed(name, code)


def _failed(name: str, code: int) -> RuntimeError:
    """As torch and Triton raise what the driver says."""
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(code, ctypes.byref(text))
    return RuntimeError(f"{name}: CUDA error {code}: {(text.value or b'').decode()}")
