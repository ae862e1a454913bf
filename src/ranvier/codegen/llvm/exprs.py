"""Expressions of the loop IR as vector code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val, mangled, vector
from ranvier.codegen.llvm.code_forms import CodesAsNumbers, codes_as_numbers
from ranvier.codegen.llvm.elements import (
    NARROW,
    converted,
    is_signed,
    load_vector,
    register_type,
    reinterpreted,
    rounded,
    store_vector,
    widened,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import WHOLE, exactly
from ranvier.codegen.loops.ir import Const, Expr, Op
from ranvier.dtypes import DType
from ranvier.errors import NotSupported

__all__ = ["ExprEmitter", "load_vector", "register_type", "store_vector"]

Leaf = Callable[[Expr], Val]

_PREDICATES = {  # name -> (float, signed, unsigned)
    "eq": ("oeq", "eq", "eq"),
    "ne": ("une", "ne", "ne"),
    "lt": ("olt", "slt", "ult"),
    "le": ("ole", "sle", "ule"),
    "gt": ("ogt", "sgt", "ugt"),
    "ge": ("oge", "sge", "uge"),
}
# floats and integers alike
ARITHMETIC: dict[str, Callable[[Fn, Val, Val], Val]] = {"add": Fn.add, "sub": Fn.sub, "mul": Fn.mul}
_LLVM_UNARY = {"sqrt": "sqrt", "abs": "fabs"}
_VMATH_UNARY = frozenset(
    {
        *("floor", "ceil", "trunc", "exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "softplus"),
        *("short_sigmoid", "short_one_plus_erf"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    }
)
_LARGE = 0xFE000000 - (1 << 32)  # bits of 2**127, moved up by one
_LEAST = 2  # those of the smallest number
_EXACT = frozenset(
    {"min", "max", "neg", "abs", "where", "bits", "cast"}
)  # a narrow float needs no rounding after these


class ExprEmitter:
    """Writes expressions into a function, each distinct value once.

    Values whose leaves are all scalars stay scalar and are put into every lane only where they meet a vector. What was
    computed stays known until the enclosing :meth:`scope` ends, so a value computed before a loop is found again in it.
    """

    def __init__(self, fn: Fn, isa: Isa, lanes: int, parent: ExprEmitter | None = None) -> None:
        self.fn = fn
        self.isa = isa
        self.lanes = lanes
        self._parent = parent
        # Values by the identity of the expression (shared subtrees are walked once, and deep trees are never hashed) …
        self._known: list[dict[int, Val]] = [{}]
        # … and by operation and operands' names, so equal trees built apart are still computed once.
        self._numbered: list[dict[tuple[object, ...], Val]] = [{}]
        self._alive: list[Expr] = []  # identities are only good while their objects live

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is computed inside is forgotten at the end: for bodies of loops and branches."""
        self._known.append({})
        self._numbered.append({})
        yield
        self._known.pop()
        self._numbered.pop()

    def fresh(self) -> ExprEmitter:
        """An emitter for the same function that knows nothing."""
        return ExprEmitter(self.fn, self.isa, self.lanes)

    def child(self, lanes: int) -> ExprEmitter:
        """An emitter of another width that finds what this one, which must hold scalars only, knows at any time."""
        return ExprEmitter(self.fn, self.isa, lanes, self)

    def preset(self, expr: Expr, value: Val) -> None:
        """Let an expression have a value that was obtained otherwise."""
        self._known[-1][id(expr)] = value
        self._alive.append(expr)

    def vector(self, expr: Expr, leaf: Leaf) -> Val:
        """The value in every lane."""
        return widened(self.fn, self.value(expr, leaf), self.lanes)

    def value(self, expr: Expr, leaf: Leaf) -> Val:
        """The value in register form: a vector of ``lanes``, or a scalar where no leaf below is a vector."""
        found = self._find(expr)
        if found is not None:
            return found
        if isinstance(expr, Const):
            made = self.fn.const(register_type(expr.dtype), expr.value)
        elif (codes := codes_as_numbers(expr)) is not None:
            made = self._clipped(codes, leaf)
        elif isinstance(expr, Op):
            made = self._operation(expr, [self.value(a, leaf) for a in expr.args])
        else:
            made = self._numbered_value((expr,), lambda: leaf(expr))
        self._known[-1][id(expr)] = made
        self._alive.append(expr)
        return made

    def spread(self, scalar: Val, wide: Val) -> None:
        """Let ``wide`` be what a scalar looks like in every lane."""
        self._numbered[-1]["splat", scalar.name] = wide

    def ends(self, codes: CodesAsNumbers, leaf: Leaf) -> list[Val]:
        """The bounds of codes."""
        f, ends = self.fn, [float(end) for end in (codes.low, codes.high)]
        if codes.zero is None:
            return [f.const("float", end) for end in ends]
        zero = self.value(codes.zero, leaf)

        def less(end: float) -> Val:
            return self._numbered_value(("less", end, zero.name), lambda: f.sub(f.const(zero.type, end), zero))

        return [less(end) for end in ends]

    def _clipped(self, codes: CodesAsNumbers, leaf: Leaf) -> Val:
        """Codes, or how far they lie from their zero point, without becoming bytes."""
        if self.isa.triple == "aarch64":
            return self._clipped_first(codes, leaf)
        parts = [self.value(codes.number, leaf), *self.ends(codes, leaf)]
        x, low, high = self._fitted(parts) if any(p.lanes > 1 for p in parts) else parts
        # the last bound stands second: it is what comes out where x is NaN (see elements.py for the order)
        return self.fn.quick_max(self.fn.quick_min(high, x), low)

    def _clipped_first(self, codes: CodesAsNumbers, leaf: Leaf) -> Val:
        """The same with numbers clipped before they are rounded: bounds are whole, and small numbers are rounded by two
        additions, where the instruction that rounds takes as long as four of them."""
        f, number = self.fn, codes.number
        rounds = isinstance(number, Op) and number.name == "round"
        parts = [self.value(number.args[0] if isinstance(number, Op) and rounds else number, leaf)]
        parts += self.ends(codes, leaf)
        x, low, high = self._fitted(parts) if any(p.lanes > 1 for p in parts) else parts
        clipped = f.number_min(f.number_max(x, low), high)
        if not rounds:
            return clipped
        return exactly(f, "fsub", exactly(f, "fadd", clipped, WHOLE), WHOLE)

    def _find(self, expr: Expr) -> Val | None:
        for known in reversed(self._known):
            found = known.get(id(expr))
            if found is not None:
                return found
        return self._parent._find(expr) if self._parent else None

    def _find_numbered(self, key: tuple[object, ...]) -> Val | None:
        for layer in reversed(self._numbered):
            found = layer.get(key)
            if found is not None:
                return found
        # an operand's splat here is not its splat there: widths differ
        return self._parent._find_numbered(key) if self._parent and key[0] != "splat" else None

    def _operation(self, expr: Op, args: list[Val]) -> Val:
        wide = any(a.lanes > 1 for a in args)
        if expr.name in ("floordiv", "mod") and divides_quickly(args, expr.dtype):
            names: tuple[object, ...] = (expr.name, *(a.name for a in args))
            return self._numbered_value(names, lambda: floor_by_scalar(self.fn, expr.name, args[0], args[1]))
        types = tuple(a.dtype for a in expr.args)
        key = (expr.name, expr.dtype, types, *(a.name for a in args))
        return self._numbered_value(key, lambda: self._emit(expr, self._fitted(args) if wide else args))

    def _numbered_value(self, key: tuple[object, ...], make: Callable[[], Val]) -> Val:
        found = self._find_numbered(key)
        if found is not None:
            return found
        made = make()
        self._numbered[-1][key] = made
        return made

    def _fitted(self, args: list[Val]) -> list[Val]:
        """Scalars into every lane; constants simply become vector constants."""
        return [self._wide(a) for a in args]

    def _wide(self, a: Val) -> Val:
        if a.lanes > 1:
            return a
        if not a.name.startswith("%"):
            return Val(self.fn, vector(a.type, self.lanes), f"splat ({a.type} {a.name})")
        return self._numbered_value(("splat", a.name), lambda: self.fn.splat(a, self.lanes))

    def _emit(self, expr: Op, args: list[Val]) -> Val:
        dtype = expr.args[0].dtype if expr.name != "where" else expr.dtype
        made = self._apply(expr, dtype, args)
        if expr.dtype in NARROW and expr.name not in _EXACT:
            made = rounded(self.fn, self.isa, expr.dtype, made)
        return made

    def _apply(self, expr: Op, dtype: DType, args: list[Val]) -> Val:
        f, isa, name = self.fn, self.isa, expr.name
        if name == "cast":
            return converted(f, isa, args[0], dtype, expr.dtype)
        if name == "bits":
            return reinterpreted(f, isa, args[0], dtype, expr.dtype)
        if name == "where":
            return f.select(args[0], args[1], args[2])
        if name in _PREDICATES:
            by_float, by_signed, by_unsigned = _PREDICATES[name]
            predicate = by_float if args[0].is_float else by_signed if is_signed(dtype) else by_unsigned
            return f.cmp(predicate, args[0], args[1])
        if dtype is DType.bool:
            return _bool_operation(f, name, args)
        if name in ARITHMETIC:
            return ARITHMETIC[name](f, args[0], args[1])
        if name == "neg":
            return f.neg(args[0])
        if args[0].is_float:
            return _float_operation(f, isa, name, args, expr)
        return _int_operation(f, name, args, is_signed(dtype))


def _float_operation(f: Fn, isa: Isa, name: str, args: list[Val], expr: Op) -> Val:
    """An operation on float or double registers; ``expr`` shows which operands are constants."""
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match name:
        case "div":
            return f.div(a, b)
        case "fma":
            return f.fma(a, b, args[2])
        case "quotient":
            if isa.triple == "aarch64" and isinstance(expr.args[1], Const):
                # what Div is lowered to (scales that codes are made with are read): a division goes on beside what else
                # there is to do, and takes one slot instead of eight
                return f.div(a, b)
            return _quotient(f, isa, a, b, args[2])
        case "min" | "max":
            return float_extreme(f, name, a, b, _constant(expr, 0), _constant(expr, 1))
        case "reciprocal":
            return f.div(f.const(a.type, 1.0), a)
        case "rsqrt":
            return f.div(f.const(a.type, 1.0), f.unary("sqrt", a))
        case "sqrt" | "abs":
            return f.unary(_LLVM_UNARY[name], a)
        case "round":
            return vmath.rint(f, a, isa)
        case "sign":
            return f.add(f.select(f.cmp("ogt", a, 0), 1.0, f.select(f.cmp("olt", a, 0), f.const(a.type, -1.0), a)), 0.0)
        case "isnan":
            return f.cmp("uno", a, a)
        case "isinf":
            return f.cmp("oeq", f.unary("fabs", a), math.inf)
        case "fmod":
            return f.rem(a, b)
        case "mod":
            return _float_mod(f, a, b)
        case "floordiv":
            return vmath.floor(f, f.div(a, b), isa)
        case "pow":
            return _float_pow(f, isa, a, b, _constant(expr, 1))
        case "atan2":
            return vmath.atan2(f, a, b, isa)
    if name in _VMATH_UNARY:
        made: Val = getattr(vmath, name)(f, a, isa)
        return made
    raise NotSupported(f"no operation {name!r} on floats")


def _constant(expr: Op, position: int) -> float | None:
    """The value of a constant operand that is not NaN."""
    arg = expr.args[position]
    if isinstance(arg, Const) and arg.value == arg.value:
        return float(arg.value)
    return None


def float_extreme(f: Fn, name: str, a: Val, b: Val, left: float | None = None, right: float | None = None) -> Val:
    """The smaller or larger, NaN if either is; one instruction where one side is known to be no NaN."""
    if f.module.extremes:
        return f.min_(a, b) if name == "min" else f.max_(a, b)
    quick = f.quick_min if name == "min" else f.quick_max
    if left is not None:
        return quick(a, b)
    if right is not None:
        return quick(b, a)
    return f.select(f.cmp("uno", a, a), a, quick(a, b))


def _quotient(f: Fn, isa: Isa, x: Val, y: Val, reciprocal: Val) -> Val:
    """A product with the reciprocal that is zero stays, for its sign, and one that may be infinite."""
    if not isa.fma or x.lanes == 1:
        return f.div(x, y)
    near = f.mul(x, reciprocal)
    size = f.shl(f.bitcast(near, vector("i32", near.lanes)), 1)  # the sign is shifted out
    # 1 less would do, but a register of ones is made by an instruction that waits for what was in it before
    fits = f.cmp("ult", size - _LEAST, _LARGE - _LEAST + 1)
    return f.select(fits, divided(f, x, y, reciprocal, near), near)


def divided(f: Fn, x: Val, y: Val, reciprocal: Val, near: Val | None = None) -> Val:
    """``x / y``, rounded correctly, by three multiplications in the place of a slow division; all finite.

    A product with the reciprocal is one rounding off at most; what it leaves of ``x`` is exact in a fused
    multiply-add, and corrects it.
    """
    near = f.mul(x, reciprocal) if near is None else near
    name = f"llvm.fma.{mangled(x.type)}"
    rest = f.intrinsic(name, x.type, [f.neg(near), y, x])
    return f.intrinsic(name, x.type, [rest, reciprocal, near])


def _float_mod(f: Fn, a: Val, b: Val) -> Val:
    """Python's %: the remainder with the divisor's sign."""
    rest = f.rem(a, b)
    opposite = f.xor(f.cmp("olt", rest, 0), f.cmp("olt", b, 0))
    fixed = f.select(opposite, f.add(rest, b), rest)
    signed_zero = f.intrinsic(f"llvm.copysign.{mangled(a.type)}", a.type, [f.const(a.type, 0.0), b])
    return f.select(f.cmp("oeq", rest, 0), signed_zero, fixed)


def _float_pow(f: Fn, isa: Isa, a: Val, b: Val, exponent: float | None) -> Val:
    if exponent == 1:
        return a
    if exponent == 2:
        return f.mul(a, a)
    if exponent == 3:
        return f.mul(f.mul(a, a), a)
    if exponent == -1:
        return f.div(f.const(a.type, 1.0), a)
    return vmath.pow(f, a, b, isa)


def _bool_operation(f: Fn, name: str, args: list[Val]) -> Val:
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match name:
        case "and" | "mul" | "min" | "bitand":
            return f.and_(a, b)
        case "or" | "add" | "max" | "bitor":
            return f.or_(a, b)
        case "xor" | "bitxor" | "sub":
            return f.xor(a, b)
        case "not" | "bitnot":
            return f.not_(a)
        case "isnan" | "isinf":
            return f.const(a.type, 0)
        case "abs" | "sign":
            return a
    raise NotSupported(f"no operation {name!r} on bool")


def _int_operation(f: Fn, name: str, args: list[Val], signed: bool) -> Val:
    a = args[0]
    b = args[1] if len(args) > 1 else a
    match name:
        case "fma":
            return f.add(f.mul(a, b), args[2])
        case "div":
            return _int_divide(f, a, b, signed)[0]
        case "fmod":
            return _int_divide(f, a, b, signed)[1]
        case "mod" | "floordiv":
            return _floored(f, name, a, b, signed)
        case "min":
            return f.min_(a, b, signed=signed)
        case "max":
            return f.max_(a, b, signed=signed)
        case "abs":
            return f.max_(a, f.neg(a)) if signed else a
        case "sign":
            positive = f.cast(f.cmp("sgt" if signed else "ugt", a, 0), a.element)
            return f.sub(positive, f.cast(f.cmp("slt", a, 0), a.element)) if signed else positive
        case "reciprocal":
            return _int_divide(f, f.const(a.type, 1), a, signed)[0]
        case "floor" | "ceil" | "trunc" | "round":
            return a
        case "isnan" | "isinf":
            return f.const(vector("i1", a.lanes), 0)
        case "bitand":
            return f.and_(a, b)
        case "bitor":
            return f.or_(a, b)
        case "bitxor":
            return f.xor(a, b)
        case "bitnot":
            return f.not_(a)
        case "popcount":
            return f.unary("ctpop", a)
        case "shl" | "shr":
            return _shifted(f, name, a, b, signed)
        case "pow":
            return _int_pow(f, a, b, signed)
    raise NotSupported(f"no operation {name!r} on integers")


def _int_divide(f: Fn, a: Val, b: Val, signed: bool) -> tuple[Val, Val]:
    """Quotient toward zero and remainder; both 0 for a zero divisor, and the smallest number by -1 wraps."""
    by_zero = f.cmp("eq", b, 0)
    unsafe = by_zero
    if signed:
        smallest = -(1 << (int(a.element[1:]) - 1))
        unsafe = f.or_(by_zero, f.and_(f.cmp("eq", a, smallest), f.cmp("eq", b, -1)))
    divisor = f.select(unsafe, f.const(b.type, 1), b)
    width = int(a.element[1:])
    if a.lanes > 1 and width < 64 and b.name.startswith("%"):
        # there is no vector instruction for integers; a float quotient with room to spare truncates to the exact one
        kind = "double" if width == 32 else "float"
        wide = f.div(f.cast(a, kind, signed=signed), f.cast(divisor, kind, signed=signed))
        quotient = f.cast(f.cast(wide, "i64" if width == 32 and not signed else "i32"), a.element)
    else:
        quotient = f.div(a, divisor, signed=signed)
    rest = f.sub(a, f.mul(quotient, divisor))
    nothing = f.const(a.type, 0)
    return f.select(by_zero, nothing, quotient), f.select(by_zero, nothing, rest)


def _floored(f: Fn, name: str, a: Val, b: Val, signed: bool) -> Val:
    quotient, rest = _int_divide(f, a, b, signed)
    if not signed:
        return rest if name == "mod" else quotient
    opposite = f.and_(f.cmp("ne", rest, 0), f.cmp("slt", f.xor(rest, b), 0))
    if name == "mod":
        return f.add(rest, f.select(opposite, b, f.const(b.type, 0)))
    return f.sub(quotient, f.cast(opposite, a.element))


def divides_quickly(args: list[Val], dtype: DType) -> bool:
    """Vectors of signed integers by one run-time number, all of which a double holds exactly."""
    a, b = args
    return a.lanes > 1 and b.lanes == 1 and b.name.startswith("%") and is_signed(dtype) and dtype.bits <= 32


def floor_by_scalar(f: Fn, name: str, a: Val, b: Val) -> Val:
    """Floored quotient or remainder by one number for all lanes: a multiplication by its reciprocal.

    Half a unit is added to the dividend first, so that the quotient lies at least 0.5 / |b| from an integer, further
    than rounding can move it.
    """
    divisor = f.cast(b, "double")
    reciprocal = f.div(f.const("double", 1.0), divisor)
    half = f.intrinsic("llvm.copysign.f64", "double", [f.const("double", 0.5), divisor])
    wide = f.mul(f.add(f.cast(a, "double"), f.splat(half, a.lanes)), f.splat(reciprocal, a.lanes))
    low = f.cast(f.unary("floor", wide), "i32")
    quotient = f.select(f.splat(f.cmp("eq", b, 0), a.lanes), f.zero(low.type), low)
    quotient = f.cast(quotient, a.element)
    if name == "floordiv":
        return quotient
    rest = f.sub(a, f.mul(quotient, f.splat(b, a.lanes)))
    return f.select(f.splat(f.cmp("eq", b, 0), a.lanes), f.zero(rest.type), rest)


def _shifted(f: Fn, name: str, a: Val, b: Val, signed: bool) -> Val:
    """Shifts by the width or more leave nothing (of a negative number shifted right: its sign)."""
    width = int(a.element[1:])
    inside = f.cmp("ult", b, width)
    if name == "shr" and signed:
        return f.ashr(a, f.select(inside, b, f.const(b.type, width - 1)))
    amount = f.select(inside, b, f.const(b.type, 0))
    moved = f.shl(a, amount) if name == "shl" else f.lshr(a, amount)
    return f.select(inside, moved, f.const(a.type, 0))


def _int_pow(f: Fn, a: Val, b: Val, signed: bool) -> Val:
    """By squaring, modulo the type's range; a negative exponent gives what 1 / a**-b truncates to."""
    power = f.var(a.type, f.const(a.type, 1))
    base = f.var(a.type, a)
    left = f.var(b.type, b if not signed else f.max_(b, f.neg(b)))
    with f.while_() as again:
        rest = left.get()
        some = f.cmp("ne", rest, 0)
        again.only(some if a.lanes == 1 else f.reduce("or", some))
        odd = f.cmp("ne", f.and_(rest, 1), 0)
        square = base.get()
        power.set(f.select(odd, f.mul(power.get(), square), power.get()))
        base.set(f.mul(square, square))
        left.set(f.lshr(rest, 1))
    result = power.get()
    if not signed:
        return result
    unit = f.or_(f.cmp("eq", a, 1), f.cmp("eq", a, -1))
    return f.select(f.and_(f.cmp("slt", b, 0), f.not_(unit)), f.const(a.type, 0), result)
