"""Nests brought to a form in which equal work looks equal: no trivial axes, memory order, contiguous axes merged."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace

from ranvier.codegen.loops.fold import expressions, identity, is_arg
from ranvier.codegen.loops.ir import (
    Const,
    Expr,
    Final,
    Index,
    Load,
    Map,
    Nest,
    Op,
    Operand,
    Reduce,
    Result,
    Scan,
    Stage,
)
from ranvier.dtypes import DType


class Rewriter:
    """Applies a function to the leaves of expressions; shared subtrees are rewritten once and stay shared.

    Operations may be replaced too: ``before`` what they are made of is visited, if it gives something, or ``after``.
    """

    def __init__(
        self,
        leaf: Callable[[Expr], Expr] | None = None,
        *,
        before: Callable[[Op], Expr | None] | None = None,
        after: Callable[[Op], Expr] | None = None,
    ) -> None:
        self._leaf, self._before, self._after = leaf, before, after
        self._done: dict[int, tuple[Expr, Expr]] = {}  # the original is kept: its identity must not be reused

    def __call__(self, expr: Expr) -> Expr:
        found = self._done.get(id(expr))
        if found is not None:
            return found[1]
        made = self._op(expr) if isinstance(expr, Op) else expr if self._leaf is None else self._leaf(expr)
        self._done[id(expr)] = (expr, made)
        return made

    def _op(self, expr: Op) -> Expr:
        made = None if self._before is None else self._before(expr)
        if made is not None:
            return made
        args = tuple([self(a) for a in expr.args])
        same = all(map(operator.is_, args, expr.args))
        found = expr if same else Op(expr.name, args, expr.dtype)
        return found if self._after is None else self._after(found)

    def stage(self, stage: Stage) -> Stage:
        if isinstance(stage, Reduce | Scan):
            return replace(stage, value=self(stage.value))
        return type(stage)(tuple((k, self(value)) for k, value in stage.stores))

    def operand(self, operand: Operand) -> Operand:
        if operand.at is None and operand.guard is None:
            return operand
        at = None if operand.at is None else self(operand.at)
        guard = None if operand.guard is None else self(operand.guard)
        return replace(operand, at=at, guard=guard)


def leaves(roots: Iterable[Expr]) -> Iterable[Expr]:
    """Every distinct leaf object once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Op):
            stack.extend(each.args)
        else:
            yield each


def roots(nest: Nest) -> list[Expr]:
    """All expressions of a nest, those of addresses and guards included."""
    found = [e for stage in nest.stages for e in expressions(stage)]
    for operand in nest.operands:
        found += [e for e in (operand.at, operand.guard) if e is not None]
    return found


def normalized(nest: Nest) -> Nest | None:
    """The same work in normal form; None where there is nothing to do."""
    if any(nest.extents[a] == 0 for a in nest.outer):
        return None
    if 0 in nest.extents:
        nest = _without_rows(nest)
        if not nest.stages:
            return None
    nest = compacted(nest)
    indexed = {leaf.axis for leaf in leaves(roots(nest)) if isinstance(leaf, Index)}
    groups = _merged(nest, _ordered(nest), indexed)
    return _regrouped(nest, groups)


def _without_rows(nest: Nest) -> Nest:
    """With an empty row every fold is its identity and nothing is stored along the row."""
    constants = {
        k: Const(0 if is_arg(s.fold) else identity(s.fold, s.dtype), s.dtype)
        for k, s in enumerate(nest.stages)
        if isinstance(s, Reduce)
    }
    rewrite = Rewriter(lambda e: constants[e.stage] if isinstance(e, Result) else e)
    stores = tuple((k, rewrite(v)) for s in nest.stages if isinstance(s, Final) for k, v in s.stores)
    extents = tuple(1 if a in nest.row else n for a, n in enumerate(nest.extents))
    return replace(nest, extents=extents, stages=(Map(stores),) if stores else (), row=frozenset())


def compacted(nest: Nest) -> Nest:
    """Without operands nobody uses, and with one of those that are the same (fusion brings in both kinds)."""
    queue = [e for stage in nest.stages for e in expressions(stage)]
    used = set(nest.written())
    fresh = set(used)
    while queue or fresh:
        for k in fresh:
            queue += [e for e in (nest.operands[k].at, nest.operands[k].guard) if e is not None]
        fresh = {leaf.operand for leaf in leaves(queue) if isinstance(leaf, Load)} - used
        used |= fresh
        queue = []
    places: list[tuple[object, ...]] = []  # few, and compared rather than hashed: sizes may vary
    moved: dict[int, int] = {}
    for k in sorted(used):
        o = nest.operands[k]
        same = (id(o.view.storage), o.dtype, id(o.at), id(o.guard), o.other, o.view.offset + o.offset, o.strides)
        if same not in places:
            places.append(same)
        moved[k] = places.index(same)
    if len(places) == len(nest.operands):
        return nest
    rewrite = Rewriter(lambda e: Load(moved[e.operand], e.dtype) if isinstance(e, Load) else e)
    operands = {moved[k]: rewrite.operand(nest.operands[k]) for k in sorted(used, reverse=True)}
    stages: list[Stage] = []
    for stage in map(rewrite.stage, nest.stages):
        if isinstance(stage, Scan):
            stages.append(replace(stage, operand=moved[stage.operand]))
        elif isinstance(stage, Reduce):
            stages.append(stage)
        else:
            stages.append(type(stage)(tuple((moved[k], value) for k, value in stage.stores)))
    return replace(nest, operands=tuple(operands[k] for k in range(len(places))), stages=tuple(stages))


def _ordered(nest: Nest) -> list[int]:
    """Axes that have an extent, outer ones first, each kind from the largest stride to the smallest."""
    written = nest.written()
    weights = sorted(range(len(nest.operands)), key=lambda k: (k not in written, k))

    def key(axis: int) -> tuple[int, ...]:
        return tuple(-abs(nest.operands[k].strides[axis]) for k in weights)

    kept = [a for a, n in enumerate(nest.extents) if n != 1]
    outer = sorted((a for a in kept if a not in nest.row), key=key)
    row = [a for a in kept if a in nest.row]
    if not any(isinstance(s, Reduce) and is_arg(s.fold) for s in nest.stages):
        row.sort(key=key)  # positions count along the row as it was given; any other fold may go in any order
    return outer + row


def _merged(nest: Nest, order: list[int], indexed: set[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    scan = any(isinstance(s, Scan) for s in nest.stages)
    for axis in order:
        last = groups[-1][-1] if groups else None
        if last is not None and _mergeable(nest, last, axis, indexed) and not (scan and axis in nest.row):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _mergeable(nest: Nest, a: int, b: int, indexed: set[int]) -> bool:
    if (a in nest.row) != (b in nest.row) or a in indexed or b in indexed:
        return False
    return all(o.strides[a] == o.strides[b] * nest.extents[b] for o in nest.operands)


def _regrouped(nest: Nest, groups: list[list[int]]) -> Nest:
    position = {group[-1]: k for k, group in enumerate(groups)}
    zero = Const(0, DType.int64)

    def leaf(expr: Expr) -> Expr:
        if isinstance(expr, Index):
            return Index(position[expr.axis]) if expr.axis in position else zero
        return expr

    rewrite = Rewriter(leaf)
    operands = tuple(
        replace(rewrite.operand(o), strides=tuple(o.strides[group[-1]] for group in groups)) for o in nest.operands
    )
    return Nest(
        tuple(math.prod(nest.extents[a] for a in group) for group in groups),
        operands,
        tuple(rewrite.stage(s) for s in nest.stages),
        frozenset(k for k, group in enumerate(groups) if group[0] in nest.row),
        nest.label,
    )
