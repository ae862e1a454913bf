"""Layers in bodies of branches and loops: coded like those around them, by what samples show of them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.errors import InvalidConfig
from ranvier.formats.onnx import read
from ranvier.runtime.quantizing import Quantization, Quantizer, feeds_of, prepared
from ranvier.runtime.quantizing.dynamic import DYNAMIC
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.samples import results, visit
from tests.runtime.pretended import pretend
from tests.runtime.test_quantizing_cases import (
    CONFIG,
    RNG,
    exact_of,
    model_of,
    numbers,
    quantized,
    results_elsewhere,
)

Array = np.ndarray[Any, Any]
STATIC = ("int8", DYNAMIC)
COSINES = {"int2": 0.8}
_START = np.random.default_rng(4).bit_generator.state


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """Whatever tests ran before: how far codes are off depends on them."""
    RNG.bit_generator.state = _START


def body(nodes: Sequence[Any], outputs: Sequence[str], held: dict[str, Array] | None = None) -> Any:
    inner = [numpy_helper.from_array(array, name) for name, array in (held or {}).items()]
    infos = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    return helper.make_graph(list(nodes), outputs[0], [], infos, inner)


def chosen_by_sign(then: Any, other: Any, result: str = "c") -> list[Any]:
    """Nodes that take a branch where the sum of x is above zero."""
    return [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["up"]),
        helper.make_node("If", ["up"], [result], "if", then_branch=then, else_branch=other),
    ]


def in_turns(count: int, *shape: int) -> Array:
    """Samples above zero and below it."""
    signs = np.where(np.arange(count) % 2, -1, 1).reshape(-1, *[1] * len(shape))
    return (numbers(count, *shape) + signs).astype(np.float32)


def branching(own: bool) -> Any:
    """Two branches, of a layer each: with weights of their own by one name, or with the same from around them."""

    def branch(name: str) -> Any:
        node = helper.make_node("MatMul", ["x", "inner" if own else "w"], [name], "dense")
        return body([node], [name], {"inner": numbers(32, 32)} if own else None)

    nodes = [*chosen_by_sign(branch("a"), branch("b")), helper.make_node("MatMul", ["c", "w"], ["y"], "last")]
    return model_of(nodes, {"x": [1, 4, 32]}, ["y"], {"w": numbers(32, 32), "zero": np.float32(0)})


def convolving() -> Any:
    """Two branches: convolutions with activations and a sum of two of them, and a convolution of two sums."""
    up = [
        helper.make_node("Conv", ["x", "w"], ["a"], "up_first", pads=[1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "up_relu"),
        helper.make_node("Conv", ["r", "v"], ["s"], "up_second", pads=[1, 1]),
        helper.make_node("Add", ["s", "r"], ["up_y"], "up_sum"),
    ]
    down = [
        helper.make_node("Conv", ["x", "u"], ["d"], "down", pads=[1, 1]),
        helper.make_node("Add", ["d", "x"], ["down_y"], "down_sum"),
    ]
    nodes = [
        *chosen_by_sign(body(up, ["up_y"], {"v": numbers(16, 16, 3)}), body(down, ["down_y"])),
        helper.make_node("Conv", ["c", "w"], ["y"], "last"),
    ]
    weights = {"w": numbers(16, 16, 3), "u": numbers(16, 16, 3), "zero": np.float32(0)}
    return model_of(nodes, {"x": [1, 16, 9]}, ["y"], weights)


def looping(deep: bool = False) -> Any:
    """A recurrent layer as some exporters write it: a loop that carries its weights from step to step unchanged.
    ``deep``: it turns its state in a branch."""
    turn = helper.make_node("MatMul", ["h_in", "u_in"], ["from_state"], "turn")
    if deep:
        inner = [helper.make_node("MatMul", ["h_in", "u_in"], [name], f"turn_{name}") for name in ("p", "q")]
        then, other = (body([node], [node.output[0]]) for node in inner)
        turn = helper.make_node("If", ["go"], ["from_state"], "if", then_branch=then, else_branch=other)
    steps = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "k"], ["row"], axis=0),
            helper.make_node("MatMul", ["row", "w_in"], ["from_row"], "project"),
            turn,
            helper.make_node("Add", ["from_row", "from_state"], ["both"]),
            helper.make_node("Tanh", ["both"], ["h_out"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Identity", ["w_in"], ["w_out"]),
            helper.make_node("Identity", ["u_in"], ["u_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("k", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(n, 1, sh) for n, sh in (("h_in", [2, 32]), ("w_in", None), ("u_in", None))),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(name, 1, None) for name in ("h_out", "w_out", "u_out")),
        ],
    )
    loop = helper.make_node("Loop", ["steps", "", "start", "w", "u"], ["h", "w_last", "u_last"], "loop", body=steps)
    last = helper.make_node("MatMul", ["h", "u"], ["y"], "last")
    weights = {"w": numbers(64, 32), "u": numbers(32, 32), "start": numbers(2, 32), "steps": np.int64(5)}
    return model_of([loop, last], {"x": [5, 2, 64]}, ["y"], weights)


def check(model: Any, made: Any, path: Path, feeds: Sequence[dict[str, Array]], least: float = 0.99) -> None:
    """Another runtime computes what we do, and that is near what the model did before, though not the same."""
    for feed in feeds:
        (ours,) = results(made, [feed], CONFIG)
        np.testing.assert_allclose(ours[0], results_elsewhere(made, path, feed)[0], rtol=1e-3, atol=2e-3)
        found = difference([ours], [[exact_of(model, feed)]])
        assert found.cosine > least and found.error > 1e-6


@pytest.mark.parametrize("scheme", ["int4", "int8w", "nf4", "fp8", "gptq", "awq", *STATIC])
@pytest.mark.parametrize("own", [True, False])
def test_layers_inside_of_branches(scheme: str, own: bool, tmp_path: Path) -> None:
    """Branches whose weights have one name have codes of their own; shared weights share them, around and inside."""
    model, data = branching(own), {"x": in_turns(8, 4, 32)}
    made, report = quantized(model, data, scheme=scheme)
    assert not any(node.op == "MatMul" and node.inputs[1].const is not None for node in made.all_nodes())
    assert report.bytes_after < 0.5 * report.bytes_before
    assert len(report.layers) == 3 and {layer.scheme for layer in report.layers} == {scheme}
    assert all(layer.error is not None and 0 < layer.error < 0.3 for layer in report.layers)
    stored = sum(c.const.nbytes for g in made.all_graphs() for c in g.constants.values() if c.const.size > 32)
    assert stored < (3 if own else 1) * 32 * 32 * {"int8w": 1.6, "fp8": 1.6, "int8": 1.1, DYNAMIC: 1.1}.get(scheme, 0.9)
    check(model, made, tmp_path / "m.onnx", [{"x": data["x"][k : k + 1]} for k in (0, 1)], 0.97)


@pytest.mark.parametrize("scheme", ["int4", "fp8", "gptq", "int8", DYNAMIC])
def test_layers_of_a_loop(scheme: str, tmp_path: Path) -> None:
    """What a loop carries unchanged is read from around it, and what needs no step before is multiplied before it: so a
    layer's weights are not kept in float32 for the loop alone."""
    model, data = looping(), {"x": numbers(8 * 5, 2, 64)}
    made, report = quantized(model, data, scheme=scheme)
    assert {layer.name for layer in report.layers} > {"turn", "last"} and len(report.layers) == 3
    assert {layer.scheme for layer in report.layers} == {scheme}
    assert all(layer.error is not None and 0 < layer.error < 0.3 for layer in report.layers)
    (loop,) = (node for node in made if node.op == "Loop")
    assert len(loop.inputs) == 3, "only the state is carried"
    assert not any(node.op == "MatMul" and node.inputs[1].const is not None for node in made.all_nodes())
    check(model, made, tmp_path / "m.onnx", [{"x": data["x"][:5]}], 0.97)


@pytest.mark.parametrize("options", [{"scheme": "int8"}, {"scheme": "int8", "signed": True}, {"scheme": DYNAMIC}])
def test_convolutions_inside_of_branches(options: dict[str, Any], tmp_path: Path) -> None:
    model, data = convolving(), {"x": in_turns(8, 16, 9)}
    made, report = quantized(model, data, **options)
    assert [layer.name for layer in report.layers] == ["down", "up_first", "up_second", "last"]
    assert {layer.scheme for layer in report.layers} == {options["scheme"]}
    assert all(layer.error is not None and layer.error < 0.05 for layer in report.layers)
    check(model, made, tmp_path / "m.onnx", [{"x": data["x"][k : k + 1]} for k in (0, 1)])


def test_what_a_branch_reads_from_outside_is_rounded_inside() -> None:
    """And again around it where a layer there reads it: a body does not see what others made of it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["up"]),
        helper.make_node(
            "If",
            ["up"],
            ["c"],
            "if",
            then_branch=body([helper.make_node("MatMul", ["r", "w"], ["a"], "inside")], ["a"]),
            else_branch=body([helper.make_node("Neg", ["r"], ["b"], "minus")], ["b"]),
        ),
        helper.make_node("MatMul", ["r", "w"], ["d"], "outside"),
        helper.make_node("Add", ["c", "d"], ["y"], "sum_of_both"),
    ]
    model = model_of(nodes, {"x": [1, 4, 32]}, ["y"], {"w": numbers(32, 32), "zero": np.float32(0)})
    made, report = quantized(model, {"x": in_turns(8, 4, 32)}, scheme="int8")
    assert {layer.scheme for layer in report.layers} == {"int8"}
    (taken,) = (node.attrs["then_branch"] for node in made if node.op == "If")
    (other,) = (node.attrs["else_branch"] for node in made if node.op == "If")
    for graph in (made, taken):
        (rounds,) = (node for node in graph if node.op == "QuantizeLinear")
        assert rounds.inputs[0].name == "r"
        assert sum(node.op == "DequantizeLinear" for node in graph) == 2, "of the data and of the weights"
    assert [node.op for node in other] == ["Neg"] and other.nodes[0].inputs[0].name == "r"
    codes = [v for g in made.all_graphs() for v in g.constants.values() if v.const is not None and v.const.size == 1024]
    assert len(codes) == 1, "weights are stored once"


@pytest.mark.parametrize("taken, left", [(1, "down"), (-1, "up")])
def test_branches_that_no_sample_takes_stay(taken: int, left: str, tmp_path: Path) -> None:
    """Nothing is known of their ranges; without any, ranges come with the data."""
    model = convolving()
    data = {"x": (numbers(8, 16, 9) + taken).astype(np.float32)}
    made, report = quantized(model, data, scheme="int8")
    told = {layer.name: (layer.scheme, layer.reason, layer.error is None) for layer in report.layers}
    for name, found in told.items():
        assert found == (("float32", "no sample reached it", True) if name.startswith(left) else ("int8", "", False))
    feeds = [{"x": data["x"][:1]}, {"x": -data["x"][:1]}]
    check(model, made, tmp_path / "m.onnx", feeds, 0.95)  # of the last layer's range the other branch told nothing
    made, report = quantized(model, data, scheme=DYNAMIC)
    assert {layer.scheme for layer in report.layers} == {DYNAMIC}
    assert {layer.name for layer in report.layers if layer.error is None} == {n for n in told if n.startswith(left)}
    check(model, made, tmp_path / "m.onnx", feeds)


def test_gptq_without_samples_of_a_branch_rounds_to_nearest() -> None:
    own = {"inner": numbers(32, 32)}
    then = body(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("MatMul", ["r", "inner"], ["a"], "then")], ["a"], own
    )
    other = body([helper.make_node("MatMul", ["x", "w"], ["b"], "else")], ["b"])
    model = model_of(
        chosen_by_sign(then, other, "y"), {"x": [1, 4, 32]}, ["y"], {"w": numbers(32, 32), "zero": np.float32(0)}
    )
    _, report = quantized(model, {"x": numbers(8, 4, 32) - 1}, scheme="gptq")
    assert {layer.name: layer.scheme for layer in report.layers} == {"then": "uint4", "else": "gptq"}


@pytest.mark.parametrize("scheme", STATIC)
def test_what_lies_deeper_in_a_loop(scheme: str, tmp_path: Path) -> None:
    """Of two branches within a loop all steps take one."""
    model, data = looping(deep=True), {"x": numbers(8 * 5, 2, 64)}
    made, report = quantized(model, data, scheme=scheme)
    told = {layer.name: (layer.scheme, layer.reason, layer.error is None) for layer in report.layers}
    assert told["turn_p"] == told["last"] == (scheme, "", False)
    assert told["turn_q"] == (("float32", "no sample reached it", True) if scheme == "int8" else (scheme, "", True))
    check(model, made, tmp_path / "m.onnx", [{"x": data["x"][:5]}], 0.97)


@pytest.mark.parametrize("scheme", [*STATIC, "gptq"])
def test_a_loop_whose_values_grow(scheme: str, tmp_path: Path) -> None:
    """As those of a decoder do that keeps what it has seen."""
    steps = helper.make_graph(
        [
            helper.make_node("Concat", ["seen", "x"], ["more"], axis=0),
            helper.make_node("Gemm", ["more", "w"], ["mixed"], "mix", transB=1),
            helper.make_node("Tanh", ["mixed"], ["next"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("k", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("seen", 1, ["n", 32]),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("next", 1, None)],
    )
    nodes = [helper.make_node("Loop", ["steps", "", "x"], ["y"], "loop", body=steps)]
    model = model_of(nodes, {"x": [1, 32]}, ["y"], {"w": numbers(32, 32), "steps": np.int64(4)})
    data = {"x": numbers(8, 32)}
    made, report = quantized(model, data, scheme=scheme)
    assert [(layer.name, layer.scheme) for layer in report.layers] == [("mix", scheme)]
    assert report.layers[0].error is not None and report.layers[0].error < 0.2
    check(model, made, tmp_path / "m.onnx", [{"x": data["x"][:1]}], 0.97)
    seen: list[tuple[int, ...]] = []
    graph = prepared(read(model), CONFIG)
    visit(graph, ["more"], feeds_of(graph, data), CONFIG, lambda _, array: seen.append(array.shape))
    assert seen == [(2, 32), (3, 32), (4, 32), (5, 32)] * 8


def test_bodies_that_no_run_shows_stay() -> None:
    """In a SequenceMap, say."""
    steps = helper.make_graph(
        [helper.make_node("MatMul", ["each", "w"], ["product"], "hidden")],
        "body",
        [helper.make_tensor_value_info("each", 1, [1, 32])],
        [helper.make_tensor_value_info("product", 1, None)],
    )
    nodes = [
        helper.make_node("SequenceConstruct", ["x"], ["s"]),
        helper.make_node("SequenceMap", ["s"], ["m"], "map", body=steps),
        helper.make_node("SequenceAt", ["m", "first"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"], "last"),
    ]
    model = model_of(nodes, {"x": [1, 32]}, ["y"], {"w": numbers(32, 32), "first": np.int64(0)})
    made, report = quantized(model, {"x": numbers(8, 32)}, scheme="int8")
    told = {layer.name: (layer.scheme, layer.reason) for layer in report.layers}
    assert told == {"hidden": ("float32", "no run shows whether it is reached"), "last": ("int8", "")}
    (hidden,) = (node for node in made.all_nodes() if node.name == "hidden")
    assert hidden.inputs[1] is not None and hidden.inputs[1].const is not None


def test_layers_of_branches_are_kept_by_name_or_for_their_errors() -> None:
    model, data = convolving(), {"x": in_turns(16, 16, 9)}
    _, report = quantized(model, data, scheme="int8", keep=("up_*", "last"))
    told = {layer.name: (layer.scheme, layer.reason) for layer in report.layers}
    assert told == {"down": ("int8", ""), **dict.fromkeys(("up_first", "up_second", "last"), ("float32", "asked for"))}
    assert report.difference.error > 0
    _, strict = quantized(model, data, scheme="int8", max_error=report.difference.error * 0.5, timed=False)
    assert strict.difference.error <= report.difference.error * 0.5
    assert {layer.scheme for layer in strict.layers} == {"float32", "int8"} or strict.problems


def test_channels_that_a_branch_reads_are_brought_to_like_ranges_for_others() -> None:
    """Behind an activation that lets no factor pass: the branch has what it had."""
    small = np.where(np.arange(16) % 2, 1.0, 0.02).astype(np.float32).reshape(16, 1, 1)
    then = body([helper.make_node("Conv", ["t", "u"], ["p"], "inside", pads=[1, 1])], ["p"])
    other = body([helper.make_node("Neg", ["t"], ["m"])], ["m"])
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first", pads=[1, 1]),
        helper.make_node("Tanh", ["a"], ["t"], "tanh"),
        *chosen_by_sign(then, other),
        helper.make_node("Conv", ["t", "u"], ["d"], "outside", pads=[1, 1]),
        helper.make_node("Add", ["c", "d"], ["y"], "sum_of_both"),
    ]
    weights = {"w": numbers(16, 16, 3) * small, "u": numbers(16, 16, 3), "zero": np.float32(0)}
    model, data = model_of(nodes, {"x": [1, 16, 9]}, ["y"], weights), {"x": in_turns(8, 16, 9)}
    graph = prepared(read(model), CONFIG)
    feeds = feeds_of(graph, data)
    expected = list(results(graph, feeds, CONFIG))
    assert equalize(graph, feeds, CONFIG) and any(node.op == "Mul" for node in graph)
    np.testing.assert_allclose(list(results(graph, feeds, CONFIG)), expected, rtol=1e-5, atol=1e-6)
    _, report = quantized(model, data, scheme="int8", equalize=True)
    assert {layer.scheme for layer in report.layers} == {"int8"} and report.difference.cosine > 0.999


@pytest.mark.parametrize("cosine, kept", [(0.999, False), (0.999999, True)])
def test_the_rest_in_bfloat16_inside_of_branches(monkeypatch: pytest.MonkeyPatch, cosine: float, kept: bool) -> None:
    """Layers without codes are multiplied in bfloat16 there as elsewhere, and nodes that hurt stay in float32."""
    pretend(monkeypatch, {"int8": 2.0})  # codes do not save time
    graph = prepared(read(convolving()), CONFIG)
    feeds = feeds_of(graph, {"x": in_turns(8, 16, 9)})
    options = Quantization(slower=1e9, rest="best", cosine=cosine, timed=True, equalize=False)
    _, report = Quantizer(graph, feeds, options, CONFIG).run()
    assert {layer.scheme for layer in report.layers} == {"float32"}
    inside = {"down", "up_first", "up_second", "up_relu", "up_sum", "down_sum"}
    names = {name for name in inside if name in report.keep_f32}
    assert report.precision == "bf16" and len(names) < len(inside)
    assert bool(names) == kept and report.difference.cosine >= cosine


@pytest.mark.parametrize("rest", ["bf16", "best"])
def test_codes_and_the_rest_as_it_is_fastest(rest: str) -> None:
    model, data = convolving(), {"x": in_turns(16, 16, 9)}
    graph = prepared(read(model), CONFIG)
    options = Quantization(slower=1e9, rest=rest, cosine=0.9999, timed=False)
    made, report = Quantizer(graph, feeds_of(graph, data), options, CONFIG).run(force=True)
    running = CONFIG.updated(precision=report.precision, keep_f32=report.keep_f32)
    feeds = feeds_of(graph, {"x": in_turns(16, 16, 9)})
    found = difference(list(results(made, feeds, running)), list(results(graph, feeds, CONFIG)))
    assert found.cosine >= 0.9995 and not report.problems


def test_a_model_without_layers_is_refused() -> None:
    then, other = (body([helper.make_node(op, ["x"], [op])], [op]) for op in ("Neg", "Abs"))
    model = model_of(chosen_by_sign(then, other, "y"), {"x": [1, 16, 9]}, ["y"], {"zero": np.float32(0)})
    for scheme in ("int8", "int4", DYNAMIC):
        with pytest.raises(InvalidConfig, match="no layer of this model can be quantized"):
            quantized(model, {"x": numbers(4, 16, 9)}, scheme=scheme)
