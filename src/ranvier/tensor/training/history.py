"""The numbers of a run as they came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class History:
    """Curves by name, each a list of (step, value), and how the run ended. ``history["loss"]`` are a curve's values."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.outcome = ""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.curves.setdefault(name, []).append((step, float(value)))

    def __getitem__(self, name: str) -> list[float]:
        return [value for _, value in self.curves[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.curves

    def last(self, name: str) -> float:
        return self.curves[name][-1][1]

    def best(self, name: str, better: str = "lower") -> float:
        return (min if better == "lower" else max)(self[name])

    def arrays(self) -> dict[str, Array]:
        """As tensors of a checkpoint."""
        return {f"history.{name}": np.array(curve, np.float64).reshape(-1, 2) for name, curve in self.curves.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, Array]) -> History:
        made = cls()
        for name, array in tensors.items():
            if name.startswith("history."):
                made.curves[name.removeprefix("history.")] = [(int(step), float(value)) for step, value in array]
        return made

    def __repr__(self) -> str:
        ends = ", ".join(f"{name} {curve[-1][1]:.4g}" for name, curve in self.curves.items() if curve)
        return f"History({ends}{f', {self.outcome}' if self.outcome else ''})"
