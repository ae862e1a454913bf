"""The picture of the GPU suite: for every model the times of the runners, the goal and the floor, on one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranvier.charts.axes import Scale, number_text
from ranvier.charts.canvas import FAINT, GRID, INK, PALETTE, Canvas

_ROW, _LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 22, 240, 40, 92, 44, 980
RUNNERS = ("ranvier", "torch.compile", "torch")


def draw(data: Mapping[str, Any]) -> Canvas:
    """A dot for each runner, a bar where the goal is, a faint one where the floor is; further left is quicker."""
    cases = [case for case in data["cases"] if case.get("runners")]
    canvas = Canvas(_WIDTH, _TOP + len(cases) * _ROW + _BOTTOM)
    times = [t for case in cases for t in _times(case).values()]
    floors = [case["floor_ms"] for case in cases if case.get("floor_ms")]
    scale = Scale(min([0.1, *times, *floors]) / 1.2, max([1.0, *times]) * 1.2, _LEFT, _WIDTH - _RIGHT, log=True)
    bottom = _TOP + len(cases) * _ROW
    canvas.text(12, 24, "Milliseconds a call, everything on the device", 16, bold=True)
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    canvas.text(12, 42, f"{data['device']}; {versions}; {data['date']}", 11, FAINT)
    _legend(canvas)
    for value in scale.ticks():
        canvas.line([(scale(value), _TOP), (scale(value), bottom)], GRID, weight=0.8)
        canvas.text(scale(value), bottom + 16, number_text(value), 11, FAINT, anchor="middle")
    for k, case in enumerate(cases):
        middle = _TOP + (k + 0.5) * _ROW
        canvas.text(_LEFT - 10, middle + 4, f"{case['name']} {case['kind']}", 11, anchor="end")
        for place, paint in ((case.get("floor_ms"), FAINT), (case.get("goal_ms"), INK)):
            if place:
                canvas.line([(scale(place), middle - 8), (scale(place), middle + 8)], paint, weight=2)
        for runner, time in reversed(_times(case).items()):  # ours is drawn last and lies on top
            paint = PALETTE[RUNNERS.index(runner) % len(PALETTE)]
            title = f"{case['name']}: {runner} {time:.3f} ms"
            canvas.circle(scale(time), middle, 4.5, paint, stroke=paint, weight=1.5, title=title)
    return canvas


def _times(case: Mapping[str, Any]) -> dict[str, float]:
    found = case["runners"]
    return {r: found[r]["median_ms"] for r in RUNNERS if "median_ms" in found.get(r, {})}


def _legend(canvas: Canvas) -> None:
    x = float(_LEFT)
    for k, runner in enumerate(RUNNERS):
        canvas.circle(x + 6, 68, 4.5, PALETTE[k % len(PALETTE)], stroke=PALETTE[k % len(PALETTE)], weight=1.5, title="")
        canvas.text(x + 17, 72, runner, 11)
        x += 36 + 6.6 * len(runner)
    for name, paint in (("goal", INK), ("floor", FAINT)):
        canvas.line([(x + 6, 60), (x + 6, 76)], paint, weight=2)
        canvas.text(x + 17, 72, name, 11)
        x += 36 + 6.6 * len(name)
