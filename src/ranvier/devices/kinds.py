"""What is told about devices, as plain data."""

from __future__ import annotations

from ranvier.records import dataclass


@dataclass(frozen=True)
class Device:
    """One place where tensors live and kernels run."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.index == 0 and self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


@dataclass(frozen=True)
class MachineInfo:
    """The host in short: cores and memory usable under affinity and container limits."""

    platform: str
    machine: str
    cores: int
    cores_present: int
    memory_bytes: int | None
    model_name: str


@dataclass(frozen=True)
class NumaNode:
    """Memory that some cores are nearest to. ``cores`` are those this process may run on; a node may have none."""

    index: int
    cores: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuInfo:
    """One graphics processor. ``problem`` says why it cannot be used; it is empty where it can.

    ``index`` is the number by which this process asks for it, and None for one that it cannot ask for.
    """

    kind: str  # "cuda", "metal"
    index: int | None
    name: str
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    driver: str = ""
    problem: str = ""
    hidden: bool = False  # from this process, by somebody's wish

    @property
    def usable(self) -> bool:
        return not self.problem

    @property
    def device(self) -> Device | None:
        return None if self.index is None else Device(self.kind, self.index)


@dataclass(frozen=True)
class DeviceInfo:
    """The machine as this process may use it."""

    platform: str
    machine: str
    processor: str
    cores: int  # usable: affinity, then the container's quota
    cores_present: int
    quota: float | None  # processors the container grants, which may be less than one
    memory_bytes: int | None  # usable: the lower of what there is and what the container may have
    memory_present: int | None
    features: tuple[str, ...]  # of vectors and matrices, by LLVM's names
    numa: tuple[NumaNode, ...]  # at least one
    gpus: tuple[GpuInfo, ...]
    forced: Device | None = None  # what the environment insists on
    forced_by: str = ""  # the variable that does

    @property
    def cuda(self) -> tuple[GpuInfo, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.kind == "cuda")


__all__ = ["CPU", "Device", "DeviceInfo", "GpuInfo", "MachineInfo", "NumaNode"]
