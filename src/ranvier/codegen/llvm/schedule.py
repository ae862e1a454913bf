"""How a nest becomes a kernel: what is looped where, what is code and what is a number.

A :class:`Structure` is everything the code depends on; extents, strides and sizes are left out of it and arrive in
``dims``, so nests of one structure share one compiled kernel. What the code does depend on is how vectors cover the
lane axis (:mod:`ranvier.codegen.llvm.lane_axis`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ranvier.codegen.llvm.canon import Arg, Canon, Dependence
from ranvier.codegen.llvm.elements import NARROW
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.lane_axis import (
    Cover,
    abreast,
    covered,
    crossing,
    has_places,
    held_row,
    lane_axis,
    nodes,
    register_bytes,
    vector_lanes,
)
from ranvier.codegen.loops.fold import expressions, is_arg
from ranvier.codegen.loops.ir import (
    Expr,
    Final,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Scan,
    Stage,
)
from ranvier.codegen.loops.narrow import Narrower
from ranvier.records import dataclass
from ranvier.varying import largest, smallest

Slot = tuple[object, ...]  # names a number in ``dims``
# Rough costs in instructions per vector; they choose widths and tiles, nothing else.
_EXPENSIVE = dict.fromkeys(("exp", "log", "tanh", "sigmoid", "erf", "expm1", "log1p", "softplus", "sin", "cos"), 20)
_EXPENSIVE |= dict.fromkeys(("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"), 30)
_EXPENSIVE |= dict.fromkeys(("short_sigmoid", "short_one_plus_erf"), 12)
_EXPENSIVE |= {"pow": 50, "atan2": 40, "mod": 30, "fmod": 30, "div": 6, "sqrt": 8, "rsqrt": 12, "reciprocal": 6}
_DEAR = 16  # what is done once for a row is no small matter for the compiler
_PARKED_FROM = 16  # an expression at least this expensive is kept for a later stage rather than computed again
_PARK_BYTES = 256 << 10  # … as long as the row of them stays in a core's cache
_TILE_NS = 12_000  # work per tile aimed at
_SQUARE = 64  # sides of tiles where operands are contiguous along different axes, so that lines are used whole
_WIDE = 1 << 25  # strides from here on: 32 bits might not hold what 64 lanes span


@dataclass(frozen=True)
class Structure:
    """A kernel's code, complete."""

    name: str  # for people
    args: tuple[Arg, ...]
    stages: tuple[Stage, ...]
    packed: tuple[int, ...]  # outer axes collapsed into the tile's number, outermost first
    repeat: int | None  # the outer axis looped over inside a tile
    lane: int  # the axis whose points fill the lanes
    row: tuple[int, ...]  # row axes other than the lane axis, outermost first
    lane_in_row: bool
    cover: Cover  # … how vectors cover it
    unrolls: tuple[int, ...]  # vectors worked on together, per stage, where it is a row axis
    held: tuple[int, int] | None  # whole vectors of a row that is short enough to stay in registers, and parts of one
    parked: tuple[Expr, ...]  # values kept in scratch from the first stage that has them
    short: bool  # places in a row that a fold tells fit 32 bits
    slots: tuple[Slot, ...]
    key: tuple[object, ...]


@dataclass(frozen=True)
class Schedule:
    """A structure with the numbers of one nest."""

    structure: Structure
    operands: tuple[Operand, ...]
    dims: tuple[int, ...]
    tiles: int
    grain: int
    scratch: int
    flops: float
    traffic: float


def cost(exprs: list[Expr], varies: Callable[[Expr], bool] = lambda expr: True) -> float:
    """Instructions per vector, shared parts once; only those that vary, where others are known before."""
    seen: set[int] = set()
    total = 0.0
    stack = list(exprs)
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Op) and varies(each):
            total += _EXPENSIVE.get(each.name, 1) * (3 if each.dtype in NARROW else 1)
            stack.extend(each.args)
    return total


def schedule(nest: Nest, isa: Isa) -> Schedule:
    """The kernel and its numbers for a nest in normal form."""
    nest = _with_an_axis(nest)
    lanes = vector_lanes(nest, isa)
    lane = lane_axis(nest, lanes, isa)
    if has_places(nest, lane):
        lanes = smallest(lanes, isa.lanes(4))
        lane = lane_axis(nest, lanes, isa)
    in_row = lane in nest.row
    outer = [a for a in nest.outer if a != lane]
    across = None if nest.row else crossing(nest, lane)
    if across is not None:
        outer.remove(across)
        outer.append(across)
    repeat = outer[-1] if outer else None
    packed = tuple(outer[:-1])
    row = tuple(sorted(a for a in nest.row if a != lane))

    canon, narrow = Canon(), Narrower(nest.extents)
    written = nest.written()
    args = tuple(_arg(o, lane, k in written, nest.extents, canon, narrow) for k, o in enumerate(nest.operands))
    stages = tuple(_canonical(s, canon) for s in nest.stages)
    used = _used(stages, args)
    point = cost([e for s in stages for e in expressions(s)])
    inner = cost([e for s in stages if not isinstance(s, Final) for e in expressions(s)])
    cover = covered(nest, lane, lanes, inner if point <= _DEAR else point, isa)
    together = cover.lanes * cover.unroll  # points
    depends, along = Dependence(args), frozenset(nest.row)
    unrolls = tuple(abreast(cost(list(expressions(s)), lambda e: bool(depends(e) & along)), isa) for s in stages)
    held = held_row(nest, lane, lanes, isa) if cover.lanes == lanes and not cover.pairs else None
    parked = () if held else _parked(nest, stages, args, lane, together)
    tells = any(isinstance(s, Reduce) and is_arg(s.fold) for s in stages)
    short = tells and math.prod(nest.extents[a] for a in nest.row) < 1 << 31

    slots: list[Slot] = []
    dims: list[int] = []

    def number(slot: Slot, value: int) -> None:
        slots.append(slot)
        dims.append(value)

    for axis, extent in enumerate(nest.extents):
        number(("extent", axis), extent)
    for k, operand in enumerate(nest.operands):
        for axis, stride in enumerate(operand.strides):
            if k in used and args[k].varies[axis] and not (axis == lane and args[k].lane == "1"):
                number(("stride", k, axis), stride)
    for k, size in enumerate(canon.sizes):
        number(("size", k), size)

    traffic = sum(_touched(nest, k) for k in used)
    points = math.prod(nest.extents)
    vectors = points / cover.lanes
    nanoseconds = largest(traffic / 12, vectors * (point + len(used)) / 4)
    square = _SQUARE if across is not None else 0
    tiles, chunks = _tiling(nest, lane, in_row, repeat, packed, together, nanoseconds, square)
    for name, value in chunks:
        number(name, value)
    park = 0
    if parked:
        depth = nest.extents[next(iter(nest.row))] * (1 if in_row else together)
        park = _rounded(depth * max(register_bytes(e.dtype) for e in parked), 64)
        number(("park",), park)

    key: tuple[object, ...] = (
        "nest",
        tuple(canon.text),
        tuple(_arg_key(a, canon) for a in args),
        tuple(_stage_key(s, canon) for s in stages),
        (packed, repeat, lane, row, in_row, cover.key, unrolls, held),
        tuple(canon.number[id(e)] for e in parked),
        short,
        tuple(used),
    )
    title = _name(nest, stages)
    structure = Structure(
        *(title, args, stages, packed, repeat, lane, row, in_row),
        *(cover, unrolls, held, parked, short, tuple(slots), key),
    )
    return Schedule(
        structure,
        nest.operands,
        tuple(dims),
        tiles,
        smallest(tiles, largest(1, round(_TILE_NS * tiles / largest(1.0, nanoseconds)))),
        park * len(parked),
        points * max(1.0, point),
        1.0 * traffic,
    )


def _name(nest: Nest, stages: tuple[Stage, ...]) -> str:
    """What a kernel does, in a few words."""
    words: list[str] = []
    for stage in stages:
        words.append(stage.fold if isinstance(stage, Reduce | Scan) else type(stage).__name__.lower())
        names = dict.fromkeys(e.name for e in nodes(stage) if isinstance(e, Op))
        words += [f"({' '.join(reversed(names))})"] if names else []
    types = dict.fromkeys(o.dtype.name for o in nest.operands)
    return " ".join([*words, *types])


def _with_an_axis(nest: Nest) -> Nest:
    """A nest of a single point gets an axis of one step, so that there is always something to fill the lanes."""
    if nest.outer or (nest.row and not any(isinstance(s, Scan) for s in nest.stages)):
        return nest
    operands = tuple(
        Operand(o.view, (*o.strides, int(k in nest.written())), o.offset, o.at, o.guard, o.other)
        for k, o in enumerate(nest.operands)
    )
    return Nest((*nest.extents, 1), operands, nest.stages, nest.row, nest.label)


def _arg(operand: Operand, lane: int, written: bool, extents: tuple[int, ...], canon: Canon, narrow: Narrower) -> Arg:
    stride = operand.strides[lane]
    at, guard = narrow(operand.at), narrow(operand.guard)
    second = stride == 2 and at is None and not written
    return Arg(
        operand.dtype,
        tuple((bool(s) and n > 1) or (a == lane and bool(s)) for a, (s, n) in enumerate(zip(operand.strides, extents))),
        "0" if stride == 0 else "1" if stride == 1 else "2" if second else "s" if abs(stride) < _WIDE else "w",
        at and canon(at),
        guard and canon(guard),
        operand.other,
        written,
    )


def _canonical(stage: Stage, canon: Canon) -> Stage:
    if isinstance(stage, Reduce):
        return Reduce(stage.fold, canon(stage.value), stage.dtype)
    if isinstance(stage, Scan):
        return Scan(stage.fold, canon(stage.value), stage.operand, stage.dtype, stage.exclusive, stage.reverse)
    return type(stage)(tuple((k, canon(v)) for k, v in stage.stores))


def _arg_key(arg: Arg, canon: Canon) -> tuple[object, ...]:
    extra = tuple(None if e is None else canon.number[id(e)] for e in (arg.at, arg.guard))
    other = repr(arg.other) if arg.guard is not None else ""
    return (arg.dtype.name, arg.varies, arg.lane, *extra, other, arg.written)


def _stage_key(stage: Stage, canon: Canon) -> tuple[object, ...]:
    if isinstance(stage, Reduce):
        return ("reduce", stage.fold, canon.number[id(stage.value)], stage.dtype.name)
    if isinstance(stage, Scan):
        number = canon.number[id(stage.value)]
        return ("scan", stage.fold, number, stage.operand, stage.dtype.name, stage.exclusive, stage.reverse)
    name = "map" if isinstance(stage, Map) else "final"
    return (name, *((k, canon.number[id(v)]) for k, v in stage.stores))


def _used(stages: tuple[Stage, ...], args: tuple[Arg, ...]) -> list[int]:
    """Operands that are read or written, those only addresses need included."""
    found: set[int] = {k for k, a in enumerate(args) if a.written}
    queue = [e for s in stages for e in expressions(s)]
    for k in found:
        queue += [e for e in (args[k].at, args[k].guard) if e is not None]
    seen: set[int] = set()
    while queue:
        each = queue.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Op):
            queue.extend(each.args)
        elif isinstance(each, Load) and each.operand not in found:
            found.add(each.operand)
            queue += [e for e in (args[each.operand].at, args[each.operand].guard) if e is not None]
    return sorted(found)


def _parked(nest: Nest, stages: tuple[Stage, ...], args: tuple[Arg, ...], lane: int, width: int) -> tuple[Expr, ...]:
    """Expensive values that vary along the row and that more than one stage needs: kept from the first one on."""
    if len(nest.row) != 1 or sum(not isinstance(s, Final) for s in stages) < 2:
        return ()
    row_axis = next(iter(nest.row))
    depth = nest.extents[row_axis] * (1 if lane in nest.row else width)
    depends = Dependence(args)
    seen: dict[int, int] = {}
    found: list[Expr] = []

    def visit(expr: Expr, stage: int) -> None:
        if not isinstance(expr, Op) or any(expr is e for e in found):
            return
        first = seen.setdefault(id(expr), stage)
        dear = _EXPENSIVE.get(expr.name, 0) >= _PARKED_FROM
        if dear and first != stage and row_axis in depends(expr):
            found.append(expr)
            return
        for arg in expr.args:
            visit(arg, stage)

    for k, stage in enumerate(stages):
        if not isinstance(stage, Final):
            for expr in expressions(stage):
                visit(expr, k)
    if depth * sum(register_bytes(e.dtype) for e in found) > _PARK_BYTES:
        return ()
    return tuple(found)


def _touched(nest: Nest, k: int) -> int:
    """Bytes of an operand that the nest moves."""
    operand = nest.operands[k]
    elements = math.prod(n for n, s in zip(nest.extents, operand.strides) if s)
    if operand.at is not None:
        elements = math.prod(nest.extents)
    return elements * operand.dtype.numpy.itemsize


def _tiling(
    nest: Nest,
    lane: int,
    in_row: bool,
    repeat: int | None,
    packed: tuple[int, ...],
    block: int,
    nanoseconds: float,
    square: int,
) -> tuple[int, list[tuple[Slot, int]]]:
    """Tiles of about equal, moderate work: chunks of the repeated axis, and of the lane axis where that is outer."""
    chunks: list[tuple[Slot, int]] = []
    total = math.prod(nest.extents[a] for a in packed)
    per_packed = nanoseconds / max(1, total)
    lane_chunks = 1
    extent = 1 if repeat is None else nest.extents[repeat]
    per_repeat = per_packed / extent
    if not in_row:
        n = nest.extents[lane]
        wanted = largest(1, round(per_repeat / _TILE_NS))
        chunk = smallest(n, _rounded(smallest(square or n, -(-n // wanted)), block))
        lane_chunks = -(-n // chunk)
        chunks += [(("chunk", "lane"), chunk), (("chunks", "lane"), lane_chunks)]
    if repeat is not None:
        per_step = per_repeat / lane_chunks
        chunk = smallest(square or extent, extent, largest(1, round(_TILE_NS / largest(per_step, 1e-3))))
        count = -(-extent // chunk)
        chunk = -(-extent // count)  # even out the last one
        count = -(-extent // chunk)
        chunks += [(("chunk", "repeat"), chunk), (("chunks", "repeat"), count)]
        total *= count
    return total * lane_chunks, chunks


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to
