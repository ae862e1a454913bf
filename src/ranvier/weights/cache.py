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
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranvier.errors import CannotWrite, IntegrityError, InvalidConfig, WeightError
from ranvier.formats.files import write_files
from ranvier.logs import warn_once
from ranvier.places import cache_folder
from ranvier.records import dataclass
from ranvier.rules import Whole
from ranvier.weights.access import Stopped
from ranvier.weights.given import PATH_OR_NONE
from ranvier.weights.together import Stop

try:
    import fcntl
except ImportError:  # without it two processes may download the same file; each still puts a whole one in place
    fcntl = None  # type: ignore[assignment]

VARIABLE = "RANVIER_WEIGHTS_CACHE"
_POLL = 0.05
_TRIES = 1000
_PIECE = 1 << 18  # bytes that are read at a time
_FRESH = 100_000_000  # nanoseconds; a change so soon after another may leave the time of a file as it was
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # by what is no JSON, or not ours


def default_folder() -> Path:
    if named := os.environ.get(VARIABLE):
        return _home(Path(named))
    return (cache_folder() or Path(tempfile.gettempdir()) / "ranvier") / "weights"


def _home(folder: Path) -> Path:
    """A folder whose name may begin with somebody's home."""
    try:
        return folder.expanduser()
    except RuntimeError as error:  # nobody knows where that is
        raise InvalidConfig(f"WeightCache: folder {str(folder)!r} cannot be found: {error}") from None


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
    """Files by address in a folder; ``limit`` is the number of bytes it may take, the least used go first. The file
    that was asked for last stays, even if it alone is larger than the limit.

    Whoever changes a place (fills it, empties it) holds its lock; who only reads holds nothing, so a file may go
    between being found and being opened: ask again then.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        PATH_OR_NONE("WeightCache", "folder", folder)
        self.folder = _home(Path(folder)) if folder is not None else default_folder()
        self.limit: int | None = Whole(0, optional=True)("WeightCache", "limit", limit)

    def find(self, address: str, *, verify: bool = False, between: Callable[[], None] = lambda: None) -> Entry | None:
        """The file for an address, if it is here whole. ``verify`` compares the checksum of its bytes, which are read
        once, and again where the file changed; ``between`` is called between its pieces."""
        place = self._place(address)
        entry = _entry(place)
        if entry is None or entry.address != address:
            return None
        try:
            if entry.path.stat().st_size != entry.size or (verify and digest_once(entry.path, between) != entry.sha256):
                return None  # damaged: as if it had never been here; who fetches it anew replaces it
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a cache that we may only read has no order of use
            os.utime(place / "facts.json")
        return entry

    def get(
        self,
        address: str,
        download: Download,
        *,
        sha256: str = "",
        verify: bool = False,
        patience: float = 3600.0,
        stop: Stop | None = None,
    ) -> Entry:
        """The file for an address, downloaded if it is not here. IntegrityError where the checksum is another."""
        place = self._place(address)
        with _held(place / "lock", patience, address, stop or Stop()) as alone:
            found = self.find(address, verify=verify, between=lambda: _go_on(address, stop))
            if found is not None and sha256 in ("", found.sha256):
                return found
            # where there are no locks others may be at it too: what each has of it is its own
            part = place / ("part" if alone else f".{secrets.token_hex(8)}.part")
            try:
                entry = self._download(place, part, address, download, sha256)
            finally:
                for file in () if alone else (part, _notes_of(part)):
                    with contextlib.suppress(OSError):
                        file.unlink(missing_ok=True)
        self.trim(keep=place)
        if self.limit is not None and entry.size > self.limit:
            warn_once(
                f"weights {self.folder} limit",
                f"{address} takes {entry.size} bytes, more than the limit of the cache ({self.limit}); it stays until "
                "another file is fetched",
            )
        return entry

    def _download(self, place: Path, part: Path, address: str, download: Download, sha256: str) -> Entry:
        notes, etag = _notes_of(part), ""
        with contextlib.suppress(OSError, *_DAMAGED):
            etag = str(json.loads(notes.read_text())["etag"])
        try:
            if not etag or part.is_symlink():
                part.unlink(missing_ok=True)  # nobody knows of which version it is the beginning, or whose file it is
            etag, actual = download(part, etag, lambda found: _write(notes, {"etag": found}))
            if sha256 and actual != sha256:
                part.unlink(missing_ok=True)
                raise IntegrityError(f"{address}: the checksum is {actual}, {sha256} was expected")
            size, number = part.stat().st_size, part.stat().st_ino
            data = place / "data"
            (place / "facts.json").unlink(missing_ok=True)  # nobody takes the new bytes for the old file
            os.replace(part, data)
            if (state := _state(data))[-1] == number:  # and not what another put there, where there are no locks
                _remember(data, state, actual, time.time_ns())
            _write(place / "facts.json", {"address": address, "etag": etag, "size": size, "sha256": actual})
        except CannotWrite:
            raise
        except OSError as error:
            raise CannotWrite(f"cannot keep {address} in {str(self.folder)!r}: {error}") from error
        finally:
            if not part.exists():
                with contextlib.suppress(OSError):
                    notes.unlink(missing_ok=True)
        return Entry(data, address, etag, size, actual)

    def drop(self, entry: Entry, patience: float = 3600.0) -> None:
        """Remove an entry that is outdated, unless another has taken its place by now."""
        place = self._place(entry.address)
        with _held(place / "lock", patience, entry.address, Stop()):
            if _entry(place) == entry:
                _remove(place)

    def entries(self) -> list[Entry]:
        """All files, the least recently used first."""
        return [entry for place, _ in self._places() if (entry := _entry(place)) is not None]

    def nbytes(self) -> int:
        """What it takes on the disk, with what interrupted downloads left."""
        return sum(size for _, size in self._places())

    def trim(self, limit: int | None = None, keep: Path | None = None) -> int:
        """Remove the least used files until the rest fits; gives the number of bytes removed.

        Files that are mapped at the moment stay readable for those who mapped them; what somebody is downloading is
        left alone. So is the place ``keep``, of the file that was asked for last, even if it alone is too large.
        """
        allowed = self.limit if limit is None else limit
        if allowed is None:
            return 0
        places = self._places()
        total, gone = sum(size for _, size in places), 0
        for place, size in places:
            if total - gone <= allowed:
                break
            if place != keep and _removed(place):
                gone += size
        return gone

    def clear(self) -> int:
        return self.trim(0)

    def _place(self, address: str) -> Path:
        return self.folder / hashlib.sha256(address.encode()).hexdigest()[:40]

    def _places(self) -> list[tuple[Path, int]]:
        """The folders of files and of parts of files with their bytes, the least recently used first."""
        used: dict[Path, int] = {}
        sizes: dict[Path, int] = {}
        for file in (*self.folder.glob("*/data"), *self.folder.glob("*/part"), *self.folder.glob("*/facts.json")):
            with contextlib.suppress(OSError):
                status = file.stat()
                used[file.parent] = max(used.get(file.parent, 0), status.st_mtime_ns)
                if file.name != "facts.json":
                    sizes[file.parent] = sizes.get(file.parent, 0) + status.st_size
        return [(place, sizes.get(place, 0)) for place in sorted(used, key=used.__getitem__)]


def _notes_of(part: Path) -> Path:
    """Where it says of which version a part is the beginning."""
    return part.with_name(f"{part.name}.json")


def digest(path: Path, between: Callable[[], None] = lambda: None, *, git: bool = False) -> str:
    """The sha256 of a file, or the name that git has for its bytes; ``between`` is called between its pieces, for
    whoever does not want to wait any more."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        if git:
            found = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size, usedforsecurity=False)
        while count := file.readinto(piece):
            found.update(piece[:count])
            between()
    return found.hexdigest()


_State = tuple[int, ...]  # of a file: it is another one once somebody wrote to it
_digests: dict[tuple[Path, bool], tuple[_State, str]] = {}


def digest_once(path: Path, between: Callable[[], None] = lambda: None, *, git: bool = False) -> str:
    """The digest of a file as it is now. It is read once in a process, and again where it changed since."""
    state, began = _state(path), time.time_ns()
    known = _digests.get((path, git))
    if known is not None and known[0] == state:
        return known[1]
    found = digest(path, between, git=git)
    if _state(path) == state:
        _remember(path, state, found, began, git=git)
    return found


def _remember(path: Path, state: _State, found: str, began: int, *, git: bool = False) -> None:
    """What was found of a file in this state, unless a change since ``began`` might not show in it."""
    if abs(began - state[1]) > _FRESH:
        _digests[path, git] = state, found


def _state(path: Path) -> _State:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino


def _go_on(address: str, stop: Stop | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped(f"{address}: stopped while the copy in the cache was read")


def _entry(place: Path) -> Entry | None:
    try:
        facts: Any = json.loads((place / "facts.json").read_text())
        return Entry(place / "data", facts["address"], facts["etag"], int(facts["size"]), facts["sha256"])
    except (OSError, *_DAMAGED):
        return None


def _removed(place: Path) -> bool:
    """Whether a place could be emptied: not where somebody holds its lock."""
    try:
        with _held(place / "lock", 0.0, place.name, Stop()):
            _remove(place)
    except (WeightError, CannotWrite):
        return False
    return not (place / "data").exists()


def _remove(place: Path) -> None:
    """Facts first: what has no facts is not there, even if the rest cannot be removed. The lock must be held."""
    # those in between are of a process that was killed before what it wrote took its name
    for file in (place / "facts.json", place / "data", place / "part", *place.glob(".*.part*"), place / "part.json"):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (place / "lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.rmdir()


def _write(path: Path, facts: dict[str, Any]) -> None:
    write_files({path: [json.dumps(facts).encode()]})


@contextlib.contextmanager
def _held(path: Path, patience: float, address: str, stop: Stop) -> Iterator[bool]:
    """Only one process at a time; WeightError where another one takes longer than our patience. Gives whether that is
    sure: not where the system or the disk has no locks."""
    until = time.monotonic() + patience
    handle, locked = _opened(path), None
    try:
        # another handle than the one of this path means that somebody emptied the place in between: once more
        while fcntl is not None and ((locked := _locked(handle)) is False or not _same(handle, path)):
            if not _same(handle, path):
                stale, handle = handle, _opened(path)
                os.close(stale)
                continue
            if stop.is_set():
                raise Stopped(f"{address}: stopped while another process was downloading it")
            if time.monotonic() >= until:
                raise WeightError(f"{address}: another process has been downloading it for {patience:g} seconds")
            stop.sleep(_POLL)
        yield bool(locked)
    finally:
        if locked and _same(handle, path):
            _leave(path)
        os.close(handle)


def _leave(path: Path) -> None:
    """Remove a lock that is held, with its folder, where there is nothing to be locked: of each address that could not
    be had one would stay. Who waits for it notices."""
    with contextlib.suppress(OSError):
        if os.listdir(path.parent) == [path.name]:
            path.unlink()
            path.parent.rmdir()


def _opened(path: Path) -> int:
    """A handle of the lock, made with its folder where it is not there."""
    for _ in range(_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            # somebody removed the folder: between the two, or while mkdir looked what it is that exists there
            if isinstance(error, FileNotFoundError | FileExistsError) and not path.parent.is_file():
                continue
            raise CannotWrite(f"cannot write to the cache {str(path.parent.parent)!r}: {error.strerror}") from error
    raise CannotWrite(f"cannot write to the cache {str(path.parent.parent)!r}: somebody removes it again and again")


def _locked(handle: int) -> bool | None:
    """False where somebody else has it; None where there are no locks, as on some shared disks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def check_room(address: str, folder: Path, nbytes: int) -> None:
    """CannotWrite where the disk of a folder, which may not exist yet, has no room for so many bytes of a file."""
    there = folder
    while not there.exists():
        there = there.parent
    room = shutil.disk_usage(there).free
    if nbytes > room:
        raise CannotWrite(f"{address} needs {nbytes} bytes in {str(folder)!r}, there are {room}")
