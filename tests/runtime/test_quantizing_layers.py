"""What quantization does around layers: where codes stand, channels of like ranges, biases that make up for weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from ranvier.config import SessionConfig
from ranvier.formats.onnx import read
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import Quantization, Quantizer, prepared
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.quantizing.sites import find_sites
from ranvier.runtime.quantizing.static import quantize_static
from ranvier.runtime.quantizing.tails import tail

Array = np.ndarray[Any, Any]
CONFIG = SessionConfig(threads=1)
RNG = np.random.default_rng(3)
X = RNG.standard_normal((4, 8, 12, 12)).astype(np.float32)


def graph_of(
    nodes: list[Any],
    weights: dict[str, Array],
    outputs: tuple[str, ...] = ("y",),
    shapes: dict[str, Array] | None = None,
) -> Graph:
    made = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, [4, 8, 12, 12])],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
        + [numpy_helper.from_array(np.asarray(array, np.int64), name) for name, array in (shapes or {}).items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return prepared(read(model), CONFIG)


def conv(data: str, weight: str, out: str, *bias: str, **attrs: Any) -> Any:
    return helper.make_node("Conv", [data, weight, *bias], [out], f"conv_{out}", **attrs)


SWISH_OF_FIVE = [  # no operator is that
    helper.make_node("Add", ["a", "three"], ["a3"]),
    helper.make_node("Clip", ["a3", "zero", "five"], ["cut"]),
    helper.make_node("Mul", ["a", "cut"], ["product"]),
    helper.make_node("Div", ["product", "five"], ["swish"]),
]
NUMBERS = {"three": np.array(3), "zero": np.array(0), "five": np.array(5)}


def test_codes_stand_behind_all_nodes_of_an_activation() -> None:
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), "w2": RNG.standard_normal((16, 16, 3, 3)), **NUMBERS}
    graph = graph_of([conv("x", "w1", "a"), *SWISH_OF_FIVE, conv("swish", "w2", "y")], weights)
    first = next(node for node in graph if node.op == "Conv")
    assert tail(first).value.name == "swish" and [node.op for node in tail(first).nodes] == [
        "Add",
        "Clip",
        "Mul",
        "Div",
    ]
    made, report = Quantizer(graph, [{"x": X}], Quantization(slower=1e9, equalize=False), CONFIG).run()
    coded = {node.inputs[0].name for node in made if node.op == "QuantizeLinear" and node.inputs[0] is not None}
    assert coded == {"x", "swish"}
    assert not any(node.op == "Div" for node in made), "a division before a rounding to 8 bits is a product"
    assert report.difference.cosine > 0.999


@pytest.mark.parametrize("reader", ["Relu", "Conv"])
def test_an_activation_ends_where_others_read_its_parts(reader: str) -> None:
    """Half of an activation is read by someone else: then no single value stands for the layer's result."""
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), "w2": RNG.standard_normal((16, 16, 3, 3)), **NUMBERS}
    other = conv("cut", "w2", "z") if reader == "Conv" else helper.make_node("Relu", ["cut"], ["z"])
    graph = graph_of([conv("x", "w1", "a"), *SWISH_OF_FIVE, other], weights, ("swish", "z"))
    assert tail(next(node for node in graph if node.op == "Conv")).value.name == "a"


def uneven() -> Graph:
    """Channels a thousand times as large as others, read through a pool, a join, and a filter for each channel."""
    sizes = np.logspace(-2, 1, 16).reshape(-1, 1, 1, 1)
    weights = {
        "w1": RNG.standard_normal((16, 8, 3, 3)) * sizes,
        "b1": RNG.standard_normal(16) * sizes.reshape(-1),
        "wd": RNG.standard_normal((16, 1, 3, 3)) / sizes,
        "w2": RNG.standard_normal((16, 32, 1, 1)),
        "w3": RNG.standard_normal((16, 16, 3, 3)) / np.moveaxis(sizes, 0, 1),
    }
    nodes = [
        conv("x", "w1", "a", "b1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        conv("p", "wd", "d", group=16, pads=[1, 1, 1, 1]),
        conv("p", "w3", "t", pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["d", "t"], ["j"], axis=1),
        conv("j", "w2", "y"),
    ]
    return graph_of(nodes, weights)


def test_scaled_channels_change_no_bit_and_keep_more_in_8_bits() -> None:
    graph, feeds = uneven(), [{"x": X}]
    scaled = copied(graph)
    assert equalize(scaled, feeds, CONFIG) > 16
    np.testing.assert_array_equal(*(next(results(each, feeds, CONFIG))[0] for each in (scaled, graph)))
    first, second = (next(n.inputs[1].const.numpy() for n in g if n.op == "Conv") for g in (graph, scaled))  # type: ignore[union-attr]
    reach = [np.abs(w).reshape(16, -1).max(axis=1) for w in (first, second)]
    assert reach[1].max() / reach[1].min() < reach[0].max() / reach[0].min() / 8
    errors = [
        Quantizer(graph, feeds, Quantization(slower=1e9, equalize=on), CONFIG).run()[1].difference.error
        for on in (True, False)
    ]
    assert errors[0] < errors[1] / 2


def scales_of(graph: Graph) -> dict[str, float]:
    """Of activations, by the values that get codes."""
    pairs = (node for node in graph if node.op == "QuantizeLinear")
    return {n.inputs[0].name: float(n.inputs[1].const.numpy()) for n in pairs}  # type: ignore[union-attr]


def test_what_a_pool_alone_reads_has_the_scale_of_its_result() -> None:
    """Codes are rounded once then, whichever side of the pool. Others that read it need its own range."""
    weights = {name: RNG.standard_normal((16, 8 if name == "w1" else 16, 3, 3)) for name in ("w1", "w2", "w3")}
    pool = helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2])
    again = helper.make_node("MaxPool", ["p"], ["pp"], kernel_shape=[2, 2])
    nodes = [conv("x", "w1", "a"), helper.make_node("Relu", ["a"], ["r"]), pool, again, conv("pp", "w2", "y")]
    ranges = {"x": (-3.0, 3.0), "r": (0.0, 9.0), "p": (0.0, 8.0), "pp": (0.0, 7.0)}
    graph = graph_of(nodes, weights)
    quantize_static(graph, find_sites(graph), ranges)
    found = scales_of(graph)
    assert set(found) == {"x", "r", "p", "pp"}
    assert found["r"] == found["p"] == found["pp"] == pytest.approx(7 / 255)
    feeds = [{"x": X}]
    apart = graph_of(nodes, weights)
    quantize_static(apart, find_sites(apart), ranges, joins=False)
    assert set(scales_of(apart)) == {"x", "pp"}
    np.testing.assert_array_equal(*(next(results(each, feeds, CONFIG))[0] for each in (graph, apart)))
    both = graph_of([*nodes, conv("r", "w3", "z")], weights, ("y", "z"))
    quantize_static(both, find_sites(both), ranges)
    assert scales_of(both)["r"] == pytest.approx(9 / 255)


def test_channels_behind_an_activation_are_scaled_by_a_row_of_factors() -> None:
    sizes = np.logspace(-1.5, 1.5, 32).reshape(-1, 1, 1, 1)
    weights = {"w1": RNG.standard_normal((32, 8, 3, 3)) * sizes, **NUMBERS}
    weights["wd"] = RNG.standard_normal((32, 1, 3, 3)) / sizes
    graph = graph_of([conv("x", "w1", "a"), *SWISH_OF_FIVE, conv("swish", "wd", "y", group=32)], weights)
    scaled, feeds = copied(graph), [{"x": X}]
    assert equalize(scaled, feeds, CONFIG) > 8
    np.testing.assert_array_equal(*(next(results(each, feeds, CONFIG))[0] for each in (scaled, graph)))
    errors = [
        Quantizer(graph, feeds, Quantization(slower=1e9, equalize=on), CONFIG).run()[1].difference.error
        for on in (True, False)
    ]
    assert errors[0] < errors[1] / 2


def test_rows_of_ones_do_not_stay() -> None:
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), **NUMBERS}
    graph = graph_of([conv("x", "w1", "a"), *SWISH_OF_FIVE, helper.make_node("Softmax", ["swish"], ["y"])], weights)
    before = [node.op for node in graph]
    assert equalize(graph, [{"x": X}], CONFIG) == 0
    assert [node.op for node in graph] == before


def test_results_of_the_model_are_not_scaled() -> None:
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)) * np.logspace(-2, 1, 16).reshape(-1, 1, 1, 1)}
    weights["w2"] = RNG.standard_normal((4, 16, 3, 3))
    graph = graph_of([conv("x", "w1", "a"), conv("a", "w2", "y")], weights, ("y", "a"))
    assert equalize(graph, [{"x": X}], CONFIG) == 0


def test_biases_make_up_for_what_weights_lose_on_average() -> None:
    """Inputs around a mean far from zero: rounded weights shift every channel, and a bias takes that back."""
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((64, 8, 1, 1)) + 0.3})
    feed = {"x": (X * 0.1 + 5).astype(np.float32)}
    made, _ = Quantizer(graph, [feed], Quantization(slower=1e9), CONFIG).run()
    layer = next(node for node in made if node.op == "Conv")
    assert len(layer.inputs) == 3, "a layer without a bias gets one"
    found, expected = (next(results(each, [feed], CONFIG))[0] for each in (made, graph))
    layer.set_inputs(layer.inputs[:2])
    without = next(results(made, [feed], CONFIG))[0]
    shifts = [float(np.abs((each - expected).mean(axis=(0, 2, 3))).mean()) for each in (found, without)]
    assert shifts[0] < shifts[1] / 3


def test_a_row_that_is_added_to_a_product_serves_as_its_bias() -> None:
    flat = [helper.make_node("Reshape", ["x", "shape"], ["f"])]
    nodes = [*flat, helper.make_node("MatMul", ["f", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])]
    weights = {"w": RNG.standard_normal((8, 64)) + 0.3, "b": RNG.standard_normal(64)}
    graph = graph_of(nodes, weights, shapes={"shape": np.array([4, 144, 8])})
    feed = {"x": (X * 0.1 + 5).astype(np.float32)}
    made, _ = Quantizer(graph, [feed], Quantization(slower=1e9), CONFIG).run()
    found, expected = (next(results(each, [feed], CONFIG))[0] for each in (made, graph))
    added = next(node for node in made if node.op == "Add")
    row = next(value.const.numpy() for value in added.inputs if value is not None and value.const is not None)
    without = found - row + weights["b"].astype(np.float32)
    shifts = [float(np.abs((each - expected).mean(axis=(0, 1))).mean()) for each in (found, without)]
    assert shifts[0] < shifts[1] / 3


def test_the_best_ranges_are_those_with_the_least_error() -> None:
    """One number a hundred times as large as all others: the whole range is not the best one."""
    x = X.copy()
    x[0, 0, 0, 0] = 300.0
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), "w2": RNG.standard_normal((16, 16, 3, 3))}
    nodes = [conv("x", "w1", "a"), helper.make_node("Tanh", ["a"], ["t"]), conv("t", "w2", "y")]
    graph = graph_of(nodes, weights)
    errors = {
        ranges: Quantizer(graph, [{"x": x}], Quantization(ranges=ranges, slower=1e9), CONFIG).run()[1].difference.error
        for ranges in ("minmax", "percentile", "mse", "entropy", "best")
    }
    best = errors.pop("best")
    assert best == min(errors.values()) < errors["minmax"]


def test_what_no_layer_reads_keeps_its_bits() -> None:
    """Joins on the way to a layer are coded, joins on the way elsewhere are not."""
    weights = {f"w{k}": RNG.standard_normal((16, 32 if k == 3 else 8, 3, 3)) for k in range(1, 6)}
    nodes = [
        *(
            conv("x", "w1", "a"),
            conv("x", "w2", "b"),
            helper.make_node("Concat", ["a", "b"], ["ab"], "to_layer", axis=1),
        ),
        conv("ab", "w3", "c"),
        *(conv("x", "w4", "d"), conv("x", "w5", "e"), helper.make_node("Concat", ["d", "e"], ["de"], "to_log", axis=1)),
        *(helper.make_node("Abs", ["de"], ["size"]), helper.make_node("Log", ["size"], ["y"])),
    ]
    graph = graph_of(nodes, weights, ("y", "c"))
    made = Quantizer(graph, [{"x": X}], Quantization(equalize=False), CONFIG).made()
    readers = {node.name: [v.producer.op for v in node.inputs if v is not None and v.producer] for node in made}
    assert readers["to_layer"] == ["DequantizeLinear"] * 2
    assert readers["to_log"] == ["Conv"] * 2


def test_of_two_layers_that_are_added_one_is_rounded() -> None:
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), "w2": RNG.standard_normal((16, 8, 3, 3))}
    weights["w3"] = RNG.standard_normal((16, 16, 3, 3))
    nodes = [conv("x", "w1", "a"), conv("x", "w2", "b"), helper.make_node("Add", ["b", "a"], ["s"], "sum")]
    graph = graph_of([*nodes, conv("s", "w3", "y")], weights)
    made = Quantizer(graph, [{"x": X}], Quantization(equalize=False), CONFIG).made()
    total = next(node for node in made if node.name == "sum")
    assert [v.producer.op for v in total.inputs if v is not None and v.producer] == ["Conv", "DequantizeLinear"]


def test_weights_among_the_inputs_are_constants() -> None:
    made = helper.make_graph(
        [conv("x", "w", "y")],
        "net",
        [helper.make_tensor_value_info("x", 1, [4, 8, 12, 12]), helper.make_tensor_value_info("w", 1, [16, 8, 3, 3])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(RNG.standard_normal((16, 8, 3, 3)).astype(np.float32), "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=3)
    graph, report = Quantizer(prepared(read(model), CONFIG), [{"x": X}], Quantization(), CONFIG).run(force=True)
    assert [value.name for value in graph.inputs] == ["x"] and not graph.defaults
    assert report.difference.cosine > 0.99 and report.layers[0].scheme == "int8"
