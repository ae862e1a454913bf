"""Loop nests as data.

A :class:`Nest` is a box of axes, some of them *row* axes; for every point of the other (outer, parallel) axes its
stages run in order. ``Reduce`` folds an expression over the row axes into a scalar that later stages can use;
``Map`` evaluates expressions at every point of the row axes and stores them; ``Final`` stores once per outer point;
``Scan`` runs along one row axis and carries a value. So::

    elementwise   no row axes          Map
    sum           row = reduced axes   Reduce, Final
    softmax       row = the axis       Reduce max, Reduce sum(exp(x - max)), Map exp(x - max) / sum
    layer norm    row = the axes       Reduce sum, Reduce sum of squares, Map
    pooling       row = the window     Reduce with guarded loads, Final

A nest is concrete (extents and strides are numbers) while it is built and fused; the printer turns numbers into
run-time arguments, so nests that differ only in sizes share one compiled kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import field
from typing import Literal

from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

Scalar = int | float | bool

# Nobody changes an expression, an operand or a stage; they are not declared frozen because making one would take three
# times as long, and a model is made of tens of thousands.


class Expr:
    """A scalar expression evaluated at every point."""

    __slots__ = ()
    dtype: DType


@dataclass(slots=True, unsafe_hash=True)
class Const(Expr):
    """A number that is part of the code."""

    value: Scalar
    dtype: DType


@dataclass(slots=True, unsafe_hash=True)
class Size(Expr):
    """An int64 that depends on shapes: passed at run time, so code does not depend on it."""

    value: int
    dtype: DType = DType.int64


@dataclass(slots=True, unsafe_hash=True)
class Index(Expr):
    """The position along an axis of the nest, an int64."""

    axis: int
    dtype: DType = DType.int64


@dataclass(slots=True, unsafe_hash=True)
class Load(Expr):
    """The element of an operand at this point."""

    operand: int
    dtype: DType


@dataclass(slots=True, unsafe_hash=True)
class Result(Expr):
    """What stage number ``stage`` reduced to; in the epilogue of a contraction, ``Result(0)`` is the accumulator."""

    stage: int
    dtype: DType


@dataclass(slots=True, unsafe_hash=True)
class Op(Expr):
    """An operation of :data:`OPERATIONS` on expressions; ``dtype`` is that of its result."""

    name: str
    args: tuple[Expr, ...]
    dtype: DType


# name -> operand count. Semantics are NumPy's on the operands' element type, NaN and infinities included.
OPERATIONS: dict[str, int] = {
    # arithmetic: operands and result of one type; integer division truncates, mod takes the divisor's sign
    **dict.fromkeys(("add", "sub", "mul", "div", "mod", "fmod", "pow", "min", "max", "atan2"), 2),
    # "floordiv" and "mod" on Size/Index arithmetic are common: both with positive divisors
    "floordiv": 2,
    **dict.fromkeys(("neg", "abs", "sign", "reciprocal", "sqrt", "rsqrt"), 1),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), 1),  # round: half to even
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "softplus"), 1),
    **dict.fromkeys(("short_sigmoid", "short_one_plus_erf"), 1),  # with errors that bfloat16 does not show
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan"), 1),
    **dict.fromkeys(("sinh", "cosh", "asinh", "acosh", "atanh"), 1),
    "fma": 3,
    # x / y for rounding to a small integer, the third operand is 1 / y: exact up to 2**20, beyond that only as large;
    # y lies between 2**-60 and 2**60
    "quotient": 3,
    # bits of integers; shifts by the other operand
    **dict.fromkeys(("bitand", "bitor", "bitxor", "shl", "shr"), 2),
    **dict.fromkeys(("bitnot", "popcount"), 1),
    # comparisons: operands of one type, result bool
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 2),
    **dict.fromkeys(("isnan", "isinf"), 1),
    # bool
    **dict.fromkeys(("and", "or", "xor"), 2),
    "not": 1,
    "where": 3,  # bool, then two operands of the result's type
    "cast": 1,  # to dtype, by NumPy's astype rule; float to integer truncates (out of range: saturates)
    "bits": 1,  # reinterpret as another type of the same size
}


@dataclass(slots=True, unsafe_hash=True)
class Operand:
    """How a nest addresses one tensor: ``view``'s first element plus strides times indices, in elements."""

    view: View
    strides: tuple[int, ...]  # one per axis of the nest
    offset: int = 0  # added to the view's own offset
    at: Expr | None = None  # an int64 expression added at run time (gather, resize …); may hold Loads
    guard: Expr | None = None  # bool: memory is touched only where it holds …
    other: Scalar = 0  # … and this stands elsewhere (for a load)

    @property
    def dtype(self) -> DType:
        return self.view.dtype


Fold = Literal["sum", "prod", "max", "min", "and", "or", "argmax", "argmin", "argmax_last", "argmin_last"]


@dataclass(slots=True, unsafe_hash=True)
class Reduce:
    """Fold ``value`` over the row axes; ``Result(k)`` of this stage has ``dtype`` (int64 for arg…)."""

    fold: Fold
    value: Expr
    dtype: DType


@dataclass(slots=True, unsafe_hash=True)
class Map:
    """Store expressions at every point of all axes: (operand, value) pairs."""

    stores: tuple[tuple[int, Expr], ...]


@dataclass(slots=True, unsafe_hash=True)
class Final:
    """Store expressions once per outer point."""

    stores: tuple[tuple[int, Expr], ...]


@dataclass(slots=True, unsafe_hash=True)
class Scan:
    """Walk the (single) row axis, carrying ``fold`` of ``value``; store the carry at every point."""

    fold: Literal["sum", "prod", "max", "min"]
    value: Expr
    operand: int
    dtype: DType
    exclusive: bool = False
    reverse: bool = False


Stage = Reduce | Map | Final | Scan


@dataclass(frozen=True)
class Nest:
    """A box of axes, the operands it reads and writes, and the stages that run over it."""

    extents: tuple[int, ...]
    operands: tuple[Operand, ...]
    stages: tuple[Stage, ...]
    row: frozenset[int] = field(default_factory=frozenset)  # the row axes
    label: str = ""

    @property
    def outer(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.extents)) if a not in self.row)

    def written(self) -> frozenset[int]:
        """Operands that are stored to."""
        found: set[int] = set()
        for stage in self.stages:
            if isinstance(stage, Map | Final):
                found.update(k for k, _ in stage.stores)
            elif isinstance(stage, Scan):
                found.add(stage.operand)
        return frozenset(found)


def children(expr: Expr) -> tuple[Expr, ...]:
    return expr.args if isinstance(expr, Op) else ()


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and all below it, each visit once per path."""
    stack = [expr]
    while stack:
        each = stack.pop()
        yield each
        stack.extend(children(each))


def substitute(expr: Expr, replaced: dict[Expr, Expr]) -> Expr:
    """The expression with leaves (or whole subtrees) replaced."""
    subtrees = any(isinstance(each, Op) for each in replaced)  # else operations, which take long to hash, need no look

    def visit(each: Expr) -> Expr:
        if not isinstance(each, Op):
            return replaced.get(each, each)
        found = replaced.get(each) if subtrees else None
        if found is not None:
            return found
        args = tuple([visit(a) for a in each.args])
        return each if all(map(operator.is_, args, each.args)) else Op(each.name, args, each.dtype)

    return visit(expr)


@dataclass(frozen=True)
class Epilogue:
    """What a contraction does with its accumulators before the only store.

    Axes of the operands are (batch, row, column). ``value`` uses ``Result(0)`` for the accumulator and ``Load``s of
    ``operands`` (bias, residual …).
    """

    value: Expr
    operands: tuple[Operand, ...] = ()

    @property
    def is_still(self) -> bool:
        """Whether operands are the same for all rows: none lies where results are written."""
        return all(operand.strides[1] == 0 for operand in self.operands)
