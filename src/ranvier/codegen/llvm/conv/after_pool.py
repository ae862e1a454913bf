"""Loops that pool and go on with the result, element by element, as a pool and loops for the rest.

A nest of windows makes what follows once for every result, and a window at a time. The kernel of pools takes lines as
wholes, so it is several times as quick, and what follows runs along whole vectors behind it.
"""

from __future__ import annotations

from ranvier.codegen.llvm.conv.pooling import Pooling, pooling
from ranvier.codegen.loops.ir import Expr, Final, Load, Map, Nest, Op, Operand, Reduce, Result
from ranvier.codegen.loops.normalize import Rewriter, leaves
from ranvier.codegen.storage import View, memory_order


def pool_and_rest(nest: Nest) -> tuple[Pooling | None, Nest | None]:
    """The pool that a nest is, or begins with; what is left to do then reads it in memory of its own."""
    pool = pooling(nest)
    if pool is not None:
        return pool, None
    fold, *counts, final = nest.stages
    if not isinstance(fold, Reduce) or not isinstance(final, Final) or len(final.stores) != 1:
        return None, None
    (stored, value), read = final.stores[0], _read(fold.value)
    if read is None:
        return None, None
    split = _Split(fold, len(nest.operands))
    value = split(value)
    if split.own is None or any(isinstance(leaf, Result) for leaf in leaves([value])):
        return None, None
    source = nest.operands[read]
    between = _between(source.view, nest.operands[stored].view.shape, split.own)
    windows = Reduce(fold.fold, _renumbered({read: 0})(fold.value), fold.dtype)
    stages = (windows, *counts, Final(((1, split.own),)))
    pool = pooling(Nest(nest.extents, (source, _whole(between, nest)), stages, nest.row, nest.label))
    rest = None if pool is None else _behind(nest, between, stored, value)
    return (None, None) if rest is None else (pool, rest)


def _read(value: Expr) -> int | None:
    """The operand that windows are of."""
    loads = {leaf.operand for leaf in leaves([value]) if isinstance(leaf, Load)}
    return loads.pop() if len(loads) == 1 else None


class _Split:
    """Puts a load in the place of what a pool gives by itself, the largest or the mean, and keeps the latter."""

    def __init__(self, fold: Reduce, operand: int) -> None:
        self.own: Expr | None = None
        self._result = Result(0, fold.dtype)
        self._load = Load(operand, fold.dtype)
        self._rewrite = Rewriter(self._leaf) if fold.fold == "max" else Rewriter(before=self._mean)

    def __call__(self, value: Expr) -> Expr:
        return self._rewrite(value)

    def _leaf(self, leaf: Expr) -> Expr:
        return self._found(leaf) if leaf == self._result else leaf

    def _mean(self, op: Op) -> Expr | None:
        return self._found(op) if op.name == "div" and op.args[0] == self._result else None

    def _found(self, own: Expr) -> Expr:
        self.own = own
        return self._load


def _between(source: View, shape: tuple[int, ...], own: Expr) -> View:
    """Memory for what the pool gives, in the order that its operand has; the largest is kept as the elements were."""
    order = memory_order(source.shape, source.strides)
    if isinstance(own, Result) and source.dtype is not source.element:
        return View.narrowed(source.element, source.dtype, shape, order)
    return View.temporary(own.dtype, shape, order)


def _whole(view: View, nest: Nest) -> Operand:
    """One element of the tensor for every window."""
    return Operand(view, (*view.strides, *(0 for _ in nest.row)))


def _behind(nest: Nest, between: View, stored: int, value: Expr) -> Nest | None:
    """The loops that store ``value``, in which the operand behind those of the nest is what lies between."""
    used = {leaf.operand for leaf in leaves([value]) if isinstance(leaf, Load)}
    operands = [*nest.operands, _whole(between, nest)]
    kept = sorted({*used, stored})
    if any(operands[k].at is not None or operands[k].guard is not None for k in kept):
        return None
    outer = len(nest.outer)
    if any(any(operands[k].strides[outer:]) for k in kept):
        return None
    shorter = tuple(Operand(o.view, o.strides[:outer], o.offset) for o in (operands[k] for k in kept))
    value = _renumbered({old: new for new, old in enumerate(kept)})(value)
    return Nest(nest.extents[:outer], shorter, (Map(((kept.index(stored), value),)),), label=nest.label)


def _renumbered(numbers: dict[int, int]) -> Rewriter:
    """Loads of operands that have other numbers now."""
    return Rewriter(lambda leaf: Load(numbers[leaf.operand], leaf.dtype) if isinstance(leaf, Load) else leaf)


__all__ = ["pool_and_rest"]
