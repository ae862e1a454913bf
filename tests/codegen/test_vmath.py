"""Vector math against double or extended precision, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranvier.codegen.llvm import compiler, vmath
from ranvier.codegen.llvm.builder import Module, vector
from ranvier.codegen.llvm.isa import Isa, named
from tests.codegen.harness import ISAS, Array

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_names = itertools.count()
DTYPES = {"float": np.float32, "double": np.float64}
Unary = Callable[[Array], Array]


def source(function: Any, isa: Isa, given: str, lanes: int, operands: int, made: str) -> tuple[str, str]:
    """A module with a loop that applies the function to arrays."""
    module, symbol = Module(extremes=isa.extremes), f"vmath_test_{next(_names)}"
    f = module.function(symbol, [("ptr", "x"), ("ptr", "y"), ("ptr", "out"), ("i64", "count")])
    with f.loop(0, f.args["count"], lanes) as i:
        args = [f.load(vector(given, lanes), f.gep(f.args[name], i, given)) for name in ("x", "y")[:operands]]
        f.store(function(f, *args, isa), f.gep(f.args["out"], i, made))
    f.ret()
    return str(module), symbol


def apply(
    name: str, isa: Isa, *arrays: Array, lanes: int | None = None, given: str | None = None, made: str | None = None,
    dtype: Any = None,
) -> Array:  # fmt: skip
    """The named function over arrays, compiled for the instruction set."""
    first = arrays[0]
    given = given or ("float" if first.dtype == np.float32 else "double")
    made = made or given
    lanes = lanes or isa.lanes(max(4, first.itemsize))
    text, symbol = source(getattr(vmath, name), isa, given, lanes, len(arrays), made)
    linked = compiler.link([compiler.compile_object(text, isa)], [symbol])
    padded = [np.concatenate([a, np.ones(-a.size % lanes, a.dtype)]) for a in arrays]
    out = np.full(padded[0].size, 77, dtype or first.dtype)
    pointers = [p.ctypes.data for p in (padded[0], padded[-1], out)]
    _CALL(linked[symbol])(*pointers, out.size)
    return out[: first.size]


def ulps(got: Array, want: Array) -> Array:
    """Distance in units in the last place of the exact result; infinite where the kind of number is wrong."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        nearest = want.astype(got.dtype)
        plain = np.isfinite(want) & (want != 0)
        unit = np.exp2(np.floor(np.log2(np.abs(np.where(plain, want, 1)))) - info.nmant)
        unit = np.maximum(unit, np.asarray(info.smallest_subnormal, want.dtype))
        # infinity stands for the first number past the largest, so that rounding there counts as a small error
        edge = np.exp2(np.asarray(info.maxexp, want.dtype)) if want.dtype != got.dtype else want
        shown = np.where(np.isinf(got), np.copysign(edge, got), got.astype(want.dtype))
        bounded = np.where(np.isinf(nearest), np.copysign(edge, want), want)
        error = np.where(plain, np.abs(shown - bounded) / np.minimum(unit, np.exp2(info.maxexp - 1.0 - info.nmant)), 0)
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    error = np.where(plain, error, np.where(same, 0, np.inf))
    return np.where(np.isnan(error) | (np.isnan(got) != np.isnan(want)), np.inf, error)


def specials(dtype: Any) -> Array:
    info = np.finfo(dtype)
    positive = [0.0, 1.0, 0.5, 2.0, 3.0, math.inf, info.tiny, info.smallest_subnormal, info.max, 1 + info.eps]
    positive += [1 - info.epsneg, math.pi / 2, math.pi, 1e-5, 7.5, 100.25]
    return np.array([*positive, *(-v for v in positive), math.nan], dtype)


def samples(dtype: Any, count: int, seed: int = 0) -> Array:
    """Every magnitude there is, and the ranges where functions bend, densely."""
    random = np.random.default_rng(seed)
    unsigned = np.uint32 if dtype == np.float32 else np.uint64
    anything = random.integers(0, np.iinfo(unsigned).max, count, unsigned, endpoint=True).view(dtype)
    ranges = [random.uniform(-s, s, count // 4).astype(dtype) for s in (1.0, 4.0, 20.0, 110.0, 800.0)]
    return np.concatenate([specials(dtype), anything, *ranges])


def accurate(name: str, isa: Isa, want: Array, *arrays: Array, limit: float = 4.0, lanes: int | None = None) -> None:
    error = ulps(apply(name, isa, *arrays, lanes=lanes), want)
    worst = int(np.argmax(error))
    assert error[worst] <= limit, f"{name}{tuple(a[worst] for a in arrays)} of {isa.name}: {error[worst]} ulp"


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


UNARY: dict[str, Unary] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "sin": np.sin,
    "sinh": np.sinh,
    "softplus": _softplus,
    "tan": np.tan,
    "tanh": np.tanh,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {"atan2": np.arctan2, "pow": np.power}
ROUNDING: dict[str, Unary] = {"ceil": np.ceil, "floor": np.floor, "rint": np.rint, "trunc": np.trunc}
each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def angles(dtype: Any, count: int) -> Array:
    """Near multiples of a quarter turn, where the results are smallest or largest."""
    turns = np.random.default_rng(7).integers(-70_000, 70_000, count)
    return np.asarray(turns * (np.pi / 2), dtype)


@each_isa
@pytest.mark.parametrize("name", UNARY)
def test_float_within_four_ulp(name: str, isa: Isa) -> None:
    x = np.concatenate([samples(np.float32, 60_000), angles(np.float32, 20_000)])
    # angles are reduced by long arithmetic in the oracle too
    wide = x.astype(np.longdouble if name in ("sin", "cos", "tan") else np.float64)
    accurate(name, isa, UNARY[name](wide), x)


@each_isa
@pytest.mark.parametrize("name", UNARY)
def test_double_within_four_ulp(name: str, isa: Isa) -> None:
    x = np.concatenate([samples(np.float64, 4_000), angles(np.float64, 1_000)])
    accurate(name, isa, UNARY[name](x.astype(np.longdouble)), x)


@each_isa
def test_float_erf(isa: Isa) -> None:
    x = samples(np.float32, 20_000)
    accurate("erf", isa, np.array([math.erf(v) for v in x.astype(np.float64)]), x)


def _exact_erf(x: float) -> np.longdouble:
    """By its series, in enough digits that the cancellation of the terms does not show."""
    if not abs(x) < 6:
        return np.longdouble(math.erf(x))
    with localcontext() as context:
        context.prec = 60
        v, total, k = Decimal(x), Decimal(0), 0
        term = v
        while abs(term) > Decimal(10) ** -45 * abs(v):
            total += term / (2 * k + 1)
            k += 1
            term = -term * v * v / k
        return np.longdouble(str(total * 2 / Decimal("3.141592653589793238462643383279502884197169").sqrt()))


@each_isa
def test_double_erf(isa: Isa) -> None:
    x = np.concatenate([specials(np.float64), np.random.default_rng(3).uniform(-6.2, 6.2, 1_000)])
    x = np.concatenate([x, 10.0 ** np.random.default_rng(4).uniform(-300, 0, 300)])
    accurate("erf", isa, np.array([_exact_erf(v) for v in x]) * np.where(x == 0, np.sign(1 / x), 1), x)


def pairs(dtype: Any, count: int) -> tuple[Array, Array]:
    """All pairs of special values, and random ones where pow and atan2 are neither zero nor infinite."""
    random = np.random.default_rng(11)
    edge = specials(dtype)
    x, y = (grid.ravel() for grid in np.meshgrid(edge, edge))
    bases = [
        random.uniform(0, 20, count),
        10.0 ** random.uniform(-30, 30, count),
        1 + random.uniform(-0.01, 0.01, count),
    ]
    powers = [random.uniform(-20, 20, count), random.uniform(-2, 2, count), 10.0 ** random.uniform(0, 4, count)]
    bases += [-random.integers(1, 20, count).astype(float), random.uniform(-1, 1, count)]
    powers += [random.integers(-20, 20, count).astype(float), random.uniform(-1, 1, count)]
    return np.concatenate([x, *bases]).astype(dtype), np.concatenate([y, *powers]).astype(dtype)


@each_isa
@each_type
@pytest.mark.parametrize("name", BINARY)
def test_binary_within_four_ulp(name: str, dtype: Any, isa: Isa) -> None:
    x, y = pairs(dtype, 20_000 if dtype == np.float32 else 3_000)
    wide = np.float64 if dtype == np.float32 else np.longdouble
    accurate(name, isa, BINARY[name](x.astype(wide), y.astype(wide)), x, y)


@each_isa
@each_type
def test_fmod_is_exact(dtype: Any, isa: Isa) -> None:
    x, y = pairs(dtype, 2_000)
    bits = samples(dtype, 4_000)
    x, y = np.concatenate([x, bits]), np.concatenate([y, np.roll(bits, 1_000)])
    accurate("fmod", isa, np.fmod(x, y), x, y, limit=0)


@each_isa
@each_type
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_is_exact(name: str, dtype: Any, isa: Isa) -> None:
    halves = np.arange(-40, 40, dtype=dtype) / 2
    x = np.concatenate([samples(dtype, 10_000), halves, halves * 2**22, halves * 2.0**51]).astype(dtype)
    accurate(name, isa, ROUNDING[name](x), x, limit=0)


@each_isa
def test_bounded_functions_stay_in_bounds(isa: Isa) -> None:
    x = np.concatenate([angles(np.float32, 50_000), np.linspace(-20, 20, 50_000, dtype=np.float32)])
    for name in ("sin", "cos", "tanh", "erf", "sigmoid"):
        assert np.abs(apply(name, isa, x)).max() <= 1, name
    assert apply("cos", isa, np.zeros(3, np.float32))[0] == 1
    assert apply("exp", isa, np.zeros(3, np.float32))[0] == 1


@each_isa
@pytest.mark.parametrize("lanes", [1, 2, 4, 32])
def test_any_number_of_lanes(lanes: int, isa: Isa) -> None:
    x = samples(np.float32, 2_000)
    for name in ("exp", "log", "erf", "tanh", "sin", "pow"):
        operands = (x, x) if name in BINARY else (x,)
        want = apply(name, isa, *operands)
        got = apply(name, isa, *operands, lanes=lanes)
        assert np.all(ulps(got, want.astype(np.float64)) <= 4), name


@each_isa
def test_sixteen_bit_formats(isa: Isa) -> None:
    """All 2^16 values one way; floats around every one of them the other way."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for lanes in (1, 4, 16):
        wide = apply("half_to_float", isa, every, given="i16", made="float", dtype=np.float32, lanes=lanes)
        np.testing.assert_array_equal(wide, every.view(np.float16).astype(np.float32))
        wide_b = apply("bfloat_to_float", isa, every, given="i16", made="float", dtype=np.float32, lanes=lanes)
        np.testing.assert_array_equal(wide_b, every.view(ml_dtypes.bfloat16).astype(np.float32))
        for name, start, kind in (("float_to_half", wide, np.float16), ("float_to_bfloat", wide_b, ml_dtypes.bfloat16)):
            middles = (start.view(np.uint32) + np.uint32(0x1000 if kind == np.float16 else 0x8000)).view(np.float32)
            near = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))]
            x = np.concatenate([start, *near, samples(np.float32, 20_000)])
            got = apply(name, isa, x, given="float", made="i16", dtype=np.uint16, lanes=lanes).view(kind)
            want = x.astype(kind)
            nan = np.isnan(want)
            np.testing.assert_array_equal(np.isnan(got), nan)
            np.testing.assert_array_equal(got[~nan].view(np.uint16), want[~nan].view(np.uint16))


@each_isa
def test_no_calls(isa: Isa) -> None:
    """Nothing outside the kernel is called: there is no libm to find where a kernel is linked."""
    for name in [*UNARY, *ROUNDING, *BINARY, "erf", "fmod"]:
        for given in ("float", "double"):
            for lanes in (1, isa.lanes(4)):
                text, _ = source(getattr(vmath, name), isa, given, lanes, 1 + (name in BINARY or name == "fmod"), given)
                called = set(re.findall(r"\tcallq?\s+(\S+)", compiler.assembly(text, isa)))
                assert all(symbol.startswith("reduce_huge_angles") for symbol in called), (name, given, lanes, called)
    for name, given, made in (("half_to_float", "i16", "float"), ("float_to_half", "float", "i16")):
        text, _ = source(getattr(vmath, name), isa, given, isa.lanes(4), 1, made)
        assert "call" not in compiler.assembly(text, isa), name


def test_emits_for_arm() -> None:
    """Not run here, but the code is made and calls nothing."""
    isa = named("neon", "aarch64")
    for name in [*UNARY, *ROUNDING, *BINARY, "erf", "fmod"]:
        text, _ = source(getattr(vmath, name), isa, "float", 4, 1 + (name in BINARY or name == "fmod"), "float")
        called = set(re.findall(r"\tbl\s+(\S+)", compiler.assembly(text, isa)))
        assert all(symbol.startswith("reduce_huge_angles") for symbol in called), (name, called)
