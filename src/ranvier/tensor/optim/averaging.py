"""Running means of parameters, and gradients gathered over several steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import equal, logical_not, minimum, remainder, where
from ranvier.tensor.groups import realise
from ranvier.tensor.manipulate import astype
from ranvier.tensor.optim.base import Optimizer
from ranvier.tensor.state import Parameter, State
from ranvier.tensor.tracing import no_grad, now


class EMA:
    """An exponential moving average of parameters: call ``update`` after each step, and use the averages inside
    ``with ema.applied():``. ``warmup``: the first averages follow faster, by (1 + n) / (10 + n) after n updates."""

    def __init__(self, params: Iterable[Parameter], decay: float = 0.999, *, warmup: bool = False) -> None:
        if not 0.0 <= decay <= 1.0:
            raise InvalidInput(f"a decay is between 0 and 1, not {decay}")
        self.params = list(params)
        self.decay, self.warmup = decay, warmup
        self.averages = [State(param.value, name="average") for param in self.params]
        place = self.params[0].device if self.params else None
        self.updates = State(np.zeros((), np.float64), device=place, name="updates")

    def update(self) -> None:
        """Let the averages follow the parameters; all of them in one computation."""
        with no_grad():
            decay: Any = self.decay
            if self.warmup:
                decay = minimum((self.updates + 1.0) / (self.updates + 10.0), self.decay)
            for average, param in zip(self.averages, self.params):
                share = astype(1.0 - decay, param.dtype) if isinstance(decay, Tensor) else 1.0 - decay
                average.assign(average + (param - average) * share)
            self.updates.assign(self.updates + 1.0)
        if now.tracing is None:
            realise([state._expr for state in (*self.averages, self.updates)])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the parameters have their averages as values."""
        before = [param.value.realise() for param in self.params]
        for param, average in zip(self.params, self.averages):
            param.assign(average.value)
        try:
            yield
        finally:
            for param, value in zip(self.params, before):
                param.assign(value)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [average.value for average in self.averages], "updates": self.updates.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        given = state_dict["averages"]
        if len(given) != len(self.averages):
            raise ShapeMismatch(f"{len(given)} averages do not fit {len(self.averages)} parameters")
        for average, value in zip(self.averages, given):
            average.assign(Tensor(value, average.dtype, average.device))
        self.updates.assign(Tensor(state_dict["updates"], "float64", self.updates.device))


class GradientAccumulation:
    """An optimizer that steps once for so many calls, by the mean of their gradients.

    The same call each time (``zero_grad``, ``backward``, ``step``), so that one compiled function serves all of them.
    """

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        if steps < 1:
            raise InvalidInput(f"gradients are gathered over one step or more, not {steps}")
        self.optimizer, self.steps = optimizer, steps
        self._params = [param for group in optimizer.param_groups for param in group.params]
        self._sums = [State(np.zeros(p.shape, p.dtype.numpy), device=p.device, name="sum") for p in self._params]
        self._count = State(np.zeros((), np.int64), device=self._params[0].device, name="calls")

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, *, skip: Any = None) -> None:
        """Gather the gradients; every so many calls, let the optimizer step. Where ``skip`` holds, this call counts
        as none."""
        with no_grad():
            count = self._count + 1
            full = equal(remainder(count, self.steps), 0)
            totals = []
            for param, held in zip(self._params, self._sums):
                grad = param.grad
                total = held.value if grad is None else held + grad * (1.0 / self.steps)
                totals.append(total if skip is None else where(skip, held.value, total))
                param.grad = totals[-1]
            waits = logical_not(full) if skip is None else logical_not(full) | skip
            for held, total in zip(self._sums, totals):
                held.assign(where(waits, total, total * 0.0))
            self._count.assign(count if skip is None else where(skip, self._count.value, count))
        self.optimizer.step(skip=waits)


_OF_TENSORS = True
