"""What a run was: seed, versions, machine and options, so that it can be told later and done again."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ranvier.errors import CannotWrite
from ranvier.formats.files import write_files

_PACKAGES = ("ranvier", "numpy", "llvmlite", "ml_dtypes", "onnx")
FILE = "run.json"


def versions() -> dict[str, str]:
    """Of everything that decides numbers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "source"
    return found


def record(seed: int, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run that begins now, as plain data."""
    return {
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "versions": versions(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "program": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
        "configuration": plain(configuration),
    }


def save(folder: Path, facts: Mapping[str, Any]) -> Path:
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error
    write_files({path: [(json.dumps(facts, indent=2) + "\n").encode()]})
    return path


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """What is not the same in two records of one form, one line each."""
    found: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        old, new, name = before.get(key), now.get(key), f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{name}.")
        elif old != new:
            found.append(f"{name} was {old!r} and is {new!r}")
    return found


def plain(value: Any) -> Any:
    """Anything as JSON can hold it: what has no form of its own is told by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    return getattr(value, "__qualname__", type(value).__qualname__)
