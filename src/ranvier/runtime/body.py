"""Runs a nested graph of control flow: planned once per set of shapes, like a session, then called step after step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.signature import Tensor
from ranvier.config import SessionConfig
from ranvier.errors import InvalidValue, RanvierError
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops.allocation import tensor_limit
from ranvier.providers.base import Entry, TensorAllocator
from ranvier.runtime.control import RunControl, current
from ranvier.runtime.direct import Direct, direct_call
from ranvier.runtime.plan import Plan
from ranvier.runtime.program import Buffers, Program, static_bytes

Array = np.ndarray[Any, Any]
_Types = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]
_UNPLANNED: Buffers = {}
_KEEP = 16  # sets of shapes; a loop whose shapes grow goes on without plans
_MISSES = 4  # sets of shapes in a row that came once only: more are not worth a plan


class Body:
    """A :data:`BodyRunner`. Thread-safe: all state of a call is its own, or an arena of a plan."""

    def __init__(self, program: Program, allocator: TensorAllocator, config: SessionConfig) -> None:
        self.program = program
        self._allocator = allocator
        self._config = config
        graph = program.graph
        self.captures = [v for v in graph.captured() if v.const is None]
        self.results = len(program.output_slots)
        self._slots = (*program.input_slots, *(program.slots[v] for v in self.captures))
        self._lock = threading.Lock()
        self._plans: OrderedDict[Any, _BodyPlan | None] = OrderedDict()
        self._newest: tuple[_Types | None, _BodyPlan | None] = (None, None)
        self._misses = 0

    def __call__(self, inputs: Sequence[Any], captured: Mapping[Value, Any]) -> list[Any]:
        program = self.program
        if len(inputs) != len(program.input_slots):
            raise InvalidValue(
                f"graph {program.graph.name!r} takes {len(program.input_slots)} inputs, got {len(inputs)}"
            )
        values = [*inputs, *[captured.get(v) for v in self.captures]]
        control = current.control
        profiler = current.profiler
        if control is None or not control.watched:
            plan = self._plan(values)
            if plan is not None:
                if profiler is None and (made := plan.run_directly(values)) is not None:
                    if plan.in_order:
                        return made
                    return [made[k] if k >= 0 else values[~k] for k in plan.results]
                return plan.run_steps(values, self._slots, control or RunControl(None, self._config.limits), profiler)
        env = list(program.template)
        for slot, value in zip(self._slots, values):
            env[slot] = value
        control = control or RunControl(None, self._config.limits)
        if control.watched and not program.steps:
            control.check(f"graph {program.graph.name!r}")
        return program.run(env, control, _UNPLANNED, {}, profiler)

    def planned(self, captured: Sequence[Tensor]) -> _BodyPlan | None:
        """The plan for values of these types from around a body that takes nothing else; None where there is none."""
        with tensor_limit(self._config.limits.tensor_bytes):
            return self._plan(captured)

    def _plan(self, values: Sequence[Any]) -> _BodyPlan | None:
        """The plan for these types, or None where they are not tensors or change too often."""
        types, plan = self._newest
        try:
            if types is not None:
                for x, (dtype, shape) in zip(values, types):
                    if x.dtype is not dtype or x.shape != shape:
                        break  # or they are equal, and found below
                else:
                    self._misses = 0
                    return plan
            key = tuple([(x.dtype, x.shape) for x in values])
        except AttributeError:
            return None
        with self._lock:
            if key in self._plans:
                plan = self._plans[key]
                self._misses = 0
            elif self._misses > _MISSES:
                return None
            else:
                plan = self._made(values)
                self._plans[key] = plan
                self._misses += 1
                while len(self._plans) > _KEEP:
                    self._plans.popitem(last=False)
            self._newest = (key, plan)
        return plan

    def release_arenas(self) -> None:
        """Give back the arenas that no run uses."""
        with self._lock:
            plans = [plan for plan in self._plans.values() if plan is not None]
        for plan in plans:
            plan.close()

    def _made(self, values: Sequence[Any]) -> _BodyPlan | None:
        types: list[Type | None] = [TensorType(dtypes.of(x.dtype), x.shape) for x in values]
        count = len(self.program.input_slots)
        captured = dict(zip(self.captures, types[count:]))
        try:
            return _BodyPlan(self.program, types[:count], {}, self._allocator, self._config, captured)
        except RanvierError:
            return None  # the run itself meets the same, and says so


class _BodyPlan(Plan):
    """A plan whose results may be its operands: whoever runs a loop does not write into them."""

    def __init__(self, program: Program, *given: Any) -> None:
        self.results: list[int] = []  # of the body, from a direct run: what that made, or ~k for value k
        super().__init__(program, *given)
        self.in_order = self.results == list(range(len(self._fresh)))  # results are just what a direct run makes

    def _direct_call(self) -> Direct | None:
        """Also where captures are operands, and results are operands or come twice."""
        kernel = self._bound[0] if len(self._bound) == 1 else None
        if kernel is None or self._secure:
            return None
        sources = {slot: ~k for k, slot in enumerate(self._operands)}
        sources.update((slot, k) for k, (slot, _, _) in enumerate(self._fresh))
        if any(slot not in sources for slot in self.program.output_slots):
            return None
        self.results = [sources[slot] for slot in self.program.output_slots]
        sizes = [static_bytes(self.types.get(slot)) or 0 for slot, _, _ in self._fresh]
        offset = self.layout.workspaces.get(0, 0)
        return direct_call(self.program, kernel, self._fresh, sizes, offset, self._operands)

    def entry(self, inputs: Sequence[Tensor], names: Sequence[str]) -> Entry | None:
        """Where results are what the body makes, in its order."""
        if self._direct is not None and not self.in_order:
            return None
        return super().entry(inputs, names)

    def run_steps(self, values: Sequence[Any], slots: Sequence[int], control: RunControl, profiler: Any) -> list[Any]:
        env = list(self.program.template)
        for slot, value in zip(slots, values):
            env[slot] = value
        held = self._arenas.take()
        try:
            buffers = dict(held.views)
            for slot, dtype, shape in self._fresh:
                buffers[slot] = np.empty(shape, dtype)
            results = self.program.run(env, control, buffers, self.dims, profiler, held.kernels)
        finally:
            self._arenas.give(held)
        self._tally.runs += 1
        return results
