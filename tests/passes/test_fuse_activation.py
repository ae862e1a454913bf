"""Activations as exporters spell them out: they become one node and keep their values; near misses stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper

from tests.passes.fuse_tools import Fused, Sketch, assert_same

Formula = Callable[[Sketch, str], str]


def applied(formula: Formula, dtype: object = np.float32, shape: list[int | str | None] | None = None) -> Fused:
    s = Sketch(dtype=dtype)
    x = s.input("x", shape or ["n", 5])
    return assert_same(s.model(formula(s, x)))


def erf_of(s: Sketch, x: str) -> str:
    return s.Erf(s.Div(x, math.sqrt(2)))


def tanh_curve(s: Sketch, x: str, cubic: str) -> str:
    return s.Tanh(s.Mul(math.sqrt(2 / math.pi), s.Add(x, cubic)))


GELU: dict[str, Formula] = {
    "torch 1": lambda s, x: s.Mul(s.Mul(x, s.Add(erf_of(s, x), 1.0)), 0.5),
    "torch 2": lambda s, x: s.Mul(x, s.Mul(0.5, s.Add(erf_of(s, x), 1.0))),
    "half first": lambda s, x: s.Mul(s.Mul(x, 0.5), s.Add(1.0, erf_of(s, x))),
    "half first, right": lambda s, x: s.Mul(s.Add(1.0, erf_of(s, x)), s.Mul(0.5, x)),
    "tensorflow": lambda s, x: s.Mul(s.Mul(x, 0.5), s.Add(s.Erf(s.Mul(x, 0.70710677)), 1.0)),
    "four digits": lambda s, x: s.Mul(x, s.Mul(s.Add(s.Erf(s.Div(x, 1.41421)), 1.0), 0.5)),
    "half inside": lambda s, x: s.Mul(x, s.Add(s.Mul(erf_of(s, x), 0.5), 0.5)),
}

TANH_GELU: dict[str, Formula] = {
    "torch": lambda s, x: s.Mul(s.Mul(0.5, x), s.Add(1.0, tanh_curve(s, x, s.Mul(0.044715, s.Pow(x, 3.0))))),
    "products": lambda s, x: s.Mul(s.Mul(x, s.Add(tanh_curve(s, x, s.Mul(s.Mul(s.Mul(x, x), x), 0.044715)), 1.0)), 0.5),
    "jax": lambda s, x: s.Mul(x, s.Mul(0.5, s.Add(1.0, tanh_curve(s, x, s.Mul(x, s.Mul(x, s.Mul(0.044715, x))))))),
    "two squares": lambda s, x: s.Mul(
        x, s.Mul(0.5, s.Add(1.0, tanh_curve(s, x, s.Mul(s.Mul(0.044715, x), s.Mul(x, x)))))
    ),
    "fast": lambda s, x: s.Mul(
        s.Mul(0.5, x),
        s.Add(1.0, s.Tanh(s.Mul(s.Mul(x, 0.7978845608), s.Add(1.0, s.Mul(s.Mul(0.044715, x), x))))),
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("name", GELU)
def test_gelu(name: str, dtype: object) -> None:
    found = applied(GELU[name], dtype)
    assert found.ops == {"Gelu": 1}
    assert found.only("Gelu").attrs == {}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", TANH_GELU)
def test_tanh_gelu(name: str, dtype: object) -> None:
    found = applied(TANH_GELU[name], dtype)
    assert found.ops == {"Gelu": 1}
    assert found.only("Gelu").attrs == {"approximate": "tanh"}


def test_gelu_with_another_constant_stays() -> None:
    assert "Gelu" not in applied(lambda s, x: s.Mul(s.Mul(x, 0.5), s.Add(1.0, s.Erf(s.Div(x, 1.5))))).ops
    assert "Gelu" not in applied(lambda s, x: s.Mul(s.Mul(x, 0.4), s.Add(1.0, erf_of(s, x)))).ops
    assert (
        "Gelu"
        not in applied(lambda s, x: s.Mul(s.Mul(0.5, x), s.Add(1.0, tanh_curve(s, x, s.Mul(0.05, s.Pow(x, 3.0)))))).ops
    )


def test_gelu_of_two_values_stays() -> None:
    s = Sketch()
    x, y = s.input("x", ["n", 5]), s.input("y", ["n", 5])
    assert "Gelu" not in assert_same(s.model(s.Mul(s.Mul(x, 0.5), s.Add(1.0, erf_of(s, y))))).ops


def test_gelu_whose_inner_value_is_used_elsewhere_stays() -> None:
    s = Sketch()
    x = s.input("x", ["n", 5])
    curve = erf_of(s, x)
    found = assert_same(s.model(s.Mul(s.Mul(x, 0.5), s.Add(1.0, curve)), s.Neg(curve)))
    assert "Gelu" not in found.ops


def test_a_constant_that_widens_the_operand_is_a_reason() -> None:
    s = Sketch()
    x = s.input("x", [1, 5])
    half = s.constant(np.full((4, 5), 0.5, np.float32))
    found = assert_same(s.model(s.Mul(s.Mul(x, half), s.Add(1.0, erf_of(s, x)))))
    assert "Gelu" not in found.ops
    assert "a constant may widen the operand" in found.reasons()


def test_a_full_constant_is_a_number_too() -> None:
    s = Sketch()
    x = s.input("x", [4, 5])
    half = s.constant(np.full((4, 5), 0.5, np.float32))
    assert assert_same(s.model(s.Mul(s.Mul(x, half), s.Add(1.0, erf_of(s, x))))).ops == {"Gelu": 1}


def test_integers_are_a_reason() -> None:
    s = Sketch(dtype=np.int32)
    x = s.input("x", [4])
    found = assert_same(s.model(s.Max(x, s.Mul(x, np.array(0, np.int32)))))
    assert found.ops == {"Mul": 1, "Max": 1}


# -- Swish ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_swish(dtype: object) -> None:
    assert applied(lambda s, x: s.Mul(x, s.Sigmoid(x)), dtype).ops == {"Swish": 1}
    assert applied(lambda s, x: s.Mul(s.Sigmoid(x), x), dtype).ops == {"Swish": 1}
    assert applied(lambda s, x: s.Div(x, s.Add(1.0, s.Exp(s.Neg(x)))), dtype).ops == {"Swish": 1}


def test_swish_keeps_alpha() -> None:
    quick = applied(lambda s, x: s.Mul(x, s.Sigmoid(s.Mul(x, 1.702))))
    assert quick.ops == {"Swish": 1}
    assert quick.only("Swish").attrs["alpha"] == pytest.approx(1.702)
    paddle = applied(lambda s, x: s.Mul(x, s.Sigmoid(s.Mul(x, 1.0))))
    assert paddle.only("Swish").attrs == {}


def test_swish_with_a_vector_for_alpha_stays() -> None:
    found = applied(lambda s, x: s.Mul(x, s.Sigmoid(s.Mul(x, np.arange(5, dtype=np.float32)))))
    assert "Swish" not in found.ops
    assert "alpha is not one constant number" in found.reasons()


def test_sigmoid_of_another_value_stays() -> None:
    s = Sketch()
    x, y = s.input("x", ["n", 5]), s.input("y", ["n", 5])
    assert assert_same(s.model(s.Mul(x, s.Sigmoid(y)))).ops == {"Sigmoid": 1, "Mul": 1}


def test_sigmoid_used_elsewhere_stays() -> None:
    s = Sketch()
    gate = s.Sigmoid(s.input("x", ["n", 5]))
    assert "Swish" not in assert_same(s.model(s.Mul("x", gate), s.Identity(gate))).ops


def test_swiglu() -> None:
    s = Sketch()
    gate, linear = s.input("gate", ["n", 6]), s.input("linear", ["n", 6])
    assert assert_same(s.model(s.Mul(s.Mul(gate, s.Sigmoid(gate)), linear))).ops == {"SwiGLU": 1}


def test_swiglu_of_a_split_projection() -> None:
    s = Sketch()
    gate, linear = s.Split(s.input("x", ["n", 8]), [4, 4], outputs=2, axis=-1)
    found = assert_same(s.model(s.Mul(linear, s.Mul(gate, s.Sigmoid(s.Mul(gate, 2.0))))))
    assert found.ops == {"Split": 1, "SwiGLU": 1}
    assert found.only("SwiGLU").attrs == {"alpha": 2.0}


def test_a_gate_that_broadcasts_stays_a_product() -> None:
    s = Sketch()
    gate, linear = s.input("gate", ["n", 1]), s.input("linear", ["n", 6])
    found = assert_same(s.model(s.Mul(s.Mul(gate, s.Sigmoid(gate)), linear)))
    assert found.ops == {"Swish": 1, "Mul": 1}
    assert "not known to be of one shape" in found.reasons()


# -- piecewise ------------------------------------------------------------------------------------------------------

CLIPPED: dict[str, Formula] = {
    "clip": lambda s, x: s.Clip(s.Add(x, 3.0), 0.0, 6.0),
    "min max": lambda s, x: s.Min(s.Max(s.Add(3.0, x), 0.0), 6.0),
    "relu": lambda s, x: s.Min(s.Relu(s.Add(x, 3.0)), 6.0),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", CLIPPED)
def test_hard_swish(name: str, dtype: object) -> None:
    clipped = CLIPPED[name]
    assert applied(lambda s, x: s.Div(s.Mul(x, clipped(s, x)), 6.0), dtype).ops == {"HardSwish": 1}
    assert applied(lambda s, x: s.Mul(s.Mul(x, clipped(s, x)), 1 / 6), dtype).ops == {"HardSwish": 1}
    assert applied(lambda s, x: s.Mul(x, s.Div(clipped(s, x), 6.0)), dtype).ops == {"HardSwish": 1}
    assert applied(lambda s, x: s.Div(clipped(s, x), 6.0), dtype).ops == {"HardSigmoid": 1}


def test_hard_swish_by_hard_sigmoid() -> None:
    assert applied(lambda s, x: s.Mul(x, s.HardSigmoid(x, alpha=0.1666667, beta=0.5))).ops == {"HardSwish": 1}
    found = applied(lambda s, x: s.Mul(x, s.HardSigmoid(x)))
    assert found.ops == {"HardSigmoid": 1, "Mul": 1}
    assert "alpha 0.2 and beta 0.5" in found.reasons()


def test_other_bounds_are_no_hard_swish() -> None:
    assert "HardSwish" not in applied(lambda s, x: s.Div(s.Mul(x, s.Clip(s.Add(x, 3.0), 0.0, 5.0)), 6.0)).ops
    assert "HardSwish" not in applied(lambda s, x: s.Div(s.Mul(x, s.Clip(s.Add(x, 2.0), 0.0, 6.0)), 6.0)).ops
    assert applied(lambda s, x: s.Clip(x, 0.0, 6.0)).ops == {"Clip": 1}


def test_leaky_relu() -> None:
    for dtype in (np.float32, np.float16):
        assert applied(lambda s, x: s.Max(x, s.Mul(x, 0.1)), dtype).ops == {"LeakyRelu": 1}
    assert applied(lambda s, x: s.Max(s.Mul(0.2, x), x)).ops == {"LeakyRelu": 1}
    assert applied(lambda s, x: s.Where(s.Greater(x, 0.0), x, s.Mul(x, 1.5))).ops == {"LeakyRelu": 1}


def test_leaky_relu_is_exact() -> None:
    s = Sketch()
    model = s.model(s.Max(s.input("x", ["n"]), s.Mul("x", 0.1)))
    special = np.array([0.0, -0.0, -np.inf, np.inf, np.nan, -1e-45, 1e-45, -3e38], np.float32)
    assert_same(model, [special], tolerance=0.0)


def test_leaky_relu_needs_a_slope_below_one() -> None:
    found = applied(lambda s, x: s.Max(x, s.Mul(x, 1.5)))
    assert found.ops == {"Mul": 1, "Max": 1}
    assert "alpha 1.5 is not between 0 and 1" in found.reasons()


# -- Softplus and Mish ----------------------------------------------------------------------------------------------


def test_softplus_and_mish() -> None:
    assert applied(lambda s, x: s.Log(s.Add(s.Exp(x), 1.0))).ops == {"Softplus": 1}
    assert applied(lambda s, x: s.Mul(x, s.Tanh(s.Softplus(x)))).ops == {"Mish": 1}
    assert applied(lambda s, x: s.Mul(x, s.Tanh(s.Log(s.Add(1.0, s.Exp(x)))))).ops == {"Mish": 1}
    assert "Softplus" not in applied(lambda s, x: s.Log(s.Add(s.Exp(x), 2.0))).ops


def test_rules_reach_into_subgraphs() -> None:
    s = Sketch()
    x = s.input("x", [4])
    s.input("flag", [], np.bool_)
    inner = Sketch()
    inner.nodes.append(helper.make_node("Sigmoid", [x], ["gate"]))
    inner.nodes.append(helper.make_node("Mul", [x, "gate"], ["then_y"]))
    info = helper.make_tensor_value_info
    then = helper.make_graph(inner.nodes, "then", [], [info("then_y", 1, [4])])
    other = helper.make_graph([helper.make_node("Neg", [x], ["else_y"])], "else", [], [info("else_y", 1, [4])])
    found = assert_same(s.model(s.If("flag", then_branch=then, else_branch=other)))
    assert found.ops == {"If": 1, "Swish": 1, "Neg": 1}


def test_a_value_of_the_outer_graph_is_not_pulled_into_a_subgraph() -> None:
    s = Sketch()
    x = s.input("x", [4])
    s.input("flag", [], np.bool_)
    gate = s.Sigmoid(x)
    info = helper.make_tensor_value_info
    then = helper.make_graph([helper.make_node("Mul", [x, gate], ["a"])], "then", [], [info("a", 1, [4])])
    other = helper.make_graph([helper.make_node("Neg", [x], ["b"])], "else", [], [info("b", 1, [4])])
    found = assert_same(s.model(s.If("flag", then_branch=then, else_branch=other)))
    assert "Swish" not in found.ops
