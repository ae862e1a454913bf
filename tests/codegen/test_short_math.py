"""Functions for values that are only kept as bfloat16, and the expressions that may use them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Const, Expr, Load, Op, Result
from ranvier.codegen.loops.shorten import for_bfloat16, of_bfloat16
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.providers.cpu.realise import _for_store
from tests.codegen.harness import ISAS
from tests.codegen.test_vmath import apply

F32 = DType.float32
LIMIT = 2.0**-11
each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda i: i.name)
X = Result(0, F32)


def op(name: str, *args: Expr) -> Op:
    return Op(name, args, F32)


def number(value: float) -> Const:
    return Const(value, F32)


@each_isa
@pytest.mark.parametrize("lanes", [None, 1])
def test_sigmoid(isa: Isa, lanes: int | None) -> None:
    x = np.concatenate([np.linspace(-87, 100, 60_001), np.linspace(-1, 1, 20_001), [0.0, -0.0, 1e-30]]).astype("f")
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.max(np.abs(apply("short_sigmoid", isa, x, lanes=lanes) / exact - 1)) < LIMIT
    ends = np.array([np.inf, 1e30, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(apply("short_sigmoid", isa, ends, lanes=lanes), [1, 1, 0, 0, np.nan])


@each_isa
@pytest.mark.parametrize("lanes", [None, 1])
def test_one_plus_erf(isa: Isa, lanes: int | None) -> None:
    x = np.concatenate([np.linspace(-4, 6, 20_001), np.linspace(-1e-3, 1e-3, 2_001), [0.0, -0.0]]).astype("f")
    exact = np.array([math.erfc(-v) for v in x.astype(np.float64)])
    assert np.max(np.abs(apply("short_one_plus_erf", isa, x, lanes=lanes) / exact - 1)) < LIMIT
    far = apply("short_one_plus_erf", isa, np.linspace(-30, -4, 5_001).astype("f"), lanes=lanes)
    assert np.all(far >= 0) and np.all(far < 2e-8) and np.all(np.diff(far) >= 0)  # as small as it should be
    ends = np.array([np.inf, 1e30, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(apply("short_one_plus_erf", isa, ends, lanes=lanes), [2, 2, 0, 0, np.nan])


def test_factors_are_shortened() -> None:
    swish = op("mul", X, op("sigmoid", X))
    assert for_bfloat16(swish) == op("mul", X, op("short_sigmoid", X))
    gelu = op("mul", op("mul", number(0.5), X), op("add", number(1.0), op("erf", op("mul", X, number(0.7)))))
    short = op("short_one_plus_erf", op("mul", X, number(0.7)))
    assert for_bfloat16(gelu) == op("mul", op("mul", number(0.5), X), short)
    six = number(6.0)
    sixth = op("reciprocal", six)
    assert for_bfloat16(op("quotient", swish, six, sixth)) == op("mul", op("mul", X, op("short_sigmoid", X)), sixth)
    three = Load(0, F32)
    cut = op("min", op("max", op("add", X, three), number(0.0)), six)
    smaller = op("fma", X, sixth, op("mul", three, sixth))
    smaller = op("min", op("max", smaller, number(0.0)), number(1.0))
    assert for_bfloat16(op("quotient", op("mul", X, cut), six, sixth)) == op("mul", X, smaller)
    assert for_bfloat16(op("quotient", op("mul", cut, X), six, sixth)) == op("mul", X, smaller)
    assert of_bfloat16(op("quotient", op("mul", X, cut), six, sixth)) == op("mul", X, smaller)
    assert of_bfloat16(op("quotient", swish, six, sixth)) == op("mul", swish, sixth)
    assert of_bfloat16(swish) is swish
    tanh = op("add", op("tanh", X), number(1.0))
    twice = op("mul", number(2.0), op("short_sigmoid", op("mul", number(2.0), X)))
    assert for_bfloat16(op("neg", tanh)) == op("neg", twice)
    chosen = Op("where", (Op("lt", (X, number(0.0)), DType.bool), op("sigmoid", X), X), F32)
    assert for_bfloat16(chosen).args[1] == op("short_sigmoid", X)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [
        op("sub", op("sigmoid", X), number(0.5)),  # what is left may be all error
        op("add", X, op("sigmoid", X)),
        op("add", number(2.0), op("erf", X)),
        op("erf", X),
        op("mul", X, X),
        Load(0, F32),
        Op("sigmoid", (Load(0, DType.bfloat16),), DType.bfloat16),  # the graph's own type is rounded correctly
    ],
)
def test_what_is_left_as_it_is(value: Expr) -> None:
    assert for_bfloat16(value) is value


@pytest.mark.parametrize("stored, stands_for", [(F32, None), (DType.bfloat16, None), (DType.float16, F32)])
def test_only_values_kept_as_bfloat16_are_shortened(stored: DType, stands_for: DType | None) -> None:
    storage = Storage.temporary(64)
    storage.stands_for = stands_for
    value = op("sigmoid", X)
    assert _for_store(value, View.dense(storage, stored, (16,))) is value
    kept = View.narrowed(F32, DType.bfloat16, (16,), None)
    assert _for_store(value, kept) == op("short_sigmoid", X)
