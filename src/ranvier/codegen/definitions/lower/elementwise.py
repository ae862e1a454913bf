"""Elementwise operators: arithmetic, comparisons, logic, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ranvier.codegen.definitions.defs import RowBody
from ranvier.codegen.definitions.exprs import HALVES, add, cast, compare, const, div, mul, op, ratio, where
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, FLOATS, INTEGERS, NARROW, NUMERIC
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Scalar
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value

_UNARY = {
    "Neg": "neg",
    "Abs": "abs",
    "Sign": "sign",
    "Reciprocal": "reciprocal",
    "Sqrt": "sqrt",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Exp": "exp",
    "Log": "log",
    "Tanh": "tanh",
    "Erf": "erf",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "asin",
    "Acos": "acos",
    "Atan": "atan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Asinh": "asinh",
    "Acosh": "acosh",
    "Atanh": "atanh",
    "BitwiseNot": "bitnot",
    "Not": "not",
}
_BINARY = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Atan2": "atan2",
    "BitwiseAnd": "bitand",
    "BitwiseOr": "bitor",
    "BitwiseXor": "bitxor",
    "And": "and",
    "Or": "or",
    "Xor": "xor",
}
_COMPARE = {"Equal": "eq", "Less": "lt", "Greater": "gt", "LessOrEqual": "le", "GreaterOrEqual": "ge"}
_VARIADIC = {"Min": "min", "Max": "max", "Sum": "add"}


def _no_attribute_broadcast(node: Node) -> str | None:
    return "broadcasting by attribute" if node.attrs.get("broadcast") or "axis" in node.attrs else None


@lowers(*_UNARY)
def unary(n: NodeView, b: Definitions) -> None:
    name = _UNARY[n.op]
    b.pointwise([n.input(0)], lambda x: op(name, x[0]), n.out_dtype(), out=n.outputs[0])


@lowers(*_BINARY, check=_no_attribute_broadcast)
def binary(n: NodeView, b: Definitions) -> None:
    name = _BINARY[n.op]
    b.pointwise([n.input(0), n.input(1)], lambda x: op(name, *x), n.out_dtype(), out=n.outputs[0])


@lowers(*_COMPARE, check=_no_attribute_broadcast)
def comparison(n: NodeView, b: Definitions) -> None:
    name = _COMPARE[n.op]
    b.pointwise([n.input(0), n.input(1)], lambda x: compare(name, *x), DType.bool, out=n.outputs[0])


@lowers(*_VARIADIC, dtypes=NUMERIC)
def variadic(n: NodeView, b: Definitions) -> None:
    name = _VARIADIC[n.op]
    operands = [n.input(k) for k in range(len(n.inputs))]
    b.pointwise(operands, lambda x: functools.reduce(lambda p, q: op(name, p, q), x), n.out_dtype(), out=n.outputs[0])


@lowers("Mean", dtypes=FLOATS)
def mean(n: NodeView, b: Definitions) -> None:
    operands = [n.input(k) for k in range(len(n.inputs))]

    def compute(x: list[Expr]) -> Expr:
        total = functools.reduce(add, [cast(e, _sum_type(e.dtype)) for e in x])
        return cast(div(total, const(float(len(x)), total)), x[0].dtype)

    b.pointwise(operands, compute, n.out_dtype(), out=n.outputs[0])


def _sum_type(dtype: DType) -> DType:
    return DType.float32 if dtype in HALVES else dtype


def require_nonzero(n: NodeView, b: Definitions, divisor: Value) -> None:
    """Integer division by zero is an error, as in the reference, not a silent number."""
    known = n.known(1)
    if known is not None and np.all(known):
        return
    shape = b.shape(divisor)
    if 0 in shape:
        return

    def any_zero(x: list[Expr]) -> RowBody:
        zero = compare("eq", x[0], const(0, x[0]))
        return RowBody([Reduce("or", zero, DType.bool)], finals={0: Result(0, DType.bool)})

    (flag,) = b.rows([divisor], range(len(shape)), any_zero, [(DType.bool, False)], keepdims=False)
    b.check(flag, f"{n.op}: division by zero")


@lowers("Div", dtypes=NUMERIC, check=_no_attribute_broadcast)
def division(n: NodeView, b: Definitions) -> None:
    if n.dtype(0) in INTEGERS:
        require_nonzero(n, b, n.input(1))
    known, number = n.known(1), _number(n, 1)
    if number is not None and n.out_shape() == n.shape(0):
        b.pointwise([n.input(0)], lambda x: ratio(x[0], const(number, x[0]), known), n.out_dtype(), out=n.outputs[0])
        return
    b.pointwise([n.input(0), n.input(1)], lambda x: div(*x), n.out_dtype(), out=n.outputs[0])


@lowers("Mod", dtypes=NUMERIC)
def modulo(n: NodeView, b: Definitions) -> None:
    name = "fmod" if n.attr("fmod", 0) else "mod"
    if n.dtype(0) in INTEGERS:
        require_nonzero(n, b, n.input(1))
    b.pointwise([n.input(0), n.input(1)], lambda x: op(name, *x), n.out_dtype(), out=n.outputs[0])


@lowers("BitShift", dtypes=INTEGERS)
def bit_shift(n: NodeView, b: Definitions) -> None:
    name = "shl" if n.attr("direction") == "LEFT" else "shr"
    b.pointwise([n.input(0), n.input(1)], lambda x: op(name, *x), n.out_dtype(), out=n.outputs[0])


@lowers("Pow", since=7, dtypes=NUMERIC, check=_no_attribute_broadcast)
def power(n: NodeView, b: Definitions) -> None:
    dtype, fixed = n.dtype(0), _number(n, 1)
    simple = _SIMPLE_POWERS.get(fixed) if fixed is not None else None
    if simple is not None and n.out_shape() == n.shape(0) and (dtype in FLOATS or fixed in (1.0, 2.0, 3.0)):
        b.pointwise([n.input(0)], lambda x: simple(x[0]), dtype, out=n.outputs[0])
        return

    if dtype in INTEGERS and n.dtype(1) in INTEGERS:
        _require_powers(n, b)

    def compute(x: list[Expr]) -> Expr:
        base, exp = x
        kind = base.dtype if base.dtype is exp.dtype or base.dtype is DType.float32 else DType.float64
        if base.dtype in INTEGERS and exp.dtype in INTEGERS:
            return _integer_power(base, exp)
        return cast(op("pow", cast(base, kind), cast(exp, kind)), base.dtype)

    b.pointwise([n.input(0), n.input(1)], compute, dtype, out=n.outputs[0])


def _integer_power(base: Expr, exponent: Expr) -> Expr:
    """Modulo the type's range; of negative powers only those of 1 and -1 are whole numbers, all others are cut to 0."""
    if exponent.dtype.name.startswith("u"):
        return op("pow", base, cast(exponent, base.dtype))
    nothing, one = const(0, base), const(1, base)
    negative = compare("lt", exponent, const(0, exponent))
    power = op("pow", base, cast(where(negative, const(0, exponent), exponent), base.dtype))
    unit = where(compare("eq", base, one), one, nothing)
    if not base.dtype.name.startswith("u"):
        odd = compare("ne", op("bitand", exponent, const(1, exponent)), const(0, exponent))
        minus = const(-1, base)
        unit = where(compare("eq", base, minus), where(odd, minus, one), unit)
    return where(negative, unit, power)


def _require_powers(n: NodeView, b: Definitions) -> None:
    """Integer zero to a negative power is an error, as in the reference."""
    known = n.known(1)
    if n.dtype(1).name.startswith("u") or (known is not None and np.all(known >= 0)) or 0 in n.out_shape():
        return

    def undefined(x: list[Expr]) -> RowBody:
        zero, negative = compare("eq", x[0], const(0, x[0])), compare("lt", x[1], const(0, x[1]))
        bad = op("and", zero, negative, dtype=DType.bool)
        return RowBody([Reduce("or", bad, DType.bool)], finals={0: Result(0, DType.bool)})

    operands = [n.input(0), n.input(1)]
    axes = range(len(n.out_shape()))
    (flag,) = b.rows(operands, axes, undefined, [(DType.bool, False)], domain=n.out_shape(), keepdims=False)
    b.check(flag, "Pow: integer zero to a negative power")


_SIMPLE_POWERS: dict[float, Callable[[Expr], Expr]] = {
    1.0: lambda x: x,
    2.0: lambda x: mul(x, x),
    3.0: lambda x: mul(mul(x, x), x),
    -1.0: lambda x: op("reciprocal", x),
}


@lowers("Where")
def choose(n: NodeView, b: Definitions) -> None:
    b.pointwise([n.input(0), n.input(1), n.input(2)], lambda x: where(*x), n.out_dtype(), out=n.outputs[0])


@lowers("Clip", dtypes=NUMERIC)
def clip(n: NodeView, b: Definitions) -> None:
    known: dict[int, Scalar | None]  # ends that there are, by the position of their operands
    if n.version < 11:
        attributes = (n.attr("min"), n.attr("max"))
        known = {k: float(end) for k, end in enumerate(attributes, 1) if end is not None}
    else:
        known = {k: _number(n, k) for k in (1, 2) if n.has(k)}

    def compute(x: list[Expr]) -> Expr:
        value, given = x[0], iter(x[1:])
        for k, number in known.items():
            value = op("max" if k == 1 else "min", value, next(given) if number is None else const(number, value))
        return value

    operands = [n.input(0), *(_scalar(b, n.input(k)) for k, number in known.items() if number is None)]
    b.pointwise(operands, compute, n.out_dtype(), shape=n.shape(0), out=n.outputs[0])


def _scalar(b: Definitions, value: Value) -> Value:
    return value if b.shape(value) == () else b.reshape(value, ())


def _number(n: NodeView, k: int) -> Scalar | None:
    """Operand ``k`` where it is one number known now. A bound that is seen to be no NaN is one instruction on x86;
    one that is read could be, and takes four."""
    found = n.known(k)
    return None if found is None or found.size != 1 else found.reshape(()).item()


@lowers("BitCast")
def bit_cast(n: NodeView, b: Definitions) -> None:
    to = n.out_dtype()
    b.pointwise([n.input(0)], lambda x: op("bits", x[0], dtype=to), to, out=n.outputs[0])


@lowers("IsNaN", dtypes=FLOATS | {DType.bool})
def is_nan(n: NodeView, b: Definitions) -> None:
    b.pointwise([n.input(0)], lambda x: op("isnan", x[0], dtype=DType.bool), DType.bool, out=n.outputs[0])


@lowers("IsInf", dtypes=FLOATS | {DType.bool})
def is_inf(n: NodeView, b: Definitions) -> None:
    positive, negative = n.attr("detect_positive", 1), n.attr("detect_negative", 1)

    def compute(x: list[Expr]) -> Expr:
        found = op("isinf", x[0], dtype=DType.bool)
        if positive and negative:
            return found
        if not positive and not negative:
            return const(False, DType.bool)
        return op("and", found, compare("gt" if positive else "lt", x[0], const(0.0, x[0])))

    b.pointwise([n.input(0)], compute, DType.bool, out=n.outputs[0])


@lowers("Identity", dtypes=ALL | NARROW)
def identity(n: NodeView, b: Definitions) -> None:
    b.identity(n.input(0), out=n.outputs[0])


@lowers("After", domain="ranvier", dtypes=ALL | NARROW)
def after(n: NodeView, b: Definitions) -> None:
    b.identity(n.input(0), out=n.outputs[0])
