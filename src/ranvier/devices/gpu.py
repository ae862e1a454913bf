"""Graphics processors: which there are, and why one cannot be used.

A GPU is used through torch, and importing that takes seconds. So its driver is asked first, and torch's own files are
read to see what it was built for; torch itself is asked only where it is loaded already, or when ``probe`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ranvier.devices.kinds import GpuInfo
from ranvier.devices.nvml import NvmlError, NvmlGpu
from ranvier.devices.surroundings import Surroundings

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "proc/driver/nvidia"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # classes of the PCI bus: display controllers, with and without a screen


def find_gpus(around: Surroundings, *, probe: bool = False) -> tuple[GpuInfo, ...]:
    """All GPUs that Ranvier knows how to ask about, the usable ones first."""
    found = [*_cuda(around, probe), *_metal(around)]
    return tuple(sorted(found, key=lambda gpu: (gpu.index is None, gpu.index or 0)))


# -- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda(around: Surroundings, probe: bool) -> list[GpuInfo]:
    try:
        driver, listed = around.nvml().read()
        trouble = ""
    except NvmlError as error:
        driver, listed, trouble = "", [], str(error)
    if listed:
        found = _visible(listed, driver, around.environ.get(VISIBLE))
        problem = _build_problem(around)
        found = [gpu if gpu.problem else replace(gpu, problem=problem) for gpu in found]
    else:
        found = _present(around, trouble)
    torch = around.loaded_torch()
    if torch is None and probe and any(gpu.usable for gpu in found):
        try:
            torch = around.import_torch()
        except Exception as error:  # a broken installation may raise anything
            return [_failed(gpu, f"torch cannot be imported ({error})") for gpu in found]
    return found if torch is None else _asked(torch, found, driver)


def _visible(listed: Sequence[NvmlGpu], driver: str, chosen: str | None) -> list[GpuInfo]:
    """GPUs with the numbers CUDA gives them in this process: those the variable lists, in its order."""
    order = list(range(len(listed))) if chosen is None else _chosen(listed, chosen)
    found = []
    for position, gpu in enumerate(listed):
        index = order.index(position) if position in order else None
        hidden = index is None
        problem = f"hidden by {VISIBLE}={chosen}" if hidden else gpu.problem
        found.append(GpuInfo("cuda", index, gpu.name, gpu.memory_bytes, gpu.capability, driver, problem, hidden))
    return found


def _chosen(listed: Sequence[NvmlGpu], text: str) -> list[int]:
    """Positions that the variable lists. Like CUDA itself, it is read up to the first entry that makes no sense."""
    order: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"\d{1,6}", entry, re.ASCII):
            matches = [int(entry)] if int(entry) < len(listed) else []
        else:
            named = re.fullmatch(r"gpu-.+", entry.lower())  # a beginning of an identifier suffices, if only one has it
            matches = [k for k, gpu in enumerate(listed) if named and gpu.uuid.lower().startswith(named[0])]
        if len(matches) != 1 or matches[0] in order:
            break
        order += matches
    return order


def _present(around: Surroundings, trouble: str) -> list[GpuInfo]:
    """GPUs that are there although the driver's library does not tell of them."""
    told = around.read(f"{_DRIVER}/version", 4096)  # most often nothing, and then no pattern is compiled to look at it
    version = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]*)", told, re.ASCII) if told else None
    driver = version[1] if version is not None else ""
    names = []
    for folder in around.entries(f"{_DRIVER}/gpus"):
        model = re.search(r"^Model:\s*(\S.*?)\s*$", around.read(f"{_DRIVER}/gpus/{folder}/information", 4096), re.M)
        names.append(model[1] if model is not None else "NVIDIA GPU")
    if not names:
        numbers = [name.removeprefix("nvidia") for name in around.entries("dev") if name.startswith("nvidia")]
        names = ["NVIDIA GPU" for number in numbers if number.isascii() and number.isdigit()]
    if names:
        problem = trouble or "the NVIDIA driver tells of no GPU that this process may use"
    else:
        names = ["NVIDIA GPU" for name in around.entries(_PCI) if _is_nvidia(around, f"{_PCI}/{name}")]
        problem = trouble if driver and trouble else "no NVIDIA driver is loaded"
    return [GpuInfo("cuda", None, name, driver=driver, problem=problem) for name in names]


def _is_nvidia(around: Surroundings, device: str) -> bool:
    kind = around.read(f"{device}/class", 32).strip()
    return kind.startswith(_DISPLAY) and around.read(f"{device}/vendor", 32).strip() == _NVIDIA


def _build_problem(around: Surroundings) -> str:
    torch = around.find_torch()
    if torch is None:
        return "torch is not installed"
    return "" if torch.cuda else f"the installed torch {torch.version} is built without CUDA"


def _failed(gpu: GpuInfo, problem: str) -> GpuInfo:
    return gpu if gpu.problem else replace(gpu, problem=problem)


def _asked(torch: Any, found: list[GpuInfo], driver: str) -> list[GpuInfo]:
    """What torch itself says, laid over what was found: its numbers are the ones programs use."""
    try:
        if not torch.cuda.is_available():
            return [_failed(gpu, _refusal(torch)) for gpu in found]
        code = list(torch.cuda.get_arch_list())
        told = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # drivers fail in many ways
        return [_failed(gpu, f"torch cannot use it ({error})") for gpu in found]
    known = []
    for index, each in enumerate(told):
        capability = (int(each.major), int(each.minor))
        problem = "" if _has_code(code, capability) else _no_code(torch, code, capability)
        known.append(GpuInfo("cuda", index, str(each.name), int(each.total_memory), capability, driver, problem))
    unseen = [gpu for gpu in found if gpu.index is None or gpu.index >= len(told)]
    return known + [_failed(gpu, f"torch sees only {len(told)} GPUs") for gpu in unseen]


def _refusal(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"torch cannot use it ({lines[0] if lines else type(error).__name__})"
    return "torch finds no CUDA device"


def _has_code(code: Sequence[str], capability: tuple[int, int]) -> bool:
    """Machine code runs on the same generation from its own step on; intermediate code on everything newer."""
    if not code or any(not name.startswith(("sm_", "compute_")) for name in code):
        return True  # another vendor's names: nothing to compare
    for name in code:
        kind, _, digits = name.partition("_")
        number = re.match(r"\d+", digits)
        if number is None:
            continue
        built = divmod(int(number[0]), 10)
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def _no_code(torch: Any, code: Sequence[str], capability: tuple[int, int]) -> str:
    return (
        f"torch {getattr(torch, '__version__', '')} has no code for compute capability {capability[0]}.{capability[1]} "
        f"(it has {', '.join(code)})"
    )


# -- Apple ----------------------------------------------------------------------------------------------------------


def _metal(around: Surroundings) -> list[GpuInfo]:
    if around.system != "darwin" or around.machine.lower() != "arm64":
        return []
    problem = "" if around.has_package("mlx") else "mlx is not installed"
    return [GpuInfo("metal", 0, "Apple GPU", around.physical_memory(), problem=problem)]


__all__ = ["VISIBLE", "find_gpus"]
