"""A partition at given shapes, ready to be called: definitions, launches, memory, native program."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.arena import ALIGNMENT, Lifetime, MemoryPlan, plan_memory
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import At, Code, Launch
from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.entry import Entry, prepared
from ranvier.codegen.llvm.program import ABSOLUTE, ARENA, FIRST_INPUT, NativeProgram, Placement, estimated_ns
from ranvier.codegen.signature import Constant, Tensor
from ranvier.codegen.storage import Storage
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Value
from ranvier.graph.tensors import Same
from ranvier.ops.pulse import watching
from ranvier.providers.base import KernelTime, Subgraph
from ranvier.providers.cpu.realise import Realiser
from ranvier.providers.cpu.target import Packs, Realised, Target
from ranvier.providers.cpu.watch import Watch
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_ENTRY_NS = 1e6  # runs that take longer gain nothing by a shorter way in
_WATCHED_NS = 1e6  # shorter runs are over before a thread that watches them would look again
_SHORT_NS = 1e4  # it takes about as long for another thread to begin
_ENTRY_SCRATCH = 1 << 20  # bytes that an entry may keep for itself


@dataclass(frozen=True)
class Result:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class CheckFailed(InvalidValue):
    """Generated code met data that an operator refuses."""


class Specialised:
    """Thread-safe: a call keeps its state in the memory it is given."""

    def __init__(
        self, part: Subgraph, inputs: Sequence[Value], definitions: Definitions, target: Target, packs: Packs
    ) -> None:
        inputs = [*inputs, *(each.value for each in definitions.draws)]
        self._draws = [each.make for each in definitions.draws]
        realised = self._settled(Realiser(definitions, inputs, part.outputs, target, packs).run())
        self.launches: list[Launch] = realised.launches
        self.choices = realised.assignment.choices
        self.decisions = realised.decisions
        self.joined = realised.joined
        self._reuse = realised.reuse
        self.results = [Result(definitions.dtype(v).numpy, definitions.shape(v)) for v in part.outputs]
        places, self.memory = _place(realised)
        self.places = places
        self.workspace = -(-self.memory.arena // ALIGNMENT) * ALIGNMENT
        self._checks = [(places[flag].offset, message, node) for flag, message, node in realised.checks]
        count = len(inputs)
        self._keep: list[Array] = []
        for storage in {b.storage for each in self.launches for b in each.buffers if isinstance(b, At)}:
            if storage.kind == "input":
                places[storage] = Placement(FIRST_INPUT + storage.index, 0)
            elif storage.kind == "output":
                places[storage] = Placement(FIRST_INPUT + count + storage.index, 0)
            elif storage.kind == "const":
                assert storage.array is not None
                array = storage.array
                if not array.flags.aligned:
                    array = packs.get(("aligned", Same(array)), array.copy)
                self._keep.append(array)
                places[storage] = Placement(ABSOLUTE, array.ctypes.data)
        self.result_bytes = sum(r.dtype.itemsize * math.prod(r.shape) for r in self.results)
        self.constants = sum(array.nbytes for array in self._keep)
        self.threads = target.threads
        self._isa = target.isa
        self._flush = target.flush_subnormals
        self._bases = FIRST_INPUT + count + len(part.outputs)
        self._ns = sum(map(estimated_ns, self.launches))
        self._entered = self._ns <= _ENTRY_NS and prepared()  # nobody could end such a run before its time either
        self.program = self._native(self.launches)
        flags = {flag for flag, _, _ in realised.checks}
        told = (k for k, x in enumerate(self.launches) if flags.intersection(x.writes))
        self._checked = 1 + max(told, default=-1)  # after so many launches nothing is refused any more
        self._parts: tuple[NativeProgram, ...] = ()  # of a program whose results may be written over inputs

    def _settled(self, realised: Realised) -> Realised:
        """What is compiled and placed, where launches are still to be made ready for it."""
        return realised

    def may_overwrite(self, output: int, given: int) -> bool:
        """Whether a result may be written over an input of its type and shape: all that read the input are done when
        the result is first touched, or are the very step that makes each element of one from that of the other.

        Where data may be refused, that must be known before: the input would be lost with the result. From then on
        such a program runs in two parts.
        """
        read = touched = -1  # the last launch that reads the input, the first that touches the result
        source: Storage | None = None
        target: Storage | None = None
        for k, launch in enumerate(self.launches):
            for buffer in launch.buffers:
                if not isinstance(buffer, At):
                    continue
                storage = buffer.storage
                if storage.kind == "input" and storage.index == given:
                    read, source = k, storage
                elif storage.kind == "output" and storage.index == output and touched < 0:
                    touched, target = k, storage
        if source is None or target is None or touched < self._checked:
            return False
        if read > touched or (read == touched and source not in self._reuse.get(target, ())):
            return False
        if self._checked and not self._parts:
            cut = self._checked
            self._parts = tuple(self._native(part) for part in (self.launches[:cut], self.launches[cut:]))
        return True

    def _native(self, launches: Sequence[Launch]) -> NativeProgram:
        return NativeProgram(launches, self.places, self._isa, bases=self._bases, flush=self._flush)

    def run(self, inputs: list[Array], outputs: list[Array], arena: int, times: Array | None = None) -> None:
        """Outputs from C-contiguous inputs, over ``workspace`` bytes at the address ``arena``.

        ``times`` receives one row per launch: start, end, and how many threads took part.
        """
        if self._draws:
            inputs = [*inputs, *(draw() for draw in self._draws)]
        check = watching()
        if check is not None:
            check("generated code")
        if check is not None and self._ns > _WATCHED_NS:
            with Watch(check) as watch:
                self.program.run(inputs, outputs, arena, threads=self.threads, times=times, abort=watch.address)
        elif self._parts and times is None:
            first, second = self._parts
            first.run(inputs, outputs, arena, threads=self.threads)
            self._check(arena)
            second.run(inputs, outputs, arena, threads=self.threads)
            return
        else:
            self.program.run(inputs, outputs, arena, threads=self.threads, times=times)
        if self._checks:
            self._check(arena)

    def runs_alone(self) -> bool:
        """Whether a run that nobody watches is nothing but ``program.run_alone``."""
        return not (self._draws or self._checks) and self.program.enters_alone(self.threads)

    def entry(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | Constant], arena: int) -> Entry | None:
        """The way in without Python, where a run is so short that Python would be much of it."""
        program = self.program
        if not self._entered or not program.enters_alone(self.threads) or program.alone_bytes > _ENTRY_SCRATCH:
            return None
        if any(each.dtype.hasobject for each in outputs):
            return None
        first_output = self._bases - FIRST_INPUT - len(self.results)
        first_draw = first_output - len(self._draws)
        draws = [(make, first_draw + k) for k, make in enumerate(self._draws)]
        gives = [
            each if isinstance(each, Constant) else replace(each, place=first_output + (each.place or 0))
            for each in outputs
        ]
        flags = [arena + offset for offset, _, _ in self._checks]
        return Entry(program, arena, inputs, draws, gives, flags, self, lets=self._ns > _SHORT_NS)

    def profile(self, inputs: list[Array], outputs: list[Array], arena: int) -> list[KernelTime]:
        """Run, and tell how long every launch took."""
        times = np.zeros((len(self.launches), 3), np.int64)
        self.run(inputs, outputs, arena, times)
        return [
            KernelTime(
                *(each.label, each.spec.name, int(start), int(end)), each.flops, each.traffic, int(threads), each.units
            )
            for each, (start, end, threads) in zip(self.launches, times)
        ]

    def _check(self, arena: int) -> None:
        for offset, message, node in self._checks:
            if ctypes.c_uint8.from_address(arena + offset).value:
                raise CheckFailed(message, node=node)

    def assembly(self) -> list[str]:
        """Machine code of every distinct kernel, for people."""
        specs = dict.fromkeys(
            spec
            for each in self.launches
            for spec in (each.spec, *(b.spec for b in each.buffers if isinstance(b, Code)))
        )
        return [f"# {spec.name}\n{compiler.assembly(library.source(spec, self._isa), self._isa)}" for spec in specs]

    def text(self) -> str:
        """The launches in order, for people."""
        lines = []
        for each in self.launches:
            work = f"{each.tiles} tiles, {each.flops / 1e6:.3g} MFLOP, {each.traffic / 1e6:.3g} MB"
            lines.append(f"{each.spec.name:40} {work:40} {each.label}")
        return "\n".join(lines)


def _place(realised: Realised) -> tuple[dict[Storage, Placement], MemoryPlan]:
    """Offsets in the arena for all temporaries: each lives from the launch that first touches it to the last."""
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    for k, launch in enumerate(realised.launches):
        for buffer in launch.buffers:
            if isinstance(buffer, At) and buffer.storage.kind == "temp":
                first.setdefault(buffer.storage, k)
                last[buffer.storage] = k
    for flag, _, _ in realised.checks:
        first.setdefault(flag, 0)
        last[flag] = len(realised.launches)
    storages = list(first)
    index = {storage: k for k, storage in enumerate(storages)}
    lifetimes = [
        Lifetime(
            s.nbytes,
            first[s],
            last[s],
            tuple(index[r] for r in realised.reuse.get(s, ()) if r in index and last[r] == first[s]),
        )
        for s in storages
    ]
    plan = plan_memory(lifetimes)
    return {s: Placement(ARENA, offset) for s, offset in zip(storages, plan.offsets)}, plan
