"""What the machine has, as far as this process may use it."""

from __future__ import annotations

from ranvier.devices.host import cpu_features, machine_info, usable_cores, usable_memory
from ranvier.devices.kinds import CPU, Device, DeviceInfo, GpuInfo, MachineInfo, NumaNode

__all__ = [
    "CPU",
    "Device",
    "DeviceInfo",
    "GpuInfo",
    "MachineInfo",
    "NumaNode",
    "cpu_features",
    "machine_info",
    "usable_cores",
    "usable_memory",
]
