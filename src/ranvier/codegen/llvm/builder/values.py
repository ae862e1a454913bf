"""Values of a function under construction: constants, arithmetic, conversions, lanes of vectors."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.llvm.builder.types import FLOAT_TYPES, element_of, lanes_of, literal, mangled, vector

# Contracting a*b+c is always allowed; NaN and infinities keep their meaning.
_FAST = "contract"
_REASSOCIATE = "contract reassoc"


class Val:
    """A value of the function under construction: its type and its name (or literal)."""

    __slots__ = ("fn", "name", "type")

    def __init__(self, fn: Values, kind: str, name: str) -> None:
        self.fn = fn
        self.type = kind
        self.name = name

    def __add__(self, other: Operand) -> Val:
        return self.fn.add(self, other)

    def __sub__(self, other: Operand) -> Val:
        return self.fn.sub(self, other)

    def __mul__(self, other: Operand) -> Val:
        return self.fn.mul(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Operand) -> Val:
        return self.fn.sub(self.fn.like(self, other), self)

    @property
    def lanes(self) -> int:
        return lanes_of(self.type)

    @property
    def element(self) -> str:
        return element_of(self.type)

    @property
    def is_float(self) -> bool:
        return self.element in FLOAT_TYPES

    def __repr__(self) -> str:
        return f"{self.type} {self.name}"


Operand = Val | int | float


class Declarations:
    """Functions from elsewhere that the functions of a module call."""

    def __init__(self) -> None:
        self.declared: dict[str, str] = {}

    def declare(self, name: str, ret: str, args: Sequence[str]) -> None:
        self.declared[name] = f"declare {ret} @{name}({', '.join(args)})"


class Values:
    """The part of a function's writer that names values and computes with them."""

    def __init__(self, module: Declarations) -> None:
        self.module = module
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"

    # -- text -------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def fresh(self, hint: str = "v") -> str:
        self._count += 1
        return f"%{hint}{self._count}"

    def emit(self, kind: str, text: str) -> Val:
        name = self.fresh()
        self._lines.append(f"  {name} = {text}")
        return Val(self, kind, name)

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    # -- values -----------------------------------------------------------------------------------------------------

    def const(self, kind: str, value: int | float) -> Val:
        element = element_of(kind)
        text = literal(element, value)
        return Val(self, kind, text if kind[0] != "<" else f"splat ({element} {text})")

    def i64(self, value: int) -> Val:
        return Val(self, "i64", str(value))

    def lane_ids(self, lanes: int, element: str = "i64") -> Val:
        """0, 1, 2 … in the lanes of a vector (0 for a single lane)."""
        if lanes == 1:
            return self.const(element, 0)
        return self.listed(element, range(lanes))

    def listed(self, element: str, values: Sequence[int | float]) -> Val:
        """A vector of these constants."""
        text = ", ".join(f"{element} {literal(element, value)}" for value in values)
        return Val(self, vector(element, len(values)), f"<{text}>")

    def zero(self, kind: str) -> Val:
        return Val(self, kind, "null" if kind == "ptr" else "zeroinitializer")

    def like(self, model: Val, value: Operand) -> Val:
        """``value`` as a value of the same type: a constant where it is a number, splat where it is a scalar."""
        if isinstance(value, Val):
            if value.type != model.type and value.type == model.element:
                return self.splat(value, model.lanes)
            return value
        return self.const(model.type, value)

    def _pair(self, a: Operand, b: Operand) -> tuple[Val, Val]:
        if isinstance(a, Val):
            if isinstance(b, Val) and a.type != b.type and a.type == b.element:
                return self.splat(a, b.lanes), b
            b = self.like(a, b)
        else:
            assert isinstance(b, Val)
            a = self.like(b, a)
        assert a.type == b.type, f"{a!r} and {b!r}"
        return a, b

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _binary(self, int_op: str, float_op: str, a: Operand, b: Operand, fast: str = _FAST) -> Val:
        x, y = self._pair(a, b)
        op = f"{float_op} {fast}" if x.is_float else int_op
        return self.emit(x.type, f"{op} {x.type} {x.name}, {y.name}")

    def add(self, a: Operand, b: Operand, *, reassociate: bool = False) -> Val:
        if isinstance(b, int) and b == 0 and isinstance(a, Val) and not a.is_float:
            return a
        return self._binary("add", "fadd", a, b, _REASSOCIATE if reassociate else _FAST)

    def sub(self, a: Operand, b: Operand) -> Val:
        return self._binary("sub", "fsub", a, b)

    def mul(self, a: Operand, b: Operand) -> Val:
        if isinstance(b, int) and b == 1 and isinstance(a, Val) and not a.is_float:
            return a
        return self._binary("mul", "fmul", a, b)

    def div(self, a: Operand, b: Operand, *, signed: bool = True) -> Val:
        """Quotient; integers truncate toward zero (LLVM's rule; division by zero is undefined)."""
        return self._binary("sdiv" if signed else "udiv", "fdiv", a, b)

    def rem(self, a: Operand, b: Operand, *, signed: bool = True) -> Val:
        return self._binary("srem" if signed else "urem", "frem", a, b)

    def and_(self, a: Operand, b: Operand) -> Val:
        return self._binary("and", "and", a, b, "")

    def or_(self, a: Operand, b: Operand) -> Val:
        return self._binary("or", "or", a, b, "")

    def xor(self, a: Operand, b: Operand) -> Val:
        return self._binary("xor", "xor", a, b, "")

    def not_(self, a: Val) -> Val:
        return self.xor(a, -1 if a.element != "i1" else 1)

    def shl(self, a: Operand, b: Operand) -> Val:
        return self._binary("shl", "shl", a, b, "")

    def lshr(self, a: Operand, b: Operand) -> Val:
        return self._binary("lshr", "lshr", a, b, "")

    def ashr(self, a: Operand, b: Operand) -> Val:
        return self._binary("ashr", "ashr", a, b, "")

    def neg(self, a: Val) -> Val:
        if a.is_float:
            return self.emit(a.type, f"fneg {a.type} {a.name}")
        return self.sub(self.const(a.type, 0), a)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Val:
        """a*b + c, fused where the target has the instruction."""
        model = next(x for x in (a, b, c) if isinstance(x, Val))
        model = next((x for x in (a, b, c) if isinstance(x, Val) and x.lanes > 1), model)
        x, y, z = self.like(model, a), self.like(model, b), self.like(model, c)
        return self.intrinsic(f"llvm.fmuladd.{mangled(x.type)}", x.type, [x, y, z])

    def min_(self, a: Operand, b: Operand, *, signed: bool = True) -> Val:
        """The smaller; NaN if either float is NaN."""
        x, y = self._pair(a, b)
        name = "minimum" if x.is_float else "smin" if signed else "umin"
        return self.intrinsic(f"llvm.{name}.{mangled(x.type)}", x.type, [x, y])

    def max_(self, a: Operand, b: Operand, *, signed: bool = True) -> Val:
        x, y = self._pair(a, b)
        name = "maximum" if x.is_float else "smax" if signed else "umax"
        return self.intrinsic(f"llvm.{name}.{mangled(x.type)}", x.type, [x, y])

    def quick_min(self, a: Operand, b: Operand) -> Val:
        """One instruction on x86: ``a < b ? a : b``, so ``b`` where either is NaN."""
        x, y = self._pair(a, b)
        return self.select(self.cmp("olt", x, y), x, y)

    def quick_max(self, a: Operand, b: Operand) -> Val:
        x, y = self._pair(a, b)
        return self.select(self.cmp("ogt", x, y), x, y)

    def number_min(self, a: Operand, b: Operand) -> Val:
        """One instruction on NEON: the smaller, or the number where the other is NaN."""
        x, y = self._pair(a, b)
        return self.intrinsic(f"llvm.minnum.{mangled(x.type)}", x.type, [x, y])

    def number_max(self, a: Operand, b: Operand) -> Val:
        x, y = self._pair(a, b)
        return self.intrinsic(f"llvm.maxnum.{mangled(x.type)}", x.type, [x, y])

    def unary(self, name: str, a: Val) -> Val:
        """An LLVM intrinsic of one operand and its type: ``sqrt fabs floor ceil trunc rint roundeven ctpop …``."""
        return self.intrinsic(f"llvm.{name}.{mangled(a.type)}", a.type, [a])

    def cmp(self, predicate: str, a: Operand, b: Operand) -> Val:
        """``oeq olt ogt ole oge une uno …`` for floats, ``eq ne slt sgt sle sge ult …`` for integers and pointers."""
        x, y = self._pair(a, b)
        op = "fcmp" if x.is_float else "icmp"
        return self.emit(vector("i1", x.lanes), f"{op} {predicate} {x.type} {x.name}, {y.name}")

    def select(self, condition: Val, a: Operand, b: Operand) -> Val:
        x, y = self._pair(a, b)
        return self.emit(x.type, f"select {condition.type} {condition.name}, {x.type} {x.name}, {y.type} {y.name}")

    # -- conversions ------------------------------------------------------------------------------------------------

    def cast(self, a: Val, element: str, *, signed: bool = True) -> Val:
        """To another element type by LLVM's conversion (out-of-range float to integer is undefined there)."""
        if a.element == element:
            return a
        target = vector(element, a.lanes)
        source, to_float = a.is_float, element in FLOAT_TYPES
        if source and to_float:
            op = "fptrunc" if FLOAT_TYPES[element] < FLOAT_TYPES[a.element] else "fpext"
        elif source:
            op = "fptosi" if signed else "fptoui"
        elif to_float:
            op = "sitofp" if signed and a.element != "i1" else "uitofp"
        elif int(element[1:]) < int(a.element[1:]):
            op = "trunc"
        else:
            op = "sext" if signed and a.element != "i1" else "zext"
        return self.emit(target, f"{op} {a.type} {a.name} to {target}")

    def bitcast(self, a: Val, kind: str) -> Val:
        return a if a.type == kind else self.emit(kind, f"bitcast {a.type} {a.name} to {kind}")

    # -- vectors ----------------------------------------------------------------------------------------------------

    def splat(self, a: Val, lanes: int) -> Val:
        if lanes == 1:
            return a
        kind = vector(a.type, lanes)
        first = self.emit(kind, f"insertelement {kind} poison, {a.type} {a.name}, i64 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.emit(kind, f"shufflevector {kind} {first.name}, {kind} poison, {zeros}")

    def extract(self, a: Val, lane: Operand) -> Val:
        index = lane if isinstance(lane, Val) else self.i64(int(lane))
        return self.emit(a.element, f"extractelement {a.type} {a.name}, {index.type} {index.name}")

    def insert(self, a: Val, item: Val, lane: Operand) -> Val:
        index = lane if isinstance(lane, Val) else self.i64(int(lane))
        return self.emit(a.type, f"insertelement {a.type} {a.name}, {item.type} {item.name}, {index.type} {index.name}")

    def shuffle(self, a: Val, b: Val | None, lanes: Sequence[int]) -> Val:
        """Lanes picked from ``a`` then ``b`` (-1: don't care)."""
        other = f"{a.type} {b.name}" if b is not None else f"{a.type} poison"
        kind = vector(a.element, len(lanes)) if len(lanes) > 1 else f"<1 x {a.element}>"
        picks = ", ".join(f"i32 {k}" if k >= 0 else "i32 poison" for k in lanes)
        return self.emit(kind, f"shufflevector {a.type} {a.name}, {other}, <{len(lanes)} x i32> <{picks}>")

    def reduce(self, op: str, a: Val) -> Val:
        """All lanes into one: ``add mul smin smax umin umax fmin fmax fminimum fmaximum and or xor``.

        Float sums and products combine pairwise (their order is not fixed, and the design allows it here).
        """
        if a.lanes == 1:
            return a
        if op in ("add", "mul") and a.is_float:
            start = self.const(a.element, -0.0 if op == "add" else 1.0)
            name = f"llvm.vector.reduce.f{op}.{mangled(a.type)}"
            self.module.declare(name, a.element, [a.element, a.type])
            call = f"call {_REASSOCIATE} {a.element} @{name}({start.type} {start.name}, {a.type} {a.name})"
            return self.emit(a.element, call)
        return self.intrinsic(f"llvm.vector.reduce.{op}.{mangled(a.type)}", a.element, [a])

    def mask_below(self, lanes: int, count: Val) -> Val:
        """A mask of the lanes whose number is less than ``count`` (an i64 of at least 0)."""
        return self.cmp("ult", self.lane_ids(lanes), self.splat(count, lanes))

    # -- calls ------------------------------------------------------------------------------------------------------

    def opaque(self, value: Val, register: str = "r") -> Val:
        """The same value, of which the compiler knows nothing: it keeps a register of its own, of the kind that the
        processor's inline assembly calls so, and is not made anew of others for every use."""
        return self.emit(value.type, f'call {value.type} asm "", "={register},0"({value.type} {value.name})')

    def intrinsic(self, name: str, ret: str, args: Sequence[Val]) -> Val:
        self.module.declare(name, ret, [a.type for a in args])
        return self.call(name, ret, args)

    def call(self, name: str, ret: str, args: Sequence[Val]) -> Val:
        """Call a function of the same module, or one that it declares."""
        return self._call(f"@{name}", ret, args)

    def call_pointer(self, address: Val, ret: str, args: Sequence[Val]) -> Val:
        """Call through a function pointer."""
        return self._call(address.name, ret, args)

    def _call(self, function: str, ret: str, args: Sequence[Val]) -> Val:
        text = f"call {ret} {function}({', '.join(f'{a.type} {a.name}' for a in args)})"
        if ret != "void":
            return self.emit(ret, text)
        self.line(text)
        return Val(self, "void", "")
