"""What the machine has, as far as this process may use it."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """One place where tensors live and kernels run."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.index == 0 and self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class MachineInfo:
    """The host: cores and memory usable under affinity and container limits."""

    platform: str
    machine: str
    cores: int
    cores_present: int
    memory_bytes: int | None
    model_name: str


CPU = Device("cpu")


def usable_cores() -> int:
    """Cores this process may run on: scheduling affinity, then the container's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota)) if quota is not None and quota >= 1 else cores)


def _cgroup_quota() -> float | None:
    """CPUs granted by cgroup v2 or v1, or None where there is no quota."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def usable_memory() -> int | None:
    """Bytes of memory this process may use: physical memory, or the container's limit where that is lower."""
    found: list[int] = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not everywhere
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            found.append(int(text))
    return min(found) if found else None


def machine_info() -> MachineInfo:
    name = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return MachineInfo(
        platform=platform.platform(),
        machine=platform.machine(),
        cores=usable_cores(),
        cores_present=os.cpu_count() or 1,
        memory_bytes=usable_memory(),
        model_name=name or platform.processor(),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
