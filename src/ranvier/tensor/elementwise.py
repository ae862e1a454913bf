"""Functions of single elements that are one operator of the graph, or a conversion and one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch
from ranvier.tensor.core import Tensor, as_tensor, beside, both, call
from ranvier.tensor.expr import Spec, spec
from ranvier.tensor.host import hosted
from ranvier.tensor.manipulate import astype
from ranvier.tensor.types import COMPLEX, FLOATS, SIGNED, UNSIGNED, floating, kind_of

_OPERANDS = (Tensor, bool, int, float, complex, np.ndarray, np.generic)
_ADD, _SUB, _MUL, _DIV, _POW = (spec(op) for op in ("Add", "Sub", "Mul", "Div", "Pow"))
_MOD, _FMOD = spec("Mod"), spec("Mod", (("fmod", 1),))
_EQUAL, _LESS, _LESS_EQUAL = (spec(op) for op in ("Equal", "Less", "LessOrEqual"))
_GREATER, _GREATER_EQUAL = spec("Greater"), spec("GreaterOrEqual")
_AND, _OR, _XOR, _NOT = (spec(op) for op in ("And", "Or", "Xor", "Not"))
_BIT_AND, _BIT_OR, _BIT_XOR = (spec(f"Bitwise{op}") for op in ("And", "Or", "Xor"))
_UNUSUAL = frozenset((DType.bool, *COMPLEX))  # what arithmetic has to look at before it becomes an operator
_MAX, _MIN, _WHERE = spec("Max"), spec("Min"), spec("Where")


def operated(function: Callable[[Any, Any], Tensor], own: Tensor, other: Any, swap: bool = False) -> Tensor:
    """An operator of Python; other classes get their turn where the operand is none of ours."""
    if not isinstance(other, _OPERANDS):
        return NotImplemented  # type: ignore[no-any-return]
    return function(other, own) if swap else function(own, other)


def _arithmetic(of: Spec, name: str, x1: Any, x2: Any) -> Tensor:
    x, y, dtype, shape = both(x1, x2)
    if dtype in _UNUSUAL:
        if dtype is DType.bool:
            raise DTypeMismatch(f"{name} is not defined for bool; convert one operand first")
        return hosted(getattr(np, name), x, y)
    return call(of, (x, y), dtype, shape)


def add(x1: Any, x2: Any, /) -> Tensor:
    return _arithmetic(_ADD, "add", x1, x2)


def subtract(x1: Any, x2: Any, /) -> Tensor:
    return _arithmetic(_SUB, "subtract", x1, x2)


def multiply(x1: Any, x2: Any, /) -> Tensor:
    return _arithmetic(_MUL, "multiply", x1, x2)


def divide(x1: Any, x2: Any, /) -> Tensor:
    """The quotient; of integers it is a float."""
    x, y, dtype, shape = both(x1, x2)
    if dtype in COMPLEX:
        return hosted(np.divide, x, y)
    kind = floating(dtype)
    if kind is not dtype:
        x, y = astype(x, kind), astype(y, kind)
    return call(_DIV, (x, y), kind, shape)


def floor_divide(x1: Any, x2: Any, /) -> Tensor:
    """The quotient rounded down; 0 where an integer is divided by 0."""
    x, y, dtype, shape = both(x1, x2)
    if kind_of(dtype) == 1:
        divisor = where(equal(y, 0), 1, y)
        if dtype in UNSIGNED:
            found = call(_DIV, (x, divisor), dtype, shape)
        else:
            rest = call(_MOD, (x, divisor), dtype, shape)
            found = call(_DIV, (subtract(x, rest), divisor), dtype, shape)
        return where(equal(y, 0), 0, found)
    _real(dtype, "floor_divide")
    return floor(call(_DIV, (x, y), dtype, shape))


def remainder(x1: Any, x2: Any, /) -> Tensor:
    """What ``floor_divide`` leaves; it has the sign of the divisor."""
    x, y, dtype, shape = both(x1, x2)
    if kind_of(dtype) == 1:
        divisor = where(equal(y, 0), 1, y)
        return call(_MOD, (x, divisor), dtype, shape)
    _real(dtype, "remainder")
    rest = call(_FMOD, (x, y), dtype, shape)
    below = less(y, 0)
    turned = where(not_equal(less(rest, 0), below), add(rest, y), rest)
    return where(equal(rest, 0), where(below, -0.0, where(less(0, y), 0.0, rest)), turned)


def pow(x1: Any, x2: Any, /) -> Tensor:
    if type(x2) is int and x2 == 2 and isinstance(x1, Tensor):
        return multiply(x1, x1)
    x, y, dtype, shape = both(x1, x2)
    if dtype in COMPLEX:
        return hosted(np.power, x, y)
    if dtype is DType.bool:
        raise DTypeMismatch("pow is not defined for bool; convert one operand first")
    if kind_of(dtype) == 1:
        found = call(_POW, (astype(x, DType.int64), astype(y, DType.int64)), DType.int64, shape)
        return astype(found, dtype)
    return call(_POW, (x, y), dtype, shape)


def maximum(x1: Any, x2: Any, /) -> Tensor:
    return _extreme(_MAX, x1, x2)


def minimum(x1: Any, x2: Any, /) -> Tensor:
    return _extreme(_MIN, x1, x2)


def _extreme(of: Spec, x1: Any, x2: Any) -> Tensor:
    x, y, dtype, shape = both(x1, x2)
    _real(dtype, of[0])
    return call(of, (x, y), dtype, shape)


# -- comparisons ----------------------------------------------------------------------------------------------------


def equal(x1: Any, x2: Any, /) -> Tensor:
    x, y, dtype, shape = both(x1, x2)
    if dtype in COMPLEX:
        return hosted(np.equal, x, y)
    return call(_EQUAL, (x, y), DType.bool, shape)


def not_equal(x1: Any, x2: Any, /) -> Tensor:
    return logical_not(equal(x1, x2))


def less(x1: Any, x2: Any, /) -> Tensor:
    return _ordered(_LESS, x1, x2)


def less_equal(x1: Any, x2: Any, /) -> Tensor:
    return _ordered(_LESS_EQUAL, x1, x2)


def greater(x1: Any, x2: Any, /) -> Tensor:
    return _ordered(_GREATER, x1, x2)


def greater_equal(x1: Any, x2: Any, /) -> Tensor:
    return _ordered(_GREATER_EQUAL, x1, x2)


def _ordered(of: Spec, x1: Any, x2: Any) -> Tensor:
    x, y, dtype, shape = both(x1, x2)
    if dtype is DType.bool:
        x, y = astype(x, DType.uint8), astype(y, DType.uint8)
    elif dtype in COMPLEX:
        raise DTypeMismatch("complex numbers have no order")
    return call(of, (x, y), DType.bool, shape)


# -- truth and bits -------------------------------------------------------------------------------------------------


def _logical(of: Spec, x1: Any, x2: Any) -> Tensor:
    x, y, _, shape = both(x1, x2)
    return call(of, (astype(x, DType.bool), astype(y, DType.bool)), DType.bool, shape)


def logical_and(x1: Any, x2: Any, /) -> Tensor:
    return _logical(_AND, x1, x2)


def logical_or(x1: Any, x2: Any, /) -> Tensor:
    return _logical(_OR, x1, x2)


def logical_xor(x1: Any, x2: Any, /) -> Tensor:
    return _logical(_XOR, x1, x2)


def logical_not(x: Any, /) -> Tensor:
    own = astype(as_tensor(x), DType.bool)
    return call(_NOT, (own,), DType.bool, own.shape)


def _bitwise(of_bool: Spec, of_int: Spec, x1: Any, x2: Any) -> Tensor:
    x, y, dtype, shape = both(x1, x2)
    if kind_of(dtype) > 1:
        raise DTypeMismatch(f"{of_int[0]} is defined for bool and integers, not {dtype}")
    return call(of_bool if dtype is DType.bool else of_int, (x, y), dtype, shape)


def bitwise_and(x1: Any, x2: Any, /) -> Tensor:
    return _bitwise(_AND, _BIT_AND, x1, x2)


def bitwise_or(x1: Any, x2: Any, /) -> Tensor:
    return _bitwise(_OR, _BIT_OR, x1, x2)


def bitwise_xor(x1: Any, x2: Any, /) -> Tensor:
    return _bitwise(_XOR, _BIT_XOR, x1, x2)


def bitwise_invert(x: Any, /) -> Tensor:
    own = as_tensor(x)
    if own.dtype is DType.bool:
        return logical_not(own)
    if kind_of(own.dtype) > 1:
        raise DTypeMismatch(f"bitwise_invert is defined for bool and integers, not {own.dtype}")
    return call(spec("BitwiseNot"), (own,), own.dtype, own.shape)


def bitwise_left_shift(x1: Any, x2: Any, /) -> Tensor:
    return _shifted("LEFT", *both(x1, x2))


def bitwise_right_shift(x1: Any, x2: Any, /) -> Tensor:
    """Towards lower bits; the sign stays."""
    x, y, dtype, shape = both(x1, x2)
    if dtype in UNSIGNED:
        return _shifted("RIGHT", x, y, dtype, shape)
    below = less(x, 0)
    found = _shifted("RIGHT", where(below, bitwise_invert(x), x), y, dtype, shape)
    return where(below, bitwise_invert(found), found)


def _shifted(direction: str, x: Tensor, y: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    if kind_of(dtype) != 1:
        raise DTypeMismatch(f"bits of integers are shifted, not of {dtype}")
    plain = UNSIGNED[SIGNED.index(dtype)] if dtype in SIGNED else dtype  # the operator is one of unsigned numbers
    width = plain.bits
    past = greater_equal(y, width)
    by = where(past, 0, y)
    moved = call(spec("BitShift", (("direction", direction),)), (astype(x, plain), astype(by, plain)), plain, shape)
    return where(past, 0, astype(moved, dtype))


# -- one operand ----------------------------------------------------------------------------------------------------


def _real(dtype: DType, name: str) -> None:
    if not 1 <= kind_of(dtype) <= 2:
        raise DTypeMismatch(f"{name} is defined for integers and floats, not {dtype}")


def _of_floats(op: str, name: str, doc: str = "") -> Callable[[Any], Tensor]:
    """A function of floating-point numbers; integers become such."""
    of = spec(op)

    def function(x: Any, /) -> Tensor:
        own = x if type(x) is Tensor else as_tensor(x)
        kind = own._expr.dtype
        if kind not in FLOATS:
            if kind in COMPLEX:
                return hosted(getattr(np, name), own)
            kind = floating(kind)
            own = astype(own, kind)
        return call(of, (own,), kind, own._expr.shape)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc or f"The {name} of each element."
    return function


exp, log, sqrt = _of_floats("Exp", "exp"), _of_floats("Log", "log"), _of_floats("Sqrt", "sqrt")
sin, cos, tan = _of_floats("Sin", "sin"), _of_floats("Cos", "cos"), _of_floats("Tan", "tan")
asin, acos, atan = _of_floats("Asin", "asin"), _of_floats("Acos", "acos"), _of_floats("Atan", "atan")
sinh, cosh, tanh = _of_floats("Sinh", "sinh"), _of_floats("Cosh", "cosh"), _of_floats("Tanh", "tanh")
asinh, acosh, atanh = _of_floats("Asinh", "asinh"), _of_floats("Acosh", "acosh"), _of_floats("Atanh", "atanh")
erf = _of_floats("Erf", "erf", "The error function of each element.")
sigmoid = _of_floats("Sigmoid", "sigmoid", "1 / (1 + exp(-x)) of each element.")
relu = _of_floats("Relu", "relu", "Each element, 0 where it is negative.")
softplus = _of_floats("Softplus", "softplus", "log(1 + exp(x)) of each element.")
gelu = _of_floats("Gelu", "gelu", "x times the probability that a normal number is below it.")


def _of_all(op: str, name: str, only_floats: bool = False) -> Callable[[Any], Tensor]:
    """A function of numbers that has their type; ``only_floats``: integers are their own result."""
    of = spec(op)

    def function(x: Any, /) -> Tensor:
        own = as_tensor(x)
        kind = own.dtype
        if kind in COMPLEX:
            return hosted(getattr(np, name), own)
        if kind is DType.bool:
            raise DTypeMismatch(f"{name} is not defined for bool")
        if only_floats and kind not in FLOATS:
            return positive(own)
        return call(of, (own,), kind, own.shape)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"The {name} of each element."
    return function


abs, sign = _of_all("Abs", "abs"), _of_all("Sign", "sign")
floor, ceil, round = (_of_all(op.title(), op, True) for op in ("floor", "ceil", "round"))


def negative(x: Any, /) -> Tensor:
    own = as_tensor(x)
    if own.dtype in UNSIGNED:
        return subtract(0, own)
    return _negative(own)


_negative = _of_all("Neg", "negative")


def positive(x: Any, /) -> Tensor:
    own = as_tensor(x)
    if own.dtype is DType.bool:
        raise DTypeMismatch("positive is not defined for bool")
    return call(spec("Identity"), (own,), own.dtype, own.shape)


def square(x: Any, /) -> Tensor:
    return multiply(x, x)


def reciprocal(x: Any, /) -> Tensor:
    return divide(1, x)


def log2(x: Any, /) -> Tensor:
    return _scaled_log(x, np.log2, 1 / math.log(2))


def log10(x: Any, /) -> Tensor:
    return _scaled_log(x, np.log10, 1 / math.log(10))


def _scaled_log(x: Any, on_host: Callable[..., Any], factor: float) -> Tensor:
    own = as_tensor(x)
    return hosted(on_host, own) if own.dtype in COMPLEX else multiply(log(own), factor)


def _tested(op: str, x: Any, of_others: bool, on_host: Callable[..., Any]) -> Tensor:
    own = as_tensor(x)
    if own.dtype in COMPLEX:
        return hosted(on_host, own)
    if own.dtype in FLOATS:
        return call(spec(op), (own,), DType.bool, own.shape)
    return beside(Tensor(np.full(own.shape, of_others)), own)


def isnan(x: Any, /) -> Tensor:
    return _tested("IsNaN", x, False, np.isnan)


def isinf(x: Any, /) -> Tensor:
    return _tested("IsInf", x, False, np.isinf)


def isfinite(x: Any, /) -> Tensor:
    own = as_tensor(x)
    if own.dtype in COMPLEX:
        return hosted(np.isfinite, own)
    return logical_not(logical_or(isnan(own), isinf(own)))


def conj(x: Any, /) -> Tensor:
    own = as_tensor(x)
    return hosted(np.conj, own) if own.dtype in COMPLEX else positive(own)


def real(x: Any, /) -> Tensor:
    own = as_tensor(x)
    return hosted(np.real, own) if own.dtype in COMPLEX else positive(own)


def imag(x: Any, /) -> Tensor:
    own = as_tensor(x)
    return hosted(np.imag, own) if own.dtype in COMPLEX else multiply(own, 0)


def where(condition: Any, x1: Any, x2: Any, /) -> Tensor:
    """``x1`` where the condition holds, ``x2`` where not."""
    test = as_tensor(condition)
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        x1 = as_tensor(x1)
    x, y, dtype, shape = both(x1, x2)
    if dtype in COMPLEX:
        return hosted(np.where, test, x, y)
    from ranvier.tensor.shapes import broadcast

    return call(_WHERE, (astype(test, DType.bool), x, y), dtype, broadcast(test.shape, shape))


_OF_TENSORS = True
