"""Two nests as one: what the first makes is handed on in registers instead of through memory.

Both must run over the same box of axes; one without row axes may have extents of 1 where the other has its row, and is
then done once per row. All folds of the result come first, in order, then everything that is stored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ranvier.codegen.loops.ir import Expr, Final, Index, Load, Map, Nest, Operand, Reduce, Result, Scan, Stage
from ranvier.codegen.loops.normalize import Rewriter, compacted, leaves, roots
from ranvier.codegen.storage import Storage

_OPERANDS = 24  # of one nest
_FOLDS = 12


def chained(first: Nest, second: Nest, needed: Collection[Storage]) -> Nest | None:
    """The first nest's work and then the second's; None where they do not fit. What the first stores and is not
    ``needed`` by others is not stored any more."""
    box = _box(first, second)
    if box is None:
        return None
    a, b = _over(first, *box), _over(second, *box)
    if a is None or b is None or not (_apart(a) and _apart(b)):
        return None
    handed = _handed(a, b)
    return None if handed is None else _joined(a, b, handed, needed)


def _box(first: Nest, second: Nest) -> tuple[tuple[int, ...], frozenset[int]] | None:
    if first.row and second.row:
        return (first.extents, first.row) if first.row == second.row and first.extents == second.extents else None
    with_row = first if first.row else second
    return with_row.extents, with_row.row


def _over(nest: Nest, extents: tuple[int, ...], row: frozenset[int]) -> Nest | None:
    """The nest over a box that has these row axes."""
    if any(isinstance(stage, Scan) for stage in nest.stages):
        return None
    if nest.extents == extents:
        return nest if nest.row == row or not nest.row else None
    once = tuple(1 if a in row else n for a, n in enumerate(extents))
    if nest.row or nest.extents != once or not all(isinstance(stage, Map) for stage in nest.stages):
        return None
    if any(isinstance(leaf, Index) and leaf.axis in row for leaf in leaves(roots(nest))):
        return None
    operands = [replace(o, strides=tuple(0 if a in row else s for a, s in enumerate(o.strides))) for o in nest.operands]
    stages = [Final(stage.stores) for stage in nest.stages if isinstance(stage, Map)]
    return Nest(extents, tuple(operands), tuple(stages), row, nest.label)


def _apart(nest: Nest) -> bool:
    """Whether it reads nothing that it writes, so that its stores can wait."""
    written = nest.written()
    made = {nest.operands[k].view.storage for k in written}
    return not any(o.view.storage in made for k, o in enumerate(nest.operands) if k not in written)


def _handed(a: Nest, b: Nest) -> dict[int, Expr] | None:
    """For operands of ``b`` that ``a`` makes, the expression that was stored; None where one is read elsewhere than at
    the point that made it."""
    stored = {
        k: (value, isinstance(stage, Final))
        for stage in a.stages
        if isinstance(stage, Map | Final)
        for k, value in stage.stores
    }
    touched = {o.view.storage for o in a.operands}
    made = {a.operands[k].view.storage for k in stored}
    written = b.written()
    found: dict[int, Expr] = {}
    for k, operand in enumerate(b.operands):
        storage = operand.view.storage
        if k in written and storage in touched:
            return None
        if storage not in made:
            continue
        same = [value for m, (value, once) in stored.items() if _is_at(operand, a.operands[m], a, once)]
        if not same or same[0].dtype is not operand.dtype:
            return None
        found[k] = same[0]
    return found


def _is_at(read: Operand, stored: Operand, nest: Nest, once: bool) -> bool:
    """Whether an operand is read where another was stored at the same point; ``once``: per row."""
    if read.view.storage is not stored.view.storage or read.dtype is not stored.dtype:
        return False
    if any(e is not None for e in (read.at, read.guard, stored.at, stored.guard)):
        return False
    if read.view.offset + read.offset != stored.view.offset + stored.offset:
        return False
    steps = [0 if once and a in nest.row else s for a, s in enumerate(stored.strides)]
    return all(n == 1 or r == s for r, s, n in zip(read.strides, steps, nest.extents))


def _joined(a: Nest, b: Nest, handed: dict[int, Expr], needed: Collection[Storage]) -> Nest | None:
    numbers: dict[tuple[int, int], int] = {}
    for which, nest in enumerate((a, b)):
        for k, stage in enumerate(nest.stages):
            if isinstance(stage, Reduce):
                numbers[which, k] = len(numbers)
    if len(numbers) > _FOLDS:
        return None
    count = len(a.operands)

    def of_first(e: Expr) -> Expr:
        return Result(numbers[0, e.stage], e.dtype) if isinstance(e, Result) else e

    before = Rewriter(of_first)

    def of_second(e: Expr) -> Expr:
        if isinstance(e, Load):
            return before(handed[e.operand]) if e.operand in handed else Load(e.operand + count, e.dtype)
        return Result(numbers[1, e.stage], e.dtype) if isinstance(e, Result) else e

    after = Rewriter(of_second)
    operands = (*map(before.operand, a.operands), *map(after.operand, b.operands))
    folds: list[Stage] = []
    maps: list[tuple[int, Expr]] = []
    finals: list[tuple[int, Expr]] = []
    for nest, rewrite, start in ((a, before, 0), (b, after, count)):
        for stage in map(rewrite.stage, nest.stages):
            if isinstance(stage, Reduce):
                folds.append(stage)
                continue
            assert isinstance(stage, Map | Final)
            stores = [(k + start, value) for k, value in stage.stores]
            kept = [each for each in stores if start or operands[each[0]].view.storage in needed]
            (maps if isinstance(stage, Map) else finals).extend(kept)
    stages = [*folds, *([Map(tuple(maps))] if maps else []), *([Final(tuple(finals))] if finals else [])]
    label = " + ".join(dict.fromkeys([*a.label.split(" + "), *b.label.split(" + ")]))
    made = compacted(Nest(a.extents, operands, tuple(stages), a.row | b.row, label))
    return made if len(made.operands) <= _OPERANDS else None


def only_folds(nest: Nest) -> bool:
    """Whether nothing is stored along the row."""
    return bool(nest.row) and not any(isinstance(stage, Map) for stage in nest.stages)


def depends(first: Nest, second: Nest) -> bool:
    """Whether the second reads what the first makes."""
    made = {first.operands[k].view.storage for k in first.written()}
    return any(o.view.storage in made for o in second.operands)


__all__ = ["chained", "depends", "only_folds"]
