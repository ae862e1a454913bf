"""Compiled kernels on disk: one small file each, named by everything the code depends on.

Any number of processes share the folder without locks: a file appears whole under its name or not at all, and what is
read must carry the checksum it was written with, else it counts as absent and is written again. Nothing here fails a
run: a folder that cannot be written costs one warning and the time of compiling.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranvier import logs, places
from ranvier.errors import InvalidConfig
from ranvier.records import dataclass

SWITCH, FOLDER, LIMIT = "RANVIER_CACHE", places.FOLDER, "RANVIER_CACHE_LIMIT"
DEFAULT_LIMIT = 512_000_000
_HEADER = struct.Struct("<8s32sQ16s")  # magic, key, bytes of the payload, checksum of the payload
_MAGIC = b"RVCACHE1"
_SUFFIX, _UNFINISHED = ".kernel", ".new"
_HOUR, _DAY = 3600.0, 86400.0
_PRUNED_TO = 0.75  # of the limit, so that pruning is rare
_TRUST_SECONDS = 1.0  # for which one look at the files counts
_SETTLED_SECONDS = 5.0  # after which another change of a file gets another time, on any file system
_imported_at = time.time()


# -- where ----------------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Where measured and compiled things of this machine are kept; None where caching is off or there is no home."""
    if os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no", "false"):
        return None
    return places.cache_folder()


def limit_bytes() -> int:
    """The size to stay below: a number of bytes, or one with k, M or G."""
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return DEFAULT_LIMIT
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1].lower(), 1)
    try:
        found = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise InvalidConfig(f"environment variable {LIMIT}: {text!r} is not a size such as 512M")
    return found


def current() -> KernelCache | None:
    """The cache the environment describes, or None."""
    where = folder()
    return None if where is None else _opened(where / "kernels", limit_bytes())


@functools.cache
def _opened(where: Path, limit: int) -> KernelCache:
    return KernelCache(where, limit)


# -- what code depends on -------------------------------------------------------------------------------------------


def _python_files(where: str) -> Iterator[str]:
    with os.scandir(where) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        if item.is_dir():
            yield from _python_files(item.path)
        elif item.name.endswith(".py"):
            yield item.path


class Sources:
    """Python files under a folder: their digest says which generator made a kernel.

    Reading them all takes milliseconds, so the digest is kept on disk under the names, sizes and times of the files.
    """

    def __init__(self, where: Path, kept: KernelCache | None = None) -> None:
        self._files = list(_python_files(str(where)))
        self._looked_at = -_TRUST_SECONDS
        self._untouched = False
        self._where = str(where)
        newest, names = 0.0, ""
        if kept is not None:
            self._looked_at = time.monotonic()
            newest, names = self._names()
            self._untouched = newest <= _imported_at
        known = kept.get(names) if kept is not None else None
        self.digest = known.decode() if known is not None else self._read()
        if kept is not None and known is None and time.time() - newest > _SETTLED_SECONDS:
            kept.put(names, self.digest.encode())

    def _names(self) -> tuple[float, str]:
        """When a file was last changed, and a key that is another one after any change."""
        facts = [(path, os.stat(path)) for path in self._files]
        text = "\0".join([f"{path}\0{at.st_size}\0{at.st_mtime_ns}\0{at.st_ino}" for path, at in facts])
        newest = max((at.st_mtime for _, at in facts), default=0.0)
        return newest, hashlib.blake2b(f"sources\0{text}".encode(), digest_size=16).hexdigest()

    def _read(self) -> str:
        found = hashlib.sha256()
        for path in self._files:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            found.update(f"{path[len(self._where) :]}\0{len(content)}\0".encode())
            found.update(content)
        return found.hexdigest()

    def trusted(self) -> bool:
        """Is the code in memory what the digest stands for? Not where a file was edited since it was imported."""
        now = time.monotonic()
        if now - self._looked_at >= _TRUST_SECONDS:
            self._looked_at = now
            try:
                self._untouched = max((os.stat(path).st_mtime for path in self._files), default=0.0) <= _imported_at
            except OSError:  # deleted meanwhile
                self._untouched = False
        return self._untouched


@functools.cache
def _sources(where: Path) -> Sources:
    return Sources(where, current())


_GENERATOR = Path(__file__).resolve().parents[1]  # the package of all emitters


def generator_digest() -> str:
    """Which version of the code generator this is; empty where it is not installed as files."""
    try:
        return _sources(_GENERATOR).digest
    except OSError:
        return ""


def sources_of(emit: Callable[..., Any]) -> list[Sources] | None:
    """The code generator and, where it lies elsewhere, the folder of this emitter; None when that cannot be known."""
    while isinstance(emit, functools.partial):
        emit = emit.func
    owner = emit if hasattr(emit, "__code__") or hasattr(emit, "__func__") else type(emit)
    module = sys.modules.get(getattr(owner, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, "__name__", "") == "__main__":
        return None
    return _sources_of_file(file)


@functools.cache
def _sources_of_file(file: str) -> list[Sources] | None:
    try:
        where = Path(file).resolve().parent
        return [_sources(_GENERATOR)] + ([] if where.is_relative_to(_GENERATOR) else [_sources(where)])
    except OSError:  # not installed as files
        return None


@functools.cache
def environment_key() -> str:
    """What else code depends on: the compiler and the platform."""
    return f"llvmlite {_compiler_version()} {sys.platform}"


def _compiler_version() -> str:
    """From the package's own file where there is one: importing it takes longer than reading a kernel."""
    found = importlib.util.find_spec("llvmlite")
    if found is not None and found.origin is not None:
        path = os.path.join(os.path.dirname(found.origin), "_version.py")
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    import llvmlite

    return str(llvmlite.__version__)


def key_of(symbol: str, sources: list[Sources], way: str) -> str:
    """The name of an entry, 32 hexadecimal digits; ``symbol`` stands for the kernel and its instruction set,
    ``way`` for how it is compiled."""
    text = "\0".join([symbol, environment_key(), way, *(s.digest for s in sources)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- entries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One file of the cache."""

    path: Path
    nbytes: int
    used: float  # when it was last read, to the day


class KernelCache:
    """Payloads by key in one folder."""

    def __init__(self, where: Path, limit: int) -> None:
        self.folder = where
        self.limit = limit
        self._prefix = f"{where}{os.sep}"
        self._broken = False  # the folder cannot be written
        self._unchecked: int | None = None  # bytes written since the size was last looked at; None: never was
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        path = f"{self._prefix}{key}{_SUFFIX}"
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError:
            return None
        try:
            facts = os.fstat(handle)
            data = os.read(handle, facts.st_size)
        except OSError:
            return None
        finally:
            os.close(handle)
        payload = _checked(key, data)
        if payload is not None and time.time() - facts.st_mtime > _DAY:
            with contextlib.suppress(OSError):  # a read-only cache serves as well
                os.utime(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        if self._broken or len(payload) > self.limit:
            return
        header = _HEADER.pack(_MAGIC, key.encode(), len(payload), _checksum(payload))
        unfinished = f"{self._prefix}{key}.{os.getpid()}.{threading.get_ident()}{_UNFINISHED}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                file.write(header + payload)
            os.replace(unfinished, f"{self._prefix}{key}{_SUFFIX}")
            self._account(len(header) + len(payload))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            self._broken = True
            logs.warn_once(
                f"kernel cache {self.folder}",
                f"compiled kernels cannot be kept in {self.folder}: {error.strerror or error}; "
                f"{FOLDER} names another folder, {SWITCH}=off does without",
            )

    def _account(self, nbytes: int) -> None:
        """Look at the size with the first entry of a process and then now and then."""
        with self._lock:
            due = self._unchecked is None or self._unchecked + nbytes > self.limit // 32
            self._unchecked = 0 if due or self._unchecked is None else self._unchecked + nbytes
        if due:
            self.prune()

    def entries(self) -> list[Entry]:
        """All entries, the least recently used first."""
        return sorted(self._files(_SUFFIX), key=lambda e: e.used)

    def prune(self) -> int:
        """Delete what was not used for longest until the rest is well below the limit; the number deleted."""
        now = time.time()
        for left in self._files(_UNFINISHED):
            if now - left.used > _HOUR:  # its writer is gone
                _unlink(left.path)
        total = 0
        for entry in self._files(_SUFFIX):
            total += entry.nbytes
        if total <= self.limit:
            return 0
        gone = 0
        for entry in self.entries():
            if total <= self.limit * _PRUNED_TO:
                break
            _unlink(entry.path)
            total -= entry.nbytes
            gone += 1
        return gone

    def clear(self) -> tuple[int, int]:
        """Delete all entries; their number and bytes."""
        found = self.entries()
        for entry in [*found, *self._files(_UNFINISHED)]:
            _unlink(entry.path)
        return len(found), sum(e.nbytes for e in found)

    def _files(self, suffix: str) -> Iterator[Entry]:
        try:
            with os.scandir(self.folder) as found:
                for item in found:
                    if item.name.endswith(suffix):
                        with contextlib.suppress(OSError):  # deleted by another process meanwhile
                            facts = item.stat()
                            yield Entry(Path(item.path), facts.st_size, facts.st_mtime)
        except OSError:
            return


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _checked(key: str, data: bytes) -> bytes | None:
    """The payload of an entry, or None where it is not what was once written under this key."""
    if len(data) < _HEADER.size:
        return None
    magic, name, size, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    whole = magic == _MAGIC and name == key.encode() and size == len(payload) and checksum == _checksum(payload)
    return payload if whole else None
