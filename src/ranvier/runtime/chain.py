"""The way in without Python for a plan of several steps: the ways into its kernels, and into the body that an If takes,
one after another.

Between them lies a dictionary of tensors by name, which each step takes from and adds to. Where one of them does not
let the call in, the call goes the long way from its beginning: nothing has happened that anybody could see.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ranvier.codegen.signature import Tensor
from ranvier.errors import RanvierError
from ranvier.graph.ir import Value
from ranvier.graph.types import TensorType
from ranvier.providers.base import Branches, Enters, Entry
from ranvier.runtime.program import Prepared, Program, Step

Array = np.ndarray[Any, Any]
_PATIENCE = 8  # runs that may break off halfway, and one in as many of those that do not


class Enterable(Protocol):
    """A plan."""

    @property
    def opened(self) -> Entry | None: ...

    def entry(self, inputs: Sequence[Tensor], names: Sequence[str]) -> Entry | None: ...


@runtime_checkable
class Planned(Protocol):
    """A body that is run by plans."""

    captures: Sequence[Value]
    results: int  # how many it has

    def planned(self, captured: Sequence[Tensor]) -> Enterable | None:
        """The plan for values of these types; None where there is none."""
        ...


class Link(NamedTuple):
    """A step of a chain. ``run`` gives what it makes by name, or None where it does not let the call in; it is given
    what it reads, or all there is where that is None."""

    run: Callable[[dict[str, Array]], dict[str, Array] | None]
    reads: tuple[str, ...] | None
    makes: tuple[str, ...]


class Chain:
    """An :class:`Entry`. Its steps share memory that is its own, so one run is in it at a time."""

    def __init__(self, links: Sequence[Link], names: Sequence[str]) -> None:
        """The first link looks at all inputs."""
        self._links = tuple(links)
        self._names = None if links[-1].makes == tuple(names) else tuple(names)
        self._alone = threading.Lock()
        self._closed = False
        self._broken = 0
        self.runs = 0

    @property
    def busy(self) -> bool:
        return self._alone.locked()

    def close(self) -> bool:
        if not self._alone.acquire(blocking=False):
            return False
        self._closed = True
        self._alone.release()
        return True

    def run(self, inputs: Any) -> dict[str, Any] | None:
        if type(inputs) is not dict or not self._alone.acquire(blocking=False):
            return None
        try:
            return None if self._closed else self._run(inputs.copy())  # others may change theirs meanwhile
        finally:
            self._alone.release()

    def _run(self, known: dict[str, Array]) -> dict[str, Array] | None:
        begun = False
        found: dict[str, Array] | None = None
        for run, reads, _ in self._links:
            found = run(known if reads is None else {name: known[name] for name in reads})
            if found is None:
                if begun:
                    self._break_off()
                return None
            known.update(found)
            begun = True
        self.runs += 1
        return found if self._names is None else {name: known[name] for name in self._names}

    def _break_off(self) -> None:
        """What was done is done again the long way: not for ever, where that happens often."""
        self._broken += 1
        self._closed = _PATIENCE * (self._broken - _PATIENCE) > self.runs


class _Branch:
    """The way through an If: that into the body which its condition chooses, opened when it is first chosen."""

    def __init__(
        self, kernel: Branches, condition: str, taken: Sequence[Sequence[Tensor]], makes: tuple[str, ...]
    ) -> None:
        """``taken``: the values that either body reads, the one for false first."""
        self._kernel = kernel
        self._condition = condition
        self._taken = taken
        self._reads = [tuple(x.name for x in each) for each in taken]
        self._makes = makes
        self._plans: list[Enterable | None] = [None, None]  # kept: the memory that an entry works in is its plan's

    def run(self, known: dict[str, Array]) -> dict[str, Array] | None:
        condition = known[self._condition]
        if condition.size != 1:
            return None
        truth = bool(condition.item())
        plan = self._plans[truth]
        entry = None if plan is None else plan.opened
        if entry is None:
            entry = self._open(truth)
            if entry is None:
                return None
        return entry.run({name: known[name] for name in self._reads[truth]})

    def _open(self, truth: bool) -> Entry | None:
        body = self._kernel.branch(truth)
        assert isinstance(body, Planned)
        with contextlib.suppress(RanvierError):  # the long way meets the same, and says where
            plan = self._plans[truth] = body.planned(self._taken[truth])
            if plan is not None:
                return plan.entry(self._taken[truth], self._makes)
        return None


def chained(
    program: Program,
    kernels: Sequence[Prepared | None],
    operands: Sequence[int],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    type_of: Callable[[int], TensorType | None],
) -> Chain | None:
    """Through all steps of a program, where each of them has a way in. ``operands``: the slots of the inputs;
    ``type_of``: of a slot, where its size is known beforehand. Outputs are made by steps, and each comes once."""
    tensors = dict(zip(operands, inputs))
    named = {slot: value.name for value, slot in program.slots.items()}
    named.update(zip(program.output_slots, names))
    links: list[Link] = []
    for step, prepared in zip(program.steps, kernels):
        if any(slot not in named for slot in step.outputs):
            return None
        if prepared is not None:
            link = _through_kernel(program, step, prepared, tensors, named, type_of, first=not links)
        elif links and isinstance(step.kernel, Branches):
            link = _through_branch(program, step, step.kernel, tensors, named)
        else:
            link = None
        if link is None:
            return None
        links.append(link)
        for slot in step.outputs:
            known = type_of(slot)
            if known is not None:
                tensors[slot] = _tensor(named[slot], known)
    every = [*(x.name for x in inputs), *(name for link in links for name in link.makes)]
    return Chain(links, names) if len(set(every)) == len(every) else None


def _through_kernel(
    program: Program,
    step: Step,
    prepared: Prepared,
    tensors: Mapping[int, Tensor],
    named: Mapping[int, str],
    type_of: Callable[[int], TensorType | None],
    *,
    first: bool,
) -> Link | None:
    kernel, workspace = prepared
    types = [type_of(slot) for slot in step.outputs]
    read = [slot for slot in step.inputs if program.template[slot] is None]
    if not isinstance(kernel, Enters) or None in types or any(slot not in tensors for slot in read):
        return None
    places = {slot: k for k, slot in enumerate(read)}
    taken = [
        Tensor(x.name, x.dtype, x.shape, places.get(slot)) for slot, x in tensors.items() if first or slot in places
    ]
    made = [_tensor(named[slot], known, k) for k, (slot, known) in enumerate(zip(step.outputs, types)) if known]
    entry = kernel.entry(taken, made, workspace)
    reads = None if first else tuple(x.name for x in taken)
    return None if entry is None else Link(entry.run, reads, tuple(x.name for x in made))


def _through_branch(
    program: Program, step: Step, kernel: Branches, tensors: Mapping[int, Tensor], named: Mapping[int, str]
) -> Link | None:
    condition = tensors.get(step.inputs[kernel.condition])
    if condition is None:
        return None
    taken: list[list[Tensor]] = []
    for truth in (False, True):
        body = kernel.branch(truth)
        if not isinstance(body, Planned) or body.results != len(step.outputs):
            return None
        slots = [program.slots[value] for value in body.captures]
        if any(slot not in tensors for slot in slots):
            return None
        taken.append([tensors[slot] for slot in slots])
    makes = tuple(named[slot] for slot in step.outputs)
    return Link(_Branch(kernel, condition.name, taken, makes).run, None, makes)


def _tensor(name: str, known: TensorType, place: int | None = None) -> Tensor:
    shape: Any = known.shape
    assert known.dtype is not None
    return Tensor(name, known.dtype.numpy, tuple(shape), place)


__all__ = ["Chain", "Enterable", "Planned", "chained"]
