"""Memory of a device: torch's caching allocator with a limit, counted.

Kernels get their tensors from torch directly; what is handed out here are buffers for whoever wants some of their own.
The limit holds for everything that torch takes from the driver for this process on this device.
"""

from __future__ import annotations

import threading
from typing import Any

from ranvier.errors import InvalidBuffer, InvalidValue, MemoryLimit
from ranvier.providers.base import AllocatorStats
from ranvier.providers.cuda.failures import Health
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.place import Gpu, Twin
from ranvier.providers.memory import PoolAllocator


class DeviceMemory:
    """Buffers of bytes on one device, as tensors; thread-safe."""

    def __init__(self, place: Twin | Gpu, health: Health, limit: int | None = None) -> None:
        self._place = place
        self._health = health
        self._limit = limit
        self._lock = threading.Lock()
        self._out: dict[int, Any] = {}
        self._active = self._peak = self._requests = self._failures = 0
        if limit is not None and isinstance(place, Gpu):
            total = torch.cuda.get_device_properties(place.index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), place.index)

    def alloc(self, nbytes: int, part: str = "") -> Any:
        """A buffer; OutOfMemory, which names ``part``, where there is no room."""
        if nbytes < 0:
            raise InvalidValue(f"a buffer of {nbytes} bytes")
        what = f"{part or 'a buffer'} of {nbytes:,} bytes on {self._place.device}"
        with self._lock:
            self._requests += 1
            if self._limit is not None and self._active + nbytes > self._limit:
                self._failures += 1
                taken = self._active + nbytes
                raise MemoryLimit("memory_limit", self._limit, taken, what, part=part, requested=nbytes)
            self._active += nbytes
        try:
            buffer = self._health.guarded(what, lambda: self._empty(nbytes), self._place.empty_cache)
        except BaseException:
            with self._lock:
                self._active -= nbytes
                self._failures += 1
            raise
        with self._lock:
            self._out[id(buffer)] = buffer
            self._peak = max(self._peak, self._active)
        return buffer

    def _empty(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._place.device)

    def free(self, buffer: Any) -> None:
        """Give back what ``alloc`` gave, the same object; InvalidBuffer for anything else."""
        with self._lock:
            if self._out.pop(id(buffer), None) is None:
                raise InvalidBuffer(f"this buffer is not in use on {self._place.device}")
            self._active -= int(buffer.numel())

    def copy(self, source: Any, target: Any) -> None:
        with self._place.computing():
            target.copy_(source, non_blocking=True)

    def trim(self) -> int:
        """Give the driver back what torch keeps for reuse; how many bytes that were."""
        before = self._place.memory()[2]
        self._place.empty_cache()
        return max(before - self._place.memory()[2], 0)

    def stats(self) -> AllocatorStats:
        active, peak, reserved, failures = self._place.memory()
        with self._lock:
            return AllocatorStats(
                active=max(active, self._active),
                peak=max(peak, self._peak),
                cached=max(reserved - active, 0),
                reserved=max(reserved, self._active),
                allocations=self._requests,
                failures=failures + self._failures,
            )


class HostSide(PoolAllocator):
    """The pool for arenas on the host that every provider has; it tells of the device's memory as well, and trims it
    along."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.device: DeviceMemory | None = None  # once something is there

    def stats(self) -> AllocatorStats:
        own = super().stats()
        if self.device is None:
            return own
        there = self.device.stats()
        return AllocatorStats(
            own.active + there.active,
            own.peak + there.peak,
            own.cached + there.cached,
            own.reserved + there.reserved,
            own.allocations + there.allocations,
            own.failures + there.failures,
        )

    def trim(self) -> int:
        return super().trim() + (0 if self.device is None else self.device.trim())


__all__ = ["DeviceMemory", "HostSide"]
