"""Scales from numbers to places on a canvas, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps ``low … high`` to ``start … end``; logarithmic or linear."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def inside(self, value: float) -> bool:
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)

    def ticks(self) -> Iterator[float]:
        """Round numbers within the scale: about six on a linear one, 1-2-5 or powers of ten on a logarithmic one."""
        if self.log:
            decades = math.log10(self.high / self.low)
            steps = (1,) if decades > 4 else (1, 3) if decades > 2.5 else (1, 2, 5)
            for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
                yield from (v for k in steps if self.inside(v := k * 10.0**power))
            return
        step = round_step((self.high - self.low) / 6)
        first = math.ceil(self.low / step - 1e-9)
        for k in range(first, math.floor(self.high / step + 1e-9) + 1):
            yield k * step


def round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, near a number."""
    power = 10.0 ** math.floor(math.log10(about)) if about > 0 else 1.0
    return next((k * power for k in (1, 2, 5) if k * power >= about * 0.99), 10 * power)


def number_text(value: float) -> str:
    """``0.001``, ``0.5``, ``20``, ``5,000``."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.0e}"
