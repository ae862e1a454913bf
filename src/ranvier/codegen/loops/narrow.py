"""Index arithmetic in 32 bits, where the sizes at hand prove that nothing can overflow.

Twice as many lanes per register, gathers by short positions, divisions through floats: guards and addresses are several
times quicker so. Nearly all are provable; those that hold loaded values are not, and stay as they are.
"""

from __future__ import annotations

from ranvier.codegen.loops.ir import Const, Expr, Index, Op, Size
from ranvier.dtypes import DType

_LIMIT = 1 << 30
_Range = tuple[int, int]


class Narrower:
    """Rewrites the expressions of one nest; what they share stays shared."""

    def __init__(self, extents: tuple[int, ...]) -> None:
        self._extents = extents
        self._done: dict[int, tuple[Expr, _Range] | None] = {}

    def __call__(self, expr: Expr | None) -> Expr | None:
        """The expression with its int64 parts in int32, or as it was where that could overflow."""
        made = None if expr is None else self.visit(expr)
        return expr if made is None else made[0]

    def visit(self, expr: Expr) -> tuple[Expr, _Range] | None:
        """The expression in 32 bits and the range of its values; None where it cannot be had."""
        if id(expr) not in self._done:
            made = self._made(expr)
            inside = made is not None and made[1][0] > -_LIMIT and made[1][1] < _LIMIT
            self._done[id(expr)] = made if inside else None
        return self._done[id(expr)]

    def _made(self, expr: Expr) -> tuple[Expr, _Range] | None:
        if isinstance(expr, Const):
            if expr.dtype not in (DType.int64, DType.bool):
                return None
            value = int(expr.value)
            return (Const(value, DType.int32) if expr.dtype is DType.int64 else expr), (value, value)
        if isinstance(expr, Size):
            return Size(expr.value, DType.int32), (expr.value, expr.value)
        if isinstance(expr, Index):
            return Index(expr.axis, DType.int32), (0, max(0, self._extents[expr.axis] - 1))
        if not isinstance(expr, Op) or expr.dtype not in (DType.int64, DType.bool):
            return None
        found = [self.visit(a) for a in expr.args]
        args = [x for x in found if x is not None]
        if len(args) != len(found):
            return None
        reach = _reach(expr.name, [r for _, r in args])
        if reach is None:
            return None
        dtype = DType.int32 if expr.dtype is DType.int64 else expr.dtype
        return Op(expr.name, tuple(e for e, _ in args), dtype), reach


def _reach(name: str, args: list[_Range]) -> _Range | None:
    """The values an operation can have."""
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match name:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            corners = [x * y for x in a for y in b]
            return min(corners), max(corners)
        case "neg":
            return -a[1], -a[0]
        case "min":
            return min(a[0], b[0]), min(a[1], b[1])
        case "max":
            return max(a[0], b[0]), max(a[1], b[1])
        case "floordiv" | "div" if b[0] > 0:
            corners = [x // y for x in a for y in b]
            return min(corners), max(corners) + 1
        case "mod" if b[0] > 0:
            return 0, b[1] - 1
        case "where":
            return min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge" | "and" | "or" | "xor" | "not":
            return 0, 1
    return None
