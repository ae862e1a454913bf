"""Attention of many queries: blocks of keys against tiles of rows, with the online softmax between.

A tile is some rows of one key head. Per block of keys it packs the keys transposed, then walks groups of rows: scores
of the group, softmax, values; only the group's scores exist at a time, and they stay in the first-level cache.
Blocks and groups that no row of theirs may see are skipped.

Where strides allow it (``direct``), queries are read and sums are kept where they are: a tile then holds rows of one
query head. Otherwise both live in scratch, and a tile may hold rows of all query heads that share the key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import call_product, rounded_up, shape_for
from ranvier.codegen.llvm.attention.rows import COMMON_DIMS, Rows, buffer_names
from ranvier.codegen.llvm.attention.softmax import Scoring, emit_row
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

DIMS = (
    *COMMON_DIMS,
    *("tile_heads", "share", "chunks", "chunk", "block", "rows_at_once"),
    *("spare_vectors", "value_panels", "value_rest"),
    *("at_out", "at_keys", "at_values", "at_scores", "at_top", "at_total", "at_keep"),
)
_PARTS = DIMS[-7:]
# products for whole blocks of rows and for the rows that are left
CODES = (
    "pack",
    *("scores", "scores_rest", "values", "values_rest"),
    *("last_scores", "last_scores_rest", "last_values", "last_values_rest"),
)


@dataclass(frozen=True)
class Layout:
    """Strides as far as code depends on them: whether elements of a head are neighbours."""

    direct: bool
    unit_q: bool
    unit_k: bool
    values: Literal["in place", "rows", "elements"]  # or copied block by block, by whole vectors or one by one
    unit_out: bool

    @property
    def key(self) -> tuple[object, ...]:
        return (self.direct, self.unit_q, self.unit_k, self.values, self.unit_out)


def spec(scoring: Scoring, layout: Layout) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        emit_row(module, f"{symbol}_row", scoring, isa)
        _Prefill(module, symbol, isa, scoring, layout).emit()

    return KernelSpec(f"attention {scoring.element}", ("attention", *scoring.key, *layout.key), emit)


class _Prefill:
    def __init__(self, module: Module, symbol: str, isa: Isa, scoring: Scoring, layout: Layout) -> None:
        self.frame = frame = Frame(module, symbol, isa, scoring.element, [*buffer_names(scoring), *CODES], DIMS)
        self.f = f = frame.f
        self.scoring, self.layout = scoring, layout
        self.shape = shape_for(scoring.element, isa)
        self.parts = {n: f.gep(frame.scratch, frame[n]) for n in _PARTS}
        packed_width = rounded_up(f, frame["width"], self.shape.lanes)
        self.panel = packed_width * self.shape.columns
        self.q_stride = frame["q_query"] if layout.direct else packed_width
        self.o_stride = rounded_up(f, frame["out_width"], self.shape.lanes)
        self.v_stride = frame["v_key"] if layout.values == "in place" else self.o_stride
        if layout.direct:
            self.o_stride = frame["out_query"]

    def emit(self) -> None:
        frame, f = self.frame, self.f
        per_batch = frame["tile_heads"] * frame["chunks"]
        with f.loop(frame.begin, frame.end) as tile:
            batch = f.div(tile, per_batch, signed=False)
            within = tile - batch * per_batch
            head = f.div(within, frame["chunks"], signed=False)
            self.first = (within - head * frame["chunks"]) * frame["chunk"]
            self.count = f.min_(frame["group"] * frame["queries"] - self.first, frame["chunk"])
            self.rows = Rows(frame, self.scoring, self.layout.unit_q, self.layout.unit_out, batch, head)
            self._start()
            kv_head = f.div(head, frame["share"], signed=False)
            k = frame.at(frame.buffer("k"), (batch, frame["k_batch"]), (kv_head, frame["k_head"]))
            v = frame.at(frame.buffer("v"), (batch, frame["v_batch"]), (kv_head, frame["v_head"]))
            seen = self.rows.limit_over(self.first, self.first + self.count - 1)
            # the first block runs even if nobody sees a key: it is what makes the sums zero
            self.start = f.min_(self.rows.hidden_over(self.first, self.first + self.count - 1), f.max_(seen - 1, 0))
            with f.loop(self.start, f.max_(seen, self.start + 1), frame["block"]) as key:
                self._block(k, v, key, f.min_(frame["block"], seen - key))
            with f.loop(0, self.count) as r:
                total = f.load(frame.element, frame.at(self.parts["at_total"], (r, 1)))
                self.rows.write_result(self.first + r, frame.at(self.sums, (r, self.o_stride)), total)
        f.ret()

    def _start(self) -> None:
        """Where the tile's queries and sums are."""
        frame, f = self.frame, self.f
        if self.layout.direct:
            self.queries, self.sums = self.rows.query(self.first), self.rows.result(self.first)
            return
        self.queries, self.sums = frame.scratch, self.parts["at_out"]
        with f.loop(0, self.count) as r:
            self.rows.read_query(self.first + r, frame.at(self.queries, (r, self.q_stride)))

    def _block(self, k: Val, v: Val, key: Val, count: Val) -> None:
        """One block of keys against all rows of the tile."""
        frame, f, columns = self.frame, self.f, self.shape.columns
        source = frame.at(k, (key, frame["k_key"]))
        with f.loop(0, count, columns) as j:
            target = frame.at(self.parts["at_keys"], (f.div(j, columns, signed=False), self.panel))
            self._pack_keys(frame.at(source, (j, frame["k_key"])), f.min_(count - j, columns), target)
        values = frame.at(v, (key, frame["v_key"]))
        if self.layout.values != "in place":
            self._copy_values(values, count)
            values = self.parts["at_values"]
        at_once, fresh = frame["rows_at_once"], f.cmp("eq", key, self.start)
        with f.loop(0, self.count, at_once) as r:
            stop = f.min_(r + at_once, self.count)
            seen = f.min_(self.rows.limit_over(self.first + r, self.first + stop - 1) - key, count)
            with f.if_(f.or_(f.cmp("sgt", seen, 0), fresh)):
                self._scores(r, stop, seen)
                with f.loop(r, stop) as each:
                    state = [frame.at(self.parts[n], (each, 1)) for n in ("at_top", "at_total", "at_keep")]
                    scores = frame.at(self.parts["at_scores"], (each - r, frame["block"]))
                    self.rows.softmax(self.first + each, scores, key, seen, fresh, state)
                self._values(r, stop, seen, values, fresh)

    def _pack_keys(self, source: Val, count: Val, target: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns
        if self.layout.unit_k:
            arguments = [source, frame["k_key"], count, frame["width"], target, f.i64(columns)]
            f.call_pointer(frame.buffer("pack"), "void", arguments)
            return
        with f.loop(0, frame["width"]) as j, f.loop(0, columns) as i:
            place = frame.at(source, (f.min_(i, count - 1), frame["k_key"]), (j, frame["k_width"]))
            f.store(f.load(frame.element, place), frame.at(target, (j, columns), (i, 1)))

    def _copy_values(self, source: Val, count: Val) -> None:
        """Values in rows of whole vectors, one behind the other."""
        frame, f, lanes = self.frame, self.f, self.shape.lanes
        with f.loop(0, count) as i:
            row = frame.at(self.parts["at_values"], (i, self.v_stride))
            given = frame.at(source, (i, frame["v_key"]))
            if self.layout.values == "rows":
                with f.loop(0, frame["out_width"], lanes) as j:
                    f.store(f.load(frame.kind, frame.at(given, (j, 1))), frame.at(row, (j, 1)))
            else:
                f.store(f.zero(frame.kind), frame.at(row, (self.v_stride - lanes, 1)))
                with f.loop(0, frame["out_width"]) as j:
                    f.store(f.load(frame.element, frame.at(given, (j, frame["v_width"]))), frame.at(row, (j, 1)))

    def _scores(self, first: Val, stop: Val, seen: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns
        with f.loop(0, seen, columns) as j:
            keys = frame.at(self.parts["at_keys"], (f.div(j, columns, signed=False), self.panel))
            few = f.cmp("sle", seen - j, frame["spare_vectors"] * self.shape.lanes)

            def block(r: Val, last: str, keys: Val = keys, few: Val = few, j: Val = j) -> None:
                code = f.select(few, frame.buffer(f"{last}scores_rest"), frame.buffer(f"{last}scores"))
                q = frame.at(self.queries, (r, self.q_stride))
                c = frame.at(self.parts["at_scores"], (r - first, frame["block"]), (j, 1))
                call_product(f, code, q, self.q_stride, keys, f.i64(columns), frame["width"], c, frame["block"])

            self._row_blocks(first, stop, block)

    def _values(self, first: Val, stop: Val, seen: Val, values: Val, fresh: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns

        def panel(column: Val, name: str) -> None:
            b = frame.at(values, (column, 1))

            def block(r: Val, last: str) -> None:
                weights = frame.at(self.parts["at_scores"], (r - first, frame["block"]))
                c = frame.at(self.sums, (r, self.o_stride), (column, 1))
                keep = f.select(fresh, f.zero("ptr"), frame.at(self.parts["at_keep"], (r, 1)))
                code = frame.buffer(f"{last}{name}")
                call_product(f, code, weights, frame["block"], b, self.v_stride, seen, c, self.o_stride, keep)

            self._row_blocks(first, stop, block)

        with f.loop(0, frame["value_panels"]) as p:
            panel(p * columns, "values")
        with f.if_(f.cmp("ne", frame["value_rest"], 0)):
            panel(frame["value_panels"] * columns, "values_rest")

    def _row_blocks(self, first: Val, stop: Val, body: Callable[[Val, str], None]) -> None:
        """Whole blocks of rows, then the rows that are left; the latter exist only at the end of a head."""
        f, rows = self.f, self.shape.rows
        whole = stop - f.rem(stop - first, f.i64(rows), signed=False)
        with f.loop(first, whole, rows) as r:
            body(r, "")
        with f.if_(f.cmp("slt", whole, stop)):
            body(whole, "last_")
