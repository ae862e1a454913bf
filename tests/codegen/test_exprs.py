"""Expressions against NumPy, for every operation, element type and instruction set."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ranvier import dtypes
from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import compiler
from ranvier.codegen.llvm.builder import Module
from ranvier.codegen.llvm.elements import gather_elements, load_vector, memory_type, scatter_elements, store_vector
from ranvier.codegen.llvm.exprs import ExprEmitter
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.loops.ir import Const, Expr, Load, Op
from ranvier.codegen.storage import Storage
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.expr_samples import divided, op, samples

INTS = [DType[f"{u}int{n}"] for u in ("", "u") for n in (8, 16, 32, 64)]
FLOATS = [DType.float32, DType.float64]
NARROW = [DType.float16, DType.bfloat16]
ISAS = pytest.mark.parametrize("isa", harness.ISAS, ids=lambda i: i.name)
Array = np.ndarray[Any, Any]


def emit(exprs: list[Expr], inputs: list[DType], lanes: int, module: Module, symbol: str, isa: Isa) -> None:
    """A kernel that evaluates the expressions over ``dims[0]`` groups of ``lanes`` elements."""
    params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
    f = module.function(symbol, params)
    buffers = [f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(len(inputs) + len(exprs))]
    emitter = ExprEmitter(f, isa, lanes)
    with f.loop(0, f.load("i64", f.args["dims"])) as k, emitter.scope():
        start = f.mul(k, lanes)

        def leaf(expr: Expr) -> Any:
            assert isinstance(expr, Load)
            return load_vector(f, isa, expr.dtype, f.gep(buffers[expr.operand], start, memory_type(expr.dtype)), lanes)

        for target, expr in zip(buffers[len(inputs) :], exprs):
            address = f.gep(target, start, memory_type(expr.dtype))
            store_vector(f, isa, expr.dtype, emitter.vector(expr, leaf), address)
    f.ret()


def evaluate(exprs: list[Expr], arrays: list[Array], isa: Isa, lanes: int = 0) -> list[Array]:
    lanes = lanes or isa.lanes(4)
    types = [dtypes.of(a) for a in arrays]
    size = len(arrays[0])
    assert size % lanes == 0
    outs = [np.empty(size, e.dtype.numpy) for e in exprs]
    stores = [Storage("input", 0, index=k) for k in range(len(arrays) + len(outs))]
    spec = KernelSpec("test", (repr(exprs), lanes), lambda m, s, i: emit(exprs, types, lanes, m, s, i))
    launch = Launch(spec, tuple(At(s) for s in stores), (size // lanes,), 1, ())
    bound = {s: a.view(np.uint8) for s, a in zip(stores, [*arrays, *outs])}
    harness.run([launch], isa, bound)
    return outs


def same(got: Array, want: Array, tolerance: float = 0.0, what: str = "") -> None:
    assert got.dtype == want.dtype
    if dtypes.of(got).is_float:
        got, want = got.astype(np.float64), want.astype(np.float64)
    if tolerance:
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 1e-3, err_msg=what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)


@ISAS
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers(isa: Isa, dtype: DType) -> None:
    a, b = samples(dtype, 1), samples(dtype, 2)
    shift = (np.arange(64) % (dtype.bits + 3)).astype(dtype.numpy)
    quotient, rest = divided(a, b)
    with np.errstate(all="ignore"):
        # NumPy's % by 0 is 0, and the smallest number by -1 as well
        want = {
            "add": a + b, "sub": a - b, "mul": a * b, "min": np.minimum(a, b), "max": np.maximum(a, b),
            "div": quotient, "fmod": rest, "mod": np.mod(a, b), "floordiv": np.floor_divide(a, b),
            "bitand": a & b, "bitor": a | b, "bitxor": a ^ b,
        }  # fmt: skip
        unary = {"neg": -a, "abs": np.abs(a), "sign": np.sign(a), "bitnot": ~a}
        compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        powers = np.abs(b) % 7
        fused = a * b + a
        counts = np.bitwise_count(a.view(f"u{a.itemsize}"))
        shifted = {"shl": np.left_shift(a, shift), "shr": np.right_shift(a, shift)}
    exprs: list[Expr] = [op(n, dtype, dtype) for n in want] + [op(n, dtype) for n in unary]
    exprs += [op(n, dtype, dtype, result=DType.bool) for n in compare]
    exprs += [Op("fma", (Load(0, dtype), Load(1, dtype), Load(0, dtype)), dtype), op("popcount", dtype)]
    expected = [*want.values(), *unary.values(), *compare.values(), fused, counts.astype(a.dtype)]
    for lanes in (1, isa.lanes(4)):
        for got, wanted, expr in zip(evaluate(exprs, [a, b], isa, lanes), expected, exprs):
            assert isinstance(expr, Op)
            np.testing.assert_array_equal(got, wanted, err_msg=expr.name)
        for got, wanted in zip(
            evaluate([op("shl", dtype, dtype), op("shr", dtype, dtype)], [a, shift], isa, lanes), shifted.values()
        ):
            same(got, wanted)
        powered = evaluate([op("pow", dtype, dtype)], [a, powers.astype(a.dtype)], isa, lanes)[0]
        same(powered, np.power(a, powers.astype(a.dtype)))


@ISAS
@pytest.mark.parametrize("dtype", FLOATS + NARROW, ids=str)
def test_floats(isa: Isa, dtype: DType) -> None:
    a, b, c = samples(dtype, 1), samples(dtype, 2), samples(dtype, 3)
    n = dtype.numpy
    exact = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
        "fmod": np.fmod, "mod": np.mod, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal, "neg": np.negative, "abs": np.abs, "sign": np.sign, "sqrt": np.sqrt,
        "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "isnan": np.isnan, "isinf": np.isinf,
    }  # fmt: skip
    close = {
        "exp": np.exp, "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "atan": np.arctan,
        "expm1": np.expm1, "log1p": np.log1p, "pow": np.power, "atan2": np.arctan2, "sinh": np.sinh,
    }  # fmt: skip
    exprs: list[Expr] = []
    wanted: list[Array] = []
    with np.errstate(all="ignore"):
        for name, function in (exact | close).items():
            arity = function.nin
            args = [x.astype(np.float64) for x in (a, b)[:arity]]
            made = function(*args) if name in close else function(*(a, b)[:arity])
            wanted.append(made if made.dtype == bool else made.astype(n))
            exprs.append(op(name, *[dtype] * arity, result=DType.bool if made.dtype == bool else dtype))
        wide = [x.astype(np.float64) for x in (a, b, c)]
        wanted += [(1 / wide[0]).astype(n), (1 / np.sqrt(wide[0])).astype(n), (wide[0] * wide[1] + wide[2]).astype(n)]
        exprs += [op("reciprocal", dtype), op("rsqrt", dtype), op("fma", dtype, dtype, dtype)]
        for k in (2.0, 3.0, -1.0):
            exprs.append(Op("pow", (Load(0, dtype), Const(k, dtype)), dtype))
            wanted.append((wide[0] ** k).astype(n))
    tolerance = {DType.float32: 5e-7, DType.float64: 1e-14, DType.float16: 2e-3, DType.bfloat16: 1.6e-2}[dtype]
    for lanes in (1, isa.lanes(4)):
        for got, want, expr in zip(evaluate(exprs, [a, b, c], isa, lanes), wanted, exprs):
            assert isinstance(expr, Op)
            same(got, want, 0 if expr.name in exact else tolerance, expr.name)


@ISAS
def test_constant_extremes_keep_nan(isa: Isa) -> None:
    x = samples(DType.float32, 3)
    zero, six = Const(0.0, DType.float32), Const(6.0, DType.float32)
    load = Load(0, DType.float32)
    relu6 = Op("min", (six, Op("max", (load, zero), DType.float32)), DType.float32)
    same(evaluate([relu6], [x], isa)[0], np.minimum(np.maximum(x, np.float32(0)), np.float32(6)))


@ISAS
@pytest.mark.parametrize("source", [*FLOATS, *NARROW, *INTS, DType.bool], ids=str)
def test_casts(isa: Isa, source: DType) -> None:
    targets = [*FLOATS, *NARROW, *INTS, DType.bool]
    values = samples(source, 5)
    exprs: list[Expr] = [op("cast", source, result=t) for t in targets]
    for lanes in (1, isa.lanes(4)):
        for got, target in zip(evaluate(exprs, [values], isa, lanes), targets):
            with np.errstate(all="ignore"):
                if source.is_float and target.is_integer:
                    info = np.iinfo(target.numpy)
                    real = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=1e300, neginf=-1e300)
                    want = np.array([min(max(int(v), info.min), info.max) for v in real], target.numpy)
                else:
                    want = values.astype(target.numpy)
            same(got, want, what=f"{source} to {target}")


@ISAS
@pytest.mark.parametrize("bounds", [(0, None), (0, 255), (-128, 127)])
def test_casts_of_what_was_clipped(isa: Isa, bounds: tuple[float, float | None]) -> None:
    """NaN passes the clip and is 0 as an integer, also where the type has the same bounds once more."""
    low, high = (None if end is None else Const(float(end), DType.float32) for end in bounds)
    x = samples(DType.float32, 6)
    assert np.isnan(x).any()
    cut: Expr = Op("max", (Load(0, DType.float32), low), DType.float32)
    if high is not None:
        cut = Op("min", (cut, high), DType.float32)
    targets = [DType.uint8, DType.int8, DType.uint16, DType.int32, DType.uint32]
    with np.errstate(all="ignore"):
        real = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e300, neginf=-1e300), *bounds)
    for lanes in (1, isa.lanes(4)):
        for target, got in zip(targets, evaluate([Op("cast", (cut,), t) for t in targets], [x], isa, lanes)):
            info = np.iinfo(target.numpy)
            want = [0 if np.isnan(v) else min(max(int(r), info.min), info.max) for v, r in zip(x, real)]
            same(got, np.array(want, target.numpy), what=str(target))


@ISAS
def test_bits_where_and_bool(isa: Isa) -> None:
    x = samples(DType.float32, 6)
    p, q = samples(DType.bool, 7), samples(DType.bool, 8)
    same(evaluate([op("bits", DType.float32, result=DType.int32)], [x], isa)[0], x.view(np.int32))
    h = samples(DType.float16, 6)
    np.testing.assert_array_equal(
        evaluate([op("bits", DType.float16, result=DType.uint16)], [h], isa)[0][~np.isnan(h)],
        h.view(np.uint16)[~np.isnan(h)],
    )
    names = {"and": p & q, "or": p | q, "xor": p ^ q, "eq": p == q, "ne": p != q, "lt": p < q, "max": p | q}
    for got, want in zip(evaluate([op(n, *[DType.bool] * 2) for n in names], [p, q], isa), names.values()):
        same(got, want)
    same(evaluate([op("not", DType.bool)], [p], isa)[0], ~p)
    where = Op("where", (Load(0, DType.bool), Load(1, DType.float32), Const(2.5, DType.float32)), DType.float32)
    same(evaluate([where], [p, x], isa)[0], np.where(p, x, np.float32(2.5)))


def test_equal_values_are_computed_once() -> None:
    """Trees built apart and a tree that doubles at every level: neither repeats work."""
    isa = harness.ISAS[0]
    expr: Expr = Load(0, DType.float32)
    for _ in range(40):
        expr = Op("add", (expr, expr), DType.float32)
    twin: Expr = Op("mul", (Load(0, DType.float32), Load(0, DType.float32)), DType.float32)
    again: Expr = Op("mul", (Load(0, DType.float32), Load(0, DType.float32)), DType.float32)
    module = Module()
    emit([expr, Op("add", (twin, again), DType.float32)], [DType.float32], 16, module, "k", isa)
    text = str(module)
    assert text.count("fmul") == 1
    assert text.count("fadd") == 41


def test_emits_for_arm() -> None:
    isa = named("neon", "aarch64")
    module = Module()
    exprs: list[Expr] = [op("exp", DType.float32), op("cast", DType.float32, result=DType.uint8)]
    emit([*exprs, op("add", DType.float16, DType.float16)], [DType.float32, DType.float16], 4, module, "k", isa)
    assert "fcvt" in compiler.assembly(str(module), isa)


@pytest.mark.parametrize(("name", "triple"), [("neon", "aarch64"), ("portable", "x86_64"), ("avx512", "x86_64")])
def test_a_clip_is_two_instructions(name: str, triple: str) -> None:
    isa = named(name, triple)
    module = Module(extremes=isa.extremes)
    low, high = Const(0.0, DType.float32), Const(6.0, DType.float32)
    clip = Op("min", (Op("max", (Load(0, DType.float32), low), DType.float32), high), DType.float32)
    emit([clip], [DType.float32], isa.lanes(4), module, "k", isa)
    words = re.findall(
        r"^\s+(v?f?(?:max|min)(?:ps)?|fcm\w+|v?cmp\w*ps|bsl|bit|bif)\b", compiler.assembly(str(module), isa), re.M
    )
    assert sorted(word.strip("vfps") for word in words) == ["max", "min"]


def masked_kernel(dtype: DType, lanes: int, module: Module, symbol: str, isa: Isa) -> None:
    """out[i] = in[i], reversed[i] = in[n-1-i], for the first dims[0] lanes; 3 elsewhere."""
    params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
    f = module.function(symbol, params)
    source, target, back = (f.load("ptr", f.gep(f.args["bufs"], k, "ptr")) for k in range(3))
    count = f.load("i64", f.args["dims"])
    mask = f.mask_below(lanes, count)
    value = load_vector(f, isa, dtype, source, lanes, mask=mask, other=1)
    store_vector(f, isa, dtype, value, target)
    positions = f.sub(f.splat(f.sub(count, 1), lanes), f.lane_ids(lanes))
    picked = gather_elements(f, isa, dtype, source, positions, mask=mask, other=1)
    scatter_elements(f, isa, dtype, picked, back, f.lane_ids(lanes), mask=mask)
    f.ret()


@ISAS
@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW, *INTS, DType.bool], ids=str)
def test_masked_memory(isa: Isa, dtype: DType) -> None:
    lanes = isa.lanes(4)
    for count in (0, 1, lanes - 1, lanes):
        source = samples(dtype, 9)[:lanes].copy()
        target, back = np.zeros(lanes, dtype.numpy), np.zeros(lanes, dtype.numpy)
        stores = [Storage("input", 0, index=k) for k in range(3)]
        spec = KernelSpec("t", ("masked", dtype.name, lanes), lambda m, s, i: masked_kernel(dtype, lanes, m, s, i))
        launch = Launch(spec, tuple(At(s) for s in stores), (count,), 1, ())
        bound = {s: a.view(np.uint8) for s, a in zip(stores, (source, target, back))}
        harness.run([launch], isa, bound)
        one = np.ones(lanes - count, dtype.numpy)
        same(target, np.concatenate([source[:count], one]))
        same(back[:count], source[:count][::-1])
        assert not back[count:].any()


@ISAS
def test_quotient(isa: Isa) -> None:
    """Rounded as a division rounds it, zeros with their signs, unless numbers are so small that what is left of them
    is not exact, or nearly infinite."""
    rng = np.random.default_rng(9)
    steps = np.exp2(rng.uniform(-40, 40, 256)).astype(np.float32)
    halves = (rng.integers(-300, 300, 256) + 0.5).astype(np.float32)
    near = (halves * steps).astype(np.float32)
    x = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), rng.normal(size=256).astype(np.float32) * steps])
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0, -0.0, 1e-44], np.float32)
    x = np.concatenate([x, np.resize(special, 256), np.exp2(rng.uniform(-100, 127, 256)).astype(np.float32)])
    y = np.tile(np.where(rng.random(256) < 0.5, steps, -steps), 5)
    expr = Op("quotient", (Load(0, DType.float32), Load(1, DType.float32), Load(2, DType.float32)), DType.float32)
    (got,) = evaluate([expr], [x, y, (np.float32(1) / y)], isa)
    with np.errstate(all="ignore"):
        want = x / y
    size = np.abs(want)
    ordinary = (x == 0) | ~np.isfinite(want) | (size > 2.0**-100) & (size < 2.0**127) & (np.abs(x) > 2.0**-101)
    same(got[ordinary], want[ordinary])
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])
    np.testing.assert_allclose(got[~ordinary], want[~ordinary], rtol=1e-5, atol=1e-44)
