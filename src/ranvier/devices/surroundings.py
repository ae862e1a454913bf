"""Everything detection looks at, in one object: tests put a made-up machine in its place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ranvier.devices.nvml import GpuLibrary, open_nvml
from ranvier.records import dataclass


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch, known without importing it: ``cuda`` is the version it was built for, or None."""

    version: str
    cuda: str | None


def find_torch() -> TorchBuild | None:
    """The installed torch; None where there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return read_torch_version(text)


def read_torch_version(text: str) -> TorchBuild:
    """What torch's own file of versions says."""
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return TorchBuild(found.get("__version__", ""), found.get("cuda"))


def loaded_torch() -> Any:
    """Torch where this process has imported it already."""
    return sys.modules.get("torch")


def import_torch() -> Any:
    """Torch, imported now, which takes seconds; ImportError where it cannot be."""
    return importlib.import_module("torch")


def _affinity() -> frozenset[int]:
    found = getattr(os, "sched_getaffinity", None)
    return frozenset(found(0)) if found is not None else frozenset(range(os.cpu_count() or 1))


def _physical_memory() -> int | None:
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not everywhere
        return None


def _address_space() -> int | None:
    """What the process may reserve in all, where a limit is set."""
    try:
        import resource  # not on every system
    except ImportError:
        return None
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if allowed == resource.RLIM_INFINITY else allowed


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Surroundings:
    """The machine and the process, as far as detection asks about them."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    system: str = sys.platform
    machine: str = field(default_factory=platform.machine)
    platform: Callable[[], str] = platform.platform  # takes milliseconds, and most have no use for it
    cores_present: int = field(default_factory=lambda: os.cpu_count() or 1)
    affinity: Callable[[], frozenset[int]] = _affinity
    physical_memory: Callable[[], int | None] = _physical_memory
    address_space: Callable[[], int | None] = _address_space
    nvml: Callable[[], GpuLibrary] = open_nvml
    find_torch: Callable[[], TorchBuild | None] = find_torch
    loaded_torch: Callable[[], Any] = loaded_torch
    import_torch: Callable[[], Any] = import_torch
    has_package: Callable[[str], bool] = _has_package

    def read(self, path: str, most: int = -1) -> str:
        """Text of a file below the root; empty where it cannot be read. ``most`` bytes of it, where given."""
        try:
            with open(os.path.join(self.root, path), "rb") as file:
                return file.read(most).decode(errors="replace")
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """The whole number a file holds; None for anything else."""
        text = self.read(path, 64).strip()
        return int(text) if text.isascii() and text.isdigit() else None

    def entries(self, path: str) -> list[str]:
        """Names in a folder below the root, in order; none where it cannot be read."""
        try:
            return sorted(os.listdir(os.path.join(self.root, path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self.root / path)


__all__ = ["Surroundings", "TorchBuild", "find_torch", "read_torch_version"]
