"""Tables of decisions on disk: one file for an instruction set and a number of threads on this machine.

What was measured holds for the code that was measured: a file names the code generator it is for, and another one
takes no notice of it. Files appear whole or not at all; what cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.codegen.llvm import cache
from ranvier.codegen.tuning import Table
from ranvier.devices import machine_info
from ranvier.formats.files import write_files
from ranvier.records import dataclass

_VERSION = 1  # of the files
_FOLDER = "tuning"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of files
_lock = threading.Lock()
_read: dict[str, tuple[int, dict[str, Entry]]] = {}  # by path: when the file was written, and what it holds


@dataclass(frozen=True)
class Entry:
    """A decision that was measured: the alternative (empty: the default is the best) and how much faster it was."""

    chosen: str
    gain: float  # time of the default divided by the time of what was chosen
    seconds: float  # of the default


def folder() -> Path | None:
    """Where tables are kept; None where nothing is kept on disk."""
    where = cache.folder()
    return None if where is None else where / _FOLDER


@functools.cache
def _machine() -> str:
    machine = machine_info()
    return f"{machine.model_name or machine.machine}, {machine.cores} cores"


def _key(isa: str, threads: int) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "machine": _machine(),
        "code": cache.generator_digest(),
        "isa": isa,
        "threads": threads,
    }


def _path(where: Path, isa: str, threads: int) -> Path:
    digest = hashlib.sha256(f"{_machine()}\0{isa}".encode()).hexdigest()[:16]
    return where / f"{digest}-{threads}.json"


def entries(isa: str, threads: int) -> dict[str, Entry]:
    """What is known for an instruction set and a number of threads, by key."""
    where = folder()
    if where is None or not where.is_dir():  # asked first: to tell the machine takes milliseconds
        return {}
    path = _path(where, isa, threads)
    try:
        written = path.stat().st_mtime_ns
    except OSError:
        return {}
    with _lock:
        known = _read.get(str(path))
    if known is not None and known[0] == written:
        return known[1]
    found: dict[str, Entry] = {}
    with contextlib.suppress(*_UNREADABLE):
        data = json.loads(path.read_text("utf-8"))
        if data["key"] == _key(isa, threads):
            found = {str(key): Entry(str(c), float(g), float(s)) for key, (c, g, s) in data["entries"].items()}
    with _lock:
        _read[str(path)] = written, found
    return found


def table(isa: str, threads: int) -> Table | None:
    """The table of decisions other than the defaults; None where there are none."""
    found = {key: entry.chosen for key, entry in entries(isa, threads).items() if entry.chosen}
    return Table(found) if found else None


def save(isa: str, threads: int, more: Mapping[str, Entry]) -> bool:
    """Keep decisions beside those that are known; False where they cannot be kept."""
    where = folder()
    if where is None:
        return False
    path = _path(where, isa, threads)
    kept = {**entries(isa, threads), **more}
    text = json.dumps(
        {
            "key": _key(isa, threads),
            "written": int(time.time()),
            "entries": {key: [e.chosen, round(e.gain, 4), e.seconds] for key, e in sorted(kept.items())},
        },
        indent=1,
    )
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_files({path: [text.encode()]})
    except OSError:
        return False
    with _lock:
        _read.pop(str(path), None)
    return True


@dataclass(frozen=True)
class Kept:
    """A file of the folder."""

    isa: str
    threads: int
    current: bool  # for this machine and this code
    entries: Mapping[str, Entry]


def kept() -> list[Kept]:
    """All tables that can be read."""
    found: list[Kept] = []
    where = folder()
    for path in sorted(where.glob("*.json")) if where is not None else []:
        with contextlib.suppress(*_UNREADABLE):
            data = json.loads(path.read_text("utf-8"))
            key = data["key"]
            held = {str(k): Entry(str(c), float(g), float(s)) for k, (c, g, s) in data["entries"].items()}
            found.append(Kept(key["isa"], key["threads"], key == _key(key["isa"], key["threads"]), held))
    return found


def clear() -> int:
    """Delete all tables; how many there were."""
    where, count = folder(), 0
    for path in where.glob("*.json") if where is not None else []:
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count
