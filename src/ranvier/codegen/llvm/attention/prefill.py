"""Attention of many queries: blocks of keys against tiles of rows, with the online softmax between.

A tile is some rows of one key head. Per block of keys it packs the keys transposed, then walks groups of rows: scores
of the group, softmax, values; only the group's scores exist at a time, and they stay in the first-level cache.
Blocks and groups that no row of theirs may see are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.micro import call_product, ceil_div, rounded_up, shape_for
from ranvier.codegen.llvm.attention.rows import COMMON_DIMS, Frame, Rows, buffer_names
from ranvier.codegen.llvm.attention.softmax import MINUS_INFINITY, Scoring, emit_row
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa

DIMS = (
    *COMMON_DIMS,
    *("kv_heads", "chunks", "chunk", "block", "rows_at_once", "spare_vectors", "value_panels", "value_rest"),
    *("at_out", "at_keys", "at_values", "at_scores", "at_top", "at_total", "at_keep"),
)
CODES = ("pack", "scores", "scores_rest", "values", "values_rest")


def spec(scoring: Scoring, *, unit_q: bool, unit_k: bool, unit_v: bool, unit_out: bool) -> KernelSpec:
    """``unit_…``: elements of a head are neighbours. Without ``unit_v`` values are copied block by block."""
    units = (unit_q, unit_k, unit_v, unit_out)

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        emit_row(module, f"{symbol}_row", scoring, isa)
        _Prefill(module, symbol, isa, scoring, units).emit()

    return KernelSpec(f"attention {scoring.element}", ("attention", *scoring.key, *units), emit)


class _Prefill:
    def __init__(
        self, module: Module, symbol: str, isa: Isa, scoring: Scoring, units: tuple[bool, bool, bool, bool]
    ) -> None:
        self.frame = Frame(module, symbol, isa, scoring.element, [*buffer_names(scoring), *CODES], DIMS)
        self.f = self.frame.f
        self.scoring = scoring
        self.unit_q, self.unit_k, self.unit_v, self.unit_out = units
        self.shape = shape_for(scoring.element, isa)
        frame, f = self.frame, self.f
        self.queries = frame.scratch
        names = ("at_out", "at_keys", "at_values", "at_scores", "at_top", "at_total", "at_keep")
        self.parts = {n: f.gep(frame.scratch, frame[n]) for n in names}
        self.q_stride = rounded_up(f, frame["width"], self.shape.lanes)
        self.o_stride = rounded_up(f, frame["out_width"], self.shape.lanes)

    def emit(self) -> None:
        frame, f = self.frame, self.f
        per_batch = frame["kv_heads"] * frame["chunks"]
        with f.loop(frame.begin, frame.end) as tile:
            batch = f.div(tile, per_batch, signed=False)
            within = tile - batch * per_batch
            head = f.div(within, frame["chunks"], signed=False)
            self.first = (within - head * frame["chunks"]) * frame["chunk"]
            self.count = f.min_(frame["group"] * frame["queries"] - self.first, frame["chunk"])
            self.padded = ceil_div(f, self.count, self.shape.rows) * self.shape.rows
            self.rows = Rows(frame, self.scoring, self.unit_q, self.unit_out, batch, head)
            self._start()
            k = frame.at(frame.buffers["k"], (batch, frame["k_batch"]), (head, frame["k_head"]))
            v = frame.at(frame.buffers["v"], (batch, frame["v_batch"]), (head, frame["v_head"]))
            seen = self.rows.limit_over(self.first, self.first + self.count - 1)
            with f.loop(0, seen, frame["block"]) as key:
                self._block(k, v, key, f.min_(frame["block"], seen - key))
            with f.loop(0, self.count) as r:
                total = f.load(frame.element, frame.at(self.parts["at_total"], (r, 1)))
                self.rows.write_result(self.first + r, frame.at(self.parts["at_out"], (r, self.o_stride)), total)
        f.ret()

    def _start(self) -> None:
        """Queries into scratch; sums, maxima and totals as if nothing had been seen."""
        frame, f = self.frame, self.f
        with f.loop(0, self.padded) as r:
            # rows that only fill up the last block of registers repeat the last one and are never written
            self.rows.read_query(self._row(r), frame.at(self.queries, (r, self.q_stride)))
            f.store(f.const(frame.element, MINUS_INFINITY), frame.at(self.parts["at_top"], (r, 1)))
            f.store(f.const(frame.element, 0.0), frame.at(self.parts["at_total"], (r, 1)))
        with f.loop(0, self.padded * self.o_stride, self.shape.lanes) as j:
            f.store(f.zero(frame.kind), frame.at(self.parts["at_out"], (j, 1)))

    def _row(self, r: Val) -> Val:
        return self.first + self.f.min_(r, self.count - 1)

    def _block(self, k: Val, v: Val, key: Val, count: Val) -> None:
        """One block of keys against all rows of the tile."""
        frame, f, columns = self.frame, self.f, self.shape.columns
        packed = self.parts["at_keys"]
        source = frame.at(k, (key, frame["k_key"]))
        panel = self.q_stride * columns
        with f.loop(0, count, columns) as j:
            target = frame.at(packed, (f.div(j, columns, signed=False), panel))
            self._pack_keys(frame.at(source, (j, frame["k_key"])), f.min_(count - j, columns), target)
        values, value_stride = frame.at(v, (key, frame["v_key"])), frame["v_key"]
        if not self.unit_v:
            self._copy_values(values, count)
            values, value_stride = self.parts["at_values"], self.o_stride
        at_once = frame["rows_at_once"]
        with f.loop(0, self.padded, at_once) as r:
            stop = f.min_(r + at_once, self.padded)
            seen = f.min_(self.rows.limit_over(self._row(r), self._row(stop - 1)) - key, count)
            with f.if_(f.cmp("sgt", seen, 0)):
                self._scores(r, stop, seen, panel)
                self._softmax(r, stop, key, seen)
                self._values(r, stop, seen, values, value_stride)

    def _pack_keys(self, source: Val, count: Val, target: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns
        if self.unit_k:
            arguments = [source, frame["k_key"], count, frame["width"], target, f.i64(columns)]
            f.call_pointer(frame.buffers["pack"], "void", arguments)
            return
        with f.loop(0, frame["width"]) as j, f.loop(0, columns) as i:
            place = frame.at(source, (f.min_(i, count - 1), frame["k_key"]), (j, frame["k_width"]))
            f.store(f.load(frame.element, place), frame.at(target, (j, columns), (i, 1)))

    def _copy_values(self, source: Val, count: Val) -> None:
        """Values whose elements are no neighbours, or do not fill whole vectors, in rows that do."""
        frame, f = self.frame, self.f
        target = self.parts["at_values"]
        with f.loop(0, count) as i:
            row = frame.at(target, (i, self.o_stride))
            f.store(f.zero(frame.kind), frame.at(row, (self.o_stride - self.shape.lanes, 1)))
            with f.loop(0, frame["out_width"]) as j:
                place = frame.at(source, (i, frame["v_key"]), (j, frame["v_width"]))
                f.store(f.load(frame.element, place), frame.at(row, (j, 1)))

    def _per_block(self, first: Val, stop: Val, body: Callable[[Val], None]) -> None:
        with self.f.loop(first, stop, self.shape.rows) as r:
            body(r)

    def _scores(self, first: Val, stop: Val, seen: Val, panel: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns
        with f.loop(0, seen, columns) as j:
            keys = frame.at(self.parts["at_keys"], (f.div(j, columns, signed=False), panel))
            few = f.cmp("sle", seen - j, frame["spare_vectors"] * self.shape.lanes)
            code = f.select(few, frame.buffers["scores_rest"], frame.buffers["scores"])

            def block(r: Val, keys: Val = keys, code: Val = code, j: Val = j) -> None:
                q = frame.at(self.queries, (r, self.q_stride))
                c = frame.at(self.parts["at_scores"], (r - first, frame["block"]), (j, 1))
                call_product(f, code, q, self.q_stride, keys, f.i64(columns), frame["width"], c, frame["block"])

            self._per_block(first, stop, block)

    def _softmax(self, first: Val, stop: Val, key: Val, seen: Val) -> None:
        frame, f = self.frame, self.f
        with f.loop(first, stop) as r:
            row = self._row(r)
            visible = f.max_(f.min_(self.rows.limit(row) - key, seen), 0)
            state = [frame.at(self.parts[n], (r, 1)) for n in ("at_top", "at_total", "at_keep")]
            scores = frame.at(self.parts["at_scores"], (r - first, frame["block"]))
            step = frame["mask_key"]
            arguments = [scores, visible, seen, self.rows.mask_row(row, key), step, frame.number("cap"), *state]
            f.call(f"{frame.symbol}_row", "void", arguments)

    def _values(self, first: Val, stop: Val, seen: Val, values: Val, stride: Val) -> None:
        frame, f, columns = self.frame, self.f, self.shape.columns

        def panel(column: Val, code: Val) -> None:
            def block(r: Val) -> None:
                weights = frame.at(self.parts["at_scores"], (r - first, frame["block"]))
                c = frame.at(self.parts["at_out"], (r, self.o_stride), (column, 1))
                keep = frame.at(self.parts["at_keep"], (r, 1))
                b = frame.at(values, (column, 1))
                call_product(f, code, weights, frame["block"], b, stride, seen, c, self.o_stride, keep)

            self._per_block(first, stop, block)

        with f.loop(0, frame["value_panels"]) as p:
            panel(p * columns, frame.buffers["values"])
        with f.if_(f.cmp("ne", frame["value_rest"], 0)):
            panel(frame["value_panels"] * columns, frame.buffers["values_rest"])
