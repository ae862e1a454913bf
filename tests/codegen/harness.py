"""Runs launches one after another on the calling thread: the simplest thing that can execute generated kernels."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.launch import Code, KernelSpec, Launch
from ranvier.codegen.llvm.isa import Isa, available
from ranvier.codegen.llvm.library import kernels
from ranvier.codegen.storage import Storage, View

Array = np.ndarray[Any, Any]
ISAS = available()  # every path this machine can run, the best first
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
POISON = 0xA5


def aligned(nbytes: int, fill: int | None = POISON, shift: int = 0) -> Array:
    """Bytes at a 64-byte boundary (plus ``shift``), filled so that reading what nobody wrote shows."""
    raw = np.empty(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    found = raw[start : start + nbytes]
    if fill is not None:
        found[:] = fill
    return found


def view_of(array: Array, kind: str = "input", index: int = 0) -> View:
    """A view that describes a NumPy array (with its strides); bind its storage to the array when running."""
    from ranvier import dtypes

    item = array.itemsize
    storage = Storage(kind, array.nbytes, index=index)  # type: ignore[arg-type]
    return View(storage, dtypes.of(array), array.shape, tuple(s // item for s in array.strides))


def ranges_of(launch: Launch, split: int) -> list[tuple[int, int]]:
    """The tiles of a launch in one range over all rounds, or every round in so many of its own, the last first: nothing
    may depend on an order."""
    tiles = launch.tiles
    if split == 1:
        return [(0, tiles * launch.rounds)] if tiles else []
    cuts = [tiles * k // split for k in range(split + 1)]
    ranges = [(a, b) for a, b in itertools.pairwise(cuts) if a < b][::-1]
    return [(r * tiles + a, r * tiles + b) for r in range(launch.rounds) for a, b in ranges]


class Runner:
    """Launches bound to memory; call it to run them all. ``split`` cuts each launch's tiles into that many ranges.

    ``poison`` fills scratch: 0xFF makes floats of any size NaN, where POISON makes them nearly zero.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        isa: Isa,
        bound: Mapping[Storage, Array],
        *,
        split: int = 1,
        poison: int = POISON,
    ) -> None:
        specs: list[KernelSpec] = []
        for launch in launches:
            specs.append(launch.spec)
            specs += [b.spec for b in launch.buffers if isinstance(b, Code)]
        self.kernels = kernels(specs, isa)
        self.memory: dict[Storage, Array] = dict(bound)
        self._calls: list[tuple[Any, int, int, list[tuple[int, int]], int]] = []
        self._keep: list[Any] = []
        for launch in launches:
            pointers: list[int] = []
            for buffer in launch.buffers:
                if isinstance(buffer, Code):
                    pointers.append(self.kernels[buffer.spec].address)
                else:
                    pointers.append(self._address(buffer.storage) + buffer.offset)
            bufs = np.array(pointers or [0], np.int64)
            dims = np.array(launch.dims or (0,), np.int64)
            scratch = aligned(launch.scratch + 64, poison)
            self._keep += [bufs, dims, scratch]
            ranges = ranges_of(launch, split)
            function = _SIGNATURE(self.kernels[launch.spec].address)
            self._calls.append((function, bufs.ctypes.data, dims.ctypes.data, ranges, scratch.ctypes.data))

    def _address(self, storage: Storage) -> int:
        array = self.memory.get(storage)
        if array is None:
            if storage.array is not None:
                array = aligned(storage.nbytes)
                array[:] = np.ascontiguousarray(storage.array).reshape(-1).view(np.uint8)
            else:
                assert storage.kind == "temp", f"{storage!r} is not bound"
                array = aligned(storage.nbytes)
            self.memory[storage] = array
        return int(array.ctypes.data)

    def __call__(self) -> None:
        for function, bufs, dims, ranges, scratch in self._calls:
            for begin, end in ranges:
                function(bufs, dims, begin, end, scratch)


def run(launches: Sequence[Launch], isa: Isa, bound: Mapping[Storage, Array], *, split: int = 1) -> None:
    Runner(launches, isa, bound, split=split)()
