"""Which layers read codes, and by which ranges, so that results stay near enough and a run is as fast as can be.

Errors of layers are nearly independent: squared, what each does alone adds up to what all do together. So every layer
is switched on by itself once for each way to find its range, and the rest is arithmetic: those stay in float32 whose
error is largest for the time their codes would save. Few models have to be made to make sure of the sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.records import dataclass
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.sites import Site
from ranvier.runtime.quantizing.switches import Range, Switches

Array = np.ndarray[Any, Any]
Names = frozenset[str]
_RUNS = 16  # samples a layer is judged by, at most
_TRIALS = 8  # models made to check a sum
_MOVED = 8.0  # multiplications in the time it takes to write and read one number


@dataclass(frozen=True)
class Judged:
    """A layer: the error it causes alone, squared, and the time its codes save, in multiplications."""

    name: str
    error: float
    saved: float


def saved_by(site: Site, shape: Sequence[int]) -> float:
    """Of a layer that reads an array of this shape."""
    weights, read = site.numbers, float(math.prod(shape))
    if site.inner is not None:
        places = read / max(1, shape[-1])
    else:
        places = read / max(1, shape[1]) / math.prod(map(int, site.node.attrs.get("strides", [1])))
    return places * int(weights.size) + _MOVED * (read + places * int(weights.shape[site.outputs]))


def judge(
    switches: Switches,
    sites: Sequence[Site],
    ways: Sequence[Mapping[str, Range]],
    shapes: Mapping[str, Sequence[int]],
    feeds: Sequence[Feed],
    expected: Sequence[Sequence[Array]],
    seconds: float,
    step: Callable[[int, int], None],
) -> tuple[list[Judged], dict[str, Range]]:
    """What every layer does alone, and the ranges with which it does least; fewer samples where time is short."""
    switches.error(feeds[:1], expected[:1], {})  # compiles it
    start = time.perf_counter()
    switches.error(feeds[:1], expected[:1], {})
    once = time.perf_counter() - start
    if once * len(sites) * len(ways) > seconds:
        ways = ways[:1]
    runs = max(1, min(_RUNS, len(feeds), int(seconds / max(once * len(sites) * len(ways), 1e-9))))
    readers: dict[str, list[Site]] = {}
    for site in sites:
        readers.setdefault(site.data.name, []).append(site)
    found: list[Judged] = []
    ranges: dict[str, Range] = {}
    for data, those in readers.items():
        step(len(found), len(sites))
        tried = []
        for bounds in dict.fromkeys(way[data] for way in ways):
            errors = [switches.error(feeds[:runs], expected[:runs], {site.name: bounds}) for site in those]
            tried.append((sum(e * e for e in errors), bounds, errors))
        _, ranges[data], errors = min(tried, key=lambda each: each[0])
        found += [Judged(s.name, e * e, saved_by(s, shapes[data])) for s, e in zip(those, errors)]
    return found, ranges


def left_out(layers: Sequence[Judged], allowed: float) -> Names:
    """Layers to leave in float32 for the sum of the others' squared errors to be at most this."""
    total, kept = sum(layer.error for layer in layers), []
    for layer in sorted(layers, key=lambda layer: -layer.error / layer.saved):
        if total <= allowed:
            break
        kept.append(layer)
        total -= layer.error
    for layer in sorted(kept, key=lambda layer: -layer.saved):
        if total + layer.error <= allowed:  # there is room for it after all
            total += layer.error
            kept.remove(layer)
    return frozenset(layer.name for layer in kept)


def fewest(layers: Sequence[Judged], bound: float, measure: Callable[[Names], float], until: float) -> Names:
    """Layers that stay in float32, fewest for what they cost, with an error of at most ``bound`` as measured.

    Sums are a little off, by a part that hardly changes from one set to the next: each trial corrects the next one.
    """
    best: Names = frozenset(layer.name for layer in layers)
    enough, too_much = 0.0, sum(layer.error for layer in layers)  # sums that are low enough, and those that are not
    allowed = bound * bound
    tried = {best, frozenset()}
    for _ in range(_TRIALS):
        if not enough < allowed < too_much:
            allowed = (enough + too_much) / 2
        kept = left_out(layers, allowed)
        if kept in tried:  # between what is known
            allowed = (enough + too_much) / 2
            kept = left_out(layers, allowed)
        if kept in tried or (enough and time.perf_counter() > until):
            break
        tried.add(kept)
        error = measure(kept)
        if error <= bound:
            best, enough = kept, allowed
        else:
            too_much = allowed
        allowed *= (bound / max(error, 1e-9)) ** 2
    return best
