"""What is computed together, and what costs nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, ...]],
    outputs: list[str],
    constants: dict[str, Array] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def launches(made: onnx.ModelProto, feeds: dict[str, Array]) -> list[str]:
    """Names of the kernels that run; the results are those of the reference."""
    expected = rv.load(made, providers=["reference"], optimization="none").run(feeds)
    with rv.load(made, providers=["cpu"], optimization="none") as session, session.profile() as profile:
        found = session.run(feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5)
    return [record.kernel for record in profile.kernels]


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attrs)


def test_a_chain_of_elementwise_nodes_is_one_kernel() -> None:
    chain = [node("Add", "x y", "a"), node("Relu", "a", "b"), node("Mul", "b x", "c"), node("Tanh", "c", "z")]
    made = model(chain, {"x": (4, 33), "y": (33,)}, ["z"])
    assert len(launches(made, {"x": random(4, 33), "y": random(33)})) == 1


def test_a_diamond_is_one_kernel() -> None:
    made = model([node("Sigmoid", "x", "s"), node("Mul", "x s", "z")], {"x": (50,)}, ["z"])
    assert len(launches(made, {"x": random(50)})) == 1


def test_results_on_the_way_are_stored_on_the_way() -> None:
    """An optimizer's update: both means are results, and the weights follow from them."""
    nodes = [node("Sub", "g m", "d"), node("Mul", "d c", "e"), node("Add", "m e", "mean")]
    nodes += [node("Mul", "g g", "s"), node("Max", "v s", "square")]
    nodes += [node("Mul", "mean square", "q"), node("Sub", "p q", "new")]
    shapes: dict[str, tuple[int, ...]] = {"g": (9, 17), "m": (9, 17), "v": (9, 17), "p": (9, 17), "c": ()}
    made = model(nodes, shapes, ["new", "mean", "square"])
    assert len(launches(made, {name: random(*shape) for name, shape in shapes.items()})) == 1


def test_a_result_on_the_way_to_a_sum_has_a_kernel_of_its_own() -> None:
    nodes = [node("Add", "x x", "y"), node("Exp", "y", "e"), node("ReduceSum", "e", "z", keepdims=0)]
    made = model(nodes, {"x": (6, 40)}, ["y", "z"])
    assert len(launches(made, {"x": random(6, 40)})) == 2


def test_a_result_that_is_needed_twice_is_computed_once() -> None:
    nodes = [node("Exp", "x", "e"), node("Neg", "e", "y"), node("ReduceSum", "e", "z", keepdims=0)]
    made = model(nodes, {"x": (8, 16)}, ["y", "z"])
    assert len(launches(made, {"x": random(8, 16)})) == 3


def test_a_convolution_takes_bias_residual_and_activation() -> None:
    nodes = [node("Conv", "x w b", "c", pads=[1, 1, 1, 1]), node("Add", "c x", "a"), node("Relu", "a", "y")]
    nodes += [node("GlobalAveragePool", "y", "z")]
    weights = {"w": random(8, 8, 3, 3), "b": random(8)}
    kernels = launches(model(nodes, {"x": (1, 8, 9, 9)}, ["z"], weights), {"x": random(1, 8, 9, 9)})
    # the image to channels-last (where the kernel wants it), the convolution with all that follows, the mean
    assert len([k for k in kernels if "map" in k]) == 0
    assert len(kernels) <= 4


def test_a_product_takes_a_gelu() -> None:
    half, root, one = np.float32(0.5), np.float32(np.sqrt(2)), np.float32(1)
    nodes = [
        node("MatMul", "x w", "m"),
        node("Add", "m b", "a"),
        node("Div", "a root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "f"),
        node("Mul", "a f", "g"),
        node("Mul", "g half", "y"),
    ]
    constants = {"w": random(32, 48), "b": random(48), "root": root, "one": one, "half": half}
    constants = {name: np.asarray(value) for name, value in constants.items()}
    kernels = launches(model(nodes, {"x": (5, 32)}, ["y"], constants), {"x": random(5, 32)})
    assert len(kernels) == 1


def test_elementwise_work_flows_into_a_reduction() -> None:
    nodes = [node("Mul", "x x", "s"), node("ReduceMean", "s", "m", keepdims=1), node("Sqrt", "m", "y")]
    assert len(launches(model(nodes, {"x": (7, 40)}, ["y"]), {"x": random(7, 40)})) == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_is_joined_is_written_in_place(axis: int) -> None:
    nodes = [node("Relu", "x", "a"), node("Neg", "y", "b"), node("Concat", "a b", "z", axis=axis)]
    feeds = {"x": random(4, 5, 6), "y": random(4, 5, 6)}
    assert len(launches(model(nodes, {"x": (4, 5, 6), "y": (4, 5, 6)}, ["z"]), feeds)) == 2


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_what_is_stacked_is_written_in_place(axis: int) -> None:
    """Each gets an axis more on its way; the first is read by others too, the last comes by two views."""
    nodes = [
        node("Relu", "x", "a"),
        node("Softmax", "y", "b", axis=-1),
        node("Concat", "x y", "c", axis=1),
        *(node("Unsqueeze", f"{name} axis", f"{name}1") for name in "ab"),
        node("Reshape", "c flat", "c0"),
        node("Reshape", "c0 whole", "c1"),
        node("Concat", "a1 b1 c1", "z", axis=axis),
        node("Tanh", "a", "t"),
    ]
    whole = [4, 5, 6]
    whole.insert(axis, 2)
    constants = {
        "axis": np.array([axis], np.int64),
        "flat": np.array([-1], np.int64),
        "whole": np.array(whole, np.int64),
    }
    feeds = {"x": random(4, 5, 6), "y": random(4, 5, 6)}
    made = model(nodes, {"x": (4, 5, 6), "y": (4, 5, 6)}, ["z", "t"], constants)
    joined = 2 if axis < 1 else 3  # elsewhere a concatenation lies in another order, and is a copy more
    assert len(launches(made, feeds)) == 3 + joined


def test_views_cost_nothing() -> None:
    """Heads are split, transposed and merged again around one product per side."""
    shape = np.array([2, 6, 4, 8], np.int64)
    back = np.array([2, 6, 32], np.int64)
    nodes = [
        node("Reshape", "x shape", "r"),
        node("Transpose", "r", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "r", "k", perm=[0, 2, 3, 1]),
        node("MatMul", "q k", "s"),
        node("MatMul", "s q", "o"),
        node("Transpose", "o", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t back", "y"),
    ]
    kernels = launches(model(nodes, {"x": (2, 6, 32)}, ["y"], {"shape": shape, "back": back}), {"x": random(2, 6, 32)})
    assert not [k for k in kernels if "map" in k or "transpose" in k]


def test_a_trailing_transpose_is_written_at_once() -> None:
    nodes = [node("Relu", "x", "a"), node("Transpose", "a", "y", perm=[1, 0])]
    assert len(launches(model(nodes, {"x": (30, 40)}, ["y"]), {"x": random(30, 40)})) == 1


def test_what_others_read_too_is_written_to_an_output_of_another_shape() -> None:
    """A state that is shaped back, and read on."""
    constants = {"shape": np.array([6, 40]), "places": np.arange(0, 240, 2), "values": random(120)}
    nodes = [
        node("ScatterElements", "x places values", "s"),
        node("Reshape", "s shape", "state"),
        node("Reshape", "s shape", "again"),
        node("Softmax", "again", "y"),
    ]
    apart = len(launches(model(nodes, {"x": (240,)}, ["y"], constants), {"x": random(240)}))
    assert len(launches(model(nodes, {"x": (240,)}, ["state", "y"], constants), {"x": random(240)})) == apart
    turned = [nodes[0], node("Reshape", "s shape", "again"), node("Transpose", "again", "state"), nodes[3]]
    assert len(launches(model(turned, {"x": (240,)}, ["state", "y"], constants), {"x": random(240)})) == apart + 1


def test_outputs_that_are_inputs_or_each_other() -> None:
    nodes = [node("Identity", "x", "a"), node("Relu", "x", "b"), node("Identity", "b", "c")]
    launches(model(nodes, {"x": (3, 4)}, ["a", "b", "c"]), {"x": random(3, 4)})


def test_shape_arithmetic_costs_nothing() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Concat", "n minus", "t", axis=0),
        node("Reshape", "x t", "r"),
        node("Relu", "r", "y"),
    ]
    constants = {"zero": np.array([0], np.int64), "minus": np.array([-1], np.int64)}
    assert len(launches(model(nodes, {"x": (3, 4, 5)}, ["y"], constants), {"x": random(3, 4, 5)})) == 1


def test_a_result_may_stand_twice_in_a_concatenation() -> None:
    nodes = [node("Tanh", "x", "a"), node("Concat", "a x a", "b", axis=0), node("Softmax", "b", "y", axis=-1)]
    launches(model(nodes, {"x": (3, 5)}, ["y"]), {"x": random(3, 5)})


def test_codes_are_stored_as_codes() -> None:
    """Numbers that are made of codes for one reader are made by it: both products write a byte per element."""
    scale, zero = np.float32(0.05), np.uint8(9)
    parameters = {f"s{k}": np.asarray(scale) for k in range(3)} | {f"z{k}": np.asarray(zero) for k in range(3)}
    weights = {name: RNG.integers(-90, 90, (32, 32)).astype(np.int8) for name in ("w", "v")}
    none = {"n": np.asarray(np.int8(0)), "t": np.asarray(np.float32(0.002))}
    steps = [
        node("QuantizeLinear", "x s0 z0", "c"),
        node("QLinearMatMul", "c s0 z0 w t n s1 z1", "a"),
        node("QLinearMatMul", "c s0 z0 v t n s2 z2", "b"),
        node("DequantizeLinear", "a s1 z1", "p"),
        node("DequantizeLinear", "b s2 z2", "q"),
        node("Add", "p q", "r"),
        node("QuantizeLinear", "r s0 z0", "y"),
    ]
    made = model(steps, {"x": (16, 32)}, ["y"], parameters | weights | none)
    feeds = {"x": random(16, 32)}
    expected = rv.load(made, providers=["reference"], optimization="none").run(feeds)["y"]
    with rv.load(made, providers=["cpu"], optimization="none") as session, session.profile() as profile:
        np.testing.assert_array_equal(session.run(feeds)["y"], expected)
    rounding, *products = profile.kernels  # whichever kernel multiplies: that differs with processors and threads
    assert rounding.kernel.startswith("map")
    assert len(products) == 2
    assert products[0].bytes == products[1].bytes


@pytest.mark.parametrize("op", ["Softmax", "ReduceMax", "squares"])
@pytest.mark.parametrize("columns", [9, 1])
def test_numbers_of_codes_go_into_row_work_and_beside_it(op: str, columns: int) -> None:
    """A residual around row work: both read the same numbers, which are made of codes in its loops."""
    rows = {
        "Softmax": [node("Softmax", "b", "c", axis=-1)],
        "ReduceMax": [node("ReduceMax", "b axes", "c", keepdims=1)],
        "squares": [node("Mul", "b b", "e"), node("ReduceMean", "e axes", "c", keepdims=1)],
    }
    steps = [node("QuantizeLinear", "x s z", "a"), node("DequantizeLinear", "a s z", "b"), *rows[op]]
    steps += [node("Add", "b c", "d"), node("Relu", "d", "y")]
    constants = {"s": np.asarray(np.float32(0.05)), "z": np.asarray(np.uint8(100)), "axes": np.array([1])}
    launches(model(steps, {"x": (7, columns)}, ["y"], constants), {"x": random(7, columns)})
