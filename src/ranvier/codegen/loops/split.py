"""Few, huge rows cut into parts, so that their work can be shared out.

A nest with hardly any tiles would be the work of one thread. Its folds are then taken over parts of the row
into temporaries, combined by a second nest, and used by a third where values are stored along the row. How many parts
depends on the sizes alone: results are the same whatever the number of threads (and sums the more accurate).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ranvier.codegen.loops.fold import is_arg
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Map, Nest, Op, Operand, Reduce, Result, Size, Stage
from ranvier.codegen.loops.normalize import Rewriter, leaves
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_POINTS = 1 << 17  # less work than this is not worth cutting
_ROW = 1 << 12  # nor is a row this short
_PART = 1 << 14  # points of a part, about
_PARTS = 64  # and no more parts than this


@dataclass(frozen=True)
class Cut:
    """From which sizes on rows are cut, and into what: ``points`` of a nest and ``row`` points of a row at least, then
    parts of about ``part`` points of the nest, and of rows of a multiple of ``align``, where that can be."""

    points: int = _POINTS
    row: int = _ROW
    part: int = _PART
    parts: int = _PARTS
    align: int = 1


_USUAL = Cut()


def split(nest: Nest, how: Cut = _USUAL) -> list[Nest]:
    """Nests that do the same work in parts, for one with too few tiles; the nest itself where that is not worth it."""
    row_points = math.prod(nest.extents[a] for a in nest.row)
    folds = [s for s in nest.stages if isinstance(s, Reduce)]
    if not folds or math.prod(nest.extents) < how.points or row_points < how.row:
        return [nest]
    if any(is_arg(s.fold) for s in folds) or not all(isinstance(s, Reduce | Map | Final) for s in nest.stages):
        return [nest]
    return _Splitter(nest, how).nests()


class _Splitter:
    def __init__(self, nest: Nest, how: Cut) -> None:
        self.nest = nest
        self.how = how
        self.outer = nest.outer
        self.shape = tuple(nest.extents[a] for a in self.outer)
        self.operands = list(nest.operands)  # grows by the temporaries that hold results
        self.known: dict[int, Load] = {}  # results of stages that were combined

    def nests(self) -> list[Nest]:
        made: list[Nest] = []
        pending: dict[int, Reduce] = {}
        for number, stage in enumerate(self.nest.stages):
            if isinstance(stage, Reduce):
                if any(isinstance(e, Result) and e.stage in pending for e in leaves([stage.value])):
                    made += self.combined(pending)
                    pending = {}
                pending[number] = stage
                continue
            if pending and isinstance(stage, Final) and stage is self.nest.stages[-1]:
                return made + self.combined(pending, stage)
            if pending:
                made += self.combined(pending)
                pending = {}
            made.append(self.stored(stage))
        return made

    def rewritten(self, expr: Expr) -> Expr:
        return Rewriter(lambda e: self.known[e.stage] if isinstance(e, Result) else e)(expr)

    def stored(self, stage: Stage) -> Nest:
        """A nest that stores with the results known by now: along the row, every axis is free."""
        assert isinstance(stage, Map | Final)
        stores = Map(tuple((k, self.rewritten(v)) for k, v in stage.stores))
        extents = self.nest.extents
        if isinstance(stage, Final):
            extents = tuple(1 if a in self.nest.row else n for a, n in enumerate(extents))
        return Nest(extents, tuple(self.operands), (stores,), label=self.nest.label)

    def combined(self, stages: dict[int, Reduce], last: Final | None = None) -> list[Nest]:
        """Folds over parts of the row, then over the parts; leaves the results in temporaries, or stores what the
        nest's last stage makes of them at once."""
        nest = self.nest
        axis = max(nest.row, key=lambda a: nest.extents[a])
        extent = nest.extents[axis]
        parts = max(2, min(self.how.parts, math.prod(nest.extents) // self.how.part, extent))
        length = extent // parts
        if length % self.how.align and length > self.how.align:
            length -= length % self.how.align
            parts = extent // length
        rest = extent - parts * length
        slots = parts + (rest > 0)
        stages = {k: self.accumulating(s) for k, s in stages.items()}
        partial = {k: View.temporary(s.dtype, (slots, *self.shape)) for k, s in stages.items()}
        made = [self.part(stages, partial, axis, length, 0, parts)]
        if rest:
            made.append(self.part(stages, partial, axis, rest, parts, 1, start=parts * length))
        made.append(self.whole(stages, partial, slots) if last is None else self.ended(stages, partial, slots, last))
        return made

    def accumulating(self, stage: Reduce) -> Reduce:
        """Partial sums of half and bfloat stay float until the end."""
        value = self.rewritten(stage.value)
        if stage.dtype in (DType.float16, DType.bfloat16):
            return Reduce(stage.fold, Op("cast", (value,), DType.float32), DType.float32)
        return replace(stage, value=value)

    def part(
        self,
        stages: dict[int, Reduce],
        partial: dict[int, View],
        axis: int,
        length: int,
        slot: int,
        parts: int,
        start: int = 0,
    ) -> Nest:
        """The nest whose axes are those of the original, the cut one shortened, and one more for the part."""
        nest = self.nest
        added = len(nest.extents)
        extents = (*(length if a == axis else n for a, n in enumerate(nest.extents)), parts)
        position = Op("mul", (Index(added), Size(length)), DType.int64)
        whole_index = Op("add", (Op("add", (Index(axis), position), DType.int64), Size(start)), DType.int64)

        def leaf(expr: Expr) -> Expr:
            return whole_index if isinstance(expr, Index) and expr.axis == axis else expr

        rewrite = Rewriter(leaf)
        operands = [
            replace(
                rewrite.operand(o),
                strides=(*o.strides, o.strides[axis] * length),
                offset=o.offset + o.strides[axis] * start,
            )
            for o in self.operands
        ]
        folds = [rewrite.stage(s) for s in stages.values()]
        stores = []
        for number, (view, stage) in enumerate(zip(partial.values(), stages.values())):
            stores.append((len(operands), Result(number, stage.dtype)))
            operands.append(Operand(view, (*self.spread(view.strides[1:]), view.strides[0]), slot * view.strides[0]))
        return Nest(extents, tuple(operands), (*folds, Final(tuple(stores))), nest.row, nest.label)

    def whole(self, stages: dict[int, Reduce], partial: dict[int, View], slots: int) -> Nest:
        """The folds over the parts, whose results later nests read from temporaries."""
        operands: list[Operand] = []
        folds, found = self.folded(stages, partial, operands)
        stores: list[tuple[int, Expr]] = []
        for k, value in found.items():
            result = View.temporary(value.dtype, self.shape)
            stores.append((len(operands), value))
            operands.append(Operand(result, (*self.spread(result.strides), 0)))
            self.known[k] = Load(len(self.operands), value.dtype)
            self.operands.append(Operand(result, self.spread(result.strides)))
        return self.over_parts(slots, operands, folds, stores)

    def ended(self, stages: dict[int, Reduce], partial: dict[int, View], slots: int, last: Final) -> Nest:
        """The folds over the parts, and what is stored once per outer point."""
        operands = [replace(o, strides=(*o.strides, 0)) for o in self.operands]
        folds, results = self.folded(stages, partial, operands)
        found = {**self.known, **results}
        rewrite = Rewriter(lambda e: found[e.stage] if isinstance(e, Result) else e)
        return self.over_parts(slots, operands, folds, [(k, rewrite(value)) for k, value in last.stores])

    def folded(
        self, stages: dict[int, Reduce], partial: dict[int, View], operands: list[Operand]
    ) -> tuple[list[Stage], dict[int, Expr]]:
        """Folds over the parts, which become operands, and what is then the result of each stage of the nest."""
        folds: list[Stage] = []
        found: dict[int, Expr] = {}
        for number, (k, stage) in enumerate(stages.items()):
            view, original = partial[k], self.nest.stages[k]
            assert isinstance(original, Reduce)
            folds.append(Reduce(stage.fold, Load(len(operands), view.dtype), stage.dtype))
            operands.append(Operand(view, (*self.spread(view.strides[1:]), view.strides[0])))
            found[k] = Result(number, stage.dtype)
            if original.dtype is not stage.dtype:
                found[k] = Op("cast", (found[k],), original.dtype)
        return folds, found

    def over_parts(
        self, slots: int, operands: list[Operand], folds: list[Stage], stores: list[tuple[int, Expr]]
    ) -> Nest:
        """A nest over the outer axes and, as its row, the parts."""
        extents = (*(1 if a in self.nest.row else n for a, n in enumerate(self.nest.extents)), slots)
        row = frozenset({len(self.nest.extents)})
        return Nest(extents, tuple(operands), (*folds, Final(tuple(stores))), row, self.nest.label)

    def spread(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of a tensor over the outer axes as strides over all axes."""
        found = dict(zip(self.outer, strides))
        return tuple(found.get(a, 0) for a in range(len(self.nest.extents)))
