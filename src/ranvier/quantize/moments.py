"""What weight-only schemes that look at a layer's inputs know of them, and how many weights share a scale there.

GPTQ and AWQ lessen the error of the layer's *output*. What they need of the inputs X is their second moment XᵀX,
gathered batch by batch; the output error of changed weights is then known without the inputs: tr(D·XᵀX·Dᵀ).
Weights are [out, in] here, as in PyTorch's Linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, ShapeMismatch
from ranvier.quantize.blocks import Array
from ranvier.quantize.numbers import real_numbers
from ranvier.rules import Rule, Whole


class InputMoments:
    """What is kept of the inputs of a layer: second moments, and mean absolute values of channels."""

    def __init__(self, channels: int) -> None:
        if channels < 1:
            raise InvalidConfig(f"a layer reads at least one channel, got {channels}")
        self.second = np.zeros((channels, channels))
        self.absolute = np.zeros(channels)
        self.count = 0

    def update(self, inputs: Array) -> None:
        given = np.asarray(inputs)
        if given.shape[-1:] != self.absolute.shape:
            raise ShapeMismatch(f"inputs [..., {len(self.absolute)}] were expected, got {list(given.shape)}")
        rows = given.reshape(-1, len(self.absolute)).astype(np.float64)
        if not np.isfinite(rows).all():
            raise InvalidConfig("a sample holds numbers that are infinite or NaN")
        self.second += rows.T @ rows
        self.absolute += np.abs(rows).sum(axis=0)
        self.count += len(rows)

    @classmethod
    def joined(cls, parts: Sequence[InputMoments]) -> InputMoments:
        """Of all that several layers read which share their weights."""
        if len(parts) == 1:
            return parts[0]
        made = cls(len(parts[0].absolute))
        for part in parts:
            made.second += part.second
            made.absolute += part.absolute
            made.count += part.count
        return made

    def damped(self, part: float) -> InputMoments:
        """As if every channel were read a little everywhere, by itself: so much of what they have on average. Few
        samples leave channels out that others have."""
        made = type(self)(len(self.absolute))
        made.count = self.count
        made.absolute = self.absolute + part * self.absolute.mean()
        made.second = self.second + part * float(np.mean(np.diag(self.second))) * np.eye(len(self.absolute))
        return made

    @property
    def mean_absolute(self) -> Array:
        return self.absolute / max(1, self.count)

    def error(self, change: Array) -> float:
        """Mean squared error of an output when the weights change by this much."""
        change = change.astype(np.float64)
        return float(((change @ self.second) * change).sum()) / max(1, self.count) / max(1, len(change))

    def weights(self, weights: Array) -> tuple[Array, DType]:
        """Weights [out, in] of a layer that reads such inputs, as float64, and the type to read them back in."""
        values, dtype = real_numbers(weights)
        if values.ndim != 2 or values.shape[1] != len(self.absolute):
            raise ShapeMismatch(f"weights [out, {len(self.absolute)}] were expected, got {list(values.shape)}")
        return values, dtype


class Damping(Rule):
    """A part of the mean of second moments' diagonal."""

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"must be a number of 0 or more, got {value!r}")
        return float(value)


class GroupOrRow(Whole):
    """How many weights of a row share a scale; -1: all of them."""

    def check(self, value: Any) -> Any:
        return value if value == -1 else super().check(value)

    def _range(self) -> str:
        return f"{super()._range()}, or -1"
