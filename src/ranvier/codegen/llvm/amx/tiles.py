"""The instructions of the matrix unit, and how its registers are shared out.

A tile register holds up to 16 rows of 64 bytes; how many rows is part of the thread's configuration. Ours has four
tiles of sums (two blocks of 16 rows times two of 16 columns), two of A and two of B:

    sums 0 1        rows 0-15           A 4, B 6 and 7
         2 3        rows 16-31          A 5

Only the number of rows changes from one configuration to another, so a configuration is named by it. Loading one takes
as long as multiplying 150 rows, which is why the control block remembers which one is loaded (``Slot.TILES``).
Columns past the end are zeros of a padded B, and a depth that is no multiple of a tile's is padded with zeros: the
shapes of B never change.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.llvm.builder import Fn, Val

TILE_ROWS = 16
LINE = 64  # bytes of a row of a tile
ROWS = 2 * TILE_ROWS  # the most rows of A at once
COLUMNS = 2 * TILE_ROWS

PASSING_BYTES = 32 << 10  # of a panel of B that leaves little of the nearest cache to others

_SUMS, _A, _B = 0, 4, 6
_TILES = 8


def sums(block: int, column: int) -> int:
    return _SUMS + 2 * block + column


def a_tile(block: int) -> int:
    return _A + block


def b_tile(column: int) -> int:
    return _B + column


def configure(f: Fn, rows: Val, groups: Val | None = None) -> None:
    """Load the configuration for 1 to 32 rows, and steps of 1 to 16 groups (None: 16). All tiles are zero after it."""
    block = f.stack("i8", 64)
    plain = [0] * 64
    plain[0] = 1  # palette
    for tile in range(_TILES):
        plain[16 + 2 * tile] = LINE
        plain[48 + tile] = TILE_ROWS
    f.store(f.listed("i8", plain), block)
    upper = f.cast(f.min_(rows, TILE_ROWS), "i8")
    lower = f.cast(f.max_(rows - TILE_ROWS, 1), "i8")  # where there are none it is not used, but has to be valid
    for tiles, count in (((sums(0, 0), sums(0, 1), a_tile(0)), upper), ((sums(1, 0), sums(1, 1), a_tile(1)), lower)):
        for tile in tiles:
            f.store(count, f.gep(block, 48 + tile))
    if groups is not None:
        for k in range(2):
            f.store(f.cast(groups * 4, "i8"), f.gep(block, 16 + 2 * a_tile(k)))
            f.store(f.cast(groups, "i8"), f.gep(block, 48 + b_tile(k)))
    f.module.declare("llvm.x86.ldtilecfg", "void", ["ptr"])
    f.line(f"call void @llvm.x86.ldtilecfg(ptr {block.name})")


def release(f: Fn) -> None:
    """Give the tiles back: a thread that keeps them has more to save at every switch to another one."""
    f.module.declare("llvm.x86.tilerelease", "void", [])
    f.line("call void @llvm.x86.tilerelease()")


def zero(f: Fn, tile: int) -> None:
    f.module.declare("llvm.x86.tilezero", "void", ["i8 immarg"])
    f.line(f"call void @llvm.x86.tilezero(i8 {tile})")


def load(f: Fn, tile: int, address: Val, step: Val, *, passing: bool = False) -> None:
    """Rows of 64 bytes, ``step`` bytes apart; ``passing`` ones do not push others out of the nearest cache."""
    _move(f, "tileloaddt164" if passing else "tileloadd64", tile, address, step)


def store(f: Fn, tile: int, address: Val, step: Val) -> None:
    _move(f, "tilestored64", tile, address, step)


def _move(f: Fn, name: str, tile: int, address: Val, step: Val) -> None:
    f.module.declare(f"llvm.x86.{name}", "void", ["i8 immarg", "ptr", "i64"])
    f.line(f"call void @llvm.x86.{name}(i8 {tile}, ptr {address.name}, i64 {step.name})")


def multiply(f: Fn, instruction: str, into: int, left: int, right: int) -> None:
    """``into += left x right``: groups of four bytes along the rows of A meet groups of four bytes of B."""
    f.module.declare(f"llvm.x86.{instruction}", "void", ["i8 immarg"] * 3)
    f.line(f"call void @llvm.x86.{instruction}(i8 {into}, i8 {left}, i8 {right})")


def turn(
    f: Fn,
    instruction: str,
    blocks: int,
    vectors: int,
    load_a: Callable[[int], None] | None = None,
    load_b: Callable[[int], None] | None = None,
    between: Callable[[], None] | None = None,
) -> None:
    """The products of a step of up to ``blocks`` times ``vectors`` tiles, which have been loaded.

    Those of the following step, if there is one, are loaded between them, each as soon as its register is free: they
    are there when the next products want them. ``between`` is emitted after every product.
    """
    for v in range(vectors):
        for r in range(blocks):
            multiply(f, instruction, sums(r, v), a_tile(r), b_tile(v))
            if load_a is not None and v == vectors - 1:
                load_a(r)
            if between is not None:
                between()
        if load_b is not None:
            load_b(v)
