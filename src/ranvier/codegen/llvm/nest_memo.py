"""Launches of nests that were seen before: layers repeat, and finding out how to run a nest takes its time.

Two nests are alike when they differ in nothing but the memory they work on, and in the same way: operands that are one
in the first are one in the second.
"""

from __future__ import annotations

from collections.abc import Hashable

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.fold import expressions
from ranvier.codegen.loops.ir import Const, Expr, Index, Load, Map, Nest, Op, Operand, Reduce, Result, Scan, Size
from ranvier.records import dataclass

_MOST = 4096


@dataclass(frozen=True)
class _Pattern:
    """A launch without its memory: operands of the nest by position."""

    launch: Launch
    buffers: tuple[int, ...]
    writes: tuple[int, ...]


class Memo:
    """Launches by likeness; full, it starts anew."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[_Pattern, ...]] = {}

    def find(self, key: Hashable, nest: Nest) -> list[Launch] | None:
        patterns = self._known.get(key)
        return None if patterns is None else [_filled(pattern, nest) for pattern in patterns]

    def keep(self, key: Hashable, nest: Nest, found: list[Launch]) -> None:
        """Remember launches, unless they use memory that is not the nest's."""
        places: dict[tuple[int, int], int] = {}
        storages: dict[int, int] = {}
        for k, operand in enumerate(nest.operands):
            place = _place(operand)
            places.setdefault((id(place.storage), place.offset), k)
            storages.setdefault(id(place.storage), k)
        patterns: list[_Pattern] = []
        for launch in found:
            at = [places.get((id(b.storage), b.offset)) if isinstance(b, At) else None for b in launch.buffers]
            into = [storages.get(id(s)) for s in launch.writes]
            if any(k is None for k in [*at, *into]):
                return
            patterns.append(_Pattern(launch, tuple(k or 0 for k in at), tuple(k or 0 for k in into)))
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = tuple(patterns)


def _place(operand: Operand) -> At:
    return At(operand.view.storage, (operand.view.offset + operand.offset) * operand.dtype.numpy.itemsize)


def _filled(pattern: _Pattern, nest: Nest) -> Launch:
    known = pattern.launch
    return Launch(
        known.spec,
        tuple(_place(nest.operands[k]) for k in pattern.buffers),
        known.dims,
        known.tiles,
        tuple(nest.operands[k].view.storage for k in pattern.writes),
        known.grain,
        known.scratch,
        known.flops,
        known.traffic,
        nest.label,
    )


def likeness(nest: Nest, isa: Isa) -> Hashable:
    """Equal for nests that are alike."""
    parts: list[Hashable] = [isa.key, nest.extents, nest.row]
    numbers: dict[int, int] = {}  # shared parts of expressions are told by identity, as everywhere

    def number(expr: Expr | None) -> int:
        if expr is None:
            return -1
        found = numbers.get(id(expr))
        if found is None:
            kind = type(expr)
            if kind is Op:
                parts.append((expr.name, id(expr.dtype), *[number(a) for a in expr.args]))  # type: ignore[attr-defined]
            else:
                parts.append((kind, _content(expr), id(expr.dtype)))
            found = numbers[id(expr)] = len(numbers)
        return found

    classes: dict[tuple[int, int], int] = {}
    for o in nest.operands:
        place = _place(o)
        which = classes.setdefault((id(place.storage), place.offset), len(classes))
        parts.append((which, id(o.dtype), o.strides, number(o.at), number(o.guard), repr(o.other)))
    for stage in nest.stages:
        values = [number(e) for e in expressions(stage)]
        if isinstance(stage, Reduce):
            parts.append(("reduce", stage.fold, id(stage.dtype), *values))
        elif isinstance(stage, Scan):
            parts.append(("scan", stage.fold, stage.operand, id(stage.dtype), stage.exclusive, stage.reverse, *values))
        else:
            parts.append(("map" if isinstance(stage, Map) else "final", *[k for k, _ in stage.stores], *values))
    return tuple(parts)


def _content(leaf: Expr) -> Hashable:
    if isinstance(leaf, Const):
        return repr(leaf.value)
    if isinstance(leaf, Load):
        return leaf.operand
    if isinstance(leaf, Index):
        return leaf.axis
    if isinstance(leaf, Size):
        return leaf.value
    assert isinstance(leaf, Result)
    return leaf.stage
