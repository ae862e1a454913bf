"""Every operation of the loop IR, for every element type, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from ranvier import dtypes
from ranvier.codegen.loops.ir import OPERATIONS, Const, Expr, Load, Map, Nest, Op, Operand
from ranvier.codegen.storage import View
from ranvier.codegen.triton.library import kernel
from ranvier.dtypes import DType
from tests.codegen.expr_samples import divided, op, samples
from tests.torch.codegen.checking import run

INTS = [DType[f"{u}int{n}"] for u in ("", "u") for n in (8, 16, 32, 64)]
FLOATS = [DType.float32, DType.float64]
NARROW = [DType.float16, DType.bfloat16]
# relative errors allowed: a GPU's exp and division by way of fewer bits than the type has
CLOSE = {DType.float32: 6e-6, DType.float64: 1e-13, DType.float16: 2e-3, DType.bfloat16: 1.6e-2}
Array = np.ndarray[Any, Any]


def evaluate(exprs: list[Expr], arrays: list[Array]) -> list[Array]:
    """One kernel that evaluates all the expressions on arrays of equal length."""
    size = len(arrays[0])
    views = [View.temporary(dtypes.of(a), a.shape) for a in arrays]
    outs = [View.temporary(e.dtype, (size,)) for e in exprs]
    stores = tuple((len(views) + k, e) for k, e in enumerate(exprs))
    nest = Nest((size,), tuple(Operand(v, (1,)) for v in [*views, *outs]), (Map(stores),))
    memory = {v.storage: a for v, a in zip(views, arrays)}
    memory |= {v.storage: np.zeros(size, v.dtype.numpy) for v in outs}
    found = run(kernel(nest), memory)
    return [found[v.storage].view(v.dtype.numpy) for v in outs]


def same(got: Array, want: Array, tolerance: float = 0.0, what: str = "") -> None:
    assert got.dtype == want.dtype
    if dtypes.of(got).is_float:
        got, want = got.astype(np.float64), want.astype(np.float64)
    if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 1e-2, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(dtype: DType) -> None:
    a, b = samples(dtype, 1), samples(dtype, 2)
    shift = (np.arange(64) % (dtype.bits + 3)).astype(dtype.numpy)
    powers = (np.abs(b) % 7).astype(dtype.numpy)
    quotient, rest = divided(a, b)
    with np.errstate(all="ignore"):
        binary = {
            "add": a + b, "sub": a - b, "mul": a * b, "min": np.minimum(a, b), "max": np.maximum(a, b),
            "div": quotient, "fmod": rest, "mod": np.mod(a, b), "floordiv": np.floor_divide(a, b),
            "bitand": a & b, "bitor": a | b, "bitxor": a ^ b,
        }  # fmt: skip
        unary = {"neg": -a, "abs": np.abs(a), "sign": np.sign(a), "bitnot": ~a, "floor": a, "round": a}
        unary["popcount"] = np.bitwise_count(a.view(f"u{a.itemsize}")).astype(a.dtype)
        compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        cases: list[tuple[Expr, Array]] = [(op(n, dtype, dtype), want) for n, want in binary.items()]
        cases += [(op(n, dtype), want) for n, want in unary.items()]
        cases += [(op(n, dtype, dtype, result=DType.bool), want) for n, want in compare.items()]
        cases.append((op("fma", dtype, dtype, dtype), a * b + shift))
        third = Load(2, dtype)
        cases.append((Op("shl", (Load(0, dtype), third), dtype), np.left_shift(a, shift)))
        cases.append((Op("shr", (Load(0, dtype), third), dtype), np.right_shift(a, shift)))
        cases.append((Op("pow", (Load(0, dtype), Load(3, dtype)), dtype), np.power(a, powers)))
        cases.append((Op("add", (Load(0, dtype), Const(7, dtype)), dtype), a + a.dtype.type(7)))
        cases.append((op("isnan", dtype, result=DType.bool), np.zeros(64, bool)))
    for (expr, want), got in zip(cases, evaluate([e for e, _ in cases], [a, b, shift, powers])):
        assert isinstance(expr, Op)
        np.testing.assert_array_equal(got, want, err_msg=expr.name)


def test_negative_powers_of_integers_truncate() -> None:
    a = np.array([1, -1, -1, 2, 3, -2, 0, 5], np.int32)
    b = np.array([-3, -3, -2, -1, 0, -5, 4, -1], np.int32)
    got = evaluate([op("pow", DType.int32, DType.int32)], [a, b])[0]
    np.testing.assert_array_equal(got, [1, -1, 1, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("dtype", FLOATS + NARROW, ids=str)
def test_floats(dtype: DType) -> None:
    a, b, c = samples(dtype, 1), samples(dtype, 2), samples(dtype, 3)
    n = dtype.numpy
    exact = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
        "fmod": np.fmod, "mod": np.mod, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal, "neg": np.negative, "abs": np.abs, "sign": np.sign, "sqrt": np.sqrt,
        "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "isnan": np.isnan, "isinf": np.isinf,
    }  # fmt: skip
    close: dict[str, Any] = {
        "exp": np.exp, "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan": np.arctan,
        "asin": np.arcsin, "acos": np.arccos, "expm1": np.expm1, "log1p": np.log1p, "sinh": np.sinh, "cosh": np.cosh,
        "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "pow": np.power, "atan2": np.arctan2,
    }  # fmt: skip
    cases: list[tuple[Expr, Array, float]] = []
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) for x in (a, b, c)]
        for name, function in (exact | close).items():
            made = function(*wide[: function.nin]) if name in close else function(*(a, b)[: function.nin])
            result = DType.bool if made.dtype == bool else dtype
            cases.append(
                (
                    op(name, *[dtype] * function.nin, result=result),
                    made.astype(result.numpy),
                    CLOSE[dtype] * (name in close),
                )
            )
        x, y, z = wide
        more = {
            "reciprocal": 1 / x, "rsqrt": 1 / np.sqrt(x), "sigmoid": 1 / (1 + np.exp(-x)),
            "short_sigmoid": 1 / (1 + np.exp(-x)), "softplus": np.logaddexp(0, x),
        }  # fmt: skip
        cases += [(op(name, dtype), want.astype(n), CLOSE[dtype]) for name, want in more.items()]
        cases.append((op("fma", dtype, dtype, dtype), (x * y + z).astype(n), CLOSE[dtype]))
        cases.append((op("quotient", dtype, dtype, dtype), (x / y).astype(n), CLOSE[dtype]))
        cases.append((op("floordiv", dtype, dtype), np.floor((x / y).astype(n)).astype(n), CLOSE[dtype]))
        for k in (2.0, 3.0, -1.0, 1.0):
            cases.append((Op("pow", (Load(0, dtype), Const(k, dtype)), dtype), (x**k).astype(n), CLOSE[dtype]))
    for (expr, want, tolerance), got in zip(cases, evaluate([e for e, _, _ in cases], [a, b, c])):
        assert isinstance(expr, Op)
        same(got, want, tolerance, expr.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_function(dtype: DType) -> None:
    from math import erf

    x = samples(dtype, 9)
    want = np.array([erf(v) for v in x.astype(np.float64)])
    got = evaluate([op("erf", dtype), op("short_one_plus_erf", dtype)], [x])
    same(got[0], want.astype(dtype.numpy), 3e-6)
    np.testing.assert_allclose(got[1], 1 + want, atol=3e-6)


@pytest.mark.parametrize("source", [*FLOATS, *NARROW, *INTS, DType.bool], ids=str)
def test_casts(source: DType) -> None:
    targets = [*FLOATS, *NARROW, *INTS, DType.bool]
    values = samples(source, 5)
    for got, target in zip(evaluate([op("cast", source, result=t) for t in targets], [values]), targets):
        with np.errstate(all="ignore"):
            if source.is_float and target.is_integer:
                info = np.iinfo(target.numpy)
                real = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=1e300, neginf=-1e300)
                want = np.array([min(max(int(v), info.min), info.max) for v in real], target.numpy)
            else:
                want = values.astype(target.numpy)
        # integers of many digits reach the narrow floats by way of float32
        rounded_twice = not source.is_float and target in NARROW
        same(got, want, CLOSE[target] if rounded_twice else 0, f"{source} to {target}")


@pytest.mark.parametrize("dtype", [DType.bool], ids=str)
def test_bools(dtype: DType) -> None:
    p, q = samples(dtype, 7), samples(dtype, 8)
    want = {
        "and": p & q, "or": p | q, "xor": p ^ q, "eq": p == q, "ne": p != q, "lt": p < q, "le": p <= q, "gt": p > q,
        "ge": p >= q, "max": p | q, "min": p & q, "add": p | q, "mul": p & q,
    }  # fmt: skip
    exprs: list[Expr] = [op(n, dtype, dtype) for n in want] + [op("not", dtype)]
    for got, wanted, expr in zip(evaluate(exprs, [p, q]), [*want.values(), ~p], exprs):
        assert isinstance(expr, Op)
        np.testing.assert_array_equal(got, wanted, err_msg=expr.name)


def test_bits_and_where() -> None:
    x, p = samples(DType.float32, 6), samples(DType.bool, 7)
    h = samples(DType.float16, 6)
    b = samples(DType.bfloat16, 6)
    exprs: list[Expr] = [
        Op("bits", (Load(0, DType.float32),), DType.int32),
        Op("bits", (Load(2, DType.float16),), DType.uint16),
        Op("bits", (Load(3, DType.bfloat16),), DType.int16),
        Op("bits", (Op("bits", (Load(0, DType.float32),), DType.uint32),), DType.float32),
        Op("where", (Load(1, DType.bool), Load(0, DType.float32), Const(2.5, DType.float32)), DType.float32),
    ]
    got = evaluate(exprs, [x, p, h, b])
    np.testing.assert_array_equal(got[0], x.view(np.int32))
    np.testing.assert_array_equal(got[1][~np.isnan(h)], h.view(np.uint16)[~np.isnan(h)])
    plain = ~np.isnan(b.astype(np.float32))
    np.testing.assert_array_equal(got[2][plain], b.view(np.int16)[plain])
    same(got[3], x)
    same(got[4], np.where(p, x, np.float32(2.5)))


def test_constants_alone_and_extreme() -> None:
    consts = [Const(float("inf"), DType.float32), Const(-0.0, DType.float64), Const(2**64 - 1, DType.uint64)]
    consts += [Const(-(2**63), DType.int64), Const(-128, DType.int8), Const(True, DType.bool)]
    both = Op("add", (Const(1.5, DType.float32), Const(2.0, DType.float32)), DType.float32)
    x = np.arange(8, dtype=np.float32)
    exprs: list[Expr] = [*consts, both, Op("exp", (Const(0.0, DType.float32),), DType.float32)]
    for got, expr in zip(evaluate(exprs, [x]), exprs):
        want = expr.value if isinstance(expr, Const) else 3.5 if expr is both else 1.0
        np.testing.assert_array_equal(got, np.full(8, want, expr.dtype.numpy))


def test_no_operation_is_untested() -> None:
    """All names of the IR occur above, so a new one is missed here."""
    from pathlib import Path

    text = Path(__file__).read_text()
    assert [name for name in OPERATIONS if f'"{name}"' not in text] == []
