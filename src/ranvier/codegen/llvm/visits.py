"""Tokens in the order of the experts they visit: what a layer of experts needs to read each one's weights once.

Every choice of a token, [tokens, k] numbers of experts, is a row of the work. Rows are sorted by expert, those of one
expert in the order of tokens, and a visit is an expert that has any: its number, its first row and how many it has.
First rows may be aligned: rows in between stand for the first token, and nobody looks at what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import View

VISIT = 3  # numbers of a visit: expert, first row, rows
_ITEM = 4
_CHOICES, _ORDER, _PLACES, _OWNERS, _VISITS = range(5)


def most_visits(rows: int, experts: int) -> int:
    """There are no more, however tokens choose."""
    return min(rows, experts)


def sorted_rows(rows: int, experts: int, align: int) -> int:
    """There are no more, with those in between."""
    return rows + most_visits(rows, experts) * (align - 1)


def sort_visits(
    choices: View, order: View, places: View, owners: View, visits: View, experts: int, align: int
) -> list[Launch]:  # fmt: skip
    """``choices`` are rows of int64; the others int32: ``order`` is what each sorted row is, ``places`` where each row
    went, ``owners`` the expert of each sorted row, ``visits`` [most_visits, 3], filled up with experts that have no
    rows. ``align`` is a power of two."""
    (rows,) = choices.shape
    return [
        Launch(
            KernelSpec("sort visits", ("sort visits",), _emit),
            tuple(At.of(view) for view in (choices, order, places, owners, visits)),
            (rows, experts, visits.shape[0], order.shape[0], align),
            tiles=1,
            writes=tuple(view.storage for view in (order, places, owners, visits)),
            scratch=_ITEM * experts,
            flops=4.0 * rows + experts,
            traffic=float(5 * 8 * rows),
            label="sort visits",
        )
    ]


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    f = module.kernel(symbol)
    bufs = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr"), invariant=True) for k in range(5)]
    rows, experts, slots, room, align = (
        f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k in range(5)
    )
    next_row = f.args["scratch"]  # of every expert

    def number(at: Val) -> Val:
        return f.cast(f.load("i32", at), "i64")

    def keep(value: Val, at: Val) -> None:
        f.store(f.cast(value, "i32"), at)

    def expert_of(row: Val) -> Val:
        return f.load("i64", f.gep(bufs[_CHOICES], row, "i64"))

    def visit(slot: Val, numbers: Sequence[Val]) -> None:
        for k, value in enumerate(numbers):
            keep(value, f.gep(bufs[_VISITS], slot * VISIT + k, "i32"))

    with f.loop(0, experts) as expert:
        keep(f.i64(0), f.gep(next_row, expert, "i32"))
    with f.loop(0, rows) as row:
        at = f.gep(next_row, expert_of(row), "i32")
        keep(number(at) + 1, at)
    first, slot = f.var("i64", f.i64(0)), f.var("i64", f.i64(0))
    with f.loop(0, experts) as expert:
        at = f.gep(next_row, expert, "i32")
        count = number(at)
        keep(first.get(), at)
        with f.if_(f.cmp("ne", count, 0)):
            visit(slot.get(), (expert, first.get(), count))
            slot.set(slot.get() + 1)
            first.set(f.and_(first.get() + count + (align - 1), f.i64(0) - align))
    with f.loop(slot.get(), slots) as rest:
        visit(rest, [f.i64(0)] * VISIT)
    with f.loop(0, room) as row:
        keep(f.i64(0), f.gep(bufs[_ORDER], row, "i32"))
        keep(f.i64(0), f.gep(bufs[_OWNERS], row, "i32"))
    with f.loop(0, rows) as row:
        expert = expert_of(row)
        at = f.gep(next_row, expert, "i32")
        place = number(at)
        keep(place + 1, at)
        keep(row, f.gep(bufs[_ORDER], place, "i32"))
        keep(place, f.gep(bufs[_PLACES], row, "i32"))
        keep(expert, f.gep(bufs[_OWNERS], place, "i32"))
    f.ret()
