"""Few tokens times ternary weights by the vector units: weights are read once, as they are packed.

A tile of the launch is some panels. For a block of rows, two panels at a time (one with several rows), sums gather in
registers over the whole of K and go to a finish kernel. A row or a panel past the end repeats the last one.

A single row is a matter of reading weights, and of how few instructions a word takes: with byte products into int32
each of the four codes in a byte is masked and multiplied where it stands, into a sum of its own that is 1, 4, 16 or 64
times as large. Eight instructions for 256 weights; the shifts are done once at the end.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.builder import Module, Val, Var, vector
from ranvier.codegen.llvm.gemm.blocks import TILE_US, grain
from ranvier.codegen.llvm.integer.dots import multiply_add
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import LOW, UNSHIFTED_K, adds_unshifted, dots_of
from ranvier.codegen.llvm.ternary.pack import DEPTH, STEP, VECTORS, PackedTernary
from ranvier.codegen.llvm.ternary.tokens import row_bytes
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View

_X, _W, _OUT, _FINISH = range(4)
_NAMES = ("m", "n", "steps", "row_bytes", "panels", "per_tile", "panel_bytes")
_AHEAD = 4096  # bytes of weights asked for before they are used
_GOPS, _GBPS = 150.0, 12.0  # of one core, roughly, in codes of one row


def by_vectors(
    codes: View, m: int, packed: PackedTernary, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    isa: Isa, threads: int,
) -> Launch:  # fmt: skip
    unshifted = m == 1 and adds_unshifted(isa) and packed.k <= UNSHIFTED_K
    rows = 1 if m == 1 else 4 if isa.registers >= 32 else 2
    at_once = 2 if m == 1 else 1
    work = max(m * packed.n * packed.k / _GOPS / 1e3 / 4, packed.nbytes / _GBPS / 1e3)
    wanted = 1 if threads == 1 else max(1, min(int(work / TILE_US), 8 * threads))
    per_tile = -(-packed.panels // wanted)
    per_tile = -(-per_tile // at_once) * at_once
    tiles = -(-packed.panels // per_tile)
    done = integer_finish(epilogue, out.dtype, strides)
    numbers = {
        "m": m,
        "n": packed.n,
        "steps": packed.words * DEPTH // STEP,
        "row_bytes": row_bytes(packed.k),
        "panels": packed.panels,
        "per_tile": per_tile,
        "panel_bytes": packed.words * packed.width * 4,
    }
    return Launch(
        _spec(rows, at_once, unshifted),
        (At.of(codes), At(packed.storage), At.of(out), Code(done.spec), *done.buffers),
        (*in_order(_NAMES, numbers), *done.dims),
        tiles=tiles,
        writes=(out.storage,),
        grain=grain(tiles, work, threads),
        scratch=rows * at_once * packed.width * 4,
        flops=2.0 * m * packed.n * packed.k,
        traffic=float(packed.nbytes + codes.nbytes + out.nbytes),
        label="ternary matmul",
        rate=4.0,
    )


def _spec(rows: int, at_once: int, unshifted: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Driver(Frame(module, symbol, isa, _NAMES, _FINISH), rows, at_once, unshifted).emit()

    key = ("ternary vectors", rows, at_once, unshifted)
    return KernelSpec(f"ternary {rows} rows", key, emit)


class _Driver:
    def __init__(self, frame: Frame, rows: int, at_once: int, unshifted: bool) -> None:
        self.frame, self.f, self.at, self.isa = frame, frame.f, frame.at, frame.isa
        self.rows, self.at_once, self.unshifted = rows, at_once, unshifted
        self.lanes = self.isa.lanes(4)
        self.kind = vector("i32", self.lanes)
        self.size = self.isa.vector_bytes
        self.line = VECTORS * self.size  # bytes of a panel for one word along K

    def emit(self) -> None:
        f, at = self.f, self.at
        out = self.frame.buf(_OUT)
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            first = tile * at["per_tile"]
            with f.loop(first, f.min_(first + at["per_tile"], at["panels"]), self.at_once) as panel:
                starts = [
                    f.gep(self.frame.buf(_W), f.min_(panel + p, at["panels"] - 1) * at["panel_bytes"])
                    for p in range(self.at_once)
                ]
                column = panel * (VECTORS * self.lanes)
                columns = f.min_(at["n"] - column, self.at_once * VECTORS * self.lanes)
                with f.loop(0, at["m"], self.rows) as row:
                    rows = [
                        f.gep(self.frame.buf(_X), f.min_(row + r, at["m"] - 1) * at["row_bytes"])
                        for r in range(self.rows)
                    ]
                    self.sums(rows, starts)
                    count = f.min_(at["m"] - row, self.rows)
                    place = (0, row, column, count, columns, self.at_once * self.line)
                    self.frame.finish(out, f.args["scratch"], place)
        f.ret()

    def sums(self, rows: list[Val], starts: list[Val]) -> None:
        """Sums of a block over all of K, to scratch."""
        f = self.f
        chains = 4 if self.unshifted else 1
        acc = [
            [[f.var(self.kind, f.zero(self.kind)) for _ in range(chains)] for _ in range(self.at_once * VECTORS)]
            for _ in rows
        ]
        step = STEP // DEPTH
        with f.loop(0, self.at["steps"]) as s:
            tokens = [f.gep(row, s * STEP) for row in rows]
            words = [f.gep(start, s * (step * self.line)) for start in starts]
            # behind the end of a panel lies its neighbour, which is read beside it: the next one comes after those
            ahead = s * (step * self.line) + _AHEAD
            inside = f.cmp("slt", ahead, self.at["panel_bytes"])
            ahead = f.select(inside, ahead, self.at["panel_bytes"] * (self.at_once - 1) + ahead)
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
                for k, part in enumerate(parts[1:], 1):
                    total = total + f.ashr(part.get(), 2 * k)
                f.store(total, f.gep(f.args["scratch"], r * self.at_once * self.line + c * self.size), self.size)

    def column(self, words: list[Val], word: int, c: int) -> Val:
        """The words of a vector of columns."""
        start = words[c // VECTORS]
        at = self.f.gep(start, word * self.line + c % VECTORS * self.size)
        return self.f.load(self.kind, at, self.size)

    def quad(self, tokens: Val, word: int, k: int) -> Val:
        """Four codes of a row, in every lane."""
        return self.f.splat(self.f.load("i32", self.f.gep(tokens, word * DEPTH + 4 * k), 1), self.lanes)

    def unshifted_step(self, acc: list[list[Var]], tokens: Val, words: list[Val]) -> None:
        f = self.f
        for word in range(STEP // DEPTH):
            found = [self.column(words, word, c) for c in range(len(acc))]
            for k in range(4):
                quad = self.quad(tokens, word, k)
                for c, codes in enumerate(found):
                    part = f.and_(codes, _signed(LOW << 2 * k))
                    acc[c][k].set(multiply_add(f, self.isa, acc[c][k].get(), part, quad))

    def step(self, acc: list[list[list[Var]]], tokens: list[Val], words: list[Val]) -> None:
        f = self.f
        kind = dots_of(self.isa)
        dots = [[kind(f, self.isa, var[0].get()) for var in row] for row in acc]
        for word in range(STEP // DEPTH):
            for c in range(len(acc[0])):
                codes = self.column(words, word, c)
                for k in range(4):
                    part = f.and_(f.lshr(codes, 2 * k) if k else codes, LOW)
                    for r in range(self.rows):
                        dots[r][c].add(part, self.quad(tokens[r], word, k))
        for row, made in zip(acc, dots):
            for var, dot in zip(row, made):
                var[0].set(dot.total())


def _signed(mask: int) -> int:
    """A mask as the constant of an i32."""
    mask &= 0xFFFFFFFF
    return mask - (1 << 32) if mask >> 31 else mask
