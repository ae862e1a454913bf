"""Whether a launch is worth a second thread: how long it takes on this instruction set, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ranvier.codegen import tuning
from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm import turning
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.program import FLOPS_PER_NS, SERIAL_NS, estimated_ns
from ranvier.codegen.storage import Storage

_LEAST, _MOST = 0.2, 8.0  # times what is thought to be worth it: below and above there is no question


def paced(launches: Sequence[Launch], isa: Isa) -> Sequence[Launch]:
    """The launches with rates of an instruction set's arithmetic, for who divides work among threads."""
    if isa.pace == 1.0:
        return launches
    return [replace(each, rate=each.rate * isa.pace) for each in launches]


def mark_far(launches: Sequence[Launch]) -> None:
    """Say which steps read little but constants that no cache still has from the run before: those of all steps
    together are more than stays. A small step may be worth a second thread then."""
    constants = [
        {b.storage for b in each.buffers if isinstance(b, At) and b.storage.kind == "const"} for each in launches
    ]
    if _bytes(set().union(*constants)) <= turning.MOST_BYTES:
        return
    for each, found in zip(launches, constants):
        if each.rounds == 1 and 2 * _bytes(found) > each.traffic:
            each.far = True


def _bytes(storages: set[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def tuned_sharing(launch: Launch) -> Launch:
    """The launch, so that it is run by one thread or by all."""
    span = estimated_ns(launch) / SERIAL_NS
    if launch.tiles < 2 or launch.rounds > 1 or not launch.flops or not _LEAST < span < _MOST:
        return launch
    shared = span >= 1.0
    chosen = tuning.choose(
        "threads",
        lambda: (launch.spec.name, launch.tiles, launch.flops, launch.traffic),
        shared,
        lambda: {"one" if shared else "all": not shared},
    )
    if chosen == shared:
        return launch
    if shared:
        return replace(launch, grain=launch.tiles)
    return replace(launch, rate=launch.flops / (FLOPS_PER_NS * SERIAL_NS * 1.01))
