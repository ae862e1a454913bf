"""Random allocating and freeing, checked against a list of buffers that are filled with a pattern of their own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ranvier.config import MemoryConfig
from ranvier.errors import InvalidBuffer, OutOfMemory
from ranvier.providers.memory import PoolAllocator
from ranvier.providers.memory.holes import Holes

from .memory_checks import FailingSource, check_books, check_buffers

SIZES = st.one_of(st.integers(0, 300), st.integers(1000, 70_000), st.integers(900_000, 2_500_000))


class Pool(RuleBasedStateMachine):
    @initialize(
        growth=st.sampled_from(["static", "dynamic", "incremental"]),
        alignment=st.sampled_from([64, 256, 4096]),
        pooling=st.booleans(),
        secure=st.booleans(),
        limit=st.sampled_from([None, 3_000_000, 8_000_000]),
        kept=st.sampled_from([0, 100_000, 4_000_000]),
    )
    def make(self, growth: str, alignment: int, pooling: bool, secure: bool, limit: int | None, kept: int) -> None:
        if growth == "static":
            pooling, kept = True, min(limit or 4_000_000, 4_000_000) // alignment * alignment
        config = MemoryConfig(pool_size=kept, alignment=alignment, pooling=pooling, growth=growth, secure=secure)
        self.source = FailingSource()
        self.pool = PoolAllocator(config, self.source, limit=limit)
        self.out: list[tuple[object, int]] = []
        self.count = 0

    @rule(nbytes=SIZES)
    def alloc(self, nbytes: int) -> None:
        before = self.pool.stats()
        try:
            buffer = self.pool.alloc(nbytes)
        except OutOfMemory as error:
            after = self.pool.stats()
            assert self.pool.limit is not None or self.pool.config.growth == "static" or self.source.failing
            assert error.requested == nbytes
            assert (after.failures, after.active) == (before.failures + 1, before.active)
            return
        assert buffer.nbytes == nbytes and buffer.flags.writeable
        self.count = (self.count + 1) % 255
        buffer[:] = self.count
        self.out.append((buffer, self.count))

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 1 << 30))
    def free(self, which: int) -> None:
        buffer, mark = self.out.pop(which % len(self.out))
        assert (buffer == mark).all()
        self.pool.free(buffer)
        if self.pool.config.secure:
            assert not buffer.any()
        with pytest.raises(InvalidBuffer):
            self.pool.free(buffer)

    @rule()
    def trim(self) -> None:
        before = self.pool.stats()
        freed = self.pool.trim()
        after = self.pool.stats()
        assert before.reserved - after.reserved == freed
        assert self.pool.config.growth != "static" or freed == 0
        if not self.out and self.pool.config.growth != "static":
            assert after.reserved == 0

    @rule(failing=st.booleans())
    def exhaust(self, failing: bool) -> None:
        self.source.failing = failing

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        buffers = [buffer for buffer, _ in self.out]
        check_buffers(buffers, self.pool.config.alignment)
        check_books(self.pool, buffers)
        if not self.pool.config.pooling:
            assert self.pool.stats().cached == 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for buffer, mark in self.out:
            assert (buffer == mark).all()
            self.pool.free(buffer)
        reserved = self.pool.stats().reserved
        if reserved:  # nothing is broken up for ever: all of it can be had in one piece from each chunk
            assert self.pool._holes.largest() == max(r.nbytes for r in self.pool._chunks.values())
            assert len(self.pool._holes.ranges()) == len(self.pool._chunks)
        assert self.pool.close() == 0
        assert self.pool.stats().reserved == 0


Pool.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestPool = Pool.TestCase


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_holes_are_the_bytes_that_nobody_took(steps: list[tuple[bool, int]]) -> None:
    """Against a set with every single free byte of two chunks."""
    holes = Holes()
    free = {(chunk, k) for chunk in (0, 1) for k in range(64)}
    holes.add(0, 0, 64)
    holes.add(1, 0, 64)
    taken: list[tuple[int, int, int]] = []
    for take, number in steps:
        if take:
            found = holes.take(number)
            if found is None:
                assert not any(
                    all((c, k + i) in free for i in range(number)) for c in (0, 1) for k in range(65 - number)
                )
                continue
            chunk, start = found
            span = {(chunk, start + i) for i in range(number)}
            assert span <= free
            free -= span
            taken.append((chunk, start, number))
        elif taken:
            chunk, start, size = taken.pop(number % len(taken))
            free |= {(chunk, start + i) for i in range(size)}
            holes.add(chunk, start, size)
        ranges = holes.ranges()
        assert {(c, s + i) for c, s, n in ranges for i in range(n)} == free
        assert sum(n for _, _, n in ranges) == holes.total == len(free)
        assert all((c, s + n) not in free for c, s, n in ranges)  # neighbours are one
