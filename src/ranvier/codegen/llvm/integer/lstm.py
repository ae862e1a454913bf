"""The time loop of an LSTM with 8-bit recurrent weights, whose state is quantized anew in every step.

A tile is one direction. In every step the range of the state gives its scale and zero point, the codes meet the packed
weights, and the sums, scaled, are added to what the inputs contributed; then the gates are applied. Long loops go by
rounds of many steps, so that a run can be aborted in between; states stay in a buffer of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val, vector
from ranvier.codegen.llvm.gemm.blocks import Cut
from ranvier.codegen.llvm.gemm.micro import SLOTS, Slot, write_slot
from ranvier.codegen.llvm.integer.dots import WORDS, dot_of
from ranvier.codegen.llvm.integer.frame import in_order
from ranvier.codegen.llvm.integer.micro import IntegerMicro
from ranvier.codegen.llvm.integer.pack import PackedCodes
from ranvier.codegen.llvm.integer.product import most_rows
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.records import dataclass

_NAMES = (
    *("steps", "batch", "hidden", "directions", "reverse", "k", "row_bytes", "rows", "entry"),
    *("panels", "wide", "wide_panels", "sums_row", "sums_at", "totals_at", "span"),
)
_INPUTS, _WEIGHTS, _SUMS, _ZERO, _SCALE, _H0, _C0, _Y, _YH, _YC, _STATE, _WIDE, _NARROW = range(13)
_FLOPS_PER_NS = 100.0  # of one core, roughly
_ROUND_NS = 2e6  # a run can be aborted about this often


@dataclass(frozen=True)
class Recurrent:
    """Recurrent weights [directions, hidden, 4 * hidden] (gates i, o, f, c) and, per column, their sums less zero
    points (int32), zero points (int32) and scales (float32); codes as ``pack`` describes them."""

    packed: PackedCodes
    sums: View
    zero: View
    scale: View


def quantized_lstm(
    inputs: View,
    weights: Recurrent,
    state: tuple[View, View],
    results: tuple[View, View, View],
    isa: Isa,
    *,
    reverse: bool,
) -> list[Launch]:
    """``inputs`` are [directions, steps * batch, 4 * hidden], ``state`` and ``results`` as ONNX shapes them, all dense.

    ``reverse``: the first direction runs backwards; a second one always does.
    """
    steps, directions, batch, hidden = results[0].shape
    if 0 in (batch, hidden):
        return []
    packed, cut = weights.packed, weights.packed.panels.cut
    rows = Cut.of(batch, most_rows(isa, cut.size)).size
    room = -(-batch // rows) * rows
    row_bytes = -(-packed.k * 4 // 64) * 64
    sums_row = cut.total * isa.vector_bytes
    places, end = [], 0
    for nbytes in (room * row_bytes, room * sums_row, batch * 4):
        places.append(end)
        end = -(-(end + nbytes) // 64) * 64 + 64
    numbers = {
        "steps": steps,
        "batch": batch,
        "hidden": hidden,
        "directions": directions,
        "reverse": int(reverse),
        "k": packed.k,
        "row_bytes": row_bytes,
        "rows": rows,
        "entry": packed.entry,
        "panels": cut.count,
        "wide": cut.size * isa.vector_bytes,
        "wide_panels": cut.large,
        "sums_row": sums_row,
        **dict(zip(("sums_at", "totals_at"), places[1:])),
    }
    narrow = cut.size - 1 if cut.large < cut.count else cut.size
    step_flops = 2.0 * batch * hidden * 4 * hidden
    numbers["span"] = max(1, round(_ROUND_NS * _FLOPS_PER_NS / step_flops))
    states = Storage.temporary(directions * 2 * batch * hidden * 4)
    return [
        Launch(
            KernelSpec("quantized lstm", ("quantized lstm", 2), lambda m, s, i: _Kernel(m.kernel(s), i).emit()),
            (
                At.of(inputs),
                At(packed.storage),
                *(At.of(v) for v in (weights.sums, weights.zero, weights.scale, *state, *results)),
                At(states),
                *(Code(IntegerMicro(rows, v).spec()) for v in (cut.size, narrow)),
            ),
            in_order(_NAMES, numbers),
            tiles=directions,
            writes=(states, *dict.fromkeys(v.storage for v in results)),
            scratch=end,
            flops=step_flops * steps * directions,
            traffic=float(steps * packed.nbytes + inputs.nbytes + results[0].nbytes),
            label="lstm",
            rounds=max(1, -(-steps // numbers["span"])),
        )
    ]


class _Kernel:
    def __init__(self, f: Fn, isa: Isa) -> None:
        self.f, self.isa = f, isa
        self.at = {
            name: f.load("i64", f.gep(f.args["dims"], k, "i64"), invariant=True) for k, name in enumerate(_NAMES)
        }
        self.lanes = isa.lanes(4)
        dot = dot_of(isa)
        # codes of the state and their zero point, moved alike where the product wants signed ones
        self.moved = dot.moves if dot.turns(DType.uint8) else 0
        self.control = f.stack("i64", SLOTS)
        self.codes = f.args["scratch"]
        self.sums, self.totals = (f.gep(self.codes, self.at[name]) for name in ("sums_at", "totals_at"))

    def buf(self, k: int) -> Val:
        return self.f.load("ptr", self.f.gep(self.f.args["bufs"], k, "ptr"), invariant=True)

    def emit(self) -> None:
        f, at = self.f, self.at
        for slot, value in (
            (Slot.K, at["k"]),
            (Slot.A_STEP, at["row_bytes"]),
            (Slot.OUT_STEP, at["sums_row"]),
            (Slot.PARTIAL, f.zero("ptr")),
            (Slot.COLUMNS, f.i64(self.lanes)),
        ):
            write_slot(f, self.control, slot, value)
        size = at["batch"] * at["hidden"]
        with f.loop(f.args["begin"], f.args["end"]) as tile:
            round_ = f.div(tile, at["directions"], signed=False)
            d = tile - round_ * at["directions"]
            first = round_ * at["span"]
            past = f.min_(first + at["span"], at["steps"])
            self.h = f.gep(self.buf(_STATE), d * size * 2, "float")
            self.c = f.gep(self.h, size, "float")
            with f.if_(f.cmp("eq", first, 0)):
                self.copy(f.gep(self.buf(_H0), d * size, "float"), self.h, size)
                self.copy(f.gep(self.buf(_C0), d * size, "float"), self.c, size)
            backwards = f.cmp("ne", f.or_(at["reverse"], d), 0)
            with f.loop(first, past) as step:
                t = f.select(backwards, at["steps"] - 1 - step, step)
                scale, zero = self.range(size)
                self.quantize(scale, zero)
                self.multiply(d)
                self.gates(d, t, scale, zero)
            with f.if_(f.cmp("eq", past, at["steps"])):
                self.copy(self.h, f.gep(self.buf(_YH), d * size, "float"), size)
                self.copy(self.c, f.gep(self.buf(_YC), d * size, "float"), size)
        f.ret()

    def pieces(self, count: Val, body: Callable[[Val, int], None]) -> None:
        """Whole vectors, then one by one."""
        f = self.f
        whole = f.and_(count, -self.lanes)
        with f.loop(0, whole, self.lanes) as k:
            body(k, self.lanes)
        with f.loop(whole, count) as k:
            body(k, 1)

    def copy(self, source: Val, target: Val, count: Val) -> None:
        f = self.f

        def piece(k: Val, lanes: int) -> None:
            f.store(f.load(vector("float", lanes), f.gep(source, k, "float")), f.gep(target, k, "float"))

        self.pieces(count, piece)

    def range(self, size: Val) -> tuple[Val, Val]:
        """Scale and zero point (a whole number) of the state; NaN is passed over."""
        f = self.f
        kind = vector("float", self.lanes)
        ends = [(f.var(kind, f.const(kind, 0.0)), f.var("float", 0.0)) for _ in range(2)]

        def piece(k: Val, lanes: int) -> None:
            x = f.load(vector("float", lanes), f.gep(self.h, k, "float"))
            for pair, pick in zip(ends, (f.quick_min, f.quick_max)):
                found = pair[0] if lanes > 1 else pair[1]
                found.set(pick(x, found.get()))

        self.pieces(size, piece)
        low = f.quick_min(f.reduce("fmin", ends[0][0].get()), ends[0][1].get())
        high = f.quick_max(f.reduce("fmax", ends[1][0].get()), ends[1][1].get())
        step = f.select(f.cmp("ogt", high, low), f.div(high - low, 255.0), f.const("float", 1.0))
        zero = vmath.rint(f, f.div(f.neg(low), step), self.isa)
        return step, f.quick_min(f.quick_max(zero, 0.0), 255.0)

    def quantize(self, scale: Val, zero: Val) -> None:
        f, at = self.f, self.at
        element = "i16" if dot_of(self.isa) is WORDS else "i8"
        with f.loop(0, at["batch"]) as r:
            source = f.gep(self.h, r * at["hidden"], "float")
            target = f.gep(self.codes, r * at["row_bytes"])
            wide, rest = f.var(vector("i32", self.lanes), 0), f.var("i32", 0)

            def piece(k: Val, lanes: int) -> None:
                x = f.load(vector("float", lanes), f.gep(source, k, "float"))
                code = vmath.rint(f, f.div(x, f.splat(scale, lanes)), self.isa) + f.splat(zero, lanes)
                # the bound stands second: it is what comes out where x is NaN
                whole = f.cast(f.quick_min(f.quick_max(code, 0.0), 255.0), "i32")
                whole = whole + self.moved if self.moved else whole
                f.store(f.cast(whole, element), f.gep(target, k, element))
                total = wide if lanes > 1 else rest
                total.set(total.get() + whole)

            self.pieces(at["hidden"], piece)
            f.store(f.reduce("add", wide.get()) + rest.get(), f.gep(self.totals, r, "i32"))

    def multiply(self, d: Val) -> None:
        f, at = self.f, self.at
        weights = f.gep(self.buf(_WEIGHTS), d * at["entry"])
        with f.loop(0, at["panels"]) as p:
            is_wide = f.cmp("slt", p, at["wide_panels"])
            column = p * at["wide"] - f.max_(p - at["wide_panels"], 0) * self.isa.vector_bytes
            micro = f.select(is_wide, self.buf(_WIDE), self.buf(_NARROW))
            panel = f.gep(weights, f.ashr(column * at["k"], dot_of(self.isa).narrower))
            with f.loop(0, at["batch"], at["rows"]) as r:
                write_slot(f, self.control, Slot.OUT, f.gep(self.sums, r * at["sums_row"] + column))
                f.call_pointer(micro, "void", [f.gep(self.codes, r * at["row_bytes"]), panel, self.control])

    def gates(self, d: Val, t: Val, scale: Val, zero: Val) -> None:
        f, at, isa = self.f, self.at, self.isa
        hidden, columns = at["hidden"], at["hidden"] * 4
        shift = f.cast(zero, "i32") + self.moved if self.moved else f.cast(zero, "i32")
        per = [f.gep(self.buf(k), d * columns, "i32") for k in (_SUMS, _ZERO, _SCALE)]
        with f.loop(0, at["batch"]) as r:
            row = (d * at["steps"] + t) * at["batch"] + r
            inputs = f.gep(self.buf(_INPUTS), row * columns, "float")
            sums = f.gep(self.sums, r * at["sums_row"])
            total = f.load("i32", f.gep(self.totals, r, "i32"))
            y = f.gep(self.buf(_Y), ((t * at["directions"] + d) * at["batch"] + r) * hidden, "float")
            state, memory = (f.gep(place, r * hidden, "float") for place in (self.h, self.c))

            def piece(k: Val, lanes: int) -> None:
                whole, real = vector("i32", lanes), vector("float", lanes)

                def gate(number: int) -> Val:
                    place = hidden * number + k
                    raw = f.load(whole, f.gep(sums, place, "i32"))
                    by_column, zeros = (f.load(whole, f.gep(p, place, "i32")) for p in per[:2])
                    exact = raw - f.splat(shift, lanes) * by_column - zeros * f.splat(total, lanes)
                    factor = f.splat(scale, lanes) * f.load(real, f.gep(per[2], place, "float"))
                    return f.load(real, f.gep(inputs, place, "float")) + f.cast(exact, "float") * factor

                opened, out, kept = (vmath.sigmoid(f, gate(n), isa) for n in range(3))
                fresh = vmath.tanh(f, gate(3), isa)
                following = kept * f.load(real, f.gep(memory, k, "float")) + opened * fresh
                result = out * vmath.tanh(f, following, isa)
                f.store(following, f.gep(memory, k, "float"))
                f.store(result, f.gep(state, k, "float"))
                f.store(result, f.gep(y, k, "float"))

            self.pieces(hidden, piece)
