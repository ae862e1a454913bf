"""What becomes of the elements of a window: the largest, or their mean.

For the largest, floats of 16 bits become integers of the same order with NaN of either sign above all others, by three
or four instructions, and back at the end. Of float32 it is found out beside the comparisons, for two at a time, whether
there is a NaN, unless the instruction that finds the larger of two tells. Means are sums in float32 (of doubles in
double) that are divided at the end.
"""

from __future__ import annotations

import functools
import math

from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.loops.fold import identity
from ranvier.dtypes import DType

_INFINITY = {DType.float16: 0x7C00, DType.bfloat16: 0x7F80}
LARGEST = frozenset({*_INFINITY, DType.float32, DType.int8, DType.uint8})
MEANS = frozenset({*_INFINITY, DType.float32, DType.float64})


class Largest:
    """``read``: as what elements of the image are read. ``held``: the type of those of a line."""

    def __init__(self, f: Fn, dtype: DType) -> None:
        self.f, self.dtype = f, dtype
        self.keyed = dtype in _INFINITY
        self.read = self.held = DType.int16 if self.keyed else dtype

    def taken(self, found: Val) -> Val:
        """Elements of the image, in an order that comparisons have."""
        return self.f.add(self._turned(found), self._shift) if self.keyed else found

    def given(self, value: Val) -> Val:
        return self._turned(self.f.sub(value, self._shift)) if self.keyed else value

    @property
    def _shift(self) -> int:
        return _INFINITY[self.dtype] + 1 - (1 << 15)

    def _turned(self, codes: Val) -> Val:
        """Floats below zero the other way round, as integers have it, or back."""
        f = self.f
        return f.xor(codes, f.and_(f.ashr(codes, 15), (1 << 15) - 1))

    def nothing(self) -> Val:
        """What changes no result."""
        return self.f.const(register_type(self.held), identity("max", self.held))

    def folded(self, values: list[Val]) -> Val:
        f = self.f
        if self.held is not DType.float32 or f.module.extremes:
            signed = self.dtype is not DType.uint8
            return functools.reduce(lambda a, b: f.max_(a, b, signed=signed), values)
        best = functools.reduce(f.quick_max, values)
        pairs = [(values[k], values[min(k + 1, len(values) - 1)]) for k in range(0, len(values), 2)]
        none = functools.reduce(f.or_, [f.cmp("uno", a, b) for a, b in pairs])
        return f.select(none, f.const(best.type, math.nan), best)


class Total:
    """The same for sums; what they are divided by is no matter of elements."""

    def __init__(self, f: Fn, dtype: DType) -> None:
        self.f = f
        self.read = dtype
        self.held = held_in(dtype)

    def taken(self, found: Val) -> Val:
        return found

    def given(self, value: Val) -> Val:
        return value

    def nothing(self) -> Val:
        return self.f.const(register_type(self.held), 0)

    def folded(self, values: list[Val]) -> Val:
        return functools.reduce(self.f.add, values)


def held_in(dtype: DType) -> DType:
    """What elements of this type are added in."""
    return dtype if dtype is DType.float64 else DType.float32


__all__ = ["LARGEST", "MEANS", "Largest", "Total", "held_in"]
