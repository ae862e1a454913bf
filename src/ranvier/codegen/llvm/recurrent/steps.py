"""The time loop of a recurrent layer as one kernel.

The loop is a row of *moments*: the first fetches the initial state, the last hands out the final one, and those
between are the phases of all steps in order. A *group* is one direction of some sequences, and owns a state. Within it
the recurrent weights stream through the caches panel by panel; in a panel the gates of a unit stand together, so a unit
is finished before the next panel is read.

A moment needs all units of the one before, so threads may share the panels of a moment but not go ahead: such a launch
has a round per moment, and its tiles are the panels. Where groups are enough for all threads, or steps too short to
share, a tile is a whole group, and a round lasts many moments, only so that a run can be aborted in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import call_product
from ranvier.codegen.llvm.builder import Fn, Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent.cells import Cell, Units, emit_units

BUFFERS = (
    *("inputs", "weights", "extra", "lengths", "first_hidden", "first_memory", "y", "y_hidden", "y_memory"),
    *("state", "product_0", "last_product_0", "product_1", "last_product_1", "gates", "cells"),
)
DIMS = (
    *("steps", "hidden", "padded", "panels", "unit_vectors", "row_block"),
    *("groups", "parts", "part_panels", "moments", "span", "turns"),
    *("batch", "batch_tiles", "tile_rows", "first_direction", "backwards"),
    *("input_step", "input_row", "input_direction", "weight_direction", "weight_phase", "extra_direction"),
    *("has_first_hidden", "has_first_memory", "has_y", "has_y_hidden", "has_y_memory"),
    *("first_hidden_direction", "first_hidden_row", "first_memory_direction", "first_memory_row"),
    *("y_step", "y_direction", "y_row", "y_hidden_direction", "y_hidden_row", "y_memory_direction", "y_memory_row"),
    *("kept_step", "kept_direction"),
)
STATES = 4  # hidden state now and next, memory, and what the reset gate left


def spec(cell: Cell) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Steps(module, symbol, isa, cell).emit()

    return KernelSpec(f"{cell.kind.lower()} {cell.element}", ("recurrent", 4, *cell.key), emit)


def in_vectors(f: Fn, isa: Isa, lanes: int, left: Val, emit: Callable[[Val | None], None]) -> None:
    """Code for one vector where so many units are left: with a mask where masks cost nothing, else only at the end."""
    if isa.masks:
        emit(f.mask_below(lanes, left))
        return
    with f.if_else(f.cmp("sge", left, lanes)) as otherwise:
        emit(None)
        otherwise()
        emit(f.mask_below(lanes, left))


class _Steps:
    def __init__(self, module: Module, symbol: str, isa: Isa, cell: Cell) -> None:
        self.frame = frame = Frame(module, symbol, isa, cell.element, BUFFERS, DIMS)
        self.f, self.cell, self.isa, self.lanes = frame.f, cell, isa, frame.lanes

    def emit(self) -> None:
        frame, f = self.frame, self.f
        with f.loop(frame.begin, frame.end) as tile:
            round_ = f.div(tile, frame["groups"] * frame["parts"], signed=False)
            place = tile - round_ * (frame["groups"] * frame["parts"])
            group = f.div(place, frame["parts"], signed=False)
            self._group(group)
            self.panel = (place - group * frame["parts"]) * frame["part_panels"]
            self.past_panel = f.min_(self.panel + frame["part_panels"], frame["panels"])
            wide = frame["unit_vectors"] * self.lanes
            self.unit, self.past_unit = self.panel * wide, self.past_panel * wide
            self.longest = f.var("i64", 0)
            with f.loop(0, self.rows) as r:
                self.longest.set(f.max_(self.longest.get(), self._length(r)))
            start = round_ * frame["span"]
            with f.loop(start, f.min_(start + frame["span"], frame["moments"])) as moment:
                self._moment(moment)
        f.ret()

    def _group(self, group: Val) -> None:
        frame, f = self.frame, self.f
        direction = f.div(group, frame["batch_tiles"], signed=False)
        self.first = (group - direction * frame["batch_tiles"]) * frame["tile_rows"]
        self.rows = f.min_(frame["batch"] - self.first, frame["tile_rows"])
        self.direction = direction + frame["first_direction"]
        self.backwards = f.cmp("ne", f.and_(f.lshr(frame["backwards"], self.direction), 1), 0)
        area = frame["tile_rows"] * frame["padded"]
        own = frame.at(frame.buffer("state"), (group, area * STATES))
        self.hidden = [own, frame.at(own, (area, 1))]
        self.memory, self.reset = frame.at(own, (area, 2)), frame.at(own, (area, 3))
        self.products = frame.scratch
        self.inputs = frame.at(frame.buffer("inputs"), (self.direction, frame["input_direction"]))
        self.weights = frame.at(frame.buffer("weights"), (self.direction, frame["weight_direction"]))
        self.extra = frame.at(frame.buffer("extra"), (self.direction, frame["extra_direction"]))

    def _moment(self, moment: Val) -> None:
        frame, f = self.frame, self.f
        with f.if_(f.cmp("eq", moment, 0)):
            self._begin("first_hidden", self.hidden[0])
            self._begin("first_memory", self.memory)
        with f.if_(f.cmp("eq", moment, frame["moments"] - 1)):
            self._finish("y_hidden", self._state_at(self.longest.get()))
            self._finish("y_memory", self.memory)
            if self.cell.lengths:
                self._pad(f.zero(frame.kind))
        phases = len(self.cell.phases)
        t = f.div(moment - 1, phases)
        with f.if_(f.and_(f.cmp("sgt", moment, 0), f.cmp("slt", t, self.longest.get()))):
            for phase in range(phases):
                if phases == 1:
                    self._phase(phase, t)
                else:
                    with f.if_(f.cmp("eq", moment - 1 - t * phases, phase)):
                        self._phase(phase, t)

    def _state_at(self, t: Val) -> Val:
        """The hidden state before step ``t``."""
        return self.f.select(self.f.cmp("eq", self.f.and_(t, 1), 0), *self.hidden)

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
        with f.loop(0, self.rows) as r, f.loop(self.unit, self.past_unit, self.lanes) as j:
            f.store(f.zero(frame.kind), frame.at(target, (r, frame["padded"]), (j, 1)))
        with f.if_(f.cmp("ne", frame[f"has_{name}"], 0)), f.loop(0, self.rows) as r:
            self._copy(self._state_row(name, r), frame.at(target, (r, frame["padded"])), None)

    def _finish(self, name: str, source: Val) -> None:
        """The last state of every sequence; one without steps has none, and yields zeros."""
        frame, f = self.frame, self.f
        with f.if_(f.cmp("ne", frame[f"has_{name}"], 0)), f.loop(0, self.rows) as r:
            some = f.cmp("sgt", self._length(r), 0) if self.cell.lengths else None
            self._copy(frame.at(source, (r, frame["padded"])), self._state_row(name, r), some)

    def _copy(self, source: Val, target: Val, where: Val | None) -> None:
        """One row of this tile's units; zeros instead of it where the condition does not hold."""
        frame, f, lanes = self.frame, self.f, self.lanes
        end = f.min_(self.past_unit, frame["hidden"])
        whole = f.and_(end, -lanes)  # tiles begin with whole vectors

        def chosen(x: Val) -> Val:
            return x if where is None else f.select(f.splat(where, lanes), x, f.zero(frame.kind))

        with f.loop(self.unit, whole, lanes) as j:
            f.store(chosen(f.load(frame.kind, frame.at(source, (j, 1)))), frame.at(target, (j, 1)))
        with f.if_(f.cmp("slt", whole, end)):
            mask = f.mask_below(lanes, end - whole)
            part = chosen(f.masked_load(frame.kind, frame.at(source, (whole, 1)), mask))
            f.masked_store(part, frame.at(target, (whole, 1)), mask)

    def _position(self, r: Val, t: Val) -> Val:
        """The step a sequence reads and writes at time ``t``; some valid one after its end."""
        f = self.f
        back = f.max_(self._length(r) - 1 - t, 0) if self.cell.lengths else self.frame["steps"] - 1 - t
        return f.select(self.backwards, back, t)

    def _phase(self, phase: int, t: Val) -> None:
        frame, f = self.frame, self.f
        self.now, self.next = self._state_at(t), self._state_at(t + 1)
        # every second step goes back over the weights: what the step before read last is still near
        back = f.cmp("ne", f.and_(t, frame["turns"]), 0)
        with f.loop(self.panel, self.past_panel) as k:
            self._panel(phase, t, f.select(back, self.panel + self.past_panel - 1 - k, k))
        if phase < len(self.cell.phases) - 1:
            return
        with f.if_(f.cmp("ne", frame["has_y"], 0)), f.loop(0, self.rows) as r:
            target = self._y_row(r, self._position(r, t))
            source = frame.at(self.next, (r, frame["padded"]))
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
            end = f.min_(self.past_unit, frame["hidden"])
            with f.loop(length, frame["steps"]) as t, f.loop(self.unit, end, lanes) as j:
                mask = f.mask_below(lanes, end - j)
                f.masked_store(nothing, frame.at(self._y_row(r, t), (j, 1)), mask)

    def _panel(self, phase: int, t: Val, p: Val) -> None:
        """Products of all sequences with one panel of units, then their gates."""
        frame, f, lanes = self.frame, self.f, self.lanes
        gates = len(self.cell.phases[phase])
        vectors = frame["unit_vectors"]
        width = vectors * (gates * lanes)
        before = f.i64(0) if phase == 0 else frame["padded"] * len(self.cell.phases[0])
        weights = frame.at(self.weights, (frame["weight_phase"], phase)) if phase else self.weights
        row = f.lshr(width, 1) if self.cell.paired else width
        weights = frame.at(weights, (p, row * frame["hidden"]))
        state = self.now if phase == 0 else self.reset
        block = frame["row_block"]
        whole = self.rows - f.rem(self.rows, block, signed=False)

        def product(r: Val, code: str) -> None:
            a = frame.at(state, (r, frame["padded"]))
            c = frame.at(self.products, (r, width))
            call_product(f, frame.buffer(code), a, frame["padded"], weights, row, frame["hidden"], c, width)

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

                states = (self.now, self.next, self.memory, self.reset)
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
                    keep=partial(self._keep, step, row, unit) if self.cell.kept else None,
                )
                emit_units(self.cell, phase, f, units, self.isa)

    def _keep(self, step: Val, row: Val, unit: Val, gates: Sequence[Val], cell: Val) -> None:
        """Gates and cells of one vector of units to where they stand outside: ``[step, direction, batch, …]``."""
        frame, f = self.frame, self.f
        hidden = frame["hidden"]
        place = step * frame["kept_step"] + self.direction * frame["kept_direction"] + row * hidden
        cells = frame.at(frame.buffer("cells"), (place + unit, 1))
        # of each gate as many as there are cells
        gates_row = frame.at(frame.buffer("gates"), (place, len(gates)), (unit, 1))
        places = [*(frame.at(gates_row, (hidden, g)) for g in range(len(gates))), cells]

        def store(mask: Val | None) -> None:
            for value, place in zip((*gates, cell), places):
                if mask is None:
                    f.store(value, place)
                else:
                    f.masked_store(value, place, mask)

        in_vectors(f, self.isa, self.lanes, hidden - unit, store)
