"""Layers take over what is done to their channels: BatchNormalization always, other arithmetic as the level allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranvier.graph import Graph, Value
from ranvier.passes import FoldAffine
from tests.passes.pass_tools import Draft, apply

RNG = np.random.default_rng(3)
ROUNDING = 1e-5


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def parameters(channels: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Scale, bias, mean and variance."""
    return [numbers(channels, dtype=dtype) for _ in range(3)] + [np.abs(numbers(channels, dtype=dtype)) + dtype(0.5)]


LAYERS: dict[str, tuple[tuple[Any, ...], Callable[[Draft, Value, bool], Value]]] = {}


def layer(name: str, shape: tuple[Any, ...]) -> Callable[[Any], Any]:
    def declare(function: Callable[[Draft, Value, bool], Value]) -> Any:
        LAYERS[name] = (shape, function)
        return function

    return declare


@layer("Conv", ("n", 3, 5, 5))
def conv(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("Conv", x, numbers(4, 3, 3, 3), numbers(4) if bias else None)


@layer("grouped Conv", (2, 4, 6))
def grouped_conv(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("Conv", x, numbers(4, 2, 3), numbers(4) if bias else None, group=2)


@layer("ConvTranspose", (2, 3, 5, 5))
def conv_transpose(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("ConvTranspose", x, numbers(3, 4, 2, 2), numbers(4) if bias else None, strides=(2, 2))


@layer("grouped ConvTranspose", (2, 4, 5))
def grouped_conv_transpose(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("ConvTranspose", x, numbers(4, 2, 2), numbers(4) if bias else None, group=2)


@layer("Gemm", ("n", 3))
def gemm(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("Gemm", x, numbers(3, 4), numbers(1, 4) if bias else None, alpha=0.5, beta=2.0)


@layer("Gemm of a transposed matrix", (2, 3))
def gemm_transposed(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("Gemm", x, numbers(4, 3), numbers(1) if bias else None, transB=1)


@layer("MatMul", ("n", 3))
def matmul(d: Draft, x: Value, bias: bool) -> Value:
    return d.op("MatMul", x, numbers(3, 4))


def drawing(name: str, bias: bool, follow: Callable[[Draft, Value], Value]) -> Callable[[], Graph]:
    shape, make = LAYERS[name]
    state = RNG.bit_generator.state

    def draw() -> Graph:
        RNG.bit_generator.state = state  # the same weights every time
        d = Draft()
        return d.done(d.op("Relu", follow(d, make(d, d.input("x", shape), bias))))

    return draw


def per_channel(name: str, array: np.ndarray) -> np.ndarray:
    """Shaped to broadcast along the channels of the layer's result."""
    spatial = len(LAYERS[name][0]) - 2
    return array.reshape(-1, *(1,) * spatial)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_batch_normalization_becomes_part_of_the_layer(name: str, bias: bool) -> None:
    def follow(d: Draft, y: Value) -> Value:
        return d.op("BatchNormalization", y, *parameters(4), epsilon=0.01)

    applied = apply(FoldAffine(), drawing(name, bias, follow), rtol=ROUNDING)
    assert applied.ops in (["Conv", "Relu"], ["ConvTranspose", "Relu"], ["Gemm", "Relu"])
    assert next(iter(applied.graph)).origin == "fold_affine"


@pytest.mark.parametrize("op", ["Mul", "Div", "Sub", "Add", "Sub from"])
@pytest.mark.parametrize("name", LAYERS)
def test_arithmetic_becomes_part_of_the_layer_when_asked_for_speed(name: str, op: str) -> None:
    def follow(d: Draft, y: Value) -> Value:
        c = per_channel(name, numbers(4))
        return d.op("Sub", c, y) if op == "Sub from" else d.op(op, y, c)

    applied = apply(FoldAffine(), drawing(name, True, follow), rtol=ROUNDING, optimization="aggressive")
    assert len(applied.ops) == 2 and applied.ops[1] == "Relu"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_at_the_basic_level_only_a_first_bias(op: str, bias: bool) -> None:
    def follow(d: Draft, y: Value) -> Value:
        return d.op(op, y, per_channel("Conv", numbers(4)))

    applied = apply(FoldAffine(), drawing("Conv", bias, follow))  # bit by bit
    if bias or op == "Mul":
        assert applied.ops == ["Conv", op, "Relu"] and "rounding would differ" in applied.reasons
    else:
        assert applied.ops == ["Conv", "Relu"]


def test_one_number_for_all_channels() -> None:
    applied = apply(
        FoldAffine(), drawing("Conv", True, lambda d, y: d.op("Mul", 0.5, y)), rtol=ROUNDING, optimization="aggressive"
    )
    assert applied.ops == ["Conv", "Relu"]


def test_matmul_and_bias_become_gemm() -> None:
    def draw() -> Graph:
        d = Draft()
        x, w, b = d.input("x", ("n", 3)), d.input("w", (3, 4)), d.input("b", (4,))
        return d.done(d.op("Add", b, d.op("MatMul", x, w)))

    applied = apply(FoldAffine(), draw)
    assert applied.ops == ["Gemm"] and len(applied.only("Gemm").inputs) == 3


def test_a_bias_computed_after_the_layer_stays() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", ("n", 3))
        y = d.op("MatMul", x, np.ones((3, 4), np.float32))
        return d.done(d.op("Add", y, d.op("Exp", d.input("b", (4,)))))

    applied = apply(FoldAffine(), draw)
    assert applied.ops == ["MatMul", "Exp", "Add"] and "not constant" in applied.reasons


def test_a_scale_goes_into_the_weights_of_a_matmul_of_any_rank_but_a_bias_does_not() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", ("n", 2, 3))
        y = d.op("Mul", d.op("MatMul", x, np.arange(12, dtype=np.float32).reshape(3, 4)), 0.3)
        return d.done(d.op("Add", y, np.arange(4, dtype=np.float32)))

    applied = apply(FoldAffine(), draw, rtol=ROUNDING, optimization="aggressive")
    assert applied.ops == ["MatMul", "Add"] and "higher rank has no bias" in applied.reasons


def test_half_precision_is_rounded_once() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (2, 3, 4, 4), "float16")
        weights = np.linspace(-1, 1, 27, dtype=np.float16).reshape(1, 3, 3, 3)
        y = d.op("Conv", x, weights)
        rest = [np.array([v], np.float16) for v in (0.3, 0.1, 0.2, 1.7)]
        return d.done(d.op("BatchNormalization", y, *rest))

    applied = apply(FoldAffine(), draw, rtol=4e-3)
    weights = applied.only("Conv").inputs[1].const.numpy()
    gain = np.float64(np.float16(0.3)) / np.sqrt(np.float64(np.float16(1.7)) + 1e-5)
    exact = np.linspace(-1, 1, 27, dtype=np.float16).astype(np.float64) * gain
    np.testing.assert_array_equal(weights.ravel(), exact.astype(np.float16))


Change = Callable[[Draft, Value], Value]
REFUSED: dict[str, tuple[str, Change, str]] = {
    "training": (
        "Conv",
        lambda d, y: d.op("BatchNormalization", y, *parameters(4), training_mode=1),
        "it trains",
    ),
    "no layer": (
        "Conv",
        lambda d, y: d.op("BatchNormalization", d.op("Tanh", y), *parameters(4)),
        "no layer before it",
    ),
    "computed parameters": (
        "Conv",
        lambda d, y: d.op("BatchNormalization", y, d.op("Exp", np.zeros(4, np.float32)), *parameters(4)[1:]),
        "a parameter is not constant",
    ),
    "infinite weights": (
        "Conv",
        lambda d, y: d.op("BatchNormalization", y, *parameters(4)[:3], np.full(4, -1, np.float32)),
        "not be finite",
    ),
    "differs within a channel": (
        "Conv",
        lambda d, y: d.op("Add", y, numbers(3)),
        "differs within a channel",
    ),
    "divides by the layer": ("Conv", lambda d, y: d.op("Div", 1.0, y), "divides by the layer"),
    "another rank": ("Gemm", lambda d, y: d.op("Add", y, numbers(1, 1, 4)), "higher rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_folded_says_why(case: str) -> None:
    name, follow, reason = REFUSED[case]
    draw = drawing(name, False, follow)
    before = [n.op for n in draw()]
    level = "basic" if "BatchNormalization" in before else "aggressive"
    applied = apply(FoldAffine(), draw, optimization=level, rtol=ROUNDING)
    assert applied.ops == before and reason in applied.reasons


def test_a_result_read_twice_is_left() -> None:
    def draw() -> Graph:
        d = Draft()
        y = d.op("Conv", d.input("x", (1, 1, 3, 3)), np.ones((1, 1, 1, 1), np.float32))
        return d.done(d.op("BatchNormalization", y, *(np.ones(1, np.float32) for _ in range(4))), d.op("Neg", y))

    assert apply(FoldAffine(), draw).ctx.changes == 0


def test_weights_shared_with_another_layer_are_not_touched() -> None:
    def draw() -> Graph:
        d = Draft()
        x, w = d.input("x", (1, 1, 3, 3)), d.constant(np.full((1, 1, 1, 1), 3, np.float32), "w")
        two = [np.full(1, v, np.float32) for v in (2, 0, 0, 1)]
        return d.done(d.op("BatchNormalization", d.op("Conv", x, w), *two), d.op("Conv", x, w))

    applied = apply(FoldAffine(), draw, rtol=ROUNDING)
    assert applied.ops == ["Conv", "Conv"]


# -- constants one after the other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("second", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_two_constants_become_one(first: str, second: str, dtype: str) -> None:
    kind = np.dtype(dtype).type

    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4, 3), dtype)
        return d.done(d.op(second, d.op(first, x, kind(3)), np.array([[7, 2, 5]], dtype)))

    sums, products = {"Add", "Sub"}, {"Mul", "Div"}
    alike = {first, second} <= sums or {first, second} <= products
    exact = dtype == "int32" and "Div" not in (first, second)
    applied = apply(FoldAffine(), draw)
    assert (len(applied.ops) == 1) == (alike and exact)
    applied = apply(FoldAffine(), draw, rtol=1e-6, optimization="aggressive")
    assert (len(applied.ops) == 1) == (alike and (exact or dtype == "float32"))


def test_integers_wrap_alike() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4,), "int8")
        return d.done(d.op("Mul", np.int8(77), d.op("Mul", x, np.int8(99))))

    assert apply(FoldAffine(), draw, feeds=[np.array([1, -5, 127, -128], np.int8)]).ops == ["Mul"]


@pytest.mark.parametrize(("a", "b"), [(1e30, 1e30), (1e-30, 1e-30)])
def test_constants_that_overflow_or_vanish_together_stay_apart(a: float, b: float) -> None:
    def draw() -> Graph:
        d = Draft()
        return d.done(d.op("Mul", d.op("Mul", d.input("x", (4,)), a), b))

    assert apply(FoldAffine(), draw, optimization="aggressive").ops == ["Mul", "Mul"]


def test_constants_that_would_grow_together_stay_apart() -> None:
    def draw() -> Graph:
        d = Draft()
        x = d.input("x", (4, 3), "int32")
        return d.done(d.op("Add", d.op("Add", x, np.ones((4, 1), np.int32)), np.ones(3, np.int32)))

    assert apply(FoldAffine(), draw).ops == ["Add", "Add"]
