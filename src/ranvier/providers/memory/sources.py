"""Where a pool's chunks come from: private memory, memory that processes share, files; devices bring their own."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from ranvier.errors import InvalidConfig, OutOfMemory, nearest
from ranvier.memory.numa import PLACEMENTS, Placement, place, topology
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
MemoryKind = Literal["system", "device", "shared", "mapped"]


class Region(Protocol):
    """One chunk. What ``view`` gives is what an allocator hands out: an array of bytes where the host can reach it."""

    nbytes: int

    def view(self, start: int, nbytes: int) -> Any: ...

    def zero(self, start: int, nbytes: int) -> None: ...

    def release(self) -> None:
        """Give the memory back, at once or when the last view goes."""
        ...


class Source(Protocol):
    """Makes regions of one kind of memory. ``forks``: False where a child process would share them with its parent
    and so must not hand them out again."""

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def forks(self) -> bool: ...

    def reserve(self, nbytes: int, alignment: int) -> Region:
        """``nbytes`` that begin at a multiple of ``alignment``; MemoryError or OSError where there are none."""
        ...


class HostRegion:
    """Bytes that NumPy can see."""

    __slots__ = ("_bytes", "nbytes")

    def __init__(self, block: Array, nbytes: int, alignment: int) -> None:
        shift = -block.ctypes.data % alignment
        self._bytes: Array = block[shift : shift + nbytes]
        self.nbytes = nbytes

    def view(self, start: int, nbytes: int) -> Array:
        return self._bytes[start : start + nbytes]

    def zero(self, start: int, nbytes: int) -> None:
        self._bytes[start : start + nbytes] = 0

    def release(self) -> None:
        self._bytes = self._bytes[:0].copy()  # views keep theirs: nobody's memory goes from under them

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)


class SystemSource:
    """Memory of this process. ``placement`` matters where there is more than one NUMA node."""

    kind: ClassVar[MemoryKind] = "system"
    forks: ClassVar[bool] = True  # a child gets copies

    def __init__(self, placement: Placement = "local") -> None:
        if placement not in PLACEMENTS:
            raise InvalidConfig(f"SystemSource: placement cannot be {placement!r}{nearest(placement, PLACEMENTS)}")
        self._placement = placement

    def reserve(self, nbytes: int, alignment: int) -> HostRegion:
        region = HostRegion(np.empty(nbytes + alignment, np.uint8), nbytes, alignment)
        if len(topology()) > 1:
            place(region.address, nbytes, self._placement)
        return region


class FileRegion(HostRegion):
    """A file without a name, mapped. Its descriptor is what another process needs to map it too."""

    __slots__ = ("fd", "shift")

    def __init__(self, fd: int, nbytes: int, alignment: int) -> None:
        self.fd = -1
        room = nbytes + (alignment if alignment > mmap.PAGESIZE else 0)
        try:
            _extend(fd, room)  # now, and not by a signal when the memory is touched
            block = np.frombuffer(mmap.mmap(fd, room), np.uint8)
        except BaseException:
            os.close(fd)
            raise
        super().__init__(block, nbytes, alignment)
        self.fd = fd
        self.shift = -block.ctypes.data % alignment

    def release(self) -> None:
        super().release()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class SharedSource:
    """Memory that other processes can map without a copy, by a descriptor they inherit or are sent. It has no name,
    so that nothing stays behind however the process ends."""

    kind: ClassVar[MemoryKind] = "shared"
    forks: ClassVar[bool] = False

    def reserve(self, nbytes: int, alignment: int) -> FileRegion:
        return FileRegion(_anonymous_file(), nbytes, alignment)


class MappedSource:
    """Files in a folder, for data beyond what memory holds: the system writes pages out as it needs to. They are
    deleted as soon as they are open."""

    kind: ClassVar[MemoryKind] = "mapped"
    forks: ClassVar[bool] = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise InvalidConfig(f"mapped memory needs a folder, {self.folder!r} is none")

    def reserve(self, nbytes: int, alignment: int) -> FileRegion:
        return FileRegion(_unnamed_file(self.folder), nbytes, alignment)


@dataclass(frozen=True)
class SharedHandle:
    """Where a shared buffer lies: what is sent to another process, the descriptor by its own way."""

    fd: int
    offset: int
    nbytes: int


def attach(handle: SharedHandle, *, writeable: bool = True) -> Array:
    """The buffer behind a handle, in the process that received it; no copy. The descriptor may be closed then."""
    start = handle.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    access = mmap.ACCESS_WRITE if writeable else mmap.ACCESS_READ
    try:
        mapped = mmap.mmap(handle.fd, handle.offset - start + handle.nbytes, access=access, offset=start)
    except (OSError, ValueError) as error:
        raise OutOfMemory(f"cannot map {handle.nbytes:,} bytes of shared memory: {error}") from error
    return np.frombuffer(mapped, np.uint8)[handle.offset - start :]


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("ranvier")
    return _unnamed_file(None)


def _unnamed_file(folder: str | None) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _extend(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)
