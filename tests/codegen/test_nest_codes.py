"""Codes that loop nests store: NumPy's for every number there is, by few instructions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Expr, Load, Map, Nest, Op, Operand
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen.harness import ISAS, Runner, view_of
from tests.codegen.test_integer import path_name, saturated
from tests.codegen.test_integer_dots import NEON, loops, text_of

Array = np.ndarray[Any, Any]
FLOAT = DType.float32


def numbers(scale: float) -> Array:
    """Around all codes and the middles between them, then what is far from any code."""
    whole = np.arange(-300, 301, dtype=np.float32)
    near = np.concatenate([whole, whole + np.float32(0.5)]) * np.float32(scale)
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20, -1e20, 1e-40, -0.0, 2.0**31, -(2.0**31)], np.float32)
    return np.concatenate([near, np.nextafter(near, np.float32(9e9)), np.nextafter(near, np.float32(-9e9)), odd, -odd])


def quantizing(x: View, out: View, scale: View, zero: View | None, *, divides: bool) -> Nest:
    kind = out.dtype.numpy.type
    factor: Expr = Load(1, FLOAT)
    number = Op("quotient", (Load(0, FLOAT), factor, Op("reciprocal", (factor,), FLOAT)), FLOAT)
    if not divides:
        number = Op("mul", (Load(0, FLOAT), factor), FLOAT)
    shift = None if zero is None else Op("cast", (Load(2, zero.dtype),), FLOAT)
    given = [Operand(x, x.strides), Operand(scale, (0,)), *([] if zero is None else [Operand(zero, (0,))])]
    stored = Map(((len(given), saturated(number, shift, kind)),))
    return Nest(x.shape, (*given, Operand(out, out.strides)), (stored,))


@pytest.mark.parametrize("isa", ISAS, ids=path_name)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("zero", [None, 0, 3, 127])
@pytest.mark.parametrize("divides", [True, False])
def test_every_number(isa: Isa, kind: type, zero: int | None, divides: bool) -> None:
    ends = np.iinfo(kind)
    for factor in (1.0, 0.037, 2.0**-40, 1e9):
        scale = np.array([factor], np.float32)
        x = numbers(factor if divides else 1 / factor)
        point = np.array([zero or 0], kind)
        out = np.zeros(x.shape, kind)
        views = [view_of(x), view_of(scale), view_of(point), view_of(out, "output")]
        nest = quantizing(views[0], views[3], views[1], None if zero is None else views[2], divides=divides)
        bound = dict(zip([v.storage for v in views], (x, scale, point, out)))
        Runner(nests.launches(nest, isa, 1), isa, bound)()
        with np.errstate(all="ignore"):
            whole = np.rint(x / scale if divides else x * scale) + np.float32(zero or 0)
        want = np.clip(np.where(np.isnan(whole), np.float32(ends.min), whole), ends.min, ends.max).astype(kind)
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", [DType.int8, DType.uint8])
def test_no_conversions(dtype: DType) -> None:
    x, out = (View.temporary(kind, (4096,)) for kind in (FLOAT, dtype))
    scale, zero = View.temporary(FLOAT, (1,)), View.temporary(dtype, (1,))
    (launch,) = nests.launches(quantizing(x, out, scale, zero, divides=True), NEON, 1)
    longest = max(loops(text_of(launch.spec, NEON)), key=len)
    assert not re.findall(r"\b(?:frint\w|fcvt\w+|bit|bif|fcmgt)\b", longest)
    assert len(re.findall(r"\bfmla\b", longest)) == 4
