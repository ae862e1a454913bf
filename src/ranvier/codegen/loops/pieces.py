"""Copies by tables of places, cut where a table is a line: padding by reflection, by edges, around the border.

A table that loops along a row look places up in costs a load of 8 bytes and a gather for every element. Most of such
a row is a line, places that follow each other; so are the few elements before and behind it, in either direction. Each
of these pieces is a nest of its own, which reads with a stride.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.codegen.loops.fold import expressions
from ranvier.codegen.loops.ir import Expr, Index, Load, Map, Nest, Op, Operand
from ranvier.codegen.loops.normalize import leaves
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
_LEAST = 16  # elements of a piece on average; shorter ones are no better than the table …
_POINTS = 1 << 12  # … and fewer in all are done sooner than launches


def by_pieces(nest: Nest) -> list[Nest] | None:
    """The pieces; None where no row is looked up in a table, or the table is no few lines."""
    if nest.row or all(each.at is None for each in nest.operands):
        return None
    if not all(isinstance(stage, Map) for stage in nest.stages):
        return None
    axis = _axis(nest)
    if axis is None:
        return None
    tables = {k: found for k, each in enumerate(nest.operands) if (found := _table(nest, each, axis)) is not None}
    indexed = any(isinstance(leaf, Index) and leaf.axis == axis for leaf in leaves(_roots(nest)))
    if not tables or indexed:
        return None
    cuts = sorted({0, nest.extents[axis], *(int(k) for _, table in tables.values() for k in _bends(table))})
    pieces = list(itertools.pairwise(cuts))
    if len(pieces) * _LEAST > nest.extents[axis] or math.prod(nest.extents) < _POINTS:
        return None
    if any(np.diff(table[first:last], 2).any() for _, table in tables.values() for first, last in pieces):
        return None
    return [_piece(nest, axis, tables, first, last) for first, last in pieces]


def _axis(nest: Nest) -> int | None:
    """The one that all results are contiguous along."""
    written = [nest.operands[k] for k in nest.written()]
    for axis, extent in enumerate(nest.extents):
        if extent > 1 and all(each.strides[axis] == 1 and each.at is None for each in written):
            return axis
    return None


def _roots(nest: Nest) -> list[Expr]:
    found = [e for stage in nest.stages for e in expressions(stage)]
    return found + [e for each in nest.operands for e in (each.at, each.guard) if e is not None]


def _table(nest: Nest, operand: Operand, axis: int) -> tuple[Expr, Array] | None:
    """The term of an operand's places that depends on the axis, and what it is for each of its points."""
    for term in _terms(operand.at):
        if not isinstance(term, Load):
            continue
        places = nest.operands[term.operand]
        array = places.view.storage.array
        alone = all((step != 0) == (k == axis) for k, step in enumerate(places.strides))
        if array is None or not alone or places.dtype is not DType.int64 or places.at is not None:
            continue
        first = places.view.offset + places.offset
        return term, array.reshape(-1)[first :: places.strides[axis]][: nest.extents[axis]]
    return None


def _terms(at: Expr | None) -> list[Expr]:
    if isinstance(at, Op) and at.name == "add":
        return [*_terms(at.args[0]), *_terms(at.args[1])]
    return [] if at is None else [at]


def _bends(table: Array) -> Array:
    """Where lines begin, but for the first. A jump looks like two beginnings that follow each other."""
    bent = np.flatnonzero(np.diff(table, 2)) + 2
    return bent[np.diff(bent, prepend=-1) > 1]


def _piece(nest: Nest, axis: int, tables: dict[int, tuple[Expr, Array]], first: int, last: int) -> Nest:
    operands = []
    for k, each in enumerate(nest.operands):
        offset, strides = each.offset + first * each.strides[axis], list(each.strides)
        at = each.at
        if k in tables:
            term, table = tables[k]
            offset += int(table[first])
            strides[axis] += int(table[first + 1] - table[first]) if last - first > 1 else 0
            at = _without(at, term)
        operands.append(replace(each, offset=offset, strides=tuple(strides), at=at))
    extents = tuple(last - first if k == axis else extent for k, extent in enumerate(nest.extents))
    return replace(nest, extents=extents, operands=tuple(operands))


def _without(at: Expr | None, term: Expr) -> Expr | None:
    rest = [each for each in _terms(at) if each is not term]
    found: Expr | None = None
    for each in rest:
        found = each if found is None else Op("add", (found, each), DType.int64)
    return found
