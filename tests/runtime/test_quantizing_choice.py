"""Which layers are coded: what each does alone, sums of that, and models that come out near enough."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from ranvier.errors import InvalidConfig, NotSupported
from ranvier.formats.onnx import read
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.runtime.quantizing import NotWorthIt, Quantization, Quantizer, choice, choosing, prepared
from ranvier.runtime.quantizing.asked import Asked
from ranvier.runtime.quantizing.batches import apart
from ranvier.runtime.quantizing.choice import BF16, FLOAT32, INT8, Chosen, Way, Ways, fitting, selected, worthwhile
from ranvier.runtime.quantizing.costs import work_of
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.report import Difference, chord, difference
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.quantizing.sites import find_sites
from ranvier.runtime.quantizing.slopes import Slopes, judge_by_slopes
from ranvier.runtime.quantizing.switches import Switches
from tests.runtime.test_quantizing_layers import CONFIG, NUMBERS, RNG, SWISH_OF_FIVE, X, conv, graph_of

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
    ranges = {site.name: quantizer.ranges[site.data.name] for site in quantizer.sites}
    expected = list(results(graph, FEEDS, CONFIG))
    with Switches(graph, list(ranges), quantizer.means, CONFIG, rounding=quantizer.rounding) as switches:
        for array, original in zip(switches.results(FEEDS, {})[0], expected[0]):
            np.testing.assert_allclose(array, original, rtol=1e-5, atol=1e-5)
        for coded in (set(ranges), {"conv_a"}, {"conv_d", "dense"}, {"last"}):
            found = switches.results(FEEDS, {name: ranges[name] for name in coded})
            made = list(results(quantizer.made(frozenset(set(ranges) - coded)), FEEDS, CONFIG))
            apart, off = difference(found, made).error, difference(made, expected).error
            assert off > 1e-4 and apart < 0.4 * off, coded  # other errors of this size would be 1.4 apart


def gated() -> Graph:
    """The chain with what gradients go through in other ways: a gate, resizing, a join, and a second result that few
    layers matter to."""
    weights = {
        "w1": RNG.standard_normal((16, 8, 3, 3)) * 0.2,
        "w2": RNG.standard_normal((16, 16, 3, 3)) * 0.1,
        "w3": RNG.standard_normal((8, 32, 1, 1)) * 0.3,
        "scales": np.array([1, 1, 2, 2]),
        "w4": RNG.standard_normal((24, 40)) * 0.3,
    }
    nodes = [
        conv("x", "w1", "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Sigmoid", ["a"], ["g"]),
        helper.make_node("Mul", ["a", "g"], ["m"]),
        conv("m", "w2", "b", pads=[2, 2, 2, 2], dilations=[2, 2]),
        helper.make_node("Concat", ["b", "m"], ["j"], axis=1),
        helper.make_node("Resize", ["j", "", "scales"], ["r"], mode="linear"),
        conv("r", "w3", "z"),
        helper.make_node("MaxPool", ["z"], ["p"], kernel_shape=[2, 1], strides=[2, 1]),
        helper.make_node("Reshape", ["p", "shape"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w4"], ["y"], "dense"),
    ]
    return graph_of(nodes, weights, ("y", "z"), {"shape": np.array([-1, 24])})


@pytest.mark.parametrize("graph", [chain, gated])
@pytest.mark.parametrize("signed", [False, True])
def test_gradients_tell_of_all_layers_what_switches_tell_of_each(graph: Any, signed: bool) -> None:
    feeds = [{"x": RNG.standard_normal(X.shape).astype(np.float32)} for _ in range(3)]
    made = graph()
    quantizer = Quantizer(made, feeds, Quantization(slower=1e9, equalize=False, signed=signed), CONFIG)
    ranges = {site.name: quantizer.ranges[site.data.name] for site in quantizer.sites}
    known: Any = (quantizer.means, CONFIG)
    how: Any = {"rounding": quantizer.rounding, "signed": signed}
    expected = list(results(made, feeds, CONFIG))
    with Slopes(made, list(ranges), *known, feeds, expected, **how) as slopes:
        found = sum(slopes.errors(ranges, k % 3, k) for k in range(240)) / 80
    sizes = [sum(float(np.square(row[k]).sum()) for row in expected) for k in range(2)]
    with Switches(made, list(ranges), *known, **how) as switches:
        for name, squared in zip(ranges, found):
            rows = switches.results(feeds, {name: ranges[name]})
            off = [[np.square(a - b).sum() for a, b in zip(*pair)] for pair in zip(rows, expected)]
            wanted = sum(sum(each) / size for each, size in zip(zip(*off), sizes))
            assert squared == pytest.approx(wanted, rel=0.35), name  # a mean of 240 squares is off by a tenth


def test_ranges_are_chosen_by_gradients_too() -> None:
    """One way has the range of what a layer reads, another a tenth of it, a third one ten times as much."""
    graph = chain()
    quantizer = Quantizer(graph, FEEDS, Quantization(slower=1e9, equalize=False), CONFIG)
    right = {site.data.name: quantizer.ranges[site.data.name] for site in quantizer.sites}
    cut = {name: (low / 10, high / 10) for name, (low, high) in right.items()}
    wide = {name: (low * 10, high * 10) for name, (low, high) in right.items()}
    ways = [{**cut, "d": wide["d"]}, {**right, "d": cut["d"]}, {**wide, "d": right["d"]}]
    expected = list(results(graph, FEEDS, CONFIG))
    names = [site.name for site in quantizer.sites]
    how: Any = {"rounding": quantizer.rounding}
    with Slopes(graph, names, quantizer.means, CONFIG, FEEDS, expected, **how) as slopes:
        errors, ranges = judge_by_slopes(slopes, quantizer.sites, ways, 1, 1e9, lambda done, of: None)
        assert ranges == right
        assert list(errors) == names and all(0 < error < 1e-2 for error in errors.values())
        _, none = judge_by_slopes(slopes, quantizer.sites, ways, 1, 0.0, lambda done, of: None)
        assert none == {}, "where time is short, ranges stay as they are"


def test_judging_by_gradients_ends_in_time() -> None:
    """Of more samples than there is time for, some are asked, and each as often."""
    asked: list[tuple[int, int]] = []

    class Counted:
        def errors(self, ranges: Any, sample: int, drawing: int) -> Any:
            asked.append((sample, drawing))
            time.sleep(0.002)
            return np.array([1.0])

    (site,) = find_sites(graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))}))
    slopes: Any = Counted()
    for samples, seconds, most in ((1000, 0.01, 8), (1000, 1e9, 50), (5, 1e9, 47), (3, 0.0, 3)):
        asked.clear()
        errors, _ = judge_by_slopes(slopes, [site], [{"x": (0.0, 1.0)}], samples, seconds, lambda done, of: None)
        assert 3 <= len(asked) <= most and errors == {site.name: pytest.approx(len({s for s, _ in asked[2:]}))}


def test_where_there_are_no_gradients_layers_are_switched_on_one_by_one() -> None:
    """Layers in bodies, results whose shapes differ, and infinite ones, or gradients."""
    graph = chain()
    quantizer = Quantizer(graph, FEEDS, Quantization(slower=1e9, equalize=False), CONFIG)
    expected = list(results(graph, FEEDS, CONFIG))
    with pytest.raises(NotSupported, match="shapes"):
        Slopes(graph, ["conv_a"], {}, CONFIG, FEEDS * 2, [expected[0], [a[:1] for a in expected[0]]])
    with pytest.raises(NotSupported, match="infinite"):
        Slopes(graph, ["conv_a"], {}, CONFIG, FEEDS, [[np.full_like(a, np.inf) for a in expected[0]]])
    with pytest.raises(NotSupported, match="bodies"):
        Slopes(graph, ["conv_a", "elsewhere"], quantizer.means, CONFIG, FEEDS, expected)
    none, known = [{"x": np.full_like(X, np.nan)}], quantizer.rounding
    with Slopes(graph, ["conv_a"], {}, CONFIG, none, expected, rounding=known) as slopes, pytest.raises(NotSupported):
        slopes.errors({"conv_a": (-1.0, 1.0)}, 0, 0)


def two_ways(layers: dict[str, tuple[float, float]]) -> dict[str, list[Way]]:
    """Squared errors of codes, and the time they save."""
    return {n: [Way(FLOAT32, 0.0, saved), Way(INT8, error, 0.0)] for n, (error, saved) in layers.items()}


def floats(chosen: Chosen | None) -> set[str]:
    assert chosen is not None
    return {name for name, way in chosen.items() if way.kind == FLOAT32}


def total(chosen: Chosen) -> float:
    return sum(way.error for way in chosen.values())


def test_layers_with_much_error_for_little_time_stay_in_float() -> None:
    layers = two_ways({"cheap": (4.0, 1.0), "dear": (5.0, 100.0), "small": (0.5, 1.0), "tiny": (0.1, 9.0)})
    assert floats(selected(layers, 10.0)) == set()
    assert floats(selected(layers, 6.0)) == {"cheap"}
    assert floats(selected(layers, 0.5)) == {"cheap", "dear", "small"}
    assert floats(selected(layers, 0.0)) == {"cheap", "dear", "small", "tiny"}


def test_of_three_ways_the_one_in_the_middle() -> None:
    """bfloat16 where codes hurt, float32 only where bfloat16 does too."""
    layers = {
        "codes": [Way(FLOAT32, 0.0, 4.0), Way(BF16, 0.01, 2.0), Way(INT8, 0.02, 1.0)],
        "between": [Way(FLOAT32, 0.0, 4.0), Way(BF16, 0.01, 2.0), Way(INT8, 9.0, 1.0)],
        "exact": [Way(FLOAT32, 0.0, 4.0), Way(BF16, 8.0, 2.0), Way(INT8, 9.0, 1.0)],
        "slow codes": [Way(FLOAT32, 0.0, 4.0), Way(BF16, 0.01, 2.0), Way(INT8, 0.02, 3.0)],
    }
    found = {name: way.kind for name, way in selected(layers, 0.1).items()}
    assert found == {"codes": INT8, "between": BF16, "exact": FLOAT32, "slow codes": BF16}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_out_is_needed(seed: int) -> None:
    """The sum is kept, no layer that stays in float could be coded as well, and time lost is near the least."""
    rng = np.random.default_rng(seed)
    layers = {str(k): (float(e), float(s)) for k, (e, s) in enumerate(rng.uniform(0.1, 1, (8, 2)) ** 3)}
    allowed = 0.3 * sum(error for error, _ in layers.values())
    chosen = selected(two_ways(layers), allowed)
    kept = floats(chosen)
    assert total(chosen) <= allowed
    assert all(total(chosen) + layers[name][0] > allowed for name in kept)

    def lost(names: Any) -> float:
        return sum(layers[name][1] for name in names)

    some = (c for n in range(9) for c in itertools.combinations(layers, n))
    fits = [c for c in some if sum(error for name, (error, _) in layers.items() if name not in c) <= allowed]
    assert lost(kept) <= 2 * min(map(lost, fits))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_trials_correct_the_sums(factor: float) -> None:
    rng = np.random.default_rng(4)
    layers = two_ways({str(k): (float(e) ** 2, 1.0) for k, e in enumerate(rng.uniform(0.001, 0.03, 60))})

    def measure(chosen: Chosen) -> float:
        return factor * math.sqrt(total(chosen))

    bound = 0.05
    chosen = fitting(layers, bound, measure, math.inf)
    assert chosen is not None and 0.85 * bound < measure(chosen) <= bound


def test_where_nothing_helps_nothing_is_chosen() -> None:
    layers = two_ways({"a": (1.0, 1.0), "b": (1.0, 1.0)})
    assert fitting(layers, 0.1, lambda chosen: 0.5, math.inf) is None


def test_sums_that_say_too_little_do_not_end_the_search() -> None:
    """All layers together are far worse than their sum, because of one of them."""
    layers = two_ways({"a": (1e-4, 1.0), **{f"b{k}": (1e-6, 1.0) for k in range(9)}})
    found = fitting(layers, 0.04, lambda chosen: 0.01 if "a" in floats(chosen) else 1.0, math.inf)
    assert "a" in floats(found)


def test_a_choice_that_leaves_room_and_is_too_much_all_the_same() -> None:
    """No other choice is between it and what is allowed: the next one has to have less than it."""
    layers = two_ways({"hopeless": (0.1, 1.0), "dear": (6e-4, 5.0), "cheap": (1e-4, 3.0)})
    found = fitting(layers, 0.04, lambda chosen: 1.6 * math.sqrt(total(chosen)), math.inf)
    assert floats(found) == {"hopeless", "dear"}


def test_a_node_that_does_more_than_was_seen_is_looked_for() -> None:
    """Two of many layers are far worse than what is known of them: those alone stay in float, not what else has errors;
    less room for all would have cost the dear one."""
    known = {"dear": (4e-4, 100.0), **{f"n{k}": (1e-5, 2.0) for k in range(20)}}
    true = {**known, "n3": (9e-3, 2.0), "n4": (9e-3, 2.0)}
    looked: list[set[str]] = []

    def measure(chosen: Chosen) -> float:
        return math.sqrt(sum(true[name][0] for name in chosen.keys() - floats(chosen)))

    def again(chosen: Chosen) -> Ways:
        looked.append(floats(chosen))
        seen = "n3" if "n3" not in floats(chosen) else "n4"
        known[seen] = true[seen]
        return two_ways(known)

    assert floats(fitting(two_ways(known), 0.04, measure, math.inf, again)) == {"n3", "n4"}
    assert looked == [set(), {"n3"}]
    blind = fitting(two_ways({**known, "n3": (1e-5, 2.0), "n4": (1e-5, 2.0)}), 0.04, measure, math.inf)
    assert "dear" in floats(blind)


def test_nodes_are_not_judged_again_and_again() -> None:
    layers = two_ways({str(k): (1e-6, 1.0) for k in range(200)})
    looked: list[Chosen] = []
    assert fitting(layers, 0.04, lambda chosen: 0.09, math.inf, lambda chosen: looked.append(chosen)) is None
    assert len(looked) == 4


def test_ways_that_hardly_save_time_may_not_cost_much_of_the_error() -> None:
    layers = two_ways({"dear": (0.5, 100.0), "harmless": (1e-4, 0.1), "harmful": (0.01, 0.1), "slower": (1e-4, -1.0)})
    found = worthwhile(layers, 1.0)
    assert {name for name, ways in found.items() if len(ways) == 2} == {"dear", "harmless"}
    assert all(ways[0].kind == FLOAT32 for ways in found.values())
    assert worthwhile(layers, math.inf) == layers


def test_codes_that_are_more_exact_than_bfloat16_are_worth_it() -> None:
    """They save time and error beside it, however little error they have."""
    other = [Way(BF16, 0.0, 2e-3), Way(INT8, 1e-6, 1e-3)]
    layers = {"large": [Way(BF16, 1e-4, 5e-3), Way(INT8, 1e-5, 3e-3)], "other": other}
    assert worthwhile(layers, 0.04) == layers
    slower = {"large": [Way(BF16, 1e-4, 5e-3), Way(INT8, 1e-5, 6e-3)], "other": other}
    chosen = selected(worthwhile(slower, 0.04), 1e-3)
    assert chosen["large"].kind == BF16


def test_time_that_is_over_ends_the_search_once_something_was_found() -> None:
    layers = two_ways({str(k): (1e-3, 1.0) for k in range(20)})
    asked: list[Chosen] = []

    def measure(chosen: Chosen) -> float:
        asked.append(chosen)
        return 2 * math.sqrt(total(chosen))

    found = fitting(layers, 0.1, measure, 0.0)
    assert found is asked[-1] and 2 * math.sqrt(total(found)) <= 0.1 and len(asked) <= 3
    tried: list[Chosen] = []

    def never(chosen: Chosen) -> float:
        tried.append(chosen)
        return 0.11

    assert fitting(layers, 0.1, never, 0.0) is None and len(tried) == 4


@pytest.mark.parametrize("late", [False, True])
def test_batches_are_taken_apart_where_the_error_is(late: bool) -> None:
    nodes = [f"n{k}" for k in range(100)]
    true = dict.fromkeys(nodes, 1e-4) | {"n37": 0.5, "n38": 0.2, "n90": 0.1}
    asked: list[frozenset[str]] = []

    def error(names: frozenset[str]) -> float:
        asked.append(names)
        return math.sqrt(sum(true[name] ** 2 for name in names))

    found = apart(nodes, error, 0.04, 0.0 if late else math.inf, lambda done, of: None)
    assert found.keys() == true.keys() and sum(found.values()) == pytest.approx(sum(e * e for e in true.values()))
    if late:  # a batch shares what it does
        assert len(asked) == 12 and found["n37"] == found["n38"] == pytest.approx((0.5**2 + 0.2**2) / 9, rel=1e-3)
    else:
        assert len(asked) < 30
        assert all(found[name] == pytest.approx(true[name] ** 2) for name in ("n37", "n38", "n90"))


def test_work() -> None:
    sites = {site.name: site for site in find_sites(chain())}
    assert work_of(sites["conv_a"], (4, 8, 12, 12)) > work_of(sites["conv_e"], (4, 32, 12, 12))
    assert work_of(sites["last"], (4, 16, 10, 32)) < work_of(sites["last"], (8, 16, 10, 32))


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


@pytest.mark.parametrize("instead", ["judge", "judge_by_slopes"])
def test_the_layer_that_hurts_stays_in_float(monkeypatch: pytest.MonkeyPatch, instead: str) -> None:
    """Whether layers are asked one by one, or all by gradients, where the former would take too long."""
    monkeypatch.setattr(choosing, "_SHORT", math.inf if instead == "judge" else 0.0)
    monkeypatch.delattr(choosing, {"judge": "judge_by_slopes", "judge_by_slopes": "judge"}[instead])
    graph, feed = fragile()
    options = Quantization(slower=1e9, equalize=False, cosine=0.999)
    _, report = Quantizer(graph, [feed], options, CONFIG).run()
    assert report.difference.cosine >= 0.999
    assert {layer.name: layer.reason for layer in report.layers if layer.reason} == {"conv_b": "it hurt the results"}
    _, every = Quantizer(graph, [feed], Quantization(slower=1e9, equalize=False), CONFIG).run()
    assert every.difference.cosine < 0.999


@pytest.mark.parametrize("blind", [False, True])
def test_a_layer_that_hurts_rare_samples_is_found(monkeypatch: pytest.MonkeyPatch, blind: bool) -> None:
    """Of a sample with small numbers the first layer's codes keep nothing, and what follows makes them large. Layers
    are judged by another one: who does not look again takes room from all of them."""
    weights = {f"w{k}": RNG.standard_normal((16, 8 if k == 1 else 16, 3, 3)) * 0.1 for k in (1, 2, 3)}
    nodes = [
        conv("x", "w1", "a"),
        helper.make_node("ReduceMax", ["a"], ["m"], keepdims=1),
        helper.make_node("Div", ["a", "m"], ["n"]),
        conv("n", "w2", "b"),
        conv("b", "w3", "y"),
    ]
    graph, texts = graph_of(nodes, weights), list[str]()
    feeds = [{"x": (X * {3: 0.01}.get(k, 1.0)).astype(np.float32)} for k in range(16)]
    monkeypatch.setattr(choice, "MOST_RUNS", 1)
    monkeypatch.setattr(choice, "_AGAIN", 0 if blind else 4)
    options = Quantization(slower=1e9, equalize=False, cosine=0.999)
    _, report = Quantizer(graph, feeds, options, CONFIG, texts.append).run()
    kept = {layer.name for layer in report.layers if layer.reason}
    assert kept > {"conv_a"} if blind else kept == {"conv_a"}
    assert ("judging layers again" in texts) is not blind and report.difference.cosine >= 0.999


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


def test_where_codes_save_no_time_that_is_said() -> None:
    quantizer = Quantizer(chain(), FEEDS, Quantization(slower=1e9, equalize=False, cosine=0.9), CONFIG)
    every = frozenset(site.name for site in quantizer.sites)
    graph = quantizer.made(every)
    for codable, said in ((every, "no time"), (frozenset(), "as near as was asked")):
        quantizer._codable = codable
        (problem,) = quantizer._report(graph, every, Difference(0.0, 1.0, None)).problems
        assert said in problem


def test_layers_that_are_all_kept_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="asked to be kept"):
        Quantizer(chain(), FEEDS, Quantization(keep=("*",)), CONFIG)


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
    swish = [helper.make_node(n.op_type, [*n.input], [*n.output]) for n in SWISH_OF_FIVE]
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


def test_an_error_that_one_large_sample_hides_is_seen() -> None:
    """Of results of very different size the largest one is nearly all that counts; others may be large elsewhere."""
    expected = [[np.full(8, 100.0 if k == 0 else 1.0)] for k in range(8)]
    found = [[row[0] * (1.0 if k == 0 else 1.0 + 0.2 * (-1) ** np.arange(8))] for k, row in enumerate(expected)]
    seen = difference(found, expected)
    assert seen.cosine > 0.999 and seen.turn < 0.01 and seen.even_turn > 0.04 and seen.most_turn > seen.even_turn
    assert not Asked(None, 0.999, expected).near(seen)
    alike = [[np.ones(8)] for _ in range(8)]
    even = difference([[row[0] * (1 + 0.02 * (-1) ** np.arange(8))] for row in alike], alike)
    assert even.turn == pytest.approx(even.even_turn, rel=1e-3) == pytest.approx(even.most_turn, rel=1e-3)


def test_a_factor_for_all_results_is_no_turn() -> None:
    rng = np.random.default_rng(5)
    expected = [[rng.standard_normal(64)] for _ in range(4)]
    found = difference([[1.1 * row[0]] for row in expected], expected)
    assert found.error == pytest.approx(0.1) and found.turn < 1e-6 and found.most_turn < 1e-6
    assert Asked(None, 0.999, expected).near(found) and not Asked(0.05, None, expected).near(found)
    turned = difference([[-row[0]] for row in expected], expected)
    assert turned.cosine == pytest.approx(-1.0) and turned.turn == pytest.approx(2.0)


def test_room_that_samples_leave() -> None:
    """Samples that chose a model show no more than a part of the error; those held back may show a little more."""
    expected = [[np.ones(4)] for _ in range(4)]
    asked = Asked(None, 0.999, expected)

    def of(error: float, agreement: float | None = None, places: int = 0) -> Difference:
        cosine = 1 - error**2 / 2
        return Difference(error, cosine, agreement, places, error, error, error, error)

    bound = chord(0.999)
    assert asked.bound == pytest.approx(bound)
    assert asked.near(of(0.84 * bound)) and not asked.near(of(0.9 * bound))
    assert asked.holds(of(0.9 * bound), of(0.8 * bound)) and not asked.holds(of(0.97 * bound), of(0.8 * bound))
    few = Difference(0.9 * bound, 1 - (0.9 * bound) ** 2 / 2, None, 0, 0.0, 0.9 * bound, 0.0, 1.3 * bound)
    assert not asked.holds(few, of(0.8 * bound)), "samples that differ so much may well show more"
    assert asked.near(of(2 * bound, 0.999, 1000)) and not asked.near(of(2 * bound, 0.991, 1000))
    assert asked.holds(of(2 * bound, 0.991, 300), of(2 * bound, 0.999, 1000))
    assert not asked.holds(of(2 * bound, 0.98, 300), of(2 * bound, 0.999, 1000))
    assert not asked.near(of(4 * bound, 0.999, 1000)), "features have largest entries too, which say little of them"
    assert not asked.holds(of(4 * bound, 0.999, 300), of(2 * bound, 0.999, 1000))
    assert not Asked(None, None, expected).anything


def test_the_worse_of_two() -> None:
    a, b = Difference(0.1, 0.99, 0.9, 10, 0.2, 0.1, 0.1, 0.1), Difference(0.2, 0.98, None, 0, 0.1, 0.2, 0.0, 0.3)
    assert a.worse(b) == b.worse(a) == Difference(0.2, 0.98, 0.9, 10, 0.2, 0.2, 0.1, 0.3)


@pytest.mark.parametrize("asked", [{"max_error": 1.0}, {}])
def test_ranges_are_those_of_all_samples_that_chose(asked: dict[str, float]) -> None:
    """Some samples decide about layers; a range that those go beyond holds them too, and what was held back nothing."""
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))})
    feeds = [{"x": (X * {4: 3.0, 5: 9.0}.get(k, 1.0)).astype(np.float32)} for k in range(16)]
    quantizer = Quantizer(graph, feeds, Quantization(slower=1e9, equalize=False, **asked), CONFIG)
    assert quantizer.ranges["x"] == pytest.approx((X.min(), X.max()))
    assert (len(quantizer.feeds), len(quantizer.held)) == (6, 4)
    _, report = quantizer.run()
    assert quantizer.ranges["x"] == pytest.approx((3 * X.min(), 3 * X.max())) and report.samples == 16
    assert quantizer.run()[1].difference == report.difference, "who asks again gets the same"


def test_the_report_has_the_samples_that_were_held_back() -> None:
    """One of them is further off than any that chose: the report says what it shows."""
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))})
    feeds = [{"x": (X * {5: 9.0}.get(k, 1.0)).astype(np.float32)} for k in range(16)]
    options = Quantization(slower=1e9, equalize=False, max_error=0.1)
    quantizer = Quantizer(graph, feeds, options, CONFIG)
    with pytest.raises(NotWorthIt, match="off by") as refused:
        quantizer.run()
    made, report = quantizer.run(force=True)
    held = difference(list(results(made, [feeds[k] for k in (2, 5, 10, 13)], CONFIG)), quantizer.expected_of_held)
    assert report.difference.error == refused.value.report.difference.error == held.error > 0.1


def test_whole_numbers_that_are_nearly_all_the_same_are_no_problem() -> None:
    """Of indices no cosine is 0.999; that 99 % of them are the same will do, on samples held back too."""
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((128, 2)).astype(np.float32)
    product = helper.make_node("MatMul", ["x", "w"], ["p"], "dense")
    largest = helper.make_node("ArgMax", ["p"], ["y"], "largest", axis=-1, keepdims=0)
    made = helper.make_graph(
        [product, largest],
        "net",
        [helper.make_tensor_value_info("x", 1, [400, 128])],
        [helper.make_tensor_value_info("y", 7, [400])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    graph = prepared(read(model), CONFIG)
    towards = 0.1 * rng.choice([-1.0, 1.0], (16, 400, 1)) * (weights[:, 0] - weights[:, 1])  # few are undecided
    feeds = [{"x": (rng.standard_normal((400, 128)) + each).astype(np.float32)} for each in towards]
    _, report = Quantizer(graph, feeds, Quantization(slower=1e9, cosine=0.999), CONFIG).run()
    assert 0.99 <= (report.difference.agreement or 0.0) < 0.9995 and report.difference.cosine < 0.9995
    assert [layer.scheme for layer in report.layers] == ["int8"]


@pytest.mark.parametrize("holds", [False, True])
def test_what_holds_by_largest_entries_is_no_problem(monkeypatch: pytest.MonkeyPatch, holds: bool) -> None:
    """Samples held back need not be as sure of them as those that chose: whatever was found to hold is not refused."""
    monkeypatch.setattr(Asked, "holds", lambda self, found, chosen: holds)
    monkeypatch.setattr(Quantizer, "_compared", lambda self, graph: Difference(0.1, 0.995, 0.991, 600, turn=0.1))
    graph = graph_of([conv("x", "w", "y")], {"w": RNG.standard_normal((16, 8, 3, 3))})
    quantizer = Quantizer(graph, FEEDS, Quantization(slower=1e9, equalize=False, cosine=0.999), CONFIG)
    _, report = quantizer.run(force=True)
    assert [text[:10] for text in report.problems] == ([] if holds else ["the cosine"])
