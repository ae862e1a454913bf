"""Expressions in canonical form, and what they vary with: the basis of keys and of hoisting."""

from __future__ import annotations

from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Op, Result, Scalar, Size
from ranvier.dtypes import DType
from ranvier.records import dataclass


@dataclass(frozen=True)
class Arg:
    """An operand as the code sees it."""

    dtype: DType
    varies: tuple[bool, ...]  # per axis: whether it moves along it
    # along the lane axis: "0" stays, "1" contiguous, "2" every second element is read, "s" any stride, "w" one that
    # needs 64 bits per step
    lane: str
    at: Expr | None
    guard: Expr | None
    other: Scalar
    written: bool


class Canon:
    """Expressions with equal parts shared, numbered in the order of first use; sizes become slots."""

    def __init__(self) -> None:
        self._table: dict[tuple[object, ...], Expr] = {}
        self._done: dict[int, tuple[Expr, Expr]] = {}
        self._sizes: dict[int, int] = {}
        self.sizes: list[int] = []
        self.number: dict[int, int] = {}  # identity of a canonical expression -> its number
        self.text: list[tuple[object, ...]] = []

    def __call__(self, expr: Expr) -> Expr:
        found = self._done.get(id(expr))
        if found is not None:
            return found[1]
        made = self._made(expr)
        self._done[id(expr)] = (expr, made)
        self._done[id(made)] = (made, made)
        return made

    def _made(self, expr: Expr) -> Expr:
        if isinstance(expr, Op):
            args = tuple(self(a) for a in expr.args)
            numbers = tuple(self.number[id(a)] for a in args)
            return self._shared((expr.name, expr.dtype.name, *numbers), Op(expr.name, args, expr.dtype))
        if isinstance(expr, Size):
            # by identity, not by value: two sizes that happen to be equal today must not make different code
            slot = self._sizes.setdefault(id(expr), len(self.sizes))
            if slot == len(self.sizes):
                self.sizes.append(expr.value)
            return self._shared(("size", slot, expr.dtype.name), Size(slot, expr.dtype))
        if isinstance(expr, Const):
            return self._shared(("const", repr(expr.value), expr.dtype.name), expr)
        if isinstance(expr, Load):
            return self._shared(("load", expr.operand, expr.dtype.name), expr)
        if isinstance(expr, Index):
            return self._shared(("index", expr.axis, expr.dtype.name), expr)
        assert isinstance(expr, Result)
        return self._shared(("result", expr.stage, expr.dtype.name), expr)

    def _shared(self, key: tuple[object, ...], expr: Expr) -> Expr:
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = expr
            self.number[id(found)] = len(self.text)
            self.text.append(key)
        return found


class Dependence:
    """What expressions vary with: axes as themselves, results of stages as -1 - stage."""

    def __init__(self, args: tuple[Arg, ...]) -> None:
        self._args = args
        self._known: dict[int, frozenset[int]] = {}

    def __call__(self, expr: Expr) -> frozenset[int]:
        found = self._known.get(id(expr))
        if found is None:
            found = self._known[id(expr)] = self._of(expr)
        return found

    def _of(self, expr: Expr) -> frozenset[int]:
        if isinstance(expr, Op):
            return frozenset().union(*(self(a) for a in expr.args))
        if isinstance(expr, Index):
            return frozenset({expr.axis})
        if isinstance(expr, Result):
            return frozenset({-1 - expr.stage})
        if isinstance(expr, Load):
            return self.operand(expr.operand)
        return frozenset()

    def operand(self, k: int) -> frozenset[int]:
        arg = self._args[k]
        found = frozenset(a for a, v in enumerate(arg.varies) if v)
        for extra in (arg.at, arg.guard):
            if extra is not None:
                found |= self(extra)
        return found
