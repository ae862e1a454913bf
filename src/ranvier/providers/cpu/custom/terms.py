"""Scalar expressions of the loop IR, written with Python's operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.loops.ir import OPERATIONS, Const, Expr, Op
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, nearest

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"})
_LOGICAL = frozenset({"and", "or", "xor", "not"})
_OF_INTEGERS = {"and": "bitand", "or": "bitor", "xor": "bitxor", "not": "bitnot"}
_OF_FLOATS = (
    "reciprocal sqrt rsqrt floor ceil trunc round exp expm1 log log1p tanh sigmoid erf softplus sin cos tan asin acos"
    " atan sinh cosh asinh acosh atanh fma atan2 isnan isinf"
)
_ONLY_FLOATS = frozenset(_OF_FLOATS.split())


class Term:
    """A value at every point of the loops; operators make further terms. Numbers take the other operand's type."""

    __slots__ = ("_expr",)
    __array_priority__ = 1000  # a NumPy number on the left leaves the operation to this class

    def __init__(self, expr: Expr) -> None:
        self._expr = expr

    @property
    def expr(self) -> Expr:
        return self._expr

    @property
    def dtype(self) -> DType:
        return self.expr.dtype

    def cast(self, dtype: DType) -> Term:
        """The value as another element type, as NumPy's ``astype`` makes it."""
        return self if dtype is self.dtype else Term(Op("cast", (self.expr,), dtype))

    def __add__(self, other: Any) -> Term:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Term:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Term:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Term:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Term:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Term:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Term:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Term:
        return apply("div", other, self)

    def __floordiv__(self, other: Any) -> Term:
        return apply("floordiv", self, other)

    def __mod__(self, other: Any) -> Term:
        return apply("mod", self, other)

    def __pow__(self, other: Any) -> Term:
        return apply("pow", self, other)

    def __neg__(self) -> Term:
        return apply("neg", self)

    def __abs__(self) -> Term:
        return apply("abs", self)

    def __and__(self, other: Any) -> Term:
        return apply("and", self, other)

    def __or__(self, other: Any) -> Term:
        return apply("or", self, other)

    def __xor__(self, other: Any) -> Term:
        return apply("xor", self, other)

    def __invert__(self) -> Term:
        return apply("not", self)

    def __lt__(self, other: Any) -> Term:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Term:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Term:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Term:
        return apply("ge", self, other)

    def __eq__(self, other: Any) -> Term:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: Any) -> Term:  # type: ignore[override]
        return apply("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise InvalidConfig("a term has a value at every point of the loops, none while they are written; use where()")


def apply(name: str, *operands: Any) -> Term:
    """An operation of the loop IR on terms and numbers of one element type."""
    if name not in OPERATIONS or name in ("cast", "bits"):
        raise InvalidConfig(f"the loops have no operation {name!r}{nearest(name, OPERATIONS)}")
    if len(operands) != OPERATIONS[name]:
        raise InvalidConfig(f"{name} takes {OPERATIONS[name]} operands, got {len(operands)}")
    if name == "where":
        return _where(*operands)
    dtype = _common(name, operands)
    if name in _LOGICAL and dtype is not DType.bool:
        name = _OF_INTEGERS[name]
    if name in ("bitand", "bitor", "bitxor", "bitnot", "shl", "shr", "popcount") and not dtype.is_integer:
        raise InvalidConfig(f"{name} works on integers, got {dtype}")
    if name in _ONLY_FLOATS and not dtype.is_float:
        raise InvalidConfig(f"{name} works on floating-point numbers, got {dtype}; cast it")
    made = tuple(_expr(operand, dtype) for operand in operands)
    return Term(Op(name, made, DType.bool if name in _COMPARISONS else dtype))


def _where(condition: Any, yes: Any, no: Any) -> Term:
    if not isinstance(condition, Term) or condition.dtype is not DType.bool:
        raise InvalidConfig("where takes a condition, which is a term of bool")
    dtype = _common("where", (yes, no))
    return Term(Op("where", (condition.expr, _expr(yes, dtype), _expr(no, dtype)), dtype))


def _common(name: str, operands: tuple[Any, ...]) -> DType:
    kinds = list(dict.fromkeys(o.dtype for o in operands if isinstance(o, Term)))
    if not kinds:
        raise InvalidConfig(f"{name} needs a term among its operands, got {', '.join(map(repr, operands))}")
    if len(kinds) > 1:
        raise InvalidConfig(f"{name} on {' and '.join(map(str, kinds))}: cast one of them")
    return kinds[0]


def _expr(operand: Any, dtype: DType) -> Expr:
    if isinstance(operand, Term):
        return operand.expr
    if isinstance(operand, np.generic):
        operand = operand.item()
    if not isinstance(operand, bool | int | float):
        raise InvalidConfig(f"a term or a number is wanted, got {type(operand).__name__}")
    if dtype is DType.bool and not isinstance(operand, bool):
        raise InvalidConfig(f"a term of bool and the number {operand!r} do not go together")
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        if isinstance(operand, float) or not limits.min <= operand <= limits.max:
            raise InvalidConfig(f"{operand!r} is no {dtype}")
    return Const(float(operand) if dtype.is_float else operand, dtype)
