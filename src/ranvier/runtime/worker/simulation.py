"""An accelerator that does not exist: the time that arithmetic and transfers would take there, and faults when they
are due."""

from __future__ import annotations

import os
import time

from ranvier.errors import OutOfMemory, ProviderFailed
from ranvier.ops.registry import Cost
from ranvier.providers.distant.wire import PREFIX, Buffer
from ranvier.providers.sim.faults import Fault


class Simulated:
    """The conduct of the simulated device. Real work that took less than it would have there is followed by a wait."""

    def __init__(self, *, gflops: float, bandwidth: float, latency: float, faults: tuple[Fault, ...]) -> None:
        self._flops = gflops * 1e9
        self._bandwidth = bandwidth
        self._latency = latency
        self._faults = faults
        self._run = 0
        self._damage = False

    def arrived(self, kind: str, nbytes: int) -> None:
        _wait(self._latency + nbytes / self._bandwidth)

    def ran(self, cost: Cost, seconds: float) -> None:
        _wait(cost.flops / self._flops - seconds)

    def before_run(self) -> None:
        self._run += 1
        self._damage = False
        for fault in self._faults:
            if fault.due(self._run):
                self._strike(fault)

    def answer(self, pieces: list[Buffer]) -> list[Buffer]:
        if self._damage:
            self._damage = False
            header = bytearray(pieces[1])
            header[len(header) // 2] ^= 0xFF
            return [pieces[0], header, *pieces[2:]]
        size = sum(len(memoryview(piece).cast("B")) for piece in pieces) - PREFIX.size
        _wait(size / self._bandwidth)
        return pieces

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "fail":
            raise ProviderFailed("sim", f"told to fail at run {self._run}")
        if fault.kind == "flaky":
            raise ProviderFailed("sim", f"told to fail for once at run {self._run}", transient=True)
        if fault.kind == "oom":
            raise OutOfMemory(f"told to have no memory at run {self._run}")
        if fault.kind in ("hang", "slow"):
            time.sleep(fault.seconds or 3600.0)
        elif fault.kind == "crash":
            os._exit(13)
        else:
            self._damage = True


def _wait(seconds: float) -> None:
    """Sleeping is too coarse for microseconds: those are spun away."""
    if seconds <= 0:
        return
    until = time.perf_counter() + seconds
    if seconds > 2e-3:
        time.sleep(seconds - 1e-3)
    while time.perf_counter() < until:
        pass
