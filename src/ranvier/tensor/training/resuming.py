"""Writing down where a run is, and going on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.logs import warn_once
from ranvier.tensor.core import Tensor
from ranvier.tensor.training.checkpoints import Checkpoints
from ranvier.tensor.training.history import History
from ranvier.tensor.training.run_record import differences, versions
from ranvier.tensor.training.saving import model_values, packed, restore_model, states_of, unpacked
from ranvier.tensor.training.stopping import EarlyStop

if TYPE_CHECKING:
    from ranvier.tensor.training.loop import Trainer

Array = np.ndarray[Any, Any]
_BEST = "best."


class Resuming:
    """The checkpoints of a trainer. ``facts`` are what decides its course; a run with others is another run."""

    def __init__(
        self, trainer: Trainer, checkpoints: Checkpoints | None, early: EarlyStop | None, facts: Mapping[str, Any]
    ) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._early = early
        self._facts = facts
        self._best: dict[str, Array] = {}
        self._saved = -1  # the step of the last checkpoint
        self.values: dict[str, float] = {}  # what was shown last

    def save(self, epoch: int, batch: int, values: Mapping[str, float]) -> None:
        """Write a checkpoint; ``epoch`` and ``batch`` are where the data goes on, ``values`` what is shown."""
        if self._checkpoints is None:
            return
        trainer = self._trainer
        tensors: dict[str, Any] = {**model_values(trainer.model), **trainer.history.arrays(), **self._best}
        parts = {name: packed(part.state_dict(), name, tensors) for name, part in self._parts().items()}
        facts = {
            **self._facts,
            "versions": versions(),
            "epoch": epoch,
            "batch": batch,
            "values": dict(values),
            "parts": parts,
            "early": None if self._early is None else self._early.state(),
        }
        self._checkpoints.save(trainer.step, tensors, facts)
        self._saved = trainer.step

    def save_last(self, epoch: int, batch: int, values: Mapping[str, float]) -> None:
        """Write a checkpoint of where a run ended, unless there is one."""
        if self._saved != self._trainer.step:
            self.save(epoch, batch, values)

    def restore(self) -> tuple[int, int]:
        """Take over the last whole checkpoint; where the data goes on. Without one it begins at the beginning."""
        if self._checkpoints is None:
            raise InvalidConfig("to resume, the trainer needs the folder that has its checkpoints")
        saved = self._checkpoints.latest()
        if saved is None:
            return 0, 0
        facts = saved.facts
        others = [line for name in self._facts for line in _changed(name, facts.get(name), self._facts[name])]
        if others:
            raise InvalidConfig(f"the run in {str(self._checkpoints.folder)!r} is another one: {'; '.join(others)}")
        for line in differences(facts["versions"], versions()):
            warn_once(f"resume {line}", f"the run goes on with other versions, and may differ in its last bits: {line}")
        trainer = self._trainer
        restore_model(trainer.model, saved.tensors)
        for name, part in self._parts().items():
            part.load_state_dict(unpacked(facts["parts"][name], saved.tensors))
        if self._early is not None and facts["early"] is not None:
            self._early.restore(facts["early"])
        self._best = {name: array for name, array in saved.tensors.items() if name.startswith(_BEST)}
        self.values = dict(facts["values"])
        trainer.history = History.of(saved.tensors)
        trainer.step = self._saved = saved.step
        return int(facts["epoch"]), int(facts["batch"])

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own beside the model."""
        trainer = self._trainer
        parts = {
            "optimizer": trainer.optimizer,
            "schedule": trainer.schedule,
            "average": trainer.ema,
            "scaler": trainer.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def keep_best(self) -> None:
        """Remember the weights as they are now."""
        self._best = {f"{_BEST}{name}": np.array(state.numpy()) for name, state in states_of(self._trainer.model)}

    def put_best(self) -> None:
        """Give the model the weights that were remembered."""
        for name, state in states_of(self._trainer.model):
            if f"{_BEST}{name}" in self._best:
                state.assign(Tensor(self._best[f"{_BEST}{name}"]))


def _changed(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return differences(before, now, f"{name}.")
    return [] if before == now else [f"{name} was {before!r} and is {now!r}"]


_OF_TENSORS = True
