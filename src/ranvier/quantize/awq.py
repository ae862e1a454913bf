"""AWQ: weights of channels with large inputs are made larger before rounding, and those inputs smaller by as much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import ClassVar

import numpy as np

from ranvier.quantize.base import Quantized
from ranvier.quantize.blocks import Array
from ranvier.quantize.integers import Integers
from ranvier.quantize.moments import Damping, GroupOrRow, InputMoments, sampled
from ranvier.records import dataclass
from ranvier.rules import Checked, Flag, Rule, Whole

_Tried = tuple[float, float, Quantized, Array]  # the error, the exponent, and what came of it
_MOST = float(np.finfo(np.float32).max)
_CUT = 3  # exponents with which ranges are cut


@dataclass(frozen=True)
class Awq(Checked):
    """As Lin et al. have it ("AWQ", 2023): the exponent of the scaling is searched, and whether ranges are cut."""

    bits: int = 4
    group: int = 128
    symmetric: bool = False
    steps: int = 20
    damping: float | None = None  # of the mean of the diagonal; None: what samples leave in doubt, 0.01 at least

    RULES: ClassVar[Mapping[str, Rule]] = {
        "bits": Whole(2, 8),
        "group": GroupOrRow(1),
        "symmetric": Flag(),
        "steps": Whole(1),
        "damping": Damping(),
    }
    name: ClassVar[str] = "awq"

    def quantize(self, weights: Array, moments: InputMoments) -> tuple[Quantized, Array]:
        """Codes of the scaled weights, and the factors by which the inputs are to be divided."""
        original, dtype = sampled(moments, "Awq").weights(weights)
        group = original.shape[1] if self.group == -1 else self.group
        plain = Integers(self.bits, self.symmetric, "group", group, signed=False)
        moments = moments.damped(self.damping)

        def tried(scheme: Integers, exponent: float) -> _Tried | None:
            factors = self._factors(moments, exponent)
            scaled = original * factors
            if np.abs(scaled).max(initial=0.0) > _MOST:
                return None  # weights as large as these cannot be made larger
            # as they will be read: a type of 16 bits may not reach so far, nor tell small ones apart
            coded = replace(scheme.quantize(scaled.astype(np.float32)), scheme=self.name, dtype=dtype)
            return moments.error(coded.dequantize() / factors - original), exponent, coded, factors

        every = (tried(plain, step / self.steps) for step in range(self.steps))
        found = sorted((each for each in every if each is not None), key=itemgetter(0))
        # to find how far ranges are cut takes long; what is best without is nearly always best with it, and without
        # factors these are the nearest codes, which nothing else may be worse than
        exponents = dict.fromkeys([*(exponent for _, exponent, _, _ in found[:_CUT]), 0.0])
        cut = (tried(replace(plain, fit="mse"), exponent) for exponent in exponents)
        found += [each for each in cut if each is not None]
        _, _, coded, factors = min(found, key=itemgetter(0))
        return coded, factors.astype(np.float32)

    def _factors(self, moments: InputMoments, exponent: float) -> Array:
        means = moments.mean_absolute
        powers = np.maximum(means, 1e-8 * float(means.max()) or 1.0) ** exponent
        factors = powers / np.sqrt(powers.max() * powers.min())
        bounded: Array = np.clip(factors, 1e-4, 1e4)
        return bounded
