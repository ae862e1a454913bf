"""The picture of a suite: every model's speed relative to ONNX Runtime, one row each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.charts.axes import Scale, number_text
from ranvier.charts.canvas import FAINT, GRID, INK, PALETTE, Canvas
from ranvier.cli import peers
from ranvier.cli.suites.measure import BASE
from ranvier.cli.suites.results import SLOW

_ROW, _LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 18, 190, 140, 92, 44, 980
_RADIUS = 4.5
_FARTHEST = 16.0  # ratios beyond this stand at the edge, with their number


def draw(data: Mapping[str, Any]) -> Canvas:
    """A dot for each runner and number of threads; right of the line at 1 it is faster than the base."""
    runners = [r for r in data["settings"]["runners"] if r != BASE]
    threads: Sequence[int] = data["settings"]["threads"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in data["cases"]:
        groups.setdefault(case["group"], []).append(case)
    rows = len(data["cases"]) + len(groups)
    canvas = Canvas(_WIDTH, _TOP + rows * _ROW + _BOTTOM)
    scale = _scale(data["cases"], runners)
    bottom = _TOP + rows * _ROW
    _frame(canvas, data, scale, bottom)
    _legend(canvas, runners, threads)
    y = float(_TOP)
    for group, cases in groups.items():
        y += _ROW
        canvas.text(12, y - 5, group, 12, bold=True)
        for case in cases:
            y += _ROW
            middle = y - _ROW / 2
            canvas.text(_LEFT - 10, middle + 4, case["name"], 11, anchor="end")
            canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], "#f0f0f0", weight=0.7)
            _dots(canvas, case, runners, threads, scale, middle)
    return canvas


def _scale(cases: Sequence[Mapping[str, Any]], runners: Sequence[str]) -> Scale:
    found = [r for c in cases for run in c.get("runs", ()) for r in _ratios(run, runners).values()]
    low = max(min([0.8, *found]), 1 / _FARTHEST)
    high = min(max([1.25, *found]), _FARTHEST)
    return Scale(low / 1.1, high * 1.1, _LEFT, _WIDTH - _RIGHT, log=True)


def _ratios(run: Mapping[str, Any], runners: Sequence[str]) -> dict[str, float]:
    """Speed relative to the base, by runner."""
    found = {}
    for runner in runners:
        ratio = run["runners"].get(runner, {}).get("speed", {}).get(BASE)
        if ratio is not None:
            found[runner] = ratio["ratio"]
    return found


def _frame(canvas: Canvas, data: Mapping[str, Any], scale: Scale, bottom: float) -> None:
    canvas.text(12, 24, f"Speed relative to {BASE}", 16, bold=True)
    machine = data["machine"]
    settings = data["settings"]
    where = f"{machine['model_name'] or machine['machine']}, {machine['cores']} cores"
    canvas.text(12, 42, f"{where}; medians, {settings['seconds']:g} s per runner and model", 11, FAINT)
    if scale.inside(SLOW):
        canvas.rect(scale(SLOW), _TOP, scale(1.0) - scale(SLOW), bottom - _TOP, "#fdf0e6")
    for value in scale.ticks():
        x = scale(value)
        canvas.line([(x, _TOP), (x, bottom)], GRID, weight=0.8)
        canvas.text(x, bottom + 16, f"{number_text(value)}×", 11, FAINT, anchor="middle")
    canvas.line([(scale(1.0), _TOP), (scale(1.0), bottom)], INK, weight=1.4)
    canvas.text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 34, "slower  ←  speed  →  faster", 11, FAINT, anchor="middle")


def _legend(canvas: Canvas, runners: Sequence[str], threads: Sequence[int]) -> None:
    x = float(_LEFT)
    for k, runner in enumerate(runners):
        for count in threads:
            _dot(canvas, x + 6, 68, k, count == threads[0], "")
            label = f"{runner}, {count} thread{'s' if count > 1 else ''}"
            canvas.text(x + 17, 72, label, 11)
            x += 32 + 6.6 * len(label)
    main = peers.SELF if peers.SELF in runners else BASE
    canvas.text(_WIDTH - _RIGHT + 14, 72, f"time of {main}", 10, FAINT)


def _dots(
    canvas: Canvas,
    case: Mapping[str, Any],
    runners: Sequence[str],
    threads: Sequence[int],
    scale: Scale,
    y: float,
) -> None:
    shown = False
    for run in case.get("runs", ()):
        # ours is drawn last and lies on top
        for runner, ratio in sorted(_ratios(run, runners).items(), key=lambda item: item[0] == peers.SELF):
            text = f"{case['name']}: {runner}, {run['threads']} threads: {ratio:.2f}×"
            place = scale(min(max(ratio, scale.low), scale.high))
            _dot(canvas, place, y, runners.index(runner), run["threads"] == threads[0], text)
            if not scale.inside(ratio):
                low = ratio < scale.low
                text, anchor = f"{number_text(ratio)}×", "start" if low else "end"
                canvas.text(place + (8 if low else -8), y + 4, text, 10, FAINT, anchor=anchor)
            shown = True
    if not shown:
        canvas.text(_LEFT + 8, y + 4, (case.get("problem") and "not measured") or "nothing to compare", 10, FAINT)
    main = peers.SELF if peers.SELF in runners else BASE
    times = [run["runners"][main]["median_seconds"] for run in case.get("runs", ()) if main in run["runners"]]
    if times:
        canvas.text(_WIDTH - _RIGHT + 14, y + 4, "  ".join(_short(t) for t in times), 10, FAINT)


def _dot(canvas: Canvas, x: float, y: float, colour: int, filled: bool, title: str) -> None:
    paint = PALETTE[colour % len(PALETTE)]
    canvas.circle(x, y, _RADIUS, paint if filled else "#ffffff", stroke=paint, weight=1.8, title=title)


def _short(seconds: float) -> str:
    """Three figures with a unit."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        value = seconds * factor
        if value < 1000 or unit == "s":
            digits = max(0, 2 - math.floor(math.log10(max(value, 1e-9))))
            return f"{value:.{min(digits, 2)}f} {unit}"
    raise AssertionError("the last unit takes any value")
