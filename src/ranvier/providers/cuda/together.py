"""Steps in loops that wait for nothing of each other, as one launch; results written over operands that they replace.

A training step ends with the same few lines for every parameter. They are gathered where the last of them stood, if
nobody reads what an earlier one makes before that. A result that takes the place of an operand, as a parameter's new
value does, is written there at once where the kernel reads each element before it writes it and nobody reads the
operand later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ranvier.codegen.loops.ir import Map, Nest
from ranvier.codegen.storage import Storage, View, dense_strides, same_strides
from ranvier.codegen.triton.library import Call, Printed
from ranvier.codegen.triton.many import is_flat, likeness, merged, room
from ranvier.codegen.triton.printer import Source
from ranvier.graph.ir import Value
from ranvier.providers.cuda.realise import LoopStep, ResultStep
from ranvier.providers.cuda.steps import Step


def gathered(steps: Sequence[Step]) -> list[Step]:
    """The steps with like launches in one. Elementwise ones first: the sums of gradients can be gathered if the
    parameters that follow from them are."""
    return _gathered(_gathered(steps, flat=True), flat=False)


def _gathered(steps: Sequence[Step], *, flat: bool) -> list[Step]:
    left: list[Step | None] = list(steps)
    for positions in _alike(steps, flat):
        uses = {at: _first_use(steps, at) for at in positions}
        chunk: list[int] = []
        for at in [*positions, None]:
            fits = at is not None and all(uses[k] > at for k in chunk)
            if at is not None and fits and _has_room([steps[k] for k in (*chunk, at)]):
                chunk.append(at)
                continue
            if len(chunk) > 1:
                left[chunk[-1]] = _joined([steps[k] for k in chunk])  # type: ignore[misc]
                for k in chunk[:-1]:
                    left[k] = None
            chunk = [] if at is None else [at]
    return [step for step in left if step is not None]


def _alike(steps: Sequence[Step], flat: bool) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for k, step in enumerate(steps):
        if isinstance(step, LoopStep) and step.printed.calls and flat == is_flat(step.printed.calls[0].source):
            alike = tuple(likeness(call.source) for call in step.printed.calls)
            if None not in alike:
                found.setdefault(alike, []).append(k)
    return [positions for positions in found.values() if len(positions) > 1]


def _calls(steps: Sequence[Step]) -> list[list[Source]]:
    """The first kernels of all steps, the second ones, and so on."""
    calls = [[call.source for call in step.printed.calls] for step in steps if isinstance(step, LoopStep)]
    return [list(each) for each in zip(*calls)]


def _has_room(steps: Sequence[Step]) -> bool:
    return all(room(sources) for sources in _calls(steps))


def _first_use(steps: Sequence[Step], at: int) -> int:
    """Where something that a step writes is first read, or written again."""
    made = set(steps[at].writes)
    for k in range(at + 1, len(steps)):
        if not made.isdisjoint(steps[k].reads) or not made.isdisjoint(steps[k].writes):
            return k
    return len(steps)


def _joined(steps: Sequence[LoopStep]) -> LoopStep:
    calls = tuple(Call(merged(sources)) for sources in _calls(steps))
    temporaries = tuple(storage for step in steps for storage in step.printed.temporaries)
    label = f"{steps[0].label} ({len(steps)} times)"
    nests = [nest for step in steps for nest in step.nests]
    makes = [storage for step in steps for storage in step.makes]
    return LoopStep(nests, Printed(calls, temporaries), steps[0].places, makes, label)


class Overwriting:
    """Which results of a run can be written over operands. ``aliases``: values that lie in the memory of an operand."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[Value], aliases: Callable[[Value], set[Value]]) -> None:
        self._steps = steps
        self._outputs = outputs
        self._aliases = aliases
        self._views: dict[Value, View] = {}
        self._makers: dict[Storage, int] = {}
        for k, step in enumerate(steps):
            if isinstance(step, ResultStep):
                self._views.update(step.bound)
            elif isinstance(step, LoopStep):
                self._makers.update(dict.fromkeys(step.makes, k))

    def put(self, replaced: Mapping[Value, tuple[Value, Any]]) -> list[Value]:
        """Let results be made where operands lie: ``replaced`` gives the operand of a result, and its tensor. Those for
        which that is possible."""
        found = []
        for output, (operand, tensor) in replaced.items():
            view = self._views.get(output)
            at = None if view is None else self._makers.get(view.storage)
            if view is None or at is None or not self._possible(output, view, operand, tensor, at):
                continue
            step = self._steps[at]
            assert isinstance(step, LoopStep)
            step.placed[view.storage] = tensor
            found.append(output)
        return found

    def _possible(self, output: Value, view: View, operand: Value, tensor: Any, at: int) -> bool:
        step = self._steps[at]
        assert isinstance(step, LoopStep)
        whole = view.offset == 0 and view.nbytes == view.storage.nbytes and tuple(tensor.shape) == view.shape
        if not whole or not same_strides(view.shape, view.strides, dense_strides(view.shape)):
            return False
        if not tensor.is_contiguous() or list(self._outputs).count(output) > 1:
            return False
        named = self._aliases(operand) | {operand}
        if not named.isdisjoint(self._outputs):
            return False
        if any(not named.isdisjoint(later.reads) for later in self._steps[at + 1 :]):
            return False
        memory = {storage for nest in step.nests for storage in _storages(nest) if step.places.token(storage) in named}
        return all(_reads_before_it_writes(nest, memory, view.storage) for nest in step.nests)


def _storages(nest: Nest) -> list[Storage]:
    return [each.view.storage for each in nest.operands if each.view.storage.kind != "const"]


def _reads_before_it_writes(nest: Nest, operand: set[Storage], result: Storage) -> bool:
    """Whether a nest touches an operand nowhere but at the place of the result that it computes from it."""
    reads = [each for each in nest.operands if each.view.storage in operand]
    if not reads:
        return True
    writes = [each for each in nest.operands if each.view.storage is result]
    if len(writes) != 1 or nest.row or len(nest.stages) != 1 or not isinstance(nest.stages[0], Map):
        return False
    own = writes[0]
    return all(
        each.at is None
        and each.guard is None
        and each.strides == own.strides
        and each.view.offset + each.offset == own.view.offset + own.offset
        and each.view.dtype is own.view.dtype
        for each in [*reads, own]
    )


__all__ = ["Overwriting", "gathered"]
