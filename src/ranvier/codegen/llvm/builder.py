"""A small writer of LLVM IR text.

Text rather than an object tree because it is several times quicker to make and kernels are many. A :class:`Val` is a
typed name; :class:`Fn` writes one function. Mutable variables are stack slots that LLVM's ``sroa`` turns into
registers, so kernel authors write loops and assignments, never phi nodes.

Types are LLVM's own spellings: ``float``, ``i64``, ``ptr``, ``<16 x float>``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

FLOAT_TYPES = {"half": 16, "bfloat": 16, "float": 32, "double": 64}
# Contracting a*b+c is always allowed; NaN and infinities keep their meaning.
_FAST = "contract"
_REASSOCIATE = "contract reassoc"


def vector(element: str, lanes: int) -> str:
    """The vector type, or the scalar one for a single lane."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def lanes_of(kind: str) -> int:
    return int(kind[1 : kind.index(" ")]) if kind[0] == "<" else 1


def element_of(kind: str) -> str:
    return kind[kind.index(" x ") + 3 : -1] if kind[0] == "<" else kind


def size_of(element: str) -> int:
    """Bytes of a scalar type in memory."""
    if element in FLOAT_TYPES:
        return FLOAT_TYPES[element] // 8
    if element == "ptr":
        return 8
    return max(1, int(element[1:]) // 8)


class Val:
    """A value of the function under construction: its type and its name (or literal)."""

    __slots__ = ("fn", "name", "type")

    def __init__(self, fn: Fn, kind: str, name: str) -> None:
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


class Var:
    """A mutable variable."""

    __slots__ = ("fn", "slot", "type")

    def __init__(self, fn: Fn, kind: str, slot: str) -> None:
        self.fn = fn
        self.type = kind
        self.slot = slot

    def get(self) -> Val:
        return self.fn.emit(self.type, f"load {self.type}, ptr {self.slot}")

    def set(self, value: Operand) -> None:
        value = value if isinstance(value, Val) else self.fn.const(self.type, value)
        assert value.type == self.type, f"variable of {self.type} set to {value.type}"
        self.fn.line(f"store {self.type} {value.name}, ptr {self.slot}")


class Module:
    """One compilation unit: functions, and what they declare."""

    def __init__(self) -> None:
        self.functions: list[Fn] = []
        self.declared: dict[str, str] = {}
        self.globals: list[str] = []

    def function(
        self, name: str, params: Sequence[tuple[str, str]], ret: str = "void", *, internal: bool = False
    ) -> Fn:
        """A new function; ``params`` are (type, name) pairs. ``ptr`` parameters are assumed not to alias."""
        made = Fn(self, name, params, ret, internal)
        self.functions.append(made)
        return made

    def declare(self, name: str, ret: str, args: Sequence[str]) -> None:
        self.declared[name] = f"declare {ret} @{name}({', '.join(args)})"

    def table(self, name: str, element: str, values: Sequence[int | float]) -> str:
        """A constant array; returns its name, a ``ptr``."""
        items = ", ".join(f"{element} {literal(element, v)}" for v in values)
        self.globals.append(f"@{name} = internal constant [{len(values)} x {element}] [{items}], align 64")
        return f"@{name}"

    def __str__(self) -> str:
        parts = [*self.globals, *(str(f) for f in self.functions), *self.declared.values()]
        return "\n\n".join(parts) + "\n"


class Fn:
    """One function, written from top to bottom."""

    def __init__(
        self, module: Module, name: str, params: Sequence[tuple[str, str]], ret: str = "void", internal: bool = False
    ) -> None:
        self.module = module
        self.name = name
        self.ret_type = ret
        self._params = list(params)
        self._internal = internal
        self._entry: list[str] = []  # stack slots: they must stand in the first block
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"
        self.args = {n: Val(self, t, f"%{n}") for t, n in params}

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

    def __str__(self) -> str:
        params = ", ".join(f"{t} noalias %{n}" if t == "ptr" else f"{t} %{n}" for t, n in self._params)
        linkage = "internal " if self._internal else ""
        body = "\n".join(["entry:", *self._entry, *self._lines])
        return f"define {linkage}{self.ret_type} @{self.name}({params}) nounwind {{\n{body}\n}}"

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
        return Val(self, vector(element, lanes), f"<{', '.join(f'{element} {i}' for i in range(lanes))}>")

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

    def intrinsic(self, name: str, ret: str, args: Sequence[Val]) -> Val:
        self.module.declare(name, ret, [a.type for a in args])
        given = ", ".join(f"{a.type} {a.name}" for a in args)
        if ret == "void":
            self.line(f"call void @{name}({given})")
            return Val(self, "void", "")
        return self.emit(ret, f"call {ret} @{name}({given})")

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

    # -- memory -----------------------------------------------------------------------------------------------------

    def gep(self, base: Val, index: Operand, element: str = "i8") -> Val:
        """The address of ``base[index]`` for elements of the given type."""
        if isinstance(index, int) and index == 0:
            return base
        at = index if isinstance(index, Val) else self.i64(int(index))
        return self.emit("ptr", f"getelementptr inbounds {element}, ptr {base.name}, i64 {at.name}")

    def load(self, kind: str, address: Val, align: int | None = None, *, invariant: bool = False) -> Val:
        """Load; ``align`` defaults to that of the element, never of the vector: tensors may start anywhere."""
        align = align or size_of(element_of(kind))
        tail = ", !invariant.load !{}" if invariant else ""
        return self.emit(kind, f"load {kind}, ptr {address.name}, align {align}{tail}")

    def store(self, value: Val, address: Val, align: int | None = None) -> None:
        align = align or size_of(value.element)
        self.line(f"store {value.type} {value.name}, ptr {address.name}, align {align}")

    def masked_load(
        self, kind: str, address: Val, mask: Val, other: Val | None = None, align: int | None = None
    ) -> Val:
        filler = other or self.zero(kind)
        name = f"llvm.masked.load.{mangled(kind)}.p0"
        self.module.declare(name, kind, ["ptr", mask.type, kind])
        at = f"ptr align {align or size_of(element_of(kind))} {address.name}"
        return self.emit(kind, f"call {kind} @{name}({at}, {mask.type} {mask.name}, {kind} {filler.name})")

    def masked_store(self, value: Val, address: Val, mask: Val, align: int | None = None) -> None:
        name = f"llvm.masked.store.{mangled(value.type)}.p0"
        self.module.declare(name, "void", [value.type, "ptr", mask.type])
        at = f"ptr align {align or size_of(value.element)} {address.name}"
        self.line(f"call void @{name}({value.type} {value.name}, {at}, {mask.type} {mask.name})")

    def gather(self, element: str, base: Val, indices: Val, mask: Val | None = None, other: Val | None = None) -> Val:
        """One element per lane from ``base[indices]``."""
        lanes = indices.lanes
        kind = vector(element, lanes)
        where = self.emit(
            vector("ptr", lanes), f"getelementptr inbounds {element}, ptr {base.name}, {indices.type} {indices.name}"
        )
        if lanes == 1:
            return self.load(kind, where)
        on = mask or self.const(vector("i1", lanes), 1)
        filler = other or self.zero(kind)
        name = f"llvm.masked.gather.{mangled(kind)}.{mangled(where.type)}"
        self.module.declare(name, kind, [where.type, on.type, kind])
        at = f"{where.type} align {size_of(element)} {where.name}"
        return self.emit(kind, f"call {kind} @{name}({at}, {on.type} {on.name}, {kind} {filler.name})")

    def scatter(self, value: Val, base: Val, indices: Val, mask: Val | None = None) -> None:
        lanes = indices.lanes
        where = self.emit(
            vector("ptr", lanes),
            f"getelementptr inbounds {value.element}, ptr {base.name}, {indices.type} {indices.name}",
        )
        if lanes == 1:
            self.store(value, where)
            return
        on = mask or self.const(vector("i1", lanes), 1)
        name = f"llvm.masked.scatter.{mangled(value.type)}.{mangled(where.type)}"
        self.module.declare(name, "void", [value.type, where.type, on.type])
        at = f"{where.type} align {size_of(value.element)} {where.name}"
        self.line(f"call void @{name}({value.type} {value.name}, {at}, {on.type} {on.name})")

    def prefetch(self, address: Val, *, write: bool = False, locality: int = 3) -> None:
        self.module.declared["llvm.prefetch.p0"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        self.line(f"call void @llvm.prefetch.p0(ptr {address.name}, i32 {int(write)}, i32 {locality}, i32 1)")

    def stack(self, element: str, count: int, align: int = 64) -> Val:
        """An array on the stack; for small scratch only."""
        slot = self.fresh("stack")
        self._entry.append(f"  {slot} = alloca [{count} x {element}], align {align}")
        return Val(self, "ptr", slot)

    def var(self, kind: str, value: Operand | None = None) -> Var:
        slot = self.fresh("var")
        self._entry.append(f"  {slot} = alloca {kind}")
        made = Var(self, kind, slot)
        if value is not None:
            made.set(value)
        return made

    # -- control ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Val]:
        """``for i in range(start, stop, step)`` over i64 with a positive step; nothing runs when start >= stop."""
        first = start if isinstance(start, Val) else self.i64(int(start))
        last = stop if isinstance(stop, Val) else self.i64(int(stop))
        by = step if isinstance(step, Val) else self.i64(int(step))
        self._count += 1
        n = self._count
        head, end = f"head{n}", f"end{n}"
        enter = self.cmp("slt", first, last)
        before = self._block
        self.line(f"br i1 {enter.name}, label %{head}, label %{end}")
        self.label(head)
        index = Val(self, "i64", f"%i{n}")
        # the back edge's block is known only at the end: the line is filled in then
        self._lines.append("")
        where = len(self._lines) - 1
        yield index
        nxt = self.emit("i64", f"add nsw i64 {index.name}, {by.name}")
        self._lines[where] = f"  {index.name} = phi i64 [ {first.name}, %{before} ], [ {nxt.name}, %{self._block} ]"
        again = self.cmp("slt", nxt, last)
        self.line(f"br i1 {again.name}, label %{head}, label %{end}")
        self.label(end)

    @contextmanager
    def if_(self, condition: Val) -> Iterator[None]:
        self._count += 1
        n = self._count
        self.line(f"br i1 {condition.name}, label %then{n}, label %after{n}")
        self.label(f"then{n}")
        yield
        self.line(f"br label %after{n}")
        self.label(f"after{n}")

    @contextmanager
    def if_else(self, condition: Val) -> Iterator[_Else]:
        """``with f.if_else(c) as other: … ; other(); …``"""
        self._count += 1
        n = self._count
        self.line(f"br i1 {condition.name}, label %then{n}, label %else{n}")
        self.label(f"then{n}")
        other = _Else(self, n)
        yield other
        if not other.used:
            other()
        self.line(f"br label %after{n}")
        self.label(f"after{n}")

    @contextmanager
    def while_(self) -> Iterator[_While]:
        """``with f.while_() as w: …; w.until(condition)`` or ``w.only(condition)`` anywhere in the body."""
        self._count += 1
        n = self._count
        self.line(f"br label %again{n}")
        self.label(f"again{n}")
        yield _While(self, n)
        self.line(f"br label %again{n}")
        self.label(f"done{n}")

    def call(self, name: str, ret: str, args: Sequence[Val]) -> Val:
        """Call a function of the same module."""
        given = ", ".join(f"{a.type} {a.name}" for a in args)
        if ret == "void":
            self.line(f"call void @{name}({given})")
            return Val(self, "void", "")
        return self.emit(ret, f"call {ret} @{name}({given})")

    def call_pointer(self, address: Val, ret: str, args: Sequence[Val]) -> Val:
        """Call through a function pointer."""
        given = ", ".join(f"{a.type} {a.name}" for a in args)
        if ret == "void":
            self.line(f"call void {address.name}({given})")
            return Val(self, "void", "")
        return self.emit(ret, f"call {ret} {address.name}({given})")

    def ret(self, value: Val | None = None) -> None:
        self.line("ret void" if value is None else f"ret {value.type} {value.name}")


class _Else:
    __slots__ = ("fn", "n", "used")

    def __init__(self, fn: Fn, n: int) -> None:
        self.fn, self.n, self.used = fn, n, False

    def __call__(self) -> None:
        self.used = True
        self.fn.line(f"br label %after{self.n}")
        self.fn.label(f"else{self.n}")


class _While:
    __slots__ = ("fn", "n")

    def __init__(self, fn: Fn, n: int) -> None:
        self.fn, self.n = fn, n

    def until(self, condition: Val) -> None:
        """Leave the loop when the condition holds."""
        self.fn._count += 1
        on = f"on{self.fn._count}"
        self.fn.line(f"br i1 {condition.name}, label %done{self.n}, label %{on}")
        self.fn.label(on)

    def only(self, condition: Val) -> None:
        """Leave the loop when the condition does not hold."""
        self.fn._count += 1
        on = f"on{self.fn._count}"
        self.fn.line(f"br i1 {condition.name}, label %{on}, label %done{self.n}")
        self.fn.label(on)


def literal(element: str, value: Any) -> str:
    """A constant as LLVM writes it; floats by their bits, so nothing is lost."""
    if element == "float":
        bits = struct.unpack("<f", struct.pack("<f", _clamped(value)))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', bits))[0]:016X}"
    if element == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"
    if element == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', float(value)))[0]:04X}"
    if element == "bfloat":
        bits32 = struct.unpack("<I", struct.pack("<f", _clamped(value)))[0]
        return f"0xR{bits32 >> 16:04X}"
    if element == "i1":
        return "true" if value else "false"
    if element == "ptr":
        return "null"
    return str(int(value))


def _clamped(value: float) -> float:
    """float(value), with what does not fit float32 as an infinity instead of an error."""
    value = float(value)
    if value != value or abs(value) <= 3.4028235677973366e38:
        return value
    return float("inf") if value > 0 else float("-inf")


def mangled(kind: str) -> str:
    """The suffix of overloaded intrinsics: ``<16 x float>`` is ``v16f32``."""
    element = element_of(kind)
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}.get(element, element)
    return f"v{lanes_of(kind)}{short}" if kind[0] == "<" else short
