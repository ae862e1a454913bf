"""Many tokens times ternary weights where vector units multiply bytes: a panel becomes bytes once for all of them.

``vectors.py`` and ``fours.py`` unpack codes for every few tokens, an instruction for each that all of them meet. Here
the codes of a panel lie in scratch as bytes, and nothing is left between the products of a block of tokens but loads.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.integer.dots import SIGNED, dot_of, multiplies_bytes, multiply_add, spread_groups
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary import fours
from ranvier.codegen.llvm.ternary.dots import Fields
from ranvier.codegen.llvm.ternary.fours import PackedFours
from ranvier.codegen.llvm.ternary.pack import DEPTH, STEP, VECTORS, PackedTernary, padded
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

# Rows of a block, whose sums of a panel leave registers for what they are made of; and rows from which on there are
# blocks, for with fewer unpacking a few times costs less than bytes that are stored. Where products pick lanes
# (``fours.py``), and elsewhere by how many registers there are.
_PICKED = (8, 16)
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
    codes: View, m: int, packed: PackedTernary | PackedFours, out: View, strides: tuple[int, int],
    epilogue: Epilogue | None, isa: Isa, threads: int,
) -> Launch:  # fmt: skip
    block = Block.of(m, _rows(isa)[0])
    spec = _spec(block, _Fours if isinstance(packed, PackedFours) else _Words)
    scratch = padded(packed.k) * VECTORS * isa.lanes(4)
    return panel_launch(spec, block, codes, m, packed, out, strides, epilogue, threads, gops=_GOPS, scratch=scratch)


def _spec(block: Block, kind: type[_Bytes]) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        kind(Frame(module, symbol, isa, NAMES, FINISH), block, VECTORS * isa.lanes(4)).emit()

    key = ("ternary bytes", kind.__name__, block.rows, block.uneven)
    return KernelSpec(f"ternary bytes {block.rows} rows", key, emit)


class _Bytes(PanelDriver):
    """Products of rows and two vectors of columns whose codes lie behind the sums as bytes, [fours of k, vectors]."""

    def __init__(self, frame: Frame, block: Block, width: int) -> None:
        super().__init__(frame, block, width)
        self.line = VECTORS * self.size
        self.deep = self.at["steps"] * (STEP // DEPTH)
        self.bytes = self.f.opaque(self.f.gep(self.f.args["scratch"], self.rows * self.line))

    def place(self, word: Val) -> Val:
        """Where the bytes of 16 k are."""
        return self.f.gep(self.bytes, word * (_QUADS * self.line))

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f = self.f
        acc = [[f.var(self.words, f.zero(self.words)) for _ in range(VECTORS)] for _ in rows]
        with f.loop(0, self.deep) as word:
            held = [spread_groups(f, self.isa, f.gep(row, word * DEPTH), _QUADS) for row in rows]
            for k in range(_QUADS):
                at = [f.gep(self.place(word), k * self.line + v * self.size) for v in range(VECTORS)]
                parts = [f.load(self.words, place, self.size) for place in at]
                for sums, quads in zip(acc, held, strict=True):
                    for total, part in zip(sums, parts, strict=True):
                        total.set(multiply_add(f, self.isa, total.get(), part, quads[k]))
        for r, of_row in enumerate(acc):
            for v, total in enumerate(of_row):
                f.store(self.total(total.get(), v), f.gep(f.args["scratch"], r * self.line + v * self.size), self.size)

    def total(self, found: Val, v: int) -> Val:
        """The sum of codes, of that of what was unpacked for a vector of columns."""
        return found


class _Words(_Bytes):
    """Of words of 16 k."""

    def panel(self, panel: Val) -> None:
        self._unpack(self.starts(panel)[0])
        super().panel(panel)

    def _unpack(self, start: Val) -> None:
        f = self.f
        fields = Fields(f, self.words)
        with f.loop(0, self.deep) as word:
            for v in range(VECTORS):
                codes = f.load(self.words, f.gep(f.gep(start, word * self.line), v * self.size), self.size)
                for k in range(_QUADS):
                    to = f.gep(self.place(word), k * self.line + v * self.size)
                    f.store(fields.low(codes, k), to, self.size)


class _Fours(_Bytes):
    """Of bytes of four columns: a panel in two halves, of two vectors each."""

    def panel(self, panel: Val) -> None:
        f, at = self.f, self.at
        self.fields = fours.Fields(f)
        for half in range(2):
            self.half = half
            with f.if_(f.cmp("slt", (panel * 2 + half) * self.width, at["n"])):
                self._unpack(self.starts(panel)[0])
                super().panel(panel * 2 + half)

    def _unpack(self, start: Val) -> None:
        f = self.f
        with f.loop(0, self.deep) as word:
            for k in range(_QUADS):
                line = f.load(self.words, f.gep(start, (word * _QUADS + k) * fours.LINE), fours.LINE)
                for v in range(VECTORS):
                    to = f.gep(self.place(word), k * self.line + v * self.size)
                    f.store(self.fields.part(line, self._field(v)), to, self.size)

    def _field(self, v: int) -> int:
        return self.half * VECTORS + v

    def total(self, found: Val, v: int) -> Val:
        return self.fields.total(found, self._field(v))
