"""Many tokens times ternary weights by the matrix unit: codes of a panel become bytes once, for all rows of a tile.

A tile of the launch is some panels times a group of rows. K goes in blocks whose bytes stay in the first-level cache: a
block of a panel is unpacked into scratch, then every block of rows meets it, adding to sums that lie in scratch too.
Codes are unsigned there (0, 1, 2), the tokens signed. At the end blocks of rows are finished panel by panel: rows of
the result lie in pages of their own, and are written further while those are at hand.
"""

from __future__ import annotations

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.amx.micro import TileMicro, suits
from ranvier.codegen.llvm.amx.tiles import LINE, ROWS, release
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.control import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.gemm.blocks import Cut, grain
from ranvier.codegen.llvm.integer.finish import integer_finish
from ranvier.codegen.llvm.integer.frame import Frame, in_order
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.ternary.dots import LOW
from ranvier.codegen.llvm.ternary.pack import DEPTH, VECTORS, PackedTernary
from ranvier.codegen.llvm.ternary.tokens import row_bytes
from ranvier.codegen.loops.ir import Epilogue
from ranvier.codegen.storage import View
from ranvier.dtypes import DType

_X, _W, _OUT, _MICRO, _FINISH = range(5)
_NAMES = (
    "m",
    "n",
    "words",
    "block",
    "row_bytes",
    "panel_bytes",
    "row_group",
    "row_groups",
    "unpacked",
    "panels",
    "panel_group",
)
_BLOCK = 32  # words of K that are unpacked at a time: 512 codes of 32 columns are 16 KiB, and so are 32 rows of tokens
_ROW_GROUP = 256
_PANEL_GROUP = 8
_GOPS = 1500.0
_WIDTH = VECTORS * LINE


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
    tiles = -(-packed.panels // panel_group) * row_groups
    done = integer_finish(epilogue, out.dtype, strides)
    block = min(packed.words, _BLOCK)
    unpacked = block * 4 * _WIDTH
    numbers = {
        "m": m,
        "n": packed.n,
        "words": packed.words,
        "block": block,
        "row_bytes": row_bytes(packed.k),
        "panel_bytes": packed.words * packed.width * 4,
        "row_group": row_group,
        "row_groups": row_groups,
        "unpacked": unpacked,
        "panels": packed.panels,
        "panel_group": panel_group,
    }
    micro = TileMicro(DType.int8, DType.uint8, VECTORS, lines=0)
    return Launch(
        KernelSpec("ternary tiles", ("ternary tiles",), _emit),
        (At.of(codes), At(packed.storage), At.of(out), Code(micro.spec()), Code(done.spec), *done.buffers),
        (*in_order(_NAMES, numbers), *done.dims),
        tiles=tiles,
        writes=(out.storage,),
        grain=grain(tiles, flops / _GOPS / 1e3, threads),
        scratch=unpacked + panel_group * row_group * _WIDTH,
        flops=flops,
        traffic=float(packed.nbytes + codes.nbytes + out.nbytes),
        label="ternary matmul",
        rate=15.0,
    )


def _emit(module: Module, symbol: str, isa: Isa) -> None:
    frame = Frame(module, symbol, isa, _NAMES, _FINISH)
    f, at = frame.f, frame.at
    control = f.stack("i64", SLOTS)
    room = f.args["scratch"]
    sums = f.gep(room, at["unpacked"])
    for slot, value in (
        (Slot.A_STEP, at["row_bytes"]),
        (Slot.OUT_STEP, f.i64(_WIDTH)),
        (Slot.COLUMNS, f.i64(LINE // 4)),
        (Slot.FLAGS, f.i64(0)),
        (Slot.REST, f.i64(0)),
        (Slot.TILES, f.i64(0)),
    ):
        write_slot(f, control, slot, value)
    with f.loop(f.args["begin"], f.args["end"]) as tile:
        part, group = f.div(tile, at["row_groups"]), f.rem(tile, at["row_groups"])
        first = group * at["row_group"]
        rows = f.min_(at["m"] - first, at["row_group"])
        panel = part * at["panel_group"]
        panels = f.min_(at["panels"] - panel, at["panel_group"])
        apart = rows * _WIDTH  # from the sums of one panel to those of the next
        tokens = f.gep(frame.buf(_X), first * at["row_bytes"])
        with f.loop(0, panels) as p:
            weights = f.gep(frame.buf(_W), (panel + p) * at["panel_bytes"])
            with f.loop(0, at["words"], at["block"]) as word:
                count = f.min_(at["words"] - word, at["block"])
                _unpack(frame, f.gep(weights, word * _WIDTH), room, count)
                write_slot(f, control, Slot.K, count * 4)
                along = f.gep(tokens, word * DEPTH)
                begins = f.cmp("eq", word, 0)
                with f.loop(0, rows, ROWS) as row:
                    here = f.gep(sums, p * apart + row * _WIDTH)
                    write_slot(f, control, Slot.OUT, here)
                    write_slot(f, control, Slot.PARTIAL, f.select(begins, f.zero("ptr"), here))
                    write_slot(f, control, Slot.ROWS, f.min_(rows - row, ROWS))
                    f.call_pointer(frame.buf(_MICRO), "void", [f.gep(along, row * at["row_bytes"]), room, control])
        with f.loop(0, rows, ROWS) as row, f.loop(0, panels) as p:
            column = (panel + p) * (_WIDTH // 4)
            columns = f.min_(at["n"] - column, _WIDTH // 4)
            place = (0, first + row, column, f.min_(rows - row, ROWS), columns, _WIDTH)
            frame.finish(frame.buf(_OUT), f.gep(sums, p * apart + row * _WIDTH), place)
    release(f)
    f.ret()


def _unpack(frame: Frame, packed: Val, target: Val, words: Val) -> None:
    """Words of a panel as groups of four bytes along K."""
    f = frame.f
    kind = vector("i32", LINE // 4)
    with f.loop(0, words) as word:
        for v in range(VECTORS):
            codes = f.load(kind, f.gep(packed, word * _WIDTH + v * LINE), LINE)
            for k in range(4):
                part = f.and_(f.lshr(codes, 2 * k) if k else codes, LOW)
                f.store(part, f.gep(target, word * (4 * _WIDTH) + (k * _WIDTH + v * LINE)), LINE)
