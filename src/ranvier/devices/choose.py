"""Which device work goes to: CUDA where it can be used, else the CPU, and one warning that says so."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import ClassVar

from ranvier.devices.gpu import find_gpus
from ranvier.devices.host import (
    cpu_quota,
    numa_nodes,
    processor_name,
    usable_cores,
    usable_memory,
    vector_features,
)
from ranvier.devices.kinds import CPU, Device, DeviceInfo, GpuInfo
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import InvalidConfig
from ranvier.logs import warn_once
from ranvier.records import dataclass
from ranvier.rules import Checked, Flag, Rule, Whole, flag

# The first that is set decides. All but the first are names that programs of earlier projects use.
_PREFIXES = ("RANVIER", "RUST_AI", "AXOLOTL", "VSA_OPTIM")
FORCE_CPU = tuple(f"{prefix}_FORCE_CPU" for prefix in _PREFIXES)
CUDA_DEVICE = tuple(f"{prefix}_CUDA_DEVICE" for prefix in _PREFIXES)
_WARNED = "device"  # one key, so that one process warns once, whoever finds out
_SILENCE = f"set {FORCE_CPU[0]}=1 to choose the CPU and silence this"


@dataclass(frozen=True)
class DeviceConfig(Checked):
    """What is wanted of a device. What is None, the environment decides."""

    force_cpu: bool | None = None
    cuda_device: int | None = None  # the number of a GPU
    warn: bool = True  # once per process, when the CPU is used because CUDA cannot be

    RULES: ClassVar[Mapping[str, Rule]] = {
        "force_cpu": Flag(optional=True),
        "cuda_device": Whole(0, optional=True),
        "warn": Flag(),
    }


def detect_devices(*, probe: bool = False, around: Surroundings | None = None) -> DeviceInfo:
    """The machine as this process may use it. ``probe`` imports torch, to be certain of the GPUs."""
    around = around or Surroundings()
    wanted, variable = forced(around.environ)
    return DeviceInfo(
        platform=around.platform(),
        machine=around.machine,
        processor=processor_name(around),
        cores=usable_cores(around),
        cores_present=around.cores_present,
        quota=cpu_quota(around),
        memory_bytes=usable_memory(around),
        memory_present=around.physical_memory(),
        features=vector_features(around),
        numa=numa_nodes(around),
        gpus=find_gpus(around, probe=probe),
        forced=wanted,
        forced_by=variable,
    )


def get_device(config: DeviceConfig | None = None, *, around: Surroundings | None = None) -> Device:
    """The CUDA device that is wanted where it can be used, else the CPU.

    A number that no GPU of this machine has raises InvalidConfig. Torch is imported only where everything that can be
    known without it speaks for CUDA.
    """
    config = config or DeviceConfig()
    around = around or Surroundings()
    if config.force_cpu or (config.force_cpu is None and _force_cpu(around.environ)[0]):
        return CPU
    index, source = config.cuda_device, "DeviceConfig: cuda_device"
    if index is None:
        index, source = _cuda_device(around.environ)
    wanted = 0 if index is None else index
    gpus = [gpu for gpu in find_gpus(around, probe=True) if gpu.kind == "cuda"]
    numbered = [gpu for gpu in gpus if gpu.index is not None]
    if numbered and wanted >= len(numbered):
        raise InvalidConfig(f"{source}: there is no GPU {wanted}, they have the numbers 0 to {len(numbered) - 1}")
    chosen = next((gpu for gpu in numbered if gpu.index == wanted), None)
    if chosen is not None and chosen.usable:
        return Device("cuda", wanted)
    if config.warn:
        reason = _reason(chosen or (gpus[0] if gpus else None))
        warn_once(_WARNED, f"{reason}: using the CPU; {_SILENCE}", stderr=True)
    return CPU


def warn_of_unusable_gpus(around: Surroundings | None = None) -> None:
    """For those who did not ask for a device: say so, once, where a GPU is here and none can be used.

    A machine without one is left in peace, and so are a user who hid the GPUs and one who wants the CPU.
    """
    if around is None:
        _warn_of_own_gpus(*(os.environ.get(name) for name in FORCE_CPU))
        return
    if _force_cpu(around.environ)[0]:
        return
    gpus = [gpu for gpu in find_gpus(around) if gpu.kind == "cuda" and not gpu.hidden]
    if gpus and not any(gpu.usable for gpu in gpus):
        warn_once(_WARNED, f"{_reason(gpus[0])}: using the CPU; {_SILENCE}", stderr=True)


@functools.cache
def _warn_of_own_gpus(*_environment: str | None) -> None:
    """Looking at the machine takes a millisecond: once is enough."""
    warn_of_unusable_gpus(Surroundings())


def _reason(gpu: GpuInfo | None) -> str:
    return "there is no CUDA device" if gpu is None else f"{gpu.name} cannot be used: {gpu.problem}"


# -- the environment ------------------------------------------------------------------------------------------------


def forced(environ: Mapping[str, str]) -> tuple[Device | None, str]:
    """The device that the environment insists on and the variable that does; InvalidConfig for one without sense."""
    on_cpu, variable = _force_cpu(environ)
    if on_cpu:
        return CPU, variable
    index, variable = _cuda_device(environ)
    return (None, "") if index is None else (Device("cuda", index), variable)


def _force_cpu(environ: Mapping[str, str]) -> tuple[bool, str]:
    for name in FORCE_CPU:
        if text := environ.get(name, "").strip():
            try:
                return flag(text), name
            except ValueError as error:
                raise InvalidConfig(f"environment variable {name}: {error}") from None
    return False, ""


def _cuda_device(environ: Mapping[str, str]) -> tuple[int | None, str]:
    for name in CUDA_DEVICE:
        if text := environ.get(name, "").strip():
            if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
                raise InvalidConfig(f"environment variable {name}: must be the number of a GPU, got {text!r}")
            return int(text), name
    return None, ""


__all__ = [
    "CUDA_DEVICE",
    "FORCE_CPU",
    "DeviceConfig",
    "detect_devices",
    "forced",
    "get_device",
    "warn_of_unusable_gpus",
]
