"""Kernels and their calls as data: what to compile, with which memory and numbers to call it, over how many tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from ranvier.codegen.storage import Storage, View
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.codegen.llvm.builder import Module
    from ranvier.codegen.llvm.isa import Isa

# What multiplies: vectors of floats, or what has rates of its own (tiles of a matrix unit, dot products of bytes).
Units = Literal["", "bfloat16 tiles", "int8 tiles", "bytes"]


@dataclass(frozen=True)
class KernelSpec:
    """Code to be made. Specs with equal keys are the same code and compiled once per process.

    ``key`` holds only what the code depends on (str, int, bool, float, tuples of those), and its ``repr`` is stable:
    it names the cached object. ``emit(module, symbol, isa)`` writes a function called ``symbol`` (and may write
    internal helpers whose names start with it).

    A kernel that a :class:`Launch` calls has the signature
    ``void (ptr bufs, ptr dims, i64 begin, i64 end, ptr scratch)``: pointers and numbers as the launch lists them,
    the range of tiles to work on, and scratch memory of the calling thread. A spec used only through
    :class:`Code` may have any signature.
    """

    name: str  # for people: "gemm float32 6x64"
    key: tuple[object, ...]
    emit: Callable[[Module, str, Isa], None] = field(compare=False, hash=False)
    units: Units = field(default="", compare=False, hash=False)

    def __hash__(self) -> int:
        """Worked out once: keys are deep, and every launch looks its kernels up."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash(self.key)
        return found


# Nobody changes these; they are not declared frozen because making one would take three times as long.


@dataclass(slots=True, unsafe_hash=True)
class At:
    """A place in a storage, in bytes."""

    storage: Storage
    offset: int = 0

    @classmethod
    def of(cls, view: View) -> At:
        """Where the first element of a view lies."""
        return cls(view.storage, view.offset * view.dtype.numpy.itemsize)


@dataclass(slots=True, unsafe_hash=True)
class Code:
    """The address of a compiled function: a micro-kernel that a driver kernel calls through a pointer."""

    spec: KernelSpec


@dataclass(slots=True, unsafe_hash=True)
class Launch:
    """One step of a native program."""

    spec: KernelSpec
    buffers: tuple[At | Code, ...]  # become bufs[0], bufs[1] …
    dims: tuple[int, ...]  # become dims[0], dims[1] … (int64)
    tiles: int  # the kernel is called with disjoint ranges that cover [0, tiles)
    writes: tuple[Storage, ...]  # storages the step writes; all others in ``buffers`` are read
    grain: int = 1  # tiles a thread takes at a time, at least
    scratch: int = 0  # bytes of scratch per thread, 64-byte aligned
    flops: float = 0.0  # work, for scheduling (is it worth a second thread?) and for profiles
    traffic: float = 0.0  # bytes moved, likewise
    label: str = ""  # the nodes it stands for
    # A step in rounds: the kernel is called with ranges that cover [0, rounds * tiles), and no tile of round k, which
    # are [k * tiles, (k + 1) * tiles), is begun before all of round k - 1 are done. A range may hold several rounds:
    # its tiles are to be worked on in order.
    rounds: int = 1
    rate: float = 1.0  # operations in the time of a float32 one of the machine that the driver's constants are of
    far: bool = False  # its constants come from behind the second-level cache in every run
    origin: object = field(default=None, compare=False, hash=False)  # what could make it again for a part of the work

    @property
    def units(self) -> Units:
        """What multiplies here: a driver's work is done by the micro-kernel that it calls."""
        specs = (self.spec, *(b.spec for b in self.buffers if isinstance(b, Code)))
        return next((spec.units for spec in specs if spec.units), "")

    def labelled(self, label: str) -> Launch:
        """The same step, standing for other nodes."""
        work = (self.grain, self.scratch, self.flops, self.traffic)
        return Launch(
            self.spec,
            self.buffers,
            self.dims,
            self.tiles,
            self.writes,
            *work,
            label,
            self.rounds,
            self.rate,
            self.far,
            self.origin,
        )
