"""What experts read on samples: of all rows those that visit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.ops.contrib import moe
from ranvier.quantize import InputMoments
from ranvier.runtime.quantizing.experts import Experts, Linear
from ranvier.runtime.quantizing.sites import named_in_errors

Array = np.ndarray[Any, Any]
Rows = dict[int, list[Array]]  # by expert, of each run that had any


class ExpertRows:
    """Keeps what layers read, and runs one at a time when its rows are asked for: they are few beside moments of each
    of its experts."""

    def __init__(self, layers: Sequence[Experts]) -> None:
        self._layers = list(layers)
        read = (value.name for layer in layers for value in (layer.data, layer.router))
        self._seen: dict[str, list[Array]] = {name: [] for name in read}
        self._last: tuple[str, dict[str, Rows]] = "", {}

    @property
    def names(self) -> list[str]:
        """Of the values to look at."""
        return list(self._seen)

    def look(self, name: str, x: Array) -> None:
        """A value in the next run."""
        if name in self._seen:
            self._seen[name].append(np.array(x))  # a session may use its memory again

    def moments(self, weight: str, expert: int) -> list[InputMoments]:
        """Of what these weights of an expert are multiplied by, for each layer that has them and rows that visit it."""
        found = []
        for layer in self._layers:
            own = [self._rows(layer)[name] for name, each in layer.linear.items() if each.weight.name == weight]
            if not any(expert in rows for rows in own):
                continue
            made = InputMoments(next(each.shape[2] for each in layer.linear.values() if each.weight.name == weight))
            with named_in_errors(layer.name, "what its experts read"):
                for array in (array for rows in own for array in rows.get(expert, ())):
                    made.update(array)
            found.append(made)
        return found

    def _rows(self, layer: Experts) -> dict[str, Rows]:
        """By the name of a linear layer."""
        if self._last[0] != layer.name:
            watched = {name: _Watched(each) for name, each in layer.linear.items()}
            layers = watched["fc1"], watched["fc2"], watched.get("fc3")
            for x, router in zip(self._seen[layer.data.name], self._seen[layer.router.name]):
                moe.mixed(x, router, layer.hidden, layers, layer.chosen, layer.normalizes)
            self._last = layer.name, {name: each.rows for name, each in watched.items()}
        return self._last[1]


class _Watched:
    """A linear layer that keeps what each expert's is given."""

    def __init__(self, linear: Linear) -> None:
        self._weights, self._added = linear.numbers, linear.added
        self.outputs = linear.shape[1]
        self.rows: Rows = {}

    def __call__(self, rows: Array, expert: int) -> Array:
        self.rows.setdefault(expert, []).append(rows)
        y: Array = rows @ self._weights[expert].T
        return y if self._added is None else y + self._added[expert]
