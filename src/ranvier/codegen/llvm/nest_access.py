"""What the code of a nest reads, computes and writes at a point or along the lanes of a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import field

from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.canon import Dependence
from ranvier.codegen.llvm.elements import (
    gather_elements,
    load_every_second,
    load_vector,
    memory_type,
    register_type,
    scatter_elements,
    store_product,
    store_vector,
)
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.pairs import apart, even_then_odd, rounded_in_order, together
from ranvier.codegen.llvm.schedule import Slot, Structure
from ranvier.codegen.llvm.stored_codes import stored
from ranvier.codegen.loops.fold import expressions
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Map, Op, Result, Scan, Size, Stage
from ranvier.dtypes import DType
from ranvier.records import dataclass


@dataclass
class Point:
    """Scalar positions along the axes bound so far, and how far each operand has moved by them."""

    index: dict[int, Val]
    offsets: dict[int, Val]

    @property
    def bound(self) -> frozenset[int]:
        return frozenset(self.index)


@dataclass
class Block:
    """Points along the lane axis that are computed together."""

    start: Val  # the first one's index
    lanes: int
    emitter: ExprEmitter
    mask: Val | None = None
    number: int = 0  # which of the blocks worked on together
    results: dict[int, Val] = field(default_factory=dict)


class Access:
    """Values of expressions and operands of one kernel, with what is known so far kept for later."""

    def __init__(self, s: Structure, f: Fn, isa: Isa) -> None:
        self.s = s
        self.f = f
        self.isa = isa
        self.depends = Dependence(s.args)
        self.scalars = ExprEmitter(f, isa, 1)
        self.results: dict[int, Val] = {}  # of stages that fold lanes too
        self.number = 0  # of the stage being written
        self._computed: set[int] = set()  # parked values that are in scratch already
        dims = f.args["dims"]
        self.dim: dict[Slot, Val] = {
            slot: f.load("i64", f.gep(dims, k, "i64"), invariant=True) for k, slot in enumerate(s.slots)
        }
        self.base = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(len(s.args))]
        self.all = [e for stage in s.stages for e in self.evaluated(stage)]
        self.bounds = () if isa.masks or s.cover.lanes == 1 else self.lane_bounds()

    def bind(self, point: Point, axis: int, index: Val) -> Point:
        offsets = dict(point.offsets)
        for k in range(len(self.s.args)):
            stride = self.dim.get(("stride", k, axis))
            if stride is not None:
                moved = self.f.mul(index, stride)
                offsets[k] = self.f.add(offsets[k], moved) if k in offsets else moved
        return Point({**point.index, axis: index}, offsets)

    def hoist(self, point: Point, block: Block | None, exprs: list[Expr] | None = None) -> None:
        """Evaluate now what varies with nothing that is still to be bound."""
        known = point.bound | {-1 - k for k in self.results}
        emitter = self.scalars
        if block is not None:
            emitter = block.emitter
            known |= {self.s.lane} | {-1 - k for k in block.results}
        leaf = self.leaf(point, block)
        seen: set[int] = set()
        stack = list(self.all if exprs is None else exprs)
        while stack:
            expr = stack.pop()
            if id(expr) in seen or not isinstance(expr, Op | Load):
                continue
            seen.add(id(expr))
            if self.depends(expr) <= known:
                if not any(expr is e for e in self.s.parked):
                    emitter.value(expr, leaf)
            elif isinstance(expr, Op):
                stack.extend(expr.args)
            else:
                stack += self.addressing(expr.operand)

    def addressing(self, k: int) -> list[Expr]:
        """The expressions that decide where an operand is touched."""
        arg = self.s.args[k]
        return [e for e in (arg.at, arg.guard) if e is not None]

    def evaluated(self, stage: Stage) -> list[Expr]:
        """All that a stage evaluates, its stores' addresses included."""
        targets = [stage.operand] if isinstance(stage, Scan) else []
        if isinstance(stage, Map | Final):
            targets = [k for k, _ in stage.stores]
        return [*expressions(stage), *(e for k in targets for e in self.addressing(k))]

    def leaf(self, point: Point, block: Block | None) -> Callable[[Expr], Val]:
        f = self.f

        def found(expr: Expr) -> Val:
            if isinstance(expr, Load):
                return self.load(expr.operand, point, block)
            if isinstance(expr, Size):
                return f.cast(self.dim["size", expr.value], register_type(expr.dtype))
            if isinstance(expr, Index):
                if block is not None and expr.axis == self.s.lane:
                    return self.lane_index(block, register_type(expr.dtype))
                return f.cast(point.index[expr.axis], register_type(expr.dtype))
            assert isinstance(expr, Result)
            if block is not None and expr.stage in block.results:
                return block.results[expr.stage]
            return self.results[expr.stage]

        return found

    def lane_index(self, block: Block, kind: str = "i64") -> Val:
        f = self.f
        first = f.cast(block.start, kind)
        if block.lanes == 1:
            return first
        return f.add(f.splat(first, block.lanes), f.lane_ids(block.lanes, kind))

    def value(self, expr: Expr, point: Point, block: Block) -> Val:
        leaf = self.leaf(point, block)
        return stored(block.emitter, expr, leaf)

    def condition(self, guard: Expr | None, point: Point, block: Block | None) -> Val | None:
        """Where an operand may be touched: one truth for all lanes, or one for each."""
        if guard is None:
            return None
        emitter = self.scalars if block is None else block.emitter
        return emitter.value(guard, self.leaf(point, block))

    def lane_bounds(self) -> tuple[Op, ...]:
        """Comparisons of positions along the lanes that decide where operands are touched, if they are the same for all
        that are not touched everywhere: between those bounds vectors need no mask."""
        found: dict[frozenset[int], tuple[Op, ...]] = {}
        for arg in self.s.args:
            parts = [] if arg.guard is None else _conjuncts(arg.guard)
            parts = [e for e in parts if self.s.lane in self.depends(e)]
            bounds = tuple(e for e in parts if isinstance(e, Op) and self.is_bound(e))
            if len(bounds) < len(parts):
                return ()
            if bounds:
                found[frozenset(map(id, bounds))] = bounds
        return next(iter(found.values())) if len(found) == 1 else ()

    def is_bound(self, expr: Op) -> bool:
        """Whether this compares the position along the lanes with what is known before they are walked along."""
        if expr.name not in ("ge", "lt") or not isinstance(expr.args[0], Index) or expr.args[0].axis != self.s.lane:
            return False
        later = {self.s.lane, *self.s.row}
        return all(axis >= 0 and axis not in later for axis in self.depends(expr.args[1]))

    def between(self, point: Point, start: Val, stop: Val) -> tuple[Val, Val]:
        """The part of a range along the lanes that lies between the bounds."""
        f = self.f
        first, last = start, stop
        for bound in self.bounds:
            value = f.cast(self.scalars.value(bound.args[1], self.leaf(point, None)), "i64")
            if bound.name == "ge":
                first = f.max_(first, value)
            else:
                last = f.min_(last, value)
        first = f.min_(first, stop)
        return first, f.max_(first, last)

    def lies(self, block: Block, *, between: bool) -> None:
        """Tell a block that it lies between the bounds as a whole, or that no point of it does."""
        settled = self.bounds if between else [arg.guard for arg in self.s.args if arg.guard is not None]
        for expr in settled:
            if self.s.lane in self.depends(expr):
                block.emitter.preset(expr, self.f.const("i1", between))

    def masked(self, on: Val | None, block: Block | None) -> tuple[Val | None, Val | None]:
        """The mask of lanes to touch, and a condition to branch on where there is no mask for it."""
        mask = None if block is None else block.mask
        if on is None:
            return mask, None
        if block is None or block.lanes == 1:
            return on, None
        if on.lanes > 1:
            return (on if mask is None else self.f.and_(on, mask)), None
        if self.isa.masks:
            lanes = mask or self.f.const(vector("i1", block.lanes), 1)
            return self.f.select(on, lanes, self.f.zero(lanes.type)), None
        return mask, on

    def load(self, k: int, point: Point, block: Block | None) -> Val:
        """An operand's values: one for all lanes where it does not move along them."""
        f, arg = self.f, self.s.args[k]
        at = self.run_time_offset(k, point, block)
        on = self.condition(arg.guard, point, block)
        fixed = arg.lane == "0" and (at is None or at.lanes == 1)
        if fixed and (on is None or on.lanes == 1):
            return self.load_lanes(k, point, None, at, on)
        mask, whole = self.masked(on, block)
        if whole is None or block is None:
            return self.load_lanes(k, point, block, at, mask)
        kind = vector(register_type(arg.dtype), block.lanes)
        loaded = f.var(kind, f.const(kind, arg.other))
        with f.if_(whole):
            loaded.set(self.load_lanes(k, point, block, at, mask))
        return loaded.get()

    def run_time_offset(self, k: int, point: Point, block: Block | None) -> Val | None:
        at = self.s.args[k].at
        if at is None:
            return None
        emitter = self.scalars if block is None else block.emitter
        return emitter.value(at, self.leaf(point, block))

    def load_lanes(self, k: int, point: Point, block: Block | None, at: Val | None, mask: Val | None) -> Val:
        arg = self.s.args[k]
        base, positions = self.address(k, point, block, at)
        lanes = 1 if block is None else block.lanes
        if positions is not None:
            return gather_elements(self.f, self.isa, arg.dtype, base, positions, mask=mask, other=arg.other)
        if lanes > 1 and arg.lane == "0":
            # stays along the lanes while its guard does not
            return self.guarded_scalar(k, base, mask, lanes)
        if self.paired(block):
            return self.load_pairs(arg.dtype, base, lanes)
        if lanes > 1 and arg.lane == "2":
            return load_every_second(self.f, self.isa, arg.dtype, base, lanes, mask=mask, other=arg.other)
        return load_vector(self.f, self.isa, arg.dtype, base, lanes, mask=mask, other=arg.other)

    def paired(self, block: Block | None) -> bool:
        """Whether lanes of a block are the even numbers, then the odd ones."""
        cover = self.s.cover
        return cover.pairs and block is not None and block.mask is None and block.lanes == cover.lanes

    def load_pairs(self, dtype: DType, base: Val, lanes: int) -> Val:
        f = self.f
        if dtype is DType.bfloat16:
            return even_then_odd(f, f.load(vector("i32", lanes // 2), base, 2))
        return f.shuffle(f.load(vector("float", lanes), base), None, apart(lanes))

    def store_pairs(self, dtype: DType, base: Val, value: Val) -> None:
        f = self.f
        if dtype is DType.bfloat16:
            f.store(rounded_in_order(f, value), base, 2)
        else:
            f.store(f.shuffle(value, None, together(value.lanes)), base)

    def guarded_scalar(self, k: int, base: Val, mask: Val | None, lanes: int) -> Val:
        """One element for all lanes whose mask is on; not touched when none is."""
        f, arg = self.f, self.s.args[k]
        assert mask is not None
        some = f.reduce("or", mask)
        one = load_vector(f, self.isa, arg.dtype, base, 1, mask=some, other=arg.other)
        spread = f.splat(one, lanes)
        return f.select(mask, spread, f.const(spread.type, arg.other))

    def address(self, k: int, point: Point, block: Block | None, at: Val | None) -> tuple[Val, Val | None]:
        """Where an operand's elements lie: an address, and positions from it where they are not contiguous."""
        f, arg = self.f, self.s.args[k]
        element = memory_type(arg.dtype)
        offset = point.offsets.get(k)
        parts = [offset] if offset is not None else []
        strided: Val | None = None
        if block is not None and arg.lane != "0":
            stride = self.dim.get(("stride", k, self.s.lane))
            parts.append(block.start if stride is None else f.mul(block.start, stride))
            if stride is not None and block.lanes > 1 and arg.lane != "2":
                strided = self.lane_steps(stride, block.lanes, "i64" if arg.lane == "w" else "i32")
        if at is not None and at.lanes == 1:
            parts.append(f.cast(at, "i64"))
        base = self.base[k]
        if parts:
            total = parts[0]
            for part in parts[1:]:
                total = f.add(total, part)
            base = f.gep(base, total, element)
        if at is not None and at.lanes > 1:
            if strided is not None:
                at = f.add(f.cast(at, "i64"), f.cast(strided, "i64"))
            elif arg.lane == "1":
                at = f.add(at, f.lane_ids(at.lanes, at.element))
            return base, at
        return base, strided

    def lane_steps(self, stride: Val, lanes: int, element: str) -> Val:
        """How far each lane lies from the first; 32 bits where they do, as gathers of short positions are quicker."""
        f = self.f
        return f.mul(f.lane_ids(lanes, element), f.splat(f.cast(stride, element), lanes))

    def store(self, k: int, value: Val, dtype: DType, point: Point, block: Block | None) -> None:
        """A value of this type to an operand. One that is only kept in 16 bits between nodes is rounded like those of
        products; bfloat16 of the model itself keeps its denormals."""
        f, arg = self.f, self.s.args[k]
        at = self.run_time_offset(k, point, block)
        mask, whole = self.masked(self.condition(arg.guard, point, block), block)
        base, positions = self.address(k, point, block, at)
        with ExitStack() as stack:
            if whole is not None:
                stack.enter_context(f.if_(whole))
            if self.paired(block):
                self.store_pairs(arg.dtype, base, value)
            elif positions is not None:
                scatter_elements(f, self.isa, arg.dtype, value, base, positions, mask=mask)
            elif dtype is DType.float32:
                store_product(f, self.isa, arg.dtype, value, base, mask)
            else:
                store_vector(f, self.isa, arg.dtype, value, base, mask=mask)


def _conjuncts(guard: Expr) -> list[Expr]:
    """What has to be true, all of it, for a guard to be."""
    if isinstance(guard, Op) and guard.name == "and":
        return [e for arg in guard.args for e in _conjuncts(arg)]
    return [guard]
