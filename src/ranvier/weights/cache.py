"""Downloaded files, kept: by address, with checksum, up to a size, shared by processes.

    <folder>/<key>/data        the file, complete and checked; it takes this name in one step
    <folder>/<key>/facts.json  address, etag, size, sha256; its time is that of the last use
    <folder>/<key>/part        what an interrupted download left, to be gone on with
    <folder>/<key>/lock        held by the process that downloads

Nothing half-done or unchecked is ever called ``data``, so a crash, a full disk or a lying server cannot poison it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranvier.errors import CannotWrite, IntegrityError, WeightError
from ranvier.formats.files import write_files
from ranvier.places import cache_folder
from ranvier.records import dataclass

try:
    import fcntl
except ImportError:  # without it two processes may download the same file; each still puts a whole one in place
    fcntl = None  # type: ignore[assignment]

VARIABLE = "RANVIER_WEIGHTS_CACHE"
_POLL = 0.05
_CHUNK = 1 << 20


def default_folder() -> Path:
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    return (cache_folder() or Path(tempfile.gettempdir()) / "ranvier") / "weights"


@dataclass(frozen=True)
class Entry:
    """A file in the cache."""

    path: Path
    address: str
    etag: str
    size: int
    sha256: str


Download = Callable[[Path, str, Callable[[str], None]], tuple[str, str]]
"""Fills a file, which may hold the beginning of the version with the given etag; tells the third argument of which
version the bytes are before it writes any; gives etag and sha256."""


class WeightCache:
    """Files by address in a folder; ``limit`` is the number of bytes it may take, the least used go first."""

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def find(self, address: str, *, verify: bool = False) -> Entry | None:
        """The file for an address, if it is here whole. ``verify`` reads it again and compares the checksum."""
        place = self._place(address)
        entry = _entry(place)
        if entry is None or entry.address != address:
            return None
        try:
            if entry.path.stat().st_size != entry.size:
                raise OSError("another size")
            if verify and digest(entry.path) != entry.sha256:
                raise OSError("another checksum")
            os.utime(place / "facts.json")
        except FileNotFoundError:
            return None
        except OSError:
            self.remove(address)  # damaged: as if it had never been here
            return None
        return entry

    def get(
        self,
        address: str,
        download: Download,
        *,
        sha256: str = "",
        patience: float = 3600.0,
    ) -> Entry:
        """The file for an address, downloaded if it is not here. IntegrityError where the checksum is another."""
        place = self._place(address)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"cannot make {str(place)!r}: {error.strerror}") from error
        with _held(place / "lock", patience, address):
            found = self.find(address)
            if found is not None and sha256 in ("", found.sha256):
                return found
            entry = self._download(place, address, download, sha256)
        self.trim(keep=place)
        return entry

    def _download(self, place: Path, address: str, download: Download, sha256: str) -> Entry:
        part, notes = place / "part", place / "part.json"
        etag = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            etag = str(json.loads(notes.read_text())["etag"])
        if not etag:
            part.unlink(missing_ok=True)  # nobody knows of which version it is the beginning

        try:
            etag, actual = download(part, etag, lambda found: _write(notes, {"etag": found}))
            if sha256 and actual != sha256:
                raise IntegrityError(f"{address}: the checksum is {actual}, {sha256} was expected")
            size = part.stat().st_size
            data = place / "data"
            (place / "facts.json").unlink(missing_ok=True)  # nobody takes the new bytes for the old file
            os.replace(part, data)
            _write(place / "facts.json", {"address": address, "etag": etag, "size": size, "sha256": actual})
        except IntegrityError:
            part.unlink(missing_ok=True)
            raise
        except OSError as error:
            if isinstance(error, WeightError):
                raise
            raise CannotWrite(f"cannot keep {address} in {str(self.folder)!r}: {error}") from error
        finally:
            if not part.exists():
                notes.unlink(missing_ok=True)
        return Entry(data, address, etag, size, actual)

    def remove(self, address: str) -> None:
        _remove(self._place(address))

    def drop(self, entry: Entry, patience: float = 3600.0) -> None:
        """Remove an entry that is outdated, unless another has taken its place by now."""
        place = self._place(entry.address)
        with _held(place / "lock", patience, entry.address):
            if _entry(place) == entry:
                _remove(place)

    def entries(self) -> list[Entry]:
        """All files, the least recently used first."""
        found = []
        for place in self.folder.glob("*/facts.json"):
            with contextlib.suppress(OSError):
                entry = _entry(place.parent)
                if entry is not None:
                    found.append((place.stat().st_mtime_ns, entry))
        return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]

    def nbytes(self) -> int:
        return sum(entry.size for entry in self.entries())

    def trim(self, limit: int | None = None, keep: Path | None = None) -> int:
        """Remove the least used files until the rest fits; gives the number of bytes removed.

        Files that are mapped at the moment stay readable for those who mapped them.
        """
        allowed = self.limit if limit is None else limit
        if allowed is None:
            return 0
        entries = self.entries()
        total, gone = sum(e.size for e in entries), 0
        for entry in entries:
            if total - gone <= allowed:
                break
            if keep is None or entry.path.parent != keep:
                _remove(entry.path.parent)
                gone += entry.size
        return gone

    def clear(self) -> int:
        return self.trim(0)

    def _place(self, address: str) -> Path:
        return self.folder / hashlib.sha256(address.encode()).hexdigest()[:40]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(place: Path) -> Entry | None:
    try:
        facts: Any = json.loads((place / "facts.json").read_text())
        return Entry(place / "data", facts["address"], facts["etag"], int(facts["size"]), facts["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(place: Path) -> None:
    """Facts first: what has no facts is not there, even if the rest cannot be removed."""
    for name in ("facts.json", "data", "part", "part.json"):
        with contextlib.suppress(OSError):
            (place / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (place / "lock").unlink(missing_ok=True)
        place.rmdir()


def _write(path: Path, facts: dict[str, Any]) -> None:
    write_files({path: [json.dumps(facts).encode()]})


@contextlib.contextmanager
def _held(path: Path, patience: float, address: str) -> Iterator[None]:
    """Only one process at a time; WeightError where another one takes longer than our patience."""
    if fcntl is None:
        yield
        return
    until = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise WeightError(f"{address}: another process has been downloading it for too long") from None
                    time.sleep(_POLL)
            if _same(handle, path):  # else somebody emptied the cache in between: once more, with the new lock
                yield
                return
        finally:
            os.close(handle)


def _same(handle: int, path: Path) -> bool:
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
