"""Trackers, estimates, what is left of the machine's memory, and where it lies."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from ranvier.devices import NumaNode, memory_left, resident_memory
from ranvier.devices.surroundings import Surroundings
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, InvalidValue, MemoryLimit, OutOfMemory
from ranvier.memory import (
    LARGE,
    MemoryHolding,
    MemoryTracker,
    check_room,
    estimate_attention,
    estimate_tensor,
    numa,
    place,
)
from ranvier.memory.numa import Placement
from ranvier.providers.memory import PoolAllocator, SystemSource, sources

MB = 1 << 20

# -- tracker ----------------------------------------------------------------------------------------------------------


def test_counts_by_tag_device_and_part() -> None:
    tracker = MemoryTracker()
    tracker.add(100, "weights", part="a")
    tracker.add(50, "weights", part="b")
    before = tracker.snapshot()
    tracker.add(30, "arena", device="gpu", part="a")
    tracker.remove(100, "weights", part="a")
    after = tracker.snapshot()
    assert (after.current, after.peak) == (80, 180)
    assert after.by("tag") == {"arena": 30, "weights": 50}
    assert after.by("device") == {"cpu": 50, "gpu": 30}
    assert after.by("part") == {"a": 30, "b": 50}
    change = after.diff(before)
    assert (change.current, change.peak) == (-70, 30)
    assert change.holdings == {MemoryHolding("arena", "gpu", "a"): 30, MemoryHolding("weights", "cpu", "a"): -100}
    tracker.reset_peak()
    assert tracker.peak == 80


def test_scopes_count_what_happens_inside_them() -> None:
    tracker = MemoryTracker()
    tracker.add(1000, "before")
    with tracker.scope("outer") as outer:
        with tracker.hold(100, "x"), tracker.scope("inner") as inner:
            tracker.add(7, "y")
        tracker.remove(1000, "before")
    tracker.add(5, "after")
    assert (outer.current, outer.peak) == (-993, 107)
    assert (inner.current, inner.peak, inner.outer) == (7, 7, outer)
    assert tracker.current == 12


def test_a_scope_is_one_threads_own() -> None:
    tracker = MemoryTracker()
    with tracker.scope("here") as scope:
        thread = threading.Thread(target=tracker.add, args=(10, "elsewhere"))
        thread.start()
        thread.join()
    assert scope.current == 0 and tracker.current == 10


def test_holding_ends_with_its_block_even_by_an_error() -> None:
    tracker = MemoryTracker()
    with pytest.raises(KeyError), tracker.hold(10, "x"):
        raise KeyError
    assert tracker.current == 0 and tracker.snapshot().holdings == {}


def test_a_limit_asks_before_it_refuses() -> None:
    asked: list[int] = []

    def give_back(tracker: MemoryTracker, missing: int) -> None:
        asked.append(missing)
        if tracker.snapshot().by("tag").get("cache"):
            tracker.remove(60, "cache")

    tracker = MemoryTracker(100, give_back)
    tracker.add(60, "cache")
    tracker.add(70, "arena", part="conv1")
    assert asked == [30] and tracker.current == 70
    with pytest.raises(MemoryLimit, match="arena of conv2 on cpu") as caught:
        tracker.add(31, "arena", part="conv2")
    assert (caught.value.requested, caught.value.in_use, caught.value.allowed) == (31, 70, 100)
    assert tracker.current == tracker.peak == 70
    assert asked == [30, 1]


def test_counts_that_cannot_be() -> None:
    tracker = MemoryTracker()
    tracker.add(10, "x")
    with pytest.raises(InvalidValue, match="11 bytes of x on cpu given back, 10 are held"):
        tracker.remove(11, "x")
    with pytest.raises(InvalidValue):
        tracker.add(-1, "x")
    with pytest.raises(InvalidValue):
        MemoryTracker(-1)
    assert tracker.current == 10


def test_many_threads_lose_no_byte() -> None:
    tracker = MemoryTracker()

    def work(k: int) -> None:
        for n in range(500):
            with tracker.hold(n, f"t{k % 3}"):
                tracker.add(1, "kept", part=str(k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.current == 8 * 500
    assert tracker.snapshot().by("part") == {str(k): 500 for k in range(8)}


# -- estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "float16"])
def test_a_tensor(dtype: str) -> None:
    assert estimate_tensor((3, 5, 7), dtype) == np.zeros((3, 5, 7), dtype).nbytes
    assert estimate_tensor((), dtype) == np.dtype(dtype).itemsize
    assert estimate_tensor((3, 0), dtype) == 0


def test_a_tensor_of_half_bytes_and_a_whole_buffer() -> None:
    assert estimate_tensor((5,), DType.int4) == np.zeros(5, DType.int4.numpy).nbytes
    assert estimate_tensor((5,), DType.int4, packed=True) == 3
    assert estimate_tensor((5,), DType.int8, packed=True) == 5
    assert estimate_tensor((5,), "float32", aligned=True) == 64
    for wrong in ((-1,), (1.5,), ("n",)):
        with pytest.raises(InvalidValue):
            estimate_tensor(wrong, "float32")


def test_attention_against_the_arrays_of_one() -> None:
    batch, heads, q, kv, depth = 2, 4, 6, 10, 8
    query, key, value = (np.ones((batch, heads, n, depth), np.float32) for n in (q, kv, kv))
    scores = query @ key.swapaxes(-1, -2)
    weights = np.exp(scores)
    output = weights @ value
    found = estimate_attention(batch, heads, q, kv, depth)
    assert (found.query, found.key, found.value, found.output) == (
        query.nbytes,
        key.nbytes,
        value.nbytes,
        output.nbytes,
    )
    assert found.scores == scores.nbytes + weights.nbytes
    assert found.total == sum(x.nbytes for x in (query, key, value, scores, weights, output))
    assert found.cache == key.nbytes + value.nbytes


def test_flash_attention_does_not_grow_with_the_sequence() -> None:
    small = estimate_attention(1, 8, 1024, 1024, 64, "float16", flash=True)
    large = estimate_attention(1, 8, 4096, 4096, 64, "float16", flash=True)
    assert small.scores == large.scores
    assert large.total < estimate_attention(1, 8, 4096, 4096, 64, "float16").total / 10
    assert estimate_attention(1, 8, 64, 64, 64, flash=True, threads=4).scores == 4 * (
        estimate_attention(1, 8, 64, 64, 64, flash=True).scores
    )


def test_heads_that_share_keys() -> None:
    shared = estimate_attention(1, 8, 16, 16, 64, kv_heads=2)
    assert shared.cache * 4 == estimate_attention(1, 8, 16, 16, 64).cache
    with pytest.raises(InvalidValue, match="8 heads cannot share 3"):
        estimate_attention(1, 8, 16, 16, 64, kv_heads=3)


# -- what is left -----------------------------------------------------------------------------------------------------

MEMINFO = "MemTotal: 1000000 kB\nMemFree: 5 kB\nMemAvailable: 400000 kB\nSwapFree: 1000 kB\n"


def machine(root: Path, files: dict[str, str]) -> Surroundings:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Surroundings(root=root, physical_memory=lambda: None)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 401000 << 10),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "1000000\n",
                "sys/fs/cgroup/memory.current": "700000\n",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 50000\n",
            },
            350_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "7\n",
                "proc/self/cgroup": "1:name=x:/a\n0::/user/job\n",
                "sys/fs/cgroup/user/memory.max": "900000",
                "sys/fs/cgroup/user/memory.current": "100000",
                "sys/fs/cgroup/user/job/memory.max": "500000",
                "sys/fs/cgroup/user/job/memory.current": "100000",
            },
            400_000,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "650000",
            },
            0,
        ),
    ],
)
def test_what_is_left(files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    assert memory_left(machine(tmp_path, files)) == left


def test_a_system_that_only_knows_its_size(tmp_path: Path) -> None:
    around = Surroundings(root=tmp_path, physical_memory=lambda: 1 << 50)
    assert 0 < (memory_left(around) or 0) < 1 << 50
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("99 10 1")
    assert memory_left(around) == (1 << 50) - 10 * mmap.PAGESIZE


def test_what_is_left_here() -> None:
    left = memory_left()
    assert left is None or left > 0
    assert resident_memory() > MB
    check_room(LARGE - 1, "anything")


def test_large_requests_are_looked_at(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemAvailable: {200 << 10} kB", "proc/self/statm": "99 10 1"}
    around = machine(tmp_path, files)
    check_room(160 * MB, "arena", around)
    with pytest.raises(OutOfMemory, match="arena: 188,743,680 bytes asked for, 209,715,200 are left") as caught:
        check_room(180 * MB, "arena", around)
    error = caught.value
    assert (error.part, error.requested, error.in_use) == ("arena", 180 * MB, 10 * mmap.PAGESIZE)
    assert error.capacity == 10 * mmap.PAGESIZE + 200 * MB


# -- where memory lies ------------------------------------------------------------------------------------------------

TWO = (NumaNode(0, (0, 1), None), NumaNode(1, (2, 3), None))


def test_memory_is_asked_for_near_the_thread_or_everywhere() -> None:
    calls: list[tuple[int, ...]] = []

    def bind(*call: int) -> int:
        calls.append(call)
        return 0

    assert place(4096 * 10 + 5, 4096 * 4, nodes=TWO, bind=bind, cpu=lambda: 3)
    assert place(4096 * 10, 4096 * 2, "interleave", nodes=TWO, bind=bind)
    assert place(4096 * 10, 4096 * 2, nodes=TWO, bind=bind, cpu=lambda: 77)  # a core of no node
    assert calls == [(4096 * 11, 4096 * 3, 1, 0b10), (4096 * 10, 4096 * 2, 3, 0b11), (4096 * 10, 4096 * 2, 1, 0b01)]
    assert not place(4096 * 10 + 5, 4096, nodes=TWO, bind=bind)  # no whole page
    assert not place(4096 * 10, 4096 * 2, nodes=TWO[:1], bind=bind)
    assert not place(4096 * 10, 4096 * 2, nodes=TWO, bind=lambda *call: errno.EPERM)
    assert len(calls) == 3
    with pytest.raises(InvalidConfig, match="placement cannot be 'far'"):
        place(0, 0, "far")  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["local", "interleave"])
def test_a_pool_places_its_chunks_where_there_are_several_nodes(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, str]] = []
    monkeypatch.setattr(sources, "topology", lambda: TWO)
    monkeypatch.setattr(sources, "place", lambda *call: calls.append(call))
    pool = PoolAllocator(source=SystemSource(placement))
    buffer = pool.alloc(1000)
    assert calls == [(buffer.ctypes.data, MB, placement)]
    calls.clear()
    monkeypatch.setattr(sources, "topology", lambda: TWO[:1])
    PoolAllocator(source=SystemSource(placement)).alloc(1000)
    assert calls == []


def test_the_system_takes_the_call_or_says_why_not() -> None:
    block = (ctypes.c_char * (4096 * 8))()
    code = numa._mbind(-(-ctypes.addressof(block) // 4096) * 4096, 4096 * 4, 1, 1)
    assert code in (0, errno.ENOSYS, errno.EPERM)
    block[:8] = b"12345678"  # and the memory is as good as before
    assert block[:8] == b"12345678"
    assert numa.current_cpu() >= 0
