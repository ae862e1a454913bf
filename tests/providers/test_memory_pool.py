"""Pools: how they grow, what they keep, what they refuse, and the kinds of memory they hand out."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.config import MemoryConfig
from ranvier.errors import InvalidBuffer, InvalidConfig, InvalidValue, MemoryLimit, OutOfMemory, SessionClosed
from ranvier.memory import MemoryTracker
from ranvier.memory import room as room_module
from ranvier.providers.base import PooledAllocator, TensorAllocator
from ranvier.providers.memory import MappedSource, PoolAllocator, SharedHandle, SharedSource, SystemSource, attach

from .memory_checks import FailingSource, address, check_buffers

MB = 1 << 20


def pool(limit: int | None = None, **options: Any) -> tuple[PoolAllocator, FailingSource]:
    source = FailingSource()
    return PoolAllocator(MemoryConfig(**options), source, limit=limit), source


def test_it_keeps_the_contract() -> None:
    made = PoolAllocator()
    assert isinstance(made, TensorAllocator) and isinstance(made, PooledAllocator)


# -- growth -----------------------------------------------------------------------------------------------------------


def test_a_static_pool_is_taken_at_once_and_never_grows() -> None:
    made, source = pool(growth="static", pool_size=MB)
    assert source.reserved == [MB]
    whole = made.alloc(MB)
    with pytest.raises(MemoryLimit, match=r"'pool_size' reached \(system memory, arena of x\)") as caught:
        made.alloc(1, "arena of x")
    assert (caught.value.part, caught.value.requested, caught.value.in_use, caught.value.allowed) == (
        "arena of x",
        1,
        MB,
        MB,
    )
    made.free(whole)
    assert made.trim() == 0
    first = [made.alloc(MB // 4) for _ in range(4)]
    for buffer in first:
        made.free(buffer)
    made.alloc(MB)  # the quarters are one again
    assert source.reserved == [MB]


def test_a_dynamic_pool_takes_chunks_that_double() -> None:
    made, source = pool(growth="dynamic", pool_size=0)
    held = [made.alloc(MB // 2) for _ in range(14)]
    assert source.reserved == [MB, 2 * MB, 4 * MB]
    large = made.alloc(40 * MB)
    assert source.reserved[3] == 40 * MB  # a large request has a chunk of its own
    check_buffers([*held, large], 64)


def test_an_incremental_pool_takes_what_is_asked_for() -> None:
    made, source = pool(growth="incremental")
    for nbytes in (64, 1000, 70_000):
        made.alloc(nbytes)
    assert [taken >= wanted for taken, wanted in zip(source.reserved, (64, 1000, 70_000))] == [True] * 3
    assert all(taken <= max(wanted + 64, wanted * 9 / 8) for taken, wanted in zip(source.reserved, (64, 1000, 70_000)))


def test_what_was_freed_serves_again_and_similar_sizes_share() -> None:
    made, source = pool(growth="incremental")
    place = address(buffer := made.alloc(1_000_000))
    made.free(buffer)
    again = made.alloc(990_000)
    assert address(again) == place and len(source.reserved) == 1
    stats = made.stats()
    assert (stats.active, stats.peak, stats.allocations) == (990_000, 1_000_000, 2)


def test_without_pooling_nothing_is_kept() -> None:
    made, source = pool(pooling=False)
    buffer = made.alloc(1000)
    made.free(buffer)
    assert made.stats().reserved == made.stats().cached == 0
    made.alloc(1000)
    assert len(source.reserved) == 2


def test_no_more_is_kept_than_may_be_and_the_longest_idle_goes() -> None:
    made, source = pool(growth="incremental", pool_size=2 * MB)
    held = [made.alloc(MB) for _ in range(4)]
    places = [address(buffer) for buffer in held]
    for buffer in held:
        made.free(buffer)
    assert made.stats().cached == 2 * MB
    assert {address(made.alloc(MB)), address(made.alloc(MB))} == set(places[2:])
    assert made.trim() == 0  # all in use
    assert len(source.reserved) == 4


def test_trim_counts_what_was_more_than_may_be_kept() -> None:
    made = PoolAllocator(MemoryConfig(pool_size=4_000_000))
    first, *kept = [made.alloc(900_000) for _ in range(2)]
    made.free(first)
    kept.append(made.alloc(1_197_121))  # a chunk larger than it: with its rest there is too much
    before = made.stats().reserved
    assert made.trim() == before - made.stats().reserved > 0


def test_trim_gives_back_what_nobody_uses() -> None:
    made, _ = pool(growth="incremental")
    kept = made.alloc(MB)
    made.free(made.alloc(2 * MB))
    assert made.trim() == 2 * MB
    assert made.stats().reserved == MB
    kept[:] = 1


@pytest.mark.parametrize("alignment", [64, 128, 4096, 1 << 16])
@pytest.mark.parametrize("kind", ["system", "shared", "mapped"])
def test_alignment(kind: str, alignment: int, tmp_path: Path) -> None:
    source = {"system": None, "shared": SharedSource(), "mapped": MappedSource(tmp_path)}[kind]
    made = PoolAllocator(MemoryConfig(alignment=alignment), source)
    assert made.kind == kind
    buffers = [made.alloc(nbytes) for nbytes in (1, 63, 65, 5000, 2 * MB)]
    check_buffers(buffers, alignment)
    for k, buffer in enumerate(buffers):
        buffer[:] = k
    assert all((buffer == k).all() for k, buffer in enumerate(buffers))


# -- limits and failures ----------------------------------------------------------------------------------------------


def test_a_limit_counts_all_that_was_taken_and_gives_up_what_is_kept_first() -> None:
    made, source = pool(limit=3 * MB, growth="incremental")
    made.free(made.alloc(2 * MB))
    held = made.alloc(2 * MB + 100_000)  # the kept chunk is too small, and has to go
    assert made.stats().reserved <= 3 * MB and len(source.reserved) == 2
    with pytest.raises(MemoryLimit, match="'memory_limit' reached") as caught:
        made.alloc(MB, "conv1")
    error = caught.value
    assert isinstance(error, OutOfMemory) and isinstance(error, MemoryError)
    assert (error.part, error.requested, error.allowed) == ("conv1", MB, 3 * MB)
    assert error.in_use == made.stats().reserved
    made.free(held)
    made.alloc(MB)
    assert made.stats().failures == 1


def test_dynamic_chunks_shrink_to_the_limit() -> None:
    made, source = pool(limit=MB + MB // 2)
    made.alloc(MB)
    made.alloc(MB // 4)
    assert source.reserved == [MB, MB // 2]


def test_those_who_hold_memory_are_asked_before_a_request_fails() -> None:
    made, _ = pool(limit=MB, growth="incremental")
    waiting = [made.alloc(MB)]
    made.on_pressure(lambda: made.free(waiting.pop()) if waiting else None)
    made.alloc(MB // 2)
    assert not waiting
    with pytest.raises(MemoryLimit):
        made.alloc(MB)


def test_a_system_without_memory() -> None:
    made, source = pool(growth="incremental")
    made.free(made.alloc(MB))
    source.failing = True
    with pytest.raises(OutOfMemory, match="4,194,304 bytes asked for by conv1, the system gives none") as caught:
        made.alloc(4 * MB, "conv1")
    assert not isinstance(caught.value, MemoryLimit)
    assert (caught.value.part, caught.value.requested) == ("conv1", 4 * MB)
    assert made.stats().failures == 1 and made.stats().reserved == 0  # what was kept went first
    source.failing = False
    made.alloc(4 * MB)


def test_a_step_that_is_too_large_becomes_smaller() -> None:
    source = FailingSource(most=200_000)
    made = PoolAllocator(None, source)
    made.alloc(100_000)
    assert source.reserved == [100_032]


def test_a_static_pool_that_cannot_be_had() -> None:
    source = FailingSource(most=MB)
    with pytest.raises(OutOfMemory, match="no 2,097,152 bytes for the pool"):
        PoolAllocator(MemoryConfig(growth="static", pool_size=2 * MB), source)
    with pytest.raises(MemoryLimit):
        PoolAllocator(MemoryConfig(growth="static", pool_size=MB), source, limit=MB // 2)


def test_more_than_the_machine_has_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "memory_left", lambda around: 100 * MB)
    made = PoolAllocator(name="cpu")
    with pytest.raises(OutOfMemory, match="arena of m: 209,715,200 bytes asked for, 104,857,600 are left") as caught:
        made.alloc(200 * MB, "arena of m")
    assert caught.value.requested == 200 * MB and caught.value.in_use
    made.free(made.alloc(MB))


def test_a_tracker_sees_every_buffer_and_may_refuse() -> None:
    tracker = MemoryTracker(limit=MB)
    made = PoolAllocator(tracker=tracker, name="cpu")
    buffer = made.alloc(1000, "a")
    assert tracker.snapshot().by("part") == {"a": 1000}
    with pytest.raises(MemoryLimit):
        made.alloc(MB)
    assert (made.stats().active, made.stats().failures) == (1000, 1)
    made.free(buffer)
    assert tracker.current == 0
    made.free(made.alloc(MB))


# -- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_use_is_an_error() -> None:
    made, other = PoolAllocator(), PoolAllocator()
    buffer = made.alloc(100)
    for wrong in (buffer[:50], buffer.copy(), np.zeros(100, np.uint8), other.alloc(100)):
        with pytest.raises(InvalidBuffer, match="freed what is not in use"):
            made.free(wrong)
    made.free(buffer)
    with pytest.raises(InvalidBuffer):
        made.free(buffer)
    with pytest.raises(InvalidValue):
        made.alloc(-1)
    assert made.stats().active == 0


def test_closing_tells_what_nobody_freed(caplog: pytest.LogCaptureFixture) -> None:
    made = PoolAllocator(name="pool of a test")
    buffer = made.alloc(1000, "arena")
    assert made.in_use() == [(1000, "arena")]
    with caplog.at_level(logging.INFO, logger="ranvier"):
        assert made.close() == 1000
    assert "pool of a test: closed while 1 buffers of 1000 bytes are in use" in caplog.text
    with pytest.raises(SessionClosed):
        made.alloc(1)
    buffer[:] = 1  # whoever is still at work may finish
    made.free(buffer)
    assert made.stats().reserved == 0 and made.close() == 0


def test_freeing_while_somebody_is_inside_waits_for_nobody() -> None:
    """The collector may run inside the allocator and free something there."""
    made = PoolAllocator()
    buffer = made.alloc(1000)
    with made._lock:
        made.free(buffer)
    assert made.stats().active == 0


def test_a_buffer_freed_by_the_collector() -> None:
    made = PoolAllocator(MemoryConfig(growth="incremental"))

    class Holder:
        def __init__(self) -> None:
            self.buffer = made.alloc(1000)
            self.own = self

        def __del__(self) -> None:
            made.free(self.buffer)

    Holder()
    gc.collect()
    assert made.stats().active == 0


# -- secure -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", ["static", "dynamic", "incremental"])
def test_secure_buffers_are_zero_once_freed(growth: str) -> None:
    made = PoolAllocator(MemoryConfig(growth=growth, pool_size=MB, secure=True))
    buffer = made.alloc(1001)
    whole = made._chunks[0].view(0, 1024)  # the memory itself, with the rounding
    whole[:] = 7
    made.free(buffer)
    assert not whole.any()


@pytest.mark.parametrize("end", ["trim", "close"])
def test_secure_memory_is_zero_when_it_goes(end: str) -> None:
    made = PoolAllocator(MemoryConfig(growth="incremental", secure=True))
    freed, late = made.alloc(5000), made.alloc(5000)
    freed[:] = late[:] = 7
    made.free(freed)
    getattr(made, end)()
    assert not freed.any()  # the view keeps the memory alive, so that it can be looked at
    assert late.all()  # in use: zeroed when it is freed
    made.free(late)
    assert not late.any()


def test_memory_that_need_not_be_secure_is_left_as_it_is() -> None:
    made = PoolAllocator()
    buffer = made.alloc(100)
    buffer[:] = 7
    made.free(buffer)
    assert buffer.all()


# -- kinds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [64, 1 << 16])
def test_shared_memory_is_seen_through_its_handle(alignment: int) -> None:
    made = PoolAllocator(MemoryConfig(alignment=alignment), SharedSource())
    made.alloc(10_000)  # so that the next one does not begin a page
    buffer = made.alloc(5000)
    buffer[:] = 3
    seen = attach(made.share(buffer))
    assert seen.nbytes == 5000 and (seen == 3).all()
    seen[10] = 9
    assert buffer[10] == 9
    with pytest.raises(ValueError, match="read-only"):
        attach(made.share(buffer), writeable=False)[0] = 1
    made.free(buffer)
    with pytest.raises(InvalidBuffer):
        made.share(buffer)
    with pytest.raises(InvalidBuffer):
        PoolAllocator().share(buffer)


def test_a_handle_to_nothing() -> None:
    with pytest.raises(OutOfMemory, match="cannot map 10 bytes of shared memory"):
        attach(SharedHandle(-7, 0, 10))


def test_a_mapped_pool_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    made = PoolAllocator(MemoryConfig(growth="incremental"), MappedSource(tmp_path))
    buffer = made.alloc(3 * mmap.PAGESIZE)
    buffer[:] = 5
    assert list(tmp_path.iterdir()) == []
    made.free(buffer)
    made.close()
    del buffer  # the last that keeps the file
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_mapped_memory_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="needs a folder"):
        MappedSource(tmp_path / "absent")


class _DeviceRegion:
    """Memory only a device sees: what is handed out is a place in it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.zeroed: list[tuple[int, int]] = []
        self.released = False

    def view(self, start: int, nbytes: int) -> Any:
        return [self, start, nbytes]

    def zero(self, start: int, nbytes: int) -> None:
        self.zeroed.append((start, nbytes))

    def release(self) -> None:
        self.released = True


class _DeviceSource:
    kind = "device"
    forks = False

    def reserve(self, nbytes: int, alignment: int) -> _DeviceRegion:
        return _DeviceRegion(nbytes)


def test_a_device_brings_its_own_memory() -> None:
    made = PoolAllocator(MemoryConfig(secure=True), _DeviceSource(), name="accelerator")
    first, second = made.alloc(100), made.alloc(100)
    assert (first[1:], second[1:]) == ([0, 100], [128, 100])
    made.free(first)
    assert first[0].zeroed == [(0, MB), (0, 128)]  # what was there before, and what was freed
    made.free(second)
    made.close()
    assert first[0].released


def test_a_pool_of_ones_own_over_the_same_memory() -> None:
    shared = PoolAllocator(source=SharedSource(), name="shared")
    own = shared.configured(MemoryConfig(secure=True, alignment=128), limit=MB)
    assert (own.kind, own.secure, own.limit, own.name) == ("shared", True, MB, "shared")
    buffer = own.alloc(10)
    with pytest.raises(InvalidBuffer):
        shared.free(buffer)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", ["static", "dynamic", "incremental"])
def test_eight_threads(growth: str) -> None:
    made = PoolAllocator(MemoryConfig(growth=growth, pool_size=32 * MB, secure=True), limit=32 * MB)
    wrong: list[Any] = []

    def work(mark: int) -> None:
        random = np.random.default_rng(mark)
        held: list[Any] = []
        try:
            for _ in range(400):
                if held and random.random() < 0.5:
                    buffer = held.pop(int(random.integers(len(held))))
                    if not (buffer == mark).all():
                        wrong.append("overwritten")
                    made.free(buffer)
                else:
                    try:
                        buffer = made.alloc(int(random.integers(1, 200_000)))
                    except OutOfMemory:
                        continue
                    buffer[:] = mark
                    held.append(buffer)
            for buffer in held:
                if not (buffer == mark).all():
                    wrong.append("overwritten")
                made.free(buffer)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k + 1,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = made.stats()
    assert stats.active == 0 and stats.reserved <= 32 * MB and stats.cached == stats.reserved
    assert made.close() == 0 and made.stats().reserved == 0


def test_an_unknown_placement_is_told() -> None:
    with pytest.raises(InvalidConfig, match=r"placement cannot be 'interleaved' \(did you mean 'interleave'\?\)"):
        SystemSource("interleaved")  # type: ignore[arg-type]
