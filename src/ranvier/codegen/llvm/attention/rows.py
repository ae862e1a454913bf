"""What both attention kernels share: rows of queries and results, and who sees which keys.

The query heads that share a key head stand behind each other: "row" r of a key head is query ``r % q_len`` of head
``r // q_len`` of its group. So grouped heads read keys and values once, whether there is one query or many.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.codegen.llvm.attention.frame import Frame, moved
from ranvier.codegen.llvm.attention.softmax import Scoring
from ranvier.codegen.llvm.builder import Val


class Rows:
    """Rows of one (batch entry, key head): where their queries and results are, and what they see."""

    def __init__(self, frame: Frame, scoring: Scoring, unit_q: bool, unit_out: bool, batch: Val, head: Val) -> None:
        self.frame, self.scoring, self.unit_q, self.unit_out = frame, scoring, unit_q, unit_out
        f = frame.f
        self.first_head = head * frame["group"]
        self.q = frame.at(frame.buffer("q"), (batch, frame["q_batch"]))
        self.out = frame.at(frame.buffer("out"), (batch, frame["out_batch"]))
        self.keys = frame["keys"]
        self.offset = frame["offset"]
        if scoring.lengths != "none":
            place = f.gep(frame.buffer("lengths"), batch * frame["length_step"], scoring.lengths)
            # bounded, so that no sum with it overflows; more keys than there are still move the queries
            told = f.max_(f.min_(f.cast(f.load(scoring.lengths, place), "i64"), 1 << 48), -(1 << 48))
            self.keys = f.max_(f.min_(told, frame["keys"]), 0)
            if scoring.causal or scoring.window:
                # without an offset of its own, the last query stands at the last valid key
                by_length = f.cmp("ne", frame["offset_by_length"], 0)
                self.offset = f.select(by_length, told - frame["queries"], frame["offset"])
        if scoring.mask != "none":
            stored = "i8" if scoring.mask == "bool" else frame.element
            self.mask = f.gep(frame.buffer("mask"), batch * frame["mask_batch"], stored)

    def place(self, row: Val) -> tuple[Val, Val]:
        """The head and the query of a row."""
        f = self.frame.f
        inner = f.div(row, self.frame["queries"], signed=False)
        return self.first_head + inner, row - inner * self.frame["queries"]

    def limit(self, row: Val) -> Val:
        """How many keys, from the first on, a row may see."""
        if not self.scoring.causal:
            return self.keys
        f = self.frame.f
        _, query = self.place(row)
        return f.max_(f.min_(query + self.offset + self.frame["reach"] + 1, self.keys), 0)

    def hidden(self, row: Val) -> Val:
        """How many keys, from the first on, lie too far before a row."""
        if not self.scoring.window:
            return self.frame.f.i64(0)
        _, query = self.place(row)
        return self.frame.f.max_(query + self.offset - self.frame["left"], 0)

    def hidden_over(self, first: Val, last: Val) -> Val:
        """The least that any row from ``first`` to ``last`` misses: a range across heads holds a first query."""
        if not self.scoring.window:
            return self.frame.f.i64(0)
        f = self.frame.f
        head, query = self.place(first)
        other, _ = self.place(last)
        query = f.select(f.cmp("eq", head, other), query, f.i64(0))
        return f.max_(query + self.offset - self.frame["left"], 0)

    def limit_over(self, first: Val, last: Val) -> Val:
        """The most that any row from ``first`` to ``last`` sees: a range across heads holds a last query."""
        if not self.scoring.causal:
            return self.keys
        f = self.frame.f
        head, _ = self.place(first)
        other, query = self.place(last)
        query = f.select(f.cmp("eq", head, other), query, self.frame["queries"] - 1)
        return f.max_(f.min_(query + self.offset + self.frame["reach"] + 1, self.keys), 0)

    def mask_row(self, row: Val, key: Val) -> Val:
        """Where the mask of a row begins for keys from ``key`` on (null without a mask)."""
        frame, f = self.frame, self.frame.f
        if self.scoring.mask == "none":
            return f.zero("ptr")
        stored = "i8" if self.scoring.mask == "bool" else frame.element
        head, query = self.place(row)
        terms = ((head, frame["mask_head"]), (query, frame["mask_query"]), (key, frame["mask_key"]))
        return moved(f, self.mask, stored, *terms)

    def softmax(self, row: Val, scores: Val, key: Val, seen: Val, fresh: Val, state: Sequence[Val]) -> None:
        """Products with keys from ``key`` on become weights; ``state`` is where top, total and keep are."""
        frame, f = self.frame, self.frame.f
        visible = f.max_(f.min_(self.limit(row) - key, seen), 0)
        hidden = f.max_(self.hidden(row) - key, 0)
        numbers = [frame.number(n) for n in ("scale", "cap", "rate")]
        mask = [self.mask_row(row, key), frame["mask_key"]]
        f.call(f"{frame.symbol}_row", "void", [scores, hidden, visible, seen, *mask, *numbers, fresh, *state])

    def query(self, row: Val) -> Val:
        """Where the query of a row begins."""
        head, query = self.place(row)
        return self.frame.at(self.q, (head, self.frame["q_head"]), (query, self.frame["q_query"]))

    def result(self, row: Val) -> Val:
        """Where the result of a row begins."""
        head, query = self.place(row)
        return self.frame.at(self.out, (head, self.frame["out_head"]), (query, self.frame["out_query"]))

    def read_query(self, row: Val, target: Val) -> None:
        """The query of a row with zeros up to a whole vector."""
        frame, f = self.frame, self.frame.f
        source = self.query(row)
        width, lanes = frame["width"], frame.lanes
        whole = f.and_(width, -lanes)
        if self.unit_q:
            with f.loop(0, whole, lanes) as j:
                f.store(f.load(frame.kind, frame.at(source, (j, 1))), frame.at(target, (j, 1)))
            with f.if_(f.cmp("slt", whole, width)):
                part = f.masked_load(frame.kind, frame.at(source, (whole, 1)), f.mask_below(lanes, width - whole))
                f.store(part, frame.at(target, (whole, 1)))
            return
        with f.if_(f.cmp("slt", whole, width)):
            f.store(f.zero(frame.kind), frame.at(target, (whole, 1)))
        with f.loop(0, width) as j:
            f.store(f.load(frame.element, frame.at(source, (j, frame["q_width"]))), frame.at(target, (j, 1)))

    def write_result(self, row: Val, source: Val, total: Val) -> None:
        """A row of sums divided by its total weight (zeros where no key was seen) into the output."""
        frame, f = self.frame, self.frame.f
        target = self.result(row)
        whole_weight = f.select(f.cmp("oeq", total, 0.0), f.const(frame.element, 1.0), total)
        factor = f.div(f.const(frame.element, 1.0), whole_weight)
        width, lanes = frame["out_width"], frame.lanes
        if self.unit_out:
            whole = f.and_(width, -lanes)
            with f.loop(0, whole, lanes) as j:
                f.store(f.load(frame.kind, frame.at(source, (j, 1))) * f.splat(factor, lanes), frame.at(target, (j, 1)))
            with f.if_(f.cmp("slt", whole, width)):
                part = f.load(frame.kind, frame.at(source, (whole, 1))) * f.splat(factor, lanes)
                f.masked_store(part, frame.at(target, (whole, 1)), f.mask_below(lanes, width - whole))
            return
        with f.loop(0, width) as j:
            item = f.load(frame.element, frame.at(source, (j, 1))) * factor
            f.store(item, frame.at(target, (j, frame["out_step"])))


# numbers every attention kernel takes
COMMON_DIMS = (
    *(
        "scale",
        "cap",
        "rate",
        "group",
        "queries",
        "keys",
        "width",
        "out_width",
        "offset",
        "offset_by_length",
        "length_step",
        "reach",
        "left",
    ),
    *("q_batch", "q_head", "q_query", "q_width"),
    *("k_batch", "k_head", "k_key", "k_width"),
    *("v_batch", "v_head", "v_key", "v_width"),
    *("out_batch", "out_head", "out_query", "out_step"),
    *("mask_batch", "mask_head", "mask_query", "mask_key"),
)


def buffer_names(scoring: Scoring) -> list[str]:
    names = ["q", "k", "v", "out"]
    if scoring.mask != "none":
        names.append("mask")
    if scoring.lengths != "none":
        names.append("lengths")
    return names
