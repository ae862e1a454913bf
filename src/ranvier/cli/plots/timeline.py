"""The timeline of one run: a bar for every kernel, as high as it had threads, over several lines where it is long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ranvier.charts.axes import Scale, number_text, round_step
from ranvier.charts.canvas import FAINT, GRID, INK, PALETTE, Canvas, shortened
from ranvier.cli.render import seconds_text
from ranvier.runtime.profile import KernelRecord

OTHER = "other"
_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 60, 20, 74
_LANE, _AXIS, _GAP = 26, 22, 14
_BARS_PER_LINE, _MOST_LINES = 45, 8


def family(record: KernelRecord) -> str:
    """Kernels of one kind begin with the same word."""
    return record.kernel.split()[0] if record.kernel.strip() else "?"


def colours(records: Sequence[KernelRecord]) -> dict[str, str]:
    """A colour for each of the families that take most time; the others share the last one."""
    times: dict[str, float] = {}
    for record in records:
        times[family(record)] = times.get(family(record), 0.0) + record.seconds
    ranked = sorted(times, key=lambda name: -times[name])
    kept = ranked if len(ranked) <= len(PALETTE) else ranked[: len(PALETTE) - 1]
    found = dict(zip(kept, PALETTE))
    if len(kept) < len(ranked):
        found[OTHER] = PALETTE[-1]
    return found


def leaves(records: Sequence[KernelRecord]) -> list[KernelRecord]:
    """Without those that hold others inside: an If takes the time of its body."""
    ordered = sorted(records, key=lambda r: (r.start_ns, -r.end_ns))
    return [r for r, after in zip(ordered, [*ordered[1:], None]) if after is None or after.end_ns > r.end_ns]


def draw(title: str, records: Sequence[KernelRecord], start: int, end: int) -> Canvas:
    """Kernels of the run from ``start`` to ``end``; those inside another one (bodies of control flow) below it."""
    shown = [r for r in records if start <= r.start_ns and r.end_ns <= end]
    levels = _levels(shown)
    threads = max((r.threads for r in shown), default=1)
    lanes = threads + max(levels.values(), default=0)
    lines = max(1, min(_MOST_LINES, math.ceil(len(shown) / _BARS_PER_LINE)))
    height = lanes * _LANE + _AXIS
    paint = colours(leaves(shown))
    legend = _legend_rows(paint)
    top = _TOP + 18 * len(legend)
    canvas = Canvas(_WIDTH, top + lines * (height + _GAP) + 6)
    busy = sum(r.seconds for r in shown if levels[id(r)] == 0)
    canvas.text(12, 24, title, 16, bold=True)
    whole = (end - start) / 1e6
    count = f"{len(shown)} kernels" if len(shown) != 1 else "1 kernel"
    about = f"one run of {seconds_text(whole / 1e3)}, {count}, {busy * 1e3 / max(whole, 1e-9):.0%} of the time inside"
    if threads > 1:
        about += f"; a bar is as high as it had threads, up to {threads}"
    canvas.text(12, 44, about, 11, FAINT)
    _legend(canvas, legend, leaves(shown), paint)
    length = (end - start) / lines
    step = round_step(length / 1e6 / 8)
    for line in range(lines):
        y = top + line * (height + _GAP)
        first = start + line * length
        scale = Scale(first, first + length, _LEFT, _WIDTH - _RIGHT)
        _axis(canvas, scale, start, y, y + lanes * _LANE, step)
        for record in shown:
            _bar(canvas, record, scale, y, levels[id(record)], threads, paint)
    return canvas


def _levels(records: Sequence[KernelRecord]) -> dict[int, int]:
    """How many kernels each one lies inside."""
    found: dict[int, int] = {}
    around: list[KernelRecord] = []
    for record in sorted(records, key=lambda r: (r.start_ns, -r.end_ns)):
        while around and around[-1].end_ns < record.end_ns:
            around.pop()
        found[id(record)] = len(around)
        around.append(record)
    return found


def _axis(canvas: Canvas, scale: Scale, start: int, top: float, bottom: float, step: float) -> None:
    canvas.rect(_LEFT, top, _WIDTH - _RIGHT - _LEFT, bottom - top, "#f7f7f7")
    first = math.ceil((scale.low - start) / 1e6 / step - 1e-9)
    for k in range(first, math.floor((scale.high - start) / 1e6 / step + 1e-9) + 1):
        x = scale(start + k * step * 1e6)
        canvas.line([(x, top), (x, bottom + 4)], GRID, weight=0.8)
        canvas.text(x, bottom + 16, number_text(k * step), 10, FAINT, anchor="middle")
    canvas.text(_LEFT - 10, bottom + 16, "ms", 10, FAINT, anchor="end")
    canvas.line([(_LEFT, bottom), (_WIDTH - _RIGHT, bottom)], FAINT, weight=0.8)


def _bar(
    canvas: Canvas,
    record: KernelRecord,
    scale: Scale,
    top: float,
    level: int,
    threads: int,
    paint: Mapping[str, str],
) -> None:
    """The part of a kernel that falls on this line."""
    if record.end_ns < scale.low or record.start_ns >= scale.high:
        return
    left, right = scale(max(record.start_ns, scale.low)), scale(min(record.end_ns, scale.high))
    lanes = threads if level == 0 else 1
    height = (_LANE * lanes - 2) * (record.threads / threads if level == 0 else 1)
    y = top + (0 if level == 0 else threads + level - 1) * _LANE + 1
    kind = family(record)
    width = max(right - left, 0.4)
    # a thin border in the colour of the paper keeps neighbours of one colour apart, where there is room for it
    border = {"stroke": "#ffffff", "weight": 0.6} if width > 3 else {}
    canvas.rect(left, y, width, height, paint.get(kind, PALETTE[-1]), title=_title(record), **border)
    text = shortened(record.label or record.kernel, 10, width - 6)
    if text and height >= 13:
        canvas.text(left + 3, y + min(height, _LANE) / 2 + 3.5, text, 10, "#ffffff" if _dark(paint.get(kind)) else INK)


def _title(record: KernelRecord) -> str:
    rate = record.flops / record.seconds / 1e9
    moved = record.bytes / record.seconds / 1e9
    return (
        f"{record.label}\n{record.kernel} on {record.provider}, {record.threads} threads\n"
        f"{record.seconds * 1e6:.1f} µs, {rate:.1f} GFLOP/s, {moved:.1f} GB/s"
    )


def _dark(colour: str | None) -> bool:
    if colour is None:
        return True
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def _legend_rows(paint: Mapping[str, str]) -> list[list[str]]:
    """Families in rows of at most five."""
    names = list(paint)
    return [names[k : k + 5] for k in range(0, len(names), 5)]


def _legend(
    canvas: Canvas, rows: Sequence[Sequence[str]], records: Sequence[KernelRecord], paint: Mapping[str, str]
) -> None:
    times: dict[str, float] = {}
    for record in records:
        name = family(record) if family(record) in paint else OTHER
        times[name] = times.get(name, 0.0) + record.seconds
    whole = sum(times.values()) or 1.0
    for row, names in enumerate(rows):
        for k, name in enumerate(names):
            x, y = 12 + k * 235, 58 + row * 18
            canvas.rect(x, y, 12, 12, paint[name])
            label = f"{shortened(name, 11, 150)}  {times.get(name, 0.0) / whole:.1%}"
            canvas.text(x + 18, y + 10, label, 11)
