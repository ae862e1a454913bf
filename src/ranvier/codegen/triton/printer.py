"""A nest as the text of one Triton kernel, and the arguments it is launched with.

Kernels depend on the structure of a nest only: extents, strides and sizes are numbers passed at run time, except
strides of 0 and 1, and the sizes of a tile, which are compile-time. Arguments are pointers to the first element of
every operand, then the numbers, then the tile's sizes. Positions are 32-bit where all of a nest's operands allow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranvier.codegen.loops.fold import expressions, identity, is_arg
from ranvier.codegen.loops.ir import Expr, Final, Fold, Load, Map, Nest, Op, Reduce, Result, Scan, Stage
from ranvier.codegen.loops.normalize import roots
from ranvier.codegen.storage import Storage
from ranvier.codegen.triton.access import Access
from ranvier.codegen.triton.exprs import Value
from ranvier.codegen.triton.schedule import Plan
from ranvier.codegen.triton.types import constant, folded, literal, register, torch_name
from ranvier.dtypes import DType
from ranvier.records import dataclass

HEADER = """\
import triton
import triton.language as tl
from ranvier.codegen.triton import functions as fn
from ranvier.codegen.triton.functions import lib


"""
_PLAIN = frozenset({"cast", "where", "neg", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge"})


@dataclass(frozen=True)
class Pointer:
    """An argument that is an address: so many bytes into a storage, at elements of a torch dtype."""

    storage: Storage
    offset: int
    dtype: str
    written: bool = False


@dataclass(frozen=True)
class Source:
    """A kernel and the arguments of one launch of it."""

    text: str  # the whole module
    name: str  # of the function
    pointers: tuple[Pointer, ...]
    numbers: tuple[int, ...]
    constants: tuple[tuple[str, int], ...]  # compile-time sizes by name, in order
    grid: tuple[int, int, int]
    warps: int
    stages: int = 2  # of software pipelines in loops


def printed(nest: Nest, plan: Plan) -> Source:
    """The kernel of a nest in normal form, cut as planned."""
    return _Printer(nest, plan).source()


class _Printer(Access):
    def __init__(self, nest: Nest, plan: Plan) -> None:
        super().__init__(nest, plan, shared_operations(nest))

    def source(self) -> Source:
        self.begin()
        self.stages()
        name = _title(self.nest, self.plan)
        pointers = tuple(
            Pointer(
                o.view.storage,
                max(0, o.view.offset + o.offset) * o.dtype.numpy.itemsize,
                torch_name(o.dtype),
                k in self.written,
            )
            for k, o in enumerate(self.nest.operands)
        )
        sizes = {"X": self.plan.blocks[0]} | ({"R": self.plan.blocks[1]} if self.two else {})
        params = [f"p{k}" for k in range(len(pointers))] + list(self.numbers)
        params += [f"{size}: tl.constexpr" for size in sizes]
        lines = ["@triton.jit", f"def {name}({', '.join(params)}):"]
        lines += [f"    {line}" if line else "" for line in self.lines]
        text = HEADER + "\n".join(lines) + "\n"
        numbers = tuple(int(n) for n in self.numbers.values())
        grid = (self.plan.programs(self.nest), 1, 1)
        return Source(text, name, pointers, numbers, tuple(sizes.items()), grid, self.plan.warps)

    # -- stages -------------------------------------------------------------------------------------------------------

    def stages(self) -> None:
        nest = self.nest
        if not nest.row:
            for number, stage in enumerate(nest.stages):
                self.at_point(number, stage)
            return
        pending: dict[int, Reduce] = {}
        for number, stage in enumerate(nest.stages):
            if isinstance(stage, Reduce) and not self.needs(stage.value, pending):
                pending[number] = stage
                continue
            self.reduce(pending)
            pending = {}
            if isinstance(stage, Reduce):
                pending[number] = stage
            elif isinstance(stage, Map):
                self.map(stage)
            elif isinstance(stage, Final):
                for k, value in stage.stores:
                    self.store(k, self.typed(value), once=True)
            else:
                self.scan(stage)
            self.settle(number)
        self.reduce(pending)

    def at_point(self, number: int, stage: Stage) -> None:
        """A stage of a nest whose rows have one point."""
        if isinstance(stage, Reduce):
            zero = Value(constant(0, DType.int64), 0)
            self.results[number] = zero if is_arg(stage.fold) else self.typed(stage.value, stage.dtype)
        elif isinstance(stage, Scan):
            value = self.typed(stage.value, stage.dtype)
            start = Value(constant(identity(stage.fold, stage.dtype), stage.dtype), 0)
            self.store(stage.operand, start if stage.exclusive else value)
        else:
            for k, value in [(k, self.typed(v)) for k, v in stage.stores]:
                self.store(k, value)
        self.settle(number)

    def needs(self, expr: Expr, pending: dict[int, Reduce]) -> bool:
        return any(isinstance(e, Result) and e.stage in pending for e in self.leaves_of(expr))

    def settle(self, number: int) -> None:
        """What was stored may be loaded by the stages to come: all threads must have stored it by then."""
        stage = self.nest.stages[number]
        if isinstance(stage, Reduce):
            return
        targets = [stage.operand] if isinstance(stage, Scan) else [k for k, _ in stage.stores]
        stored = {self.nest.operands[k].view.storage for k in targets}
        later = [e for s in self.nest.stages[number + 1 :] for e in expressions(s)]
        loaded = {leaf.operand for e in later for leaf in self.leaves_of(e) if isinstance(leaf, Load)}
        if any(self.nest.operands[k].view.storage in stored for k in loaded):
            self.line("tl.debug_barrier()")
            self.forget()

    def map(self, stage: Map) -> None:
        with self.row_steps([v for _, v in stage.stores]):
            for k, value in [(k, self.typed(v)) for k, v in stage.stores]:
                self.store(k, value)

    # -- folds --------------------------------------------------------------------------------------------------------

    def reduce(self, stages: dict[int, Reduce]) -> None:
        """Folds that do not need each other, in one walk along the row."""
        if not stages:
            return
        if not self.steps:
            for number, stage in stages.items():
                self.whole_fold(number, stage)
            return
        shape = self.shape(self.full)
        for number, stage in stages.items():
            dtype = _compared(stage)
            self.line(f"f{number} = tl.full({shape}, {_nothing(stage.fold, dtype)}, {folded(dtype)})")
            if is_arg(stage.fold):
                self.line(f"w{number} = tl.full({shape}, 0, tl.int64)")
        with self.row_steps([s.value for s in stages.values()]):
            for number, stage in stages.items():
                self.fold_step(number, stage)
        for number, stage in stages.items():
            self.finish(number, stage)

    def fold_step(self, number: int, stage: Reduce) -> None:
        dtype = _compared(stage)
        value = self.lanes(self.folding(stage), dtype, stage.fold)
        if not is_arg(stage.fold):
            self.line(f"f{number} = {_combined(stage.fold, dtype, f'f{number}', value)}")
            return
        better = self.assign(_better(stage.fold, dtype, value, f"f{number}"))
        if self.two:
            better = self.assign(f"{better} & {self.in_row}")
        self.line(f"f{number} = tl.where({better}, {value}, f{number})")
        self.line(f"w{number} = tl.where({better}, {self.position()}, w{number})")

    def whole_fold(self, number: int, stage: Reduce) -> None:
        dtype = _compared(stage)
        value = self.lanes(self.folding(stage), dtype, stage.fold)
        self.line(f"f{number} = {value}")
        if is_arg(stage.fold):
            self.line(f"w{number} = {self.position()}")
        self.finish(number, stage)

    def finish(self, number: int, stage: Reduce) -> None:
        """The fold across the lanes that share a row."""
        dtype = _compared(stage)
        name, arg = f"f{number}", is_arg(stage.fold)
        if self.two:
            across = _across(stage.fold, dtype)
            if arg:
                last = stage.fold.endswith("last")
                best = self.assign(f"lib.{across}({name})")
                same = f"({name} == {best}) | ({name} != {name})" if dtype.is_float else f"{name} == {best}"
                same = f"({same}) & {self.in_row}" if not self.steps else same
                none = -1 if last else (1 << 63) - 1
                where = self.assign(f"tl.where({same}, w{number}, tl.full((), {none}, tl.int64))")
                self.line(f"w{number} = lib.across_{'max' if last else 'min'}({where})")
            else:
                self.line(f"{name} = lib.{across}({name})")
        if arg:
            self.results[number] = Value(f"w{number}", 1)
            return
        if folded(dtype) != register(dtype):
            self.line(f"{name} = {name} != 0" if dtype is DType.bool else f"{name} = {name}.to({register(dtype)})")
        self.results[number] = Value(name, 1)

    def folding(self, stage: Reduce | Scan) -> Value:
        """The value that is folded, of the type it is folded in."""
        dtype = _compared(stage)
        value = self.typed(stage.value, dtype)
        if folded(dtype) != register(dtype):
            return Value(self.assign(f"{value.text}.to({folded(dtype)})"), value.dims)
        return value

    def lanes(self, value: Value, dtype: DType, fold: Fold) -> str:
        """The value in every lane of the tile, and what changes nothing in lanes past the end of the row."""
        shape = self.shape(self.full)
        text = value.text if value.dims == self.full else self.assign(f"tl.broadcast_to({value.text}, {shape})")
        if not self.two:
            return text
        nothing = f"tl.full((), {_nothing(fold, dtype)}, {folded(dtype)})"
        return self.assign(f"tl.where({self.in_row}, {text}, {nothing})")

    # -- scans --------------------------------------------------------------------------------------------------------

    def scan(self, stage: Scan) -> None:
        """Along the row, from its end where the scan is reversed; exclusive ones see the value before.

        Positions are turned around before anything is addressed by them, so there is one kind of scan.
        """
        dtype = stage.dtype
        start = f"tl.full({self.shape(1)}, {_nothing(stage.fold, dtype)}, {folded(dtype)})"
        self.line(f"carry = {start}")
        self.reverse = stage.reverse
        with self.row_steps([stage.value]):
            if not self.two:
                value = self.lanes(self.folding(stage), dtype, stage.fold)
                after = self.assign(_combined(stage.fold, dtype, "carry", value))
                self.store(stage.operand, self.stored("carry" if stage.exclusive else after, dtype))
                self.line(f"carry = {after}")
            else:
                self.scan_block(stage)
        self.reverse = False
        self.forget()

    def scan_block(self, stage: Scan) -> None:
        dtype = stage.dtype
        if stage.exclusive:
            with self.shifted():
                value = self.lanes(self.folding(stage), dtype, stage.fold)
        else:
            value = self.lanes(self.folding(stage), dtype, stage.fold)
        run = self.assign(f"lib.running_{stage.fold}({value})")
        total = self.assign(_combined(stage.fold, dtype, run, "carry"))
        self.store(stage.operand, self.stored(total, dtype))
        if self.steps:
            across = f"lib.{_across(stage.fold, dtype)}({value})"
            self.line(f"carry = {_combined(stage.fold, dtype, 'carry', across)}")

    def stored(self, text: str, dtype: DType) -> Value:
        if folded(dtype) != register(dtype):
            text = self.assign(f"{text} != 0" if dtype is DType.bool else f"{text}.to({register(dtype)})")
        return Value(text, self.full)


def _compared(stage: Reduce | Scan) -> DType:
    """The type of the values that a stage folds."""
    return stage.value.dtype if isinstance(stage, Reduce) and is_arg(stage.fold) else stage.dtype


def _nothing(fold: Fold, dtype: DType) -> str:
    """What a fold starts from, as a number of the type it is folded in."""
    found = identity(fold, dtype)
    return str(int(found)) if dtype is DType.bool else literal(found, dtype)


def _all_hold(fold: Fold) -> bool:
    return fold in ("and", "prod", "min")


def _combined(fold: Fold, dtype: DType, a: str, b: str) -> str:
    """One step of a fold that gives a value."""
    if dtype is DType.bool:
        return f"{a} & {b}" if _all_hold(fold) else f"{a} | {b}"
    if fold in ("sum", "prod"):
        return f"{a} {'+' if fold == 'sum' else '*'} {b}"
    large = fold in ("max", "or")
    if dtype.is_float:
        return f"fn.{'largest' if large else 'least'}({a}, {b})"
    return f"tl.{'maximum' if large else 'minimum'}({a}, {b})"


def _across(fold: Fold, dtype: DType) -> str:
    """The function that folds the lanes of a row."""
    if dtype is DType.bool and not is_arg(fold):
        return "across_min" if _all_hold(fold) else "across_max"
    if fold in ("sum", "prod"):
        return f"across_{fold}"
    return "across_max" if "max" in fold or fold == "or" else "across_min"


def _better(fold: Fold, dtype: DType, value: str, best: str) -> str:
    """Whether a value replaces the best so far; the first NaN (of …_last folds, the last) beats everything."""
    sign = (">" if fold.startswith("argmax") else "<") + ("=" if fold.endswith("last") else "")
    better = f"({value} {sign} {best})"
    if not dtype.is_float:
        return better
    if fold.endswith("last"):
        return f"{better} | ({value} != {value})"
    return f"{better} | (({value} != {value}) & ({best} == {best}))"


def shared_operations(nest: Nest) -> frozenset[int]:
    """Operations that are used more than once."""
    uses: Counter[int] = Counter()
    stack = roots(nest)
    while stack:
        each = stack.pop()
        if isinstance(each, Op):
            uses[id(each)] += 1
            if uses[id(each)] == 1:
                stack.extend(each.args)
    return frozenset(k for k, n in uses.items() if n > 1)


def _title(nest: Nest, plan: Plan) -> str:
    """A name by what a kernel does: equal for equal text, so never by whose work it is."""
    words: list[str] = [plan.way]
    for stage in nest.stages:
        for expr in expressions(stage):
            words += [e.name for e in reversed(list(_operations(expr))) if e.name not in _PLAIN]
        if isinstance(stage, Reduce | Scan):
            words.append(stage.fold)
    return "_".join(dict.fromkeys(words))[:60].rstrip("_")


def _operations(expr: Expr) -> Iterator[Op]:
    seen: set[int] = set()
    stack = [expr]
    while stack:
        each = stack.pop()
        if isinstance(each, Op) and id(each) not in seen:
            seen.add(id(each))
            yield each
            stack.extend(each.args)
