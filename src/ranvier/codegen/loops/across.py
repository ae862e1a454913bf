"""Elementwise work whose result lies across its operands: done along them first, and turned afterwards.

Where operands are contiguous along one axis and the result along another, either the loads or the stores of a vector
would touch a line of the cache for every lane, and come back to it when it is gone. A copy that turns square tiles
touches every line once, so two walks through memory are several times as fast as that one.
"""

from __future__ import annotations

import math

from ranvier.codegen.loops.ir import Load, Map, Nest, Operand
from ranvier.codegen.storage import View

_POINTS = 1 << 13  # fewer than these stay in the nearest cache until their lines are used up
_SIDE = 16  # points along either axis, at least


def along_operands(nest: Nest) -> tuple[Nest, Nest] | None:
    """What computes into a temporary that lies as the operands do, and what copies that to its place; None where the
    result lies along its operands or no side is long enough."""
    if nest.row or len(nest.stages) != 1 or math.prod(nest.extents) < _POINTS:
        return None
    stage = nest.stages[0]
    if not isinstance(stage, Map) or len(stage.stores) != 1:
        return None
    target, value = stage.stores[0]
    result = nest.operands[target]
    axes = _axes(nest, target)
    if axes is None or result.at is not None or result.guard is not None or isinstance(value, Load):
        return None
    along, across = axes
    order = sorted((k for k in range(len(nest.extents)) if k != along), key=lambda k: -abs(result.strides[k]))
    # the axis across is the next to the last, so that what is turned is a matrix for each point of the others
    order = [*(k for k in order if k != across), across, along]
    shape = tuple(nest.extents[k] for k in order)
    view = View.temporary(result.dtype, shape)
    strides = [0] * len(order)
    for k, step in zip(order, view.strides):
        strides[k] = step
    temporary = Operand(view, tuple(strides))
    operands = tuple(temporary if k == target else each for k, each in enumerate(nest.operands))
    turned = Map(((1, Load(0, result.dtype)),))
    return (
        Nest(nest.extents, operands, nest.stages, label=nest.label),
        Nest(nest.extents, (temporary, result), (turned,), label=nest.label),
    )


def _axes(nest: Nest, target: int) -> tuple[int, int] | None:
    """The axis that all large operands are contiguous along, and the one that the result is; both long."""
    result = nest.operands[target]
    if 1 not in result.strides:
        return None
    across = result.strides.index(1)
    along = None
    for number, each in enumerate(nest.operands):
        if number == target or each.strides[across] == 0:
            continue
        whole = [k for k, step in enumerate(each.strides) if step == 1 and nest.extents[k] > 1]
        if each.at is not None or across in whole or len(whole) != 1 or along not in (None, whole[0]):
            return None
        along = whole[0]
    if along is None or min(nest.extents[along], nest.extents[across]) < _SIDE:
        return None
    return along, across
