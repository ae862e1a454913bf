"""What codes of few bits stand for, before they are scaled."""

from __future__ import annotations

from typing import Literal

from ranvier.records import dataclass

Kind = Literal["integers", "levels", "e4m3", "e5m2", "float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Coding:
    """Codes of 2, 4 or 8 bits; or floats of 16 or 32 as they are.

    "integers" stand for themselves less half their range, so that the middle is zero; "levels" for entries of a table
    (up to 4 bits), "e4m3" and "e5m2" for the float8 with those bits, all of which have to be finite. "float16",
    "bfloat16" and "float32" are no codes: kernels that pick weights while they run read them like others.
    """

    bits: int
    kind: Kind = "integers"
    levels: tuple[float, ...] = ()

    @property
    def per_word(self) -> int:
        """Codes in 32 bits."""
        return 32 // self.bits

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nothing(self) -> int:
        """The code that stands for zero."""
        if self.kind == "integers":
            return self.middle
        return self.levels.index(0.0) if self.kind == "levels" else 0

    @property
    def values(self) -> tuple[float, ...]:
        """What every code stands for, where there are few."""
        return self.levels or tuple(float(code - self.middle) for code in range(1 << self.bits))

    @property
    def whole(self) -> bool:
        """Whether codes stand for integers that are bytes, so that instructions for bytes multiply them."""
        if self.kind != "levels":
            return self.kind == "integers"
        return all(level == int(level) for level in self.levels) and self.reach < 1 << 7

    @property
    def least(self) -> int:
        """The smallest of those integers: bytes are counted from it on."""
        return -self.middle if self.kind == "integers" else int(min(self.levels, default=0))

    @property
    def reach(self) -> int:
        """How far the largest lies from it, at the most."""
        return (1 << self.bits) - 1 if self.kind == "integers" else int(max(self.levels)) - self.least

    @property
    def key(self) -> tuple[object, ...]:
        """What code depends on."""
        return self.bits, self.kind, self.levels
