"""Which axes of a nest a program's tile covers, and how large the tile is.

A program works on a tile of one or two axes. Each of them, and the number of the program, stands for a *group* of the
nest's axes, counted through like the digits of a number. There are four ways::

    flat      one axis: all points, counted through
    tiled     two axes of the nest, one along which a tensor read is contiguous, one along which the one written is;
              or the last axes, along which a tensor read stands still, and the others
    rows      outer points by row points; the row whole (then what was loaded stays in registers), or in steps
    columns   one axis, outer points; every lane walks its own row

``blocks`` are compile-time sizes of the tile; those that :mod:`ranvier.codegen.triton.tune` varies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from ranvier.codegen.loops.ir import Nest, Reduce, Scan
from ranvier.records import dataclass

Way = Literal["flat", "tiled", "rows", "columns"]
PROCESSORS = 132  # of the GPU that defaults are for; others differ by little
_WHOLE = 16384  # the longest row that is kept in registers
_PER_WARP = 512  # elements
_SEVERAL_FOLDS = 3  # after each of which a program waits: more programs fill the time
_SHORT_ROW = 8  # a row that one lane may walk however few there are: it waits at every fourth step
_NARROWEST = 16  # lanes that read neighbouring elements: whole sectors of memory


@dataclass(frozen=True)
class Plan:
    """How a nest is cut into programs."""

    way: Way
    first: tuple[int, ...]  # axes of the nest along the tile's first axis
    second: tuple[int, ...]  # along its second (rows: the row axes; columns: those that are walked)
    rest: tuple[int, ...]  # those that only the program's number decides
    blocks: tuple[int, int]  # sizes of the tile (1 where there is no such axis)
    whole: bool  # rows: the second block covers the row
    warps: int

    def programs(self, nest: Nest) -> int:
        """How many there are."""
        count = -(-_points(nest, self.first) // self.blocks[0])
        if self.way == "tiled":
            count *= -(-_points(nest, self.second) // self.blocks[1])
        return count * _points(nest, self.rest)

    def tuned(self, first: int, second: int, warps: int) -> Plan:
        return replace(self, blocks=(first, second), warps=warps)


def plan(nest: Nest) -> Plan:
    """The way and the sizes for a nest in normal form."""
    axes = tuple(range(len(nest.extents)))
    if not nest.row:
        return _tiled(nest, axes) or _stretched(nest, axes) or _flat(nest, axes)
    row, outer = tuple(a for a in axes if a in nest.row), nest.outer
    length, lanes = _points(nest, row), _points(nest, outer)
    scans = any(isinstance(s, Scan) for s in nest.stages)
    if not along(nest) and (length <= _SHORT_ROW or scans or lanes >= PROCESSORS * 256):
        block = _between(power_of_two(-(-lanes // (PROCESSORS * 2))), 64, 256)
        block = min(block, power_of_two(lanes))
        return Plan("columns", outer, row, (), (block, 1), False, _warps(block, 128))
    return _rows(nest, outer, row)


def along(nest: Nest) -> bool:
    """Whether most of what is touched lies without gaps along the row, rather than across rows."""
    return _contiguous(nest, tuple(nest.row)) >= _contiguous(nest, nest.outer)


def _flat(nest: Nest, axes: tuple[int, ...]) -> Plan:
    total = _points(nest, axes)
    widest = max((o.dtype.numpy.itemsize for o in nest.operands), default=4)
    most = 2048 if widest <= 2 else 1024
    block = _between(power_of_two(total // (PROCESSORS * 4)), 128, most)
    return Plan("flat", axes, (), (), (block, 1), False, _warps(block, 256))


def _tiled(nest: Nest, axes: tuple[int, ...]) -> Plan | None:
    """Where something large is read along another axis than the one it is written along."""
    points = _points(nest, axes)
    written = nest.written()
    target = _unit_axis(nest, max(written, key=lambda k: _volume(nest, k), default=0))
    if target is None:
        return None
    sources = {
        _unit_axis(nest, k): nest.operands[k].dtype.numpy.itemsize
        for k in range(len(nest.operands))
        if k not in written and _volume(nest, k) * 4 >= points
    }
    if not sources or target in sources or None in sources:
        return None
    source = max(sources, key=lambda a: sources[a])
    assert source is not None
    if min(nest.extents[source], nest.extents[target]) < 8:
        return None
    blocks = [min(64, power_of_two(nest.extents[a])) for a in (source, target)]
    if blocks[0] * blocks[1] == 64 * 64 and sources[source] >= 4:
        blocks[0] = 32
    rest = tuple(a for a in axes if a not in (source, target))
    elements = blocks[0] * blocks[1]
    return Plan("tiled", (source,), (target,), rest, (blocks[0], blocks[1]), False, _warps(elements, 512))


def _stretched(nest: Nest, axes: tuple[int, ...]) -> Plan | None:
    """Where something is read once for all points of the last axes, as a channel's scale is for its pixels."""
    written = nest.written()
    for k, operand in enumerate(nest.operands):
        last = len(axes)
        while last and not operand.strides[last - 1]:
            last -= 1
        length = _points(nest, axes[last:])
        if k in written or operand.at is not None or not 0 < last < len(axes) or length < 64:
            continue
        steps = [r for r in (1024, 512, 256, 128, 64) if -(-length // r) * r <= length * 1.15] or [64]
        first = min(1024 // steps[0], power_of_two(_points(nest, axes[:last])))
        warps = _warps(first * steps[0], 256)
        return Plan("tiled", axes[:last], axes[last:], (), (first, steps[0]), False, warps)
    return None


def _rows(nest: Nest, outer: tuple[int, ...], row: tuple[int, ...]) -> Plan:
    length, lanes = _points(nest, row), _points(nest, outer)
    second = power_of_two(length)
    most = power_of_two(lanes)
    if along(nest):
        whole = second <= _WHOLE
        second = second if whole else 4096
        first = _between(2048 // second, 1, most)
        folds = sum(isinstance(stage, Reduce) for stage in nest.stages)
        while first > 1 and lanes // first < PROCESSORS * (2 if folds < _SEVERAL_FOLDS else 6):
            first //= 2
        return Plan("rows", outer, row, (), (first, second), whole, _warps(first * second, _PER_WARP))
    first = min(64, most)
    while first > _NARROWEST and lanes // first < PROCESSORS:
        first //= 2
    whole = first * second <= 8192
    second = second if whole else max(16, 2048 // first)
    return Plan("rows", outer, row, (), (first, second), whole, _warps(first * second, _PER_WARP))


def _warps(elements: int, each: int) -> int:
    return _between(power_of_two(elements // each), 1, 16)


def _contiguous(nest: Nest, axes: tuple[int, ...]) -> int:
    """Bytes read and written by operands that lie without gaps along one of the axes."""
    found = 0
    for k, operand in enumerate(nest.operands):
        if any(abs(operand.strides[a]) == 1 and nest.extents[a] > 1 for a in axes):
            found += _volume(nest, k) * operand.dtype.numpy.itemsize
    return found


def _unit_axis(nest: Nest, k: int) -> int | None:
    """The longest axis along which an operand lies without gaps."""
    strides = nest.operands[k].strides
    found = [a for a, s in enumerate(strides) if abs(s) == 1]
    return max(found, key=lambda a: nest.extents[a], default=None)


def _volume(nest: Nest, k: int) -> int:
    """How many elements of an operand are touched."""
    return math.prod(n for n, s in zip(nest.extents, nest.operands[k].strides) if s)


def _points(nest: Nest, axes: tuple[int, ...]) -> int:
    return math.prod(nest.extents[a] for a in axes)


def _between(value: int, low: int, high: int) -> int:
    return max(low, min(value, high)) if low <= high else high


def power_of_two(n: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, n - 1).bit_length()
