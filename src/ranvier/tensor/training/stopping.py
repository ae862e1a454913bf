"""Ending a run when it no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ranvier.errors import InvalidConfig, nearest


class EarlyStop:
    """Stops when a quantity has not become better for ``patience`` looks in a row.

    ``better``: "lower" or "higher"; None takes "lower" for losses and errors, "higher" for everything else.
    ``restore_best``: the model ends with the weights it had at its best.
    """

    def __init__(
        self,
        quantity: str = "validation_loss",
        *,
        patience: int = 5,
        least: float = 0.0,
        better: str | None = None,
        restore_best: bool = True,
    ) -> None:
        self.quantity = quantity
        self.patience = patience
        self.least = least
        lower = quantity.endswith(("loss", "error", "mse", "mae", "perplexity"))
        self.better = better or ("lower" if lower else "higher")
        if self.better not in ("lower", "higher"):
            raise InvalidConfig(f"better is 'lower' or 'higher', not {better!r}")
        self.restore_best = restore_best
        self.best = math.inf if self.better == "lower" else -math.inf
        self.without = 0  # looks since it was best

    def look(self, values: Mapping[str, float]) -> bool:
        """Take note of new values; True where they are the best so far."""
        if self.quantity not in values:
            raise InvalidConfig(f"there is no {self.quantity!r} to stop by{nearest(self.quantity, values)}")
        value = values[self.quantity]
        gain = self.best - value if self.better == "lower" else value - self.best
        if gain > self.least:
            self.best, self.without = value, 0
            return True
        self.without += 1
        return False

    @property
    def due(self) -> bool:
        return self.without >= self.patience

    def state(self) -> dict[str, Any]:
        return {"best": self.best if math.isfinite(self.best) else None, "without": self.without}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["best"] is not None:
            self.best = float(state["best"])
        self.without = int(state["without"])
