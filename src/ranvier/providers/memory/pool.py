"""The allocator providers use: aligned pieces of larger chunks, kept for reuse up to a bound.

Three ideas hold it together. Memory is numbers first: :class:`~ranvier.providers.memory.holes.Holes` knows what is
free, a :class:`~ranvier.providers.memory.sources.Source` brings chunks of any kind. Freeing never waits: what is freed
while another thread is inside (or the same one, when the collector runs there) is put on a list that whoever comes
next works off. And every piece that is out is known, so that one freed twice, or never, is found.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ranvier.config import MemoryConfig
from ranvier.errors import InvalidBuffer, InvalidValue, MemoryLimit, OutOfMemory, SessionClosed
from ranvier.logs import logger
from ranvier.memory import forking
from ranvier.memory.room import Promise, promised, promises
from ranvier.memory.tracker import MemoryTracker
from ranvier.providers.base import AllocatorStats
from ranvier.providers.memory.holes import Holes
from ranvier.providers.memory.sources import FileRegion, MemoryKind, Region, SharedHandle, Source, SystemSource

ALIGNMENT = 64
_KEEP = 64 << 20  # bytes of a pool that nobody said the size of
_FIRST_CHUNK = 1 << 20
_LARGEST_STEP = 16 << 20  # where doubling ends; larger requests get chunks of their own
_STEPS = 8  # incremental chunks are rounded up by at most this part of themselves, so that similar sizes share them


class _Piece(NamedTuple):
    buffer: Any
    chunk: int
    start: int
    size: int  # what it occupies
    nbytes: int  # what was asked for
    part: str


class PoolAllocator:
    """Hands out buffers of one kind of memory; thread-safe, and safe across a fork.

    ``limit`` bounds the bytes taken from the source, those kept for reuse included. When it is reached, what is kept
    goes first, then whoever registered with ``on_pressure`` is asked to give something back, then the request fails.
    """

    fork_order = 0

    def __init__(
        self,
        config: MemoryConfig | None = None,
        source: Source | None = None,
        *,
        limit: int | None = None,
        name: str = "",
        tracker: MemoryTracker | None = None,
    ) -> None:
        self.config = config or MemoryConfig()
        self.source: Source = SystemSource() if source is None else source
        self.limit = limit
        self.name = name or f"{self.source.kind} memory"
        self._tracker = tracker
        self._unit = self.config.alignment
        self._keep = _KEEP if self.config.pool_size is None else self.config.pool_size
        self._static = self.config.growth == "static"
        if not self.config.pooling:
            self._keep = 0
        self._lock = threading.Lock()
        self._chunks: dict[int, Region] = {}
        self._used: dict[int, int] = {}  # pieces out by chunk
        self._idle: dict[int, None] = {}  # chunks with none, the longest idle first
        self._promises: dict[int, Promise] = {}  # by chunk: what nobody has written to yet
        self._next_chunk = 0
        self._step = _FIRST_CHUNK
        self._holes = Holes()
        self._out: dict[int, _Piece] = {}  # by the identity of the buffer, which lives as long as it is listed
        self._inherited: dict[int, Any] = {}  # shared buffers of the parent process, which are its to free
        self._returned: deque[_Piece] = deque()
        self._pressure: list[Callable[[], object]] = []
        self._closed = False
        self._reserved = self._active = self._peak = self._allocations = self._failures = 0
        if self._static:
            with self._lock:
                self._reserve_pool()
        forking.watch(self)
        promises.on_pressure(self._yield, order=1)  # after those who give back to a pool

    @property
    def kind(self) -> MemoryKind:
        return self.source.kind

    @property
    def secure(self) -> bool:
        return self.config.secure

    def configured(
        self, config: MemoryConfig, limit: int | None = None, name: str = "", tracker: MemoryTracker | None = None
    ) -> PoolAllocator:
        """A pool of its own over the same kind of memory."""
        return PoolAllocator(config, self.source, limit=limit, name=name or self.name, tracker=tracker or self._tracker)

    def on_pressure(self, release: Callable[[], object]) -> None:
        """Call ``release`` before a request fails, and at the end; it may free buffers of this allocator."""
        self._pressure.append(release)

    def ask_back(self) -> None:
        for release in list(self._pressure):
            release()

    # -- taking ------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, part: str = "") -> Any:
        """A buffer of ``nbytes``; OutOfMemory names ``part``."""
        if nbytes < 0:
            raise InvalidValue(f"{self.name}: cannot allocate {nbytes} bytes")
        size = -(-max(nbytes, 1) // self._unit) * self._unit
        try:
            with self._lock:
                return self._take(size, nbytes, part)
        except OutOfMemory:
            if not self._pressure:
                raise
        self.ask_back()
        with self._lock:
            return self._take(size, nbytes, part)

    def _take(self, size: int, nbytes: int, part: str) -> Any:
        if self._closed:
            raise SessionClosed(f"{self.name}: the allocator is closed")
        if self._returned:
            self._settle()
        place = self._holes.take(size)
        if place is None:
            try:
                place = self._grow(size, nbytes, part)
            except OutOfMemory:
                self._failures += 1
                raise
        chunk, start = place
        if self._tracker is not None:
            try:
                self._tracker.add(nbytes, self.kind, device=self.name, part=part)
            except OutOfMemory:
                self._failures += 1
                self._holes.add(chunk, start, size)
                self._shrink()
                raise
        buffer = self._chunks[chunk].view(start, nbytes)
        if not self._used[chunk]:
            self._idle.pop(chunk, None)
        self._used[chunk] += 1
        self._out[id(buffer)] = _Piece(buffer, chunk, start, size, nbytes, part)
        self._allocations += 1
        self._active += nbytes
        if self._active > self._peak:
            self._peak = self._active
        return buffer

    def _grow(self, size: int, nbytes: int, part: str) -> tuple[int, int]:
        """A new chunk, and the request's place in it."""
        if self._static:
            if not self._chunks:  # a child process that must not use its parent's
                self._reserve_pool()
            place = self._holes.take(size)
            if place is None:
                raise self._over(self._keep, nbytes, part, "pool_size")
            return place
        wanted = self._wanted(size)
        if self.limit is not None and self._reserved + wanted > self.limit:
            if self._reserved + size > self.limit:
                self._release(list(self._idle))
            wanted = min(wanted, max(size, (self.limit - self._reserved) // self._unit * self._unit))
            if self._reserved + size > self.limit:
                raise self._over(self.limit, nbytes, part, "memory_limit")
        for last, attempt in ((False, wanted), (True, size)):
            try:
                self._add_chunk(attempt, part)
                break
            except OutOfMemory:
                if last:
                    raise
            except (MemoryError, OSError) as error:
                if last:
                    raise OutOfMemory(
                        f"{self.name}: {nbytes:,} bytes asked for{f' by {part}' if part else ''}, the system gives none"
                        f" ({self._reserved:,} in use)",
                        part=part,
                        requested=nbytes,
                        in_use=self._reserved,
                    ) from error
            self._release(list(self._idle))  # and once more, for no more than is needed
        place = self._holes.take(size)
        assert place is not None
        return place

    def _wanted(self, size: int) -> int:
        if not self.config.pooling:
            return size
        if self.config.growth == "dynamic":
            if size > self._step:
                return self._rounded(size)
            wanted, self._step = self._step, min(2 * self._step, _LARGEST_STEP)
            return max(wanted, size)
        return self._rounded(size)

    def _rounded(self, size: int) -> int:
        step = max(self._unit, (1 << size.bit_length() - 1) // _STEPS)
        return -(-size // step) * step

    def _reserve_pool(self) -> None:
        size = -(-self._keep // self._unit) * self._unit
        if self.limit is not None and size > self.limit:
            raise self._over(self.limit, size, "the pool", "memory_limit")
        try:
            self._add_chunk(size, "the pool")
        except OutOfMemory:
            raise
        except (MemoryError, OSError) as error:
            raise OutOfMemory(
                f"{self.name}: no {size:,} bytes for the pool", part="the pool", requested=size
            ) from error

    def _add_chunk(self, size: int, part: str) -> None:
        promise = promised(size if self.kind in ("system", "shared") else 0, part or self.name)
        try:
            region = self.source.reserve(size, self._unit)
        except BaseException:
            promise.done()
            raise
        if self.config.secure:
            region.zero(0, size)  # nor does anybody see what was there before
            promise.done()
        chunk = self._next_chunk
        self._next_chunk += 1
        if promise.nbytes:
            self._promises[chunk] = promise
        self._chunks[chunk] = region
        self._used[chunk] = 0
        self._idle[chunk] = None
        self._reserved += size
        self._holes.add(chunk, 0, size)

    def _over(self, allowed: int, nbytes: int, part: str, limit: str) -> MemoryLimit:
        held = self._active if self._static else self._reserved
        what = f"{self.name}{f', {part}' if part else ''}"
        return MemoryLimit(limit, allowed, held + nbytes, what, part=part or self.name, requested=nbytes)

    # -- giving back -------------------------------------------------------------------------------------------------

    def free(self, buffer: Any) -> None:
        """Give a buffer back, the same object that ``alloc`` gave. Never waits for another thread."""
        piece = self._out.pop(id(buffer), None)
        if piece is None:
            if self._inherited.pop(id(buffer), None) is not None:
                return
            raise InvalidBuffer(
                f"{self.name}: freed what is not in use: a buffer twice, a part of one, or another allocator's"
            )
        if self.config.secure:
            self._chunks[piece.chunk].zero(piece.start, piece.size)
        self._returned.append(piece)
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Work off what was freed; the lock is held."""
        while self._returned:
            try:
                piece = self._returned.popleft()
            except IndexError:
                break
            self._active -= piece.nbytes
            if self._tracker is not None:
                self._tracker.remove(piece.nbytes, self.kind, device=self.name, part=piece.part)
            if self._promises:
                self._written(piece)
            self._holes.add(piece.chunk, piece.start, piece.size)
            self._used[piece.chunk] -= 1
            if not self._used[piece.chunk]:
                self._idle[piece.chunk] = None
        self._shrink()

    def touched(self, buffer: Any) -> None:
        """A buffer has been written to: from now on the system counts it, and nobody has to remember a promise."""
        piece = self._out.get(id(buffer))
        if piece is not None:
            self._written(piece)

    def _written(self, piece: _Piece) -> None:
        """Chunks are used from their start, so what lies before a piece has been written to as well."""
        promise = self._promises.get(piece.chunk)
        if promise is not None:
            promise.lower(max(0, self._chunks[piece.chunk].nbytes - piece.start - piece.size))
            if not promise.nbytes:
                self._promises.pop(piece.chunk, None)

    def _yield(self) -> None:
        """Chunks nobody uses go because the machine is short; not while somebody is in here, who may be asking."""
        if not self._static and self._lock.acquire(blocking=False):
            try:
                self._settle()
                self._release(list(self._idle))
            finally:
                self._lock.release()

    def _shrink(self) -> None:
        """Chunks nobody uses go, the longest idle first, until no more is kept than may be."""
        if self._static and not self._closed:
            return
        keep = 0 if self._closed else self._keep
        while self._idle and self._holes.total > keep:
            self._release([next(iter(self._idle))])

    def _release(self, chunks: list[int]) -> int:
        freed = 0
        for chunk in chunks:
            region = self._chunks.pop(chunk)
            self._promises.pop(chunk, None)
            del self._idle[chunk], self._used[chunk]
            size = region.nbytes
            self._holes.remove(chunk, size)
            self._reserved -= size
            freed += size
            region.release()
        return freed

    def trim(self) -> int:
        """Give chunks nobody uses back to the system; returns their bytes. A static pool stays whole."""
        with self._lock:
            before = self._reserved
            self._settle()  # which gives back what is more than may be kept
            if not self._static:
                self._release(list(self._idle))
            return before - self._reserved

    def close(self) -> int:
        """Give everything back that is not in use, and the rest as it is freed; returns the bytes still in use."""
        self.ask_back()
        with self._lock:
            self._settle()
            self._closed = True
            self._release(list(self._idle))
            left, count = self._active, len(self._out)
        if count:
            logger.info("%s: closed while %d buffers of %d bytes are in use", self.name, count, left)
        return left

    # -- about it ----------------------------------------------------------------------------------------------------

    def copy(self, source: Any, target: Any) -> None:
        np.copyto(target, source)

    def share(self, buffer: Any) -> SharedHandle:
        """What another process needs to see a buffer of shared or mapped memory."""
        piece = self._out.get(id(buffer))
        region = None if piece is None else self._chunks[piece.chunk]
        if piece is None or not isinstance(region, FileRegion):
            raise InvalidBuffer(f"{self.name}: no buffer of shared memory that is in use")
        return SharedHandle(region.fd, region.shift + piece.start, piece.nbytes)

    def stats(self) -> AllocatorStats:
        with self._lock:
            if self._returned:
                self._settle()
            return AllocatorStats(
                self._active, self._peak, self._holes.total, self._reserved, self._allocations, self._failures
            )

    def in_use(self) -> list[tuple[int, str]]:
        """Bytes and part of every buffer that is out, for finding those that nobody frees."""
        return [(piece.nbytes, piece.part) for piece in list(self._out.values())]

    def __repr__(self) -> str:
        return f"<PoolAllocator of {self.name}: {self._active:,} bytes in use, {self._reserved:,} reserved>"

    # -- forks -------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self, child: bool) -> None:
        if child and not self.source.forks:
            self._forget()
        self._lock.release()

    def _forget(self) -> None:
        """In a child: the parent goes on handing out what is free there, so none of it is free here."""
        self._inherited.update((key, piece.buffer) for key, piece in self._out.items())
        self._out.clear()
        self._returned.clear()
        self._chunks.clear()
        self._promises.clear()
        self._used.clear()
        self._idle.clear()
        self._holes = Holes()
        self._reserved = self._active = 0


__all__ = ["ALIGNMENT", "PoolAllocator"]
