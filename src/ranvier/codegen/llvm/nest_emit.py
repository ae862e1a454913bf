"""The code of a nest: loops around vectors, with everything evaluated in the outermost loop in which it is known.

Loops from the outside: tiles, the repeated outer axis, the lane axis where it is an outer one, then per stage the row
axes and the lane axis where it is a row axis. A :class:`Block` is a run of points along the lane axis held in one
vector (or one point, in scalar remainders); several blocks are worked on together to hide latency. Of a short row all
vectors stay in registers through all stages, without loops: the next row begins while the lanes of one are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ranvier.codegen.llvm.builder import Module, Val, size_of, vector
from ranvier.codegen.llvm.elements import (
    converted,
    memory_type,
    register_type,
    rounded,
    widened,
)
from ranvier.codegen.llvm.folds import Accumulator, combine
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.nest_access import Access, Block, Point
from ranvier.codegen.llvm.schedule import Structure, cost
from ranvier.codegen.loops.fold import expressions, identity, is_arg
from ranvier.codegen.loops.ir import Expr, Final, Map, Op, Reduce, Scan, Stage

Body = Callable[[Point, list[Block]], None]


def emit_nest(s: Structure, module: Module, symbol: str, isa: Isa) -> None:
    _NestEmitter(s, module.kernel(symbol), isa).emit()


class _NestEmitter(Access):
    _held: list[Block] | None = None  # of the row that stages are written for, if it stays in registers

    def emit(self) -> None:
        f, s = self.f, self.s
        start = Point({}, {})
        self.hoist(start, None)
        with f.loop(f.args["begin"], f.args["end"]) as tile, self.scalars.scope():
            rest: Val = tile
            lane_range = repeat_range = None
            if not s.lane_in_row:
                lane_range, rest = self.chunk(rest, "lane", s.lane, s.repeat is None and not s.packed)
            if s.repeat is not None:
                repeat_range, rest = self.chunk(rest, "repeat", s.repeat, not s.packed)
            point = start
            for position, axis in enumerate(reversed(s.packed)):
                if position == len(s.packed) - 1:
                    point = self.bind(point, axis, rest)
                else:
                    extent = self.dim["extent", axis]
                    above = f.div(rest, extent, signed=False)
                    point = self.bind(point, axis, f.sub(rest, f.mul(above, extent)))
                    rest = above
            self.hoist(point, None)
            blocks = self.all_blocks() if s.cover.together else None
            if repeat_range is None or s.repeat is None:
                self.inside(point, lane_range, blocks)
            else:
                for block in blocks or ():
                    self.hoist(point, block)
                with f.loop(*repeat_range) as i, self.scalars.scope(), ExitStack() as stack:
                    for block in blocks or ():
                        stack.enter_context(block.emitter.scope())
                    point = self.bind(point, s.repeat, i)
                    self.hoist(point, None)
                    self.inside(point, lane_range, blocks)
        f.ret()

    def chunk(self, tile: Val, name: str, axis: int, last: bool) -> tuple[tuple[Val, Val], Val]:
        """The range of an axis that a tile covers, and what is left of the tile's number."""
        f = self.f
        size, count = self.dim["chunk", name], self.dim["chunks", name]
        above = tile if last else f.div(tile, count, signed=False)
        mine = tile if last else f.sub(tile, f.mul(above, count))
        start = f.mul(mine, size)
        return (start, f.min_(f.add(start, size), self.dim["extent", axis])), above

    # -- loops --------------------------------------------------------------------------------------------------------

    def inside(self, point: Point, lane_range: tuple[Val, Val] | None, blocks: list[Block] | None) -> None:
        """All stages for one outer point (or for a run of them along the lanes)."""
        if lane_range is None or blocks is not None:
            self.stages(point, blocks)
        else:
            self.along_lanes(point, *lane_range, self.s.cover.unroll, self.stages)

    def all_blocks(self) -> list[Block]:
        """The whole lane axis, where it is short: the last vectors begin early enough to end with it, or there is one
        that is as long as what is left."""
        f, cover = self.f, self.s.cover
        last = f.sub(self.dim["extent", self.s.lane], cover.lanes)
        starts = [f.i64(u * cover.lanes) for u in range(cover.unroll)]
        starts[cover.fixed :] = [f.min_(start, last) for start in starts[cover.fixed :]]
        blocks = [self.block(start, cover.lanes, None, u) for u, start in enumerate(starts)]
        if cover.rest:
            blocks.append(self.block(f.i64(cover.unroll * cover.lanes), cover.rest, None, cover.unroll))
        return blocks

    def row_blocks(self) -> list[Block]:
        """A whole row along the lanes, whose vectors stay in registers."""
        assert self.s.held is not None
        whole, part = self.s.held
        lanes = self.s.cover.lanes
        blocks = [self.block(self.f.i64(k * lanes), lanes, None, k) for k in range(whole)]
        if part:
            left = self.f.sub(self.dim["extent", self.s.lane], whole * lanes)
            blocks.append(self.block(self.f.i64(whole * lanes), lanes, self.mask_below(left), whole))
        return blocks

    def along_lanes(self, point: Point, start: Val, stop: Val, unroll: int, body: Body) -> None:
        """Run the body over blocks that cover a range of the lane axis: groups of vectors, then what remains."""
        f, cover = self.f, self.s.cover
        if self.bounds:
            self.along_bounded(point, start, stop, unroll, body)
            return
        lanes = cover.lanes
        at = start
        for group in [unroll, 1] if unroll > 1 and cover.single else [unroll]:
            step = lanes * group
            upto = f.add(at, f.and_(f.sub(stop, at), -step))
            with f.loop(at, stop if cover.shifted else upto, step) as i, self.scalars.scope():
                first = f.min_(i, f.sub(stop, step)) if cover.shifted else i
                body(point, [self.block(f.add(first, u * lanes), lanes, None, u) for u in range(group)])
            at = upto
        if cover.rest == 0:
            return
        if cover.rest is not None:
            with f.if_(f.cmp("slt", at, stop)), self.scalars.scope():
                body(point, [self.block(at, cover.rest, None, 0)])
        elif self.isa.masks or lanes == 1:
            with f.loop(at, stop, lanes) as i, self.scalars.scope():
                body(point, [self.block(i, lanes, self.mask_below(f.sub(stop, i)), 0)])
        else:
            with f.loop(at, stop) as i, self.scalars.scope():
                body(point, [self.block(i, 1, None, 0)])

    def along_bounded(self, point: Point, start: Val, stop: Val, unroll: int, body: Body) -> None:
        """The same where operands are touched between bounds and there are no masks: vectors between them, vectors
        beyond them, which touch nothing, and one by one the points left at either side of a bound."""
        f, lanes = self.f, self.s.cover.lanes
        first, last = self.between(point, start, stop)
        at = first
        for group in dict.fromkeys((unroll, 1)):
            step = lanes * group
            upto = f.add(at, f.and_(f.sub(last, at), -step))
            with f.loop(at, upto, step) as i, self.scalars.scope():
                blocks = [self.block(f.add(i, u * lanes), lanes, None, u) for u in range(group)]
                for block in blocks:
                    self.lies(block, between=True)
                body(point, blocks)
            at = upto
        before, after = (f.and_(f.sub(end, begin), -lanes) for begin, end in ((start, first), (last, stop)))
        with f.loop(0, f.add(before, after), lanes) as k, self.scalars.scope():
            begin = f.select(f.cmp("slt", k, before), start, f.sub(last, before))
            block = self.block(f.add(begin, k), lanes, None, 0)
            self.lies(block, between=False)
            body(point, [block])
        start, after = f.add(start, before), f.add(last, after)
        few, more = f.sub(first, start), f.sub(f.add(f.sub(first, start), last), at)
        with f.loop(0, f.add(more, f.sub(stop, after))) as k, self.scalars.scope():
            begin = f.select(f.cmp("slt", k, more), f.sub(at, few), f.sub(after, more))
            begin = f.select(f.cmp("slt", k, few), start, begin)
            body(point, [self.block(f.add(begin, k), 1, None, 0)])

    def mask_below(self, count: Val) -> Val:
        f, lanes = self.f, self.s.cover.lanes
        element = f"i{max(8, min(64, self.isa.vector_bytes * 8 // lanes))}"
        some = f.cast(f.min_(count, lanes), element)
        return f.cmp("ult", f.lane_ids(lanes, element), f.splat(some, lanes))

    def block(self, start: Val, lanes: int, mask: Val | None, number: int) -> Block:
        return Block(start, lanes, self.scalars.child(lanes), mask, number)

    @contextmanager
    def row_loops(
        self, point: Point, blocks: list[Block] | None, stage: Stage, reverse: bool = False
    ) -> Iterator[Point]:
        """Loops over the row axes that are not the lane axis, with what is known in each evaluated there."""
        exprs = self.evaluated(stage)
        with ExitStack() as stack:
            for axis in self.s.row:
                for block in blocks or ():
                    self.hoist(point, block, exprs)
                    stack.enter_context(block.emitter.scope())
                extent = self.dim["extent", axis]
                i = stack.enter_context(self.f.loop(0, extent))
                if reverse:
                    i = self.f.sub(self.f.sub(extent, 1), i)
                stack.enter_context(self.scalars.scope())
                point = self.bind(point, axis, i)
                self.hoist(point, None, exprs)
            yield point

    # -- stages -------------------------------------------------------------------------------------------------------

    def stages(self, point: Point, blocks: list[Block] | None) -> None:
        """``blocks`` where the lanes are outer points; None where they lie along the row."""
        self.results = {}
        self._computed = set()
        self._held = self.row_blocks() if self.s.held else None
        for number, stage in enumerate(self.s.stages):
            self.number = number
            if blocks is None:
                self.hoist(point, None, self.evaluated(stage))
            if isinstance(stage, Reduce):
                self.reduce(number, stage, point, blocks)
            elif isinstance(stage, Map):
                self.map(stage, point, blocks)
            elif isinstance(stage, Final):
                self.final(stage, point, blocks)
            else:
                assert blocks is not None
                self.scan(stage, point, blocks)
            self._computed |= {id(e) for e in self.s.parked if any(_holds(x, e) for x in expressions(stage))}

    def over_row(self, point: Point, blocks: list[Block] | None, stage: Stage, body: Body) -> None:
        """Run the body at every point of the row."""
        if self._held is not None:
            body(point, self._held)
            return
        with self.row_loops(point, blocks, stage) as inner:
            if blocks is not None:
                self.visit(inner, blocks, body)
                return
            ahead = self.read_again(stage)

            def visit(p: Point, found: list[Block]) -> None:
                for block in found:
                    for k in ahead:
                        self.fetch_next(k, p, block)
                self.visit(p, found, body)

            stop = self.dim["extent", self.s.lane]
            self.along_lanes(inner, self.f.i64(0), stop, self.s.unrolls[self.number], visit)

    def visit(self, point: Point, blocks: list[Block], body: Body) -> None:
        """The body, with parked values taken from scratch where an earlier stage left them there."""
        for number, expr in enumerate(self.s.parked):
            if id(expr) in self._computed:
                for block in blocks:
                    kind = vector(register_type(expr.dtype), block.lanes)
                    where = self.parking(number, expr, point, block)
                    masked = block.mask is not None and self.s.lane_in_row
                    found = self.f.masked_load(kind, where, block.mask) if masked and block.mask else None
                    block.emitter.preset(expr, found or self.f.load(kind, where))
        body(point, blocks)

    def park(self, stage: Reduce | Map | Scan, point: Point, blocks: list[Block]) -> None:
        """Leave values in scratch for the stages to come."""
        for number, expr in enumerate(self.s.parked):
            if id(expr) in self._computed or not any(_holds(x, expr) for x in expressions(stage)):
                continue
            for block in blocks:
                value = self.value(expr, point, block)
                where = self.parking(number, expr, point, block)
                if block.mask is not None and self.s.lane_in_row:
                    self.f.masked_store(value, where, block.mask)
                else:
                    self.f.store(value, where)

    def parking(self, number: int, expr: Expr, point: Point, block: Block) -> Val:
        f, s = self.f, self.s
        kind = register_type(expr.dtype)
        if s.lane_in_row:
            position = block.start
        else:
            row = point.index[s.row[0]]
            position = f.add(f.mul(row, s.cover.lanes * s.cover.unroll), block.number * s.cover.lanes)
        start = f.gep(f.args["scratch"], f.mul(self.dim["park",], number)) if number else f.args["scratch"]
        return f.gep(start, position, kind)

    def map(self, stage: Map, point: Point, blocks: list[Block] | None) -> None:
        def body(p: Point, found: list[Block]) -> None:
            self.park(stage, p, found)
            self.store_all(stage, p, found)

        self.over_row(point, blocks, stage, body)

    def read_again(self, stage: Stage) -> list[int]:
        """Operands whose next row is worth fetching during a stage.

        A row read several times comes from memory in the first stage, which has nothing to do but wait. So the next
        row is fetched while the costliest of the other stages computes.
        """
        s = self.s
        walks = [each for each in s.stages if isinstance(each, Reduce | Map)]
        if s.repeat is None or len(walks) < 2 or stage is not max(walks[1:], key=lambda w: cost(list(expressions(w)))):
            return []
        return [
            k
            for k, arg in enumerate(s.args)
            if arg.lane == "1" and arg.varies[s.repeat] and not arg.written and arg.at is None
        ]

    def fetch_next(self, k: int, point: Point, block: Block) -> None:
        """Prefetch what the next row has here; past the last row it is a harmless address."""
        if block.mask is None and block.lanes > 1 and self.s.repeat is not None:
            f = self.f
            base, _ = self.address(k, point, block, None)
            step, element = self.dim["stride", k, self.s.repeat], memory_type(self.s.args[k].dtype)
            # not "inbounds": there is no row after the last
            f.prefetch(f.emit("ptr", f"getelementptr {element}, ptr {base.name}, i64 {step.name}"))

    def final(self, stage: Final, point: Point, blocks: list[Block] | None) -> None:
        if blocks is None:
            for k, expr in stage.stores:
                self.store(k, self.scalars.value(expr, self.leaf(point, None)), expr.dtype, point, None)
        else:
            self.store_all(stage, point, blocks)

    def store_all(self, stage: Map | Final, point: Point, blocks: list[Block]) -> None:
        """What a stage stores. Blocks may have points in common, so all is read before anything is written."""
        values = [[self.value(value, point, b) for _, value in stage.stores] for b in blocks]
        for b, made in zip(blocks, values):
            for (k, expr), value in zip(stage.stores, made):
                self.store(k, value, expr.dtype, point, b)

    def reduce(self, number: int, stage: Reduce, point: Point, blocks: list[Block] | None) -> None:
        f, s = self.f, self.s
        dtype = stage.value.dtype if is_arg(stage.fold) else stage.dtype
        # positions as wide as values, if they fit: what is compared chooses both
        places = "i32" if s.short and size_of(register_type(dtype)) <= 4 else "i64"
        together = blocks or self._held
        widths = [s.cover.lanes] * s.unrolls[number] if together is None else [b.lanes for b in together]
        sums = [Accumulator(f, stage.fold, dtype, lanes, places) for lanes in widths]
        single = None if blocks is not None or self.isa.masks else Accumulator(f, stage.fold, dtype, 1, places)

        def body(p: Point, found: list[Block]) -> None:
            self.park(stage, p, found)
            for b in found:
                value = self.value(stage.value, p, b)
                value = converted(f, self.isa, value, stage.value.dtype, dtype)
                into = single if single is not None and b.lanes == 1 and blocks is None else sums[b.number]
                position = self.position(p, b, places) if is_arg(stage.fold) else None
                into.take(value, b.mask if blocks is None else None, position)

        self.over_row(point, blocks, stage, body)
        if blocks is not None:
            for block, total in zip(blocks, sums):
                block.results[number] = rounded(f, self.isa, stage.dtype, total.value())
            return
        step = 1
        while step < len(sums):
            for k in range(0, len(sums) - step, 2 * step):
                sums[k].merge(sums[k + step])
            step *= 2
        whole = sums[0].across()
        if single is not None:
            whole.merge(single)
        self.results[number] = rounded(f, self.isa, stage.dtype, whole.value())

    def position(self, point: Point, block: Block, kind: str) -> Val:
        """The number of a point in its row."""
        f, s = self.f, self.s
        axes = [*s.row, s.lane] if s.lane_in_row else list(s.row)
        total = None if axes else f.const(kind, 0)
        for axis in axes:
            if total is not None:
                total = f.mul(total, f.cast(self.dim["extent", axis], kind))
            if axis == s.lane:
                here = self.lane_index(block, kind)
                total = here if total is None else f.add(here, f.like(here, total))
            else:
                index = f.cast(point.index[axis], kind)
                total = index if total is None else f.add(total, index)
        assert total is not None
        return widened(f, total, block.lanes)

    def scan(self, stage: Scan, point: Point, blocks: list[Block]) -> None:
        f = self.f
        kinds = [vector(register_type(stage.dtype), b.lanes) for b in blocks]
        start = identity(stage.fold, stage.dtype)
        carried = [f.var(kind, f.const(kind, start)) for kind in kinds]
        with self.row_loops(point, blocks, stage, stage.reverse) as inner:

            def body(p: Point, found: list[Block]) -> None:
                self.park(stage, p, found)
                values = [self.value(stage.value, p, b) for b in found]
                for b, carry, made in zip(found, carried, values):
                    before = carry.get()
                    value = converted(f, self.isa, made, stage.value.dtype, stage.dtype)
                    after = rounded(f, self.isa, stage.dtype, combine(f, stage.fold, stage.dtype, before, value))
                    carry.set(after)
                    self.store(stage.operand, before if stage.exclusive else after, stage.dtype, p, b)

            self.visit(inner, blocks, body)


def _holds(expr: Expr, part: Expr) -> bool:
    seen: set[int] = set()
    stack = [expr]
    while stack:
        each = stack.pop()
        if each is part:
            return True
        if id(each) not in seen and isinstance(each, Op):
            seen.add(id(each))
            stack.extend(each.args)
    return False
