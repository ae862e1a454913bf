"""A program bound to sizes: every buffer has its place in one arena, and outputs have their shapes.

Types are predictions. Where inference knows a value's size the plan gives it a buffer; where it does not, the
kernel makes the value and it lives until its last use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ranvier.codegen.arena import Lifetime, MemoryPlan, plan_memory
from ranvier.codegen.signature import Constant, Tensor
from ranvier.config import SessionConfig
from ranvier.errors import MemoryLimit, OutOfMemory, ResourceLimit
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.memory import NOTED_FROM, NOTHING, Promise, promised
from ranvier.ops import TypeInference
from ranvier.ops.allocation import tensor_limit
from ranvier.providers.base import (
    Bindable,
    BoundKernel,
    ChecksBuffers,
    Enters,
    Entry,
    Overwrites,
    PooledAllocator,
    SelfContained,
    TensorAllocator,
)
from ranvier.providers.registry import REGISTRY
from ranvier.records import dataclass
from ranvier.runtime.control import RunControl, is_plain, running
from ranvier.runtime.outputs import FROM_BYTES, blocks
from ranvier.runtime.program import Prepared, Program, Step, static_bytes

Array = np.ndarray[Any, Any]
_KEEP_ARENAS = 4
_ENTRY_ARENA = 4 << 20  # bytes: runs in more than that take so long that their way in does not matter
_Fresh = tuple[int, np.dtype[Any], Any]  # an output of known size: slot, type and shape
_Making = tuple[Callable[..., Array], Any, np.dtype[Any]]  # how an output is made, its shape and type
# the memory, its views by slot, the kernels that were bound with the address of their part of it, its own address
_Arena = tuple[Array, dict[int, Array], list[Prepared | None], int]


@dataclass(frozen=True, slots=True)
class _Placed:
    slot: int
    offset: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Sheet:
    """Buffers that are planned together: those of whole runs, or those of one lane of a wave."""

    __slots__ = ("index", "lifetimes", "slots")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.lifetimes: list[Lifetime] = []
        self.index: dict[int, int] = {}  # of a slot among the buffers

    def add(self, slot: int, lifetime: Lifetime) -> None:
        self.index[slot] = len(self.slots)
        self.slots.append(slot)
        self.lifetimes.append(lifetime)


def _planned(common: _Sheet, sheets: Mapping[range, _Sheet], moment: Sequence[int]) -> tuple[list[int], MemoryPlan]:
    """All buffers with their offsets. To the rest of a run, the buffers of a lane are one that lives while its wave
    runs."""
    if not sheets:
        return common.slots, plan_memory(common.lifetimes)
    inside = {lane: plan_memory(sheet.lifetimes) for lane, sheet in sheets.items()}
    blocks = [Lifetime(inside[lane].arena, moment[lane.start], moment[lane.start]) for lane in sheets]
    whole = plan_memory([*common.lifetimes, *blocks])
    count = len(common.slots)
    slots, offsets = list(common.slots), list(whole.offsets[:count])
    for (lane, sheet), start in zip(sheets.items(), whole.offsets[count:]):
        slots += sheet.slots
        offsets += [start + offset for offset in inside[lane].offsets]
    total = plan_memory(common.lifetimes).total + sum(each.total for each in inside.values())
    shared = whole.shared + sum(each.shared for each in inside.values())
    return slots, MemoryPlan(tuple(offsets), whole.arena, total, whole.lower_bound, shared)


class Plan:
    """Thread-safe: each run takes an arena of its own from a small pool. ``captured``: types of values from around a
    nested graph."""

    def __init__(
        self,
        program: Program,
        input_types: Sequence[Type | None],
        dims: Mapping[str, int],
        allocator: TensorAllocator,
        config: SessionConfig,
        captured: Mapping[Value, Type | None] | None = None,
    ) -> None:
        self.program = program
        self.dims = dict(dims)
        self._allocator = allocator
        self._limits = config.limits
        self._secure = config.memory.secure
        self._keep = 0 if self._secure else _KEEP_ARENAS  # what waits is not freed, and would not be zeroed
        self._lock = threading.Lock()
        self._free: list[_Arena] = []
        self._arenas = 0  # there are: those that wait and those in a run
        self._entry: Entry | None = None
        self._entry_arena: _Arena | None = None
        self._enters = True  # as far as is known
        self._untouched: set[int] = set()  # addresses of large arenas that no run has ended in
        inference = TypeInference(dims, annotated=True)
        inference.types.update(captured or {})
        inference.run(program.graph, input_types)
        self.types: dict[int, Type | None] = {slot: inference.types.get(v) for v, slot in program.slots.items()}
        with self._packing():
            self._bound = [self._bind(step, inference) for step in program.steps]
        self._given = self._sources()
        # outputs of unknown size, of kernels that see for themselves whether memory fits
        looked_at = {s for step in program.steps if isinstance(step.kernel, ChecksBuffers) for s in step.outputs}
        self._open = {s for s in looked_at - program.moved if self._planned_type(s) is None}
        self._lent = [k for k, slot in enumerate(program.output_slots) if slot in self._given]
        self._workspaces: dict[int, int] = {}  # offset in the arena by step
        self.unplanned: list[int] = []  # slots whose size is known only when they are computed
        self.placed, self.memory = self._place()
        self._fresh = [
            (slot, t.dtype.numpy, t.shape)
            for slot in dict.fromkeys(program.output_slots)
            if (t := self._planned_type(slot)) is not None and t.dtype is not None and slot not in self._given
        ]
        self._check_limits()
        self._fresh_bytes = sum(static_bytes(self.types.get(slot)) or 0 for slot, _, _ in self._fresh)
        # outputs that are constants of the model, by their place; callers get copies
        self._constants = [
            (k, found) for k in self._lent if (found := program.template[program.output_slots[k]]) is not None
        ]
        self._direct = self._direct_call()
        nodes: dict[str, int] = {}
        for item in program.parts:
            nodes[item.part.provider.name] = nodes.get(item.part.provider.name, 0) + len(item.part.subgraph.nodes)
        self._tally = REGISTRY.ledger.tally(self, nodes)

    def _direct_call(self) -> tuple[BoundKernel, list[int], int, list[_Making], list[int]] | None:
        """The kernel, where the inputs stand, its workspace's offset, how outputs are made and which of them is which
        of the kernel's, when one bound kernel is the whole program and makes every output that is no constant: then
        nothing has to be looked after between the call and the kernel."""
        steps = self.program.steps
        outputs = [slot for slot in self.program.output_slots if slot not in self._given]
        if len(steps) != 1 or self._bound[0] is None or len(self._fresh) != len(outputs) or self._secure:
            return None
        if len(self._constants) != len(self._lent):
            return None
        where = {slot: k for k, slot in enumerate(self.program.input_slots)}
        needed = [slot for slot in steps[0].inputs if self.program.template[slot] is None]
        if sorted(steps[0].outputs) != sorted(outputs) or any(slot not in where for slot in needed):
            return None
        theirs = [outputs.index(slot) for slot in steps[0].outputs]
        # what is small is made without a look for memory to use again, which would take as long as all the rest
        sizes = [static_bytes(self.types.get(slot)) or 0 for slot, _, _ in self._fresh]
        makers: list[Callable[..., Array]] = [np.empty if n < FROM_BYTES else _output for n in sizes]
        making = [(make, shape, dtype) for make, (_, dtype, shape) in zip(makers, self._fresh)]
        same = theirs == sorted(theirs)
        return (
            self._bound[0],
            [where[slot] for slot in needed],
            self._workspaces.get(0, 0),
            making,
            [] if same else theirs,
        )

    def run_directly(self, values: Sequence[Array], into: Sequence[Array | None] | None = None) -> list[Any] | None:
        """As ``run`` without limits or profile, by the shortest way; None where that way is not open. Memory that is
        offered has the right type and shape."""
        if self._direct is None:
            return None
        kernel, order, offset, making, theirs = self._direct
        constants = self._constants
        if constants and into is not None:
            return None
        if self._fresh_bytes >= NOTED_FROM and not self._offers_enough(into):
            return None  # large outputs are looked at together: none of them is touched before all are made
        try:
            if into is None:
                outputs = [make(shape, dtype) for make, shape, dtype in making]
            else:
                outputs = [make(*how) if own is None else own for own, (make, *how) in zip(into, making)]
        except OutOfMemory:
            raise
        except MemoryError as error:
            raise OutOfMemory("cannot allocate the outputs", part="outputs") from error
        given = [values[k] for k in order]
        written = [outputs[k] for k in theirs] if theirs else outputs
        if not kernel.workspace:
            kernel.call(given, written, 0)
        else:
            held = self._take()
            try:
                kernel.call(given, written, held[3] + offset)
            finally:
                self._give(held)
        self._tally.runs += 1
        for k, constant in constants:
            outputs.insert(k, constant.copy())
        return outputs

    def entry(self, inputs: Sequence[tuple[str, Array]], names: Sequence[str]) -> Entry | None:
        """The way in without Python, for calls like the one that these inputs and names of outputs are of; None where
        there is none. A plan has one at a time."""
        with self._lock:
            if self._entry is not None or not self._enters or self._direct is None:
                return self._entry
        kernel, order, offset, making, theirs = self._direct
        small = self._fresh_bytes < FROM_BYTES and self.memory.arena <= _ENTRY_ARENA
        if not small or not isinstance(kernel, Enters):
            self._enters = False
            return None
        places = {given: k for k, given in enumerate(order)}
        taken = [Tensor(name, x.dtype, x.shape, places.get(k)) for k, (name, x) in enumerate(inputs)]
        constants = dict(self._constants)
        made = iter(enumerate(making))
        given: list[Tensor | Constant] = []
        for k, name in enumerate(names):
            if k in constants:
                given.append(Constant(name, np.asarray(constants[k], order="C")))
            else:
                own, (_, shape, dtype) = next(made)
                given.append(Tensor(name, dtype, tuple(shape), theirs.index(own) if theirs else own))
        held = self._take()
        found = kernel.entry(taken, given, held[3] + offset)
        self._enters = found is not None
        with self._lock:
            if found is not None and self._entry is None:
                self._entry = self._tally.elsewhere = found
                self._entry_arena = held
                return found
        self._give(held)
        return None

    @property
    def opened(self) -> Entry | None:
        """The entry that there is."""
        return self._entry

    def _close_entry(self) -> None:
        """Lets go of the entry and its arena, unless a run is in it."""
        with self._lock:
            entry, held = self._entry, self._entry_arena
            if entry is None or held is None or not entry.close():
                return
            self._entry = self._entry_arena = self._tally.elsewhere = None
            self._tally.runs += entry.runs
        self._drop(held)

    def _offers_enough(self, into: Sequence[Array | None] | None) -> bool:
        """Whether what is left to be made is small."""
        if into is None:
            return False
        left = sum(
            static_bytes(self.types.get(slot)) or 0 for own, (slot, _, _) in zip(into, self._fresh) if own is None
        )
        return left < NOTED_FROM

    def may_overwrite(self, output: int, given: int) -> bool:
        """Whether ``run_directly`` may be offered the memory of an input, by their places in the signature, for an
        output of the same type and shape."""
        if self._direct is None or self._constants:
            return False
        kernel, order, _, _, theirs = self._direct
        if given not in order or not isinstance(kernel, Overwrites):
            return False
        return kernel.may_overwrite(theirs.index(output) if theirs else output, order.index(given))

    def _bind(self, step: Step, inference: TypeInference) -> BoundKernel | None:
        """The step's kernel made for these types, where it can be."""
        return step.kernel.bind(inference.types, inference.values) if isinstance(step.kernel, Bindable) else None

    def _sources(self) -> set[int]:
        """Slots no step writes: inputs and constants."""
        written = {slot for step in self.program.steps for slot in step.outputs}
        return set(range(len(self.program.template))) - written

    def _planned_type(self, slot: int) -> TensorType | None:
        found = self.types.get(slot) if slot not in self.program.moved else None
        return found if isinstance(found, TensorType) and static_bytes(found) is not None else None

    def _place(self) -> tuple[list[_Placed], MemoryPlan]:
        steps = self.program.steps
        outputs = set(self.program.output_slots)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, step in enumerate(steps):
            for slot in step.outputs:
                first[slot] = k
                last[slot] = k
            for slot in step.inputs:
                last[slot] = k
        lane_of = {k: lane for wave in self.program.waves for lane in wave.lanes for k in lane}
        moment = list(range(len(steps)))  # of each step; those of a wave are at the same time
        for wave in self.program.waves:
            moment[wave.start : wave.stop] = [wave.start] * (wave.stop - wave.start)
        common = _Sheet()
        sheets = {lane: _Sheet() for lane in lane_of.values()}
        for k, bound in enumerate(self._bound):
            if bound is not None and bound.workspace:
                # no value: the memory the kernel works in
                (sheets[lane_of[k]] if k in lane_of else common).add(-1 - k, Lifetime(bound.workspace, k, k))
        for k, step in enumerate(steps):
            lane = lane_of.get(k)
            for position, slot in enumerate(step.outputs):
                if slot in outputs:
                    continue
                known = self._planned_type(slot)
                if known is None:
                    self.unplanned.append(slot)
                    continue
                # what only one lane of a wave knows is planned among the steps of that lane
                inside = lane is not None and last[slot] in lane
                sheet = sheets[lane] if lane is not None and inside else common
                reuse: tuple[int, ...] = ()
                if inside or lane is None:
                    dying = ((j, s) for j, s in enumerate(step.inputs) if s in sheet.index and last[s] == k)
                    reuse = tuple(sheet.index[s] for j, s in dying if step.kernel.in_place(position, j))
                begin, end = (k, last[slot]) if inside else (moment[k], moment[last[slot]])
                sheet.add(slot, Lifetime(known.nbytes or 0, begin, end, reuse))
        slots, plan = _planned(common, sheets, moment)
        placed: list[_Placed] = []
        for slot, offset in zip(slots, plan.offsets):
            if slot < 0:
                self._workspaces[-1 - slot] = offset
                continue
            known = self._planned_type(slot)
            assert known is not None and known.dtype is not None and known.shape is not None
            shape = tuple(int(d) for d in known.shape if isinstance(d, int))
            placed.append(_Placed(slot, offset, known.nbytes or 0, known.dtype.numpy, shape))
        return placed, plan

    def _check_limits(self) -> None:
        allowed = self._limits.tensor_bytes
        for slot, known in self.types.items():
            nbytes = static_bytes(known)
            if allowed is not None and nbytes is not None and nbytes > allowed:
                name = next(v.name for v, s in self.program.slots.items() if s == slot)
                raise ResourceLimit("tensor_bytes", allowed, nbytes, f"value {name!r}: {known}")
        allowed = self._limits.memory_bytes
        if allowed is None:
            return
        weights, buffers = self.weight_bytes(), self.memory.arena + self.output_bytes()
        if weights + buffers > allowed:
            largest = self._largest()
            what = f"weights, planned buffers and outputs; most of it for {largest}"
            raise MemoryLimit("memory_bytes", allowed, weights + buffers, what, part=largest, requested=buffers)

    def _packing(self) -> ExitStack:
        """While kernels put weights into a form of their own: room for them is promised."""
        with ExitStack() as stack:
            for item in self.program.parts:
                if isinstance(item.kernel, SelfContained) and not item.kernel.memory_usage().constants:
                    nbytes = sum(v.const.nbytes for v in item.part.subgraph.inputs if v.const is not None)
                    part = f"weights of {item.part.subgraph.label!r} on {item.part.provider.name}"
                    stack.enter_context(promised(nbytes, part))
            return stack.pop_all()

    def weight_bytes(self) -> int:
        """Weights in the form in which the run uses them: packed by a kernel, or as they are in the model."""
        bound = {id(s.kernel): b.constants for s, b in zip(self.program.steps, self._bound) if b is not None}
        packed = 0
        plain: dict[Value, int] = {}
        for item in self.program.parts:
            constants = bound.get(id(item.kernel)) or item.kernel.memory_usage().constants
            packed += constants
            if not constants:
                plain.update((v, v.const.nbytes) for v in item.part.subgraph.inputs if v.const is not None)
        return packed + sum(plain.values())

    def _largest(self) -> str:
        """What takes the most of the memory of a run, for people."""
        steps = self.program.steps
        named = {slot: value.name for value, slot in self.program.slots.items()}
        found = [(p.nbytes, f"value {named.get(p.slot, '')!r}") for p in self.placed]
        for step, bound in zip(steps, self._bound):
            if bound is not None:
                found.append((bound.workspace, f"buffers of {step.label!r} on {step.provider}"))
                found.append((bound.constants, f"weights of {step.label!r} on {step.provider}"))
        for slot in set(self.program.output_slots):
            found.append((static_bytes(self.types.get(slot)) or 0, f"output {named.get(slot, '')!r}"))
        return max(found)[1] if found else "nothing"

    def inside(self) -> list[MemoryPlan]:
        """What the bound kernels placed in their workspaces, which are part of the arena."""
        return [bound.memory for bound in self._bound if bound is not None]

    def output_bytes(self) -> int:
        return sum(static_bytes(self.types.get(slot)) or 0 for slot in set(self.program.output_slots))

    def run(
        self, values: Sequence[Any], control: RunControl, profiler: Any, into: Sequence[Array | None] | None = None
    ) -> list[Any]:
        """The outputs for bound inputs; they belong to the caller. ``into`` offers memory to write them to."""
        program = self.program
        env = list(program.template)
        for slot, given in zip(program.input_slots, values):
            env[slot] = given
        held = self._take()
        _, views, kernels, _ = held
        promise = NOTHING
        try:
            if control.watched:
                self._reserve(control)
            buffers = dict(views)
            fresh = self._fresh
            if into is not None:
                fresh = self._offered(into, buffers)
            if self._fresh_bytes >= NOTED_FROM:
                promise = self._make_large(fresh, buffers)
            else:
                for slot, dtype, shape in fresh:
                    buffers[slot] = np.empty(shape, dtype) if self._secure else _output(shape, dtype)
            with tensor_limit(self._limits.tensor_bytes):
                if is_plain(control, profiler):
                    results = program.run(env, control, buffers, self.dims, None, kernels)
                else:
                    with running(control, profiler):
                        results = program.run(env, control, buffers, self.dims, profiler, kernels)
        finally:
            if promise is not NOTHING:
                promise.done()
            if control.watched:
                control.close()
            self._give(held)
        self._hand_out(results)
        self._tally.runs += 1
        return results

    def _reserve(self, control: RunControl) -> None:
        budget = control.budget
        if budget is not None:
            budget.weigh(self.weight_bytes())
            name = self.program.graph.name
            control.reserve(self.output_bytes(), f"outputs of {name!r}")
            if not budget.counts_arenas:
                control.reserve(self.memory.arena, f"arena of {name!r}")

    def _make_large(self, fresh: Sequence[_Fresh], buffers: dict[int, Array]) -> Promise:
        """Outputs that are looked at together, before any of them is touched."""
        part = f"outputs of {self.program.graph.name!r}"
        try:
            if self._secure:
                promise = promised(sum(static_bytes(self.types.get(slot)) or 0 for slot, _, _ in fresh), part)
                made = [np.empty(shape, dtype) for _, dtype, shape in fresh]
            else:
                made, promise = blocks.several([(tuple(shape), dtype) for _, dtype, shape in fresh], part)
        except OutOfMemory:
            raise
        except (MemoryError, ValueError) as error:
            raise OutOfMemory(f"cannot allocate the {part}: {self._fresh_bytes:,} bytes", part=part) from error
        buffers.update((slot, array) for (slot, _, _), array in zip(fresh, made))
        return promise

    def _offered(self, into: Sequence[Array | None], buffers: dict[int, Array]) -> list[_Fresh]:
        """Outputs are written straight into the caller's memory where it fits; returns those of known size that are
        not."""
        targets = {slot: target for slot, target in zip(self.program.output_slots, into) if target is not None}
        buffers.update((s, t) for s, t in targets.items() if s in self._open and t.flags.writeable)
        others: list[_Fresh] = []
        for slot, dtype, shape in self._fresh:
            target = targets.get(slot)
            if target is not None and target.shape == shape and target.dtype == dtype and target.flags.writeable:
                buffers[slot] = target
            else:
                others.append((slot, dtype, shape))
        return others

    def _hand_out(self, results: list[Any]) -> None:
        """Copy what is an input, a constant or another output: callers may write into what they get."""
        for k in self._lent:
            if isinstance(results[k], np.ndarray):
                results[k] = results[k].copy()
        if len(set(map(id, results))) < len(results):
            seen: set[int] = set()
            for k, result in enumerate(results):
                if id(result) in seen and isinstance(result, np.ndarray):
                    results[k] = result.copy()
                seen.add(id(result))

    def _take(self) -> _Arena:
        try:
            return self._free.pop()
        except IndexError:
            return self._made_arena()

    def _made_arena(self) -> _Arena:
        arena = self._allocator.alloc(self.memory.arena, f"arena of {self.program.graph.name!r}")
        views = {p.slot: arena[p.offset : p.offset + p.nbytes].view(p.dtype).reshape(p.shape) for p in self.placed}
        start = arena.ctypes.data
        kernels = [
            None if bound is None else (bound, start + self._workspaces.get(k, 0))
            for k, bound in enumerate(self._bound)
        ]
        with self._lock:
            self._arenas += 1
            if self.memory.arena >= NOTED_FROM:
                self._untouched.add(start)
        return arena, views, kernels, start

    def _give(self, held: _Arena) -> None:
        if self._untouched:
            self._settle(held)
        if len(self._free) < self._keep:  # one more now and then, where runs end at the same time
            self._free.append(held)
        else:
            self._drop(held)

    def _drop(self, held: _Arena) -> None:
        with self._lock:
            self._arenas -= 1
        self._allocator.free(held[0])

    def _settle(self, held: _Arena) -> None:
        """After the first run in an arena the system counts it, and the allocator need not remember the promise."""
        with self._lock:
            if held[3] not in self._untouched:
                return
            self._untouched.discard(held[3])
        if isinstance(self._allocator, PooledAllocator):
            self._allocator.touched(held[0])

    def arenas(self) -> tuple[int, int]:
        """Bytes of arenas that wait for a run, and of those in one."""
        with self._lock:
            waiting = len(self._free) + (self._entry is not None and not self._entry.busy)
            return waiting * self.memory.arena, (self._arenas - waiting) * self.memory.arena

    def close(self) -> None:
        """Give the waiting arenas back; also what happens to a plan that nobody holds any more."""
        self._close_entry()
        while self._free:
            try:
                held = self._free.pop()
            except IndexError:  # a run has taken it
                return
            self._drop(held)

    def __del__(self) -> None:
        if hasattr(self, "_free"):  # not where the plan could not be made
            self.close()


def _output(shape: Any, dtype: np.dtype[Any]) -> Array:
    try:
        return blocks.empty(tuple(shape), dtype)
    except OutOfMemory:
        raise
    except (MemoryError, ValueError) as error:
        raise OutOfMemory(f"cannot allocate an output of shape {list(shape)} of {dtype}") from error
