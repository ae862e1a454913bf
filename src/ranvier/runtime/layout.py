"""Where everything of a run lies in its arena: values that pass between steps, and the memory kernels work in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.arena import Lifetime, MemoryPlan, plan_memory
from ranvier.graph.types import TensorType
from ranvier.providers.base import BoundKernel
from ranvier.records import dataclass
from ranvier.runtime.program import Program


@dataclass(frozen=True, slots=True)
class Placed:
    slot: int
    offset: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    placed: list[Placed]
    workspaces: dict[int, int]  # offset by step
    unplanned: list[int]  # slots whose size is known only when they are computed
    memory: MemoryPlan


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


def laid_out(
    program: Program, bound: Sequence[BoundKernel | None], known_type: Callable[[int], TensorType | None]
) -> Layout:
    """``known_type``: of a slot, where its size is known before it is computed. Outputs lie elsewhere."""
    steps = program.steps
    outputs = set(program.output_slots)
    last: dict[int, int] = {}  # the step that a slot is used by or comes from, whichever is later
    for k, step in enumerate(steps):
        last.update(dict.fromkeys((*step.outputs, *step.inputs), k))
    lane_of = {k: lane for wave in program.waves for lane in wave.lanes for k in lane}
    moment = list(range(len(steps)))  # of each step; those of a wave are at the same time
    for wave in program.waves:
        moment[wave.start : wave.stop] = [wave.start] * (wave.stop - wave.start)
    common = _Sheet()
    sheets = {lane: _Sheet() for lane in lane_of.values()}
    unplanned: list[int] = []
    for k, kernel in enumerate(bound):
        if kernel is not None and kernel.workspace:
            # no value: the memory the kernel works in
            (sheets[lane_of[k]] if k in lane_of else common).add(-1 - k, Lifetime(kernel.workspace, k, k))
    for k, step in enumerate(steps):
        lane = lane_of.get(k)
        for position, slot in enumerate(step.outputs):
            if slot in outputs:
                continue
            known = known_type(slot)
            if known is None:
                unplanned.append(slot)
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
    slots, memory = _planned(common, sheets, moment)
    placed: list[Placed] = []
    workspaces: dict[int, int] = {}
    for slot, offset in zip(slots, memory.offsets):
        if slot < 0:
            workspaces[-1 - slot] = offset
            continue
        known = known_type(slot)
        assert known is not None and known.dtype is not None and known.shape is not None
        shape = tuple(int(d) for d in known.shape if isinstance(d, int))
        placed.append(Placed(slot, offset, known.nbytes or 0, known.dtype.numpy, shape))
    return Layout(placed, workspaces, unplanned, memory)


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


__all__ = ["Layout", "Placed", "laid_out"]
