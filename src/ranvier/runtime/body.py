"""Runs a nested graph of control flow: planned once per set of shapes, like a session, then called step after step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.config import SessionConfig
from ranvier.errors import InvalidValue, RanvierError
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType, Type
from ranvier.providers.base import BoundKernel, TensorAllocator
from ranvier.records import dataclass
from ranvier.runtime.control import RunControl, current
from ranvier.runtime.plan import Plan
from ranvier.runtime.program import Buffers, Program

Array = np.ndarray[Any, Any]
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
        self._captures = [v for v in graph.captured() if v.const is None]
        self._slots = (*program.input_slots, *(program.slots[v] for v in self._captures))
        self._lock = threading.Lock()
        self._plans: OrderedDict[Any, _BodyPlan | None] = OrderedDict()
        self._newest: tuple[Any, _BodyPlan | None] = (None, None)
        self._misses = 0

    def __call__(self, inputs: Sequence[Any], captured: Mapping[Value, Any]) -> list[Any]:
        program = self.program
        if len(inputs) != len(program.input_slots):
            raise InvalidValue(
                f"graph {program.graph.name!r} takes {len(program.input_slots)} inputs, got {len(inputs)}"
            )
        values = [*inputs, *[captured.get(v) for v in self._captures]]
        control = current.control
        profiler = current.profiler
        if control is None or not control.watched:
            plan = self._plan(values)
            if plan is not None:
                if profiler is None and plan.direct is not None:
                    return plan.run_at_once(plan.direct, values)
                return plan.run_steps(values, self._slots, control or RunControl(None, self._config.limits), profiler)
        env = list(program.template)
        for slot, value in zip(self._slots, values):
            env[slot] = value
        control = control or RunControl(None, self._config.limits)
        if control.watched and not program.steps:
            control.check(f"graph {program.graph.name!r}")
        return program.run(env, control, _UNPLANNED, {}, profiler)

    def _plan(self, values: Sequence[Any]) -> _BodyPlan | None:
        """The plan for these types, or None where they are not tensors or change too often."""
        try:
            key = [(x.dtype, x.shape) for x in values]
        except AttributeError:
            return None
        known, plan = self._newest
        if key == known:
            self._misses = 0
            return plan
        whole = tuple(key)
        with self._lock:
            if whole in self._plans:
                plan = self._plans[whole]
                self._misses = 0
            elif self._misses > _MISSES:
                return None
            else:
                plan = self._made(values)
                self._plans[whole] = plan
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
        types: list[Type | None] = [TensorType(dtypes.of(x), x.shape) for x in values]
        count = len(self.program.input_slots)
        captured = dict(zip(self._captures, types[count:]))
        try:
            return _BodyPlan(self.program, types[:count], {}, self._allocator, self._config, captured)
        except RanvierError:
            return None  # the run itself meets the same, and says so


@dataclass(frozen=True, slots=True)
class _Whole:
    """A body that is one kernel."""

    kernel: BoundKernel
    operands: list[int]  # where they stand among the values of a call
    made: list[tuple[Any, np.dtype[Any]]]  # shape and type of what it makes
    results: list[int]  # where the results of the body come from: what was made, or ~k for value k
    offset: int  # of its workspace in the arena


class _BodyPlan(Plan):
    """A plan whose results may be its operands: whoever runs a loop does not write into them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        captured: Mapping[Value, Any] = given[5]
        program = self.program
        self._where = {slot: k for k, slot in enumerate((*program.input_slots, *(program.slots[v] for v in captured)))}
        self.direct = self._whole()

    def _whole(self) -> _Whole | None:
        """How to call the only kernel, where there is no other."""
        program = self.program
        if len(program.steps) != 1 or self._bound[0] is None:
            return None
        (step,) = program.steps
        fresh = {slot: (shape, dtype) for slot, dtype, shape in self._fresh}
        if set(fresh) != set(step.outputs):
            return None
        sources = {slot: ~k for slot, k in self._where.items()}
        sources.update((slot, k) for k, slot in enumerate(step.outputs))
        if any(slot not in sources for slot in program.output_slots):
            return None
        return _Whole(
            self._bound[0],
            [self._where[slot] for slot in step.inputs if program.template[slot] is None],
            [fresh[slot] for slot in step.outputs],
            [sources[slot] for slot in program.output_slots],
            self.layout.workspaces.get(0, 0),
        )

    def run_at_once(self, whole: _Whole, values: Sequence[Any]) -> list[Any]:
        made: list[Any] = [np.empty(shape, dtype) for shape, dtype in whole.made]
        given = [values[k] for k in whole.operands]
        if whole.kernel.workspace:
            held = self._arenas.take()
            try:
                whole.kernel.call(given, made, held.start + whole.offset)
            finally:
                self._arenas.give(held)
        else:
            whole.kernel.call(given, made, 0)
        return [made[k] if k >= 0 else values[~k] for k in whole.results]

    def run_steps(self, values: Sequence[Any], slots: Sequence[int], control: RunControl, profiler: Any) -> list[Any]:
        env = list(self.program.template)
        for slot, value in zip(slots, values):
            env[slot] = value
        held = self._arenas.take()
        try:
            buffers = dict(held.views)
            for slot, dtype, shape in self._fresh:
                buffers[slot] = np.empty(shape, dtype)
            return self.program.run(env, control, buffers, self.dims, profiler, held.kernels)
        finally:
            self._arenas.give(held)
