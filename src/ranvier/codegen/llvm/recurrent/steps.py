"""The time loop of a recurrent layer as one kernel.

A tile is one direction of some sequences; everything a step needs (the state, the products of one panel of units)
lies in scratch, and the recurrent weights stream through the caches panel by panel. Within a panel the gates of a
unit stand together, so a unit is finished before the next panel is read.
"""

from __future__ import annotations

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import call_product
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent.cells import Cell, Units, emit_units

BUFFERS = (
    *("inputs", "weights", "extra", "lengths", "first_hidden", "first_memory", "y", "y_hidden", "y_memory"),
    *("product_0", "last_product_0", "product_1", "last_product_1"),
)
DIMS = (
    *("steps", "hidden", "padded", "panels", "unit_vectors", "row_block"),
    *("batch", "batch_tiles", "tile_rows", "first_direction", "backwards"),
    *("input_step", "input_row", "input_direction", "weight_direction", "weight_phase", "extra_direction"),
    *("has_first_hidden", "has_first_memory", "has_y", "has_y_hidden", "has_y_memory"),
    *("first_hidden_direction", "first_hidden_row", "first_memory_direction", "first_memory_row"),
    *("y_step", "y_direction", "y_row", "y_hidden_direction", "y_hidden_row", "y_memory_direction", "y_memory_row"),
)
STATES = 4  # hidden state now and next, memory, and what the reset gate left


def spec(cell: Cell) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Steps(module, symbol, isa, cell).emit()

    return KernelSpec(f"{cell.kind.lower()} {cell.element}", ("recurrent", *cell.key), emit)


class _Steps:
    def __init__(self, module: Module, symbol: str, isa: Isa, cell: Cell) -> None:
        self.frame = frame = Frame(module, symbol, isa, cell.element, BUFFERS, DIMS)
        self.f, self.cell, self.isa, self.lanes = frame.f, cell, isa, frame.lanes

    def emit(self) -> None:
        frame, f = self.frame, self.f
        with f.loop(frame.begin, frame.end) as tile:
            direction = f.div(tile, frame["batch_tiles"], signed=False)
            self.first = (tile - direction * frame["batch_tiles"]) * frame["tile_rows"]
            self.rows = f.min_(frame["batch"] - self.first, frame["tile_rows"])
            self.direction = direction + frame["first_direction"]
            self.backwards = f.cmp("ne", f.and_(f.lshr(frame["backwards"], self.direction), 1), 0)
            area = frame["tile_rows"] * frame["padded"]
            hidden, following, self.memory, self.reset = (
                frame.at(frame.scratch, (area, k)) if k else frame.scratch for k in range(STATES)
            )
            self.products = frame.at(frame.scratch, (area, STATES))
            self.inputs = frame.at(frame.buffer("inputs"), (self.direction, frame["input_direction"]))
            self.weights = frame.at(frame.buffer("weights"), (self.direction, frame["weight_direction"]))
            self.extra = frame.at(frame.buffer("extra"), (self.direction, frame["extra_direction"]))
            self.now, self.next = f.var("ptr", hidden), f.var("ptr", following)
            self._begin("first_hidden", hidden)
            self._begin("first_memory", self.memory)
            longest = f.var("i64", 0)
            with f.loop(0, self.rows) as r:
                longest.set(f.max_(longest.get(), self._length(r)))
            with f.loop(0, longest.get()) as t:
                self._step(t)
            self._finish("y_hidden", self.now.get())
            self._finish("y_memory", self.memory)
            if self.cell.lengths:
                self._pad(f.zero(frame.kind))
        f.ret()

    def _length(self, r: Val) -> Val:
        """Steps of a sequence."""
        if not self.cell.lengths:
            return self.frame["steps"]
        place = self.f.gep(self.frame.buffer("lengths"), self.first + r, "i32")
        found = self.f.cast(self.f.load("i32", place), "i64")
        return self.f.max_(self.f.min_(found, self.frame["steps"]), 0)

    def _state_row(self, name: str, r: Val) -> Val:
        """A row of a state outside: ``[direction, batch, hidden]`` by strides."""
        frame = self.frame
        return frame.at(
            frame.buffer(name),
            (self.direction, frame[f"{name}_direction"]),
            (self.first + r, frame[f"{name}_row"]),
        )

    def _begin(self, name: str, target: Val) -> None:
        """An initial state, zeros where there is none and past the last unit."""
        frame, f = self.frame, self.f
        with f.loop(0, self.rows * frame["padded"], self.lanes) as j:
            f.store(f.zero(frame.kind), frame.at(target, (j, 1)))
        with f.if_(f.cmp("ne", frame[f"has_{name}"], 0)), f.loop(0, self.rows) as r:
            self._copy(self._state_row(name, r), frame.at(target, (r, frame["padded"])), None)

    def _finish(self, name: str, source: Val) -> None:
        """The last state of every sequence; one without steps has none, and yields zeros."""
        frame, f = self.frame, self.f
        with f.if_(f.cmp("ne", frame[f"has_{name}"], 0)), f.loop(0, self.rows) as r:
            some = f.cmp("sgt", self._length(r), 0) if self.cell.lengths else None
            self._copy(frame.at(source, (r, frame["padded"])), self._state_row(name, r), some)

    def _copy(self, source: Val, target: Val, where: Val | None) -> None:
        """One row of hidden units; zeros instead of it where the condition does not hold."""
        frame, f, lanes = self.frame, self.f, self.lanes
        whole = f.and_(frame["hidden"], -lanes)

        def chosen(x: Val) -> Val:
            return x if where is None else f.select(f.splat(where, lanes), x, f.zero(frame.kind))

        with f.loop(0, whole, lanes) as j:
            f.store(chosen(f.load(frame.kind, frame.at(source, (j, 1)))), frame.at(target, (j, 1)))
        with f.if_(f.cmp("slt", whole, frame["hidden"])):
            mask = f.mask_below(lanes, frame["hidden"] - whole)
            part = chosen(f.masked_load(frame.kind, frame.at(source, (whole, 1)), mask))
            f.masked_store(part, frame.at(target, (whole, 1)), mask)

    def _position(self, r: Val, t: Val) -> Val:
        """The step a sequence reads and writes at time ``t``; some valid one after its end."""
        f = self.f
        back = f.max_(self._length(r) - 1 - t, 0) if self.cell.lengths else self.frame["steps"] - 1 - t
        return f.select(self.backwards, back, t)

    def _step(self, t: Val) -> None:
        frame, f = self.frame, self.f
        for phase in range(len(self.cell.phases)):
            with f.loop(0, frame["panels"]) as p:
                self._panel(phase, t, p)
        now, following = self.now.get(), self.next.get()
        self.now.set(following)
        self.next.set(now)
        with f.if_(f.cmp("ne", frame["has_y"], 0)), f.loop(0, self.rows) as r:
            target = self._y_row(r, self._position(r, t))
            source = frame.at(following, (r, frame["padded"]))
            if not self.cell.lengths:
                self._copy(source, target, None)
            else:
                with f.if_(f.cmp("slt", t, self._length(r))):
                    self._copy(source, target, None)

    def _y_row(self, r: Val, step: Val) -> Val:
        frame = self.frame
        y = frame.at(frame.buffer("y"), (self.direction, frame["y_direction"]), (step, frame["y_step"]))
        return frame.at(y, (self.first + r, frame["y_row"]))

    def _pad(self, nothing: Val) -> None:
        """Outputs of steps after a sequence's end are zero."""
        frame, f, lanes = self.frame, self.f, self.lanes
        with f.if_(f.cmp("ne", frame["has_y"], 0)), f.loop(0, self.rows) as r:
            length = self._length(r)
            with f.loop(length, frame["steps"]) as t, f.loop(0, frame["hidden"], lanes) as j:
                mask = f.mask_below(lanes, frame["hidden"] - j)
                f.masked_store(nothing, frame.at(self._y_row(r, t), (j, 1)), mask)

    def _panel(self, phase: int, t: Val, p: Val) -> None:
        """Products of all sequences with one panel of units, then their gates."""
        frame, f, lanes = self.frame, self.f, self.lanes
        gates = len(self.cell.phases[phase])
        vectors = frame["unit_vectors"]
        width = vectors * (gates * lanes)
        before = f.i64(0) if phase == 0 else frame["padded"] * len(self.cell.phases[0])
        weights = frame.at(self.weights, (frame["weight_phase"], phase)) if phase else self.weights
        weights = frame.at(weights, (p, width * frame["hidden"]))
        state = self.now.get() if phase == 0 else self.reset
        block = frame["row_block"]
        whole = self.rows - f.rem(self.rows, block, signed=False)

        def product(r: Val, code: str) -> None:
            a = frame.at(state, (r, frame["padded"]))
            c = frame.at(self.products, (r, width))
            call_product(f, frame.buffer(code), a, frame["padded"], weights, width, frame["hidden"], c, width)

        with f.loop(0, whole, block) as r:
            product(r, f"product_{phase}")
        with f.if_(f.cmp("slt", whole, self.rows)):
            product(whole, f"last_product_{phase}")
        with f.loop(0, self.rows) as r:
            row = self.first + r
            step = self._position(r, t)
            inputs = frame.at(self.inputs, (step, frame["input_step"]), (row, frame["input_row"]))
            inputs = frame.at(inputs, (before, 1), (p, width))
            running = f.splat(f.cmp("slt", t, self._length(r)), lanes) if self.cell.lengths else None
            with f.loop(0, vectors) as v:
                within = v * (gates * lanes)
                unit = (p * vectors + v) * lanes
                own = r * frame["padded"] + unit
                sums = frame.at(self.products, (r, width), (within, 1))
                given = frame.at(inputs, (within, 1))

                def gate(base: Val, g: int) -> Val:
                    return f.load(frame.kind, frame.at(base, (f.i64(g * lanes), 1)))

                states = (self.now.get(), self.next.get(), self.memory, self.reset)
                hidden, following, memory, reset = (frame.at(x, (own, 1)) for x in states)
                units = Units(
                    sums=[gate(sums, g) for g in range(gates)],
                    inputs=[gate(given, g) for g in range(gates)],
                    hidden=hidden,
                    following=following,
                    memory=memory,
                    reset=reset,
                    extra=[frame.at(self.extra, (frame["padded"], k), (unit, 1)) for k in range(3)],
                    running=running,
                )
                emit_units(self.cell, phase, f, units, self.isa)
