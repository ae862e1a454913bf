"""The axis whose points fill the lanes: which one it is, and how vectors cover it.

Where the lanes lie along a short outer axis that is walked many times, as channels are for every pixel, loops over it
and what is done about its end would take longer than the work. There all its vectors are written out, and the last one
ends where the axis ends: it may compute a few points a second time, from what was read before anything was written, so
there is no remainder at all; eight points behind long vectors are a vector of their own. Longer axes that are walked
often have a remainder that is known: none, or a part of a vector that needs no mask. Sums over long rows go by groups
of vectors of which the last ends where the axis ends: one vector alone would take as long as a group.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ranvier.codegen.llvm.elements import register_type
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.fold import expressions, is_arg
from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Map, Nest, Op, Reduce, Scan, Stage
from ranvier.codegen.loops.normalize import leaves, roots
from ranvier.dtypes import DType
from ranvier.records import dataclass
from ranvier.varying import varies

_GATHER = 0.6  # cost of one lane of a gather, in contiguous vector loads
_HORIZONTAL = 14  # cost of folding the lanes of a vector
_HELD = 8  # vectors of a row, at most, that stay in registers from stage to stage …
_HORIZONTAL_OF_HELD = 2  # … where the next row begins while lanes are folded
_CHEAP = 4  # instructions up to which many copies of them are no burden to the compiler
_OFTEN = 32  # walks along the lane axis from which on its length is worth a kernel
_SHORT = 64  # vectors along it up to which its end is worth one
_EIGHT = 8  # points that are worth a vector of their own: channels come in eights
_COUNTS = (1, 2, 3, 4, 6, 8)  # of vectors written out; few, so that lengths share kernels
_LONG = 16  # points of a row from which on sums wait for each other, so that a vector too many costs nothing
_FOLDED = (1, 2, 3, 4, 8)  # of vectors written out there
_PLAIN = frozenset(("add", "sub", "mul", "div", "min", "max", "neg", "fma", "quotient", "reciprocal", "cast"))


@dataclass(frozen=True)
class Cover:
    """How vectors cover the lane axis."""

    lanes: int
    unroll: int  # vectors worked on together where the lane axis is an outer one
    together: bool  # … and those are all there are but for the rest, the last one at the axis' end
    fixed: int  # of these, the first ones, which lie at the same place for every length
    shifted: bool  # … or else the last group of them ends there
    single: bool  # whole vectors may be left behind groups of them
    rest: int | None  # points left behind whole vectors; None for any number of them
    pairs: bool = False  # two vectors are one, of which lanes are those of even numbers, then those of odd ones

    @property
    def key(self) -> tuple[object, ...]:
        vectors = self.lanes, self.unroll, self.together, self.fixed, self.shifted, self.single
        return *vectors, self.rest, self.pairs


def covered(nest: Nest, lane: int, lanes: int, instructions: float, isa: Isa) -> Cover:
    """The cover of the lane axis for so many instructions at a point."""
    unroll = abreast(instructions, isa)
    cheap = instructions <= _CHEAP
    folds = lane not in nest.row and any(isinstance(s, Reduce) for s in nest.stages)
    if folds and cheap:
        unroll = 8 if isa.registers >= 32 else 4  # which hides the latency of sums
    if _paired(nest, lane, isa):
        found = _cover(nest, lane, 2 * lanes, max(1, unroll // 2), cheap, folds, isa)
        n = nest.extents[lane]
        ends = found.rest is not None or (not varies(n) and n >= _SHORT * lanes)  # a mask, seldom
        if ends and found.lanes == 2 * lanes:
            return replace(found, pairs=True)
    return _cover(nest, lane, lanes, unroll, cheap, folds, isa)


def _cover(nest: Nest, lane: int, lanes: int, unroll: int, cheap: bool, folds: bool, isa: Isa) -> Cover:
    n = nest.extents[lane]
    plain = Cover(lanes, unroll, False, 0, False, not isa.masks and lanes > 1, None)
    if lane in nest.row or _scattered(nest, lane):
        return plain
    long = folds and cheap and math.prod(nest.extents[a] for a in nest.row) >= _LONG
    if long and n >= lanes * unroll and _apart(nest):
        if not varies(n):  # as few vectors as possible, in as large groups
            unroll = min(range(unroll, unroll // 2, -1), key=lambda u: -(-n // (lanes * u)) * u)
        return Cover(lanes, unroll, False, 0, True, False, 0)
    # a length that varies from call to call is nothing that code should depend on
    if varies(n) or n < 2 or math.prod(nest.extents) < _OFTEN * n:
        return plain
    fitting = min(lanes, 1 << (int(n).bit_length() - 1))
    most = (unroll if folds else _COUNTS[-1]) if cheap else unroll + 1
    rest = n % lanes
    parts = rest in (lanes // 2, lanes // 4) and rest > 1
    if parts and rest >= _EIGHT and cheap and not folds and isa.masks and 0 < n // lanes < most:
        # long vectors that overlap lie across lines of the cache, and waiting for those is what takes longest then
        return Cover(lanes, n // lanes, True, n // lanes, False, False, rest)
    fewer = 1
    for count in _FOLDED if long else _COUNTS:
        if n <= count * fitting and count <= most:
            return Cover(fitting, count, True, fewer, False, False, 0)
        fewer = count
    # without masks whole vectors have nothing to do with the end, and a few points are soon done one by one
    if n > _SHORT * lanes or not (isa.masks or parts):
        return plain
    return Cover(lanes, unroll, False, 0, False, True, rest if parts or rest == 0 else None)


def _paired(nest: Nest, lane: int, isa: Isa) -> bool:
    """Whether numbers are kept as bfloat16 and only added, multiplied and the like, each with those of its place."""
    if not (isa.has("avx512bf16") and isa.vector_bytes == 64) or lane in nest.row:
        return False
    narrow = False
    for operand in nest.operands:
        if operand.at is not None or operand.guard is not None or operand.strides[lane] not in (0, 1):
            return False
        if operand.strides[lane]:
            moves = any(stride and axis != lane for axis, stride in enumerate(operand.strides))
            narrow |= operand.dtype is DType.bfloat16
            if operand.dtype is not DType.bfloat16 and (moves or operand.dtype is not DType.float32):
                return False
    for stage in nest.stages:
        stored = stage.stores if isinstance(stage, Map | Final) else ()
        if isinstance(stage, Scan) or (isinstance(stage, Reduce) and stage.fold != "sum"):
            return False
        if any(value.dtype is not DType.float32 for _, value in stored):  # of the model itself: rounded otherwise
            return False
        if any(isinstance(e, Index) or (isinstance(e, Op) and e.name not in _PLAIN) for e in nodes(stage)):
            return False
    return narrow


def _apart(nest: Nest) -> bool:
    """Whether points may be computed a second time, after their results were written."""
    results = {nest.operands[k].view.storage for k in nest.written()}
    read = {nest.operands[leaf.operand].view.storage for leaf in leaves(roots(nest)) if isinstance(leaf, Load)}
    # what folds give never takes the memory of an operand that is not its own
    return results.isdisjoint(read) and all(isinstance(s, Reduce | Final) for s in nest.stages)


def _scattered(nest: Nest, lane: int) -> bool:
    """Whether an operand is touched lane by lane."""
    written = nest.written()
    return any(
        o.strides[lane] not in ((0, 1) if k in written else (0, 1, 2))
        or _moves(nest, o.at, lane)
        or _moves(nest, o.guard, lane)
        for k, o in enumerate(nest.operands)
    )


def abreast(instructions: float, isa: Isa) -> int:
    """Vectors worked on together: enough to hide latency, few enough to compile quickly."""
    return max(isa.abreast, 1 if instructions > 24 else 2 if instructions > 12 else 4)


def vector_lanes(nest: Nest, isa: Isa) -> int:
    """Lanes such that the widest type computed with fills one register; positions (int64) do not count."""
    types = {e.dtype for s in nest.stages for e in nodes(s)} | {o.dtype for o in nest.operands}
    floats = [register_bytes(t) for t in types if t.is_float]
    if floats:
        return isa.lanes(max(floats))
    return isa.lanes(max((register_bytes(t) for t in types), default=4))


def has_places(nest: Nest, lane: int) -> bool:
    """Whether every lane has a position of its own that something is worked out from: those take 32 bits."""
    if any(isinstance(leaf, Index) and leaf.axis == lane for leaf in leaves(roots(nest))):
        return True
    chosen = [e for o in nest.operands for e in (o.at, o.guard) if e is not None]
    return any(isinstance(leaf, Load) for leaf in leaves(chosen))


def register_bytes(dtype: DType) -> int:
    kind = register_type(dtype)
    return {"float": 4, "double": 8, "i1": 1}.get(kind) or int(kind[1:]) // 8


def nodes(stage: Stage) -> list[Expr]:
    seen: dict[int, Expr] = {}
    stack = list(expressions(stage))
    while stack:
        each = stack.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            stack.extend(each.args if isinstance(each, Op) else ())
    return list(seen.values())


def held_row(nest: Nest, lane: int, lanes: int, isa: Isa) -> tuple[int, int] | None:
    """How many vectors a row along the lanes has, whole ones and parts of one, if it can stay in registers from one
    stage to the next: then nothing is read or computed twice, and no loop is begun for few vectors."""
    extent, walks = nest.extents[lane], [s for s in nest.stages if not isinstance(s, Final)]
    if nest.row != {lane} or not isinstance(extent, int) or extent == 0 or len(walks) < 2 or lanes == 1:
        return None
    whole, rest = divmod(extent, lanes)
    if whole + (rest > 0) > _HELD or (rest and not isa.masks):
        return None
    if any(isinstance(s, Scan) or (isinstance(s, Reduce) and is_arg(s.fold)) for s in walks):
        return None
    read = {e.operand for s in nest.stages for e in nodes(s) if isinstance(e, Load)}
    plain = all(o.at is None and o.guard is None for o in nest.operands)
    return (whole, int(rest > 0)) if plain and not read & set(nest.written()) else None


def lane_axis(nest: Nest, lanes: int, isa: Isa) -> int:
    """The axis along which the work takes the fewest instructions."""
    scan = any(isinstance(s, Scan) for s in nest.stages)
    positions = any(isinstance(s, Reduce) and is_arg(s.fold) for s in nest.stages)
    folds = sum(isinstance(s, Reduce) for s in nest.stages)
    total = math.prod(nest.extents)
    outer_points = math.prod(nest.extents[a] for a in nest.outer)
    last_row = max(nest.row, default=-1)
    best, least = 0, math.inf
    for axis, extent in enumerate(nest.extents):
        in_row = axis in nest.row
        if in_row and (scan or (positions and axis != last_row)):
            continue
        per_vector = 0.5  # the loop itself
        for operand in nest.operands:
            stride = operand.strides[axis]
            moved = _moves(nest, operand.at, axis)
            gathers = moved or stride not in (0, 1)
            per_vector += lanes * _GATHER if gathers else 1.0 if stride else 0.1
        steps = total // extent * -(-extent // lanes) * per_vector
        held = in_row and held_row(nest, axis, lanes, isa) is not None
        steps += outer_points * folds * (_HORIZONTAL_OF_HELD if held else _HORIZONTAL) if in_row else 0
        if steps <= least:
            best, least = axis, steps
    return best


def crossing(nest: Nest, lane: int) -> int | None:
    """An outer axis along which an operand is contiguous that is not so along the lanes."""
    for operand in nest.operands:
        if abs(operand.strides[lane]) > 1:
            for axis in nest.outer:
                if axis != lane and abs(operand.strides[axis]) == 1:
                    return axis
    return None


def _moves(nest: Nest, chosen: Expr | None, axis: int) -> bool:
    """Whether what decides where (or if) an operand is touched varies along an axis."""
    if chosen is None:
        return False
    for leaf in leaves([chosen]):
        if isinstance(leaf, Index) and leaf.axis == axis:
            return True
        if isinstance(leaf, Load):
            table = nest.operands[leaf.operand]
            if table.strides[axis] or _moves(nest, table.at, axis):
                return True
    return False
