"""What the guard of a pool's loops says: between which bounds the elements of windows lie, whatever form it has."""

from __future__ import annotations

from ranvier.codegen.loops.ir import Const, Expr, Index, Op, Size

_Sum = dict[int, int]  # how often each axis is in a sum; under -1 what is added to it
_NUMBER = -1
Bounds = dict[int, tuple[int, int]]


def bounds(guard: Expr | None, steps: list[tuple[int, int]]) -> Bounds | None:
    """Of rows (0) and columns (1), as far as they are bounded, the first place and the one behind the last; None where
    something else is said. Places are counted from where the first window begins; ``steps`` between windows and between
    the elements of one are given for both."""
    lows: dict[int, int] = {}
    highs: dict[int, int] = {}
    parts = [] if guard is None else [guard]
    while parts:
        each = parts.pop()
        if not isinstance(each, Op):
            return None
        if each.name == "and":
            parts += each.args
            continue
        a, b = (_sum(arg) for arg in (each.args[::-1] if each.name in ("le", "gt") else each.args))
        if each.name not in ("ge", "le", "lt", "gt") or a is None or b is None:
            return None
        found = _added(a, b, -1)
        number = -found.pop(_NUMBER, 0)
        axes = [k for k, (window, tap) in enumerate(steps) if found == {2 + k: window, 4 + k: tap}]
        into = lows if each.name in ("ge", "le") else highs
        if len(axes) != 1 or axes[0] in into:
            return None
        into[axes[0]] = number
    return {k: (lows[k], highs[k]) for k in sorted(lows)} if lows.keys() == highs.keys() else None


def _sum(expr: Expr) -> _Sum | None:
    """An expression of positions and sizes as a sum; None where it is none."""
    if isinstance(expr, Index):
        return {expr.axis: 1}
    if isinstance(expr, Size | Const):
        return {_NUMBER: int(expr.value)}
    if not isinstance(expr, Op) or expr.name not in ("add", "sub", "mul"):
        return None
    a, b = (_sum(arg) for arg in expr.args)
    if a is None or b is None:
        return None
    if expr.name != "mul":
        return _added(a, b, 1 if expr.name == "add" else -1)
    if set(a) == {_NUMBER}:
        a, b = b, a
    return _added({}, a, b[_NUMBER]) if set(b) == {_NUMBER} else None


def _added(a: _Sum, b: _Sum, times: int) -> _Sum:
    return {k: a.get(k, 0) + times * b.get(k, 0) for k in a.keys() | b.keys()}


__all__ = ["Bounds", "bounds"]
