"""Loss scaling for small types: losses are enlarged so that gradients do not vanish, gradients made small again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidInput
from ranvier.tensor import reductions
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import isfinite, logical_not, logical_or, where
from ranvier.tensor.manipulate import astype
from ranvier.tensor.optim.base import Optimizer
from ranvier.tensor.state import State
from ranvier.tensor.tracing import no_grad


class GradScaler:
    """``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``.

    A step whose gradients are not all finite changes nothing and makes the scale smaller; many good ones make it
    larger. Whether one was good is decided where it is computed, so that all of it can be compiled.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: Any = None,
    ) -> None:
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0:
            raise InvalidInput("a scale grows by more than 1 and backs off by less")
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.enabled = growth_interval, enabled
        self._scale = State(np.array(init_scale, np.float32), device=device, name="scale")
        self._good = State(np.zeros((), np.int64), device=device, name="good steps in a row")
        self._bad: Tensor | None = None
        self._unscaled: dict[int, Tensor] = {}  # by optimizer: whether its gradients are unusable

    def scale(self, outputs: Tensor) -> Tensor:
        """A loss enlarged."""
        return outputs * astype(self._scale, outputs.dtype) if self.enabled else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Gradients as they are, for example to clip them before ``step``."""
        if not self.enabled:
            return
        if id(optimizer) in self._unscaled:
            raise InvalidInput("the gradients of this optimizer have been unscaled since the last update")
        bad: Tensor | None = None
        with no_grad():
            inverse = 1.0 / self._scale
            for group in optimizer.param_groups:
                for param in group.params:
                    grad = param.grad
                    if grad is None:
                        continue
                    wide = grad if grad.dtype is DType.float64 else astype(grad, DType.float32)
                    # one sum over a gradient tells whether any element is not finite
                    found = logical_not(isfinite(reductions.sum(wide * 0.0)))
                    bad = found if bad is None else logical_or(bad, found)
                    param.grad = astype(wide * astype(inverse, wide.dtype), grad.dtype)
        if bad is None:
            raise InvalidInput("no parameter of this optimizer has a gradient")
        self._unscaled[id(optimizer)] = bad
        self._bad = bad if self._bad is None else logical_or(self._bad, bad)

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, which changes nothing where a gradient is not finite."""
        if not self.enabled:
            optimizer.step()
            return
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        optimizer.step(skip=self._unscaled[id(optimizer)])

    def update(self) -> None:
        """Choose the next scale; once for each step, at its end."""
        if not self.enabled:
            return
        if self._bad is None:
            raise InvalidInput("update comes after step")
        bad, self._bad = self._bad, None
        self._unscaled.clear()
        good = self._good + 1
        grows = good >= self.growth_interval
        larger = where(grows, self._scale * self.growth_factor, self._scale)
        self._scale.assign(where(bad, self._scale * self.backoff_factor, larger))
        self._good.assign(where(logical_or(bad, grows), 0, good))

    def get_scale(self) -> float:
        return float(self._scale) if self.enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale.value, "_growth_tracker": self._good.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._scale.assign(Tensor(state_dict["scale"], "float32", self._scale.device))
        self._good.assign(Tensor(state_dict["_growth_tracker"], "int64", self._good.device))


_OF_TENSORS = True
