"""Times of launches on a GPU: captured as a graph, replayed many times between two events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")
Launch = Callable[[], object]


def captured(launch: Launch) -> torch.cuda.CUDAGraph:
    """The launches as one graph; they run twice before, which compiles and tunes whatever has to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def milliseconds(call: Launch, *, least: float = 40.0, groups: int = 9) -> float:
    """The median of groups of calls back to back, all groups together at least ``least`` milliseconds."""

    def group(count: int) -> float:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(count):
            call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / count

    call()
    torch.cuda.synchronize()
    once = max(1e-3, group(2))
    count = max(1, min(200, round(least / groups / once)))
    return statistics.median(group(count) for _ in range(groups))


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large copy, read and written, and operations a second of a large bf16 product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    speed = 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)
    x, y = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return speed, 2 * 8192**3 / (milliseconds(lambda: x @ y) / 1e3)


def replayed(launch: Launch, *, least: float = 40.0) -> float:
    """Milliseconds of one replay of the launches as a graph."""
    graph = captured(launch)
    return milliseconds(graph.replay, least=least)


def fastest(candidates: Iterable[T], launch: Callable[[T], Launch]) -> tuple[T, float, dict[str, str]]:
    """The candidate whose graph replays fastest, its milliseconds, and what each took or why it failed."""
    best: tuple[T, float] | None = None
    seen: dict[str, str] = {}
    for candidate in candidates:
        try:
            took = replayed(launch(candidate), least=8.0)
        except Exception as error:  # a tile that does not fit must not end the others
            torch.cuda.synchronize()
            seen[str(candidate)] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        seen[str(candidate)] = f"{took:.5f} ms"
        if best is None or took < best[1]:
            best = (candidate, took)
    if best is None:
        raise RuntimeError(f"no candidate ran: {seen}")
    return best[0], best[1], seen
