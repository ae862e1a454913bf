"""Layers of experts in a few bits: what is written is what was there, for ONNX Runtime too, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.formats.onnx import read, save
from ranvier.graph.ir import Graph, Node
from ranvier.ops import registry
from ranvier.ops.contrib.attention import softmax
from ranvier.ops.contrib.quantized_moe import PLACES, ROUTER_WEIGHTS, Layer, Stored
from ranvier.quantize import Quantized, register_scheme, schemes
from ranvier.runtime.quantizing import Quantization, QuantizationReport, Quantizer, feeds_of, prepared
from ranvier.runtime.quantizing import quantizer as quantizer_file
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.samples import results, visit
from tests.exact_peer import exact

Array = np.ndarray[Any, Any]
CONFIG = SessionConfig(threads=1)
MICROSOFT = "com.microsoft"
EXPERTS, HIDDEN, INNER = 4, 32, 64
FORMS: dict[str, dict[str, Any]] = {
    "relu": {"activation_type": "relu"},
    "gelu": {"activation_type": "gelu"},
    "swiglu in turns": {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7, "swiglu_limit": 3.0},
    "swiglu in halves": {"activation_type": "swiglu", "swiglu_fusion": 2, "activation_beta": 1.0},
    "swiglu of two": {"activation_type": "swiglu", "third": True, "activation_beta": 1.0, "swiglu_limit": 3.0},
    # parameters of swiglu, which silu does not read
    "silu of two": {"activation_type": "silu", "third": True, "activation_beta": 9.0, "swiglu_limit": 0.01},
}


@pytest.fixture(autouse=True)
def not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer_file, "timed", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(schemes, "_added", {})  # what a test adds is gone after it


class Model:
    """A router and a layer of experts behind a product."""

    def __init__(
        self, *, hidden: int = HIDDEN, inner: int = INNER, third: bool = False, bias: bool = True, twice: bool = False,
        product: bool = True, **attrs: Any,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(3)
        fused = 2 if attrs.get("swiglu_fusion") else 1
        attrs = {"k": 2, **attrs}

        def drawn(*shape: int) -> Array:
            return (rng.standard_normal(shape) * 0.3).astype(np.float32)

        self.weights = {"router": drawn(hidden, EXPERTS)}
        if product:
            self.weights["dense"] = drawn(hidden, hidden)
        wide = {"fc1": (fused * inner, hidden), "fc2": (hidden, inner), **({"fc3": (inner, hidden)} if third else {})}
        operands: list[str] = []
        for name, shape in wide.items():
            self.weights[name] = drawn(EXPERTS, *shape)
            if bias:
                self.weights[f"{name}.bias"] = drawn(EXPERTS, shape[0])
            operands += [name, f"{name}.bias" if bias else ""]
        while not operands[-1]:
            operands.pop()
        first = "x"
        nodes = []
        if product:
            nodes.append(helper.make_node("MatMul", ["x", "dense"], ["d"], "dense"))
            first = "d"
        nodes += [
            helper.make_node("MatMul", [first, "router"], ["likes"], "likes"),
            helper.make_node("MoE", [first, "likes", *operands], ["y"], "moe", domain=MICROSOFT, **attrs),
        ]
        if twice:
            nodes += [
                helper.make_node("MatMul", ["y", "router"], ["again"], "again"),
                helper.make_node("MoE", ["y", "again", *operands], ["z"], "moe2", domain=MICROSOFT, **attrs),
            ]
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", hidden])],
            [helper.make_tensor_value_info("z" if twice else "y", TensorProto.FLOAT, ["n", hidden])],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        self.hidden = hidden
        self.proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def samples(self, count: int = 16, seed: int = 1) -> Array:
        """Rows whose channels go together, as those of a layer do."""
        mix = np.random.default_rng(0).standard_normal((self.hidden, self.hidden))
        mix = mix * np.geomspace(1, 0.05, self.hidden)[:, None]
        return (np.random.default_rng(seed).standard_normal((count, self.hidden)) @ mix).astype(np.float32)

    def quantized(
        self, scheme: str, samples: Array | None = None, **options: Any
    ) -> tuple[Graph, QuantizationReport]:  # fmt: skip
        graph = prepared(read(self.proto), CONFIG)
        feeds = feeds_of(graph, {"x": self.samples() if samples is None else samples})
        return Quantizer(graph, feeds, Quantization(scheme, slower=1e9, **options), CONFIG).run(force=True)


def node_of(graph: Graph, op: str = "QMoE") -> Node:
    (found,) = (node for node in graph if node.op == op)
    return found


def linear_of(node: Node, name: str) -> Layer:
    """One of the linear layers of a QMoE."""

    def array(k: int | None) -> Array | None:
        value = None if k is None else node.input(k)
        return None if value is None or value.const is None else value.const.numpy()

    stored = Stored("int", node.attrs["expert_weight_bits"], node.attrs["block_size"])
    weights, scales, bias, zeros, whole = map(array, PLACES[name])
    assert weights is not None
    return Layer(stored, name, len(weights), weights, scales, bias, zeros, whole)


def decoded(node: Node, name: str) -> Array:
    layer = linear_of(node, name)
    return np.stack([layer.decoded(expert) for expert in range(len(layer.weights))])


def in_turns(model: Model) -> Array:
    """Weights of fc1 as they are written."""
    first = model.weights["fc1"]
    gate, line = (first, model.weights["fc3"]) if "fc3" in model.weights else np.split(first, 2, axis=1)
    return np.stack([gate, line], axis=2).reshape(EXPERTS, -1, first.shape[2])


def layer_report(report: QuantizationReport, name: str = "moe") -> Any:
    (found,) = (layer for layer in report.layers if layer.name == name)
    return found


def elsewhere(graph: Graph, path: Path, x: Array) -> Array:
    """The result of ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    save(graph, path)
    onnx.checker.check_model(onnx.load(path))
    found: Array = exact(path).run(None, {"x": x})[0]
    return found


def read_by(node: Node, made: Graph, x: Array) -> list[Array]:
    """Tokens and likes that a layer reads."""
    seen: dict[str, Array] = {}
    names = [value.name for value in node.inputs[:2] if value is not None]
    visit(made, names, [{"x": x}], CONFIG, lambda name, array: seen.update({name: array}))
    return [seen[name] for name in names]


def off(found: Array, expected: Array) -> float:
    return difference([[found]], [[expected]]).error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("k", "normalize"), [(1, 0), (2, 1)])
def test_other_runtimes_read_every_form(tmp_path: Path, form: str, k: int, normalize: int) -> None:
    """Also those of MoE that they do not."""
    model = Model(k=k, normalize_routing_weights=normalize, bias=form != "gelu", **FORMS[form])
    made, report = model.quantized("uint4")
    x = model.samples(5, seed=9)
    (own,) = next(results(made, [{"x": x}], CONFIG))
    assert off(elsewhere(made, tmp_path / "q.onnx", x), own) < 1e-5
    assert report.difference.error < 0.3
    assert layer_report(report).scheme == "uint4"


@pytest.mark.parametrize("scheme", ["int8w", "int4", "uint4", "int2", "uint2", "ternary", "gptq", "awq"])
def test_schemes(tmp_path: Path, scheme: str) -> None:
    model = Model(activation_type="silu")
    made, report = model.quantized(scheme, group=16)
    x = model.samples(5, seed=9)
    (own,) = next(results(made, [{"x": x}], CONFIG))
    # with 8 bits ONNX Runtime rounds what it multiplies to 8 bits too
    assert off(elsewhere(made, tmp_path / "q.onnx", x), own) < (0.02 if scheme == "int8w" else 1e-5)
    bits = {"int8w": 8, "int2": 2, "uint2": 2, "ternary": 2}.get(scheme, 4)
    node, layer = node_of(made), layer_report(report)
    assert node.attrs["expert_weight_bits"] == bits and node.attrs["block_size"] == 16
    has_zeros = node.input(PLACES["fc1"][3]) is not None
    assert has_zeros == (scheme in ("uint4", "uint2", "gptq", "awq"))
    expected = 0
    for outputs, inputs in ((INNER, HIDDEN), (HIDDEN, INNER)):
        zeros = -(-inputs // 16 * bits // 8) if has_zeros else 0
        expected += EXPERTS * outputs * (inputs * bits // 8 + inputs // 16 * 4 + zeros)
    assert (layer.bytes_before, layer.bytes_after) == (EXPERTS * HIDDEN * INNER * 2 * 4, expected)
    assert layer.error is not None and layer.error > 0
    assert not {"fc1", "fc2"} & made.constants.keys()
    operands = [None if value is None or value.const is None else value.const.numpy() for value in node.inputs[2:]]
    operands[ROUTER_WEIGHTS - 2] = softmax((tokens := read_by(node, made, x))[1])
    np.testing.assert_allclose(
        own, registry.evaluate("QMoE", *tokens, *operands, domain=MICROSOFT, **node.attrs), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
@pytest.mark.parametrize("bits", [2, 8])
def test_bits_of_schemes_that_look_at_samples(scheme: str, bits: int) -> None:
    model = Model(activation_type="silu")
    made, report = model.quantized(scheme, group=16, bits=bits)
    assert node_of(made).attrs["expert_weight_bits"] == bits
    assert layer_report(report).scheme == ("gptq" if scheme == "gptq" else f"uint{bits}")
    few = model.quantized(scheme, group=16)[1]  # 4
    assert (report.difference.error < few.difference.error) == (bits == 8)


@pytest.mark.parametrize("form", ["relu", "swiglu in halves", "silu of two"])
@pytest.mark.parametrize("scheme", ["int8w", "int4", "uint4", "int2", "uint2"])
def test_codes_stand_for_the_nearest_numbers(scheme: str, form: str) -> None:
    """Of all that their group has."""
    model = Model(**FORMS[form])
    node = node_of(model.quantized(scheme)[0])
    bits, group = node.attrs["expert_weight_bits"], node.attrs["block_size"]
    expected = {"fc1": model.weights["fc1"] if form == "relu" else in_turns(model), "fc2": model.weights["fc2"]}
    for name, weights in expected.items():
        found, layer = decoded(node, name), linear_of(node, name)
        codes = np.arange(0 if scheme.startswith("uint") else 1, 1 << bits)  # as many below zero as above
        for expert, numbers in enumerate(weights):
            split = numbers.reshape(len(numbers), -1, group, 1)
            levels = (codes - layer.zero_points(expert)[..., None, None]) * layer.factors(expert)[..., None, None]
            least = np.abs(split - levels).min(axis=3)
            np.testing.assert_allclose(np.abs(numbers - found[expert]).reshape(least.shape), least, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("k", "normalize"), [(1, 0), (2, 0), (2, 1), (EXPERTS, 0)])
def test_written_layers_are_those_with_decoded_weights(form: str, k: int, normalize: int) -> None:
    """QMoE is MoE with the numbers that codes stand for: rows, biases and shares are where they belong."""
    attrs = {name: value for name, value in FORMS[form].items() if name != "third"}
    attrs |= {"k": k, "normalize_routing_weights": normalize}
    model = Model(third="of two" in form, **attrs)
    made, _ = model.quantized("int4")
    node, x = node_of(made), model.samples(7, seed=5)
    weights = {"fc1": decoded(node, "fc1"), "fc2": decoded(node, "fc2")}
    gate, line = weights["fc1"][:, 0::2], weights["fc1"][:, 1::2]
    if form == "swiglu in halves":
        weights["fc1"] = np.concatenate([gate, line], axis=1)
    elif "fc3" in model.weights:
        weights |= {"fc1": gate, "fc3": line}
    operands = [array for name, each in weights.items() for array in (each, model.weights[f"{name}.bias"])]
    expected = registry.evaluate("MoE", *read_by(node, made, x), *operands, domain=MICROSOFT, **attrs)
    (found,) = next(results(made, [{"x": x}], CONFIG))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert (node.input(ROUTER_WEIGHTS) is not None) == (not normalize and k < EXPERTS)


def test_a_third_layer_that_is_no_swiglu_stays_one() -> None:
    model = Model(activation_type="gelu", third=True, bias=False)
    node = node_of(made := model.quantized("int4")[0])
    operands = [array for name in ("fc1", "fc2", "fc3") for array in (decoded(node, name), None)]
    x = model.samples(7, seed=5)
    inputs = read_by(node, made, x)
    expected = registry.evaluate("MoE", *inputs, *operands, domain=MICROSOFT, k=2, activation_type="gelu")
    np.testing.assert_allclose(next(results(made, [{"x": x}], CONFIG))[0], expected, rtol=1e-4, atol=1e-4)


def test_layers_that_share_weights_share_their_codes(tmp_path: Path) -> None:
    model = Model(twice=True, **FORMS["silu of two"])
    for scheme in ("uint4", "gptq"):
        made, report = model.quantized(scheme)
        assert [layer.op for layer in report.layers] == ["MatMul", "MoE", "MoE"]
        assert {layer.scheme for layer in report.layers} == {scheme}
        codes = [name for name in made.constants if ".codes" in name]
        assert sorted(codes) == ["dense.codes", "fc1.codes", "fc2.codes"]
        x = model.samples(5, seed=9)
        (own,) = next(results(made, [{"x": x}], CONFIG))
        assert off(elsewhere(made, tmp_path / f"{scheme}.onnx", x), own) < 1e-5


# -- what stays, and what is said of it -------------------------------------------------------------------------------


def test_groups_have_to_divide_all_features() -> None:
    model = Model(inner=48)
    made, report = model.quantized("int4", group=32)
    layer = layer_report(report)
    assert (layer.scheme, layer.bytes_after) == ("float32", layer.bytes_before)
    assert layer.reason == "groups of 32 do not divide its 48 features, groups of 16 would"
    assert layer_report(report, "dense").scheme == "int4" and node_of(made, "MoE").name == "moe"
    assert node_of(model.quantized("int4", group=16)[0]).attrs["block_size"] == 16
    odd = Model(inner=40)
    assert layer_report(odd.quantized("int4")[1]).reason == "groups of 32 do not divide its 40 features"
    with pytest.raises(InvalidConfig, match="layer 'moe': groups of 32 do not divide its 40 features"):
        Model(inner=40, product=False).quantized("int4")


@pytest.mark.parametrize("between", [False, True])
def test_layers_that_choose_experts_stay(between: bool) -> None:
    """Codes would choose others. Other nodes may come between."""
    model = Model(hidden=64)
    graph = model.proto.graph
    if between:
        moe = next(node for node in graph.node if node.op_type == "MoE")
        graph.initializer.append(numpy_helper.from_array(np.array([-1, EXPERTS]), "shape"))
        graph.node.insert(2, helper.make_node("Tanh", ["likes"], ["bound"], "bound"))
        graph.node.insert(3, helper.make_node("Reshape", ["bound", "shape"], ["turned"], "turned"))
        moe.input[1] = "turned"
    made, report = model.quantized("int4")
    assert layer_report(report, "likes").reason == "it chooses experts"
    assert [layer.scheme for layer in report.layers] == ["int4", "float32", "int4"]
    assert next(node for node in made if node.name == "likes").op == "MatMul"
    assert len(model.quantized("int4", keep=("likes", "moe"))[1].layers) == 3
    with pytest.raises(InvalidConfig, match="layer 'likes': it chooses experts"):
        Model(hidden=64, inner=40, product=False).quantized("int4")


def test_groups_are_no_larger_than_rows() -> None:
    assert node_of(Model().quantized("int4", group=256)[0]).attrs["block_size"] == HIDDEN


@pytest.mark.parametrize("scheme", ["nf4", "fp8", "int8"])
def test_codes_that_experts_have_no_form_for(scheme: str) -> None:
    made, report = Model().quantized(scheme)
    assert layer_report(report).scheme == "float32" and layer_report(report).reason
    assert layer_report(report, "dense").scheme == scheme
    assert node_of(made, "MoE").name == "moe"


def test_layers_that_are_kept() -> None:
    model = Model()
    made, report = model.quantized("int4", keep=("moe",))
    assert layer_report(report).reason == "asked for" and node_of(made, "MoE").name == "moe"
    with pytest.raises(InvalidConfig, match="asked to be kept"):
        Model(product=False).quantized("int4", keep=("moe",))


def test_layers_that_hurt_stay() -> None:
    model = Model()
    whole = model.quantized("int2")[1]
    made, report = model.quantized("int2", max_error=whole.difference.error * 0.9)
    kept = [layer for layer in report.layers if layer.reason == "it hurt the results"]
    assert len(kept) == 1 and not report.problems
    made, report = Model(product=False).quantized("int2", max_error=1e-3)
    assert layer_report(report).reason == "it hurt the results" and node_of(made, "MoE").name == "moe"
    assert report.difference.error == 0.0 and report.problems


def test_what_cannot_be_coded_is_left_alone() -> None:
    """Weights that come with the run."""
    proto = Model(product=False).proto
    computed = onnx.ModelProto.FromString(proto.SerializeToString())
    fc1 = next(each for each in computed.graph.initializer if each.name == "fc1")
    computed.graph.initializer.remove(fc1)
    computed.graph.input.append(helper.make_tensor_value_info("fc1", TensorProto.FLOAT, [EXPERTS, INNER, HIDDEN]))
    with pytest.raises(InvalidConfig, match="no layer of this model can be quantized"):
        Quantizer(prepared(read(computed), CONFIG), [], Quantization("int4"), CONFIG)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = Model()
    array = next(each for each in model.proto.graph.initializer if each.name == "fc2")
    broken = numpy_helper.to_array(array).copy()
    broken[1, 2, 3] = np.inf
    array.CopyFrom(numpy_helper.from_array(broken, "fc2"))
    with pytest.raises(InvalidConfig) as error:
        model.quantized("int4")
    assert any("layer 'moe'" in note for note in error.value.__notes__)


# -- by samples -------------------------------------------------------------------------------------------------------


def test_gptq_looks_at_the_rows_of_each_expert() -> None:
    """What experts make of rows is nearer than with codes that are the nearest, on others than it was made by."""
    model, unseen = Model(product=False), {"x": Model().samples(256, seed=8)}
    expected = list(results(prepared(read(model.proto), CONFIG), [unseen], CONFIG))

    def error(scheme: str) -> float:
        made, report = model.quantized(scheme, samples=model.samples(512))
        assert layer_report(report).scheme == scheme and not layer_report(report).reason
        return difference(list(results(made, [unseen], CONFIG)), expected).error

    assert error("gptq") < 0.8 * error("uint4")


def test_experts_that_no_sample_visits_are_rounded_to_the_nearest() -> None:
    model = Model(k=1, product=False)
    rows = model.samples(64)
    visited = np.argmax(rows @ model.weights["router"], axis=1)
    only = rows[np.isin(visited, [0, 2])]
    made, report = model.quantized("gptq", samples=only)
    assert layer_report(report).reason == "no sample visits 2 of 4 experts: these are rounded to the nearest"
    nearest = node_of(model.quantized("uint4")[0])
    for name in ("fc1", "fc2"):
        same = np.array([np.array_equal(*pair) for pair in zip(decoded(node_of(made), name), decoded(nearest, name))])
        assert same.tolist() == [False, True, False, True]


def test_awq_rounds_experts_to_the_nearest_and_says_so() -> None:
    made, report = Model().quantized("awq")
    layer = layer_report(report)
    assert (layer.scheme, layer.reason) == ("uint4", "rounded to the nearest: awq scales what all experts read")
    nearest = node_of(Model().quantized("uint4")[0])
    np.testing.assert_array_equal(decoded(node_of(made), "fc1"), decoded(nearest, "fc1"))


# -- schemes of other packages ----------------------------------------------------------------------------------------


class Scheme:
    """Codes by a function of the weights."""

    name = "mine"

    def __init__(self, make: Callable[[Array], Any]) -> None:
        self.quantize = make


def three_bits(weights: Array) -> Quantized:
    """One scale for a row."""
    scales = np.abs(weights).max(axis=1, keepdims=True) / 3
    codes = np.clip(np.rint(weights / scales), -4, 3).astype(np.int8)
    return Quantized("mine", codes, scales, (1, weights.shape[1]), 3)


def zeros_between(weights: Array) -> Quantized:
    split = weights.reshape(len(weights), -1, 16)
    low, high = split.min(axis=2), split.max(axis=2)
    scales = (high - low) / 15
    codes = np.clip(np.rint((split - low[..., None]) / scales[..., None]), 0, 15).astype(np.uint8)
    return Quantized("mine", codes.reshape(weights.shape), scales, (1, 16), 4, -low / scales)


def test_schemes_of_other_packages() -> None:
    model = Model()
    register_scheme("mine", lambda: Scheme(three_bits))
    made, report = model.quantized("mine")
    assert layer_report(report).scheme == "mine" and node_of(made).attrs["expert_weight_bits"] == 4
    for name in ("fc1", "fc2"):
        numbers = [three_bits(matrix).dequantize() for matrix in model.weights[name]]
        np.testing.assert_allclose(decoded(node_of(made), name), numbers, rtol=1e-6)


def test_schemes_of_other_packages_do_not_see_what_is_kept() -> None:
    def particular(weights: Array) -> Quantized:
        if len(weights) == INNER:
            raise InvalidConfig("not these")
        return three_bits(weights)

    register_scheme("mine", lambda: Scheme(particular))
    with pytest.raises(InvalidConfig, match="not these") as error:
        Model().quantized("mine")
    assert any("layer 'moe'" in note for note in error.value.__notes__)
    assert layer_report(Model().quantized("mine", keep=("moe",))[1]).reason == "asked for"


def test_schemes_of_other_packages_without_a_form_for_experts() -> None:
    register_scheme("mine", lambda: Scheme(zeros_between))
    made, report = Model().quantized("mine")
    assert layer_report(report).reason == "what mine makes has no form for experts: its zeros lie between codes"
    assert layer_report(report, "dense").scheme == "mine" and node_of(made, "MoE").name == "moe"
