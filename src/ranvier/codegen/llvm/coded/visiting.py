"""Kernels that stand in front of those of products, for rows that visit experts.

Rows are sorted by expert (``llvm/visits.py``), so that an expert's rows are a product of their own, whose size shows
only when they are there. For every visit the kernel in front has the addresses of the expert's weights, rows and
results put where the other looks for them, with how many rows there are, and calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.coded import panels, passes
from ranvier.codegen.llvm.control import Launched
from ranvier.codegen.llvm.gemm import driver
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.visits import VISIT
from ranvier.codegen.storage import View
from ranvier.records import dataclass

_LINE = 64
ALIGNED = 4  # rows that visits are aligned to where there are many: blocks of rows divide it


class Buf(IntEnum):
    """Positions in ``bufs``; those of the kernel behind follow."""

    VISITS = 0
    CODE = 1
    GIVEN = 2


class Dim(IntEnum):
    """Positions in ``dims``; the steps of what is moved and the numbers of the kernel behind follow."""

    SHARES = 0  # that a visit is cut into
    BUFS = 1  # how many the kernel behind has
    DIMS = 2
    STEPS = 3


@dataclass(frozen=True)
class Steps:
    """Bytes between rows, and between experts, of what the kernel behind reads and writes."""

    row: int
    about: int
    out: int
    codes: int
    scales: int
    zeros: int


def visit_launch(inner: Launch, kind: type[Front], visits: View, steps: Steps, shares: int, traffic: float) -> Launch:
    """``inner``, which is for one expert, for every visit."""
    bufs, dims = len(inner.buffers), len(inner.dims)
    moved = (*(getattr(steps, name) for name, _ in kind.by_row), *(getattr(steps, name) for name, _ in kind.by_expert))
    count = visits.shape[0]

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        kind(module.kernel(symbol)).emit()

    return Launch(
        KernelSpec(f"visit {kind.name}", ("visit", kind.name), emit),
        (At.of(visits), Code(inner.spec), *inner.buffers),
        (shares, bufs, dims, *moved, *inner.dims),
        tiles=count * shares,
        writes=inner.writes,
        grain=max(1, min(inner.grain, shares)),
        scratch=-(-8 * (bufs + dims) // _LINE) * _LINE + inner.scratch,
        flops=inner.flops * count,
        traffic=traffic,
        label="experts",
        rate=inner.rate,
    )


class Front(Launched):
    """Which buffers of the kernel behind are moved, by rows and by experts, as :class:`Steps` names how far; and how it
    is told the number of rows."""

    name: str
    by_row: tuple[tuple[str, int], ...]
    by_expert: tuple[tuple[str, int], ...]

    def emit(self) -> None:
        f = self.fn
        moved = [*self.by_row, *self.by_expert]
        self.given = Dim.STEPS + len(moved)
        shares, buffers, count = self.dim(Dim.SHARES), self.dim(Dim.BUFS), self.dim(Dim.DIMS)
        bufs = f.args["scratch"]
        self.dims = f.gep(bufs, buffers, "ptr")
        rest = f.gep(bufs, f.and_((buffers + count) * 8 + (_LINE - 1), -_LINE))
        given = f.gep(f.args["bufs"], int(Buf.GIVEN), "ptr")
        with f.loop(0, buffers) as k:
            f.store(f.load("ptr", f.gep(given, k, "ptr")), f.gep(bufs, k, "ptr"))
        numbers = f.gep(f.args["dims"], self.given, "i64")
        with f.loop(0, count) as k:
            f.store(f.load("i64", f.gep(numbers, k, "i64")), f.gep(self.dims, k, "i64"))
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            slot = f.div(tile, shares)
            visit = f.gep(self.buf(Buf.VISITS), slot * VISIT, "i32")
            expert, first, height = (f.cast(f.load("i32", f.gep(visit, k, "i32")), "i64") for k in range(VISIT))
            with f.if_(f.cmp("ne", height, 0)):
                times = [first] * len(self.by_row) + [expert] * len(self.by_expert)
                for at, ((_, which), number) in enumerate(zip(moved, times, strict=True)):
                    here = f.gep(self.buf(Buf.GIVEN + which), number * self.dim(Dim.STEPS + at))
                    f.store(here, f.gep(bufs, which, "ptr"))
                begin, end = self.tiles(height, tile - slot * shares)
                f.call_pointer(self.buf(Buf.CODE), "void", [bufs, self.dims, begin, end, rest])
        f.ret()

    def tell(self, value: Val, places: Sequence[int]) -> None:
        for k in places:
            self.fn.store(value, self.fn.gep(self.dims, k, "i64"))

    def tiles(self, height: Val, share: Val) -> tuple[Val, Val]:
        """Tell the kernel behind that there are ``height`` rows; its tiles that are this share."""
        raise NotImplementedError


class FewRows(Front):
    """In front of passes (``driver.py``), whose tiles are shares of the panels for all rows."""

    name = "few rows"
    by_row = (("row", passes.Buf.ROWS), ("about", passes.Buf.ABOUT), ("out", passes.Buf.OUT))
    by_expert = (("codes", passes.Buf.CODES), ("scales", passes.Buf.SCALES), ("zeros", passes.Buf.ZEROS))

    def tiles(self, height: Val, share: Val) -> tuple[Val, Val]:
        self.tell(height, [passes.Dim.M])
        return share, share + 1


class ManyRows(Front):
    """In front of panels that are decoded (``panels.py``): a share is a panel for all groups of row blocks. Visits are
    aligned, so that every block is whole."""

    name = "many rows"
    by_row = (("row", panels.Buf.GIVEN + driver.Buf.A), ("out", panels.Buf.GIVEN + driver.Buf.OUT))
    by_expert = (
        ("codes", panels.Buf.GIVEN + driver.Buf.B),
        ("scales", panels.Buf.SCALES),
        ("zeros", panels.Buf.ZEROS),
    )

    def tiles(self, height: Val, share: Val) -> tuple[Val, Val]:
        f = self.fn
        of_driver = panels.Dim.DRIVER
        size, group = (self.dim(self.given + of_driver + k) for k in (driver.Dim.ROWS, driver.Dim.ROW_GROUP))
        blocks = f.div(f.and_(height + (ALIGNED - 1), -ALIGNED), size)
        groups = f.div(blocks + group - 1, group)
        self.tell(blocks, [of_driver + driver.Dim.ROW_BLOCKS, of_driver + driver.Dim.LARGE_ROWS])
        self.tell(groups, [of_driver + driver.Dim.ROW_GROUPS, panels.Dim.ROW_GROUPS])
        return share * groups, (share + 1) * groups
