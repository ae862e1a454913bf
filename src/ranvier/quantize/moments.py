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
from ranvier.quantize.numbers import any_numbers, real_numbers
from ranvier.rules import Rule, Whole

_DOUBTS = 2.0  # times as much as moments by themselves are nearest with: a layer's results are, on other samples
_MOST_DOUBT = 1000.0  # moments that say nothing
_LEAST_DAMPING = 0.01  # however sure they are


class InputMoments:
    """What is kept of the inputs of a layer: second moments, and mean absolute values of channels.

    Each update is one draw of what the layer may read: how they differ says how far to trust them (``doubt``).
    """

    def __init__(self, channels: int) -> None:
        if isinstance(channels, bool) or not isinstance(channels, int | np.integer) or channels < 1:
            raise InvalidConfig(f"a layer reads at least one channel, got {channels!r}")
        self.second = np.zeros((channels, channels))
        self.absolute = np.zeros(channels)
        self.count = 0
        self._squares = 0  # of numbers of rows in draws
        self._spread = 0.0  # squared distances of draws' mean moments from those of all, for each row

    def update(self, inputs: Array) -> None:
        given, _ = any_numbers(inputs)
        if given.shape[-1:] != self.absolute.shape:
            raise ShapeMismatch(f"inputs [..., {len(self.absolute)}] were expected, got {list(given.shape)}")
        rows = given.reshape(-1, len(self.absolute)).astype(np.float64)
        if not np.isfinite(rows).all():
            raise InvalidConfig("a sample holds numbers that are infinite or NaN")
        if not len(rows):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            second = rows.T @ rows
        if not np.isfinite(second).all():
            raise InvalidConfig("a sample holds numbers whose squares are beyond the range of float64")
        if self.count:
            apart = np.square(second / len(rows) - self.second / self.count).sum()
            self._spread += float(apart) * len(rows) * self.count / (len(rows) + self.count)
        self.second += second
        self.absolute += np.abs(rows).sum(axis=0)
        self.count += len(rows)
        self._squares += len(rows) ** 2

    @classmethod
    def joined(cls, parts: Sequence[InputMoments]) -> InputMoments:
        """Of all that several layers read which share their weights."""
        if len(parts) == 1:
            return parts[0]
        channels = sorted({len(part.absolute) for part in parts})
        if len(channels) != 1:
            raise ShapeMismatch(f"layers that share weights read as many channels as each other, got {channels}")
        made = cls(channels[0])
        for part in parts:
            made.second += part.second
            made.absolute += part.absolute
            made.count += part.count
            made._squares += part._squares
            made._spread += part._spread  # what layers differ by is no doubt
        return made

    @property
    def doubt(self) -> float:
        """Damping by which moments are nearest to those of other samples, as far as these tell: so much as their mean
        may be off, for what it has beside that of channels that are alike and have nothing to do with each other
        (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004). Of one draw
        nobody knows what others are like: fewer rows than channels leave directions out, and that is all that counts.
        """
        channels = len(self.absolute)
        draws = self.count**2 / max(1, self._squares)
        if draws <= 1:
            return channels / max(1, self.count)
        mean = self.second / self.count
        told = float(np.square(mean).sum()) - float(np.trace(mean)) ** 2 / channels
        off = self._spread / self.count / (draws - 1)
        return min(_MOST_DOUBT, _DOUBTS * off / max(told - off, off / _MOST_DOUBT, np.finfo(float).tiny))

    def damped(self, part: float | None) -> InputMoments:
        """As if every channel were read a little everywhere, by itself: so much of what they have on average, by
        default what samples leave in doubt. Few of them leave channels out that others have. Where nothing was read
        at all, channels are alike."""
        part = max(_LEAST_DAMPING, self.doubt) if part is None else part
        made = type(self)(len(self.absolute))
        made.count = self.count
        made.absolute = self.absolute + part * self.absolute.mean()
        own = float(np.mean(np.diag(self.second))) or 1.0
        made.second = self.second + part * own * np.eye(len(self.absolute))
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


def sampled(moments: Any, name: str) -> InputMoments:
    """Moments that samples were shown to, or an error that says what is missing."""
    if not isinstance(moments, InputMoments):
        raise InvalidConfig(
            f"{name} needs samples of what the layer reads: InputMoments(channels) that update(inputs) showed some, "
            f"not {type(moments).__name__}"
        )
    if not moments.count:
        raise InvalidConfig(
            f"{name}: these InputMoments have seen no sample; show them some by update(inputs), or use Integers, "
            "which needs none"
        )
    return moments


class Damping(Rule):
    """A part of the mean of second moments' diagonal; None: what samples leave in doubt."""

    def check(self, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"must be a number of 0 or more, got {value!r}")
        return float(value)


class GroupOrRow(Whole):
    """How many weights of a row share a scale; -1: all of them."""

    def check(self, value: Any) -> Any:
        return value if value == -1 else super().check(value)

    def _range(self) -> str:
        return f"{super()._range()}, or -1"
