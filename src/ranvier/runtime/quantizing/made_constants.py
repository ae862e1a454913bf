"""Constants that are made of a graph's own, where a layer is brought into another form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.graph.ir import Value
from ranvier.runtime.quantizing.sites import beside

Array = np.ndarray[Any, Any]


class MadeConstants:
    """Each once: layers that share weights share them still."""

    def __init__(self) -> None:
        self._made: dict[tuple[Value, object], Value] = {}

    def times(self, value: Value, factor: float) -> Value | None:
        """A constant times a factor, rounded once; None where it is none, or has numbers then that are not finite."""
        if factor == 1.0:
            return value
        if value.const is None or not math.isfinite(factor):
            return None
        with np.errstate(over="ignore"):
            product = (value.const.numpy().astype(np.float64) * factor).astype(np.float32)
        return self._constant(value, factor, product, "scaled") if np.isfinite(product).all() else None

    def matrix(self, value: Value) -> Value:
        """A batch of one matrix as that matrix."""
        assert value.const is not None
        return self._constant(value, "matrix", value.const.numpy().reshape(value.const.shape[-2:]), "matrix")

    def turned(self, value: Value) -> Value:
        """A matrix with rows and columns exchanged."""
        assert value.const is not None
        return self._constant(value, "turned", np.ascontiguousarray(value.const.numpy().T), "turned")

    def _constant(self, value: Value, what: object, array: Array, called: str) -> Value:
        if (value, what) not in self._made:
            self._made[value, what] = beside(value, array, called)
        return self._made[value, what]

    def sweep(self) -> None:
        """Take away those that nobody reads any more."""
        for value in reversed(dict.fromkeys((*(value for value, _ in self._made), *self._made.values()))):
            graph = value.owner
            if graph is not None and value.name in graph.constants and not value.uses and not value.is_graph_output:
                graph.remove_constant(value)
