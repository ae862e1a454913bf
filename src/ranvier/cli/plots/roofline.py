"""The roofline: what each kernel reached, against what arithmetic and memory of this machine allow it.

A kernel that does f operations for each byte it moves cannot do more than f times the bandwidth, nor more than the
arithmetic units can. Kernels without arithmetic have no place on that chart; they stand beside it by their bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ranvier.charts.axes import Scale, number_text
from ranvier.charts.canvas import FAINT, GRID, INK, PALETTE, Canvas, shortened, text_width
from ranvier.cli.plots.timeline import OTHER, colours, family, leaves
from ranvier.codegen.launch import Units
from ranvier.runtime.profile import KernelRecord

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 700, 78, 1080, 96, 640
_STRIP = 950  # where the strip for plain movement begins, if there is any
_LABELS = 14


class Roof(Protocol):
    """Measured peaks, in 10^9 a second."""

    @property
    def gflops(self) -> float: ...
    @property
    def copy_gbs(self) -> float: ...
    @property
    def read_gbs(self) -> float: ...
    def arithmetic(self, units: Units) -> float: ...


@dataclass(frozen=True)
class Point:
    """All calls of one kernel for the same nodes."""

    label: str
    kernel: str
    provider: str
    family: str
    seconds: float
    flops: float
    bytes: float
    share: float  # of the time of all kernels
    units: Units = ""

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def gbs(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else math.inf


def points(records: Sequence[KernelRecord]) -> list[Point]:
    """One point for each kernel and label; the largest share of time first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    kinds: dict[tuple[str, str, str], tuple[str, Units]] = {}
    for r in records:
        key = (r.label, r.kernel, r.provider)
        total = sums.setdefault(key, [0.0, 0.0, 0.0])
        kinds[key] = (family(r), r.units)
        for k, amount in enumerate((r.seconds, r.flops, r.bytes)):
            total[k] += amount
    whole = sum(t[0] for t in sums.values()) or 1.0
    found: list[Point] = []
    for key, (seconds, flops, nbytes) in sums.items():
        kind, units = kinds[key]
        found.append(Point(*key, kind, seconds, flops, nbytes, seconds / whole, units))
    return sorted(found, key=lambda p: -p.seconds)


def draw(title: str, records: Sequence[KernelRecord], roofs: Mapping[int, Roof]) -> Canvas:
    """``roofs`` are the peaks by number of threads; without any the kernels stand alone."""
    records = leaves(records)
    found = points(records)
    work = [p for p in found if p.flops > 0 and p.bytes > 0]
    moves = [p for p in found if p.flops <= 0 < p.bytes]
    paint = colours(records)
    canvas = Canvas(_WIDTH, _HEIGHT)
    canvas.text(12, 24, title, 16, bold=True)
    left_out = len(found) - len(work) - len(moves)
    unknown = f" ({left_out} of unknown work are not shown)" if left_out else ""
    note = f"{len(found)} kernels{unknown}; the larger a circle, the more time it took"
    canvas.text(12, 44, note if roofs else f"{note}; this machine's peaks were not measured", 11, FAINT)
    _legend(canvas, found, paint)
    x, y = _scales(work, roofs, _STRIP - 70 if moves else _RIGHT)
    _frame(canvas, x, y)
    for k, (name, peak, roof) in enumerate(_lines(work, roofs)):
        _roof(canvas, x, y, name, peak, roof, k)
    taken: list[tuple[float, float, float, float]] = []
    spots = [(x(p.intensity), y(max(p.gflops, y.low)), p) for p in work]
    for at_x, at_y, p in spots:
        _circle(canvas, at_x, at_y, p, paint)
        r = _radius(p)
        taken.append((at_x - r, at_y - r, at_x + r, at_y + r))
    for at_x, at_y, p in spots[:_LABELS]:
        _label(canvas, at_x, at_y, p, taken, x.end)
    if moves:
        _strip(canvas, moves, roofs, paint)
    return canvas


def _lines(work: Sequence[Point], roofs: Mapping[int, Roof]) -> list[tuple[str, float, Roof]]:
    """Names and peaks of arithmetic: of vectors by the number of threads, and, with most threads, of other units that
    kernels used; beginning with the vectors of most threads."""
    found: list[tuple[str, float, Roof]] = []
    for threads, roof in sorted(roofs.items(), reverse=True):
        name = f"{threads} thread{'s' if threads > 1 else ''}: {roof.gflops:.0f} GFLOP/s"
        found.append((f"{name}, {roof.copy_gbs:.0f} GB/s copied", roof.gflops, roof))
    if found:
        most, roof = max(roofs), roofs[max(roofs)]
        others = sorted({p.units for p in work if p.units}, key=roof.arithmetic)
        by = f"by {most} thread{'s' if most > 1 else ''}"
        found += [(f"{u} {by}: {roof.arithmetic(u):.0f} GFLOP/s", roof.arithmetic(u), roof) for u in others]
    return found


def _scales(work: Sequence[Point], roofs: Mapping[int, Roof], end: float) -> tuple[Scale, Scale]:
    intensities = [p.intensity for p in work] or [1.0]
    rates = [p.gflops for p in work] or [1.0]
    lines = _lines(work, roofs)
    peaks = [peak for _, peak, _ in lines]
    ridges = [peak / roof.copy_gbs for _, peak, roof in lines]
    high = max([*rates, *peaks]) * 1.6
    low = max(min(rates) / 2, high / 1e6)
    left, right = min([*intensities, 0.1]) / 1.5, max([*intensities, *(4 * r for r in ridges), 10.0]) * 1.5
    return Scale(left, right, _LEFT, end, log=True), Scale(low, high, _BOTTOM, _TOP, log=True)


def _frame(canvas: Canvas, x: Scale, y: Scale) -> None:
    for value in x.ticks():
        canvas.line([(x(value), _TOP), (x(value), _BOTTOM)], GRID, weight=0.8)
        canvas.text(x(value), _BOTTOM + 18, number_text(value), 11, FAINT, anchor="middle")
    for value in y.ticks():
        canvas.line([(_LEFT, y(value)), (x.end, y(value))], GRID, weight=0.8)
        canvas.text(_LEFT - 8, y(value) + 4, number_text(value), 11, FAINT, anchor="end")
    canvas.line([(_LEFT, _TOP), (_LEFT, _BOTTOM), (x.end, _BOTTOM)], FAINT)
    canvas.text((_LEFT + x.end) / 2, _BOTTOM + 42, "operations for each byte moved (FLOP/byte)", 12, anchor="middle")
    canvas.text(20, (_TOP + _BOTTOM) / 2, "GFLOP/s", 12, anchor="middle", turned=True)


def _roof(canvas: Canvas, x: Scale, y: Scale, name: str, peak: float, roof: Roof, number: int) -> None:
    """The line, and its name in the corner that no kernel can reach."""
    strong = number == 0
    ridge = min(max(peak / roof.copy_gbs, x.low), x.high)
    foot = max(x.low, y.low / roof.copy_gbs)
    line = [(x(foot), y(foot * roof.copy_gbs)), (x(ridge), y(peak)), (x(x.high), y(peak))]
    style: dict[str, Any] = {"weight": 2.0} if strong else {"weight": 1.4, "dashes": (6.0, 4.0)}
    canvas.line(line, INK if strong else FAINT, **style)
    place = _TOP + 18 + 18 * number
    canvas.line([(_LEFT + 12, place - 4), (_LEFT + 40, place - 4)], INK if strong else FAINT, **style)
    canvas.text(_LEFT + 48, place, name, 11, INK if strong else FAINT)


def _radius(p: Point) -> float:
    return 3.0 + 22.0 * math.sqrt(p.share)


def _circle(canvas: Canvas, at_x: float, at_y: float, p: Point, paint: Mapping[str, str]) -> None:
    title = f"{p.label}\n{p.kernel}\n{p.gflops:.1f} GFLOP/s, {p.gbs:.1f} GB/s, {p.share:.1%} of the time"
    canvas.circle(at_x, at_y, _radius(p), paint.get(p.family, PALETTE[-1]), stroke="#ffffff", weight=1.0, title=title)


def _label(
    canvas: Canvas,
    at_x: float,
    at_y: float,
    p: Point,
    taken: list[tuple[float, float, float, float]],
    edge: float,
) -> None:
    """Beside its circle where nothing else is; left out where there is no room."""
    size = 10.0
    text = shortened(p.label or p.kernel, size, 170)
    if not text:
        return
    wide, r = text_width(text, size), _radius(p)
    places = [
        (at_x + r + 4, at_y + 4),
        (at_x - r - 4 - wide, at_y + 4),
        (at_x - wide / 2, at_y - r - 5),
        (at_x - wide / 2, at_y + r + 13),
        (at_x + r + 2, at_y - r),
        (at_x + r + 2, at_y + r + 8),
    ]
    for left, base in places:
        box = (left, base - size, left + wide, base + 3)
        free = all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken)
        if free and box[0] > _LEFT and box[2] < edge and box[1] > _TOP and box[3] < _BOTTOM:
            canvas.text(left, base, text, size)
            taken.append(box)
            return


def _strip(canvas: Canvas, moves: Sequence[Point], roofs: Mapping[int, Roof], paint: Mapping[str, str]) -> None:
    """Kernels that only move data, by their bandwidth."""
    best = [roof.copy_gbs for roof in roofs.values()]
    rates = [p.gbs for p in moves] or [1.0]
    high = max([*rates, *best]) * 1.6
    y = Scale(max(min(rates) / 2, high / 1e5), high, _BOTTOM, _TOP, log=True)
    for value in y.ticks():
        canvas.line([(_STRIP, y(value)), (_RIGHT, y(value))], GRID, weight=0.8)
        canvas.text(_STRIP - 8, y(value) + 4, number_text(value), 11, FAINT, anchor="end")
    canvas.line([(_STRIP, _TOP), (_STRIP, _BOTTOM), (_RIGHT, _BOTTOM)], FAINT)
    for threads, roof in sorted(roofs.items()):
        strong = threads == max(roofs)
        style = {"weight": 2.0} if strong else {"weight": 1.4, "dashes": (6.0, 4.0)}
        canvas.line([(_STRIP, y(roof.copy_gbs)), (_RIGHT, y(roof.copy_gbs))], INK if strong else FAINT, **style)
    canvas.text((_STRIP + _RIGHT) / 2, _BOTTOM + 18, "no arithmetic", 11, FAINT, anchor="middle")
    canvas.text(_STRIP - 46, (_TOP + _BOTTOM) / 2, "GB/s", 12, anchor="middle", turned=True)
    for k, p in enumerate(moves):
        column = _STRIP + 24 + (k % 5) * (_RIGHT - _STRIP - 48) / 4
        _circle(canvas, column, y(max(p.gbs, y.low)), p, paint)


def _legend(canvas: Canvas, found: Sequence[Point], paint: Mapping[str, str]) -> None:
    shares: dict[str, float] = {}
    for p in found:
        name = p.family if p.family in paint else OTHER
        shares[name] = shares.get(name, 0.0) + p.share
    x = 12.0
    for name, colour in paint.items():
        label = f"{shortened(name, 11, 120)} {shares.get(name, 0.0):.0%}"
        if x + 30 + text_width(label, 11) > _WIDTH:
            break
        canvas.circle(x + 6, 66, 6, colour)
        canvas.text(x + 17, 70, label, 11)
        x += 30 + text_width(label, 11)
