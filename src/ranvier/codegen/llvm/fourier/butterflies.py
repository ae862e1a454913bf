"""Transforms of a few complex points that are in registers: what every pass over a signal is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.llvm.builder import Fn, Val

Point = tuple[Val, Val]  # real and imaginary part, each a vector with one signal per lane
PRIMES = (2, 3, 5, 7, 11, 13)  # more points than twice the largest do not stay in 32 registers


def plus(f: Fn, a: Point, b: Point) -> Point:
    return f.add(a[0], b[0]), f.add(a[1], b[1])


def minus(f: Fn, a: Point, b: Point) -> Point:
    return f.sub(a[0], b[0]), f.sub(a[1], b[1])


def turned(f: Fn, a: Point, cos: Val, sin: Val) -> Point:
    """Times ``cos - i sin``."""
    return f.fma(a[1], sin, a[0] * cos), f.fma(f.neg(a[0]), sin, a[1] * cos)


def butterfly(f: Fn, points: Sequence[Point]) -> list[Point]:
    """Their forward transform: 2, 4, 8 or an odd number of points."""
    count = len(points)
    if count % 2:
        return _odd(f, points)
    half = count // 2
    sums = [plus(f, points[j], points[j + half]) for j in range(half)]
    differences = [minus(f, points[j], points[j + half]) for j in range(half)]
    if count == 2:
        return [*sums, *differences]
    if count == 4:
        even, odd = butterfly(f, sums), _quarter_turned(f, *differences)
    else:
        even, odd = butterfly(f, sums), butterfly(f, _eighths_turned(f, differences))
    return [point for pair in zip(even, odd) for point in pair]


def _quarter_turned(f: Fn, a: Point, b: Point) -> list[Point]:
    """``a - i b`` and ``a + i b``."""
    return [(f.add(a[0], b[1]), f.sub(a[1], b[0])), (f.sub(a[0], b[1]), f.add(a[1], b[0]))]


def _eighths_turned(f: Fn, points: Sequence[Point]) -> list[Point]:
    """Four points, each turned by as many eighths of a circle as its number says."""
    first, second, third, fourth = points
    half = math.sqrt(0.5)
    return [
        first,
        (f.add(second[0], second[1]) * half, f.sub(second[1], second[0]) * half),
        (third[1], f.neg(third[0])),
        (f.sub(fourth[1], fourth[0]) * half, f.add(fourth[0], fourth[1]) * -half),
    ]


def _odd(f: Fn, points: Sequence[Point]) -> list[Point]:
    """Points j and n - j meet the same cosine, and sines that differ in sign."""
    n = len(points)
    half = range(1, n // 2 + 1)
    sums = [plus(f, points[j], points[n - j]) for j in half]
    differences = [minus(f, points[j], points[n - j]) for j in half]
    found = [points[0]] * n
    for each in sums:
        found[0] = plus(f, found[0], each)
    for k in half:
        angles = [2 * math.pi * (j * k % n) / n for j in half]
        even, odd = [points[0][part] for part in (0, 1)], [f.const(points[0][0].type, 0.0)] * 2
        for part in (0, 1):
            for angle, one, other in zip(angles, sums, differences):
                even[part] = f.fma(one[part], math.cos(angle), even[part])
                odd[part] = f.fma(other[part], math.sin(angle), odd[part])
        found[k], found[n - k] = _quarter_turned(f, (even[0], even[1]), (odd[0], odd[1]))
    return found
