"""Results in the place of inputs: which launches have to wait for that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.storage import Storage

_ROUNDS = 3  # one that moves may be what another waits for


def postponed(
    launches: list[Launch], reuse: Mapping[Storage, Sequence[Storage]], flags: Collection[Storage]
) -> list[Launch]:
    """The launches in an order in which a result that may take over an input's memory is made after others have read
    the input, and after the ``flags`` by which data is refused are set, where the order is free to be so: a weight is
    updated after the last product with it."""
    wanted = _paired(reuse)
    if not wanted:
        return launches
    found = list(launches)
    touched = {id(each): {b.storage for b in each.buffers if isinstance(b, At)} for each in launches}
    for _ in range(_ROUNDS):
        before = list(map(id, found))
        for launch in reversed(launches):  # so that what reads its result has made way
            awaited = {wanted[target] for target in launch.writes if target in wanted}
            if not awaited:
                continue
            awaited.update(flags)
            place = next(k for k, each in enumerate(found) if each is launch)
            later = range(place + 1, len(found))
            last = max((k for k in later if not awaited.isdisjoint(touched[id(found[k])])), default=place)
            between = found[place + 1 : last + 1]
            own, written = touched[id(launch)], set(launch.writes)
            if between and all(written.isdisjoint(touched[id(x)]) and own.isdisjoint(x.writes) for x in between):
                found.insert(last, found.pop(place))
        if before == list(map(id, found)):
            break
    return found


def _paired(reuse: Mapping[Storage, Sequence[Storage]]) -> dict[Storage, Storage]:
    """One input for each result. A weight's new value is made of the weight and its moments, a moment's new value of
    the moment: whoever has the fewest to choose from comes first."""
    found: dict[Storage, Storage] = {}
    taken: set[Storage] = set()
    for target in sorted((t for t in reuse if t.kind == "output"), key=lambda t: len(reuse[t])):
        source = next((s for s in reuse[target] if s not in taken), None)
        if source is not None:
            found[target] = source
            taken.add(source)
    return found
