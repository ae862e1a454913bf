"""Vector math against double or extended precision, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import compiler, vmath
from ranvier.codegen.llvm.builder import Module, vector
from ranvier.codegen.llvm.isa import Isa
from tests.codegen.harness import ISAS, Array

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_names = itertools.count()
DTYPES = {"float": np.float32, "double": np.float64}
Unary = Callable[[Array], Array]


def source(function: Any, isa: Isa, given: str, lanes: int, operands: int, made: str) -> tuple[str, str]:
    """A module with a loop that applies the function to arrays."""
    module, symbol = Module(), f"vmath_test_{next(_names)}"
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
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", UNARY)
def test_float_within_four_ulp(name: str, isa: Isa) -> None:
    x = samples(np.float32, 200_000)
    accurate(name, isa, UNARY[name](x.astype(np.float64)), x)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", UNARY)
def test_double_within_four_ulp(name: str, isa: Isa) -> None:
    x = samples(np.float64, 10_000)
    accurate(name, isa, UNARY[name](x.astype(np.longdouble)), x)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_erf(isa: Isa) -> None:
    x = samples(np.float32, 40_000)
    accurate("erf", isa, np.array([math.erf(v) for v in x.astype(np.float64)]), x)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_no_calls(isa: Isa) -> None:
    """Nothing outside the kernel is called: there is no libm to find where a kernel is linked."""
    for name in [*UNARY, "erf"]:
        for given in ("float", "double"):
            for lanes in (1, isa.lanes(4), 2 * isa.lanes(4)):
                text, _ = source(getattr(vmath, name), isa, given, lanes, 1, given)
                assert not re.search(r"\bcall", compiler.assembly(text, isa)), (name, given, lanes)
