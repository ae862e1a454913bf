"""Winograd's minimal filtering F(m x m, 3 x 3): matrices and the code of its one-dimensional transforms.

The polynomials are evaluated at 0, ±a (±b, ±c) and infinity. Textbooks take 1, 2 and 1/2; these points give a fifth of
their rounding error for m = 4 and two thirds for m = 6, and their squares and products are exact in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ranvier.codegen.llvm.builder import Fn, Val

Array = np.ndarray[Any, Any]
_POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.6875, 1.375), 6: (0.5625, 1.125, 1.9375)}


def filter_matrix(m: int) -> Array:
    """G: a kernel row of three taps becomes m + 2 values."""
    positive = _POINTS[m]
    points = [0.0, *(s * p for p in positive for s in (1, -1))]
    rows = []
    for p in points:
        others = np.prod([p - q for q in points if q != p])
        rows.append([p**j / others for j in range(3)])
    return np.array([*rows, [0.0, 0.0, 1.0]])


@functools.cache
def filter_transform(m: int, dtype: Any) -> Array:
    """The matrix that takes the nine taps of a kernel to its (m + 2)² transformed values."""
    g = filter_matrix(m)
    return np.kron(g, g).astype(dtype)


def filter_values(f: Fn, m: int, g: list[Val]) -> list[Val]:
    """Three taps of a line, transformed, in the order of ``filter_matrix``: points that differ in their sign share the
    even and the odd part."""
    rows = filter_matrix(m)
    found = [float(rows[0][0]) * g[0]]
    for k in range(1, len(rows) - 1, 2):
        even = f.fma(float(rows[k][2]), g[2], float(rows[k][0]) * g[0])
        odd = float(rows[k][1]) * g[1]
        found += [even + odd, even - odd]
    return [*found, g[2]]


def input_transform(f: Fn, m: int, d: list[Val]) -> list[Val]:
    """m + 2 inputs of a line, transformed; in the order 0, a, -a (, b, -b …), infinity."""
    if m == 2:
        return [d[2] - d[0], d[2] + d[1], d[2] - d[1], d[3] - d[1]]
    if m == 6:
        return _input_of_eight(f, d)
    a, b = _POINTS[4]
    aa, bb = a * a, b * b
    even_a, odd_a = f.fma(-bb, d[2], d[4]), f.fma(-bb, d[1], d[3])
    even_b, odd_b = f.fma(-aa, d[2], d[4]), f.fma(-aa, d[1], d[3])
    return [
        f.fma(aa * bb, d[0], f.fma(-(aa + bb), d[2], d[4])),
        f.fma(a, odd_a, even_a),
        f.fma(-a, odd_a, even_a),
        f.fma(b, odd_b, even_b),
        f.fma(-b, odd_b, even_b),
        f.fma(aa * bb, d[1], f.fma(-(aa + bb), d[3], d[5])),
    ]


def _input_of_eight(f: Fn, d: list[Val]) -> list[Val]:
    squares = [p * p for p in _POINTS[6]]
    aa, bb, cc = squares

    def all_points(first: int) -> Val:
        """The polynomial with all of ±a, ±b, ±c as zeros, at every second input."""
        inner = f.fma(-(aa + bb + cc), d[first + 4], d[first + 6])
        return f.fma(-(aa * bb * cc), d[first], f.fma(aa * bb + aa * cc + bb * cc, d[first + 2], inner))

    found = [all_points(0)]
    for k, point in enumerate(_POINTS[6]):
        one, other = (s for n, s in enumerate(squares) if n != k)
        even = f.fma(one * other, d[2], f.fma(-(one + other), d[4], d[6]))
        odd = f.fma(one * other, d[1], f.fma(-(one + other), d[3], d[5]))
        found += [f.fma(point, odd, even), f.fma(-point, odd, even)]
    return [*found, all_points(1)]


def output_transform(f: Fn, m: int, v: list[Val]) -> list[Val]:
    """m outputs of a line from its m + 2 products."""
    if m == 2:
        return [v[0] + (v[1] + v[2]), v[3] + (v[1] - v[2])]
    if m == 6:
        return _output_of_six(f, v)
    a, b = _POINTS[4]
    sum_a, dif_a, sum_b, dif_b = v[1] + v[2], v[1] - v[2], v[3] + v[4], v[3] - v[4]
    return [
        v[0] + (sum_a + sum_b),
        f.fma(a, dif_a, b * dif_b),
        f.fma(a * a, sum_a, (b * b) * sum_b),
        f.fma(a**3, dif_a, f.fma(b**3, dif_b, v[5])),
    ]


def _output_of_six(f: Fn, v: list[Val]) -> list[Val]:
    a, b, c = _POINTS[6]
    sums = [v[k] + v[k + 1] for k in (1, 3, 5)]
    differences = [v[k] - v[k + 1] for k in (1, 3, 5)]

    def power(k: int, parts: list[Val]) -> Val:
        return f.fma(a**k, parts[0], f.fma(b**k, parts[1], c**k * parts[2]))

    found = [v[0] + (sums[0] + (sums[1] + sums[2]))]
    found += [power(k, differences if k % 2 else sums) for k in range(1, 5)]
    last = f.fma(a**5, differences[0], f.fma(b**5, differences[1], f.fma(c**5, differences[2], v[7])))
    return [*found, last]


def output_gradient(f: Fn, m: int, y: list[Val]) -> list[Val]:
    """The other way round than ``output_transform``: what m slopes of outputs are for the m + 2 products."""
    found = [y[0]]
    for point in _POINTS[m]:
        even, odd = y[0], point * y[1]
        for k in range(2, m):
            if k % 2:
                odd = f.fma(point**k, y[k], odd)
            else:
                even = f.fma(point**k, y[k], even)
        found += [even + odd, even - odd]
    return [*found, y[m - 1]]


def filter_gradient(f: Fn, m: int, u: list[Val]) -> list[Val]:
    """The other way round than ``filter_values``: what m + 2 slopes are for the three taps of a line."""
    rows = filter_matrix(m)
    first, second, third = float(rows[0][0]) * u[0], None, u[m + 1]
    for k in range(1, m + 1, 2):
        total, apart = u[k] + u[k + 1], u[k] - u[k + 1]
        first = f.fma(float(rows[k][0]), total, first)
        scaled = float(rows[k][1]) * apart
        second = scaled if second is None else f.fma(float(rows[k][1]), apart, second)
        third = f.fma(float(rows[k][2]), total, third)
    assert second is not None
    return [first, second, third]


def both_ways(f: Fn, m: int, lines: list[list[Val]], transform: Any) -> list[list[Val]]:
    """A one-dimensional transform along the columns, then along the rows."""
    columns = [transform(f, m, [line[x] for line in lines]) for x in range(len(lines[0]))]
    return [transform(f, m, [column[y] for column in columns]) for y in range(len(columns[0]))]
