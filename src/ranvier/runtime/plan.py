"""A program bound to sizes: every buffer has its place in one arena, and outputs have their shapes.

Types are predictions. Where inference knows a value's size the plan gives it a buffer; where it does not, the
kernel makes the value and it lives until its last use.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ranvier.codegen.arena import MemoryPlan
from ranvier.codegen.signature import Tensor
from ranvier.config import SessionConfig
from ranvier.errors import MemoryLimit, OutOfMemory, ResourceLimit
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.memory import NOTED_FROM, NOTHING, Promise, promised
from ranvier.ops import TypeInference
from ranvier.ops.allocation import tensor_limit
from ranvier.providers.base import Bindable, BoundKernel, ChecksBuffers, Enters, Entry, SelfContained, TensorAllocator
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.arenas import Arena, Arenas
from ranvier.runtime.chain import chained
from ranvier.runtime.control import RunControl, is_plain, running
from ranvier.runtime.direct import Direct, Fresh, direct_call, new_output
from ranvier.runtime.layout import laid_out
from ranvier.runtime.outputs import FROM_BYTES, blocks
from ranvier.runtime.program import Prepared, Program, Step, static_bytes

Array = np.ndarray[Any, Any]
_ENTRY_ARENA = 4 << 20  # bytes: runs in more than that take so long that their way in does not matter


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
        self._operands = (*program.input_slots, *(program.slots[v] for v in captured or ()))
        self._limits = config.limits
        self._secure = config.memory.secure
        self._lock = threading.Lock()
        self._entry: tuple[Entry, Arena] | None = None
        self._enters = not config.memory.secure  # as far as is known
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
        self.layout = laid_out(program, self._bound, self._planned_type)
        self.memory = self.layout.memory
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
        self._arenas = Arenas(self.layout, self._bound, allocator, program.graph.name, self._secure)
        nodes: dict[str, int] = {}
        for item in program.parts:
            nodes[item.part.provider.name] = nodes.get(item.part.provider.name, 0) + len(item.part.subgraph.nodes)
        self._tally = REGISTRY.ledger.tally(self, nodes)

    def _direct_call(self) -> Direct | None:
        """How to call the only kernel, where one is all there is and makes every output that is no constant."""
        outputs = [slot for slot in self.program.output_slots if slot not in self._given]
        kernel = self._bound[0] if len(self._bound) == 1 else None
        if kernel is None or len(self._fresh) != len(outputs) or self._secure:
            return None
        if len(self._constants) != len(self._lent):
            return None
        sizes = [static_bytes(self.types.get(slot)) or 0 for slot, _, _ in self._fresh]
        return direct_call(self.program, kernel, self._fresh, sizes, self.layout.workspaces.get(0, 0))

    def run_directly(self, values: Sequence[Array], into: Sequence[Array | None] | None = None) -> list[Any] | None:
        """As ``run`` without limits or profile, by the shortest way; None where that way is not open. Memory that is
        offered has the right type and shape."""
        direct = self._direct
        if direct is None:
            return None
        constants = self._constants
        if constants and into is not None:
            return None
        if self._fresh_bytes >= NOTED_FROM and not self._offers_enough(into):
            return None  # large outputs are looked at together: none of them is touched before all are made
        kernel = direct.kernel
        outputs = direct.outputs(into)
        given = [values[k] for k in direct.given]
        written = [outputs[k] for k in direct.theirs] if direct.theirs else outputs
        if not kernel.workspace:
            kernel.call(given, written, 0)
        else:
            held = self._arenas.take()
            try:
                kernel.call(given, written, held.start + direct.offset)
            finally:
                self._arenas.give(held)
        self._tally.runs += 1
        for k, constant in constants:
            outputs.insert(k, constant.copy())
        return outputs

    def entry(self, inputs: Sequence[Tensor], names: Sequence[str]) -> Entry | None:
        """The way in without Python, for calls with these inputs and names of outputs; None where there is none. A plan
        has one at a time."""
        with self._lock:
            if self._entry is not None or not self._enters:
                return self.opened
        if self._fresh_bytes >= FROM_BYTES or self.memory.arena > _ENTRY_ARENA:
            self._enters = False
            return None
        held = self._arenas.take()
        try:
            found = self._way_in(held, inputs, names)
        except BaseException:
            self._arenas.give(held)
            raise
        self._enters = found is not None
        with self._lock:
            if found is not None and self._entry is None:
                self._entry = found, held
                self._tally.elsewhere = found
                return found
        self._arenas.give(held)
        return None

    def _way_in(self, held: Arena, inputs: Sequence[Tensor], names: Sequence[str]) -> Entry | None:
        """An entry that works in this arena."""
        direct, program = self._direct, self.program
        if direct is not None:
            if not isinstance(direct.kernel, Enters):
                return None
            signature = direct.signature(inputs, names, dict(self._constants))
            return direct.kernel.entry(*signature, held.start + direct.offset)
        made = program.output_slots
        if len(program.steps) < 2 or program.waves or self._lent or len(set(made)) < len(made):
            return None
        return chained(program, self._prepared(held), self._operands, inputs, names, self._planned_type)

    @property
    def opened(self) -> Entry | None:
        """The entry that there is."""
        return None if self._entry is None else self._entry[0]

    def _close_entry(self) -> None:
        """Lets go of the entry and its arena, unless a run is in it."""
        with self._lock:
            if self._entry is None:
                return
            entry, held = self._entry
            if not entry.close():
                return
            self._entry = self._tally.elsewhere = None
            self._tally.runs += entry.runs
        self._arenas.drop(held)

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
        return self._direct.may_overwrite(output, given)

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
        found = [(p.nbytes, f"value {named.get(p.slot, '')!r}") for p in self.layout.placed]
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
        held = self._arenas.take()
        promise = NOTHING
        try:
            if control.watched:
                self._reserve(control)
            buffers, kernels = dict(held.views), self._prepared(held)
            fresh = self._fresh
            if into is not None:
                fresh = self._offered(into, buffers)
            if self._fresh_bytes >= NOTED_FROM:
                promise = self._make_large(fresh, buffers)
            else:
                for slot, dtype, shape in fresh:
                    buffers[slot] = np.empty(shape, dtype) if self._secure else new_output(shape, dtype)
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
            self._arenas.give(held)
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

    def _make_large(self, fresh: Sequence[Fresh], buffers: dict[int, Array]) -> Promise:
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

    def _offered(self, into: Sequence[Array | None], buffers: dict[int, Array]) -> list[Fresh]:
        """Outputs are written straight into the caller's memory where it fits; returns those of known size that are
        not."""
        targets = {slot: target for slot, target in zip(self.program.output_slots, into) if target is not None}
        buffers.update((s, t) for s, t in targets.items() if s in self._open and t.flags.writeable)
        others: list[Fresh] = []
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

    def _prepared(self, held: Arena) -> Sequence[Prepared | None]:
        """The bound kernels with their workspaces in an arena."""
        return held.kernels

    def arenas(self) -> tuple[int, int]:
        """Bytes of arenas that wait for a run, and of those in one."""
        with self._lock:
            waiting = self._arenas.waiting + (self._entry is not None and not self._entry[0].busy)
            return waiting * self.memory.arena, (self._arenas.there - waiting) * self.memory.arena

    def close(self) -> None:
        """Give the waiting arenas back; also what happens to a plan that nobody holds any more."""
        self._close_entry()
        self._arenas.close()

    def __del__(self) -> None:
        if hasattr(self, "_tally"):  # not where the plan could not be made
            self.close()
