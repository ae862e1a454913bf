"""Sizes of tiles found by measuring, kept by the name of the GPU and the structure of the kernel.

Nothing is measured or looked up unless it is asked for: :func:`consult` lets :func:`known` and :func:`chosen` use what
is kept for a GPU, and :func:`tune` measures the alternatives of one nest, for so long, and keeps the best. A key is the
text of the default kernel and how large the nest is, to a power of two: sizes nearby share what was found.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.triton.schedule import Plan, power_of_two

Sizes = tuple[int, ...]
Run = Callable[[], None]
_WORTH = 1.03  # how much faster an alternative has to be
_LAUNCHES = 10  # per measurement

_device = ""  # whose table is consulted
_table: dict[str, Sizes] | None = None


def consult(device: str) -> int:
    """Use what is kept for a GPU from now on (an empty name: the defaults); how many decisions there are."""
    global _device, _table
    _device, _table = device, None
    if device:
        from ranvier.codegen import tuning_store

        entries = tuning_store.entries(_store(device), 1)
        _table = {key: _sizes(entry.chosen) for key, entry in entries.items() if entry.chosen}
    return len(_table or ())


def chosen(key: str) -> Sizes | None:
    """What is kept for a key."""
    return None if _table is None else _table.get(key)


def known(nest: Nest, default: Plan) -> Plan:
    """The plan that is kept for a nest in normal form, or the default."""
    found = chosen(key_of(nest, default)) if _table else None
    return default if found is None or len(found) != 3 else default.tuned(*found)


def key_of(nest: Nest, default: Plan) -> str:
    from ranvier.codegen.triton.printer import printed

    text = printed(nest, default).text
    groups = [[nest.extents[a] for a in axes] for axes in (default.first, default.second, default.rest)]
    sizes = "x".join(str(power_of_two(math.prod(g))) for g in groups)
    return f"nest {hashlib.sha256(text.encode()).hexdigest()[:16]} {sizes}"


def candidates(default: Plan) -> list[Plan]:
    """The default first, then what else the tile could be."""
    first, second = default.blocks
    sizes: Iterable[tuple[int, int]]
    if default.way == "flat":
        sizes = [(x, 1) for x in (256, 512, 1024, 2048, 4096)]
    elif default.way == "tiled":
        sizes = [(32, 32), (32, 64), (64, 32), (64, 64), (32, 128), (128, 32)]
    elif default.way == "columns":
        sizes = [(x, 1) for x in (32, 64, 128, 256, 512)]
    elif default.whole:
        sizes = [(x, second) for x in sorted({max(1, first // 2), first, first * 2, first * 4})]
    else:
        sizes = [(first, r) for r in (1024, 2048, 4096, 8192)] if second >= 1024 else [(first, 16), (first, 64)]
    found = [default]
    for a, b in sizes:
        for warps in (1, 2, 4, 8, 16):
            if 2 <= a * b // (32 * warps) <= 64:
                found.append(default.tuned(a, b, warps))
    return list(dict.fromkeys(found))


def best(
    options: Sequence[tuple[Sizes, Callable[[], Run]]],
    *,
    seconds: float = 2.0,
    measure: Callable[[Run], float] | None = None,
) -> tuple[int, list[float]]:
    """Which of some options is fastest, and the times of those there was time for; the first one is the default.

    An option that cannot be compiled (too large for the GPU) takes infinitely long.
    """
    measure = measure or on_gpu
    end = time.monotonic() + seconds
    times: list[float] = []
    for _, make in options:
        if times and time.monotonic() > end:
            break
        try:
            times.append(measure(make()))
        except Exception:
            if not times:
                raise
            times.append(math.inf)
    fastest = min(range(len(times)), key=lambda k: times[k])
    return (fastest if times[fastest] * _WORTH < times[0] else 0), times


def keep(device: str, key: str, sizes: Sizes, times: list[float], fastest: int) -> None:
    """Remember a decision, here and for later processes."""
    from ranvier.codegen import tuning_store

    text = ",".join(map(str, sizes)) if fastest else ""
    entry = tuning_store.Entry(text, times[0] / times[fastest], times[0])
    tuning_store.save(_store(device), 1, {key: entry})
    if device == _device and _table is not None and fastest:
        _table[key] = sizes


def tune(
    nest: Nest,
    memory: Any,
    device: str,
    *,
    seconds: float = 2.0,
    measure: Callable[[Run], float] | None = None,
) -> Plan | None:
    """Measure the tiles of a nest on memory that it may write to; the best plan, which is kept. None: nothing to do."""
    from ranvier.codegen.loops.normalize import normalized
    from ranvier.codegen.triton.library import planned
    from ranvier.codegen.triton.schedule import plan

    normal = normalized(nest)
    if normal is None:
        return None
    default = plan(normal)
    plans = candidates(default)

    def maker(each: Plan) -> Callable[[], Run]:
        return lambda: planned(normal, each).bound(memory)

    options = [((*p.blocks, p.warps), maker(p)) for p in plans]
    fastest, times = best(options, seconds=seconds, measure=measure)
    keep(device, key_of(normal, default), options[fastest][0], times, fastest)
    return plans[fastest]


def on_gpu(run: Run) -> float:
    """Seconds of a launch: the best of several replays of a graph of launches, so that Python's time is not in it."""
    import torch

    run()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(_LAUNCHES):
            run()
    times: list[float] = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3 / _LAUNCHES)
    return min(times)


def _store(device: str) -> str:
    return f"triton {device}"


def _sizes(text: str) -> Sizes:
    return tuple(int(part) for part in text.split(","))
