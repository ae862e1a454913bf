"""Curves of a run, drawn while it goes on: a picture (PNG, SVG), or a page that looks for news by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ranvier.charts.axes import Scale, number_text
from ranvier.charts.canvas import FAINT, GRID, INK, PALETTE, Canvas
from ranvier.errors import CannotWrite, InvalidConfig
from ranvier.formats.files import write_files

Curve = Sequence[tuple[int, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760.0, 260.0, 70.0, 20.0, 44.0, 36.0
_MOST = 600  # points of a curve; more cannot be told apart
_AGAIN = 5  # seconds after which a page is read again


class LivePlot:
    """Draws the curves into a file whenever enough time has passed; the file is whole whenever it is looked at."""

    def __init__(self, path: str | Path, *, every: float = 10.0) -> None:
        self._path = Path(path)
        if self._path.suffix.lower() not in (".png", ".svg", ".html"):
            raise InvalidConfig(f"cannot draw into {self._path.name!r}: the name must end in .png, .svg or .html")
        self._every = every
        self._drawn = -math.inf

    def update(self, curves: Mapping[str, Curve], title: str, *, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self._drawn < self._every:
            return
        canvas = draw(curves, title)
        if self._path.suffix.lower() == ".html":
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CannotWrite(f"cannot write {str(self._path)!r}: {error.strerror or error}") from error
            write_files({self._path: [_page(canvas, title, again=not last).encode()]})
        else:
            canvas.write(self._path)
        self._drawn = time.monotonic()


def draw(curves: Mapping[str, Curve], title: str) -> Canvas:
    """A panel for each quantity; ``loss`` and ``validation_loss`` share one."""
    panels: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        found = [(step, value) for step, value in curve if math.isfinite(value)]
        if found:
            panels.setdefault(name.removeprefix("validation_"), {})[name] = _thinned(found)
    canvas = Canvas(_WIDTH, 34 + _HEIGHT * max(len(panels), 1))
    canvas.text(14, 24, title, 15, bold=True)
    for k, (quantity, members) in enumerate(panels.items()):
        _panel(canvas, 34 + k * _HEIGHT, quantity, members)
    return canvas


def _panel(canvas: Canvas, top: float, quantity: str, members: Mapping[str, Curve]) -> None:
    values = [value for curve in members.values() for _, value in curve]
    steps = [step for curve in members.values() for step, _ in curve]
    low, high = min(values), max(values)
    log = quantity.endswith("loss") and low > 0 and high / low > 20
    if not log:
        margin = (high - low) * 0.05 or max(abs(high), 1e-12) * 0.1
        low, high = low - margin, high + margin
    across = Scale(min(steps), max(max(steps), min(steps) + 1), _LEFT, _WIDTH - _RIGHT)
    upwards = Scale(low, high, top + _HEIGHT - _BOTTOM, top + _TOP, log=log)
    canvas.text(_LEFT, top + 26, quantity.replace("_", " "), 13, bold=True)
    for value in upwards.ticks():
        y = upwards(value)
        canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], GRID, weight=0.8)
        canvas.text(_LEFT - 8, y + 4, number_text(value), 11, FAINT, anchor="end")
    for value in across.ticks():
        canvas.text(across(value), top + _HEIGHT - _BOTTOM + 16, number_text(value), 11, FAINT, anchor="middle")
    canvas.line([(_LEFT, upwards.start), (_WIDTH - _RIGHT, upwards.start)], INK)
    right = _WIDTH - _RIGHT
    for k, (name, curve) in reversed(list(enumerate(members.items()))):
        points = [(across(step), upwards(value)) for step, value in curve]
        if len(points) > 1:
            canvas.line(points, PALETTE[k], weight=1.8)
        for x, y in points if len(points) <= 40 else points[-1:]:
            canvas.circle(x, y, 2.6, PALETTE[k], title=f"{name}: {curve[-1][1]:.5g}")
        text = f"{name.replace('_', ' ')} {curve[-1][1]:.4g}"
        canvas.text(right, top + 26, text, 11, PALETTE[k], anchor="end")
        right -= 7.0 * len(text) + 16


def _thinned(curve: Curve) -> Curve:
    """As many points as can be seen, each the mean of those it stands for; the last stays as it is."""
    if len(curve) <= _MOST:
        return curve
    size = math.ceil(len(curve) / _MOST)
    parts = [curve[k : k + size] for k in range(0, len(curve), size)]
    return [(part[-1][0], sum(v for _, v in part) / len(part)) for part in parts]


def _page(canvas: Canvas, title: str, *, again: bool) -> str:
    refresh = f'<meta http-equiv="refresh" content="{_AGAIN}">' if again else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}<title>{escape(title)}</title></head>'
        f'<body style="margin:16px">{canvas.svg()}</body></html>\n'
    )
