"""Launches of machine code by the driver itself.

Triton launches through a module in C that it compiles for every list of types, one after the other, which takes longer
than compiling a small kernel does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from ranvier.codegen.triton import driver
from ranvier.codegen.triton.images import Image, Order

_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
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
    call = driver.cuda().cuLaunchKernel
    x, y, z = grid

    def launch(addresses: Sequence[int]) -> None:
        held = values(*addresses, *rest)
        start = ctypes.addressof(held)
        where = places(*[start + offset for offset in offsets])
        code = call(entry, x, y, z, threads, 1, 1, shared, stream(), where, None)
        if code == _NO_CONTEXT:
            driver.enter(device)
            code = call(entry, x, y, z, threads, 1, 1, shared, stream(), where, None)
        if code:
            raise driver.failed("cuLaunchKernel", code)

    return launch


def _function(image: Image, device: int) -> ctypes.c_void_p:
    found = _loaded.get((image.key, device))
    if found is None:
        driver.enter(device)
        found = driver.function(image.code, image.name)
        if image.shared > driver.USUAL_SHARED:
            driver.call("cuFuncSetCacheConfig", found, _PREFER_SHARED)
            driver.allow_shared(found, image.shared)
        _loaded[image.key, device] = found
    return found
