"""Which layers are coded: what each does alone, sums of that, and models that come out near enough."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from onnx import helper

from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import NotWorthIt, Quantization, Quantizer
from ranvier.runtime.quantizing.choice import Judged, fewest, left_out, saved_by
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.quantizing.sites import find_sites
from ranvier.runtime.quantizing.switches import Switches
from tests.runtime.test_quantizing_layers import CONFIG, HARD_SWISH, NUMBERS, RNG, X, conv, graph_of

FEEDS = [{"x": X}]


def chain() -> Graph:
    """Convolutions, grouped too, a residual sum, and products behind them, with a bias and without."""
    weights = {
        "w1": RNG.standard_normal((32, 8, 3, 3)) * 0.1,
        "b1": RNG.standard_normal(32),
        "w2": RNG.standard_normal((32, 1, 3, 3)),
        "w3": RNG.standard_normal((32, 32, 1, 1)) * 0.3,
        "w4": RNG.standard_normal((10, 32)) * 0.3,
        "b4": RNG.standard_normal(32),
        "w5": RNG.standard_normal((32, 32)) * 0.3,
    }
    nodes = [
        conv("x", "w1", "a", "b1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        conv("r", "w2", "d", group=32, pads=[1, 1, 1, 1]),
        conv("d", "w3", "e"),
        helper.make_node("Add", ["e", "r"], ["s"], "sum"),
        conv("s", "w2", "f", group=32),
        helper.make_node("MatMul", ["f", "w4"], ["g"], "dense"),
        helper.make_node("Add", ["g", "b4"], ["h"], "bias"),
        helper.make_node("MatMul", ["h", "w5"], ["y"], "last"),
    ]
    return graph_of(nodes, weights, ("y", "s"))


def test_switches_give_what_models_give() -> None:
    graph = chain()
    quantizer = Quantizer(graph, FEEDS, Quantization(slower=1e9, equalize=False), CONFIG)
    quantizer._joins = False
    ranges = {site.name: quantizer._ranges[site.data.name] for site in quantizer.sites}
    expected = list(results(graph, FEEDS, CONFIG))
    with Switches(graph, list(ranges), quantizer._means, CONFIG, rounding=quantizer._rounding) as switches:
        for array, original in zip(switches.results(FEEDS, {})[0], expected[0]):
            np.testing.assert_allclose(array, original, rtol=1e-5, atol=1e-5)
        for coded in (set(ranges), {"conv_a"}, {"conv_d", "dense"}, {"last"}):
            found = switches.results(FEEDS, {name: ranges[name] for name in coded})
            made = list(results(quantizer.made(frozenset(set(ranges) - coded)), FEEDS, CONFIG))
            apart, off = difference(found, made).error, difference(made, expected).error
            assert off > 1e-4 and apart < 0.4 * off, coded  # other errors of this size would be 1.4 apart


def test_layers_with_much_error_for_little_time_stay_in_float() -> None:
    layers = [
        Judged("cheap", 4.0, 1.0),
        Judged("dear", 5.0, 100.0),
        Judged("small", 0.5, 1.0),
        Judged("tiny", 0.1, 9.0),
    ]
    assert left_out(layers, 10.0) == frozenset()
    assert left_out(layers, 6.0) == {"cheap"}
    assert left_out(layers, 0.5) == {"cheap", "dear", "small"}
    assert left_out(layers, 0.0) == {"cheap", "dear", "small", "tiny"}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_out_is_needed(seed: int) -> None:
    """The sum is kept, no layer that stays in float could be coded as well, and time lost is near the least."""
    rng = np.random.default_rng(seed)
    layers = [Judged(str(k), float(e), float(s)) for k, (e, s) in enumerate(rng.uniform(0.1, 1, (8, 2)) ** 3)]
    allowed = 0.3 * sum(layer.error for layer in layers)
    kept = left_out(layers, allowed)
    total = sum(layer.error for layer in layers if layer.name not in kept)
    assert total <= allowed
    assert all(total + layer.error > allowed for layer in layers if layer.name in kept)

    def lost(names: Any) -> float:
        return sum(layer.saved for layer in layers if layer.name in names)

    some = (c for n in range(9) for c in itertools.combinations([layer.name for layer in layers], n))
    fits = [c for c in some if sum(layer.error for layer in layers if layer.name not in c) <= allowed]
    assert lost(kept) <= 2 * min(map(lost, fits))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_trials_correct_the_sums(factor: float) -> None:
    rng = np.random.default_rng(4)
    layers = [Judged(str(k), float(e) ** 2, 1.0) for k, e in enumerate(rng.uniform(0.001, 0.03, 60))]

    def measure(kept: frozenset[str]) -> float:
        return factor * math.sqrt(sum(layer.error for layer in layers if layer.name not in kept))

    bound = 0.05
    kept = fewest(layers, bound, measure, math.inf)
    assert 0.85 * bound < measure(kept) <= bound


def test_where_nothing_helps_all_layers_stay_in_float() -> None:
    layers = [Judged("a", 1.0, 1.0), Judged("b", 1.0, 1.0)]
    assert fewest(layers, 0.1, lambda kept: 0.5, math.inf) == {"a", "b"}


def test_sums_that_say_too_little_do_not_end_the_search() -> None:
    """All layers together are far worse than their sum, because of one of them."""
    layers = [Judged("a", 1e-4, 1.0), *(Judged(f"b{k}", 1e-6, 1.0) for k in range(9))]
    kept = fewest(layers, 0.04, lambda kept: 0.01 if "a" in kept else 1.0, math.inf)
    assert kept == {"a"}


def test_time_saved() -> None:
    sites = {site.name: site for site in find_sites(chain())}
    assert saved_by(sites["conv_a"], (4, 8, 12, 12)) > saved_by(sites["conv_e"], (4, 32, 12, 12))
    assert saved_by(sites["last"], (4, 16, 10, 32)) < saved_by(sites["last"], (8, 16, 10, 32))


def fragile() -> tuple[Graph, dict[str, Any]]:
    """Of three layers one reads numbers of which a few are large and the small ones matter."""
    weights = {f"w{k}": RNG.standard_normal((16, 8 if k == 1 else 16, 3, 3)) * 0.1 for k in (1, 2, 3)}
    weights["w2"][:, 0] *= 1e-4
    nodes = [
        conv("x", "w1", "a"),
        helper.make_node("Mul", ["a", "row"], ["m"]),
        conv("m", "w2", "b"),
        helper.make_node("Tanh", ["b"], ["t"]),
        conv("t", "w3", "y"),
    ]
    weights["row"] = np.ones((16, 1, 1))
    weights["row"][0] = 3000.0
    return graph_of(nodes, weights), {"x": X}


def test_the_layer_that_hurts_stays_in_float() -> None:
    graph, feed = fragile()
    options = Quantization(slower=1e9, equalize=False, cosine=0.999)
    _, report = Quantizer(graph, [feed], options, CONFIG).run()
    assert report.difference.cosine >= 0.999
    assert {layer.name: layer.reason for layer in report.layers if layer.reason} == {"conv_b": "it hurt the results"}
    _, every = Quantizer(graph, [feed], Quantization(slower=1e9, equalize=False), CONFIG).run()
    assert every.difference.cosine < 0.999


def test_steps_are_told() -> None:
    graph, feed = fragile()
    steps: list[tuple[int, int]] = []
    texts: list[str] = []
    options = Quantization(slower=1e9, equalize=False, cosine=0.999)
    Quantizer(graph, [feed], options, CONFIG, texts.append, lambda done, of: steps.append((done, of))).run()
    assert steps == [(0, 3), (1, 3), (2, 3)] and "judging layers" in texts


def test_a_model_without_a_layer_that_can_be_coded_is_refused() -> None:
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))})
    options = Quantization(slower=1e9, max_error=1e-9)
    with pytest.raises(NotWorthIt, match="no layer can be coded"):
        Quantizer(graph, [{"x": X}], options, CONFIG).run()


def test_without_joins_layers_alone_read_codes() -> None:
    graph = chain()
    quantizer = Quantizer(graph, FEEDS, Quantization(equalize=False), CONFIG)
    quantizer._joins = False
    made = quantizer.made()
    total = next(node for node in made if node.name == "sum")
    assert [v.producer.op for v in total.inputs if v is not None and v.producer] == ["Conv", "Relu"]
    readers = {reader.op for node in made if node.op == "DequantizeLinear" for reader, _ in node.output.uses}
    assert readers == {"Conv", "MatMul"}


@pytest.mark.parametrize("seed", range(4))
def test_channels_are_scaled_only_where_errors_are_less(seed: int) -> None:
    """Of no factors, factors that pass, and rows behind activations, the one whose results are nearest."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(-4, 4, (16, 1, 1, 1))
    weights = {
        "w1": rng.standard_normal((16, 8, 3, 3)) * sizes,
        "w2": rng.standard_normal((16, 16, 3, 3)) * 2.0 ** rng.uniform(-4, 4, (1, 16, 1, 1)),
        "w3": rng.standard_normal((16, 16, 1, 1)),
        **NUMBERS,
    }
    swish = [helper.make_node(n.op_type, [*n.input], [*n.output]) for n in HARD_SWISH]
    nodes = [conv("x", "w1", "a"), *swish, conv("swish", "w2", "b"), helper.make_node("Relu", ["b"], ["r"])]
    graph, feeds = graph_of([*nodes, conv("r", "w3", "y")], weights), [{"x": X}]
    expected = list(results(graph, feeds, CONFIG))

    def error(of: Graph, **options: Any) -> float:
        made = Quantizer(of, feeds, Quantization(**options), CONFIG).made()
        return difference(list(results(made, feeds, CONFIG)), expected).error

    forms = [copied(graph) for _ in range(3)]
    for form, with_rows in zip(forms[1:], (False, True)):
        equalize(form, feeds, CONFIG, with_rows=with_rows)
    assert error(graph) == pytest.approx(min(error(form, equalize=False) for form in forms), rel=1e-6)


def test_whole_numbers_agree_or_not() -> None:
    whole, real = np.arange(10), np.ones((1, 4), np.float32)
    other = whole.copy()
    other[3] = 7
    assert difference([[whole]], [[whole]]).cosine == 1.0
    found = difference([[other]], [[whole]])
    assert (
        found.agreement == found.cosine == 0.9 and found.error == pytest.approx(math.sqrt(0.2)) and found.places == 10
    )
    assert difference([[other, real]], [[whole, real]]).cosine == pytest.approx(1.0)


def test_the_error_that_other_samples_may_have() -> None:
    """Nothing above the error of samples that are alike; of those that differ, what four in five draws stay below."""
    same = [[np.ones(8, np.float32)]] * 6
    off = [[np.full(8, 1.01, np.float32)]] * 6
    assert difference(off, same).most == pytest.approx(difference(off, same).error, rel=1e-3)
    assert difference(off[:1], same[:1]).most == pytest.approx(0.01, rel=1e-3)
    rng = np.random.default_rng(3)
    below = 0
    for _ in range(200):
        expected = [[rng.standard_normal(8)] for _ in range(32)]
        found = [[row[0] + rng.exponential() * 0.1 * rng.standard_normal(8)] for row in expected]
        below += difference(found, expected).most > math.sqrt(0.02)  # the mean of a squared exponential is 2
    assert below > 160


def test_ranges_are_those_of_all_samples_in_the_end() -> None:
    """Every second sample decides about layers; a range that others go beyond holds those too."""
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))})
    feeds = [{"x": (X * (3.0 if k == 5 else 1.0)).astype(np.float32)} for k in range(16)]
    quantizer = Quantizer(graph, feeds, Quantization(slower=1e9, equalize=False, max_error=1.0), CONFIG)
    assert quantizer._ranges["x"] == pytest.approx((X.min(), X.max()))
    _, report = quantizer.run()
    assert quantizer._ranges["x"] == pytest.approx((3 * X.min(), 3 * X.max())) and report.samples == 16
