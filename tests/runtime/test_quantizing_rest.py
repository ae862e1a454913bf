"""8-bit models whose rest is in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import Quantization, Quantizer
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.rest import narrower
from ranvier.runtime.quantizing.samples import results
from tests.runtime.test_quantizing_layers import CONFIG, RNG, X, conv, graph_of

FEEDS = [{"x": X}]
NARROW = CONFIG.updated(precision="bf16")


def cancelling() -> Graph:
    """Three layers; what one of them gives is large, and most of it is taken off again."""
    weights = {f"w{k}": RNG.standard_normal((32, 8 if k == 1 else 32, 3, 3)) * 0.1 for k in (1, 2, 3)}
    weights["b2"] = np.full(32, 300.0)
    weights["off"] = np.full((32, 1, 1), -300.0)
    nodes = [
        conv("x", "w1", "a"),
        helper.make_node("Tanh", ["a"], ["t"]),
        conv("t", "w2", "b", "b2"),
        helper.make_node("Add", ["b", "off"], ["c"], "less"),
        conv("c", "w3", "y"),
    ]
    return graph_of(nodes, weights)


def errors(graph: Graph) -> float:
    return difference(list(results(graph, FEEDS, NARROW)), list(results(graph, FEEDS, CONFIG))).error


@pytest.fixture
def graph() -> Graph:
    made = cancelling()
    if errors(made) == 0:
        pytest.skip("this processor does not multiply bfloat16")
    return made


def test_errors_are_those_of_a_session_that_runs_it_so(graph: Graph) -> None:
    expected = list(results(graph, FEEDS, CONFIG))
    made, report = Quantizer(graph, FEEDS, Quantization(rest="bf16", slower=1e9, keep=("conv_b",)), CONFIG).run()
    assert report.precision == "bf16" and not report.keep_f32
    assert report.difference == difference(list(results(made, FEEDS, NARROW)), expected)


def test_nodes_that_hurt_stay_in_float32(graph: Graph) -> None:
    expected = list(results(graph, FEEDS, CONFIG))
    every = errors(graph)
    assert narrower(graph, FEEDS, expected, CONFIG, 2 * every, 60.0) == NARROW
    some = narrower(graph, FEEDS, expected, CONFIG, 0.5 * every, 600.0)
    assert some.precision == "bf16" and some.keep_f32
    assert difference(list(results(graph, FEEDS, some)), expected).error <= 0.5 * every
    none = narrower(graph, FEEDS, expected, CONFIG, 1e-9, 600.0)
    assert difference(list(results(graph, FEEDS, none)), expected).error <= 1e-9
    assert narrower(graph, FEEDS, expected, CONFIG, 0.5 * every, 0.0) == CONFIG


def test_best_is_no_further_off_than_asked(graph: Graph) -> None:
    for bound, same in ((1.0, True), (0.5 * errors(graph), False)):
        options = Quantization(rest="best", max_error=bound, slower=1e9)
        _, report = Quantizer(graph, FEEDS, options, CONFIG).run(force=True)
        assert report.difference.error <= bound
        assert ((report.precision, report.keep_f32) == ("bf16", ())) == same
