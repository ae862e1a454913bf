"""Weight-only schemes that know the inputs of a layer: GPTQ and AWQ.

Both lessen the error of the layer's *output*. What they need of the inputs X is their second moment XᵀX, gathered
batch by batch; the output error of changed weights is then known without the inputs: tr(D·XᵀX·Dᵀ).
Weights are [out, in] here, as in PyTorch's Linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Array
from ranvier.quantize.integers import Integers
from ranvier.records import dataclass


class InputMoments:
    """What is kept of the inputs of a layer: second moments, and mean absolute values of channels."""

    def __init__(self, channels: int) -> None:
        self.second = np.zeros((channels, channels))
        self.absolute = np.zeros(channels)
        self.count = 0

    def update(self, inputs: Array) -> None:
        rows = np.asarray(inputs).reshape(-1, self.second.shape[0]).astype(np.float64)
        if not np.isfinite(rows).all():
            raise InvalidConfig("a sample holds numbers that are infinite or NaN")
        self.second += rows.T @ rows
        self.absolute += np.abs(rows).sum(axis=0)
        self.count += len(rows)

    @property
    def mean_absolute(self) -> Array:
        return self.absolute / max(1, self.count)

    def error(self, change: Array) -> float:
        """Mean squared error of an output when the weights change by this much."""
        change = change.astype(np.float64)
        return float(((change @ self.second) * change).sum()) / max(1, self.count) / len(change)


@dataclass(frozen=True)
class Gptq:
    """Rounds one input channel after the other and lets those still to come make up for the error (Frantar et al.,
    "GPTQ", 2023). ``reorder``: channels with the largest inputs come first (``desc_act``)."""

    bits: int = 4
    group: int = 128  # -1: one scale for each output channel
    symmetric: bool = True
    reorder: bool = False
    damping: float = 0.01  # of the mean of the diagonal
    fit: str = "mse"
    name: str = "gptq"

    def quantize(self, weights: Array, moments: InputMoments) -> Quantized:
        original = np.asarray(weights).astype(np.float64)
        inputs = original.shape[1]
        group = inputs if self.group == -1 else self.group
        scheme = Integers(self.bits, self.symmetric, "group", group, signed=False, fit=self.fit)
        plain = replace(scheme.quantize(original.astype(np.float32)), scheme=self.name)
        second = moments.second.copy()
        dead = np.diag(second) == 0
        second[dead, dead] = 1.0
        second[np.diag_indices(inputs)] += self.damping * float(np.mean(np.diag(second)))
        order = np.argsort(-np.diag(second), kind="stable") if self.reorder else np.arange(inputs)
        # with channels out of order a group's scale must be known before its first channel comes
        fixed = plain if self.reorder else None
        coded = self._rounded(original[:, order], second[np.ix_(order, order)], scheme, group, order, fixed)
        codes, scales, zeros = coded
        back = np.empty_like(codes)
        back[:, order] = codes
        found = replace(plain, codes=back, scales=scales, zeros=zeros)
        # it nearly always is; where a layer's inputs say nothing the plain one stays
        errors = [moments.error(each.dequantize() - original) for each in (found, plain)]
        return found if errors[0] < errors[1] else plain

    def _rounded(
        self, weights: Array, second: Array, scheme: Integers, group: int, order: Array, fixed: Quantized | None
    ) -> tuple[Array, Array, Array]:
        outputs, inputs = weights.shape
        left = weights.copy()
        inverse = upper_factor(second)
        groups = -(-inputs // group)
        scales = np.zeros((outputs, groups), scheme.scale_dtype.numpy)
        zeros = np.zeros((outputs, groups), np.uint8)
        if fixed is not None and fixed.zeros is not None:
            scales, zeros = fixed.scales, fixed.zeros
        codes = np.zeros(weights.shape, np.uint8)

        def nearest(k: int) -> Array:
            member = int(order[k]) // group
            if fixed is None and k % group == 0:
                span = scheme.quantize(left[:, k : k + group])
                assert span.zeros is not None
                scales[:, member], zeros[:, member] = span.scales[:, 0], span.zeros[:, 0]
            scale, zero = scales[:, member].astype(np.float64), zeros[:, member]
            codes[:, k] = scheme.codes(left[:, k], scale, zero)
            return (codes[:, k].astype(np.float64) - zero) * scale

        feed_back(left, inverse, nearest)
        return codes, scales, zeros


def feed_back(left: Array, factors: Array, nearest: Callable[[int], Array], block: int = 128) -> Array:
    """Round terms [..., outputs, terms] one after the other, each error spread over those still to come by the upper
    factors [..., terms, terms]: ``left`` is written over on the way. ``nearest(k)`` gives what its term k becomes.
    Terms beyond a block get the errors of all of it at once."""
    terms = left.shape[-1]
    made = np.empty_like(left)
    for start in range(0, terms, block):
        stop = min(start + block, terms)
        errors = np.zeros((*left.shape[:-1], stop - start))
        for k in range(start, stop):
            made[..., k] = nearest(k)
            error = (left[..., k] - made[..., k]) / factors[..., k, k, None]
            left[..., k:stop] -= error[..., None] * factors[..., None, k, k:stop]
            errors[..., k - start] = error
        left[..., stop:] -= errors @ factors[..., start:stop, stop:]
    return made


def upper_factor(second: Array) -> Array:
    """The upper Cholesky factor of the inverse; a matrix that is nearly singular gets more on its diagonal."""
    extra = 0.0
    mean = float(np.mean(np.diag(second)))
    for _ in range(8):
        try:
            damped = second + extra * np.eye(len(second))
            return np.linalg.cholesky(np.linalg.inv(damped)).T
        except np.linalg.LinAlgError:
            extra = max(10 * extra, 1e-3 * mean)
    raise InvalidConfig("the samples' second moments cannot be inverted; give more samples or more damping")


@dataclass(frozen=True)
class Awq:
    """Weights of channels with large inputs are made larger before rounding, and those inputs smaller by as much (Lin
    et al., "AWQ", 2023). The exponent of the scaling is searched, and how far ranges are cut."""

    bits: int = 4
    group: int = 128
    symmetric: bool = False
    steps: int = 20
    name: str = "awq"

    def quantize(self, weights: Array, moments: InputMoments) -> tuple[Quantized, Array]:
        """Codes of the scaled weights, and the factors by which the inputs are to be divided."""
        original = np.asarray(weights).astype(np.float64)
        group = original.shape[1] if self.group == -1 else self.group
        plain = Integers(self.bits, self.symmetric, "group", group, signed=False)
        best: tuple[float, Quantized, Array] | None = None
        for scheme in (plain, replace(plain, fit="mse")):
            for step in range(self.steps):
                factors = self._factors(moments, step / self.steps)
                coded = scheme.quantize((original * factors).astype(np.float32))
                error = moments.error(coded.dequantize() / factors - original)
                if best is None or error < best[0]:
                    best = (error, coded, factors)
        assert best is not None
        return replace(best[1], scheme=self.name), best[2].astype(np.float32)

    def _factors(self, moments: InputMoments, exponent: float) -> Array:
        powers = np.maximum(moments.mean_absolute, 1e-8) ** exponent
        factors = powers / np.sqrt(powers.max() * powers.min())
        bounded: Array = np.clip(factors, 1e-4, 1e4)
        return bounded
