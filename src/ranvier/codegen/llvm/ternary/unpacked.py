"""Many tokens times ternary weights where vector units multiply bytes: a panel becomes bytes once for all of them.

``vectors.py`` unpacks codes for every few tokens, an instruction for each that all of them meet. Here the codes of a
panel lie in scratch as bytes, and nothing is left between the products of a block of tokens but loads.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.gemm.blocks import Cut
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of, multiplies_bytes, multiply_add, spread_groups
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import Fields
from ranvier.codegen.llvm.ternary.pack import DEPTH, VECTORS, PackedTernary, padded
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

# Rows of a block, whose sums of a panel leave registers for what they are made of; and rows from which on there are
# blocks, for with fewer unpacking a few times costs less than bytes that are stored. By how many registers there are,
# and where products pick lanes: there a pass of ``vectors.py`` takes eight rows.
_PICKED = (8, 9)
_OTHERS = {32: (8, 25), 16: (4, 5)}
_DEEPEST = 1 << 17  # k whose bytes are kept in scratch
_GOPS = 150.0
_QUADS = DEPTH // 4  # of a word


def _rows(isa: Isa) -> tuple[int, int]:
    """Of a block, and from which on there are blocks."""
    return _PICKED if dot_of(isa) is SIGNED else _OTHERS[isa.registers]


def suits_unpacked(isa: Isa, rows: int, k: int) -> bool:
    """Whether products with so many rows are made here."""
    return multiplies_bytes(isa) and rows >= _rows(isa)[1] and k <= _DEEPEST


def by_unpacked(
    codes: View, m: int, packed: PackedTernary, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    isa: Isa, threads: int,
) -> Launch:  # fmt: skip
    block = Block(Cut.of(m, _rows(isa)[0]).size, 1)
    scratch = padded(packed.k) * packed.width
    return panel_launch(
        _spec(block), block, codes, m, packed, out, strides, epilogue, threads, gops=_GOPS, scratch=scratch
    )  # fmt: skip


def _spec(block: Block) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, NAMES, FINISH), block, VECTORS * isa.lanes(4)).emit()

    return KernelSpec(f"ternary bytes {block.rows} rows", ("ternary bytes", block.rows), emit)


class _Driver(PanelDriver):
    def panel(self, panel: Val) -> None:
        self._unpack(self.starts(panel)[0])
        super().panel(panel)

    def _unpack(self, start: Val) -> None:
        """Bytes of a panel behind the sums, [fours of k, vectors]."""
        f, line = self.f, VECTORS * self.size
        self.bytes = f.opaque(f.gep(f.args["scratch"], self.rows * line))
        fields = Fields(f, self.isa, self.words)
        with f.loop(0, self._deep()) as word:
            for v in range(VECTORS):
                codes = f.load(self.words, f.gep(f.gep(start, word * line), v * self.size), self.size)
                for k in range(_QUADS):
                    to = f.gep(self.bytes, word * (_QUADS * line))
                    f.store(fields.low(codes, k), f.gep(to, k * line + v * self.size), self.size)

    def _deep(self) -> Val:
        """Words of a column."""
        return self.f.div(self.at["panel_bytes"], self.f.i64(VECTORS * self.size))

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f, line = self.f, VECTORS * self.size
        acc = [[f.var(self.words, f.zero(self.words)) for _ in range(VECTORS)] for _ in rows]
        with f.loop(0, self._deep()) as word:
            held = [spread_groups(f, self.isa, f.gep(row, word * DEPTH), _QUADS) for row in rows]
            codes = f.gep(self.bytes, word * (_QUADS * line))
            for k in range(_QUADS):
                parts = [f.load(self.words, f.gep(codes, k * line + v * self.size), self.size) for v in range(VECTORS)]
                for sums, quads in zip(acc, held, strict=True):
                    for total, part in zip(sums, parts, strict=True):
                        total.set(multiply_add(f, self.isa, total.get(), part, quads[k]))
        for r, of_row in enumerate(acc):
            for v, total in enumerate(of_row):
                f.store(total.get(), f.gep(f.args["scratch"], r * line + v * self.size), self.size)
