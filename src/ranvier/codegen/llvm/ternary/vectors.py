"""Few tokens times ternary weights by the vector units: weights are read once, as they are packed, two panels at a time
for one row and one for several.

A single row is a matter of reading weights, and of how few instructions a word takes: with byte products into int32
each of the four codes in a byte is masked and multiplied where it stands, into a sum of its own that is 1, 4, 16 or 64
times as large. Eight instructions for four vectors of weights; the shifts are done once at the end.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var
from ranvier.codegen.llvm.integer.dots import multiply_add
from ranvier.codegen.llvm.integer.frame import Frame
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import UNSHIFTED_K, Fields, adds_unshifted, dots_of
from ranvier.codegen.llvm.ternary.pack import DEPTH, STEP, VECTORS, PackedTernary
from ranvier.codegen.llvm.ternary.panels import FINISH, NAMES, Block, PanelDriver, panel_launch
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

_AHEAD = 4096  # bytes of weights asked for before they are used
_GOPS = 150.0
_POWERS = (0, 2, 4, 6)  # of two, by which sums of codes that stay where they stand are too large


def by_vectors(
    codes: View, m: int, packed: PackedTernary, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    isa: Isa, threads: int,
) -> Launch:  # fmt: skip
    unshifted = m == 1 and adds_unshifted(isa) and packed.k <= UNSHIFTED_K
    block = Block(1, 2) if m == 1 else Block(4 if isa.registers >= 32 else 2, 1)
    spec = _spec(block, unshifted)
    return panel_launch(spec, block, codes, m, packed, out, strides, epilogue, threads, gops=_GOPS)


def _spec(block: Block, unshifted: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, NAMES, FINISH), block, unshifted).emit()

    key = ("ternary vectors", block.rows, block.at_once, unshifted)
    return KernelSpec(f"ternary {block.rows} rows", key, emit)


class _Driver(PanelDriver):
    def __init__(self, frame: Frame, block: Block, unshifted: bool) -> None:
        super().__init__(frame, block, VECTORS * frame.isa.lanes(4))
        self.unshifted = unshifted
        self.line = VECTORS * self.size  # bytes of a panel for one word along K

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        f = self.f
        self.fields = Fields(f, self.words)
        powers = _POWERS if self.unshifted else (0,)
        acc = [
            [[f.var(self.words, f.zero(self.words)) for _ in powers] for _ in range(self.at_once * VECTORS)]
            for _ in rows
        ]
        step = STEP // DEPTH
        with f.loop(0, self.at["steps"]) as s:
            tokens = [f.gep(row, s * STEP) for row in rows]
            words = [f.gep(start, s * (step * self.line)) for start in starts]
            ahead = self.later(s * (step * self.line) + _AHEAD)
            for start in starts:
                for line in range(0, step * self.line, 64):
                    f.prefetch(f.gep(start, ahead + line))
            if self.unshifted:
                self.unshifted_step(acc[0], tokens[0], words)
            else:
                self.step(acc, tokens, words)
        for r, columns in enumerate(acc):
            for c, parts in enumerate(columns):
                total = parts[0].get()
                for power, part in zip(powers[1:], parts[1:], strict=True):
                    total = total + f.ashr(part.get(), power)
                f.store(total, f.gep(f.args["scratch"], r * self.at_once * self.line + c * self.size), self.size)

    def column(self, words: list[Val], word: int, c: int) -> Val:
        """The words of a vector of columns."""
        start = words[c // VECTORS]
        at = self.f.gep(start, word * self.line + c % VECTORS * self.size)
        return self.f.load(self.words, at, self.size)

    def unshifted_step(self, acc: list[list[Var]], tokens: Val, words: list[Val]) -> None:
        f = self.f
        for word in range(STEP // DEPTH):
            found = [self.column(words, word, c) for c in range(len(acc))]
            for k in range(4):
                quad = self.quad(tokens, word * DEPTH + 4 * k)
                for total, codes in zip((sums[k] for sums in acc), found, strict=True):
                    total.set(multiply_add(f, self.isa, total.get(), self.fields.part(codes, k), quad))

    def step(self, acc: list[list[list[Var]]], tokens: list[Val], words: list[Val]) -> None:
        f = self.f
        kind = dots_of(self.isa)
        dots = [[kind(f, self.isa, var[0].get()) for var in row] for row in acc]
        for word in range(STEP // DEPTH):
            for c in range(len(acc[0])):
                codes = self.column(words, word, c)
                for k in range(4):
                    part = self.fields.low(codes, k)
                    for r in range(self.rows):
                        dots[r][c].add(part, self.quad(tokens[r], word * DEPTH + 4 * k))
        for row, made in zip(acc, dots):
            for var, dot in zip(row, made):
                var[0].set(dot.total())
