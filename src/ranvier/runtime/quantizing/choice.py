"""How every node is computed, so that results stay near enough and a run is as fast as can be.

Errors of nodes are nearly independent: squared, what each does alone adds up to what all do together. So what every way
to compute a node does to results is found once, and the rest is arithmetic: the fastest ways, but for nodes whose
error is largest for the time that a more exact way takes. Few models have to be made to make sure of the sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.records import dataclass
from ranvier.runtime.quantizing.batches import apart
from ranvier.runtime.quantizing.range_inputs import Range
from ranvier.runtime.quantizing.report import Difference
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.sites import Site
from ranvier.runtime.quantizing.switches import Switches

Array = np.ndarray[Any, Any]
FLOAT32, BF16, INT16, INT8 = "float32", "bf16", "int16", "int8"
MOST_RUNS = 16  # samples a layer is judged by, at most
_FEWEST = 4  # ... and at least where there are several ranges to choose from
_CLOSE = 0.93  # part of an error from which there is no more to be won
_TRIALS = 8  # models made to check a sum
_LATE = 4  # ... where time is over and none was exact enough
_AGAIN = 4  # times that nodes are judged again
_SMALL = 0.25  # part of the time that others save, from which on a way saves little ...
_WORTH = 4.0  # ... and parts of the error that it may cost for each of time
_MISJUDGED = 2.0  # times a sum of squared errors, from which on it is not the sum that is a little off
_HOPELESS = 1e3  # an error that no other adds anything to; what is infinite could not be taken off a sum again
_LEAST = 1e-9  # seconds that a way is slower than another, at least, where it is chosen by what it costs


@dataclass(frozen=True)
class Way:
    """To compute a node: the error of results if nothing else is rounded, squared, and how long it takes."""

    kind: str
    error: float
    seconds: float


Ways = Mapping[str, Sequence[Way]]  # by node
Chosen = dict[str, Way]


def selected(nodes: Ways, allowed: float) -> Chosen:
    """Ways whose squared errors add up to at most this, as fast as may be; the most exact where none do."""
    chosen = {name: min(ways, key=lambda way: (way.seconds, way.error)) for name, ways in nodes.items()}
    total = _error(chosen)
    while total > allowed:
        moves = (
            ((now.error - way.error) / max(way.seconds - now.seconds, _LEAST), name, way)
            for name, now in chosen.items()
            for way in nodes[name]
            if way.error < now.error
        )
        best = max(moves, key=lambda move: move[0], default=None)
        if best is None:
            break
        _, name, way = best
        total += way.error - chosen[name].error
        chosen[name] = way
    faster = [
        (now.seconds - way.seconds, name, way)
        for name, now in chosen.items()
        for way in nodes[name]
        if way.seconds < now.seconds
    ]
    for _, name, way in sorted(faster, key=lambda move: -move[0]):
        now = chosen[name]
        if way.seconds < now.seconds and total + way.error - now.error <= allowed:  # there is room for it after all
            total += way.error - now.error
            chosen[name] = way
    return chosen


def worthwhile(nodes: Ways, bound: float) -> Ways:
    """Without codes that cost much of the error for very little of the time that all ways could save: samples do not
    show all that they may do, so they had better be good for something. Of numbers of 16 bits samples show enough.
    What codes cost and save is what they do beside the most exact way without; that may be less exact than they are."""
    plain = {name: _without_codes(ways) for name, ways in nodes.items()}
    all_saved = sum(plain[name].seconds - min(way.seconds for way in ways) for name, ways in nodes.items())
    if not 0 < bound < math.inf or all_saved <= 0:
        return nodes

    def is_worth_it(name: str, way: Way) -> bool:
        saved = max(0.0, plain[name].seconds - way.seconds) / all_saved
        cost = (way.error - plain[name].error) / bound**2
        return way.kind != INT8 or saved * len(nodes) >= _SMALL or cost <= _WORTH * saved

    return {name: [way for way in ways if is_worth_it(name, way)] for name, ways in nodes.items()}


def _without_codes(ways: Sequence[Way]) -> Way:
    """The most exact way without codes of 8 bits; codes of 16 are as good as exact, and may be faster."""
    words = [way for way in ways if way.kind == INT16]
    exact = [way for way in ways if way.kind == FLOAT32]
    if words and exact:
        return min(*words, *exact, key=lambda way: way.seconds)
    return min((way for way in ways if way.kind != INT8), key=lambda way: way.error)


def fitting(
    nodes: Ways,
    bound: float,
    measure: Callable[[Chosen], float],
    until: float,
    again: Callable[[Chosen], Ways | None] = lambda chosen: None,
) -> Chosen | None:
    """Ways to compute nodes that are fast and have an error of at most ``bound`` as measured; None if none was found.

    Sums are a little off, by a part that hardly changes from one choice to the next: each trial corrects the next one.
    Where one is far off, some node does more than it was seen to do, and less room for all of them would be taken from
    the wrong ones: ``again`` looks for it, and returns what is known then, or None if that is nothing new.
    """
    best: Chosen | None = None
    nodes = worthwhile(nodes, bound)
    total = _error(selected(nodes, math.inf))
    enough, too_much = 0.0, math.inf  # sums that are low enough, and those that are not
    allowed = bound * bound
    tried: set[frozenset[tuple[str, str]]] = set()
    trials = judged = 0
    while trials < _TRIALS:
        between = (enough + min(too_much, total)) / 2
        if not enough < allowed < too_much:
            allowed = between
        if _key(selected(nodes, allowed)) in tried:  # between what is known
            allowed = between
        chosen = selected(nodes, allowed)
        key = _key(chosen)
        late = time.perf_counter() > until
        if key in tried or (late and (best is not None or len(tried) >= _LATE)):
            break
        tried.add(key)
        error = measure(chosen)
        told = _error(chosen)
        if error > bound and error**2 > _MISJUDGED * told and judged < _AGAIN and not late:
            judged += 1
            corrected = again(chosen)
            if corrected is not None:
                nodes = worthwhile(corrected, bound)
                total = _error(selected(nodes, math.inf))
                enough, too_much, allowed = 0.0, math.inf, bound * bound
                continue
        trials += 1
        better = allowed * (bound / max(error, 1e-9)) ** 2
        if error <= bound:
            enough = allowed
            if best is None or _seconds(chosen) <= _seconds(best):
                best = chosen
            if enough >= total or error >= _CLOSE * bound:  # nothing is faster, or there is hardly any room left
                break
        else:
            too_much = told  # whatever leaves room for it is the same choice
            better = better if best is not None else min(better, too_much / 2)  # sums may say too little
        allowed = better
    return best


def _key(chosen: Chosen) -> frozenset[tuple[str, str]]:
    return frozenset((name, way.kind) for name, way in chosen.items())


def _error(chosen: Chosen) -> float:
    """Squared, as it adds up."""
    return sum(way.error for way in chosen.values())


def _seconds(chosen: Chosen) -> float:
    return sum(way.seconds for way in chosen.values())


def judge(
    switches: Switches,
    sites: Sequence[Site],
    ways: Sequence[Mapping[str, Range]],
    feeds: Sequence[Feed],
    expected: Sequence[Sequence[Array]],
    judged: Callable[[Difference], float],
    bound: float,
    seconds: float,
    step: Callable[[int, int], None],
) -> tuple[dict[str, float], dict[str, Range]]:
    """The squared error that every layer's codes cause alone, and the ranges with which it is least; fewer samples
    where time is short, and batches of layers where there is less than one for each."""

    def error(count: int, coded: Mapping[str, Range]) -> float:
        return min(judged(switches.difference(feeds[:count], expected[:count], coded)), _HOPELESS)

    error(1, {})  # compiles it
    start = time.perf_counter()
    error(1, {})
    once = time.perf_counter() - start
    if once * len(sites) * len(ways) * min(_FEWEST, len(feeds)) > seconds:
        ways = ways[:1]
    if once * len(sites) > seconds:
        by_name = {site.name: ways[0][site.data.name] for site in sites}
        until = time.perf_counter() + seconds
        return apart(list(by_name), lambda names: error(1, {n: by_name[n] for n in names}), bound, until, step), {}
    runs = max(1, int(min(MOST_RUNS, len(feeds), seconds / max(once * len(sites) * len(ways), 1e-9))))
    readers: dict[str, list[Site]] = {}
    for site in sites:
        readers.setdefault(site.data.name, []).append(site)
    found: dict[str, float] = {}
    ranges: dict[str, Range] = {}
    for data, those in readers.items():
        step(len(found), len(sites))
        tried = []
        for bounds in dict.fromkeys(way[data] for way in ways):
            errors = [error(runs, {site.name: bounds}) for site in those]
            tried.append((sum(e * e for e in errors), bounds, errors))
        _, ranges[data], errors = min(tried, key=lambda each: each[0])
        found.update({site.name: e * e for site, e in zip(those, errors)})
    return found, ranges
