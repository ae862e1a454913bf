"""Row work as loop nests: reductions, and what flows into and follows from them, in one nest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranvier.codegen.definitions.defs import Def, Moved, Pointwise, Rows, Use
from ranvier.codegen.definitions.groups import Group
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.loops.ir import Expr, Final, Map, Nest, Stage
from ranvier.codegen.storage import View, memory_order
from ranvier.graph.ir import Value

if TYPE_CHECKING:
    from ranvier.codegen.definitions.realiser import BaseRealiser


def rows_nest(r: BaseRealiser, each: Group, anchor: Rows) -> Nest:
    """The loops of a group around row work: what flows into its loads, the row work, what follows from it."""
    nest = NestBuilder(anchor.domain, r.label)
    made: dict[Value, Expr] = {}
    feeding = _ancestors(each.defs, anchor)
    for before in feeding:
        if isinstance(before, Pointwise):
            made[before.out] = before.compute([r.expr(nest, made, u) for u in before.uses])
        else:
            assert isinstance(before, Moved)
            made[before.out] = before.compute(nest, [r.view(v) for v in before.sources])
    operands = [r.expr(nest, made, u) for u in anchor.uses]
    if anchor.gather is not None:
        operands += anchor.gather(nest, [r.view(v) for v in anchor.sources])
    body = anchor.build(operands)
    row = anchor.axes
    after = [d for d in each.defs if d is not anchor and d not in feeding]
    maps: list[tuple[int, Expr]] = []
    finals: list[tuple[int, Expr]] = []
    if after:
        mapped = 0 in anchor.mapped
        values: dict[Value, Expr] = dict(made) if mapped else {}
        values[anchor.out] = body.maps[0] if mapped else body.finals[0]
        for follower in after:
            assert isinstance(follower, Pointwise)
            exprs = [
                values[u.value] if u.value in values else _row_load(r, nest, u, anchor, mapped) for u in follower.uses
            ]
            values[follower.out] = follower.compute(exprs)
        result = after[-1].out
        _row_store(r, nest, result, values[result], anchor, mapped, maps, finals)
    else:
        for k, result in enumerate(anchor.outputs):
            mapped = k in anchor.mapped
            if k in body.maps or k in body.finals:
                value = body.maps[k] if mapped else body.finals[k]
                _row_store(r, nest, result, value, anchor, mapped, maps, finals)
    stages: list[Stage] = list(body.reduces)
    if maps:
        stages.append(Map(tuple(maps)))
    if finals:
        stages.append(Final(tuple(finals)))
    return nest.nest(stages, row)


def _row_load(r: BaseRealiser, nest: NestBuilder, use: Use, anchor: Rows, mapped: bool) -> Expr:
    view = r.seen(use)
    if mapped:
        return nest.load(view)
    return nest.load(view, _outer_strides(view, anchor))


def _outer_strides(view: View, anchor: Rows) -> tuple[int, ...]:
    """Strides over the domain of a tensor that broadcasts to the reduced shape."""
    kept = [k for k in range(len(anchor.domain)) if k not in anchor.axes]
    if anchor.keepdims:
        reduced = tuple(1 if k in anchor.axes else d for k, d in enumerate(anchor.domain))
        strides = view.expanded(reduced).strides
        return tuple(0 if k in anchor.axes else strides[k] for k in range(len(anchor.domain)))
    steps = view.expanded(tuple(anchor.domain[k] for k in kept)).strides
    placed = [0] * len(anchor.domain)
    for k, step in zip(kept, steps):
        placed[k] = step
    return tuple(placed)


def _outer_order(nest: NestBuilder, anchor: Rows) -> tuple[int, ...] | None:
    """How a reduced result should lie in memory: as the operands do along the axes that stay."""
    kept = [k for k in range(len(anchor.domain)) if k not in anchor.axes]
    for operand in nest.operands:
        strides = operand.strides
        if any(strides[k] == 0 and anchor.domain[k] != 1 for k in kept):
            continue
        if anchor.keepdims:
            shape = [1 if k in anchor.axes else d for k, d in enumerate(anchor.domain)]
            return memory_order(shape, strides)
        return memory_order([anchor.domain[k] for k in kept], [strides[k] for k in kept])
    return None


def _row_store(
    r: BaseRealiser,
    nest: NestBuilder,
    result: Value,
    value: Expr,
    anchor: Rows,
    mapped: bool,
    maps: list[tuple[int, Expr]],
    finals: list[tuple[int, Expr]],
) -> None:
    if mapped:
        target = r.destination(result, nest.order())
        maps.append((nest.store(target), value))
    else:
        target = r.destination(result, _outer_order(nest, anchor))
        finals.append((nest.store(target, _outer_strides(target, anchor)), value))


def _ancestors(defs: Sequence[Def], anchor: Def) -> list[Def]:
    """Members whose results flow into the anchor."""
    wanted = set(anchor.operands)
    found: list[Def] = []
    for each in reversed(defs):
        if each is not anchor and any(v in wanted for v in each.outputs):
            wanted.update(each.operands)
            found.append(each)
    return found[::-1]
