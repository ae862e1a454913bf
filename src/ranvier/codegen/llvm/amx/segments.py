"""Products whose depth is several segments, for each of which rows begin somewhere else: what convolutions come to.

Segments are whole steps of 16 groups of K, or each less than one ("short"): then tiles are as wide as a segment, and
what lies behind is not read. B is packed segment after segment, group after group.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.llvm.amx import tiles
from ranvier.codegen.llvm.builder import Fn, Val, Var
from ranvier.records import dataclass


@dataclass(frozen=True)
class Segments:
    """``groups`` of each of ``segments``; rows of one begin where ``start`` says and lie ``row`` bytes apart; lines at
    ``fetch`` are brought near meanwhile, unless it is null; sums go to ``out``, whose rows lie ``out_row`` apart."""

    segments: Val
    groups: Val
    start: Callable[[Val], Val]
    row: Val
    b: Val
    fetch: Val
    out: Val
    out_row: Val


@dataclass(frozen=True)
class SegmentProduct:
    """Of up to 32 rows and ``vectors`` of B, of which large panels pass by the nearest cache."""

    instruction: str
    vectors: int
    short: bool
    passing: bool
    fetched: int  # lines in every step of segments that are not short

    def emit(self, f: Fn, at: Segments, blocks: int) -> None:
        """All steps, each loading the tiles of the next, wherever that is."""
        vectors, line = self.vectors, f.i64(self.vectors * tiles.LINE)
        sums = [(r, v) for r in range(blocks) for v in range(vectors)]
        for r, v in sums:
            tiles.zero(f, tiles.sums(r, v))
        inside = f.i64(1) if self.short else f.lshr(at.groups, 4)  # steps of a segment
        size = line * (at.groups if self.short else tiles.TILE_ROWS)  # of a step of B
        a, b = f.var("ptr", at.start(f.i64(0))), f.var("ptr", at.b)
        segment, left = f.var("i64", 0), f.var("i64", inside)
        ahead = f.var("ptr", at.fetch)

        def load_a(r: int) -> None:
            here = a.get()
            tiles.load(f, tiles.a_tile(r), f.gep(here, at.row * (r * tiles.TILE_ROWS)) if r else here, at.row)

        def load_b(v: int) -> None:
            tiles.load(f, tiles.b_tile(v), f.gep(b.get(), v * tiles.LINE), line, passing=self.passing)

        for v in range(vectors):
            load_b(v)
        for r in range(blocks):
            load_a(r)
        with f.loop(1, at.segments * inside):
            self._fetch(f, ahead)
            last = f.cmp("eq", left.get(), 1)
            segment.set(segment.get() + f.cast(last, "i64", signed=False))
            left.set(f.select(last, inside, left.get() - 1))
            a.set(f.select(last, at.start(segment.get()), f.gep(a.get(), tiles.LINE)))
            b.set(f.gep(b.get(), size))
            tiles.turn(f, self.instruction, blocks, vectors, load_a, load_b)
        self._fetch(f, ahead)
        tiles.turn(f, self.instruction, blocks, vectors)
        for r, v in sums:
            place = f.gep(at.out, at.out_row * (r * tiles.TILE_ROWS) + v * tiles.LINE)
            tiles.store(f, tiles.sums(r, v), place, at.out_row)

    def _fetch(self, f: Fn, ahead: Var) -> None:
        if self.short:
            return
        here = ahead.get()
        with f.if_(f.cmp("ne", here, f.zero("ptr"))):
            for each in range(self.fetched):
                f.prefetch(f.gep(here, each * tiles.LINE), locality=2)
            ahead.set(f.gep(here, self.fetched * tiles.LINE))
