"""Results in the place of inputs: which launches have to wait for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.storage import Storage


def postponed(launches: list[Launch], reuse: Mapping[Storage, Sequence[Storage]]) -> list[Launch]:
    """The launches in an order in which a result that may take over an input's memory is made after others have read
    the input, where the order is free to be so: a weight is updated after the last product with it."""
    wanted = {target: sources for target, sources in reuse.items() if target.kind == "output"}
    if not wanted:
        return launches
    found = list(launches)
    touched = {id(each): {b.storage for b in each.buffers if isinstance(b, At)} for each in launches}
    for launch in launches:
        sources = {s for target in launch.writes for s in wanted.get(target, ())}
        if not sources:
            continue
        place = next(k for k, each in enumerate(found) if each is launch)
        later = range(place + 1, len(found))
        last = max((k for k in later if not sources.isdisjoint(touched[id(found[k])])), default=place)
        between = found[place + 1 : last + 1]
        own, written = touched[id(launch)], set(launch.writes)
        if between and all(written.isdisjoint(touched[id(x)]) and own.isdisjoint(x.writes) for x in between):
            found.insert(last, found.pop(place))
    return found
