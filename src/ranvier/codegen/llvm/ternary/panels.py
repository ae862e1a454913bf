"""What kernels of few tokens share, in whatever form they read the weights.

A tile of the launch is some panels. For a block of rows, one panel or several at a time, sums gather in registers over
the whole of K and go to a finish kernel. Panels are read side by side, because a core asks for more lines at a time
then. A row or a panel past the end repeats the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Val, vector
from ranvier.codegen.llvm.gemm.blocks import TILE_US, Cut, grain
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.ternary.pack import STEP, Packed, padded
from ranvier.codegen.llvm.ternary.tokens import row_bytes
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.records import dataclass

_X, _W, _OUT, FINISH = range(4)
NAMES = ("m", "n", "steps", "row_bytes", "panels", "per_tile", "panel_bytes", "whole")
_GBPS = 12.0  # of one core, roughly


@dataclass(frozen=True)
class Block:
    """Sums that are in registers: of so many rows and panels. ``uneven``: the last blocks have one row less."""

    rows: int
    at_once: int
    uneven: bool = False

    @classmethod
    def of(cls, m: int, most: int) -> Block:
        """All rows in blocks as even as can be."""
        cut = Cut.of(m, most)
        return cls(cut.size, 1, cut.large < cut.count)

    def whole(self, m: int) -> int:
        """Rows before those of the smaller blocks."""
        return Cut.of(m, self.rows).large * self.rows if self.uneven else m


def panel_launch(
    spec: KernelSpec, block: Block, codes: View, m: int, packed: Packed, out: View, strides: tuple[int, int],
    epilogue: Epilogue | None, threads: int, *, gops: float, scratch: int = 0, tiles_of_a_thread: int = 8,
    slices: int = 1,
) -> Launch:  # fmt: skip
    """``gops`` of one core, roughly, in codes of one row; ``scratch``: bytes that the driver needs behind the sums;
    ``tiles_of_a_thread``: at most, where each has something to do first; ``slices``: of weights that one thread walks
    back and forth."""
    work = max(m * packed.n * packed.k / gops / 1e3 / 4, packed.nbytes / _GBPS / 1e3)
    wanted = slices if threads == 1 else max(1, min(int(work / TILE_US), tiles_of_a_thread * threads))
    per_tile = -(-packed.panels // wanted)
    per_tile = -(-per_tile // block.at_once) * block.at_once
    tiles = -(-packed.panels // per_tile)
    done = integer_finish(epilogue, out.dtype, strides)
    numbers = {
        "m": m,
        "n": packed.n,
        "steps": padded(packed.k) // STEP,
        "row_bytes": row_bytes(packed.k),
        "panels": packed.panels,
        "per_tile": per_tile,
        "panel_bytes": packed.nbytes // packed.panels,
        "whole": block.whole(m),
    }
    return Launch(
        spec,
        (At.of(codes), At(packed.storage), At.of(out), Code(done.spec), *done.buffers),
        (*in_order(NAMES, numbers), *done.dims),
        tiles=tiles,
        writes=(out.storage,),
        grain=grain(tiles, work, threads),
        scratch=block.rows * block.at_once * packed.width * 4 + scratch,
        flops=2.0 * m * packed.n * packed.k,
        traffic=float(packed.nbytes + codes.nbytes + out.nbytes),
        label="ternary matmul",
        rate=4.0,
    )


class PanelDriver(ABC):
    """The walk over panels and rows; ``sums`` is what forms of weights differ in. ``width``: columns of a panel."""

    def __init__(self, frame: Frame, block: Block, width: int) -> None:
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.block, self.rows, self.at_once, self.width = block, block.rows, block.at_once, width
        self.lanes = self.isa.lanes(4)
        self.words = vector("i32", self.lanes)
        self.size = self.isa.vector_bytes

    def emit(self) -> None:
        f, at = self.f, self.at
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            first = tile * at["per_tile"]
            self.panels(first, f.min_(first + at["per_tile"], at["panels"]))
        f.ret()

    def panels(self, first: Val, last: Val) -> None:
        """All rows times the panels of a tile."""
        with self.f.loop(first, last, self.at_once) as panel:
            self.panel(panel)

    def starts(self, panel: Val) -> list[Val]:
        """Where the weights of panels are that are read side by side."""
        f, at = self.f, self.at
        numbers = [f.min_(panel + p, at["panels"] - 1) for p in range(self.at_once)]
        return [f.gep(self.frame.buf(_W), number * at["panel_bytes"]) for number in numbers]

    def panel(self, panel: Val) -> None:
        """All rows times panels from this one on."""
        f, at = self.f, self.at
        starts = self.starts(panel)
        with f.loop(0, at["whole"], self.rows) as row:
            self.rows_from(row, self.rows, panel, starts)
        if self.block.uneven:
            with f.loop(at["whole"], at["m"], self.rows - 1) as row:
                self.rows_from(row, self.rows - 1, panel, starts)

    def rows_from(self, row: Val, rows: int, panel: Val, starts: list[Val]) -> None:
        self.sums(self.tokens(row, rows), starts)
        self.finish(row, rows, panel)

    def tokens(self, row: Val, rows: int) -> list[Val]:
        """Where the codes of a block of rows are."""
        f, at = self.f, self.at
        return [f.gep(self.frame.buf(_X), f.min_(row + r, at["m"] - 1) * at["row_bytes"]) for r in range(rows)]

    def finish(self, row: Val, rows: int, panel: Val) -> None:
        """Hands on the sums of a block."""
        f, at = self.f, self.at
        column = panel * self.width
        columns = f.min_(at["n"] - column, self.at_once * self.width)
        count = f.min_(at["m"] - row, rows)
        place = (0, row, column, count, columns, self.at_once * self.width * 4)
        self.frame.finish(self.frame.buf(_OUT), f.args["scratch"], place)

    @abstractmethod
    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        """Sums of a block over all of K, to scratch: [rows][panels][columns]."""

    def quad(self, tokens: Val, at: int) -> Val:
        """Four codes of a row, in every lane."""
        return self.f.splat(self.f.load("i32", self.f.gep(tokens, at), 1), self.lanes)

    def later(self, at: Val) -> Val:
        """Where to ask for what comes ``at`` bytes behind the start of a panel: behind its end lies its neighbour,
        which is read beside it, and the next one comes after those."""
        f = self.f
        inside = f.cmp("slt", at, self.at["panel_bytes"])
        return f.select(inside, at, self.at["panel_bytes"] * (self.at_once - 1) + at)
