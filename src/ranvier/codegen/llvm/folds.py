"""Accumulators of reductions: how a fold starts, takes a vector, and ends in one value."""

from __future__ import annotations

import math

from ranvier.codegen.llvm.builder import Fn, Val, size_of, vector
from ranvier.codegen.llvm.elements import is_signed, register_type
from ranvier.codegen.llvm.exprs import ARITHMETIC, float_extreme
from ranvier.codegen.loops.fold import identity, is_arg
from ranvier.codegen.loops.ir import Fold
from ranvier.dtypes import DType

_STEPS = {"sum": "add", "prod": "mul"}  # of numbers, one at a time or all lanes at once


class Accumulator:
    """A running fold per lane, in registers; half and bfloat accumulate in float and are rounded by the caller.

    ``places``: the type of positions, for folds that tell where something is."""

    def __init__(self, f: Fn, fold: Fold, dtype: DType, lanes: int, places: str = "i64") -> None:
        self.f = f
        self.fold = fold
        self.dtype = dtype  # of the values folded
        self.lanes = lanes
        kind = vector(register_type(dtype), lanes)
        self._identity = f.const(kind, identity(fold, dtype))
        self._best = f.var(kind, self._identity)
        # Whether there was a NaN is kept apart from the extreme of the rest: one instruction on the critical path.
        # Where the extreme is one by itself, it tells.
        watched = dtype.is_float and fold in ("max", "min") and not f.module.extremes
        self._nan = f.var(vector("i1", lanes), f.const(vector("i1", lanes), 0)) if watched else None
        self._places = places
        kind = vector(places, lanes)
        self._where = f.var(kind, f.const(kind, 0)) if is_arg(fold) else None

    def take(self, value: Val, mask: Val | None = None, position: Val | None = None) -> None:
        """Fold one more value per lane, where the mask is on."""
        f, best = self.f, self._best.get()
        if self._where is not None:
            assert position is not None
            better = self._better(value, best)
            if mask is not None:
                better = f.and_(better, mask)
            self._best.set(f.select(better, value, best))
            self._where.set(f.select(better, position, self._where.get()))
            return
        if mask is not None:
            value = f.select(mask, value, self._identity)
        if self._nan is not None:
            self._nan.set(f.or_(self._nan.get(), f.cmp("uno", value, value)))
            self._best.set(self._quick(value, best))
            return
        self._best.set(combine(f, self.fold, self.dtype, best, value))

    def _quick(self, value: Val, best: Val) -> Val:
        """The extreme of two, the best so far where the value is a NaN."""
        return self.f.quick_max(value, best) if self.fold == "max" else self.f.quick_min(value, best)

    def _better(self, value: Val, best: Val) -> Val:
        """Whether the value replaces the best so far; the first NaN (of …_last folds, the last) beats everything."""
        f = self.f
        large, last = self.fold.startswith("argmax"), self.fold.endswith("last")
        if not value.is_float:
            signed = "s" if is_signed(self.dtype) else "u"
            return f.cmp(signed + ("g" if large else "l") + ("e" if last else "t"), value, best)
        if last:
            return f.or_(f.cmp("oge" if large else "ole", value, best), f.cmp("uno", value, value))
        # beyond the best, or not to be compared with it because it is a NaN itself
        return f.and_(f.cmp("ugt" if large else "ult", value, best), f.cmp("ord", best, best))

    def merge(self, other: Accumulator) -> None:
        """Take in another accumulator of as many lanes, whose positions may lie anywhere."""
        f = self.f
        best, rival = self._best.get(), other._best.get()
        if self._nan is not None and other._nan is not None:
            self._nan.set(f.or_(self._nan.get(), other._nan.get()))
            self._best.set(self._quick(rival, best))
            return
        if self._where is None or other._where is None:
            self._best.set(combine(f, self.fold, self.dtype, best, rival))
            return
        here, there = self._where.get(), other._where.get()
        same = f.cmp("oeq" if best.is_float else "eq", best, rival)
        if best.is_float:
            same = f.or_(same, f.and_(f.cmp("uno", best, best), f.cmp("uno", rival, rival)))
        nearer = f.cmp("sgt" if self.fold.endswith("last") else "slt", there, here)
        better = f.select(same, nearer, self._better(rival, best))
        self._best.set(f.select(better, rival, best))
        self._where.set(f.select(better, there, here))

    def value(self) -> Val:
        """The fold per lane (the position of it in 64 bits, for arg… folds)."""
        if self._nan is not None:
            return self.f.select(self._nan.get(), self.f.const(self._best.type, math.nan), self._best.get())
        return self._best.get() if self._where is None else self.f.cast(self._where.get(), "i64")

    def across(self) -> Accumulator:
        """One accumulator of a single lane that holds the fold over all lanes."""
        f = self.f
        if self.lanes == 1:
            return self
        made = Accumulator(f, self.fold, self.dtype, 1, self._places)
        best = self._best.get()
        whole = self._folded(best)
        made._best.set(whole)
        if self._nan is not None and made._nan is not None:
            made._nan.set(f.reduce("or", self._nan.get()))
        if self._where is not None and made._where is not None:
            spread = f.splat(whole, self.lanes)
            same = f.cmp("oeq" if best.is_float else "eq", best, spread)
            if best.is_float:
                same = f.or_(same, f.cmp("uno", best, best))
            last = self.fold.endswith("last")
            most = (1 << (size_of(self._places) * 8 - 1)) - 1
            chosen = f.select(same, self._where.get(), f.const(self._where.type, -1 if last else most))
            made._where.set(f.reduce("smax" if last else "smin", chosen))
        return made

    def _folded(self, best: Val) -> Val:
        """One value of all lanes; floats' extremes by halving, as LLVM's own expansion also orders zeros."""
        if not (best.is_float and ("max" in self.fold or "min" in self.fold)):
            return self.f.reduce(self._reduction(), best)
        name = "max" if "max" in self.fold else "min"
        while best.lanes > 1:
            half = best.lanes // 2
            parts = [self.f.shuffle(best, None, range(at, at + half)) for at in (0, half)]
            if half == 1:
                parts = [self.f.extract(best, k) for k in range(2)]
            if self._nan is None:
                best = float_extreme(self.f, name, parts[0], parts[1])
            else:
                best = self._quick(parts[0], parts[1])
        return best

    def _reduction(self) -> str:
        if self.dtype is DType.bool:
            return "and" if self.fold in ("and", "prod", "min") else "or"
        if self.fold in _STEPS:
            return _STEPS[self.fold]
        extreme = "max" if "max" in self.fold else "min"
        return ("s" if is_signed(self.dtype) else "u") + extreme


def combine(f: Fn, fold: Fold, dtype: DType, a: Val, b: Val) -> Val:
    """One step of a fold that gives a value."""
    if dtype is DType.bool:
        return f.and_(a, b) if fold in ("and", "prod", "min") else f.or_(a, b)
    if fold in _STEPS:
        return ARITHMETIC[_STEPS[fold]](f, a, b)
    name = "max" if "max" in fold else "min"
    if a.is_float:
        return float_extreme(f, name, a, b)
    signed = is_signed(dtype)
    return f.max_(a, b, signed=signed) if name == "max" else f.min_(a, b, signed=signed)
