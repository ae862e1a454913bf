"""Launches whose numbers vary from call to call, as the first of them and the numbers of all.

A program is a table of numbers around compiled code. Where only sizes differ from one call to the next, the code and
the places are the same and a handful of those numbers is not: a program for another call is a copy with these put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm import driver
from ranvier.codegen.llvm.program import Patch, Placement, chunked, estimated_ns
from ranvier.codegen.storage import Storage
from ranvier.devices import usable_cores
from ranvier.varying import Varying, most, value_at, varies

Array = np.ndarray[Any, Any]


def first_of(launch: Launch) -> Launch:
    """The launch of the first call, with scratch for all."""
    made = at_call(launch, 0)
    made.rounds = int(launch.rounds)
    return made


def at_call(launch: Launch, k: int) -> Launch:
    """The launch of one call, with scratch for all."""
    places = ((b.storage, value_at((b.offset,), k)[0]) if isinstance(b, At) else b for b in launch.buffers)
    tiles, grain, flops, traffic = value_at((launch.tiles, launch.grain, launch.flops, launch.traffic), k)
    return replace(
        launch,
        buffers=tuple(At(*b) if isinstance(b, tuple) else b for b in places),
        dims=value_at(launch.dims, k),
        tiles=tiles,
        grain=grain,
        scratch=most(launch.scratch),
        flops=flops,
        traffic=traffic,
    )


def patch_of(launches: Sequence[Launch], places: Mapping[Storage, Placement], count: int) -> Patch:
    """The numbers that vary, for ``count`` calls; decisions about how work is divided are followed too."""
    found = _Numbers(count)
    cores = usable_cores()
    work: list[Any] = []
    dims = max(1, len(launches)) * driver.STEP_WORDS
    entries = dims + sum(len(launch.dims) for launch in launches)
    for row, launch in enumerate(launches):
        for k, number in enumerate(launch.dims):
            found.add(dims + k, number)
        for k, buffer in enumerate(launch.buffers):
            if isinstance(buffer, At) and varies(buffer.offset):
                found.add(entries + 2 * k + 1, places[buffer.storage].offset + buffer.offset)
        grain, chunks = chunked(launch, cores)
        at = row * driver.STEP_WORDS
        for column, number in ((driver.TILES, launch.tiles), (driver.GRAIN, grain), (driver.CHUNKS, chunks)):
            found.add(at + column, number)
        work.append(estimated_ns(launch) if chunks > 1 else 0)
        dims += len(launch.dims)
        entries += 2 * len(launch.buffers)
    _add_work(found, work, count)
    return found.patch()


def _add_work(found: _Numbers, work: Sequence[Any], count: int) -> None:
    """What is left to do from every step on, as the driver wants to know it."""
    if not any(type(w) is Varying for w in work):
        return
    left = np.zeros(count, np.int64)
    for row in range(len(work) - 1, -1, -1):
        each = work[row]
        left = left + (each.values[:count].astype(np.int64) if type(each) is Varying else int(each))
        found.add_row(row * driver.STEP_WORDS + driver.WORK, left)


class _Numbers:
    """Numbers that vary, and where they stand."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._at: list[int] = []
        self._rows: list[Array] = []

    def add(self, at: int, number: Any) -> None:
        if type(number) is Varying:
            self.add_row(at, number.values[: self._count])

    def add_row(self, at: int, values: Array) -> None:
        self._at.append(at)
        self._rows.append(values.astype(np.int64))

    def patch(self) -> Patch:
        rows = np.array(self._rows, np.int64).reshape(len(self._at), self._count)
        return Patch(np.array(self._at, np.int64), np.ascontiguousarray(rows.T))
