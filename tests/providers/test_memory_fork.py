"""A child process after a fork: it gets no bytes that its parent hands out too, and no lock stays held."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from ranvier.config import MemoryConfig
from ranvier.memory import MemoryTracker
from ranvier.providers.memory import MappedSource, PoolAllocator, SharedHandle, SharedSource, attach

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a child that runs ``work``: 0 where it returned something true."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("kind", ["shared", "mapped"])
@pytest.mark.parametrize("growth", ["static", "dynamic"])
def test_shared_blocks_are_not_handed_out_twice(kind: str, growth: str, tmp_path: object) -> None:
    source = SharedSource() if kind == "shared" else MappedSource(str(tmp_path))
    pool = PoolAllocator(MemoryConfig(growth=growth, pool_size=1 << 20), source)
    held = pool.alloc(1000)
    held[:] = 1
    freed = pool.alloc(1000)
    pool.free(freed)

    def work() -> bool:
        own = pool.alloc(1000)
        own[:] = 9
        inherited = (held == 1).all()
        held[0] = 2  # shared: the parent sees it
        pool.free(held)  # not the child's to free: nothing happens
        other = pool.alloc(1000)
        other[:] = 9
        pool.free(own)
        pool.free(other)
        return bool(inherited) and pool.close() == 0

    assert in_child(work) == 0
    assert held[0] == 2 and (held[1:] == 1).all()
    after = pool.alloc(1000)
    assert not (after == 9).any()
    pool.free(held)
    pool.free(after)
    assert pool.stats().active == 0


def test_private_memory_is_copied() -> None:
    pool = PoolAllocator()
    held = pool.alloc(1000)
    held[:] = 1

    def work() -> bool:
        held[:] = 5
        pool.free(held)
        return pool.stats().active == 0

    assert in_child(work) == 0
    assert (held == 1).all() and pool.stats().active == 1000


def test_forking_while_others_allocate() -> None:
    tracker = MemoryTracker()
    pool = PoolAllocator(tracker=tracker)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            pool.free(pool.alloc(1000, "busy"))

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:

        def work() -> bool:
            buffer = pool.alloc(5000, "child")  # would wait for ever if a lock had stayed held
            pool.free(buffer)
            return tracker.snapshot().by("part").get("child", 0) == 0

        assert [in_child(work) for _ in range(20)] == [0] * 20
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert pool.stats().active == tracker.current == 0


def test_another_process_maps_a_buffer_without_a_copy() -> None:
    pool = PoolAllocator(source=SharedSource())
    buffer = pool.alloc(3000)
    buffer[:] = 4
    here, there = socket.socketpair()

    def work() -> bool:
        data, fds, _, _ = socket.recv_fds(there, 64, 1)
        offset, nbytes = (int(text) for text in data.split())
        seen = attach(SharedHandle(fds[0], offset, nbytes))
        os.close(fds[0])
        complete = bool((seen == 4).all()) and seen.nbytes == 3000
        seen[:] = 6
        return complete

    handle = pool.share(buffer)
    socket.send_fds(here, [f"{handle.offset} {handle.nbytes}".encode()], [handle.fd])
    assert in_child(work) == 0
    assert (buffer == 6).all()
    here.close()
    there.close()
