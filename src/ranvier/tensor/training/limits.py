"""Keeping a training step within a limit of memory.

The step is traced and planned without being run, which tells what it takes to the byte. Where that is too much, the
model is cut into segments whose inner values are computed again on the way back instead of being kept; first few and
large ones, then more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.errors import OutOfMemory
from ranvier.logs import logger
from ranvier.tensor.compiled import Compiled
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.custom import checkpoint
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.modules.containers import Sequential
from ranvier.tensor.tracing import Tracing, now
from ranvier.tensor.training.imported import Imported
from ranvier.tensor.trees import filled, leaves

if TYPE_CHECKING:
    from ranvier.tensor.training.loop import Trainer

_NUMBERS = (2, 3, 4, 6, 8, 12, 16, 24)  # of segments


def step_bytes(trainer: Trainer, batch: Any) -> int:
    """What a step with such a batch takes: weights and what the optimizer keeps (their new values beside the old
    ones), the batch, and the most that is in use between."""
    given = [as_tensor(x)._expr for x in leaves(batch)]
    tracing = Tracing()
    inside = filled(batch, [wrapped(tracing.placeholder(expr)) for expr in given])
    now.tracing = tracing
    try:
        loss = trainer._train_eagerly(inside, 1.0, True)
    finally:
        now.tracing = None
        tracing.active = False
    compiled = Compiled(tracing, len(given), loss, "step")
    states = sum(state.nbytes for state in tracing.read_states)
    renewed = sum(state.nbytes for state in tracing.states)
    return compiled.arena_bytes() + states + renewed + sum(_bytes(x) for x in leaves(batch))


def _bytes(x: Any) -> int:
    return int(x.nbytes) if isinstance(x, Tensor | np.ndarray) else 8


def fit_into(trainer: Trainer, batch: Any, limit: int) -> int:
    """Cut the model into segments until a step fits; the bytes it takes then. OutOfMemory where nothing helps."""
    needed = least = step_bytes(trainer, batch)
    if needed <= limit:
        return needed
    for label, apply in ways(trainer.model):
        undo = apply()
        found = step_bytes(trainer, batch)
        least = min(least, found)
        if found <= limit:
            logger.info("a training step takes %d bytes instead of %d with %s", found, needed, label)
            return found
        undo()
    raise OutOfMemory(
        f"a training step takes {needed:,} bytes, {least:,} with what can be computed again, and may take {limit:,}; "
        "a smaller batch with accumulate= takes less",
        part="training step",
        requested=least,
        capacity=limit,
    )


def ways(model: Module) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Ways to keep less, from those that cost least: what to call them, and what applies them and returns what takes
    them back."""
    if isinstance(model, Imported):
        for number in _NUMBERS:
            yield f"{number} segments", lambda number=number: _cut_imported(model, number)  # type: ignore[misc]
        return
    row = max((m for m in model.modules() if isinstance(m, Sequential)), key=len, default=None)
    if row is not None:
        for number in (n for n in _NUMBERS if n <= len(row)):
            yield f"{number} segments", lambda number=number: _cut_row(row, number)  # type: ignore[misc]
    blocks = [m for m in model.modules() if m is not model and any(True for _ in m.children())]
    outer = [m for m in blocks if not any(m in list(other.modules())[1:] for other in blocks if type(other) is type(m))]
    repeated = [m for m in outer if sum(type(o) is type(m) for o in outer) > 1]
    for chosen in (repeated, outer):
        if chosen:
            yield f"{len(chosen)} blocks computed again", lambda chosen=chosen: _wrap(chosen)  # type: ignore[misc]


def _cut_imported(model: Imported, number: int) -> Callable[[], None]:
    before, model.segments = model.segments, number

    def undo() -> None:
        model.segments = before

    return undo


def _cut_row(row: Sequential, number: int) -> Callable[[], None]:
    members = list(row.children())
    borders = [round(k * len(members) / number) for k in range(number + 1)]

    def part(first: int, last: int) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for module in members[first:last]:
                x = module(x)
            return x

        return checkpoint(run)

    parts = [part(first, last) for first, last in itertools.pairwise(borders)]

    def forward(x: Any) -> Any:
        for each in parts:
            x = each(x)
        return x

    object.__setattr__(row, "forward", forward)
    return lambda: object.__delattr__(row, "forward")


def _wrap(modules: list[Module]) -> Callable[[], None]:
    for module in modules:
        object.__setattr__(module, "forward", checkpoint(module.forward))

    def undo() -> None:
        for module in modules:
            object.__delattr__(module, "forward")

    return undo


_OF_TENSORS = True
