"""Schedules of learning rates. They change a state that steps read, so nothing is compiled again.

Call ``step`` after the optimizer's, outside of compiled functions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ranvier.errors import InvalidInput
from ranvier.tensor.optim.base import Optimizer
from ranvier.tensor.tracing import now


class LRScheduler:
    """A learning rate for each group as a function of the number of steps so far (``last_epoch``)."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_epoch = max(last_epoch, 0)
        self._set()

    def lr_at(self, base: float, step: int) -> float:
        """The learning rate after so many steps, of a group that began with ``base``."""
        raise NotImplementedError

    def _set(self) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = self.lr_at(base, self.last_epoch)

    def step(self) -> None:
        """One step further."""
        if now.tracing is not None:
            raise InvalidInput("a schedule is moved on outside of jitted functions: inside it would stand still")
        self.last_epoch += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self.base_lrs = [float(lr) for lr in state_dict["base_lrs"]]
        self._set()


class LambdaLR(LRScheduler):
    """The first learning rate times a function of the number of steps; one function, or one for each group."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        groups = len(optimizer.param_groups)
        self._lambdas = [lr_lambda] * groups if callable(lr_lambda) else list(lr_lambda)
        if len(self._lambdas) != groups:
            raise InvalidInput(f"{len(self._lambdas)} functions for {groups} groups")
        super().__init__(optimizer, last_epoch)

    def _set(self) -> None:
        for group, base, function in zip(self.optimizer.param_groups, self.base_lrs, self._lambdas):
            group["lr"] = base * function(self.last_epoch)


class StepLR(LRScheduler):
    """Times ``gamma`` every ``step_size`` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return float(base * self.gamma ** (step // self.step_size))


class MultiStepLR(LRScheduler):
    """Times ``gamma`` at each milestone."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return float(base * self.gamma ** bisect_right(self.milestones, step))


class ExponentialLR(LRScheduler):
    """Times ``gamma`` at every step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return float(base * self.gamma**step)


class ConstantLR(LRScheduler):
    """Times ``factor`` for the first steps."""

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3.0, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return base * self.factor if step < self.total_iters else base


class LinearLR(LRScheduler):
    """From one factor to another along a line: a warm-up."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3.0,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        done = min(step, self.total_iters) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * done)


class PolynomialLR(LRScheduler):
    """Down to 0 along a power of what is left."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return float(base * (1.0 - min(step, self.total_iters) / self.total_iters) ** self.power)


class CosineAnnealingLR(LRScheduler):
    """Down to ``eta_min`` along half a wave of ``T_max`` steps, and up again."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        return self.eta_min + (base - self.eta_min) * (1.0 + math.cos(math.pi * step / self.T_max)) / 2.0


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a wave down, then from the top again; each wave ``T_mult`` times as long as the one before."""

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        if T_0 < 1 or T_mult < 1:
            raise InvalidInput("waves last one step or more and do not become shorter")
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        length = self.T_0
        while step >= length:
            step -= length
            length *= self.T_mult
        return self.eta_min + (base - self.eta_min) * (1.0 + math.cos(math.pi * step / length)) / 2.0


class WarmupCosineLR(LRScheduler):
    """Up along a line for ``warmup_steps``, then down to ``eta_min`` along half a wave until ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        total_steps: int,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise InvalidInput(f"a warm-up of {warmup_steps} does not fit into {total_steps} steps")
        self.warmup_steps, self.total_steps, self.eta_min = warmup_steps, total_steps, eta_min
        super().__init__(optimizer, last_epoch)

    def lr_at(self, base: float, step: int) -> float:
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        done = min(step - self.warmup_steps, self.total_steps - self.warmup_steps)
        wave = math.cos(math.pi * done / (self.total_steps - self.warmup_steps))
        return self.eta_min + (base - self.eta_min) * (1.0 + wave) / 2.0


class OneCycleLR(LRScheduler):
    """Up to ``max_lr`` and far down again, along waves or lines, with momentum going the other way."""

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise InvalidInput("total_steps is needed, or epochs and steps_per_epoch")
            total_steps = epochs * steps_per_epoch
        if anneal_strategy not in ("cos", "linear"):
            raise InvalidInput(f"anneal_strategy is 'cos' or 'linear', not {anneal_strategy!r}")
        groups = optimizer.param_groups
        self._tops = [float(max_lr)] * len(groups) if isinstance(max_lr, int | float) else [float(x) for x in max_lr]
        self.total_steps, self.pct_start, self._cos = total_steps, pct_start, anneal_strategy == "cos"
        self.div_factor, self.final_div_factor = div_factor, final_div_factor
        self.cycle_momentum, self.base_momentum, self.max_momentum = cycle_momentum, base_momentum, max_momentum
        if cycle_momentum and not any(name in group for group in groups for name in ("momentum", "betas")):
            raise InvalidInput("cycle_momentum needs an optimizer with a momentum")
        super().__init__(optimizer, last_epoch)

    def _between(self, start: float, end: float, share: float) -> float:
        if not self._cos:
            return start + (end - start) * share
        return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * share))

    def _set(self) -> None:
        step, turn, end = self.last_epoch, self.pct_start * self.total_steps - 1.0, self.total_steps - 1.0
        if step > end:
            raise InvalidInput(f"the cycle has {self.total_steps} steps; this is number {step + 1}")
        rises = step <= turn
        share = step / turn if rises and turn else (step - turn) / (end - turn)
        for group, top in zip(self.optimizer.param_groups, self._tops):
            first = top / self.div_factor
            last = first / self.final_div_factor
            group["lr"] = self._between(first, top, share) if rises else self._between(top, last, share)
            if self.cycle_momentum:
                high, low = self.max_momentum, self.base_momentum
                value = self._between(high, low, share) if rises else self._between(low, high, share)
                if "betas" in group:
                    group["betas"] = (value, group["betas"][1])
                else:
                    group["momentum"] = value


class SequentialLR(LRScheduler):
    """One schedule until a milestone, then the next, each beginning at its own step 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        last_epoch: int = -1,
    ) -> None:
        if len(schedulers) != len(milestones) + 1:
            raise InvalidInput(f"{len(schedulers)} schedules have {len(schedulers) - 1} milestones between them")
        self._schedulers, self._milestones = list(schedulers), list(milestones)
        first = list(schedulers[0].base_lrs)
        super().__init__(optimizer, last_epoch)
        self.base_lrs = first  # each part was made when another had set the rate already
        self._set()

    def _set(self) -> None:
        for each in self._schedulers:
            each.base_lrs = list(self.base_lrs)
        at = bisect_right(self._milestones, self.last_epoch)
        chosen = self._schedulers[at]
        chosen.last_epoch = self.last_epoch - (self._milestones[at - 1] if at else 0)
        chosen._set()


class ReduceLROnPlateau:
    """Smaller when a measured number has not become better for ``patience`` calls of ``step(number)``."""

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise InvalidInput("mode is 'min' or 'max', threshold_mode 'rel' or 'abs'")
        if not 0.0 < factor < 1.0:
            raise InvalidInput(f"a learning rate becomes smaller by a factor below 1, not {factor}")
        self.optimizer, self.mode, self.factor, self.patience = optimizer, mode, factor, patience
        self.threshold, self.threshold_mode, self.cooldown = threshold, threshold_mode, cooldown
        self.min_lr, self.eps = min_lr, eps
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0

    def _better(self, value: float) -> bool:
        way = 1.0 if self.mode == "min" else -1.0
        if math.isinf(self.best):
            return way * value < way * self.best
        margin = self.threshold * (abs(self.best) if self.threshold_mode == "rel" else 1.0)
        return way * value < way * self.best - margin

    def step(self, metrics: Any) -> None:
        if now.tracing is not None:
            raise InvalidInput("a schedule is moved on outside of jitted functions: inside it would stand still")
        value = float(metrics)
        if self._better(value):
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            for group in self.optimizer.param_groups:
                old = float(group["lr"])
                new = max(old * self.factor, self.min_lr)
                if old - new > self.eps:
                    group["lr"] = new
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "num_bad_epochs", "cooldown_counter")
        return {name: getattr(self, name) for name in names} | {"lrs": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.best = float(state_dict["best"])
        self.num_bad_epochs = int(state_dict["num_bad_epochs"])
        self.cooldown_counter = int(state_dict["cooldown_counter"])
        for group, lr in zip(self.optimizer.param_groups, state_dict.get("lrs", ())):
            group["lr"] = lr


_OF_TENSORS = True
