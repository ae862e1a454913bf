"""Calibrations on disk: one small file for each provider as it is set up on this machine.

A file appears whole under its name or not at all, so any number of processes may write; what cannot be read counts
as absent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ranvier.codegen.llvm import cache
from ranvier.devices import machine_info
from ranvier.formats.files import write_files
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.calibration.table import Figures

_VERSION = 2  # of the way of measuring, and of the files
_FOLDER = "calibration"
_lock = threading.Lock()
_read: dict[tuple[Path | None, str], Figures] = {}  # what this process has read or measured


def folder() -> Path | None:
    """Where calibrations are kept; None where nothing is kept on disk."""
    where = cache.folder()
    return None if where is None else where / _FOLDER


def key_of(provider: ExecutionProvider, threads: int | None, options: Any = None) -> dict[str, Any]:
    """Everything the figures of a provider depend on. ``options``: its own, where it does not hold them itself."""
    machine = machine_info()
    own = getattr(provider, "options", None)
    given = own if is_dataclass(own) and not isinstance(own, type) else options
    return {
        "version": _VERSION,
        "ranvier": _ranvier_version(),
        "processor": machine.model_name or machine.machine,
        "cores": machine.cores,
        "provider": provider.name,
        "device": str(provider.device),
        "notes": provider.capability().notes,  # other libraries tell their version there
        "options": _told(asdict(given)) if is_dataclass(given) and not isinstance(given, type) else {},
        "address": str(getattr(provider, "address", "")),
        "threads": threads,
        "isa": os.environ.get("RANVIER_CPU_ISA", ""),
    }


def _told(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those that a file must not hold, and that have no bearing on speed."""
    return {name: value for name, value in options.items() if "token" not in name and "password" not in name}


@functools.cache
def _ranvier_version() -> str:
    try:
        return metadata.version("ranvier")
    except metadata.PackageNotFoundError:
        return ""


def load(key: dict[str, Any]) -> Figures | None:
    """What was measured for a key, by this process or an earlier one."""
    where = folder()
    name = _name(key)
    with _lock:
        known = _read.get((where, name))
    if known is not None or where is None:
        return known
    try:
        data = json.loads((where / name).read_text("utf-8"))
        if not isinstance(data, dict) or data["key"] != _plain(key):
            return None
        found = Figures.from_dict(data["figures"])
    except (OSError, ValueError, KeyError, RecursionError):
        return None
    with _lock:
        _read[where, name] = found
    return found


def save(key: dict[str, Any], figures: Figures) -> bool:
    """Keep figures; False where they are kept for this process only."""
    where = folder()
    name = _name(key)
    with _lock:
        _read[where, name] = figures
    if where is None:
        return False
    text = json.dumps({"key": _plain(key), "figures": figures.to_dict()}, indent=1)
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_files({where / name: [text.encode()]})
    except OSError:  # it will be measured again
        return False
    return True


def entries() -> list[tuple[dict[str, Any], Figures]]:
    """All that is kept on disk and can be read."""
    found: list[tuple[dict[str, Any], Figures]] = []
    where = folder()
    for path in sorted(where.glob("*.json")) if where is not None else []:
        with contextlib.suppress(OSError, ValueError, KeyError, RecursionError, TypeError):
            data = json.loads(path.read_text("utf-8"))
            found.append((dict(data["key"]), Figures.from_dict(data["figures"])))
    return found


def clear(provider: str | None = None) -> int:
    """Delete what is kept, of one provider or of all; how many files that were."""
    with _lock:
        _read.clear()
    where, count = folder(), 0
    for path in where.glob("*.json") if where is not None else []:
        if provider is None or path.name.startswith(f"{provider}-"):
            with contextlib.suppress(OSError):
                path.unlink()
                count += 1
    return count


def _plain(key: dict[str, Any]) -> Any:
    return json.loads(json.dumps(key, sort_keys=True, default=str))


def _name(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return f"{key['provider']}-{digest[:24]}.json"
