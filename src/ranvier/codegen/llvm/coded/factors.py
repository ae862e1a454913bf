"""What makes weights of the sums of a group, in registers: scales, and what is added."""

from __future__ import annotations

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.coded.decode import Decoder
from ranvier.codegen.llvm.coded.numbers import Scaling
from ranvier.codegen.llvm.coded.places import Places


class Factors:
    """Reads them from where scales and zeros begin."""

    def __init__(self, fn: Fn, decoder: Decoder, places: Places, scaling: Scaling) -> None:
        self.fn, self.decoder, self.places, self.scaling = fn, decoder, places, scaling

    def of(self, scales: Val, zeros: Val, number: Val, groups: Val, group: Val, v: int = 0) -> tuple[Val, Val | None]:
        """Of a group of the vector ``v`` behind a number: its scales; and what is added to values before they are
        scaled, or (offsets, which have a middle) afterwards."""
        scaling, where = self.scaling, (number, groups, group)
        scale = self.decoder.scale(self.places.numbers(scales, *where, scaling.scale, v))
        if scaling.zero is None:
            return scale, None
        less = self.fn.neg(self.places.numbers(zeros, *where, scaling.zero, v))
        if scaling.middle is None:
            return scale, self.decoder.zero(less)
        return scale, self.fn.fma(scale, float(scaling.middle), less)
