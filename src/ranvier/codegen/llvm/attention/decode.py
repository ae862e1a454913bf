"""Attention of a few rows against a long cache: one pass over keys and values at the speed of memory.

Keys are not packed: a score is a dot product along a key as it lies, as many keys at a time as a vector has lanes. A
tile is one key head and one fixed stretch of its keys; with several stretches the kernel leaves maxima, totals and
unscaled sums behind, and a second kernel combines them. The stretches do not depend on the number of threads that
run, so neither does the result.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import call_product, exp2_nonpositive, rounded_up, sums_of
from ranvier.codegen.llvm.attention.rows import COMMON_DIMS, Rows, buffer_names
from ranvier.codegen.llvm.attention.softmax import MINUS_INFINITY, Scoring, emit_row
from ranvier.codegen.llvm.builder import Module, Val, Var
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath.core import exactly

DIMS = (
    *COMMON_DIMS,
    *("kv_heads", "splits", "stretch", "value_panels", "panel_columns", "value_rest", "area", "at_scores", "at_area"),
)
CODES = ("values", "values_rest")
COMBINE_DIMS = (*COMMON_DIMS, "kv_heads", "splits", "area", "at_weights")
# Keys of one dot-product loop: their addresses and accumulators all stay in registers.
_KEYS_AT_ONCE = 8
_VALUES_AT_ONCE = 4  # rows of values that are added beside each other, where they do not fill a vector


def spec(scoring: Scoring, *, unit_q: bool, unit_out: bool, far: bool) -> KernelSpec:
    """``far``: keys come from memory rather than a near cache, and are fetched ahead."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        emit_row(module, f"{symbol}_row", scoring, isa)
        _Decode(module, symbol, isa, scoring, unit_q, unit_out, far).emit()

    key = ("attention decode", *scoring.key, unit_q, unit_out, far)
    return KernelSpec(f"attention decode {scoring.element}", key, emit)


class _Decode:
    def __init__(
        self, module: Module, symbol: str, isa: Isa, scoring: Scoring, unit_q: bool, unit_out: bool, far: bool
    ) -> None:
        buffers = [*buffer_names(scoring), "partial", *CODES]
        self.frame = Frame(module, symbol, isa, scoring.element, buffers, DIMS)
        self.f, self.scoring, self.unit_q, self.unit_out, self.far = self.frame.f, scoring, unit_q, unit_out, far
        self.count = self.frame["group"] * self.frame["queries"]
        self.q_stride = rounded_up(self.f, self.frame["width"], self.frame.lanes)
        self.o_stride = rounded_up(self.f, self.frame["out_width"], self.frame.lanes)
        self.scores = self.f.gep(self.frame.scratch, self.frame["at_scores"])

    def emit(self) -> None:
        frame, f = self.frame, self.f
        per_batch = frame["kv_heads"] * frame["splits"]
        alone = f.cmp("eq", frame["splits"], 1)
        with f.loop(frame.begin, frame.end) as tile:
            batch = f.div(tile, per_batch, signed=False)
            within = tile - batch * per_batch
            head = f.div(within, frame["splits"], signed=False)
            start = (within - head * frame["splits"]) * frame["stretch"]
            rows = Rows(frame, self.scoring, self.unit_q, self.unit_out, batch, head)
            apart = f.gep(frame.buffer("partial"), tile * frame["area"])
            area = f.select(alone, f.gep(frame.scratch, frame["at_area"]), apart)
            top = frame.at(area, (self.count, self.o_stride))
            total = frame.at(top, (self.count, 1))
            keep = frame.at(total, (self.count, 1))
            with f.loop(0, self.count) as r:
                rows.read_query(r, frame.at(frame.scratch, (r, self.q_stride)))
            seen = f.min_(rows.limit_over(f.i64(0), self.count - 1) - start, frame["stretch"])
            seen = f.max_(seen, 0)
            # keys that no row sees any more are passed over
            passed = f.min_(f.max_(rows.hidden_over(f.i64(0), self.count - 1) - start, 0), seen)
            start, seen = start + passed, seen - passed
            k = frame.at(frame.buffer("k"), (batch, frame["k_batch"]), (head, frame["k_head"]))
            v = frame.at(frame.buffer("v"), (batch, frame["v_batch"]), (head, frame["v_head"]))
            with f.loop(0, seen, frame.lanes) as key:
                self._dots(frame.at(k, (start, frame["k_key"])), key, seen)
            with f.loop(0, self.count) as r:
                scores = frame.at(self.scores, (r, frame["stretch"]))
                state = [frame.at(part, (r, 1)) for part in (top, total, keep)]
                rows.softmax(r, scores, start, seen, f.const("i1", True), state)
            self._values(frame.at(v, (start, frame["v_key"])), seen, area)
            with f.if_(alone), f.loop(0, self.count) as r:
                weight = f.load(frame.element, frame.at(total, (r, 1)))
                rows.write_result(r, frame.at(area, (r, self.o_stride)), weight)
        f.ret()

    def _dots(self, k: Val, key: Val, seen: Val) -> None:
        """Scores of all rows with one vector of keys; lanes past the last key repeat it and are not looked at."""
        frame, f, lanes = self.frame, self.f, self.frame.lanes
        last = seen - 1
        whole = f.and_(frame["width"], -lanes)
        starts = [frame.at(k, (f.min_(key + i, last), frame["k_key"])) for i in range(lanes)]
        with f.loop(0, self.count) as r:
            q = frame.at(frame.scratch, (r, self.q_stride))
            sums: list[Val] = []
            for first in range(0, lanes, _KEYS_AT_ONCE):
                few = starts[first : first + _KEYS_AT_ONCE]
                held = [f.var(frame.kind, 0.0) for _ in few]
                with f.loop(0, whole, lanes) as j:
                    part = f.load(frame.kind, frame.at(q, (j, 1)))
                    for place, total in zip(few, held):
                        total.set(f.fma(f.load(frame.kind, frame.at(place, (j, 1))), part, total.get()))
                        if self.far:
                            f.prefetch(frame.at(place, (frame["k_key"], lanes), (j, 1)))
                with f.if_(f.cmp("slt", whole, frame["width"])):
                    part = f.load(frame.kind, frame.at(q, (whole, 1)))
                    mask = f.mask_below(lanes, frame["width"] - whole)
                    for place, total in zip(few, held):
                        loaded = f.masked_load(frame.kind, frame.at(place, (whole, 1)), mask)
                        total.set(f.fma(loaded, part, total.get()))
                sums += [total.get() for total in held]
            f.store(sums_of(f, sums), frame.at(self.scores, (r, frame["stretch"]), (key, 1)))

    def _values(self, v: Val, seen: Val, area: Val) -> None:
        frame, f = self.frame, self.f

        def panel(column: Val, code: Val) -> None:
            b, c = frame.at(v, (column, 1)), frame.at(area, (column, 1))
            call_product(f, code, self.scores, frame["stretch"], b, frame["v_key"], seen, c, self.o_stride)

        with f.loop(0, frame["value_panels"]) as p:
            panel(p * frame["panel_columns"], frame.buffer("values"))
        with f.if_(f.cmp("ne", frame["value_rest"], 0)):
            panel(frame["value_panels"] * frame["panel_columns"], frame.buffer("values_rest"))
        whole = f.and_(frame["out_width"], -frame.lanes)
        with f.if_(f.cmp("slt", whole, frame["out_width"])):
            self._last_values(frame.at(v, (whole, 1)), frame["out_width"] - whole, seen, frame.at(area, (whole, 1)))

    def _last_values(self, v: Val, columns: Val, seen: Val, out: Val) -> None:
        """The columns behind those that fill vectors: behind the last row there may be nothing to read."""
        frame, f = self.frame, self.f
        mask = f.mask_below(frame.lanes, columns)
        with f.loop(0, self.count) as r:
            held = [f.var(frame.kind, 0.0) for _ in range(_VALUES_AT_ONCE)]

            def add(key: Val, totals: list[Var], scores: Val) -> None:
                for k, total in enumerate(totals):
                    weight = f.splat(f.load(frame.element, frame.at(scores, (key + k, 1))), frame.lanes)
                    value = f.masked_load(frame.kind, frame.at(v, (key + k, frame["v_key"])), mask)
                    total.set(f.fma(value, weight, total.get()))

            scores = frame.at(self.scores, (r, frame["stretch"]))
            together = f.and_(seen, -_VALUES_AT_ONCE)
            with f.loop(0, together, _VALUES_AT_ONCE) as key:
                add(key, held, scores)
            with f.loop(together, seen) as key:
                add(key, held[:1], scores)
            pairs = [f.add(held[k].get(), held[k + 1].get()) for k in range(0, _VALUES_AT_ONCE, 2)]
            f.store(f.add(*pairs), frame.at(out, (r, self.o_stride)))


def combine_spec(element: str, *, unit_out: bool, masked: bool) -> KernelSpec:
    """Stretches of keys into one result; a tile is one key head. ``masked``: by numbers added to the scores."""

    def emit(module: Module, symbol: str, isa: Isa) -> None:
        frame = Frame(module, symbol, isa, element, ["q", "out", "partial"], COMBINE_DIMS)
        f = frame.f
        count = frame["group"] * frame["queries"]
        o_stride = rounded_up(f, frame["out_width"], frame.lanes)
        weights = f.gep(frame.scratch, frame["at_weights"])
        with f.loop(frame.begin, frame.end) as tile:
            batch = f.div(tile, frame["kv_heads"], signed=False)
            rows = Rows(frame, Scoring(element), True, unit_out, batch, tile - batch * frame["kv_heads"])
            area = f.gep(frame.buffer("partial"), tile * frame["splits"] * frame["area"])
            with f.loop(0, count) as r:
                top = f.var(element, MINUS_INFINITY)
                tops = frame.at(area, (count, o_stride), (r, 1))
                with f.loop(0, frame["splits"]) as s:
                    top.set(f.quick_max(f.load(element, f.gep(tops, s * frame["area"])), top.get()))
                base = f.select(f.cmp("oeq", top.get(), MINUS_INFINITY), f.const(element, 0.0), top.get())
                rate = frame.number("rate")
                exponent = exactly(f, "fmul", base, rate)  # rounded as the stretches rounded it
                total = f.var(element, 0.0)
                with f.loop(0, frame["splits"]) as s:
                    place = f.gep(tops, s * frame["area"])
                    if masked:
                        change = f.mul(f.sub(f.load(element, place), base), rate)
                    else:
                        change = exactly(f, "fsub", exactly(f, "fmul", f.load(element, place), rate), exponent)
                    shrunk = exp2_nonpositive(f, f.splat(change, frame.lanes), isa)
                    weight = f.extract(shrunk, 0)
                    f.store(weight, frame.at(weights, (s, 1)))
                    share = f.load(element, frame.at(place, (count, 1)))
                    total.set(f.fma(share, weight, total.get()))
                with f.loop(0, o_stride, frame.lanes) as j:
                    held = f.var(frame.kind, 0.0)
                    with f.loop(0, frame["splits"]) as s:
                        place = f.gep(frame.at(area, (r, o_stride), (j, 1)), s * frame["area"])
                        weight = f.splat(f.load(element, frame.at(weights, (s, 1))), frame.lanes)
                        held.set(f.fma(f.load(frame.kind, place), weight, held.get()))
                    f.store(held.get(), frame.at(frame.scratch, (j, 1)))
                rows.write_result(r, frame.scratch, total.get())
        f.ret()

    return KernelSpec(f"attention combine {element}", ("attention combine", element, unit_out, masked), emit)
