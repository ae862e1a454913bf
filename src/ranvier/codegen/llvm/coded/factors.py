"""What makes weights of the sums of a group, in registers: scales, and what is added."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.coded.coupled import FACTOR
from ranvier.codegen.llvm.coded.decode import Decoder
from ranvier.codegen.llvm.coded.numbers import Scaling
from ranvier.codegen.llvm.coded.places import Places


class Factors:
    """Reads them from where scales and zeros begin."""

    def __init__(self, fn: Fn, decoder: Decoder, places: Places, scaling: Scaling) -> None:
        self.fn, self.decoder, self.places, self.scaling = fn, decoder, places, scaling

    def of(
        self, scales: Val, zeros: Val, number: Val, groups: Val, group: Val, v: int = 0, *, second: Val | None = None
    ) -> tuple[Val, Val | None]:  # fmt: skip
        """Of a group of the vector ``v`` behind a number: its scales; and what is added to values before they are
        scaled, or (offsets, which have a middle) afterwards. ``second``: which of two coupled vectors it is, where
        values are its own; else they are those of both."""
        scaling, where = self.scaling, (number, groups, group)
        scale = self.decoder.scale(self.places.numbers(scales, *where, scaling.scale, v))
        if second is not None:
            assert scaling.middle is None
            scale = self._smaller(scale, self.fn.cmp("eq", second, 0))
        if scaling.zero is None:
            return scale, None
        less = self.fn.neg(self.places.numbers(zeros, *where, scaling.zero, v))
        if second is not None:
            less = self._smaller(less, self.fn.cmp("ne", second, 0))
        if scaling.middle is None:
            return scale, self.decoder.zero(less)
        return scale, self.fn.fma(scale, float(scaling.middle), less)

    def _smaller(self, numbers: Val, which: Val) -> Val:
        """Numbers that are too large where they are those of one vector of two."""
        f = self.fn
        return numbers * f.splat(f.select(which, f.const("float", 1 / FACTOR), 1.0), numbers.lanes)
