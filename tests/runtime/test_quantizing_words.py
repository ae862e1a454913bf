"""16-bit activations: how layers are rewritten, and which layers get them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from ranvier.dtypes import DType
from ranvier.formats.onnx.retarget import retarget
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node
from ranvier.passes.facts import dtype_of
from ranvier.runtime.quantizing import Quantization, QuantizationReport, Quantizer, choosing
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.rounding import SUM_OF_WORDS, Rounding
from ranvier.runtime.quantizing.samples import results
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import Shared
from ranvier.runtime.quantizing.words import quantize_words, takes_words
from tests.runtime.pretended import pretend
from tests.runtime.test_quantizing_layers import CONFIG, RNG, X, conv, graph_of

Array = np.ndarray[Any, Any]
FEEDS = [{"x": X}]
SPAN = (-1.0, 3.0)


def one_layer(weights: Array, **attrs: Any) -> Graph:
    return graph_of([conv("x", "w", "y", **attrs)], {"w": weights})


def site_of(weights: Array, **attrs: Any) -> Site:
    (site,) = find_sites(one_layer(weights, **attrs))
    return site


def rewritten(graph: Graph, ranges: dict[str, tuple[float, float]]) -> Graph:
    made = copied(graph)
    sites = find_sites(made)
    quantize_words([s for s in sites if s.name in ranges], ranges, Rounding(), {}, Shared())
    return made


def pairs(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == "QuantizeLinear"]


def scale_of(node: Node) -> float:
    value = node.inputs[1]
    assert value is not None and value.const is not None
    return float(value.const.numpy())


def test_data_has_a_power_of_two_and_room_above() -> None:
    graph = one_layer(RNG.standard_normal((16, 8, 3, 3)))
    (node,) = pairs(rewritten(graph, {"conv_y": SPAN}))
    scale = scale_of(node)
    assert np.log2(scale) == round(np.log2(scale)) and 1.25 * 3 <= scale * 32767 < 2.5 * 3
    assert dtype_of(node.output) is DType.int16


@pytest.mark.parametrize("span", [(0.0, 0.0), (-1e-44, 1e-44), (-3e38, 3e38)])
def test_data_of_any_size(span: tuple[float, float]) -> None:
    (node,) = pairs(rewritten(one_layer(RNG.standard_normal((16, 8, 3, 3))), {"conv_y": span}))
    scale = np.float32(scale_of(node))
    assert 0 < scale * scale < np.inf


def test_results_are_as_good_as_exact() -> None:
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)), "w2": RNG.standard_normal((16, 16, 1, 1)), "b": np.ones(16)}
    graph = graph_of([conv("x", "w1", "a", "b"), conv("a", "w2", "y")], weights)
    made = rewritten(graph, {"conv_a": (-6.0, 6.0), "conv_y": (-60.0, 60.0)})
    expected = list(results(graph, FEEDS, CONFIG))
    assert difference(list(results(made, FEEDS, CONFIG)), expected).error < 1e-3


def test_readers_of_one_value_share_a_pair() -> None:
    weights = {f"w{k}": RNG.standard_normal((16, 8, 3, 3)) for k in range(3)}
    nodes = [conv("x", f"w{k}", f"y{k}") for k in range(3)]
    graph = graph_of(nodes, weights, ("y0", "y1", "y2"))
    made = rewritten(graph, {"conv_y0": SPAN, "conv_y2": SPAN})
    (node,) = pairs(made)
    assert node.input(0) is made.inputs[0]
    read = {n.name: n.inputs[0] is not None and n.inputs[0].producer is not None for n in made if n.op == "Conv"}
    assert read == {"conv_y0": True, "conv_y1": False, "conv_y2": True}


def test_who_takes_them() -> None:
    assert takes_words(site_of(RNG.standard_normal((16, 8, 3, 3))))
    assert not takes_words(site_of(RNG.standard_normal((16, 4, 3, 3)), group=2)), "groups are other kernels'"
    assert not takes_words(site_of(np.full((16, 8, 8, 9), 0.5))), "576 weights of 127 do not fit"
    assert takes_words(site_of(np.full((16, 8, 8, 8), 0.5))), "512 do"


@given(st.integers(0, 2**31), st.sampled_from([(1, 1), (3, 3), (8, 8)]), st.floats(0.1, 8.0), st.booleans())
def test_sums_fit(seed: int, kernel: tuple[int, int], power: float, empty: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((32, 8, *kernel))
    weights = np.sign(weights) * np.abs(weights) ** power
    weights[0] *= not empty
    site = site_of(weights)
    codes, steps, lost = Rounding().words(site)
    rows = np.abs(codes.reshape(32, -1).astype(np.int64)).sum(axis=1)
    assert not takes_words(site) or rows.max() <= SUM_OF_WORDS
    back = codes * steps.reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(back + lost, site.numbers, rtol=1e-5, atol=1e-30)
    assert (np.abs(lost) <= steps.reshape(-1, 1, 1, 1) * 0.501).all()


def test_weights_have_bits_where_sums_leave_room() -> None:
    few, many = site_of(RNG.standard_normal((32, 8, 1, 1))), site_of(RNG.standard_normal((32, 8, 12, 12)))
    assert Rounding().words(few)[0].dtype == np.int16
    codes = Rounding().words(many)[0]
    assert codes.dtype == np.int8 and np.array_equal(codes, Rounding().codes(many)[0])


# -- who gets them ----------------------------------------------------------------------------------------------------


def cancelling() -> Graph:
    """Three layers; what the last one reads is large, and its weights take most of it off again."""
    weights = {f"w{k}": RNG.standard_normal((32, 8 if k == 1 else 32, 3, 3)) * 0.1 for k in (1, 2, 3)}
    weights["w3"] -= weights["w3"].mean(axis=(1, 2, 3), keepdims=True)
    weights["b2"] = np.full(32, 100.0)
    nodes = [conv("x", "w1", "a"), helper.make_node("Tanh", ["a"], ["t"], "tanh"), conv("t", "w2", "b", "b2")]
    return graph_of([*nodes, conv("b", "w3", "y")], weights)


def made(graph: Graph, **options: Any) -> tuple[Graph, QuantizationReport]:
    how = {"rest": "best", "timed": True, "slower": 1e9, "equalize": False, "cosine": 0.999, **options}
    return Quantizer(graph, FEEDS, Quantization(**how), CONFIG).run()


def schemes(report: QuantizationReport) -> dict[str, str]:
    return {layer.name: layer.scheme for layer in report.layers}


def test_the_layer_that_8_bits_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, bf16=False, words=True)
    graph = cancelling()
    found, report = made(graph)
    assert schemes(report) == {"conv_a": "int8", "conv_b": "int8", "conv_y": "int16"}
    last = report.layers[-1]
    assert last.reason == "in 8 bits it hurt the results" and last.bytes_after < last.bytes_before
    assert report.speedup == 3 and report.precision == "float32" and not report.problems
    assert found.opsets[""] == 21
    assert report.difference == difference(list(results(found, FEEDS, CONFIG)), list(results(graph, FEEDS, CONFIG)))


@pytest.mark.parametrize("how", [{"words": False}, {"words": True, "times": {"int16": 1.5}}], ids=["slow", "measured"])
def test_not_where_that_is_slower(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    pretend(monkeypatch, bf16=False, **how)
    assert schemes(made(cancelling())[1])["conv_y"] == "float32"


def test_not_where_numbers_of_16_bits_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, words=True)
    assert "int16" not in schemes(made(cancelling())[1]).values()


def test_not_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, bf16=False, words=True)
    assert "int16" not in schemes(made(cancelling(), rest="float32")[1]).values()
    assert "int16" not in schemes(made(cancelling(), timed=False)[1]).values()


def test_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on processors that are no faster so, where nothing is timed."""
    pretend(monkeypatch, bf16=False)
    assert schemes(made(cancelling(), rest="int16", timed=False)[1])["conv_y"] == "int16"


def test_not_in_models_that_stay_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opset 20 does not quantize to 16 bits, and its models come out in it."""
    pretend(monkeypatch, bf16=False, words=True)
    graph = cancelling()
    retarget(graph, 20)
    found, report = made(graph)
    assert "int16" not in schemes(report).values() and found.opsets[""] == 20


def test_all_layers_where_8_bits_save_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"int8": 0.9}, bf16=False, words=True)
    _, report = made(cancelling())
    assert set(schemes(report).values()) == {"int16"} and report.speedup == 2 and not report.problems


def test_layers_that_get_none_where_a_few_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"int8": 0.9, "int16 conv_b": 1.5, "int8 conv_b": 1.5}, bf16=False, words=True)
    assert schemes(made(cancelling())[1]) == {"conv_a": "int16", "conv_b": "float32", "conv_y": "int16"}


def test_layers_that_take_longer_than_their_kernels_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are compared whole: 16-bit codes may break up what one kernel computed."""
    pretend(monkeypatch, {"int8": 0.9, "int16": 0.2, "int16 conv_y": 1.3}, bf16=False, words=True)

    def measured(session: Any, *_: Any) -> dict[str, float]:
        return {name: 0.4 if taken == 1.3 else taken for name, taken in session.layer_times.items()}

    monkeypatch.setattr(choosing, "measured", measured)
    assert schemes(made(cancelling())[1]) == {"conv_a": "int16", "conv_b": "int16", "conv_y": "float32"}


def test_not_where_the_whole_is_slower_than_kernels_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"int16": 0.97}, bf16=False, words=True)
    told = {"float32": 1.0, "int16": 0.4, "int8": 0.25}
    kinds = {1.0: "float32", 0.97: "int16", 0.25: "int8"}

    def measured(session: Any, *_: Any) -> dict[str, float]:
        return {name: told[kinds[taken]] for name, taken in session.layer_times.items()}

    monkeypatch.setattr(choosing, "measured", measured)
    assert schemes(made(cancelling())[1]) == {"conv_a": "int8", "conv_b": "int8", "conv_y": "float32"}


def test_beside_what_is_computed_less_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bfloat16 is not multiplied, sessions in it may still compute in float32 what is float64 otherwise, and
    layers have codes of either size all the same."""
    pretend(monkeypatch, bf16=False, words=True, saves=0.5)
    _, report = made(cancelling())
    assert schemes(report) == {"conv_a": "int8", "conv_b": "int8", "conv_y": "int16"}
    assert report.precision == "bf16" and not report.keep_f32
    pretend(monkeypatch, {"int8": 0.9}, bf16=False, words=True, saves=0.5)
    _, report = made(cancelling())
    assert set(schemes(report).values()) == {"int16"} and report.precision == "bf16"
