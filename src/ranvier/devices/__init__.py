"""What the machine has, as far as this process may use it."""

from __future__ import annotations

from ranvier.devices.choose import DeviceConfig, detect_devices, forced, get_device, warn_of_unusable_gpus
from ranvier.devices.host import (
    address_space_left,
    cpu_features,
    machine_info,
    memory_left,
    resident_memory,
    usable_cores,
    usable_memory,
)
from ranvier.devices.kinds import CPU, Device, DeviceInfo, GpuInfo, MachineInfo, NumaNode

__all__ = [
    "CPU",
    "Device",
    "DeviceConfig",
    "DeviceInfo",
    "GpuInfo",
    "MachineInfo",
    "NumaNode",
    "address_space_left",
    "cpu_features",
    "detect_devices",
    "forced",
    "get_device",
    "machine_info",
    "memory_left",
    "resident_memory",
    "usable_cores",
    "usable_memory",
    "warn_of_unusable_gpus",
]
