"""What a printed kernel knows at a point of its text: positions along axes, what was loaded, values already named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Nest, Op, Operand, Result, Size
from ranvier.codegen.loops.narrow import Narrower
from ranvier.codegen.loops.normalize import leaves
from ranvier.codegen.triton.exprs import ExprPrinter, Value, converted
from ranvier.codegen.triton.schedule import Plan
from ranvier.codegen.triton.types import NARROW, literal, register
from ranvier.dtypes import DType

_LIMIT = 1 << 31  # positions from here on take 64 bits


class Writer:
    """Lines of a function, indented as loops are opened; equal texts are named once while their scope lasts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 0
        self._scopes: list[dict[Any, Any]] = [{}]
        self._named = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def assign(self, text: str, hint: str = "v") -> str:
        """A name for the value of a text."""
        found = self.known(("text", text))
        if found is None:
            found = f"{hint}{self._named}"
            self._named += 1
            self.line(f"{found} = {text}")
            self.keep(("text", text), found)
        return str(found)

    def known(self, key: Any) -> Any:
        for scope in reversed(self._scopes):
            found = scope.get(key)
            if found is not None:
                return found
        return None

    def keep(self, key: Any, value: Any) -> None:
        self._scopes[-1][key] = value

    def forget(self) -> None:
        for scope in self._scopes:
            scope.clear()

    @contextmanager
    def loop(self, head: str) -> Iterator[None]:
        self.line(head)
        self.indent += 1
        self._scopes.append({})
        yield
        self._scopes.pop()
        self.indent -= 1


class Access(Writer):
    """Positions, loads, stores and values of one kernel."""

    def __init__(self, nest: Nest, plan: Plan, shared: frozenset[int]) -> None:
        super().__init__()
        self.nest = nest
        self.plan = plan
        self.numbers: dict[str, int] = {}  # run-time arguments by name
        self.results: dict[int, Value] = {}
        self.two = plan.way in ("tiled", "rows")  # whether the tile has two axes
        self.full = 3 if self.two else 1
        self.written = nest.written()
        self.wide = _wide(nest)
        self.reverse = False
        self.steps = plan.way == "columns" or (plan.way == "rows" and not plan.whole)
        self._printer = ExprPrinter(self, shared)
        self._narrow = Narrower(nest.extents)
        self._loops = 0
        self._sizes: dict[int, str] = {}
        # the count along each group of axes: its text, and the bits of the tile's axes along which it varies
        self._flat: dict[str, Value] = {}
        self._inside: dict[int, str] = {}  # by bit: where a position along that axis of the tile exists
        self._groups = {"x": plan.first, "r": plan.second, "b": plan.rest}
        self._varies: dict[int, bool] = {}
        self._alive: list[Expr] = []  # identities are only good while their objects live

    # -- positions ----------------------------------------------------------------------------------------------------

    def number(self, name: str, value: int) -> str:
        self.numbers[name] = value
        return name

    def points(self, group: str) -> str:
        return self.number(f"n_{group}", math.prod(self.nest.extents[a] for a in self._groups[group]))

    def shape(self, dims: int) -> str:
        if not self.two:
            return "(X,)"
        return f"({'X' if dims & 1 else '1'}, {'R' if dims & 2 else '1'})"

    def begin(self) -> None:
        """The position of this program's tile."""
        program = "tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")
        column = "[:, None]" if self.two else ""
        if self.plan.way == "tiled":
            self.line(f"program = {program}")
            across = self.assign(f"tl.cdiv({self.points('r')}, R)", "tiles")
            down = self.assign(f"tl.cdiv({self.points('x')}, X)", "tiles")
            self.line(f"r = program % {across} * R + tl.arange(0, R)[None, :]")
            self.line(f"x = program // {across} % {down} * X + tl.arange(0, X)[:, None]")
            if self.plan.rest:
                self._flat["b"] = Value(self.assign(f"program // {across} // {down}", "b"), 0)
            self._bind_row("r")
        else:
            self.line(f"x = {program} * X + tl.arange(0, X){column}")
        self.line(f"in_x = x < {self.points('x')}")
        self._flat["x"], self._inside[1] = Value("x", 1), "in_x"
        if self.plan.way == "rows" and self.plan.whole:
            self.line("r = tl.arange(0, R)[None, :]")
            self._bind_row("r")

    def _bind_row(self, name: str, low: bool = False) -> None:
        """Let the row be counted by a name, of positions that may lie past its ends."""
        self._flat["r"] = Value(name, 2)
        inside = "in_" + name
        below = f"({name} >= 0) & " if low else ""
        test = f"{name} < {self.points('r')}"
        self.line(f"{inside} = {below}({test})" if below else f"{inside} = {test}")
        self._inside[2] = inside

    @property
    def in_row(self) -> str:
        return self._inside[2]

    @contextmanager
    def row_steps(self, exprs: list[Expr]) -> Iterator[None]:
        """Every point of the row: all at once, in steps, or one by one."""
        before = dict(self._flat), dict(self._inside)
        if not self.steps:
            if self.reverse:
                self._turned(self._flat["r"].text, 2)
            yield
            self._flat, self._inside = before
            return
        self.hoist(exprs)
        self._loops += 1
        name = f"r{self._loops}"
        if not self.two:
            steps = f"tl.range(0, {self.points('r')}, loop_unroll_factor=4)"  # so that loads are under way together
            with self.loop(f"for {name}b in {steps}:"):
                self.line(f"{name} = tl.cast({name}b, {'tl.int64' if self.wide else 'tl.int32'})")
                self._flat["r"] = Value(name, 0)
                if self.reverse:
                    self._turned(name, 0)
                yield
        else:
            with self.loop(f"for {name}b in range(0, {self.points('r')}, R):"):
                first = f"tl.cast({name}b, tl.int64)" if self.wide else f"{name}b"
                self.line(f"{name} = {first} + tl.arange(0, R)[None, :]")
                self._bind_row(name)
                if self.reverse:
                    self._turned(name, 2)
                yield
        self._flat, self._inside = before

    def _turned(self, name: str, dims: int) -> None:
        """Count the row from its end."""
        self._flat["r"] = Value(self.assign(f"{self.points('r')} - 1 - {name}", "r_back"), dims)

    @contextmanager
    def shifted(self) -> Iterator[None]:
        """Positions one before those of now, in the order of the scan; the first has none before it."""
        before = dict(self._flat), dict(self._inside)
        step = "+ 1" if self.reverse else "- 1"
        name = self.assign(f"{self._flat['r'].text} {step}", "r_before")
        self._bind_row(name, low=True)
        yield
        self._flat, self._inside = before

    def _span(self, group: str, first: int, last: int) -> Value:
        """The position along neighbouring axes of a group, counted through as one."""
        flat, axes = self._flat[group], self._groups[group]
        text = flat.text
        extents = self.nest.extents
        if last < len(axes) - 1:
            after = math.prod(extents[a] for a in axes[last + 1 :])
            text = self.assign(f"{text} // {self.number(f'after_{group}{last}', after)}", "q")
        if first > 0:
            size = math.prod(extents[a] for a in axes[first : last + 1])
            text = self.assign(f"{text} % {self.number(f'n_{group}{first}_{last}', size)}", "i")
        return Value(text, flat.dims)

    def index(self, axis: int) -> Value:
        for group, axes in self._groups.items():
            if axis in axes:
                place = axes.index(axis)
                return self._span(group, place, place)
        raise AssertionError(axis)

    def position(self) -> str:
        """The number of a point in its row, as an int64."""
        return f"tl.cast({self._flat['r'].text}, tl.int64)"

    # -- values -------------------------------------------------------------------------------------------------------

    def typed(self, expr: Expr, dtype: DType | None = None) -> Value:
        """The value in its register type, or in that of another dtype."""
        value = self.value(expr)
        if dtype is None or dtype is expr.dtype:
            return value
        text = converted(value.text, expr.dtype, dtype)
        return value if text == value.text else Value(self.assign(text), value.dims)

    def value(self, expr: Expr) -> Value:
        key = ("expr", id(expr), self._row_name)
        found = self.known(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        if isinstance(expr, Op):
            made = self._printer.operation(expr, [self.value(a) for a in self._arguments(expr)])
        elif isinstance(expr, Const):
            made = self._printer.constant(expr)
        else:
            made = self.leaf(expr)
        self.keep(key, made)
        self._alive.append(expr)
        return made

    @property
    def _row_name(self) -> str:
        row = self._flat.get("r")
        return "" if row is None else row.text

    def _arguments(self, expr: Op) -> tuple[Expr, ...]:
        """The operands, index arithmetic among them in 32 bits where it leads to something else."""
        if self.wide or expr.args[0].dtype is not DType.int64 or expr.dtype is DType.int64:
            return expr.args
        if expr.name == "cast" or (expr.dtype is DType.bool and expr.name in ("eq", "ne", "lt", "le", "gt", "ge")):
            short = [self._narrow(a) for a in expr.args]
            made = [a for a in short if a is not None and a.dtype is DType.int32]
            if len(made) == len(expr.args):
                self._alive += made
                return tuple(made)
        return expr.args

    def leaf(self, expr: Expr) -> Value:
        if isinstance(expr, Load):
            return self.load(expr.operand)
        if isinstance(expr, Result):
            return self.results[expr.stage]
        if isinstance(expr, Size):
            name = self._sizes.setdefault(expr.value, f"size{len(self._sizes)}")
            self.number(name, expr.value)
            return Value(self.assign(f"tl.cast({name}, {register(expr.dtype)})"), 0)
        assert isinstance(expr, Index)
        found = self.index(expr.axis)
        if (expr.dtype is DType.int64) == self.wide:
            return found
        return Value(self.assign(f"tl.cast({found.text}, {register(expr.dtype)})"), found.dims)

    def offset(self, k: int) -> Value:
        """How far into an operand this point lies; the text ``0`` where it does not move."""
        operand = self.nest.operands[k]
        terms: list[Value] = []
        for group, axes in self._groups.items():
            for first, last in _runs(self.nest, operand, axes):
                stride = operand.strides[axes[last]]
                span = self._span(group, first, last)
                name = "" if stride == 1 else f" * {self.number(f's{k}_{axes[last]}', stride)}"
                terms.append(Value(f"{span.text}{name}", span.dims))
        start = operand.view.offset + operand.offset
        if start < 0:  # no pointer lies before its storage
            terms.append(Value(self.number(f"o{k}", start), 0))
        if operand.at is not None:
            at = operand.at if self.wide else self._narrow(operand.at)
            assert at is not None
            self._alive.append(at)
            terms.append(self.value(at))
        dims = 0
        for term in terms:
            dims |= term.dims
        return Value(" + ".join(t.text for t in terms) or "0", dims)

    def _place(self, k: int, dims: int) -> tuple[str, str, int]:
        """An operand's addresses, the mask of those to touch, and along what they vary (``dims`` at least)."""
        offset = self.offset(k)
        guard = self.nest.operands[k].guard
        tests: list[str] = []
        reach = offset.dims | dims
        if guard is not None:
            short = guard if self.wide else self._narrow(guard)
            assert short is not None
            self._alive.append(short)
            on = self.value(short)
            reach |= on.dims
            # the interpreter spreads a single truth over a block as numbers, and takes no numbers for a mask
            tests.append(on.text if on.dims or not reach else f"(tl.broadcast_to({on.text}, {self.shape(reach)}) != 0)")
        tests = [self._inside[bit] for bit in (1, 2) if reach & bit and bit in self._inside] + tests
        text = offset.text
        if text == "0" and reach:
            text = f"tl.zeros({self.shape(reach)}, tl.int32)"
        elif offset.dims != reach:
            text = f"tl.broadcast_to({text}, {self.shape(reach)})"
        where = f"p{k}" if text == "0" else f"p{k} + {text}" if " " not in text else f"p{k} + ({text})"
        return where, " & ".join(tests), reach

    def load(self, k: int) -> Value:
        key = ("load", k, self._row_name)
        found = self.known(key)
        if found is not None:
            return found  # type: ignore[no-any-return]
        operand = self.nest.operands[k]
        where, mask, dims = self._place(k, 0)
        other = ""
        if operand.guard is not None:
            filler = DType.int8 if operand.dtype is DType.bool else operand.dtype
            other = f", other={literal(operand.other, filler)}"
        text = f"tl.load({where}, mask={mask}{other})" if mask else f"tl.load({where})"
        if operand.dtype is DType.bool:
            text = f"{text} != 0"
        elif operand.dtype in NARROW:
            text = f"{text}.to(tl.float32)"
        name = f"t{k}" if self.known(("used", k)) is None and not self.steps else self.fresh(f"t{k}_")
        self.keep(("used", k), True)
        self.line(f"{name} = {text}")
        made = Value(name, dims)
        self.keep(key, made)
        return made

    def fresh(self, hint: str) -> str:
        self._named += 1
        return f"{hint}{self._named}"

    def store(self, k: int, value: Value, *, once: bool = False) -> None:
        """Store a value at every point of the tile, or once per outer point."""
        every = 1 if once else self.full
        where, mask, _ = self._place(k, every)
        text = value.text
        dtype = self.nest.operands[k].dtype
        if dtype is DType.bool:
            text = f"{text}.to(tl.int8)"
        elif dtype is DType.bfloat16:
            text = f"lib.as_bfloat16({text})"
        self.line(f"tl.store({where}, {text}, mask={mask})")

    # -- what is known before a loop ----------------------------------------------------------------------------------

    def hoist(self, exprs: list[Expr]) -> None:
        """Evaluate now what the position in the row does not change."""
        seen: set[int] = set()
        stack = list(exprs)
        while stack:
            expr = stack.pop()
            if id(expr) in seen or not isinstance(expr, Op | Load):
                continue
            seen.add(id(expr))
            if not self.varies(expr):
                self.value(expr)
            elif isinstance(expr, Op):
                stack.extend(expr.args)
            else:
                self._fixed_spans(expr.operand)

    def _fixed_spans(self, k: int) -> None:
        """The positions of an operand that only the outer point decides."""
        for group in ("x", "b"):
            for first, last in _runs(self.nest, self.nest.operands[k], self._groups[group]):
                self._span(group, first, last)

    def varies(self, expr: Expr) -> bool:
        """Whether an expression depends on the position in the row."""
        found = self._varies.get(id(expr))
        if found is None:
            found = self._varies[id(expr)] = self._depends(expr)
            self._alive.append(expr)
        return found

    def _depends(self, expr: Expr) -> bool:
        if isinstance(expr, Index):
            return expr.axis in self.nest.row
        if isinstance(expr, Op):
            return any(self.varies(a) for a in expr.args)
        if not isinstance(expr, Load):
            return False
        operand = self.nest.operands[expr.operand]
        if any(operand.strides[a] for a in self.nest.row):
            return True
        return any(e is not None and self.varies(e) for e in (operand.at, operand.guard))

    def leaves_of(self, expr: Expr) -> list[Expr]:
        """Leaves of an expression, those that decide where its operands are touched included."""
        found: list[Expr] = []
        stack, seen = [expr], set[int]()
        while stack:
            for leaf in leaves([stack.pop()]):
                found.append(leaf)
                if isinstance(leaf, Load) and leaf.operand not in seen:
                    seen.add(leaf.operand)
                    operand = self.nest.operands[leaf.operand]
                    stack += [e for e in (operand.at, operand.guard) if e is not None]
        return found


def _runs(nest: Nest, operand: Operand, axes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Places of the axes along which an operand moves; neighbours that are as one to it are taken together."""
    first = 0
    for last in range(len(axes)):
        if last + 1 < len(axes):
            a, b = axes[last], axes[last + 1]
            if operand.strides[a] == operand.strides[b] * nest.extents[b]:
                continue
        if operand.strides[axes[last]]:
            yield first, last
        first = last + 1


def _wide(nest: Nest) -> bool:
    """Whether positions of some operand, or the points of the nest, are too many for 32 bits."""
    if math.prod(nest.extents) + (1 << 16) >= _LIMIT:
        return True
    for operand in nest.operands:
        reach = [abs(s) * (n - 1) for s, n in zip(operand.strides, nest.extents)]
        if sum(reach) >= _LIMIT:
            return True
    return False
