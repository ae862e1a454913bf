"""Cores, memory and instructions of the host, as far as this process may use them.

The files of the system are read without trust: one that is absent or makes no sense counts as no limit.
"""

from __future__ import annotations

import mmap
import platform
import re
import time
from dataclasses import replace

from ranvier.devices.kinds import MachineInfo, NumaNode
from ranvier.devices.surroundings import Surroundings

_CGROUPS = "sys/fs/cgroup"
_NODES = "sys/devices/system/node"
_CPUINFO_BYTES = 16384  # on large machines the whole of cpuinfo takes the kernel milliseconds; one processor suffices

# What Linux calls the features whose LLVM name is another one.
_LINUX_NAMES = {
    "abm": "lzcnt",
    "bmi1": "bmi",
    "avx_vnni": "avxvnni",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "amx_fp16": "amx-fp16",
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
}
_VECTORS = re.compile(r"avx|amx-|sse|fma$|f16c$|neon|dotprod|fullfp16|i8mm|bf16|sve|sme(?!p)")


# -- cores ----------------------------------------------------------------------------------------------------------


def usable_cores(around: Surroundings | None = None) -> int:
    """Cores this process may run on: scheduling affinity, then the container's CPU quota; at least one.

    A quota is rounded down: threads that wait for each other lose more to being stopped than a part of a core gains.
    """
    quota = _own_quota() if around is None else cpu_quota(around)
    cores = max(1, len((around or Surroundings()).affinity()))
    return cores if quota is None else max(1, min(cores, int(quota)))


_LOOK_SECONDS = 1.0
_own: tuple[float, float | None] = (-_LOOK_SECONDS, None)  # when this process's quota was last looked at, and it


def _own_quota() -> float | None:
    """Read again after a second: a session asks several times, and a look means a dozen files."""
    global _own
    looked, quota = _own
    now = time.monotonic()
    if now - looked >= _LOOK_SECONDS:
        quota = cpu_quota(Surroundings())
        _own = (now, quota)
    return quota


def cpu_quota(around: Surroundings) -> float | None:
    """Processors granted by cgroup v2 or v1, the lowest on the way up to the root; None where there is no quota."""
    found = [_quota(around.read(f"{group}/cpu.max", 64)) for group in _groups(around, "")]
    for group in _groups(around, "cpu"):
        pair = f"{around.read(f'{group}/cpu.cfs_quota_us', 64)} {around.read(f'{group}/cpu.cfs_period_us', 64)}"
        found.append(_quota(pair))
    return min((quota for quota in found if quota is not None), default=None)


def _quota(text: str) -> float | None:
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        return None  # "max", "-1", and whatever makes no sense
    quota, period = int(words[0]), int(words[1])
    return quota / period if quota > 0 and period > 0 else None


def _groups(around: Surroundings, controller: str) -> list[str]:
    """Folders of this process's control group and of those above it; ``controller`` is empty for version 2.

    Inside a container the path that the process is told may be the host's, and then only the top folder exists.
    """
    paths = []
    for line in around.read("proc/self/cgroup", 65536).splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if (controller in names.split(",")) if controller else not names:
            paths.append((f"{_CGROUPS}/{names}" if controller else _CGROUPS, path))
            if controller and names != controller:
                paths.append((f"{_CGROUPS}/{controller}", path))  # a link beside the folder of several controllers
    top = f"{_CGROUPS}/{controller}" if controller else _CGROUPS
    found = {top: None}
    for base, path in paths:
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts) + 1):
            found["/".join([base, *parts[:length]])] = None
    if not controller:
        found.update({f"{_CGROUPS}/unified{group[len(_CGROUPS) :]}": None for group in list(found)})
    return list(found)


# -- memory ---------------------------------------------------------------------------------------------------------


def usable_memory(around: Surroundings | None = None) -> int | None:
    """Bytes of memory this process may use: physical memory, or the container's limit where that is lower."""
    around = around or Surroundings()
    found = [around.physical_memory(), *(around.number(f"{g}/memory.max") for g in _groups(around, ""))]
    found += [around.number(f"{group}/memory.limit_in_bytes") for group in _groups(around, "memory")]
    return min((number for number in found if number), default=None)


def memory_left(around: Surroundings | None = None) -> int | None:
    """Bytes that can still be taken: what the system calls available, or less where a container's limit is near."""
    around = around or Surroundings()
    found = [_left(around, g, "memory.max", "memory.current", "inactive_file") for g in _groups(around, "")]
    for group in _groups(around, "memory"):
        found.append(_left(around, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    system = _fields(around.read("proc/meminfo", 65536))
    if "MemAvailable:" in system:
        found.append((system["MemAvailable:"] + system.get("SwapFree:", 0)) * 1024)
    known = [left for left in found if left is not None]
    if known:
        return max(0, min(known))
    usable = usable_memory(around)
    return None if usable is None else max(0, usable - resident_memory(around))


def resident_memory(around: Surroundings | None = None) -> int:
    """Bytes of this process that are in memory now; where the system does not say, the most there ever were, or 0."""
    around = around or Surroundings()
    words = around.read("proc/self/statm", 256).split()
    if len(words) > 1 and words[1].isascii() and words[1].isdigit():
        return int(words[1]) * mmap.PAGESIZE
    try:
        import resource  # not on every system
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if around.system == "darwin" else peak * 1024


def address_space_left(around: Surroundings | None = None) -> int | None:
    """Bytes of address space this process may still reserve; None where nobody set a limit on it."""
    around = around or Surroundings()
    allowed = around.address_space()
    if allowed is None:
        return None
    words = around.read("proc/self/statm", 256).split()
    taken = int(words[0]) * mmap.PAGESIZE if words and words[0].isascii() and words[0].isdigit() else 0
    return max(0, allowed - taken)


def _left(around: Surroundings, group: str, limit: str, usage: str, reclaimable: str) -> int | None:
    allowed, used = around.number(f"{group}/{limit}"), around.number(f"{group}/{usage}")
    if allowed is None or used is None:
        return None
    # pages of files count as used, and go as soon as somebody needs the memory
    return allowed - used + _fields(around.read(f"{group}/memory.stat", 65536)).get(reclaimable, 0)


def _fields(text: str) -> dict[str, int]:
    """The first number of each line, by its first word."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isascii() and row[1].isdigit()}


def numa_nodes(around: Surroundings) -> tuple[NumaNode, ...]:
    """Nodes with the cores this process may use; one with everything where the system tells of none."""
    allowed = around.affinity()
    found = []
    for name in around.entries(_NODES):
        match = re.fullmatch(r"node(\d+)", name, re.ASCII)
        if match is None:
            continue
        cores = core_list(around.read(f"{_NODES}/{name}/cpulist", 65536))
        memory = re.search(r"MemTotal:\s*(\d+)\s*kB", around.read(f"{_NODES}/{name}/meminfo", 65536), re.ASCII)
        nbytes = int(memory[1]) * 1024 if memory is not None else None
        found.append(NumaNode(int(match[1]), tuple(c for c in cores if c in allowed), nbytes))
    if not any(node.cores for node in found):  # none told of, or what is told makes no sense
        return (NumaNode(0, tuple(sorted(allowed)), around.physical_memory()),)
    if len(found) == 1:  # it has all memory, also what was plugged in later, which a node may not count
        return (replace(found[0], memory_bytes=around.physical_memory() or found[0].memory_bytes),)
    return tuple(sorted(found, key=lambda node: node.index))


def core_list(text: str) -> tuple[int, ...]:
    """Numbers of a list such as ``0-3,8``; none for one that makes no sense."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if match is None:
            return ()
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < 1 << 20:  # more cores than any machine has: not a list of cores
            return ()
        found.update(range(low, high + 1))
    return tuple(sorted(found))


# -- the processor --------------------------------------------------------------------------------------------------


def cpu_features(around: Surroundings | None = None) -> frozenset[str]:
    """Features of the processor that the system lets programs use, by LLVM's names; none where it does not tell."""
    around = around or Surroundings()
    for line in around.read("proc/cpuinfo", _CPUINFO_BYTES).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(_llvm_name(flag) for flag in value.split())
    return frozenset()


def _llvm_name(flag: str) -> str:
    return _LINUX_NAMES.get(flag) or flag.replace("avx512_", "avx512")


def vector_features(around: Surroundings) -> tuple[str, ...]:
    """Those of the features that are about vectors and matrices."""
    found = {name for name in cpu_features(around) if _VECTORS.match(name)}
    if around.machine.lower() in ("arm64", "aarch64"):
        found.add("neon")  # every one of them has it
    return tuple(sorted(found))


def processor_name(around: Surroundings) -> str:
    for line in around.read("proc/cpuinfo", _CPUINFO_BYTES).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return ""


def machine_info(around: Surroundings | None = None) -> MachineInfo:
    around = around or Surroundings()
    return MachineInfo(
        platform=around.platform(),
        machine=around.machine,
        cores=usable_cores(around),
        cores_present=around.cores_present,
        memory_bytes=usable_memory(around),
        model_name=processor_name(around) or platform.processor(),
    )


__all__ = [
    "address_space_left",
    "core_list",
    "cpu_features",
    "cpu_quota",
    "machine_info",
    "memory_left",
    "numa_nodes",
    "processor_name",
    "resident_memory",
    "usable_cores",
    "usable_memory",
    "vector_features",
]
