"""The kernel of a fast Fourier transform: Stockham's passes over vectors of signals.

A tile is as many signals as a vector has lanes, each lane a signal, so that no pass shuffles anything and no signal
meets another one's rounding. They are brought into scratch memory (windowed, padded with zeros), where a point is a
vector of real parts and one of imaginary parts, and all passes go back and forth between two such blocks::

    target[q + s*(r*p + k)] = w(n)^(p*k) * sum over j < r of  w(r)^(j*k) * source[q + s*(p + j*n/r)]

for p < n/r and q < s, after which n is n/r and s is s*r. Results come out in order.

All of it is computed in float64, whatever the signals are, unless less is asked for: a pass rounds by the loudest point
that it meets, and in float32 the soft bins of a spectrum would drown in that, more than in the sums of a product.

Two real points are taken for one complex point, which halves the length, and the spectrum of that is unfolded into the
one that was meant; the way back, from half a spectrum to a real signal, folds it first. An inverse transform is a
forward one with real and imaginary parts exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm.attention.frame import Frame
from ranvier.codegen.llvm.attention.micro import transposed
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.builder.memory import Var
from ranvier.codegen.llvm.elements import memory_type, register_type, to_memory
from ranvier.codegen.llvm.fourier.butterflies import Point, butterfly, plus, turned
from ranvier.codegen.llvm.isa import Isa
from ranvier.dtypes import DType
from ranvier.records import dataclass

Turn = tuple[Val, Val]  # cosine and sine
Work = Literal["float", "double"]  # what is computed with
# complex: to as many complex points; halved: from twice as many real points; folded: to twice as many real points
Kind = Literal["complex", "halved", "folded"]


@dataclass(frozen=True)
class Form:
    """What the code of a kernel depends on."""

    element: str
    stored: DType  # what results are kept as
    work: Work
    lanes: int  # signals of a tile
    kind: Kind
    inverse: bool
    parts: int  # numbers per point that come in
    made: int  # and go out
    windowed: bool
    flat_window: bool  # its weights meet numbers that lie as they do
    flat_in: bool  # numbers of a signal lie one after the other, and there are enough for a vector
    flat_out: bool
    axes_in: int  # of the tensors, beside the signal's
    axes_out: int
    both_sides: bool  # of the spectrum of a real signal
    radices: tuple[int, ...]  # that passes have, each once
    power: bool = False  # squares of both parts of a bin, added up, are its result

    @property
    def names(self) -> tuple[str, ...]:
        """Of the kernel's numbers."""
        axes = [
            f"{what}_{side}_{k}"
            for side, count in (("in", self.axes_in), ("out", self.axes_out))
            for what in ("extent", "stride")
            for k in range(count)
        ]
        return (
            *axes,
            *("signals", "given", "point_in", "part_in", "window_step", "bins", "point_out", "part_out"),
            *("points", "passes", "block", "scale"),
        )


BUFFERS = ("x", "window", "out", "plan", "turns")


def passes_spec(form: Form) -> KernelSpec:
    def emit(module: Module, symbol: str, isa: Isa) -> None:
        _Kernel(Frame(module, symbol, isa, form.element, BUFFERS, form.names), form).write()

    values = (getattr(form, name) for name in Form.__dataclass_fields__)
    key = ("fourier passes", *(value.name if isinstance(value, DType) else value for value in values))
    return KernelSpec(f"fourier {form.kind} {form.element} in {form.work} x{form.lanes}", key, emit)


class _Kernel:
    def __init__(self, frame: Frame, form: Form) -> None:
        self.frame, self.form, self.f = frame, form, frame.f
        self.work, self.lanes, self.kind = form.work, form.lanes, vector(form.work, form.lanes)
        self.source: Var = self.f.var("ptr")
        self.target: Var = self.f.var("ptr")
        self.turns: Var = self.f.var("ptr")

    def write(self) -> None:
        f, frame, form = self.f, self.frame, self.form
        with f.loop(frame.begin, frame.end) as tile:
            self.source.set(frame.scratch)
            self.target.set(self.point(frame.scratch, frame["block"]))
            self.turns.set(frame.buffer("turns"))
            self.bring(tile)
            if form.kind == "folded":
                self.fold()
            with f.loop(0, frame["passes"]) as k:
                self.one_pass(k)
            if form.kind == "halved":
                self.unfold()
            self.spread(tile)
        f.ret()

    # -- scratch ------------------------------------------------------------------------------------------------------

    def row(self, base: Val, index: Val) -> Val:
        """Where vector number ``index`` of a block lies."""
        return self.f.gep(base, index * self.lanes, self.work)

    def point(self, base: Val, index: Val) -> Val:
        return self.f.gep(base, index * (2 * self.lanes), self.work)

    def load(self, place: Val, exchanged: bool = False) -> Point:
        first, second = (self.f.load(self.kind, self.f.gep(place, k * self.lanes, self.work)) for k in (0, 1))
        return (second, first) if exchanged else (first, second)

    def store(self, value: Point, place: Val, exchanged: bool = False) -> None:
        for k, part in enumerate(reversed(value) if exchanged else value):
            self.f.store(part, self.f.gep(place, k * self.lanes, self.work))

    def swap(self) -> None:
        source, target = self.source.get(), self.target.get()
        self.source.set(target)
        self.target.set(source)

    def next_turns(self, count: Val) -> None:
        self.turns.set(self.f.gep(self.turns.get(), count * 2, self.work))

    def turn(self, place: Val, index: Val | int) -> Turn:
        """Cosine and sine number ``index``, in all lanes."""
        f = self.f
        place = f.gep(place, index * 2, self.work)
        cos, sin = (f.load(self.work, f.gep(place, k, self.work), invariant=True) for k in (0, 1))
        return f.splat(cos, self.lanes), f.splat(sin, self.lanes)

    # -- signals ------------------------------------------------------------------------------------------------------

    def signals(self, tile: Val, buffer: str, side: str, axes: int) -> list[Val]:
        """Where the signals of a tile begin; the last one stands for those that are missing."""
        f, frame = self.f, self.frame
        element = self.form.element if side == "in" else memory_type(self.form.stored)
        found = []
        for lane in range(self.lanes):
            index = f.min_(tile * self.lanes + lane, frame["signals"] - 1)
            base = frame.buffer(buffer)
            for k in reversed(range(axes)):
                stride = frame[f"stride_{side}_{k}"]
                if k == 0:
                    base = f.gep(base, index * stride, element)
                else:
                    extent = frame[f"extent_{side}_{k}"]
                    outer = f.div(index, extent, signed=False)
                    base = f.gep(base, (index - outer * extent) * stride, element)
                    index = outer
            found.append(base)
        return found

    def bring(self, tile: Val) -> None:
        """Signals into the first block."""
        f, frame, form = self.f, self.frame, self.form
        lanes, block, whole = self.lanes, frame.scratch, vector(form.element, self.lanes)
        sources = self.signals(tile, "x", "in", form.axes_in)
        given = frame["given"]
        zero = f.zero(self.kind)
        pitch = 1 if form.kind == "halved" else 2  # vectors from one given point to the next
        if form.flat_in:
            width = given * form.parts
            window = frame.buffer("window")
            with f.loop(0, width, lanes) as j:
                first = f.min_(j, width - lanes)  # the last vectors may overlap those before
                rows = [f.cast(f.load(whole, frame.at(source, (first, 1))), self.work) for source in sources]
                if form.flat_window:
                    weights = f.cast(f.load(whole, frame.at(window, (first, 1))), self.work)
                    rows = [row * weights for row in rows]
                for k, value in enumerate(transposed(f, rows)):
                    if not form.flat_window:
                        value = self.windowed(value, f.div(first, form.parts, signed=False) + k // form.parts)
                    f.store(value, self.row(block, first + k))
        else:
            with f.loop(0, given) as j:
                for part in range(form.parts):
                    value = f.zero(whole)
                    offset = j * frame["point_in"] + frame["part_in"] * part
                    for lane, source in enumerate(sources):
                        value = f.insert(value, f.load(form.element, frame.at(source, (offset, 1))), lane)
                    f.store(self.windowed(f.cast(value, self.work), j), self.row(block, j * pitch + part))
                if form.parts < pitch:
                    f.store(zero, self.row(block, j * pitch + 1))
        end = (frame["points"] + (1 if form.kind == "folded" else 0)) * 2
        with f.loop(given * pitch, end) as j:
            f.store(zero, self.row(block, j))

    def windowed(self, value: Val, point: Val) -> Val:
        if not self.form.windowed:
            return value
        frame = self.frame
        place = frame.at(frame.buffer("window"), (point, frame["window_step"]))
        return value * self.f.cast(self.f.load(self.form.element, place), self.work)

    def spread(self, tile: Val) -> None:
        """Results out of the block where they are."""
        f, frame, form = self.f, self.frame, self.form
        lanes, block = self.lanes, self.source.get()
        targets = self.signals(tile, "out", "out", form.axes_out)
        scale = self.scale() if form.inverse and form.kind == "complex" else None

        def read(index: Val) -> Val:
            if form.power:
                real, imaginary = self.load(self.point(block, index))
                return self.memory(f.fma(real, real, imaginary * imaginary))
            value = f.load(self.kind, self.row(block, index))
            return self.memory(value if scale is None else value * scale)

        if form.flat_out:
            width = frame["bins"] * form.made
            with f.loop(0, width, lanes) as j:
                first = f.min_(j, width - lanes)
                for value, target in zip(transposed(f, [read(first + k) for k in range(lanes)]), targets):
                    f.store(value, self.place(target, first))
        else:
            with f.loop(0, frame["bins"]) as j:
                for part in range(form.made):
                    value = read(j * form.made + part)
                    offset = j * frame["point_out"] + frame["part_out"] * part
                    for lane, target in enumerate(targets):
                        f.store(f.extract(value, lane), self.place(target, offset))

    def memory(self, value: Val) -> Val:
        """Results as they are kept."""
        f, stored = self.f, self.form.stored
        return to_memory(f, self.frame.isa, stored, f.cast(value, register_type(stored)))

    def place(self, target: Val, index: Val) -> Val:
        return self.f.gep(target, index, memory_type(self.form.stored))

    def scale(self) -> Val:
        """Of inverse transforms: a number that carries the bits of a float."""
        bits = self.frame["scale"]
        return self.f.bitcast(bits if self.work == "double" else self.f.cast(bits, "i32"), self.work)

    # -- passes -------------------------------------------------------------------------------------------------------

    def one_pass(self, number: Val) -> None:
        """The radix, the number of groups (p) and the number of points that go together (q) stand in the plan."""
        f = self.f
        plan = f.gep(self.frame.buffer("plan"), number * 3, "i64")
        radix, groups, together = (f.load("i64", f.gep(plan, k, "i64"), invariant=True) for k in range(3))
        for each in self.form.radices:
            with f.if_(f.cmp("eq", radix, each)), f.if_else(f.cmp("eq", together, 1)) as other:
                with f.loop(0, groups) as p:
                    self.butterfly(self.places(each, p, groups, together), self.turns_of(each, p))
                other()
                with f.if_else(f.cmp("eq", groups, 1)) as turning:
                    self.group(each, f.i64(0), groups, together, ())
                    turning()
                    with f.loop(0, groups) as p:
                        self.group(each, p, groups, together, self.turns_of(each, p))
        self.next_turns(groups * (radix - 1))
        self.swap()

    def turns_of(self, radix: int, p: Val) -> list[Turn]:
        place = self.f.gep(self.turns.get(), p * (2 * (radix - 1)), self.work)
        return [self.turn(place, k) for k in range(radix - 1)]

    def places(self, radix: int, p: Val, groups: Val, together: Val) -> tuple[list[Val], list[Val]]:
        """Where the first points of a group come from and go to."""
        source, target = self.source.get(), self.target.get()
        froms = [self.point(source, (p + groups * j) * together) for j in range(radix)]
        return froms, [self.point(target, (p * radix + k) * together) for k in range(radix)]

    def group(self, radix: int, p: Val, groups: Val, together: Val, turns: Sequence[Turn]) -> None:
        """All q of one p."""
        firsts = self.places(radix, p, groups, together)
        with self.f.loop(0, together) as q:
            self.butterfly([[self.point(place, q) for place in side] for side in firsts], turns)

    def butterfly(self, places: Sequence[Sequence[Val]], turns: Sequence[Turn]) -> None:
        """The last pass turns nothing."""
        exchanged = self.form.inverse
        points = butterfly(self.f, [self.load(place, exchanged) for place in places[0]])
        for k, (place, value) in enumerate(zip(places[1], points)):
            if turns and k:
                value = turned(self.f, value, *turns[k - 1])
            self.store(value, place, exchanged)

    def unfold(self) -> None:
        """Point k and its mirror image give the transforms of the even and of the odd points: their half sum and half
        difference. Those give bin k and its mirror image, the odd ones turned by k of all the real points."""
        f, frame = self.f, self.frame
        source, target, turns, points = self.source.get(), self.target.get(), self.turns.get(), frame["points"]
        with f.loop(0, f.lshr(points, 1) + 1) as k:
            opposite = points - k
            one = self.load(self.point(source, k))
            other = self.load(self.point(source, f.select(f.cmp("eq", k, 0), f.i64(0), opposite)))
            sums = f.add(one[0], other[0]), f.sub(one[1], other[1])
            differences = f.sub(one[0], other[0]), f.add(one[1], other[1])
            cos, sin = self.turn(turns, k)  # of half the size and the other sign
            real = f.fma(f.neg(differences[1]), cos, differences[0] * sin)
            imaginary = f.fma(differences[1], sin, differences[0] * cos)
            halves = sums[0] * 0.5, sums[1] * 0.5
            low = plus(f, halves, (real, imaginary))
            high = f.sub(halves[0], real), f.sub(imaginary, halves[1])
            if self.form.both_sides:
                self.store((low[0], f.neg(low[1])), self.point(target, points * 2 - k))
                self.store((high[0], f.neg(high[1])), self.point(target, points + k))
            self.store(low, self.point(target, k))
            self.store(high, self.point(target, opposite))
        self.swap()

    def fold(self) -> None:
        """The other way: bin k and its mirror image give the transform of pairs of real points. Imaginary parts of the
        first and the last bin have no meaning there."""
        f, frame = self.f, self.frame
        source, target, turns, points = self.source.get(), self.target.get(), self.turns.get(), frame["points"]
        scale = self.scale()
        for bin_ in (f.i64(0), points):
            f.store(f.zero(self.kind), self.row(source, bin_ * 2 + 1))
        count = f.lshr(points, 1) + 1
        with f.loop(0, count) as k:
            opposite = points - k
            one, other = self.load(self.point(source, k)), self.load(self.point(source, opposite))
            sums = f.add(one[0], other[0]) * scale, f.sub(one[1], other[1]) * scale
            differences = f.sub(one[0], other[0]), f.add(one[1], other[1])
            cos, sin = self.turn(turns, k)  # scaled
            real = f.fma(f.neg(differences[1]), sin, differences[0] * cos)
            imaginary = f.fma(differences[1], cos, differences[0] * sin)
            self.store((f.add(sums[0], imaginary), f.sub(real, sums[1])), self.point(target, opposite))
            self.store((f.sub(sums[0], imaginary), f.add(sums[1], real)), self.point(target, k))
        self.next_turns(count)
        self.swap()
