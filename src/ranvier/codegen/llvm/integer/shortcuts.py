"""Codes made of codes by one multiplication for each, where that is known to give the same.

Between quantized operators stand scales: a code times its scale, plus another times its own, divided by the scale of
the result and rounded. One factor for each code would do, were it not for rounding: it may tip a number that lies
halfway between two codes, or nearly so, to the other side. But there are only 256 codes. All of them, or all pairs of
them, are tried here, and a shortcut is taken where it gives what the definition gives for every one. Factors a few
units in the last place away are tried too: some of them have all numbers next to a middle on the right side.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.llvm.code_forms import Codes, codes_as_numbers, codes_of
from ranvier.codegen.llvm.integer.reach import constant
from ranvier.codegen.loops.ir import Const, Expr, Load, Op, Operand
from ranvier.codegen.loops.normalize import Rewriter
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_RANGES = {DType.int8: (-128, 127), DType.uint8: (0, 255)}
_FLOAT = DType.float32
_NUDGES = range(-4, 5)  # units in the last place that factors are moved by
_ERROR = 4e-6  # of the largest terms: more than both ways can be off together
# Within these limits a product plus a number is exact in float64, so that rounding it to float32 is what the
# instruction that does both at once does.
_LEAST, _MOST = 2.0**-16, 2.0**12


@dataclass(frozen=True)
class _Code:
    """Whole numbers in an expression: a code, or a code less its zero point."""

    expr: Expr
    low: int
    high: int


@dataclass(frozen=True)
class _Line:
    """A weighted sum of codes and a number of the column, and how the definition computes it."""

    codes: tuple[_Code, ...]
    factors: tuple[float, ...]
    column: Array | None
    exactly: Callable[[dict[Expr, Array], Array], Array]  # of codes and numbers of columns


def shortened(value: Expr, operands: tuple[Operand, ...], columns: int | None) -> tuple[Expr, tuple[Operand, ...]]:
    """The same value with shortcuts, and the operands that these need beside the given ones."""
    return _Shortener(operands, columns).shortened(value)


class _Shortener:
    def __init__(self, operands: tuple[Operand, ...], columns: int | None) -> None:
        self.operands, self.columns = operands, columns

    def shortened(self, value: Expr) -> tuple[Expr, tuple[Operand, ...]]:
        return Rewriter(after=self.code_of)(value), self.operands

    def code_of(self, expr: Op) -> Expr:
        codes = codes_of(expr)
        number = None if codes is None else self.number(codes)
        if codes is None or number is None:
            return expr
        rounded = codes.rounded
        return Rewriter(before=lambda each: Op("round", (number,), _FLOAT) if each is rounded else None)(expr)

    def scalar(self, expr: Expr) -> np.float32 | None:
        """A float32 number, or a code that is made one, which is known already."""
        if isinstance(expr, Op) and expr.name == "cast" and expr.dtype is _FLOAT and expr.args[0].dtype in _RANGES:
            expr = expr.args[0]
        found = constant(expr, self.operands, self.columns)
        return np.float32(found[0]) if found is not None and found.size == 1 else None

    # -- what is computed -------------------------------------------------------------------------------------------

    def code(self, expr: Expr) -> _Code | None:
        made = codes_as_numbers(expr)
        if made is not None:
            zero = np.float32(0) if made.zero is None else self.scalar(made.zero)
            return None if zero is None else _Code(expr, made.low - int(zero), made.high - int(zero))
        if not isinstance(expr, Op) or expr.dtype is not _FLOAT:
            return None
        if expr.name == "sub":
            inner, zero = self.code(expr.args[0]), self.scalar(expr.args[1])
            if inner is None or zero is None or not float(zero).is_integer():
                return None
            return _Code(expr, inner.low - int(zero), inner.high - int(zero))
        bounds = _RANGES.get(expr.args[0].dtype) if expr.name == "cast" and isinstance(expr.args[0], Load) else None
        return None if bounds is None else _Code(expr, *bounds)

    def line(self, expr: Expr) -> _Line | None:
        if isinstance(expr, Load) and expr.dtype is _FLOAT:
            known = constant(expr, self.operands, self.columns)
            if known is None or known.size != self.columns:
                return None
            return _Line((), (), known, lambda _, column: column)
        if not isinstance(expr, Op) or expr.dtype is not _FLOAT:
            return None
        if expr.name in ("mul", "div", "quotient"):
            factor = self.scalar(expr.args[1])
            if factor is None or not np.isfinite(factor) or factor == 0:
                return None
            code = self.code(expr.args[0]) if expr.name == "mul" else None
            if code is not None:
                at = code.expr
                return _Line((code,), (float(factor),), None, lambda env, _: env[at] * factor)
            inner = self.line(expr.args[0]) if expr.name != "mul" else None
            if inner is None or inner.column is not None:
                return None
            below = inner.exactly
            factors = tuple(each / float(factor) for each in inner.factors)
            return _Line(inner.codes, factors, None, lambda env, column: below(env, column) / factor)
        if expr.name != "add":
            return None
        a, b = self.line(expr.args[0]), self.line(expr.args[1])
        if a is None or b is None or (a.column is not None and b.column is not None):
            return None
        column = b.column if a.column is None else a.column
        left, right = a.exactly, b.exactly
        both = (*a.codes, *b.codes)
        if len({code.expr for code in both}) < len(both) or len(both) + (column is not None) > 2:
            return None
        return _Line(both, a.factors + b.factors, column, lambda env, column: left(env, column) + right(env, column))

    # -- what it becomes --------------------------------------------------------------------------------------------

    def number(self, codes: Codes) -> Expr | None:
        """A shorter way to the number that is rounded."""
        quotient = codes.number
        if not (isinstance(quotient, Op) and quotient.name == "quotient"):
            return None
        body, scale = quotient.args[0], self.scalar(quotient.args[1])
        zero = np.float32(0) if codes.zero is None else self.scalar(codes.zero)
        if scale is None or zero is None or not np.isfinite(scale) or scale <= 0:
            return None
        cut = isinstance(body, Op) and body.name == "max" and body.args[1] == Const(0, _FLOAT)
        line = self.line(body.args[0] if isinstance(body, Op) and cut else body)
        if line is None or not line.codes:
            return None
        tried = _Trial.of(line, float(scale), cut, codes.low - int(zero), codes.high - int(zero))
        made = None if tried is None else self.emitted(line, tried)
        return Op("max", (made, Const(0, _FLOAT)), _FLOAT) if made is not None and cut else made

    def emitted(self, line: _Line, tried: _Trial) -> Expr | None:
        first = line.codes[0].expr
        if line.column is not None:
            found = tried.with_column()
            if found is None:
                return None
            factor, column = found
            return Op("fma", (first, self.given(factor), self.given(column[tried.which])), _FLOAT)
        if len(line.codes) == 1:
            single = tried.single()
            return None if single is None else Op("mul", (first, self.given(single)), _FLOAT)
        pair = tried.pair()
        if pair is None:
            return None
        other = Op("mul", (line.codes[1].expr, self.given(pair[1])), _FLOAT)
        return Op("fma", (first, self.given(pair[0]), other), _FLOAT)

    def given(self, numbers: Array | np.float32) -> Load:
        """A new operand: one number, or one for every column."""
        array = np.atleast_1d(np.asarray(numbers, np.float32))
        strides = (0, 0, 1 if isinstance(numbers, np.ndarray) and numbers.ndim else 0)
        self.operands = (*self.operands, Operand(View.constant(array, _FLOAT), strides))
        return Load(len(self.operands) - 1, _FLOAT)


@dataclass(frozen=True)
class _Trial:
    """Codes next to a middle, the only ones for which two ways may differ, and what the definition makes of them."""

    first: Array  # codes …
    other: Array  # … and the second ones, or which number of the column
    truth: Array
    factors: tuple[float, ...]  # as they would be without rounding
    column: Array  # numbers of columns, each once
    which: Array  # … and where they stand
    cut: bool
    low: int
    high: int

    @classmethod
    def of(cls, line: _Line, scale: float, cut: bool, low: int, high: int) -> _Trial | None:
        grids = [np.arange(code.low, code.high + 1).astype(np.float32) for code in line.codes]
        column, which = np.zeros(1, np.float32), np.zeros(1, np.int64)
        if line.column is not None:
            column, which = np.unique(line.column, return_inverse=True)
        beside = grids[1] if len(grids) > 1 else column
        grid = np.ix_(grids[0], beside)
        factors = tuple(factor / scale for factor in line.factors)
        terms = [np.float32(factor) * axis for factor, axis in zip(factors, grid)]
        terms += [] if line.column is None else [grid[1] / np.float32(scale)]
        most = sum(float(np.abs(term).max()) for term in terms)
        if not most < _MOST or any(not _LEAST < abs(factor) < _MOST for factor in factors):
            return None
        number = functools.reduce(np.add, terms)  # for every code and what stands beside it
        places = np.flatnonzero(_from_whole(number) > 0.5 - _ERROR * most)
        near = number.reshape(-1)[places]
        matters = (near > max(low, -1 if cut else low) - 1) & (near < high + 1)
        rows, columns = np.divmod(places[matters], beside.size)
        env = {code.expr: axis.reshape(-1)[at] for code, axis, at in zip(line.codes, grid, (rows, columns))}
        exact = line.exactly(env, beside[columns])
        quotient = (np.maximum(exact, np.float32(0)) if cut else exact) / np.float32(scale)
        truth = np.clip(np.rint(quotient), low, high)
        other = columns if line.column is not None else beside[columns]
        by_scale = (column / np.float32(scale)).astype(np.float32)
        return cls(grids[0][rows], other, truth, factors, by_scale, which, cut, low, high)

    def agrees(self, number: Array) -> Array:
        """Where a number becomes the right code."""
        found = np.maximum(number, np.float32(0)) if self.cut else number
        same: Array = np.clip(np.rint(found), self.low, self.high) == self.truth
        return same

    def single(self) -> np.float32 | None:
        tries = (_moved(self.factors[0], by) for by in _by_size(1))
        return next((a for a in tries if self.agrees(self.first * a).all()), None)

    def pair(self) -> tuple[np.float32, np.float32] | None:
        for nudges in _by_size(2):
            a, b = (_moved(factor, (by,)) for factor, by in zip(self.factors, nudges))
            if self.agrees(_fused(self.first, a, self.other * b)).all():
                return a, b
        return None

    def with_column(self) -> tuple[np.float32, Array] | None:
        """A factor, and the numbers of columns that go with it."""
        tiny = (self.column != 0) & (np.abs(self.column) < _LEAST)
        if tiny.any():
            return None
        for nudges in _by_size(1):
            a = _moved(self.factors[0], nudges)
            best, missing = self.column.copy(), np.ones(self.column.size, bool)
            for (by,) in _by_size(1):
                moved = (self.column + by * np.spacing(np.abs(self.column))).astype(np.float32)
                wrong = ~self.agrees(_fused(self.first, a, moved[self.other]))
                right = missing.copy()
                right[self.other[wrong]] = False
                best[right], missing = moved[right], missing & ~right
                if not missing.any():
                    return a, best
        return None


def _from_whole(number: Array) -> Array:
    """How far numbers are from the nearest whole ones."""
    apart = np.rint(number)
    np.subtract(number, apart, out=apart)
    return np.abs(apart, out=apart)


@functools.cache
def _by_size(count: int) -> list[tuple[int, ...]]:
    """What to move so many factors by, one or two: the nearest first."""
    return sorted(itertools.product(_NUDGES, repeat=count), key=lambda nudges: sum(map(abs, nudges)))


def _moved(factor: float, by: tuple[int, ...]) -> np.float32:
    near = np.float32(factor)
    return np.float32(near + by[0] * np.spacing(np.abs(near)))


def _fused(a: Array, b: np.float32, c: Array) -> Array:
    """``a · b + c``, rounded once."""
    made: Array = (a.astype(np.float64) * np.float64(b) + c.astype(np.float64)).astype(np.float32)
    return made
