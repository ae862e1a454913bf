"""Launches made ready to run: compiled, placed, and written down as one table that native code walks through."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm import driver, objects, system, turning
from ranvier.codegen.llvm.isa import Isa, available
from ranvier.codegen.llvm.library import Kernel, kernels
from ranvier.codegen.llvm.pool import Pool, shared
from ranvier.codegen.storage import Storage
from ranvier.devices import usable_cores
from ranvier.records import dataclass
from ranvier.varying import largest, smallest

# What one core does, roughly, to tell how long a step takes.
FLOPS_PER_NS = 100.0
BYTES_PER_NS = 10.0
NEAR_BYTES_PER_NS = 40.0  # where all that a step touches fits its cache
NEAR_BYTES = 3e6
SERIAL_NS = 25_000  # a step shorter than this stays on one thread
ROUND_NS = 6_000  # so does one whose rounds are shorter than this: other threads are awake, but each is waited for
CHUNK_NS = 4_000  # what a thread takes at a time should last this long where there is enough
CHUNKS_PER_THREAD = 8
PLACED_CORES = 8  # up to so many, chunks are few enough for threads to choose theirs (see the driver)
_SCRATCH_ALIGN = 128

ABSOLUTE, ARENA, FIRST_INPUT = 0, 1, 2  # bases; the outputs follow the inputs


@dataclass(frozen=True)
class Placement:
    """Where a storage lies at run time."""

    base: int  # index into the bases of a run; 0 means absolute address
    offset: int  # bytes (for base 0: the address)


@dataclass(frozen=True)
class Step:
    """What a profile says about a step."""

    label: str
    kernel: str
    tiles: int
    flops: float
    traffic: float


@dataclass(frozen=True)
class Patch:
    """Numbers of a program that differ from call to call: where they stand, and one row of them per call.

    They are counted from the table of steps on; the dims of all steps follow, then their buffers, two numbers each.
    """

    at: np.ndarray[Any, Any]
    numbers: np.ndarray[Any, Any]


class _Call:
    """What a run needs besides its program: the words native code reads, and a workspace (pointers and scratch).

    A run takes one from a common list and puts it back, so there are as many as ever ran at the same time, and their
    memory serves all programs. Words are written only when they change: that is most of the cost of a small run.
    """

    __slots__ = ("_keep", "_words", "given", "reference", "room", "state")

    def __init__(self) -> None:
        self.given: list[Any] = [None, None]  # the lists of inputs and outputs
        self._words = (ctypes.c_int64 * driver.CALL_WORDS)()
        self._words[driver.GIVEN] = id(self.given)
        self.reference = ctypes.byref(self._words)
        self.room = 0
        self._keep: np.ndarray[Any, Any] | None = None
        self.state: tuple[int, ...] = ()

    def write(self, state: tuple[int, ...]) -> None:
        self.state = ()  # nothing, should this be interrupted
        words = self._words
        words[driver.ARENA], words[driver.POOL], words[driver.THREADS], words[driver.ABORT], words[driver.TIMES] = state
        self.state = state

    def grow(self, nbytes: int) -> None:
        memory = np.empty(nbytes + _SCRATCH_ALIGN, np.uint8)
        start = int(memory.ctypes.data)
        self._words[driver.WORKSPACE] = start + -start % _SCRATCH_ALIGN
        self._keep, self.room = memory, nbytes

    def by_table(self, program: Any, function: Any, arrays: Sequence[np.ndarray[Any, Any]]) -> int:
        """Run with addresses that Python reads, one by one."""
        table = np.array([a.ctypes.data for a in arrays] or [0], np.int64)
        self.give_table(table.ctypes.data, len(arrays))
        reached: int = function(program, self.reference)
        self._words[driver.GIVEN] = id(self.given)
        return reached

    def give_table(self, table: int, count: int) -> int:
        """Let arrays be those whose addresses stand there; returns the address of the words."""
        self._words[driver.GIVEN], self._words[driver.GIVEN_COUNT] = table, count
        return ctypes.addressof(self._words)


class OwnCall:
    """The call of one program in an arena, for native code that runs it again and again, one run at a time.

    That calls ``function`` with the addresses of ``program`` and ``words``, and writes those of arrays to ``table``
    before, inputs and then outputs; the place behind them is free.
    """

    __slots__ = ("_call", "_places", "_program", "function", "program", "table", "words")

    def __init__(self, program: NativeProgram, arena: int) -> None:
        count = program.bases - FIRST_INPUT
        self._program = program
        self._places = np.zeros(count + 1, np.int64)
        self.table = int(self._places.ctypes.data)
        call = self._call = _Call()
        call.grow(program.alone_bytes)
        call.write((arena, 0, 1, 0, 0))
        self.words = call.give_table(self.table, count)
        self.program = program.address
        self.function = _function(False)[0].address


_calls: list[_Call] = []


def _taken(room: int, state: tuple[int, ...]) -> _Call:
    """One for a run that needs so much room; it is put back when that is over."""
    try:
        call = _calls.pop()
    except IndexError:
        call = _Call()
    if call.room < room:
        call.grow(room)
    if call.state != state:
        call.write(state)
    return call


@functools.cache
def _function(lists: bool) -> tuple[Kernel, Any]:
    """The driver; called with references only, because any other argument costs more than a step."""
    spec = driver.run_spec(lists=lists)
    kernel = kernels([spec], available()[-1])[spec]
    return kernel, ctypes.CFUNCTYPE(ctypes.c_int64)(kernel.address)


class NativeProgram:
    """A compiled list of steps; immutable, so several threads may run it at the same time (each with its own arena)."""

    def __init__(
        self,
        launches: Sequence[Launch],
        places: Mapping[Storage, Placement],
        isa: Isa,
        *,
        bases: int,
        flush: bool = False,  # subnormal numbers are zeros
    ) -> None:
        # launches of a form share the objects for their micro-kernels, dozens each: those are looked up once
        codes = {id(b): b for launch in launches for b in launch.buffers if type(b) is Code}
        compiled = kernels([*(x.spec for x in launches), *(code.spec for code in codes.values())], isa)
        self.kernels = tuple(compiled.values())  # their code lives as long as the program
        self.steps = tuple(Step(x.label, x.spec.name, x.tiles, x.flops, x.traffic) for x in launches)
        self.bases = bases
        self.scratch = max((launch.scratch for launch in launches), default=0)
        known = {number: (ABSOLUTE, compiled[code.spec].address) for number, code in codes.items()}
        entries = [known.get(id(b)) or _entry(b, places) for launch in launches for b in launch.buffers]
        places_of = np.array(entries, np.int64).reshape(-1, 2)
        if len(entries) and not 0 <= places_of[:, 0].min() <= places_of[:, 0].max() < bases:
            raise ValueError(f"a storage is placed at a base outside of the {bases} there are")
        table = _table(launches, compiled, isa)
        self.parallel = bool((table[:, driver.CHUNKS] > 1).any())
        dims = np.array([d for launch in launches for d in launch.dims], np.int64)
        # one block of numbers: a program that differs in some of them is a copy of it
        self._numbers = np.concatenate([table.reshape(-1), dims, places_of.reshape(-1)])
        self._rows = len(table)
        self._first_entry = table.size + dims.size
        self._stride = -(-self.scratch // _SCRATCH_ALIGN) * _SCRATCH_ALIGN
        pointers = 8 * (bases + len(entries))
        self._pointers = -(-pointers // _SCRATCH_ALIGN) * _SCRATCH_ALIGN
        self._alone = self._pointers + self._stride
        head = self._head = (ctypes.c_int64 * driver.HEAD_WORDS)()
        head[driver.STEPS] = len(self.steps)
        head[driver.ENTRY_COUNT] = len(entries)
        head[driver.BASES] = bases
        head[driver.CLOCK] = system.clock_function()
        head[driver.SCRATCH] = self._pointers
        head[driver.STRIDE] = self._stride
        head[driver.ARRAY_TYPE] = id(np.ndarray)
        head[driver.FLUSH] = int(flush)
        head[driver.TURNS] = int(table[:, driver.SLICE].any())
        self._settle(0)
        self._function: Any = _function(True)[1] if objects.readable() else None

    def patched(self, patch: Patch, k: int) -> NativeProgram:
        """The same steps with the ``k``-th of the numbers in ``patch`` in place of their own."""
        made = object.__new__(NativeProgram)
        made.__dict__.update(self.__dict__)
        numbers = made._numbers = self._numbers.copy()
        numbers[patch.at] = patch.numbers[k]
        made._head = type(self._head).from_buffer_copy(self._head)
        made._settle(self._head[driver.TABLE])
        return made

    def _settle(self, before: int) -> None:
        """Let addresses in the numbers and the head be those of the numbers where they lie now."""
        numbers, head = self._numbers, self._head
        start: int = numbers.__array_interface__["data"][0]
        words = driver.STEP_WORDS
        numbers[driver.DIMS : self._rows * words : words] += start - before
        head[driver.TABLE], head[driver.ENTRIES] = start, start + 8 * self._first_entry
        head[driver.HEAD_WORK] = int(numbers[driver.WORK])
        self._reference = ctypes.byref(head)

    def run(
        self,
        inputs: list[np.ndarray[Any, Any]],
        outputs: list[np.ndarray[Any, Any]],
        arena: int,
        *,
        threads: int = 1,
        abort: int = 0,
        times: np.ndarray[Any, Any] | None = None,
        pool: Pool | None = None,
    ) -> int:
        """Run all steps; returns how many were done (fewer than there are where ``abort`` said so).

        ``inputs`` and ``outputs`` are lists of arrays that nobody changes meanwhile; ``arena`` is the address of
        the temporaries. ``abort`` is the address of an int32: nonzero ends the run before the next step, and lets the
        step under way go without the chunks of work that nobody has begun; it counts as done.
        ``times`` (int64, one row per step) receives start and end in nanoseconds of ``time.perf_counter_ns`` and the
        number of threads that took part. ``threads`` is a limit, not a promise: the pool has as many as there are
        cores, and works for one run at a time.
        """
        helpers = 0
        need = self._alone
        stamps = 0 if times is None else self._stamps(times)
        if threads > 1 and self.parallel:
            pool = pool or shared()
            threads = pool.ready(threads)
            if threads > 1:
                helpers = pool.address
                need += (threads - 1) * self._stride
        call = _taken(need, (arena, helpers, threads, abort, stamps))
        if helpers and pool is not None and pool.portable:
            with pool.awake():
                reached = self._enter(call, inputs, outputs)
        else:
            reached = self._enter(call, inputs, outputs)
        _calls.append(call)
        if reached < 0:
            count = len(inputs) + len(outputs)
            raise ValueError(f"{count} inputs and outputs for a program of {self.bases - FIRST_INPUT}")
        return reached

    @property
    def address(self) -> int:
        return ctypes.addressof(self._head)

    @property
    def alone_bytes(self) -> int:
        """What one thread needs besides the arena."""
        return self._alone

    def enters_alone(self, threads: int) -> bool:
        """Is ``run_alone`` the way of runs with so many threads?"""
        return self._function is not None and not (threads > 1 and self.parallel)

    def run_alone(self, inputs: list[np.ndarray[Any, Any]], outputs: list[np.ndarray[Any, Any]], arena: int) -> bool:
        """As ``run`` by the calling thread without anything else, as fast as Python gets there: false, and nothing is
        touched, unless all are plain arrays, C-contiguous and aligned."""
        call = _taken(self._alone, (arena, 0, 1, 0, 0))
        reached = self._by_lists(call, inputs, outputs)
        _calls.append(call)
        return reached >= 0

    def _by_lists(self, call: _Call, inputs: list[np.ndarray[Any, Any]], outputs: list[np.ndarray[Any, Any]]) -> int:
        given = call.given
        given[0], given[1] = inputs, outputs
        reached: int = self._function(self._reference, call.reference)
        given[0] = given[1] = None
        return reached

    def _enter(self, call: _Call, inputs: list[np.ndarray[Any, Any]], outputs: list[np.ndarray[Any, Any]]) -> int:
        reached = -1 if self._function is None else self._by_lists(call, inputs, outputs)
        if reached < 0:
            reached = call.by_table(self._reference, _function(False)[1], [*inputs, *outputs])
        return reached

    def _stamps(self, times: np.ndarray[Any, Any]) -> int:
        wanted = (len(self.steps), driver.TIME_WORDS)
        if times.shape != wanted or times.dtype != np.int64 or not times.flags.c_contiguous:
            raise ValueError(f"times are a contiguous int64 array of shape {wanted}")
        return int(times.ctypes.data)


def _entry(buffer: At | Code, places: Mapping[Storage, Placement]) -> tuple[int, int]:
    assert isinstance(buffer, At)
    place = places[buffer.storage]
    return place.base, place.offset + buffer.offset


def _table(launches: Sequence[Launch], compiled: Mapping[KernelSpec, Kernel], isa: Isa) -> np.ndarray[Any, Any]:
    """The steps as the driver reads them; the dims of all lie one after another behind the table, counted from it."""
    table = np.zeros((max(1, len(launches)), driver.STEP_WORDS), np.int64)
    cores = usable_cores()
    moved = sum(launch.traffic for launch in launches)
    buffers = dims = 0
    for row, launch in zip(table, launches):
        grain, chunks = chunked(launch, cores)
        row[driver.KERNEL] = compiled[launch.spec].address
        row[driver.BUFFERS] = 8 * buffers
        row[driver.DIMS] = 8 * (table.size + dims)
        row[driver.TILES], row[driver.GRAIN], row[driver.CHUNKS] = launch.tiles, grain, chunks
        row[driver.ROUNDS] = launch.rounds
        row[driver.SLICE] = slice_tiles(launch, moved - launch.traffic, isa)
        row[driver.WORK] = int(estimated_ns(launch)) if chunks > 1 else 0
        buffers += len(launch.buffers)
        dims += len(launch.dims)
    table[:, driver.WORK] = table[::-1, driver.WORK].cumsum()[::-1]
    return table


def slice_tiles(launch: Launch, beside: float, isa: Isa) -> int:
    """Tiles of a slice of a step that is walked back and forth, where so many bytes are read beside it from one run to
    the next; 0 for other steps."""
    if launch.rounds > 1 or beside > turning.BESIDE_BYTES:
        return 0
    grain = max(1, launch.grain)
    tiles = -(-launch.tiles // turning.slices(launch.traffic, isa) // grain) * grain
    return tiles if tiles < launch.tiles else 0


def estimated_ns(launch: Launch) -> float:
    """How long a launch takes on one core, roughly."""
    near = not launch.far and launch.traffic / launch.rounds <= NEAR_BYTES
    moving = launch.traffic / (NEAR_BYTES_PER_NS if near else BYTES_PER_NS)
    return max(launch.flops / (FLOPS_PER_NS * launch.rate), moving)


def chunked(launch: Launch, cores: int) -> tuple[int, int]:
    """Tiles to take at a time, and the number of such chunks: one where a second thread would not pay.

    Chunks are small, so that a thread slowed down by its neighbours leaves work to the others, and yet long enough to
    make taking one cheap.
    """
    tiles, span = launch.tiles, estimated_ns(launch)
    if tiles <= 1 or cores < 2 or span < SERIAL_NS or span < ROUND_NS * launch.rounds:
        return largest(1, tiles), smallest(1, tiles)
    if launch.rounds > 1:
        grain = max(launch.grain, -(-tiles // min(driver.PLACED_CHUNKS, CHUNKS_PER_THREAD * cores)))
        return grain, -(-tiles // grain)
    long_enough = math.ceil(tiles * CHUNK_NS / span)
    fair = tiles // (CHUNKS_PER_THREAD * cores)
    grain = largest(1, launch.grain, smallest(long_enough, fair), tiles >> 30)
    if cores <= PLACED_CORES:
        grain = largest(grain, -(-tiles // driver.PLACED_CHUNKS))
    return grain, -(-tiles // grain)
