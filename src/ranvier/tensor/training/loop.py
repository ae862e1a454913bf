"""A training loop: data in, a model that has learned out, and nothing lost when it is interrupted.

A step is one update of the weights, compiled whole: forward, backward, clipping, optimizer, average. Checkpoints are
written between steps and hold everything a step depends on, so a run that was killed and goes on ends with the same
bits as one that was not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig, InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.jitted import jit
from ranvier.tensor.nn.generator import manual_seed
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.precision import autocast
from ranvier.tensor.optim import EMA, GradScaler, clip_grad_norm_, clip_grad_value_
from ranvier.tensor.optim.lr_scheduler import ReduceLROnPlateau
from ranvier.tensor.tracing import no_grad
from ranvier.tensor.training import run_record
from ranvier.tensor.training.callbacks import Callbacks
from ranvier.tensor.training.checkpoints import Checkpoints
from ranvier.tensor.training.data import Data, as_data
from ranvier.tensor.training.history import History
from ranvier.tensor.training.limits import fit_into
from ranvier.tensor.training.memory import bytes_of_text
from ranvier.tensor.training.metrics import Metric, metrics_of
from ranvier.tensor.training.plots import LivePlot
from ranvier.tensor.training.progress import Shown, shown_of, values_text
from ranvier.tensor.training.resuming import Resuming
from ranvier.tensor.training.stopping import EarlyStop
from ranvier.tensor.training.trackers import Tracker, trackers_of
from ranvier.tensor.trees import leaves

Loss = Callable[..., Tensor]
_SMOOTH = 0.9  # of the loss that is shown while it runs


class Trainer:
    """Trains a model: ``Trainer(model, optimizer, loss).fit(data, epochs=10)``.

    A batch is ``(input, target)`` or ``(input, …, target)``; ``loss(output, target)`` gives a number. Where batches are
    anything else, ``forward(model, batch)`` gives (loss, output, target), the last two for metrics.

    ``clip`` limits the norm of all gradients (``clip_value`` each element), ``accumulate`` gathers gradients of several
    batches for one step, ``schedule`` is stepped after every step (``schedule_by="epoch"``: every epoch), ``ema`` is
    the decay of averaged weights, with which is validated; ``precision`` runs products in ``"bf16"`` or ``"fp16"``.
    ``memory_limit`` (bytes, or ``"500 MB"``): the model is cut into segments that are computed again on the way back,
    as few as keep a step below it; OutOfMemory where that is not enough.
    ``folder`` takes checkpoints, the record of the run and its numbers.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Any,
        loss: Loss | None = None,
        *,
        forward: Callable[[Any, Any], tuple[Tensor, Any, Any]] | None = None,
        metrics: Sequence[str | Metric] | Mapping[str, Callable[[Any, Any], Any]] = (),
        schedule: Any = None,
        schedule_by: str = "step",
        clip: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        precision: str | None = None,
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int | None = 3,
        tracker: Any = None,
        plot: str | os.PathLike[str] | None = None,
        progress: bool | Shown | None = None,
        compile: bool = True,
        memory_limit: int | str | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        if (loss is None) == (forward is None):
            raise InvalidConfig("a trainer has either loss(output, target) or forward(model, batch)")
        if accumulate < 1:
            raise InvalidConfig(f"gradients of at least one batch make a step, not of {accumulate}")
        if schedule_by not in ("step", "epoch"):
            raise InvalidConfig(f"schedule_by is 'step' or 'epoch', not {schedule_by!r}")
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.ema = None if ema is None else EMA(list(model.parameters()), ema)
        self.scaler = GradScaler() if precision == "fp16" else None
        self.step = 0  # updates so far
        self.history = History()
        self._loss, self._own_forward = loss, forward
        self._metrics = metrics_of(metrics)
        self._by_epoch = schedule_by == "epoch" or isinstance(schedule, ReduceLROnPlateau)
        self._clip, self._clip_value = clip, clip_value
        self._accumulate = accumulate
        self._precision = precision
        self._seed = seed
        self._folder = None if folder is None else Path(folder)
        self._every = checkpoint_every
        self._checkpoints = None if folder is None else Checkpoints(Path(folder) / "checkpoints", keep=keep)
        self._trackers: list[Tracker] = trackers_of(tracker)
        if folder is not None:
            self._trackers += trackers_of(f"jsonl:{Path(folder) / 'metrics.jsonl'}")
        self._plot = None if plot is None else LivePlot(Path(plot))
        self._progress = progress
        self._limit = memory_limit
        self._configuration = {
            **(configuration or {}),
            "model": type(model).__name__,
            "optimizer": type(optimizer).__name__,
            "loss": run_record.plain(loss if loss is not None else forward),
            "clip": clip,
            "clip_value": clip_value,
            "accumulate": accumulate,
            "schedule": None if schedule is None else type(schedule).__name__,
            "ema": ema,
            "precision": precision,
        }
        self._reason = ""
        self._train = jit(self._train_eagerly) if compile else self._train_eagerly
        self._evaluate = jit(self._evaluate_eagerly) if compile else self._evaluate_eagerly

    # -- what is computed -------------------------------------------------------------------------------------------

    def _computed(self, batch: Any) -> tuple[Tensor, Any, Any]:
        """Loss, outputs and targets of a batch."""
        with autocast(self._precision) if self._precision else nullcontext():
            if self._own_forward is not None:
                return self._own_forward(self.model, batch)
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise InvalidInput("a batch is (input, …, target); give the trainer forward(model, batch) for others")
            assert self._loss is not None
            outputs = self.model(*batch[:-1])
            return self._loss(outputs, batch[-1]), outputs, batch[-1]

    def _train_eagerly(self, batch: Any, share: float, update: bool) -> Tensor:
        """Gradients of one batch, and with ``update`` a step of the optimizer."""
        loss, _, _ = self._computed(batch)
        target = loss if self.scaler is None else self.scaler.scale(loss)
        (target if share == 1.0 else target * share).backward()
        if update:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self._clip is not None:
                clip_grad_norm_(parameters, self._clip)
            if self._clip_value is not None:
                clip_grad_value_(parameters, self._clip_value)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            if self.ema is not None:
                self.ema.update()
        return loss

    def _evaluate_eagerly(self, batch: Any) -> tuple[Tensor, Any, Any]:
        with no_grad():
            return self._computed(batch)

    # -- running ----------------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        validation: Any = None,
        validate_every: int | None = None,
        early_stop: EarlyStop | None = None,
        callbacks: Sequence[Any] = (),
        resume: bool = False,
    ) -> History:
        """Train for a number of epochs or steps, whichever ends first, and return what was measured.

        ``data``: see :mod:`ranvier.tensor.training.data`. ``validation`` is looked at after every epoch, or every
        ``validate_every`` steps. With ``resume`` it goes on from the last checkpoint of the folder, if there is one.
        """
        if epochs is None and steps is None:
            raise InvalidConfig("say how long to train: epochs or steps")
        source = as_data(data, batch_size, self._seed)
        checked = None if validation is None else as_data(validation, batch_size, self._seed)
        manual_seed(self._seed)
        facts = {"seed": self._seed, "data": run_record.plain(source.facts()), "configuration": self._configuration}
        resuming = Resuming(self, self._checkpoints, early_stop, run_record.plain(facts))
        epoch, batch = resuming.restore() if resume else (0, 0)
        fitting = _Fitting(self, source, checked, resuming, early_stop, Callbacks(callbacks))
        fitting.limits(epochs, steps, validate_every)
        record = run_record.record(self._seed, self._configuration)
        if resume and self.step:
            record["resumed_at"] = self.step
        if self._folder is not None:
            run_record.save(self._folder, record)
        for each in self._trackers:
            each.begin(record)
        outcome = "interrupted"
        try:
            outcome = fitting.run(epoch, batch)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self.history.outcome = outcome
            fitting.end()
            for each in self._trackers:
                each.end(outcome)
        return self.history

    def stop(self, reason: str = "stopped") -> None:
        """End training after this step; for callbacks."""
        self._reason = reason

    def evaluate(self, data: Any, batch_size: int | None = None) -> dict[str, float]:
        """Mean loss and metrics over one epoch of data, with averaged weights where there are such."""
        source = as_data(data, batch_size, self._seed)
        total, count = 0.0, 0
        for metric in self._metrics:
            metric.reset()
        training = self.model.training
        self.model.eval()
        try:
            with self.ema.applied() if self.ema is not None else nullcontext():
                for batch in source.epoch(0):
                    loss, outputs, targets = self._evaluate(batch)
                    size = _size(batch)
                    total += loss.item() * size
                    count += size
                    for metric in self._metrics:
                        metric.update(_host(outputs), _host(targets))
        finally:
            self.model.train(training)
        if not count:
            raise InvalidInput("there is no data to evaluate with")
        return {"loss": total / count, **{metric.name: metric.value() for metric in self._metrics}}


class _Fitting:
    """One call of ``fit``."""

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        validation: Data | None,
        resuming: Resuming,
        early_stop: EarlyStop | None,
        callbacks: Callbacks,
    ) -> None:
        self._trainer = trainer
        self._data = data
        self._validation = validation
        self._resuming = resuming
        self._early = early_stop
        self._callbacks = callbacks
        self._shown = shown_of(trainer._progress)
        self._values: dict[str, float] = dict(resuming.values)

    def limits(self, epochs: int | None, steps: int | None, validate_every: int | None) -> None:
        self._epochs, self._steps, self._look_every = epochs, steps, validate_every
        counts = [] if steps is None else [steps]
        if epochs is not None and isinstance(self._data, Sized):
            counts.append(epochs * -(-len(self._data) // self._trainer._accumulate))
        self._total = min(counts) if counts else None

    def run(self, epoch: int, batch: int) -> str:
        trainer = self._trainer
        trainer._reason = ""
        trainer.model.train()
        if trainer._limit is not None:
            first = next(iter(self._data.epoch(epoch, batch)), None)
            if first is not None:
                fit_into(trainer, first, bytes_of_text(trainer._limit))
                trainer._limit = None  # a model that is cut stays so
        self._shown.begin(self._total, trainer.step)
        self._callbacks.begin(trainer)
        while not self._over(epoch):
            ended = True
            for group in self._groups(epoch, batch):
                self._step(group, epoch)
                batch += len(group)
                self._after_step(epoch, batch)
                if trainer._reason or (self._steps is not None and trainer.step >= self._steps):
                    ended = False
                    break
            if batch == 0:
                raise InvalidInput("the data has no batch to train on")
            if ended:
                epoch, batch = epoch + 1, 0
                self._after_epoch(epoch)
            if trainer._reason:
                break
        self._resuming.save_last(epoch, batch, self._values)
        if self._early is not None and self._early.restore_best:
            self._resuming.put_best()
        return trainer._reason or "finished"

    def _over(self, epoch: int) -> bool:
        done = self._steps is not None and self._trainer.step >= self._steps
        return done or (self._epochs is not None and epoch >= self._epochs)

    def _groups(self, epoch: int, start: int) -> Iterator[list[Any]]:
        """Batches, as many together as one step takes; an epoch's last step may have fewer."""
        source = self._data.epoch(epoch, start)
        while group := list(itertools.islice(source, self._trainer._accumulate)):
            yield group

    def _step(self, group: list[Any], epoch: int) -> None:
        trainer = self._trainer
        if trainer.schedule is not None and not trainer._by_epoch and trainer.step:
            trainer.schedule.step()  # before the step it is for: a schedule that has an end is not asked for one more
        total = 0.0
        for k, batch in enumerate(group):
            loss = trainer._train(batch, 1.0 / len(group), k == len(group) - 1)
            total += loss.item() / len(group)
        trainer.step += 1
        trainer.history.add(trainer.step, {"loss": total})
        before = self._values.get("loss", total)
        self._values["loss"] = _SMOOTH * before + (1 - _SMOOTH) * total if np.isfinite(before) else total
        for each in trainer._trackers:
            each.log(trainer.step, {"loss": total})
        self._callbacks.step(trainer, trainer.step, {"loss": total})
        self._shown.step(trainer.step, epoch, self._values)

    def _after_step(self, epoch: int, batch: int) -> None:
        trainer = self._trainer
        if self._look_every is not None and trainer.step % self._look_every == 0:
            self._look(epoch)
        if trainer._every is not None and trainer.step % trainer._every == 0:
            self._resuming.save(epoch, batch, self._values)
        self._draw()

    def _after_epoch(self, epoch: int) -> None:
        trainer = self._trainer
        if self._look_every is None:
            self._look(epoch - 1)
        if isinstance(trainer.schedule, ReduceLROnPlateau):
            trainer.schedule.step(self._values.get("validation_loss", self._values["loss"]))
        elif trainer.schedule is not None and trainer._by_epoch:
            trainer.schedule.step()
        self._callbacks.epoch(trainer, epoch, dict(self._values))
        if trainer._every is None:
            self._resuming.save(epoch, 0, self._values)

    def _look(self, epoch: int) -> None:
        """Validate, and see whether to go on."""
        trainer = self._trainer
        if self._validation is not None:
            found = {f"validation_{name}": v for name, v in trainer.evaluate(self._validation).items()}
            trainer.history.add(trainer.step, found)
            self._values.update(found)
            for each in trainer._trackers:
                each.log(trainer.step, found)
        self._shown.report(f"epoch {epoch + 1}, step {trainer.step}: {values_text(self._values)}")
        if self._early is not None:
            if self._early.look(self._values) and self._early.restore_best:
                self._resuming.keep_best()
            if self._early.due:
                trainer.stop("stopped early")

    def _draw(self, *, last: bool = False) -> None:
        plot = self._trainer._plot
        if plot is not None:
            plot.update(self._trainer.history.curves, f"{type(self._trainer.model).__name__}", last=last)

    def end(self) -> None:
        self._draw(last=True)
        self._callbacks.end(self._trainer)
        self._shown.end()


def _size(batch: Any) -> int:
    """How many samples a batch has."""
    first = next(leaves(batch), None)
    return int(np.shape(first)[0]) if first is not None and np.ndim(first) else 1


def _host(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.numpy()
    return type(tree)(_host(each) for each in tree) if isinstance(tree, list | tuple) else tree


_OF_TENSORS = True
