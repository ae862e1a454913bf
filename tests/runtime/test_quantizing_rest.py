"""What is not coded in bfloat16, and which of codes and bfloat16 is the fastest that results allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.runtime.quantizing import NotWorthIt, Quantization, QuantizationReport, Quantizer, choosing, quantizer
from ranvier.runtime.quantizing.asked import Asked
from ranvier.runtime.quantizing.choosing import Choosing
from ranvier.runtime.quantizing.costs import elements
from ranvier.runtime.quantizing.forms import Form
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.rounding import Rounding
from ranvier.runtime.quantizing.samples import results, visit
from ranvier.runtime.quantizing.sites import find_sites
from ranvier.runtime.quantizing.switches import NarrowSwitches
from tests.runtime.pretended import LAYERS, Pretended, pretend
from tests.runtime.test_quantizing_layers import CONFIG, RNG, X, conv, graph_of

FEEDS = [{"x": X}]
NARROW = CONFIG.updated(precision="bf16")


def cancelling() -> Graph:
    """Three layers; what the last one reads is large, and its weights take most of it off again."""
    weights = {f"w{k}": RNG.standard_normal((32, 8 if k == 1 else 32, 3, 3)) * 0.1 for k in (1, 2, 3)}
    weights["w3"] -= weights["w3"].mean(axis=(1, 2, 3), keepdims=True)
    weights["b2"] = np.full(32, 100.0)
    nodes = [
        conv("x", "w1", "a"),
        helper.make_node("Tanh", ["a"], ["t"], "tanh"),
        conv("t", "w2", "b", "b2"),
        conv("b", "w3", "y"),
    ]
    return graph_of(nodes, weights)


def plain() -> Graph:
    """Three layers that nothing hurts much."""
    weights = {f"w{k}": RNG.standard_normal((16, 8 if k == 1 else 16, 3, 3)) * 0.1 for k in (1, 2, 3)}
    nodes = [conv("x", "w1", "a"), helper.make_node("Tanh", ["a"], ["t"], "tanh"), conv("t", "w2", "b")]
    return graph_of([*nodes, conv("b", "w3", "y")], weights)


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pretend(monkeypatch)
    return monkeypatch


def made(graph: Graph, feeds: Any = FEEDS, **options: Any) -> tuple[Graph, QuantizationReport]:
    given = {"rest": "best", "timed": True, "slower": 1e9, "equalize": False, "cosine": 0.999, **options}
    return Quantizer(graph, feeds, Quantization(**given), CONFIG).run()


def coded(report: QuantizationReport) -> set[str]:
    return {layer.name for layer in report.layers if layer.scheme == "int8"}


def test_errors_are_those_of_a_session_that_runs_it_so(pretending: pytest.MonkeyPatch) -> None:
    graph = cancelling()
    expected = list(results(graph, FEEDS, CONFIG))
    found, report = made(graph, rest="bf16", cosine=None, keep=("conv_b",))
    assert report.precision == "bf16" and not report.keep_f32
    assert report.difference == difference(list(results(found, FEEDS, NARROW)), expected)
    assert report.layers[-1].error == pytest.approx(report.difference.error)


def test_weights_that_are_multiplied_in_float32_keep_their_bits(pretending: pytest.MonkeyPatch) -> None:
    """Sessions in bfloat16 leave some layers in float32; rounding those would cost accuracy for nothing."""
    pretending.setattr(Pretended, "stays", ("conv_b",))
    pretending.setattr(Pretended, "times", {**Pretended.times, "int8": 2.0})
    graph = plain()
    found, report = made(graph)
    assert report.precision == "bf16" and not coded(report)
    for k, site in enumerate(find_sites(graph)):
        weights, rounded = (find_sites(each)[k].numbers for each in (graph, found))
        narrow = rounded.astype(DType.bfloat16.numpy).astype(np.float32)
        assert np.array_equal(rounded, weights if site.name == "conv_b" else narrow), site.name
        assert not np.array_equal(narrow, weights)


def test_weights_without_a_negative_one_keep_their_bits(pretending: pytest.MonkeyPatch) -> None:
    """What rounding one of them loses is not put into others: bands of a spectrum would get a negative part."""
    pretending.setattr(Pretended, "times", {**Pretended.times, "int8": 2.0})
    graph = plain()
    site = find_sites(graph)[1]
    site.node.set_input(1, graph.add_constant(ConstTensor.of(np.abs(site.numbers)), "bands"))
    found, report = made(graph)
    assert report.precision == "bf16" and not coded(report)
    same = [np.array_equal(a.numbers, b.numbers) for a, b in zip(find_sites(graph), find_sites(found))]
    assert same == [False, True, False]


def test_best_is_float32_where_bfloat16_is_not_multiplied() -> None:
    """Also where nothing is asked of results, so that nothing is chosen by them."""
    config = CONFIG.updated(provider_options={"cpu": {"isa": "portable"}})
    for rest, expected in (("best", "float32"), ("bf16", "bf16")):
        options = Quantization(rest=rest, slower=1e9, equalize=False)
        _, report = Quantizer(plain(), FEEDS, options, config).run()
        assert report.precision == expected


def test_codes_where_they_are_fastest(pretending: pytest.MonkeyPatch) -> None:
    _, report = made(plain())
    assert coded(report) == {"conv_a", "conv_b", "conv_y"} and report.speedup == 4


def test_no_codes_where_bfloat16_is_faster(pretending: pytest.MonkeyPatch) -> None:
    pretend(pretending, {"int8": 0.8})
    graph = plain()
    found, report = made(graph)
    assert not coded(report) and report.precision == "bf16" and not report.keep_f32 and report.speedup == 2
    assert {layer.reason for layer in report.layers} == {"it saved no time"} and not report.problems
    assert not any(node.op == "QuantizeLinear" for node in found)
    assert report.difference == difference(list(results(found, FEEDS, NARROW)), list(results(graph, FEEDS, CONFIG)))


def test_codes_only_where_those_are_faster(pretending: pytest.MonkeyPatch) -> None:
    pretend(pretending, {"int8": 0.8, "int8 conv_b": 0.1})
    _, report = made(plain())
    assert coded(report) == {"conv_b"} and report.precision == "bf16" and report.speedup == pytest.approx(3 / 1.1)


@pytest.mark.parametrize("time, expected", [(0.506, {"conv_b", "conv_y"}), (0.6, {"conv_b"})])
def test_layers_that_share_weights_are_coded_together(
    pretending: pytest.MonkeyPatch, time: float, expected: set[str]
) -> None:
    """Where that takes no longer: else there are codes of the weights and the weights too."""
    pretend(pretending, {"int8": 0.8, "int8 conv_b": 0.1, "int8 conv_y": time})
    weights = {"w1": RNG.standard_normal((16, 8, 3, 3)) * 0.1, "w2": RNG.standard_normal((16, 16, 3, 3)) * 0.1}
    nodes = [conv("x", "w1", "a"), helper.make_node("Tanh", ["a"], ["t"], "tanh"), conv("t", "w2", "b")]
    found, report = made(graph_of([*nodes, conv("b", "w2", "y")], weights))
    assert coded(report) == expected
    assert sum(value.const.size == 16 * 16 * 9 for value in found.constants.values() if value.const) == 3 - len(
        expected
    )


def test_nodes_that_hurt_in_bfloat16_stay_in_float32(pretending: pytest.MonkeyPatch) -> None:
    """Rounding of what is nearly taken off again is an error as large as the result; other nodes stay in bfloat16."""
    pretend(pretending, {"int8": 2.0})  # codes do not save time
    graph = cancelling()
    expected = list(results(graph, FEEDS, CONFIG))
    assert difference(list(results(graph, FEEDS, NARROW)), expected).cosine < 0.999
    found, report = made(graph)
    assert report.precision == "bf16" and not coded(report) and report.difference.cosine >= 0.999
    assert (
        any(pattern in report.keep_f32 for pattern in ("conv_b", "conv_y", "less")) and "conv_a" not in report.keep_f32
    )
    running = CONFIG.updated(precision=report.precision, keep_f32=report.keep_f32)
    assert difference(list(results(found, FEEDS, running)), expected) == report.difference


def test_layers_that_are_hardly_faster_in_float32_stay_in_bfloat16(pretending: pytest.MonkeyPatch) -> None:
    """Among others in bfloat16 they would write more, and have their results rounded for the next one."""
    pretend(pretending, {"int8": 2.0, "float32 conv_a": 0.49})
    _, report = made(cancelling())
    assert report.precision == "bf16" and report.keep_f32 and "conv_a" not in report.keep_f32


def test_nodes_that_were_kept_for_nothing_are_let_go(pretending: pytest.MonkeyPatch) -> None:
    """What was judged says that every layer does harm; with the model as a whole two of three turn out not to."""
    pretend(pretending, {"int8": 2.0})
    judged = Choosing._judge_narrow

    def wrong(self: Choosing) -> None:
        judged(self)
        self._errors["bf16"] = dict.fromkeys(self._errors["bf16"], 10.0 * self._asked.limit**2)

    pretending.setattr(Choosing, "_judge_narrow", wrong)
    few = made(cancelling())[1].keep_f32
    pretending.setattr(choosing, "_LET_GO", 0)
    assert set(few) < set(made(cancelling())[1].keep_f32)


def test_elements_of_values() -> None:
    """By the sample: the model may not say what sizes are."""
    graph, seen = plain(), dict[str, int]()
    graph.inputs[0].type = TensorType(DType.float32, (None, 8, None, None))
    visit(graph, ["a", "t", "b", "y"], FEEDS, CONFIG, lambda name, array: seen.update({name: array.size}))
    for value in graph.values():
        value.type = None if value.producer is not None else value.type
    assert elements(graph, FEEDS[0]).items() >= seen.items()


def test_float32_where_nothing_multiplies_bfloat16(pretending: pytest.MonkeyPatch) -> None:
    pretend(pretending, bf16=False)
    _, report = made(plain())
    assert report.precision == "float32" and not report.keep_f32 and coded(report)


def test_nothing_that_is_near_enough_is_refused(pretending: pytest.MonkeyPatch) -> None:
    pretend(pretending, bf16=False)
    with pytest.raises(NotWorthIt, match="no layer can be coded"):
        made(plain(), cosine=None, max_error=1e-9)


def test_without_times_what_is_estimated_decides(pretending: pytest.MonkeyPatch) -> None:
    pretend(pretending, {"int8": 9.0})
    assert coded(made(plain(), timed=False)[1]) == {"conv_a", "conv_b", "conv_y"}


@pytest.mark.parametrize("rest", ["float32", "bf16", "best"])
@pytest.mark.parametrize("error", [0.5, 0.02, 0.003])
def test_no_further_off_than_asked(pretending: pytest.MonkeyPatch, rest: str, error: float) -> None:
    graph = plain()
    feeds = [{"x": np.roll(X, k, axis=1)} for k in range(16)]
    try:
        found, report = made(graph, feeds, rest=rest, cosine=None, max_error=error)
    except NotWorthIt as refused:
        assert (rest == "bf16" and refused.report.difference.error > error) or "no layer" in str(refused)
        return
    running = CONFIG.updated(precision=report.precision, keep_f32=report.keep_f32)
    for part in (feeds[1::8] + feeds[4::8] + feeds[7::8], feeds[2::8] + feeds[5::8]):
        seen = difference(list(results(found, part, running)), list(results(graph, part, CONFIG)))
        assert seen.error <= report.difference.error * (1 + 1e-6) <= error * (1 + 1e-6)


def test_what_does_not_hold_on_samples_held_back_is_not_taken(pretending: pytest.MonkeyPatch) -> None:
    """Those are twelve times as large as the ones that chose: ranges of codes are too small for them, and bfloat16,
    which is slower and does not mind, is taken instead."""
    scale = {2: 12.0, 5: 12.0}
    feeds = [{"x": (X * scale.get(k % 8, 1.0)).astype(np.float32)} for k in range(16)]
    _, report = made(plain(), feeds)
    assert report.precision == "bf16" and not coded(report) and report.difference.cosine >= 0.999
    assert coded(made(plain(), [feeds[0]] * 16)[1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("enough", "wanted"), [(0.85, [1.0, 0.85]), (0.5, [1.0, 0.85, 0.7, 0.5]), (0.0, None)])
def test_where_nothing_holds_stricter_forms_are_tried(
    pretending: pytest.MonkeyPatch, enough: float, wanted: list[float] | None, late: bool
) -> None:
    """However late it is: what nothing holds of would be left as it was."""
    asked: list[float] = []

    class Chooses(Choosing):
        def forms(self, part: float = 1.0) -> list[Form]:
            asked.append(part)
            return [Form(frozenset({"conv_a"}))]

        late = property(lambda self: late)

    pretending.setattr(quantizer, "Choosing", Chooses)
    pretending.setattr(Asked, "holds", lambda self, found, chosen: asked[-1] <= enough)
    _, report = made(plain(), [{"x": np.roll(X, k, axis=1)} for k in range(16)], cosine=0.9)
    assert asked == (wanted or [1.0, 0.85, 0.7, 0.5, 0.35])
    assert coded(report) == {"conv_b", "conv_y"}


@pytest.mark.parametrize(("faster", "late"), [(True, False), (False, False), (True, True)])
def test_faster_forms_get_another_chance_with_less_room(
    pretending: pytest.MonkeyPatch, faster: bool, late: bool
) -> None:
    """The fastest form does not hold, and a slower one does: a stricter one that is faster than that is taken."""
    first, slow, strict = Form(frozenset()), Form(frozenset({"conv_a", "conv_b"})), Form(frozenset({"conv_a"}))
    asked: list[float] = []

    class Chooses(Choosing):
        def forms(self, part: float = 1.0) -> list[Form]:
            asked.append(part)
            return [first, slow] if part == 1.0 else [strict]

        late = property(lambda self: late)

    seen: list[Form] = []
    taken = Quantizer._taken

    def watched(self: Quantizer, form: Form) -> Any:
        seen.append(form)
        return taken(self, form)

    pretending.setattr(quantizer, "Choosing", Chooses)
    pretending.setattr(Quantizer, "_taken", watched)
    pretending.setattr(Asked, "holds", lambda self, found, chosen: len(seen) > 1)
    pretend(pretending, {} if faster else {"int8 conv_b": 3.0})
    _, report = made(plain())
    assert asked == ([1.0] if late else [1.0, 0.85])
    assert coded(report) == ({"conv_b", "conv_y"} if faster and not late else {"conv_y"})


def test_switches_round_as_sessions_in_bfloat16_do(pretending: pytest.MonkeyPatch) -> None:
    graph = cancelling()
    expected = list(results(graph, FEEDS, CONFIG))
    layers = {node.name for node in graph if node.op in LAYERS}
    with NarrowSwitches(graph, layers, {"tanh"}, {}, CONFIG, Rounding()) as switches:
        assert set(switches.names) == layers
        assert switches.difference(FEEDS, expected, []).error < 1e-5
        for narrow in (layers, {"conv_b"}, {"conv_y"}):
            running = NARROW.updated(keep_f32=tuple(layers - narrow))
            seen = difference(list(results(graph, FEEDS, running)), expected)
            assert switches.difference(FEEDS, expected, narrow).error == pytest.approx(seen.error, rel=0.05)


def test_a_search_makes_few_models(pretending: pytest.MonkeyPatch) -> None:
    pretending.setattr(Pretended, "made", 0)
    made(cancelling())
    assert Pretended.made < 60


def test_times_are_compared_with_the_model_as_it_was_given(pretending: pytest.MonkeyPatch) -> None:
    """Not with the one whose channels were brought to like ranges, which may have products more."""
    graph = plain()
    compared: list[Graph] = []

    def timed(before: Graph, after: Graph, *_: Any) -> tuple[float, float]:
        compared.append(before)
        return 1.0, 0.5

    pretending.setattr(quantizer, "timed", timed)
    _, report = made(graph, equalize=True)
    assert compared == [graph] and report.speedup == 2
