"""Elementwise operators: unary mathematics, arithmetic, comparison, logic, and the variadic Sum, Mean, Max, Min.

An operator that is one NumPy function is a row of a table. Where a body receives ``out`` and it fits, the result is
written there. Before opset 7 broadcasting was asked for by attributes; those forms share :func:`aligned`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import wide, widened
from ranvier.ops.operands import common_shape, normal_axis, same_dtype, scalar
from ranvier.ops.registry import Array, op
from ranvier.ops.tensor.special import erf

Ufunc = Callable[..., Array]  # a NumPy ufunc, or a function that takes its arguments
Ints = Sequence[int]
_BOOL = np.dtype(np.bool_)


# -- one operand ----------------------------------------------------------------------------------------------------

# (name, first version, function); the result has the operand's dtype
UNARY: tuple[tuple[str, int, Ufunc], ...] = (
    ("Abs", 1, np.absolute),
    ("Acos", 7, np.arccos),
    ("Acosh", 9, np.arccosh),
    ("Asin", 7, np.arcsin),
    ("Asinh", 9, np.arcsinh),
    ("Atan", 7, np.arctan),
    ("Atanh", 9, np.arctanh),
    ("BitwiseNot", 18, np.bitwise_not),
    ("Ceil", 1, np.ceil),
    ("Cos", 7, np.cos),
    ("Cosh", 9, np.cosh),
    ("Exp", 1, np.exp),
    ("Floor", 1, np.floor),
    ("Log", 1, np.log),
    ("Neg", 1, np.negative),
    ("Not", 1, np.logical_not),
    ("Reciprocal", 1, np.reciprocal),
    ("Round", 11, np.rint),  # halves go to the even neighbour
    ("Sign", 9, np.sign),
    ("Sin", 7, np.sin),
    ("Sinh", 9, np.sinh),
    ("Sqrt", 1, np.sqrt),
    ("Tan", 7, np.tan),
    ("Tanh", 1, np.tanh),
)


def apply(function: Ufunc, x: Array, out: Array | None) -> Array:
    """``function(x)``, in ``out`` where that has the shape and dtype of the result (which are those of ``x``)."""
    if out is not None and out.shape == x.shape and out.dtype == x.dtype:
        return function(x, out=out)
    return function(x)


def _declare_unary(name: str, since: int, function: Ufunc) -> None:
    @op(name, since=since, traits=("elementwise",))
    def body(x: Array, *, consumed_inputs: Ints | None = None, out: Array | None = None) -> Array:
        return apply(function, x, out)


for _name, _since, _function in UNARY:
    _declare_unary(_name, _since, _function)


@op("Erf", since=9, traits=("elementwise",))
def erf_(x: Array) -> Array:
    return erf(x)


@op("IsNaN", since=9, traits=("elementwise",))
def is_nan(x: Array) -> Array:
    return np.isnan(x)


@op("IsInf", since=10, traits=("elementwise",))
def is_inf(x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    found = np.isinf(x)
    if not detect_negative:
        found = found & (x > np.zeros((), x.dtype))
    if not detect_positive:
        found = found & (x < np.zeros((), x.dtype))
    return found


@op("BitCast", since=26, traits=("elementwise",))
def bit_cast(x: Array, *, to: int) -> Array:
    source, target = dtypes.of(x), dtypes.of(to)
    if dtypes.DType.string in (source, target):
        raise DTypeMismatch(f"BitCast: strings have no bits to reinterpret ({source} to {target})")
    if source.bits != target.bits:
        raise DTypeMismatch(f"BitCast: {source} has {source.bits} bits and {target} has {target.bits}")
    return x.copy().view(target.numpy)


# -- two operands ---------------------------------------------------------------------------------------------------


def _divide(a: Array, b: Array, out: Array | None = None) -> Array:
    """Quotient; of integers it is cut toward zero."""
    if a.dtype.kind not in "iu":
        return np.true_divide(a, b, out=out)
    _require_nonzero("Div", b)
    if a.dtype.kind == "u":
        return np.floor_divide(a, b, out=out)
    # the floor is one too low where the exact quotient is negative and not whole
    floor = np.asarray(np.floor_divide(a, b))
    too_low = ((a < 0) != (b < 0)) & (floor * b != a)
    return np.asarray(np.add(floor, too_low, out=out, dtype=a.dtype))


def _require_nonzero(name: str, divisor: Array) -> None:
    if not np.all(divisor):
        raise InvalidValue(f"{name}: integer division by zero", op=name)


# (name, function, commutative); form with broadcast attributes at opset 1, NumPy's broadcasting from opset 7 on
ARITHMETIC: tuple[tuple[str, Ufunc, bool], ...] = (
    ("Add", np.add, True),
    ("Sub", np.subtract, False),
    ("Mul", np.multiply, True),
    ("Div", _divide, False),
)
PREDICATES: tuple[tuple[str, Ufunc, bool], ...] = (
    ("And", np.logical_and, True),
    ("Or", np.logical_or, True),
    ("Xor", np.logical_xor, True),
    ("Equal", np.equal, True),
    ("Greater", np.greater, False),
    ("Less", np.less, False),
)
# operators younger than opset 7, so without an old form
LATER_PREDICATES: tuple[tuple[str, int, Ufunc], ...] = (
    ("GreaterOrEqual", 12, np.greater_equal),
    ("LessOrEqual", 12, np.less_equal),
)
BITWISE: tuple[tuple[str, int, Ufunc], ...] = (
    ("BitwiseAnd", 18, np.bitwise_and),
    ("BitwiseOr", 18, np.bitwise_or),
    ("BitwiseXor", 18, np.bitwise_xor),
)


def combine(
    name: str, function: Ufunc, a: Array, b: Array, out: Array | None = None, result: np.dtype[Any] | None = None
) -> Array:
    """``function(a, b)`` over their common shape; ``result`` is its dtype where that is not the operands'."""
    same_dtype(name, a, b)
    shape = common_shape(name, a, b)
    if out is not None and out.shape == shape and out.dtype == (a.dtype if result is None else result):
        return function(a, b, out=out)
    return function(a, b)


def aligned(name: str, a: Array, b: Array, axis: int | None, broadcast: int) -> Array:
    """``b`` shaped so that NumPy's broadcasting does what the attributes of opset 1 to 6 ask for.

    There ``b`` is a scalar, or its shape is a run of consecutive dimensions of ``a`` that starts at ``axis`` (by
    default the last ones).
    """
    if not broadcast:
        if a.shape != b.shape:
            raise ShapeMismatch(
                f"{name}: without broadcast=1 the shapes must be equal, got {list(a.shape)} and {list(b.shape)}"
            )
        return b
    if b.size == 1:
        return b.reshape(())
    start = a.ndim - b.ndim if axis is None else normal_axis(name, axis, a.ndim)
    covered = a.shape[start : start + b.ndim] if start >= 0 else ()
    if len(covered) != b.ndim or any(have not in (1, size) for have, size in zip(b.shape, covered)):
        where = "" if axis is None else f" at axis {axis}"
        raise ShapeMismatch(f"{name}: shape {list(b.shape)} does not fit into {list(a.shape)}{where}")
    return b.reshape(b.shape + (1,) * (a.ndim - start - b.ndim))


def _declare_binary(
    name: str, since: int, function: Ufunc, result: np.dtype[Any] | None = None, commutative: bool = False
) -> None:
    @op(name, since=since, traits=("elementwise", "commutative") if commutative else ("elementwise",))
    def body(a: Array, b: Array, *, out: Array | None = None) -> Array:
        return combine(name, function, a, b, out, result)


def _declare_attribute_form(name: str, function: Ufunc, result: np.dtype[Any] | None = None) -> None:
    # Not marked elementwise: with `axis` the operands do not line up the way that trait promises.
    @op(name, since=1)
    def body(
        a: Array, b: Array, *, axis: int | None = None, broadcast: int = 0, consumed_inputs: Ints | None = None
    ) -> Array:
        return combine(name, function, a, aligned(name, a, b, axis, broadcast), None, result)


for _name, _function, _commutative in ARITHMETIC:
    _declare_attribute_form(_name, _function)
    _declare_binary(_name, 7, _function, commutative=_commutative)
for _name, _function, _commutative in PREDICATES:
    _declare_attribute_form(_name, _function, _BOOL)
    _declare_binary(_name, 7, _function, _BOOL, commutative=_commutative)
for _name, _since, _function in LATER_PREDICATES:
    _declare_binary(_name, _since, _function, _BOOL)
for _name, _since, _function in BITWISE:
    _declare_binary(_name, _since, _function, commutative=True)


@op("Mod", since=10, traits=("elementwise",))
def mod(a: Array, b: Array, *, fmod: int = 0, out: Array | None = None) -> Array:
    """The remainder with the divisor's sign, or with the dividend's for ``fmod=1``."""
    if a.dtype.kind in "iu":
        _require_nonzero("Mod", b)
    return combine("Mod", np.fmod if fmod else np.remainder, a, b, out)


@op("BitShift", since=11, traits=("elementwise",))
def bit_shift(x: Array, y: Array, *, direction: str, out: Array | None = None) -> Array:
    # NumPy already answers shifts by a negative amount, or by the full width, with what sign extension leaves.
    if direction not in ("LEFT", "RIGHT"):
        raise InvalidValue(f"BitShift: direction must be LEFT or RIGHT, got {direction!r}", op="BitShift")
    return combine("BitShift", np.left_shift if direction == "LEFT" else np.right_shift, x, y, out)


def _power(x: Array, y: Array) -> Array:
    """``x ** y`` in the type of ``x``, whatever the type of ``y``."""
    common_shape("Pow", x, y)
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        return _integer_power(x, y)
    if x.dtype != y.dtype:
        return np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype)
    if y.size == 1 and y.ndim <= x.ndim and y.item() == 3:
        return x * x * x  # NumPy sends cubes through the C library, eighty times as slow
    return np.power(x, y)


def _integer_power(x: Array, y: Array) -> Array:
    negative = y < 0
    if not np.any(negative):
        return np.asarray(np.power(x, y.astype(x.dtype, copy=False)))
    if np.any(negative & (x == 0)):
        raise InvalidValue("Pow: integer zero to a negative power", op="Pow")
    # 1 / x**n is a whole number for x = 1 and x = -1 alone, and is cut to 0 for all others
    unit = np.power(x, (y & 1).astype(x.dtype))
    power = np.power(x, np.where(negative, 0, y).astype(x.dtype))
    return np.where(negative, np.where((x == 1) | (x == -1), unit, np.zeros((), x.dtype)), power)


@op("Pow", since=7, traits=("elementwise",))
def pow_(x: Array, y: Array) -> Array:
    return _power(x, y)


@op("Pow", since=1)
def pow_attribute_form(x: Array, y: Array, *, axis: int | None = None, broadcast: int = 0) -> Array:
    return _power(x, aligned("Pow", x, y, axis, broadcast))


def _prelu(x: Array, slope: Array) -> Array:
    same_dtype("PRelu", x, slope)
    if common_shape("PRelu", x, slope) != x.shape:
        raise ShapeMismatch(f"PRelu: slope of shape {list(slope.shape)} does not broadcast to {list(x.shape)}")
    return np.where(x < np.zeros((), x.dtype), x * slope, x)


@op("PRelu", since=7, traits=("elementwise",))
def prelu(x: Array, slope: Array) -> Array:
    return _prelu(x, slope)


@op("PRelu", since=1)
def prelu_per_channel(x: Array, slope: Array, *, consumed_inputs: Ints | None = None) -> Array:
    """Before opset 7: one slope, or one per channel (dimension 1)."""
    if slope.ndim == 1 and slope.size > 1 and x.ndim > 1:
        slope = slope.reshape(-1, *(1,) * (x.ndim - 2))
    return _prelu(x, slope)


# -- several operands -----------------------------------------------------------------------------------------------


def _declare_variadic(name: str, function: Ufunc) -> None:
    @op(name, since=1, traits=("elementwise", "commutative"))
    def body(*operands: Array, consumed_inputs: Ints | None = None) -> Array:
        same_dtype(name, *operands)
        common_shape(name, *operands)
        if len(operands) == 1:
            return operands[0].copy()
        return functools.reduce(function, operands)


for _name, _function in (("Max", np.maximum), ("Min", np.minimum)):
    _declare_variadic(_name, _function)


@op("Sum", since=1, traits=("elementwise", "commutative"))
def sum_(*operands: Array, consumed_inputs: Ints | None = None) -> Array:
    return _total("Sum", operands).astype(operands[0].dtype, copy=False)


@op("Mean", since=1, traits=("elementwise", "commutative"))
def mean(*operands: Array, consumed_inputs: Ints | None = None) -> Array:
    total = _total("Mean", operands)
    total /= len(operands)
    return total.astype(operands[0].dtype, copy=False)


def _total(name: str, operands: Sequence[Array]) -> Array:
    """The sum, in float32 where the operands are narrower."""
    same_dtype(name, *operands)
    total = np.zeros(common_shape(name, *operands), wide(operands[0].dtype))
    for operand in operands:
        total += widened(operand)
    return total


@op("Where", since=9, traits=("elementwise",))
def where(condition: Array, x: Array, y: Array) -> Array:
    same_dtype("Where", x, y)
    common_shape("Where", condition, x, y)
    return np.where(condition, x, y)


@op("Clip", since=11, traits=("elementwise",))
def clip(x: Array, low: Array | None = None, high: Array | None = None, *, out: Array | None = None) -> Array:
    """Where ``low`` is above ``high``, everything becomes ``high``."""
    for what, bound in (("min", low), ("max", high)):
        if bound is not None:
            scalar("Clip", what, bound)
            same_dtype("Clip", x, bound)
    return _clipped(x, low, high, out)


@op("Clip", since=1, traits=("elementwise",))
def clip_attribute_form(
    x: Array,
    *,
    min: float = float(np.finfo(np.float32).min),
    max: float = float(np.finfo(np.float32).max),
    consumed_inputs: Ints | None = None,
    out: Array | None = None,
) -> Array:
    return _clipped(x, np.asarray(min, x.dtype), np.asarray(max, x.dtype), out)


def _clipped(x: Array, low: Array | None, high: Array | None, out: Array | None) -> Array:
    # Of one element, `out` may be the memory of a bound, which is still to be read after the first step.
    if out is None or out.shape != x.shape or out.dtype != x.dtype or x.size == 1:
        out = np.empty_like(x)
    lifted = x if low is None else np.maximum(x, low.reshape(()), out=out)
    if high is not None:
        return np.minimum(lifted, high.reshape(()), out=out)
    np.copyto(out, lifted)
    return out
