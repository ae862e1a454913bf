"""The way back through the steps of an LSTM as one kernel: slopes of the gates' sums, out of kept gates and cells.

As in the time loop of the layer itself (``steps.py``), a launch is a row of *moments*, a *group* is one direction of
some sequences, and the recurrent weights stream through the caches panel by panel. Each moment takes the slopes of the
step after it times the weights, which is the gradient of a panel of hidden states, and turns it into slopes while it is
still near. The first moment begins with what is given for the last state, and the last one ends with the first states.
"""

from __future__ import annotations

from functools import partial

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import call_product
from ranvier.codegen.llvm.builder import Module, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.recurrent.steps import in_vectors

BUFFERS = (
    *("weights", "holes", "gates", "cells", "first_memory", "grad_y", "grad_hidden", "grad_memory"),
    *("slopes", "to_hidden", "to_memory", "state", "product", "last_product"),
)
DIMS = (
    *("steps", "hidden", "padded", "panels", "unit_vectors", "row_block"),
    *("groups", "parts", "part_panels", "span", "batch", "batch_tiles", "tile_rows", "backwards"),
    *("direction", "step", "weight_direction"),
    *("has_first_memory", "has_grad_y", "has_grad_hidden", "has_grad_memory", "has_to_hidden", "has_to_memory"),
)
GATES = 4


def spec(element: str, peepholes: bool) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Slopes(module, symbol, isa, element, peepholes).emit()

    return KernelSpec(f"lstm slopes {element}", ("lstm slopes", 1, element, peepholes), emit)


class _Slopes:
    def __init__(self, module: Module, symbol: str, isa: Isa, element: str, peepholes: bool) -> None:
        self.frame = frame = Frame(module, symbol, isa, element, BUFFERS, DIMS)
        self.f, self.isa, self.lanes, self.peepholes = frame.f, isa, frame.lanes, peepholes

    def emit(self) -> None:
        frame, f = self.frame, self.f
        with f.loop(frame.begin, frame.end) as tile:
            each = frame["groups"] * frame["parts"]
            round_ = f.div(tile, each, signed=False)
            place = tile - round_ * each
            group = f.div(place, frame["parts"], signed=False)
            self.way = f.div(group, frame["batch_tiles"], signed=False)
            self.first = (group - self.way * frame["batch_tiles"]) * frame["tile_rows"]
            self.rows = f.min_(frame["batch"] - self.first, frame["tile_rows"])
            self.back = f.cmp("ne", f.and_(f.lshr(frame["backwards"], self.way), 1), 0)
            self.inner = frame.at(frame.buffer("state"), (group, frame["tile_rows"] * frame["padded"]))
            panel = (place - group * frame["parts"]) * frame["part_panels"]
            past = f.min_(panel + frame["part_panels"], frame["panels"])
            start = round_ * frame["span"]
            with f.loop(start, f.min_(start + frame["span"], frame["steps"] + 1)) as moment, f.loop(panel, past) as p:
                self._panel(moment, p)
        f.ret()

    def _position(self, k: Val) -> Val:
        """Where the k-th step that the layer took stands."""
        return self.f.select(self.back, self.frame["steps"] - 1 - k, k)

    def _row(self, r: Val) -> Val:
        """The first unit of a sequence in a tensor ``[directions, batch, hidden]``."""
        return self.way * self.frame["direction"] + (self.first + r) * self.frame["hidden"]

    def _panel(self, moment: Val, p: Val) -> None:
        frame, f = self.frame, self.f
        k = frame["steps"] - 1 - moment  # the step whose slopes are made; -1 at the end
        width = frame["unit_vectors"] * self.lanes
        with f.if_(f.cmp("sgt", moment, 0)):
            self._product(self._position(k + 1) * frame["step"], p, width)
        with f.loop(0, self.rows) as r, f.loop(0, frame["unit_vectors"]) as v:
            unit = p * width + v * self.lanes
            sums = frame.at(frame.scratch, (r, width), (v, self.lanes))
            inner = frame.at(self.inner, (r, frame["padded"]), (unit, 1))
            own = self._row(r)
            left = frame["hidden"] - unit

            vector = partial(self._vector, k, moment, own, unit, sums, inner)
            # units past the last are there only to fill up a panel
            with f.if_(f.cmp("sgt", left, 0)):
                in_vectors(f, self.isa, self.lanes, left, vector)

    def _product(self, later: Val, p: Val, width: Val) -> None:
        """Slopes of the step at ``later`` times a panel of weights, into scratch."""
        frame, f = self.frame, self.f
        depth = frame["hidden"] * GATES
        weights = frame.at(frame.buffer("weights"), (self.way, frame["weight_direction"]), (p, width * depth))
        whole = self.rows - f.rem(self.rows, frame["row_block"], signed=False)

        def product(r: Val, code: str) -> None:
            a = frame.at(frame.buffer("slopes"), (later + self._row(r), GATES))
            c = frame.at(frame.scratch, (r, width))
            call_product(f, frame.buffer(code), a, depth, weights, width, depth, c, width)

        with f.loop(0, whole, frame["row_block"]) as r:
            product(r, "product")
        with f.if_(f.cmp("slt", whole, self.rows)):
            product(whole, "last_product")

    def _vector(self, k: Val, moment: Val, own: Val, unit: Val, sums: Val, inner: Val, mask: Val | None) -> None:
        """One vector of units of one sequence: ``own`` is where its units begin in a tensor of states."""
        frame, f = self.frame, self.f
        begins = f.cmp("eq", moment, 0)

        def load(place: Val) -> Val:
            return f.load(frame.kind, place) if mask is None else f.masked_load(frame.kind, place, mask)

        def store(value: Val, place: Val) -> None:
            if mask is None:
                f.store(value, place)
            else:
                f.masked_store(value, place, mask)

        def given(name: str, place: Val, when: Val | None = None) -> Val:
            """An operand's vector; zeros where it is absent or the condition does not hold."""
            found = f.var(frame.kind, 0.0)
            there = f.cmp("ne", frame[f"has_{name}"], 0)
            with f.if_(there if when is None else f.and_(there, when)):
                found.set(load(frame.at(frame.buffer(name), (place, 1))))
            return found.get()

        state = own + unit
        hidden, memory = f.var(frame.kind), f.var(frame.kind)
        with f.if_else(begins) as otherwise:
            hidden.set(given("grad_hidden", state))
            memory.set(given("grad_memory", state))
            otherwise()
            hidden.set(f.load(frame.kind, sums))
            memory.set(f.load(frame.kind, inner))
        with f.if_else(f.cmp("slt", k, 0)) as otherwise:
            for name, value in (("to_hidden", hidden.get()), ("to_memory", memory.get())):
                with f.if_(f.cmp("ne", frame[f"has_{name}"], 0)):
                    store(value, frame.at(frame.buffer(name), (state, 1)))
            otherwise()
            now = self._position(k) * frame["step"]
            kept = frame.at(frame.buffer("gates"), (now + own, GATES), (unit, 1))
            into, out, forget, candidate = (load(frame.at(kept, (frame["hidden"], g))) for g in range(GATES))
            bent = vmath.tanh(f, load(frame.at(frame.buffer("cells"), (now + state, 1))), self.isa)
            some = f.cmp("sgt", k, 0)
            before = f.var(frame.kind)
            with f.if_else(some) as first:
                earlier = self._position(k - 1) * frame["step"]
                before.set(load(frame.at(frame.buffer("cells"), (earlier + state, 1))))
                first()
                before.set(given("first_memory", state))
            one = f.const(frame.kind, 1.0)

            def rising(gate: Val) -> Val:
                return gate * f.sub(one, gate)

            arrived = hidden.get() + given("grad_y", now + state)
            to_out = arrived * bent * rising(out)
            slope = memory.get() + arrived * out * f.sub(one, bent * bent)
            holes = [frame.at(frame.buffer("holes"), (frame["padded"], self.way * 3 + n), (unit, 1)) for n in range(3)]
            if self.peepholes:
                slope = f.fma(to_out, f.load(frame.kind, holes[1]), slope)
            to_into = slope * candidate * rising(into)
            to_forget = slope * before.get() * rising(forget)
            to_candidate = slope * into * f.sub(one, candidate * candidate)
            following = slope * forget
            if self.peepholes:
                following = f.fma(to_into, f.load(frame.kind, holes[0]), following)
                following = f.fma(to_forget, f.load(frame.kind, holes[2]), following)
            f.store(following, inner)
            target = frame.at(frame.buffer("slopes"), (now + own, GATES), (unit, 1))
            for g, value in enumerate((to_into, to_out, to_forget, to_candidate)):
                store(value, frame.at(target, (frame["hidden"], g)))
