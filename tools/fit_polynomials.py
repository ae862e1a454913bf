"""Derives the constants of the vector math functions: minimax polynomials and rationals by Remez' exchange.

Arithmetic is ``decimal`` with 60 digits, so nothing here depends on the accuracy of the functions being fitted.
Writes ``src/ranvier/codegen/llvm/vmath/coefficients.py``; run it again after changing a fit.

    python tools/fit_polynomials.py [--check]     # --check: only print the errors reached
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal as D
from decimal import getcontext
from pathlib import Path

getcontext().prec = 60
TARGET = Path(__file__).parent.parent / "src/ranvier/codegen/llvm/vmath/coefficients.py"
Function = Callable[[D], D]
TINY = D(10) ** -55


# -- functions by their series, exact to about 55 digits ---------------------------------------------------------------


def atan(x: D) -> D:
    if abs(x) > D("0.1"):
        return 2 * atan(x / (1 + (1 + x * x).sqrt()))
    total, power, k = D(0), x, 1
    while abs(power) > TINY:
        total += power / k
        power, k = -power * x * x, k + 2
    return total


PI = 4 * atan(D(1))
LN2 = D(2).ln()


def sin(x: D) -> D:
    total, term, k = D(0), x, 1
    while abs(term) > TINY:
        total += term
        term, k = -term * x * x / ((k + 1) * (k + 2)), k + 2
    return total


def cos(x: D) -> D:
    return sin(PI / 2 - x)


def asin(x: D) -> D:
    return atan(x / (1 - x * x).sqrt())


def erf(x: D) -> D:
    total, power, k = D(0), x, 0
    while abs(power) > TINY:
        total += power / (2 * k + 1)
        k += 1
        power = -power * x * x / k
    return total * 2 / PI.sqrt()


def erfc(x: D) -> D:
    """By the series for small arguments, by the continued fraction for large ones."""
    if x < 6:  # cancels up to 16 digits and terms grow to exp(36): many guard digits
        old = getcontext().prec
        getcontext().prec = 110
        try:
            total, power, k = D(0), x, 0
            while abs(power) > D(10) ** -100:
                total += power / (2 * k + 1)
                k += 1
                power = -power * x * x / k
            value = 1 - total * 2 / _PI_LONG.sqrt()
        finally:
            getcontext().prec = old
        return +value
    rest = D(0)
    for k in range(400, 0, -1):
        rest = (D(k) / 2) / (x + rest)
    return (-x * x).exp() / PI.sqrt() / (x + rest)


def _long_pi() -> D:
    old = getcontext().prec
    getcontext().prec = 115

    def arccot(n: int) -> D:
        total, power, k = D(0), D(1) / n, 1
        while power > D(10) ** -112:
            total += power / k if k % 4 == 1 else -power / k
            power, k = power / (n * n), k + 2
        return total

    value = 4 * (4 * arccot(5) - arccot(239))
    getcontext().prec = old
    return value


_PI_LONG = _long_pi()


# -- fitting -----------------------------------------------------------------------------------------------------------


def solve(rows: list[list[D]]) -> list[D]:
    """The solution of a linear system given as rows of coefficients with the right side last."""
    n = len(rows)
    for c in range(n):
        pivot = max(range(c, n), key=lambda r: abs(rows[r][c]))
        rows[c], rows[pivot] = rows[pivot], rows[c]
        for r in range(c + 1, n):
            factor = rows[r][c] / rows[c][c]
            if factor:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[c])]
    found = [D(0)] * n
    for r in range(n - 1, -1, -1):
        found[r] = (rows[r][n] - sum(rows[r][c] * found[c] for c in range(r + 1, n))) / rows[r][r]
    return found


def horner(coefficients: Sequence[D], x: D) -> D:
    total = D(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def fit(target: Function, weight: Function, low: D, high: D, degree: int) -> tuple[list[D], D]:
    """The polynomial that minimises max |weight·(target − p)|, and that maximum."""
    unknowns = degree + 2
    steps = 40 * unknowns
    grid = [max(low, (low + high) / 2 - (high - low) / 2 * cos(PI * k / steps)) for k in range(steps + 1)]
    values = [target(x) for x in grid]
    weights = [weight(x) for x in grid]
    usable = [i for i in range(len(grid)) if weights[i]]
    chosen = [usable[(len(usable) - 1) * k // (unknowns - 1)] for k in range(unknowns)]
    p, worst = [D(0)], D(1)
    for _ in range(40):
        rows = []
        for sign, i in enumerate(chosen):
            powers = [D(1)]
            for _ in range(degree):
                powers.append(powers[-1] * grid[i])
            rows.append([*powers, (-1) ** sign / weights[i], values[i]])
        *p, _ = solve(rows)
        errors = [w * (v - horner(p, x)) for x, v, w in zip(grid, values, weights)]
        worst = max(map(abs, errors))
        if worst - min(abs(errors[i]) for i in chosen) < worst * D("1e-3"):
            break
        chosen = _extrema(errors, usable, unknowns)
    return p, worst


def _extrema(errors: list[D], usable: list[int], count: int) -> list[int]:
    """The largest error of every run of one sign; the best ``count`` runs that alternate."""
    runs: list[int] = []
    for i in usable:
        if runs and (errors[runs[-1]] > 0) == (errors[i] > 0):
            if abs(errors[i]) > abs(errors[runs[-1]]):
                runs[-1] = i
        else:
            runs.append(i)
    while len(runs) > count:
        if len(runs) == count + 1:
            runs.pop(0 if abs(errors[runs[0]]) < abs(errors[runs[-1]]) else -1)
        else:
            k = min(range(len(runs) - 1), key=lambda k: max(abs(errors[runs[k]]), abs(errors[runs[k + 1]])))
            del runs[k : k + 2]
    if len(runs) < count:
        raise RuntimeError(f"only {len(runs)} alternations of {count}: another degree is needed")
    return runs


# -- rounding and output -----------------------------------------------------------------------------------------------


def rounded(value: D, element: str) -> float:
    return float(value) if element == "double" else struct.unpack("<f", struct.pack("<f", float(value)))[0]


def parts(value: D, element: str, bits: Sequence[int]) -> list[float]:
    """A positive ``value`` as a sum of positive floats with the given numbers of significant bits.

    0 stands for all there are; the last part is the nearest float.
    """
    found = []
    for place, asked in enumerate(bits):
        count = asked or (53 if element == "double" else 24)
        if place + 1 < len(bits):
            exponent = value.copy_abs().ln() / LN2
            scale = D(2) ** (count - 1 - int(exponent.to_integral_value(rounding="ROUND_FLOOR")))
            piece = (value * scale).to_integral_value(rounding="ROUND_FLOOR") / scale
        else:
            piece = D(rounded(value, element))
        found.append(float(piece))
        value -= piece
    return found


# -- the fits ----------------------------------------------------------------------------------------------------------

Table = dict[str, tuple[float, ...]]
TABLES: dict[str, Table] = {}
NOTES: dict[str, str] = {}


def report(name: str, element: str, worst: D | float) -> None:
    print(f"{name:12} {element:7} error 2^{float(D(worst).ln() / LN2):.1f}", file=sys.stderr)


def polynomial(
    name: str,
    element: str,
    target: Function,
    weight: Function,
    low: D | str,
    high: D | str,
    degree: int,
    *,
    split_first: bool = False,
) -> None:
    """Fits one polynomial; ``split_first`` leaves in it only what the rounding of its constant term loses."""
    p, worst = fit(target, weight, D(low), D(high), degree)
    report(name, element, worst)
    if split_first:
        first = rounded(p[0], element)
        TABLES.setdefault(f"{name}_FIRST", {})[element] = (first,)
        p[0] -= D(first)
    TABLES.setdefault(name, {})[element] = tuple(rounded(c, element) for c in p)


def constants(name: str, value: D, float_bits: Sequence[int], double_bits: Sequence[int]) -> None:
    TABLES[name] = {
        "float": tuple(parts(value, "float", float_bits)),
        "double": tuple(parts(value, "double", double_bits)),
    }


def tail(function: Function, start: Sequence[D], first: int) -> Function:
    """(function − the given first terms of its series)/x^first; ``start`` continues the series near zero."""

    def value(x: D) -> D:
        if abs(x) > D("1e-12"):
            return function(x) / x**first
        return horner(start, x)

    return value


def _atanh_tail(z: D) -> D:
    """(2·atanh(s)/s − 2)/s² as a function of z = s²."""
    if z < D("1e-20"):
        return D(2) / 3 + D(2) / 5 * z
    s = z.sqrt()
    return (((1 + s) / (1 - s)).ln() / s - 2) / z


def _erf_exponent(x: D) -> D:
    """ln(erfc x)/x."""
    return erfc(x).ln() / x if x > D("1e-12") else -2 / PI.sqrt() * (1 + x / PI.sqrt())


def _erf_weight(x: D) -> D:
    """How much of an error of that exponent arrives in erf, relatively."""
    return x * erfc(x) / erf(x) if x > D("1e-12") else PI.sqrt() / 2


def even_tail(function: Function, first: D, second: D) -> Function:
    """(function(x) − 1)/x² as a function of u = x²; its series starts with ``first`` + ``second``·u."""
    return lambda u: (function(u.sqrt()) - 1) / u if u > D("1e-20") else first + second * u


def digits_of_inverse_pi(count: int, width: int, scale: int) -> list[float]:
    """The binary digits of 1/π, ``width`` at a time, each piece as a float times 2^scale."""
    # Machin's formula in integers with guard bits
    one = 1 << (count * width + 64)

    def arccot(n: int) -> int:
        total, power, k = 0, one // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    pi = 4 * (4 * arccot(5) - arccot(239))
    whole = (one << (count * width)) // pi
    pieces = [(whole >> (width * (count - 1 - k))) & ((1 << width) - 1) for k in range(count)]
    return [math.ldexp(float(piece), scale - width * (k + 1)) for k, piece in enumerate(pieces)]


def fit_all() -> None:
    half_ln2 = LN2 / 2 * D("1.0001")
    NOTES["EXP"] = "exp(r) = 1 + r + r²·EXP(r), |r| <= ln 2 / 2"
    exp_tail = tail(lambda r: r.exp() - 1 - r, [D(1) / 2, D(1) / 6, D(1) / 24], 2)
    for element, degree in (("float", 4), ("double", 9)):
        polynomial("EXP", element, exp_tail, lambda r: r * r / r.exp(), -half_ln2, half_ln2, degree)
    NOTES["EXPM1"] = "the same, fitted relative to exp(r) − 1"
    for element, degree in (("float", 4), ("double", 10)):
        relative = tail(lambda r: r**3 / (r.exp() - 1), [D(0), D(1)], 1)
        polynomial("EXPM1", element, exp_tail, lambda r, w=relative: abs(w(r)), -half_ln2, half_ln2, degree)
    NOTES["LOG"] = "log(1+t) = t − t²/2 + t³·LOG(t) for float, 1+t from sqrt(1/2) to sqrt(2)"
    log_tail = tail(lambda t: (1 + t).ln() - t + t * t / 2, [D(1) / 3, -D(1) / 4, D(1) / 5], 3)
    log_weight = tail(lambda t: t**4 / (1 + t).ln(), [D(0), D(0), D(1)], 1)
    polynomial("LOG", "float", log_tail, log_weight, "-0.2930", "0.4143", 7)
    NOTES["LOG_WIDE"] = "the same for 1+t from 3/4 to 3/2"
    polynomial("LOG_WIDE", "float", log_tail, log_weight, "-0.2501", "0.5001", 7)
    NOTES["LOG_ATANH"] = "log(1+t) = 2s + s·s²·LOG_ATANH(s²) with s = t/(2+t), for 1+t from 1/sqrt(2) to 3/2"
    polynomial("LOG_ATANH", "double", _atanh_tail, lambda z: z, "0", "0.0401", 7)
    NOTES["LOG_TAIL"] = "what LOG_ATANH(z) has beyond 2/3, divided by z, for pow"
    after = tail(lambda z: _atanh_tail(z) - D(2) / 3, [D(2) / 5, D(2) / 7], 1)
    polynomial("LOG_TAIL", "double", after, lambda z: z * z, "0", "0.0401", 8)
    NOTES["ERF_FIRST"] = "erf(x) = 1 − exp(x·(ERF_FIRST + ERF(x))) from 0 to where erf is 1"
    for element, degree, high in (("float", 8, "4"), ("double", 24, "6")):
        polynomial("ERF", element, _erf_exponent, _erf_weight, "0", high, degree, split_first=True)
    NOTES["EXP2_SHORT"] = "2^r = EXP2_SHORT(r), |r| <= 1/2, for results of few bits"
    half = D("0.50001")
    power, inverse = (lambda r: (r * LN2).exp()), (lambda r: (-r * LN2).exp())
    NOTES["ERFC_SHORT"] = "erfc(x) = 2^(x·ERFC_SHORT(x)) for x from 0 to 4, likewise; beyond, only as small"
    polynomial("EXP2_SHORT", "float", power, inverse, -half, half, 3)
    polynomial("ERFC_SHORT", "float", lambda x: _erf_exponent(x) / LN2, lambda x: x * LN2, "0", "4", 4)
    NOTES["SIN"] = "sin(r) = r + r³·SIN(r²), |r| <= π/2"
    sin_tail = even_tail(lambda r: sin(r) / r, -D(1) / 6, D(1) / 120)
    for element, degree in (("float", 3), ("double", 7)):
        relative = lambda u: u / (sin(u.sqrt()) / u.sqrt() if u else 1)  # noqa: E731
        polynomial("SIN", element, sin_tail, relative, "0", PI * PI / 4 * D("1.0001"), degree)
    NOTES["ASIN"] = "asin(x) = x + x³·ASIN(x²), |x| <= 1/2"
    asin_tail = even_tail(lambda x: asin(x) / x, D(1) / 6, D(3) / 40)
    for element, degree in (("float", 4), ("double", 12)):
        polynomial("ASIN", element, asin_tail, lambda u: u, "0", "0.25001", degree)
    NOTES["ATAN"] = "atan(x) = x + x³·ATAN(x²), |x| <= tan(π/8)"
    atan_tail = even_tail(lambda x: atan(x) / x, -D(1) / 3, D(1) / 5)
    for element, degree in (("float", 4), ("double", 10)):
        polynomial("ATAN", element, atan_tail, lambda u: u, "0", "0.17158", degree)
    NOTES["SINH"] = "sinh(x) = x + x³·SINH(x²), |x| <= 1"
    sinh_tail = even_tail(lambda x: (x.exp() - (-x).exp()) / 2 / x, D(1) / 6, D(1) / 120)
    for element, degree in (("float", 2), ("double", 6)):
        polynomial("SINH", element, sinh_tail, lambda u: u, "0", "1.0001", degree)
    NOTES["LN2"] = "ln 2 in two parts; the first is short enough that its product with an exponent is exact"
    constants("LN2", LN2, (15, 0), (42, 0))
    NOTES["PI_FUSED"] = "π in parts for fused multiply-add …"
    constants("PI_FUSED", PI, (0, 0, 0), (0, 0, 0))
    NOTES["PI_SHORT"] = "… and in parts whose products with a small number of half turns are exact"
    constants("PI_SHORT", PI, (10, 10, 10, 10, 0), (34, 34, 34, 0))
    constants("HALF_PI", PI / 2, (0, 0), (0, 0))
    constants("QUARTER_PI", PI / 4, (0, 0), (0, 0))
    constants("INVERSE_PI", 1 / PI, (0,), (0,))
    NOTES["INVERSE_PI_DIGITS"] = "1/π · 2^200 in pieces of 24 bits, for reducing huge angles"
    TABLES["INVERSE_PI_DIGITS"] = {"double": tuple(digits_of_inverse_pi(50, 24, 200))}
    constants("TWO_THIRDS", D(2) / 3, (0, 0), (0, 0))
    constants("LOG2E", 1 / LN2, (0,), (0,))


def written() -> str:
    lines = [
        '"""Constants of the vector math functions, written by ``tools/fit_polynomials.py``: change them there."""',
        "",
        "from __future__ import annotations",
        "",
        "Table = dict[str, tuple[float, ...]]",
        "",
    ]
    for name, table in TABLES.items():
        if name in NOTES:
            lines.append(f"# {NOTES[name]}")
        lines.append(f"{name}: Table = {{")
        for element, values in table.items():
            lines.append(f'    "{element}": (')
            lines += [f"        {value!r}," for value in values]
            lines.append("    ),")
        lines.append("}")
    return "\n".join(lines) + "\n"


def main() -> None:
    fit_all()
    if "--check" not in sys.argv:
        TARGET.write_text(written())


if __name__ == "__main__":
    main()
