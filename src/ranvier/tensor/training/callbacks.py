"""What a user wants done along the way.

A callback is an object with any of ``on_begin(trainer)``, ``on_step(trainer, step, values)``,
``on_epoch(trainer, epoch, values)``, ``on_end(trainer)``; or a function, which is called after each epoch.
``trainer.stop(reason)`` ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Callbacks:
    """All of a run's, asked in order."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = list(given)

    def begin(self, trainer: Any) -> None:
        self._call("on_begin", trainer)

    def step(self, trainer: Any, step: int, values: Mapping[str, float]) -> None:
        self._call("on_step", trainer, step, values)

    def epoch(self, trainer: Any, epoch: int, values: Mapping[str, float]) -> None:
        for each in self._given:
            if hasattr(each, "on_epoch"):
                each.on_epoch(trainer, epoch, values)
            elif callable(each):
                each(trainer, epoch, values)

    def end(self, trainer: Any) -> None:
        self._call("on_end", trainer)

    def _call(self, name: str, *args: Any) -> None:
        for each in self._given:
            method = getattr(each, name, None)
            if method is not None:
                method(*args)


_OF_TENSORS = True
