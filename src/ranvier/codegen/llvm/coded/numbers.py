"""What groups of coded weights have one of for every column, as it lies in memory: scales, and what is subtracted.

Most are numbers of one type. But files have kinds of blocks (GGUF's Q4_K and its relatives) in which 16 or 32 weights
share an integer of a few bits, and 256 share what those integers are times. As float32 the scales of such a file take a
fifth to a half of what kernels read. Here a run of groups has its step, as float32, and then a byte for each group:
integer times step is the scale to the last bit. (Not where products pick lanes: there the units that multiply are what
everything waits for, and making one number of two costs more than reading it.)

What is subtracted is either a zero point, in units of codes, or an offset, in units of weights: with zero points that
are no integers, an offset is the number that was rounded once and can be factored likewise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from ranvier.parts import in_parts
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
STEP_BYTES = 4
_SHARED = 256  # weights that have one step
_USUAL = 63  # the largest integer of a run: quantizers let it be as large as its bits allow
_HALVINGS = 8  # of integers of 8 bits
_LOOKED_AT = 256  # runs that are tried before all are
_ROWS = 1 << 13  # of runs at a time: what is made in between stays near the processor
_NEAR = 2.0**-17  # of a step: how far the half may lie that it was
_ROUNDED = 2.0**-21  # of an offset and of half the range of codes: what roundings of float32 left of it


@dataclass(frozen=True)
class Layout:
    """Numbers of one type; or, where ``run`` groups share a step, bytes behind it."""

    dtype: DType
    run: int = 0

    def column(self, groups: int) -> int:
        """Bytes that a column has."""
        item = self.dtype.numpy.itemsize
        return groups // self.run * (STEP_BYTES + self.run * item) if self.run else groups * item

    @property
    def key(self) -> tuple[object, ...]:
        return self.dtype.name, self.run


@dataclass(frozen=True)
class Numbers:
    """[panels, groups, columns of a panel]; or [panels, runs], of each its columns' steps, then [groups, columns]."""

    storage: Storage
    layout: Layout


@dataclass(frozen=True)
class Scaling:
    """What code depends on: how scales lie, and what is subtracted where something is, with its ``middle``."""

    scale: Layout
    zero: Layout | None = None
    middle: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return *self.scale.key, self.zero and self.zero.key, self.middle

    @property
    def stepped(self) -> bool:
        """Whether numbers of groups are made of two."""
        return bool(self.scale.run or (self.zero is not None and self.zero.run))


@dataclass(frozen=True)
class Subtracted:
    """With a ``middle`` numbers are offsets, and weights ``(value + middle) * scale - offset``; without one weights are
    ``(value - zero) * scale``."""

    numbers: Numbers
    middle: int | None


def scales_of(scales: Array, group: int, columns: int) -> Numbers:
    """``scales`` [N, groups]; ``group`` consecutive weights share one (0: others do), and panels have ``columns``."""
    if _is_half(scales):
        return _plain(scales, columns, DType.float16)
    found = factored(scales, group)
    return _plain(scales, columns, DType.float32) if found is None else _runs(*found, columns)


def subtracted_of(zeros: Array, scales: Array, group: int, columns: int, middle: int | None) -> Subtracted | None:
    """``zeros`` [N, groups] are subtracted from values, which lie ``middle`` below their codes where they are integers
    that may have offsets; as float64 they are what zero points were, less that. None: there is nothing to subtract."""
    if not zeros.any():
        return None
    if np.array_equal(zeros, np.clip(np.rint(zeros), -128, 127)):
        return Subtracted(_plain(zeros, columns, DType.int8), None)
    if middle is not None:
        found = factored(zeros, group, scales, middle)
        if found is not None:
            return Subtracted(_runs(*found, columns), middle)
        offsets = _offsets(zeros, scales, middle)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = offsets.astype(np.float16)
            near = np.abs(halves - offsets) <= _slack(offsets, scales, middle)
        if near.all():
            return Subtracted(_plain(halves, columns, DType.float16), middle)
    return Subtracted(_plain(zeros, columns, DType.float32), None)


def _offsets(zeros: Array, scales: Array, middle: int) -> Array:
    """What zero points subtract from weights, which may be more than float32 holds."""
    with np.errstate(over="ignore", invalid="ignore"):
        offsets: Array = (zeros + middle).astype(np.float32) * scales
    return offsets


def _slack(offsets: Array, scales: Array, middle: int) -> Array:
    """How far from the truth offsets are that were divided by scales, and that the middle was taken off."""
    with np.errstate(over="ignore", invalid="ignore"):
        slack: Array = (np.abs(offsets) + np.float32(middle) * np.abs(scales)) * np.float32(_ROUNDED)
    return slack


def _is_half(numbers: Array) -> bool:
    if np.abs(numbers).max(initial=0) >= 65504:
        return False
    return np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)


# -- integers and steps -----------------------------------------------------------------------------------------------


def factored(
    numbers: Array, group: int, scales: Array | None = None, middle: int = 0
) -> tuple[Array, Array] | None:  # fmt: skip
    """[N, groups] as integers of 8 bits times steps [N, runs], if they are that: exactly; or offsets of zero points, of
    these ``scales`` and ``middle``, to what roundings leave."""
    n, groups = numbers.shape
    run = _SHARED // group if group else 0
    if run < 2 or run & (run - 1) or group * run != _SHARED or groups % run or not numbers.size:
        return None
    count = n * groups // run
    rows = numbers.reshape(count, run)
    others = None if scales is None else np.ascontiguousarray(scales).reshape(count, run)

    def taken(some: Any) -> tuple[Array, Array] | None:
        """Their integers and steps. Runs lie side by side, so that what is done to all is done to many at once."""
        turned = np.ascontiguousarray(rows[some].T)
        if others is None:
            return _factored(turned, None)
        beside = np.ascontiguousarray(others[some].T)
        offsets = _offsets(turned, beside, middle)
        return _factored(offsets, _slack(offsets, beside, middle))

    if taken(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)) is None:
        return None
    integers, steps, fits = np.empty((count, run), np.int8), np.empty(count, np.float32), [True]

    def fill(first: int, last: int) -> None:
        found = taken(slice(first, last)) if fits[0] else None
        if found is None:
            fits[0] = False
        else:
            integers[first:last], steps[first:last] = found[0].T, found[1]

    in_parts(fill, count, _ROWS, numbers.nbytes)
    return (integers.reshape(n, groups), steps.reshape(n, groups // run)) if fits[0] else None


def _factored(numbers: Array, slack: Array | None) -> tuple[Array, Array] | None:
    """[groups, runs] of float32: integers of each run, and the step that they are times to be the numbers, or nearly
    so where there is a ``slack``."""
    above, below = numbers.max(axis=0), numbers.min(axis=0)
    most = np.where(above >= -below, above, below)  # the one that is farthest from zero
    if not np.isfinite(most).all():
        return None
    steps = _steps(most, np.float32(_USUAL), slack is None)
    integers, good = _multiples(numbers, slack, steps)
    left = np.flatnonzero(~good)
    if left.size:
        numbers, most = numbers[:, left], most[left]
        top = np.rint(np.abs(most) / _divisor(numbers, np.abs(most)))
        slack = None if slack is None else slack[:, left]
        steps[left] = _steps(most, top, slack is None)
        integers[:, left], good = _multiples(numbers, slack, steps[left])
    return (integers, steps) if good.all() else None


def _steps(most: Array, top: Array | np.float32, exact: bool) -> Array:
    """What the largest numbers are so many of. The least integer of 8 bits is larger than the largest, and has another
    sign. Numbers that are not ``exact`` come from files whose steps are halves: one that is near is the true one."""
    steps: Array = most / np.where(top == 128, np.float32(-128), top)
    if exact:
        return steps
    with np.errstate(over="ignore"):
        halves = steps.astype(np.float16).astype(np.float32)
    return np.where(np.abs(halves - steps) <= np.abs(steps) * np.float32(_NEAR), halves, steps)


def _multiples(numbers: Array, slack: Array | None, steps: Array) -> tuple[Array, Array]:
    """The integers that numbers are of steps, and of which runs they are that."""
    wide = np.rint(numbers / np.where(steps == 0, np.float32(1), steps))
    off = wide * steps
    off -= numbers
    good = (np.abs(off, out=off) <= (0 if slack is None else slack)).all(axis=0)
    good &= wide.max(axis=0) < 128
    good &= wide.min(axis=0) >= -128
    with np.errstate(invalid="ignore"):
        return wide.astype(np.int8), good


def _divisor(numbers: Array, most: Array) -> Array:
    """The largest number that all of a run are multiples of, nearly, as Euclid finds it: take the least off all
    others as often as comes nearest, and what is left is half of it at most."""
    rest = np.abs(numbers)
    nothing = most / np.float32(256)
    for _ in range(_HALVINGS):
        there = np.where(rest > nothing, rest, np.float32(np.inf))
        place = there.argmin(axis=0)[None]
        least = np.take_along_axis(there, place, 0)
        rest = np.abs(rest - np.rint(rest / least) * least)
        if not (rest > nothing).any():
            break
        np.put_along_axis(rest, place, least, 0)
    found: Array = least[0]
    return found


# -- in memory --------------------------------------------------------------------------------------------------------


def _panels(numbers: Array, columns: int, dtype: np.dtype[Any]) -> Array:
    """[N, …] as [panels, …, columns], zeros past the last column."""
    n, count = numbers.shape
    panels = -(-n // columns)
    found = np.zeros((panels * columns, count), dtype)
    found[:n] = numbers
    return found.reshape(panels, columns, count).swapaxes(1, 2)


def _plain(numbers: Array, columns: int, dtype: DType) -> Numbers:
    found = np.ascontiguousarray(_panels(numbers, columns, dtype.numpy))
    return Numbers(Storage.packed(found), Layout(dtype))


def _runs(integers: Array, steps: Array, columns: int) -> Numbers:
    units, each = _panels(steps, columns, np.dtype(np.float32)), _panels(integers, columns, np.dtype(np.int8))
    panels, runs = units.shape[:2]
    run = each.shape[1] // runs
    found = np.empty((panels, runs, columns * (STEP_BYTES + run)), np.uint8)
    found[..., : columns * STEP_BYTES] = np.ascontiguousarray(units).view(np.uint8)
    found[..., columns * STEP_BYTES :] = np.ascontiguousarray(each).view(np.uint8).reshape(panels, runs, -1)
    return Numbers(Storage.packed(found), Layout(DType.int8, run))
