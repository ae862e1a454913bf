"""Many tokens times ternary weights by the matrix unit, whose codes become bytes a few steps of K ahead of it.

A tile of the launch is some panels times a group of rows. For a block of rows the panels follow each other, each over
the whole of K with its sums in registers; tiles of a step are loaded between the multiplications of the one before. The
vector units have nothing else to do meanwhile: there they unpack the codes of a later step into a ring in the
first-level cache, again for every block of rows. That costs less than sums which come and go, or bytes which are
unpacked once and have to be fetched from the second-level cache. Codes are unsigned there (0, 1, 2), the tokens signed.
What follows the product is done for all columns of a block of rows at once: rows of the result lie in pages of their
own.
"""

from __future__ import annotations

import itertools

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.amx.micro import INSTRUCTIONS, suits
from ranvier.codegen.llvm.amx.tiles import LINE, ROWS
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.gemm.blocks import Cut, grain
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import LOW
from ranvier.codegen.llvm.ternary.pack import DEPTH, STEP, VECTORS, PackedTernary
from ranvier.codegen.llvm.ternary.tokens import row_bytes
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_X, _W, _OUT, _FINISH = range(4)
_NAMES = (
    "m",
    "n",
    "steps",
    "row_bytes",
    "panel_bytes",
    "row_group",
    "row_groups",
    "panels",
    "panel_group",
    "out_bytes",
)
_ROW_GROUP = 256
_PANEL_GROUP = 8
_GOPS = 2000.0
_WIDTH = VECTORS * LINE
_WORDS = STEP // DEPTH  # of a step, in every column
_STEP_BYTES = STEP * _WIDTH // 4  # of a step as bytes
_RING, _AHEAD = 4, 3  # steps
_MULTIPLY = INSTRUCTIONS[DType.int8, DType.uint8]


def suits_tiles(isa: Isa) -> bool:
    return suits(isa, DType.int8, DType.uint8) and isa.vector_bytes == LINE


def by_tiles(
    codes: View, m: int, packed: PackedTernary, out: View, strides: tuple[int, int], epilogue: Epilogue | None,
    threads: int,
) -> Launch:  # fmt: skip
    flops = 2.0 * m * packed.n * packed.k
    groups = Cut.of(-(-m // ROWS), _ROW_GROUP // ROWS)
    row_group = groups.size * ROWS
    row_groups = -(-m // row_group)
    wanted = 4 * threads if threads > 1 else 1
    panel_group = max(1, min(_PANEL_GROUP, packed.panels * row_groups // wanted))
    count = -(-packed.panels // panel_group) * row_groups
    done = integer_finish(epilogue, out.dtype, strides)
    numbers = {
        "m": m,
        "n": packed.n,
        "steps": packed.words // _WORDS,
        "row_bytes": row_bytes(packed.k),
        "panel_bytes": packed.words * packed.width * 4,
        "row_group": row_group,
        "row_groups": row_groups,
        "panels": packed.panels,
        "panel_group": panel_group,
        "out_bytes": strides[0] * out.dtype.numpy.itemsize,
    }
    return Launch(
        KernelSpec("ternary tiles", ("ternary tiles", 2), _emit, "int8 tiles"),
        (At.of(codes), At(packed.storage), At.of(out), Code(done.spec), *done.buffers),
        (*in_order(_NAMES, numbers), *done.dims),
        tiles=count,
        writes=(out.storage,),
        grain=grain(count, flops / _GOPS / 1e3, threads),
        scratch=_RING * _STEP_BYTES + panel_group * ROWS * _WIDTH,
        flops=flops,
        traffic=float(packed.nbytes + codes.nbytes + out.nbytes),
        label="ternary matmul",
        rate=15.0,
    )


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    frame = Frame(module, symbol, isa, _NAMES, _FINISH)
    f, at = frame.f, frame.at
    loaded = f.var("i64", 0)  # rows that the unit is configured for
    sums = f.gep(f.args["scratch"], _RING * _STEP_BYTES)
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        part, group = f.div(tile, at["row_groups"]), f.rem(tile, at["row_groups"])
        first = group * at["row_group"]
        last = f.min_(first + at["row_group"], at["m"])
        panel = part * at["panel_group"]
        panels = f.min_(at["panels"] - panel, at["panel_group"])
        column = panel * (_WIDTH // 4)
        with f.loop(first, last, ROWS) as row:
            rows = f.min_(last - row, ROWS)
            with f.if_(f.cmp("ne", rows, loaded.get())):
                tiles.configure(f, rows)
                loaded.set(rows)
            with f.if_else(f.cmp("sgt", rows, tiles.TILE_ROWS)) as otherwise:
                _Block(frame, 2, row, rows, panel, panels, sums).emit()
                otherwise()
                _Block(frame, 1, row, rows, panel, panels, sums).emit()
            columns = f.min_(at["n"] - column, panels * (_WIDTH // 4))
            frame.finish(frame.buf(_OUT), sums, (0, row, column, rows, columns, panels * _WIDTH))
    tiles.release(f)
    f.ret()


class _Block:
    """Sums of up to 32 rows and some panels; ``blocks``: how many tiles the rows take."""

    def __init__(
        self, frame: Frame, blocks: int, row: Val, rows: Val, panel: Val, panels: Val, sums: Val
    ) -> None:  # fmt: skip
        self.frame, self.f, self.at, self.blocks = frame, frame.f, frame.at, blocks
        self.rows, self.panels, self.sums = rows, panels, sums
        f, at = self.f, self.at
        self.tokens = f.gep(frame.buf(_X), row * at["row_bytes"])
        self.weights = f.gep(frame.buf(_W), panel * at["panel_bytes"])
        self.out = f.gep(frame.buf(_OUT), row * at["out_bytes"] + panel * _WIDTH)
        self.last = panels * at["steps"] - 1

    def emit(self) -> None:
        f, at = self.f, self.at
        for k in range(_AHEAD):
            for word in range(_WORDS):
                self.unpack(f.i64(k), word)
        done = f.var("i64", 0)  # steps of all panels
        with f.loop(0, self.panels) as p:
            each = [(r, v) for r in range(self.blocks) for v in range(VECTORS)]
            for r, v in each:
                tiles.zero(f, tiles.sums(r, v))
            target = f.gep(self.out, p * _WIDTH)
            for v in range(VECTORS):
                self.load_codes(done.get(), v)
            for r in range(self.blocks):
                self.load_tokens(f.i64(0), r)
            with f.loop(1, at["steps"]) as following:
                self.ask(target, following - 1)
                done.set(done.get() + 1)
                self.step(done.get(), following)
            self.ask(target, at["steps"] - 1)
            done.set(done.get() + 1)
            self.step(done.get(), None)
            apart = self.panels * _WIDTH
            for r, v in each:
                to = f.gep(self.sums, p * _WIDTH + apart * (r * tiles.TILE_ROWS) + v * LINE)
                tiles.store(f, tiles.sums(r, v), to, apart)

    def ask(self, target: Val, step: Val) -> None:
        """Nobody waits for the lines of the result later."""
        f = self.f
        line = f.gep(target, f.min_(step, self.rows - 1) * self.at["out_bytes"])
        for v in range(VECTORS):
            f.prefetch(f.gep(line, v * LINE), write=True)

    def step(self, number: Val, following: Val | None) -> None:
        """The products of the step before ``number``, which is the ``following`` one of its panel, if it has one."""
        words = iter(range(_WORDS))

        def unpack_some() -> None:
            for word in itertools.islice(words, 2 // self.blocks):
                self.unpack(number + (_AHEAD - 1), word)

        if following is None:
            tiles.turn(self.f, _MULTIPLY, self.blocks, VECTORS, between=unpack_some)
            return
        tiles.turn(
            *(self.f, _MULTIPLY, self.blocks, VECTORS),
            load_a=lambda r: self.load_tokens(following, r),
            load_b=lambda v: self.load_codes(number, v),
            between=unpack_some,
        )

    def load_codes(self, number: Val, v: int) -> None:
        f = self.f
        tiles.load(f, tiles.b_tile(v), f.gep(self.ring(number), v * LINE), f.i64(_WIDTH))

    def load_tokens(self, step: Val, r: int) -> None:
        f, row_bytes = self.f, self.at["row_bytes"]
        first = f.gep(self.tokens, step * STEP + row_bytes * (r * tiles.TILE_ROWS))
        tiles.load(f, tiles.a_tile(r), first, row_bytes, passing=True)  # the ring stays near

    def ring(self, number: Val) -> Val:
        return self.f.gep(self.f.args["scratch"], self.f.and_(number, _RING - 1) * _STEP_BYTES)

    def unpack(self, number: Val, word: int) -> None:
        """A word of every column of a step; what follows the last step is not there, and nobody asks for it."""
        f = self.f
        kind = vector("i32", LINE // 4)
        packed = f.gep(self.weights, f.min_(number, self.last) * (_WORDS * _WIDTH) + word * _WIDTH)
        target = f.gep(self.ring(number), word * (4 * _WIDTH))
        for v in range(VECTORS):
            codes = f.load(kind, f.gep(packed, v * LINE), LINE)
            for k in range(4):
                part = f.and_(f.lshr(codes, 2 * k) if k else codes, LOW)
                f.store(part, f.gep(target, k * _WIDTH + v * LINE), LINE)
