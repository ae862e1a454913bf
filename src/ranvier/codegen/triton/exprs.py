"""Expressions of the loop IR as Triton text.

Values of half and bfloat type are float32 in registers, and are rounded where they are stored and by casts, not after
every operation. What Triton has no exact operator for is a function of :mod:`ranvier.codegen.triton.functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ranvier.codegen.loops.ir import Const, Expr, Index, Op, Size
from ranvier.codegen.triton.types import NARROW, constant, is_signed, literal, memory, register
from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.records import dataclass


@dataclass(slots=True)
class Value:
    """Text that stands for a value, and along which axes of the tile it varies (bits: 1 the first, 2 the second)."""

    text: str
    dims: int
    number: str | None = None  # as Python writes it, where it is a constant


class Writer(Protocol):
    """Where lines go, and what is already known there."""

    def assign(self, text: str, hint: str = "v") -> str: ...


Leaf = Callable[[Expr], Value]

_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"bitand": "&", "bitor": "|", "bitxor": "^"}
_WITH_NUMBERS = frozenset({DType.float32, DType.float64, DType.int32})  # types a plain literal takes on by itself
_SHORT = 48  # characters; longer operations have a line of their own

_FLOAT_UNARY = {
    "abs": "tl.abs", "sqrt": "fn.square_root", "rsqrt": "tl.rsqrt", "floor": "tl.floor", "ceil": "tl.ceil",
    "exp": "tl.exp", "sigmoid": "fn.sigmoid", "short_sigmoid": "fn.sigmoid", "erf": "tl.erf",
    "short_one_plus_erf": "fn.one_plus_erf", "softplus": "fn.softplus", "reciprocal": "fn.reciprocal",
    "sign": "fn.sign", "round": "lib.rint", "trunc": "lib.trunc", "isnan": "fn.isnan", "isinf": "fn.isinf",
    **{name: f"lib.{name}" for name in (
        "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "asinh", "acosh", "atanh",
    )},
}  # fmt: skip
_FLOAT_BINARY = {
    "min": "fn.least", "max": "fn.largest", "fmod": "lib.fmod", "mod": "fn.float_mod",
    "floordiv": "fn.float_floordiv", "pow": "lib.pow", "atan2": "lib.atan2",
}  # fmt: skip
_INT_UNARY = {"popcount": "fn.popcount", "sign": "fn.int_sign"}
_INT_BINARY = {
    "div": "fn.int_div", "fmod": "fn.int_rem", "min": "tl.minimum", "max": "tl.maximum", "pow": "fn.int_pow",
    "shl": "fn.shift_left", "shr": "fn.shift_right",
}  # fmt: skip
_BOOL = {
    "and": "{0} & {1}", "mul": "{0} & {1}", "min": "{0} & {1}", "bitand": "{0} & {1}",
    "or": "{0} | {1}", "add": "{0} | {1}", "max": "{0} | {1}", "bitor": "{0} | {1}",
    "xor": "{0} ^ {1}", "sub": "{0} ^ {1}", "bitxor": "{0} ^ {1}", "ne": "{0} ^ {1}",
    "eq": "~({0} ^ {1})", "lt": "~{0} & {1}", "le": "~{0} | {1}", "gt": "{0} & ~{1}", "ge": "{0} | ~{1}",
    "not": "~{0}", "bitnot": "~{0}", "abs": "{0}", "sign": "{0}", "isnan": "{0} & ~{0}", "isinf": "{0} & ~{0}",
}  # fmt: skip


class ExprPrinter:
    """Prints operations; leaves are the caller's. Shared operations get a name, short ones used once stay inline."""

    def __init__(self, writer: Writer, shared: frozenset[int] = frozenset()) -> None:
        self._writer = writer
        self._shared = shared

    def operation(self, expr: Op, args: list[Value]) -> Value:
        dims = 0
        for arg in args:
            dims |= arg.dims
        text = self._text(expr, args)
        infix = expr.name in _INFIX or expr.name in _COMPARE or expr.name in _BITS or expr.args[0].dtype is DType.bool
        if infix and id(expr) not in self._shared and len(text) <= _SHORT and expr.name != "where":
            return Value(f"({text})", dims)
        return Value(self._writer.assign(text), dims)

    def constant(self, expr: Const) -> Value:
        return Value(constant(expr.value, expr.dtype), 0, literal(expr.value, expr.dtype))

    def _text(self, expr: Op, args: list[Value]) -> str:
        name, dtype = expr.name, expr.args[0].dtype
        texts = [a.text for a in args]
        if name == "cast":
            return converted(texts[0], dtype, expr.dtype)
        if name == "bits":
            return _reinterpreted(texts[0], dtype, expr.dtype)
        if name == "where":
            return f"tl.where({', '.join(texts)})"
        if dtype is DType.bool:
            form = _BOOL.get(name)
            if form is None:
                raise NotSupported(f"no operation {name!r} on bool")
            return form.format(*texts)
        sign = _INFIX.get(name) or _COMPARE.get(name)
        if sign is not None:
            return f" {sign} ".join(_plain(args, dtype))
        if name == "neg":
            return f"-{texts[0]}"
        if dtype.is_float:
            return self._float(expr, texts)
        return self._integer(expr, texts, dtype)

    def _float(self, expr: Op, texts: list[str]) -> str:
        name = expr.name
        if name == "pow" and (short := _short_power(expr.args[1], texts[0])):
            return short
        if name in ("div", "quotient"):
            return f"fn.divided({texts[0]}, {texts[1]})"
        if name == "fma":
            return f"tl.fma({', '.join(texts)})"
        found = _FLOAT_UNARY.get(name) or _FLOAT_BINARY.get(name)
        if found is None:
            raise NotSupported(f"no operation {name!r} on floats")
        return f"{found}({', '.join(texts)})"

    def _integer(self, expr: Op, texts: list[str], dtype: DType) -> str:
        name = expr.name
        if name == "fma":
            return f"{texts[0]} * {texts[1]} + {texts[2]}"
        if name in ("floordiv", "mod"):
            sign = "//" if name == "floordiv" else "%"
            if not is_signed(dtype):
                return f"fn.int_{'div' if name == 'floordiv' else 'rem'}({texts[0]}, {texts[1]})"
            if _positive(expr.args[1]) and _not_negative(expr.args[0]):
                return f"{texts[0]} {sign} {texts[1]}"
            return f"fn.int_{name}({texts[0]}, {texts[1]})"
        if name in ("floor", "ceil", "trunc", "round"):
            return texts[0]
        if name in ("isnan", "isinf"):
            return f"{texts[0]} != {texts[0]}"
        if name in _BITS:
            return f" {_BITS[name]} ".join(texts)
        if name == "bitnot":
            return f"~{texts[0]}"
        if name == "abs":
            return f"tl.abs({texts[0]})" if is_signed(dtype) else texts[0]
        if name == "reciprocal":
            return f"fn.int_div({constant(1, dtype)}, {texts[0]})"
        found = _INT_UNARY.get(name) or _INT_BINARY.get(name)
        if found is None:
            raise NotSupported(f"no operation {name!r} on integers")
        return f"{found}({', '.join(texts)})"


def _plain(args: list[Value], dtype: DType) -> list[str]:
    """Operands of an operator: a constant beside a value may be written as people do."""
    if dtype in _WITH_NUMBERS and sum(a.number is None for a in args) == 1:
        return [a.number or a.text for a in args]
    return [a.text for a in args]


def _short_power(exponent: Expr, base: str) -> str | None:
    if not isinstance(exponent, Const):
        return None
    known = {1: base, 2: f"{base} * {base}", 3: f"{base} * {base} * {base}", -1: f"fn.reciprocal({base})"}
    return known.get(exponent.value)  # type: ignore[arg-type]


def _not_negative(expr: Expr) -> bool:
    """Whether index arithmetic cannot go below 0."""
    if isinstance(expr, Index):
        return True
    if isinstance(expr, Size | Const):
        return expr.value >= 0
    if not isinstance(expr, Op):
        return False
    if expr.name == "mod":
        return _positive(expr.args[1])
    return expr.name in ("add", "mul", "floordiv", "div", "min", "max") and all(map(_not_negative, expr.args))


def _positive(expr: Expr) -> bool:
    return isinstance(expr, Size | Const) and expr.value > 0


def converted(text: str, source: DType, target: DType) -> str:
    """NumPy's ``astype``; a float out of an integer's range saturates, and NaN becomes 0."""
    if target is DType.bool:
        return f"{text} != 0" if source is not DType.bool else text
    if source.is_float and target.is_integer:
        low = 0 if not is_signed(target) else -(1 << (target.bits - 1))
        high = low + (1 << target.bits) - 1
        if target.bits <= 16:
            return f"fn.saturated({text}, {float(low)}, {float(high)}).to({register(target)})"
        return f"fn.saturated_wide({text}, {low}, {high}, {float(low)}, {float(high + 1)}, {register(target)})"
    if target is DType.bfloat16:
        return f"lib.as_bfloat16({text}.to(tl.float32)).to(tl.float32)"
    if target in NARROW:
        return f"{text}.to({memory(target)}).to(tl.float32)"
    return text if register(source) == register(target) else f"{text}.to({register(target)})"


def _reinterpreted(text: str, source: DType, target: DType) -> str:
    if source is DType.bfloat16:
        text = f"lib.as_bfloat16({text})"
    elif source in NARROW:
        text = f"{text}.to({memory(source)})"
    found = f"{text}.to({memory(target)}, bitcast=True)"
    return f"{found}.to(tl.float32)" if target in NARROW else found
