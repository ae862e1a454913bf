"""One row of scores through mask and online softmax, as a function that both attention kernels call."""

from __future__ import annotations

from typing import Literal

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.attention.micro import exp2_nonpositive, folded, rounded_up
from ranvier.codegen.llvm.builder import Fn, Module, Val, size_of, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.vmath import core
from ranvier.records import dataclass

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Scoring:
    """What happens to scores on their way into the softmax, as far as code depends on it."""

    element: str
    mask: Literal["none", "float", "bool"] = "none"
    unit_mask: bool = True  # consecutive keys' mask entries are neighbours
    softcap: bool = False
    scaled: bool = False  # scores are scaled before their maximum is taken, not only on the way into the exponent
    causal: bool = False  # keys after some distance from the query are not seen
    window: bool = False  # keys before some distance from the query are not seen
    lengths: Literal["none", "i32", "i64"] = "none"  # per batch entry, how many keys are valid

    @property
    def key(self) -> tuple[object, ...]:
        mask = (self.mask, self.unit_mask)
        return (self.element, *mask, self.softcap, self.scaled, self.causal, self.window, self.lengths)


def emit_row(module: Module, name: str, scoring: Scoring, isa: Isa) -> None:
    """Write the function that :func:`call_row` calls.

    ``s`` holds the products of one query; those from ``hidden`` to ``visible`` may be looked at, and ``width`` entries
    (rounded up to whole vectors) become weights ``2^(rate * (x - top))`` of the scores x, zero where nothing is seen.
    ``top`` and ``total`` are the running maximum and sum, not yet there when the row is ``fresh``; ``keep`` receives
    the factor by which everything summed so far shrinks. ``rate`` is positive.
    """
    element = scoring.element
    lanes = isa.lanes(size_of(element))
    kind = vector(element, lanes)
    params = [("ptr", "s"), ("i64", "hidden"), ("i64", "visible"), ("i64", "width"), ("ptr", "mask"), ("i64", "step")]
    numbers = [(element, "scale"), (element, "cap"), (element, "rate")]
    state = [("i1", "fresh"), ("ptr", "top"), ("ptr", "total"), ("ptr", "keep")]
    f = module.function(name, [*params, *numbers, *state], internal=True)
    s, visible = f.args["s"], f.args["visible"]
    whole = f.and_(visible, -lanes)
    most = f.var(kind, MINUS_INFINITY)

    def prepared(at: Val, alive: Val | None) -> Val:
        """The scores at one place; lanes that are not alive count as unseen."""
        x = f.load(kind, f.gep(s, at, element))
        if scoring.scaled:
            x = f.mul(x, f.splat(f.args["scale"], lanes))
        if scoring.softcap:
            x = f.mul(vmath.tanh(f, x, isa), f.splat(f.args["cap"], lanes))
        if scoring.mask != "none":
            x = _masked(f, scoring, x, at, alive)
        if scoring.window:
            near = f.cmp("sge", f.add(f.lane_ids(lanes), f.splat(at, lanes)), f.splat(f.args["hidden"], lanes))
            alive = near if alive is None else f.and_(alive, near)
        return x if alive is None else f.select(alive, x, f.const(kind, MINUS_INFINITY))

    with f.loop(0, whole, lanes) as i:
        x = prepared(i, None)
        if scoring.scaled or scoring.window:
            f.store(x, f.gep(s, i, element))
        most.set(f.quick_max(x, most.get()))
    with f.if_(f.cmp("slt", whole, visible)):
        x = prepared(whole, f.mask_below(lanes, visible - whole))
        f.store(x, f.gep(s, whole, element))
        most.set(f.quick_max(x, most.get()))

    fresh, rate = f.args["fresh"], f.args["rate"]
    old = f.select(fresh, f.const(element, MINUS_INFINITY), f.load(element, f.args["top"]))
    new = f.quick_max(folded(f, most.get(), f.quick_max), old)
    f.store(new, f.args["top"])
    # a row that has seen nothing yet must not subtract infinities from each other
    base = f.select(f.cmp("oeq", new, MINUS_INFINITY), f.const(element, 0.0), new)
    # masks may hold the lowest finite number: a row in which nothing else is seen must not multiply it by the rate
    huge = scoring.mask == "float"
    # both products are rounded by themselves, as below: blocks must agree on what their weights refer to
    exponent = core.exactly(f, "fmul", base, rate)
    if huge:
        change = f.mul(f.sub(old, base), rate)
    else:
        change = core.exactly(f, "fsub", core.exactly(f, "fmul", old, rate), exponent)
    keep = f.extract(exp2_nonpositive(f, f.splat(change, 16 // size_of(element)), isa), 0)
    f.store(keep, f.args["keep"])

    sums = f.var(kind, 0.0)
    rates, minus = f.splat(rate, lanes), f.splat(f.neg(base if huge else exponent), lanes)
    seen = rounded_up(f, visible, lanes)
    with f.loop(0, seen, lanes) as i:
        place = f.gep(s, i, element)
        x = f.load(kind, place)
        power = f.mul(f.add(x, minus), rates) if huge else f.fma(x, rates, minus)
        weight = exp2_nonpositive(f, power, isa)
        f.store(weight, place)
        sums.set(sums.get() + weight)
    with f.loop(seen, f.args["width"], lanes) as i:
        f.store(f.const(kind, 0.0), f.gep(s, i, element))
    before = f.select(fresh, f.const(element, 0.0), f.load(element, f.args["total"]))
    f.store(f.fma(before, keep, folded(f, sums.get(), f.add)), f.args["total"])
    f.ret()


def _masked(f: Fn, scoring: Scoring, x: Val, at: Val, alive: Val | None) -> Val:
    """Scores with the mask applied. A masked key has no part in the row, whatever its score (NaN included)."""
    lanes, step = x.lanes, f.args["step"]
    stored = "i8" if scoring.mask == "bool" else x.element
    kind = vector(stored, lanes)
    if scoring.unit_mask:
        place = f.gep(f.args["mask"], at, stored)
        entries = f.load(kind, place) if alive is None else f.masked_load(kind, place, alive)
    else:
        start = f.gep(f.args["mask"], at * step, stored)
        entries = f.gather(stored, start, f.mul(f.lane_ids(lanes), f.splat(step, lanes)), alive)
    if scoring.mask == "bool":
        return f.select(f.cmp("ne", entries, 0), x, f.const(x.type, MINUS_INFINITY))
    return f.select(f.cmp("oeq", entries, MINUS_INFINITY), entries, x + entries)
