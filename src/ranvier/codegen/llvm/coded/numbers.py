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

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.codegen.llvm.coded.coupled import FACTOR, SCALES, ZEROS
from ranvier.codegen.llvm.coded.packer import WORDS, Packing
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.pages import packed_empty
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from ranvier.parts import in_parts, side_by_side
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
STEP_BYTES = 4
_SHARED = 256  # weights that have one step
_USUAL = 63  # the largest integer of a run, of many files: quantizers let it be as large as its bits allow
_HALVINGS = 8  # of integers of 8 bits
_LOOKED_AT = 256  # runs that are tried before all are
_ROWS = 1 << 13  # of runs at a time: what is made in between stays near the processor
_NEAR = 2.0**-17  # of a step: how far the half may lie that it was
_ROUNDED = 2.0**-21  # of an offset and of half the range of codes: what roundings of float32 left of it
_AT_A_TIME = 1 << 16  # numbers that are looked at, or brought to panels
_SHORT = 64  # k of a coupled group: there widening scales of float16 takes longer than reading as many of float32


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


@dataclass(frozen=True)
class Columns:
    """Those of a panel. ``coupled``: the k of a group whose columns share bytes by twos (``coupled.py``), whose vectors
    have so many ``lanes``; 0: they do not. Without an ``isa`` no code is made to bring numbers there."""

    count: int
    lanes: int = 0
    coupled: int = 0
    isa: Isa | None = None


def scales_of(scales: Array, group: int, columns: Columns) -> Numbers:
    """``scales`` [N, groups]; ``group`` consecutive weights share one (0: others do)."""
    if _is_half(scales):
        return _plain(scales, 0, columns, DType.float16, SCALES)
    found = factored(scales, group)
    return _plain(scales, 0, columns, DType.float32, SCALES) if found is None else _runs(*found, columns.count)


def subtracted_of(
    zeros: Array, scales: Array, group: int, columns: Columns, middle: int | None, below: int = 0
) -> Subtracted | None:  # fmt: skip
    """``zeros`` [N, groups], less what they are ``below`` of, are subtracted from values, which lie ``middle`` below
    their codes where they are integers that may have offsets. None: there is nothing to subtract."""
    if _all(zeros, lambda some: not _less(some, below).any()):
        return None
    if _all(zeros, lambda some: _is_byte(_less(some, below))):
        return Subtracted(_plain(zeros, below, columns, DType.int8, ZEROS), None)
    if middle is not None:
        found = factored(zeros, group, scales, middle, below)
        if found is not None:
            return Subtracted(_runs(*found, columns.count), middle)
        offsets = _offsets(_less(zeros, below), scales, middle)
        with np.errstate(over="ignore", invalid="ignore"):
            halves = offsets.astype(np.float16)
            near = np.abs(halves - offsets) <= _slack(offsets, scales, middle)
        if near.all():
            return Subtracted(_plain(halves, 0, columns, DType.float16, ZEROS), middle)
    return Subtracted(_plain(zeros, below, columns, DType.float32, ZEROS), None)


def _less(zeros: Array, below: int) -> Array:
    """What is subtracted, exactly."""
    return zeros - np.float64(below) if below else zeros


def _is_byte(numbers: Array) -> bool:
    return np.array_equal(numbers, np.clip(np.rint(numbers), -128, 127))


def _all(numbers: Array, are: Callable[[Array], bool]) -> bool:
    """Whether all are something; most that are not show it at once."""
    step = max(1, _AT_A_TIME // max(1, numbers.shape[1]))
    others = range(step, len(numbers), step)
    return are(numbers[:step]) and all(
        side_by_side(lambda first: are(numbers[first : first + step]), others, numbers.nbytes)
    )


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
    def are(some: Array) -> bool:
        if np.abs(some).max(initial=0) >= 65504:
            return False
        return np.array_equal(some.astype(np.float16).astype(np.float32), some)

    return _all(numbers, are)


# -- integers and steps -----------------------------------------------------------------------------------------------


def factored(
    numbers: Array, group: int, scales: Array | None = None, middle: int = 0, below: int = 0
) -> tuple[Array, Array] | None:  # fmt: skip
    """[N, groups] as integers of 8 bits times steps [N, runs], if they are that: exactly; or offsets of zero points,
    less what those are ``below`` of, of these ``scales`` and ``middle``, to what roundings leave."""
    n, groups = numbers.shape
    run = _SHARED // group if group else 0
    if run < 2 or run & (run - 1) or group * run != _SHARED or groups % run or not numbers.size:
        return None
    count = n * groups // run
    rows = numbers.reshape(count, run)
    others = None if scales is None else np.ascontiguousarray(scales).reshape(count, run)

    def taken(some: Any, usual: int) -> tuple[Array, Array] | None:
        """Their integers and steps. Runs lie side by side, so that what is done to all is done to many at once."""
        turned = np.ascontiguousarray(rows[some].T)
        if others is None:
            return _factored(turned, None, usual)
        beside = np.ascontiguousarray(others[some].T)
        offsets = _offsets(_less(turned, below), beside, middle)
        return _factored(offsets, _slack(offsets, beside, middle), usual)

    first = taken(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64), _USUAL)
    if first is None:
        return None
    usual = int(np.bincount(np.abs(first[0].astype(np.int16)).max(axis=0)).argmax()) or _USUAL
    integers, steps, fits = np.empty((count, run), np.int8), np.empty(count, np.float32), [True]

    def fill(first: int, last: int) -> None:
        found = taken(slice(first, last), usual) if fits[0] else None
        if found is None:
            fits[0] = False
        else:
            integers[first:last], steps[first:last] = found[0].T, found[1]

    in_parts(fill, count, _ROWS, numbers.nbytes)
    return (integers.reshape(n, groups), steps.reshape(n, groups // run)) if fits[0] else None


def _factored(numbers: Array, slack: Array | None, usual: int) -> tuple[Array, Array] | None:
    """[groups, runs] of float32: integers of each run, and the step that they are times to be the numbers, or nearly
    so where there is a ``slack``. ``usual``: the largest integer that most runs have, which is tried first."""
    above, below = numbers.max(axis=0), numbers.min(axis=0)
    most = np.where(above >= -below, above, below)  # the one that is farthest from zero
    if not np.isfinite(most).all():
        return None
    steps = _steps(most, np.float32(usual), slack is None)
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


def _plain(numbers: Array, below: int, columns: Columns, dtype: DType, which: int) -> Numbers:
    """Numbers of one type, less what they are ``below`` of. Those that one of two coupled vectors has are times the
    factor: in float32 where their type has no such number, or takes longer to read."""
    if dtype is DType.float16 and 0 < columns.coupled < _SHORT:
        dtype = DType.float32
    if dtype is not DType.float32:
        narrow = _in_panels(numbers, below, columns, dtype)
        if not columns.coupled:
            return Numbers(Storage.packed(narrow), Layout(dtype))
        wide = narrow.astype(np.float32)
        _enlarge(wide, columns, which)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = wide.astype(dtype.numpy)
            if np.array_equal(narrow.astype(np.float32), wide):
                return Numbers(Storage.packed(narrow), Layout(dtype))
    return Numbers(Storage.packed(_floats(numbers, below, columns, which)), Layout(DType.float32))


def _floats(numbers: Array, below: int, columns: Columns, which: int) -> Array:
    (n, groups), isa = numbers.shape, columns.isa
    packing = Packing(32, WORDS, numbers=True)
    if numbers.dtype == np.float32 and isa is not None and packing.suits(4 * groups, numbers.nbytes, isa):
        found = _room(n, groups, columns, DType.float32)
        times = [FACTOR if columns.coupled and v == which else 1 for v in range(2)]
        packing.pack(lambda first, last: numbers[first:last], n, 4 * groups, found, isa, below, (times[0], times[1]))
        return found
    found = _in_panels(numbers, below, columns, DType.float32)
    if columns.coupled:
        _enlarge(found, columns, which)
    return found


def _in_panels(numbers: Array, below: int, columns: Columns, dtype: DType) -> Array:
    n, groups = numbers.shape
    found, count = _room(n, groups, columns, dtype), columns.count

    def fill(first: int, last: int) -> None:
        some = _less(numbers[first * count : last * count], below)
        found[first:last] = _panels(some, count, found.dtype)

    in_parts(fill, len(found), max(1, _AT_A_TIME // max(1, groups * count)), found.nbytes)
    return found


def _room(n: int, groups: int, columns: Columns, dtype: DType) -> Array:
    return packed_empty((-(-n // columns.count), groups, columns.count), dtype.numpy)


def _enlarge(numbers: Array, columns: Columns, which: int) -> None:
    with np.errstate(over="ignore"):
        numbers.reshape(-1, 2, columns.lanes)[:, which] *= np.float32(FACTOR)


def _runs(integers: Array, steps: Array, columns: int) -> Numbers:
    units, each = _panels(steps, columns, np.dtype(np.float32)), _panels(integers, columns, np.dtype(np.int8))
    panels, runs = units.shape[:2]
    run = each.shape[1] // runs
    found = np.empty((panels, runs, columns * (STEP_BYTES + run)), np.uint8)
    found[..., : columns * STEP_BYTES] = np.ascontiguousarray(units).view(np.uint8)
    found[..., columns * STEP_BYTES :] = np.ascontiguousarray(each).view(np.uint8).reshape(panels, runs, -1)
    return Numbers(Storage.packed(found), Layout(DType.int8, run))
