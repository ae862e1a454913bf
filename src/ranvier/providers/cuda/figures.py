"""What a device does, measured: whether a kernel computes rightly, how fast memory is, and how fast products are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.place import Gpu, Twin
from ranvier.records import dataclass

_ROUNDS = 10
_ON_GPU = (1 << 28, 8192)  # bytes to copy, rows of a square product
_ON_TWIN = (1 << 22, 256)


@dataclass(frozen=True)
class DeviceFigures:
    """``kernel``: empty where a small kernel gave what it should, otherwise what was wrong. Rates are per second."""

    name: str
    capability: tuple[int, int] | None
    runtime: str  # of CUDA, as torch was built with it
    kernel: str
    copy_bytes: float  # read and written
    upload_bytes: float  # from pinned memory of the host
    matrix_flops: float
    matrix_type: str


def measured(place: Twin | Gpu) -> DeviceFigures:
    """Takes some tenths of a second on a GPU that is awake."""
    nbytes, rows = _ON_TWIN if isinstance(place, Twin) else _ON_GPU
    capability = None
    name, runtime = "torch's CPU device", ""
    if isinstance(place, Gpu):
        told = torch.cuda.get_device_properties(place.index)
        name, capability, runtime = str(told.name), (int(told.major), int(told.minor)), str(torch.version.cuda)
    with torch.no_grad(), place.computing():
        wrong = _checked(place)
        source = torch.zeros(nbytes, dtype=torch.uint8, device=place.device)
        target = torch.empty_like(source)
        copying = _seconds(place, lambda: target.copy_(source))
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=isinstance(place, Gpu))
        uploading = _seconds(place, lambda: target.copy_(pinned, non_blocking=True))
        kind = torch.bfloat16 if isinstance(place, Gpu) else torch.float32
        a = torch.randn(rows, rows, device=place.device).to(kind)
        b = torch.randn(rows, rows, device=place.device).to(kind)
        multiplying = _seconds(place, lambda: torch.matmul(a, b))
    place.empty_cache()
    return DeviceFigures(
        name,
        capability,
        runtime,
        wrong,
        2 * nbytes / copying,
        nbytes / uploading,
        2.0 * rows**3 / multiplying,
        str(kind).removeprefix("torch."),
    )


def _checked(place: Twin | Gpu) -> str:
    """A kernel whose result is known to the last bit."""
    x = torch.arange(1 << 16, dtype=torch.int64, device=place.device)
    found = int((x * 3 + 1).sum().item())
    wanted = 3 * (x.numel() * (x.numel() - 1) // 2) + x.numel()
    return "" if found == wanted else f"a sum is {found}, not {wanted}"


def _seconds(place: Twin | Gpu, work: Callable[[], Any]) -> float:
    """The fastest of some rounds, after two that warm up."""
    times = []
    for k in range(_ROUNDS + 2):
        if isinstance(place, Gpu):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
        if k >= 2:
            times.append(max(seconds, 1e-9))
    return float(min(times))


__all__ = ["DeviceFigures", "measured"]
