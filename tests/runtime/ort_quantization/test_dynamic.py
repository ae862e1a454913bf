"""``quantize_dynamic`` of ONNX Runtime's scripts, and configs that say how to quantize."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import ranvier.quantization
from ranvier.errors import InvalidConfig
from tests.runtime.ort_quantization.nets import (
    activation_zeros,
    block,
    check_near,
    constants,
    conv_net,
    images,
    kinds,
    normal,
    reader,
    tokens,
    weight_scales,
)
from tests.runtime.small_models import model_of, tensor

ours = ranvier.quantization
PACKAGES = [ranvier.quantization, onnxruntime.quantization]
both = pytest.mark.parametrize("package", PACKAGES, ids=["ranvier", "onnxruntime"])


@both
@pytest.mark.parametrize("codes", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_both_nets(package: ModuleType, codes: str, per_channel: bool, tmp_path: Path) -> None:
    path, kind = tmp_path / "coded.onnx", package.QuantType[codes]
    package.quantize_dynamic(block(), path, per_channel=per_channel, weight_type=kind)
    check_near(path, block(), tokens(1)[0], 0.999)
    assert kinds(path)["MatMulInteger"] == 2 and kinds(path)["DynamicQuantizeLinear"] == 2
    stored = {each.dtype.name for each in constants(path).values() if each.ndim == 2 and each.dtype != np.float32}
    assert stored == {"int8" if codes == "QInt8" else "uint8"}
    package.quantize_dynamic(conv_net(), path, per_channel=per_channel, weight_type=kind)
    check_near(path, conv_net(), images(1)[0], 0.999)
    assert kinds(path)["MatMulInteger"] == 2 and kinds(path)["ConvInteger"]


@both
@pytest.mark.parametrize("codes", ["QInt8", "QUInt8"])
def test_weights_of_7_bits(package: ModuleType, codes: str, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_dynamic(block(), path, reduce_range=True, weight_type=package.QuantType[codes])
    check_near(path, block(), tokens(1)[0], 0.999)
    stored = [each for each in constants(path).values() if each.ndim == 2 and each.dtype != np.float32]
    assert stored and all(int(each.max()) - int(each.min()) <= 128 for each in stored)


@both
def test_chosen_operators_and_nodes_alone(package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"op_types_to_quantize": ["MatMul"]}, {"Conv": 3, "MatMulInteger": 2}),  # a Gemm is one too
        ({"nodes_to_exclude": ["second", "product"]}, {"MatMul": 1, "MatMulInteger": 1}),
        ({"nodes_to_quantize": ["first"]}, {"ConvInteger": 1, "Conv": 2, "MatMulInteger": 0}),
    ]
    for chosen, expected in cases:
        package.quantize_dynamic(conv_net(), path, **chosen)
        found = kinds(path)
        assert {op: found[op] for op in expected} == expected, chosen
        check_near(path, conv_net(), images(1)[0], 0.999)


def recurrent() -> ModelProto:
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["", "h"], "memory", hidden_size=32),
        helper.make_node("Squeeze", ["h", "zero"], ["s"], "squeeze"),
        helper.make_node("MatMul", ["s", "v"], ["y"], "product"),
    ]
    weights = {
        "w": normal((1, 128, 32), 0.2),
        "r": normal((1, 128, 32), 0.2, seed=1),
        "b": normal((1, 256), 0.1),
        "v": normal((32, 16), 0.3),
        "zero": np.array([0]),
    }
    return model_of(nodes, [tensor("x", kind, [5, "n", 32])], [tensor("y", kind, ["n", 16])], weights)


@both
def test_long_short_term_memory(package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_dynamic(recurrent(), path)
    assert kinds(path)["DynamicQuantizeLSTM"] == 1 and kinds(path)["MatMulInteger"] == 1
    check_near(path, recurrent(), {"x": normal((5, 2, 32))}, 0.999)
    package.quantize_dynamic(recurrent(), path, nodes_to_exclude=["memory"])
    assert kinds(path)["LSTM"] == 1


def test_outputs_keep_their_names_and_types(tmp_path: Path) -> None:
    path, given = tmp_path / "coded.onnx", recurrent()
    given.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"  # though it is the input's n
    ours.quantize_dynamic(given, path, use_external_data_format=True)
    written = onnx.load(path)
    assert list(written.graph.output) == list(given.graph.output)
    assert list(written.graph.input) == list(given.graph.input)
    assert (tmp_path / "coded.onnx.data").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_type": ours.QuantType.QInt4}, "weight_type: QuantType.QInt4 is not supported.*MatMulNBitsQuantizer"),
        ({"weight_type": "QInt9"}, "weight_type: QInt9 is not supported"),
        ({"extra_options": {"ActivationSymmetric": True}}, "ActivationSymmetric = True is not supported"),
        ({"extra_options": {"MatMulConstBOnly": False}}, "MatMulConstBOnly = False is not supported"),
        ({"extra_options": {"WeightSymetric": True}}, "did you mean 'WeightSymmetric'"),
        ({"op_types_to_quantize": "MatMul"}, "op_types_to_quantize must be a list of names"),
    ],
)
def test_what_cannot_be_had_is_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ours.quantize_dynamic(block(), tmp_path / "o.onnx", **given)
    assert not list(tmp_path.iterdir())


# -- configs ----------------------------------------------------------------------------------------------------------


@both
def test_configs_say_the_same(package: ModuleType, tmp_path: Path) -> None:
    path, other = tmp_path / "a.onnx", tmp_path / "b.onnx"
    package.quantize(block(), path, package.DynamicQuantConfig(nodes_to_exclude=["up"], per_channel=True))
    package.quantize_dynamic(block(), other, nodes_to_exclude=["up"], per_channel=True)
    assert kinds(path) == kinds(other) and kinds(path)["MatMul"] == 1
    config = package.StaticQuantConfig(reader(package, images(2)), nodes_to_exclude=["first"], per_channel=True)
    package.quantize(conv_net(), path, config)
    assert set(weight_scales(path)) == {"second", "third", "gemm", "product"}
    check_near(path, conv_net(), images(1, seed=50)[0], 0.998)


@both
def test_a_config_for_pairs(package: ModuleType, tmp_path: Path) -> None:
    source, path = tmp_path / "net.onnx", tmp_path / "coded.onnx"
    onnx.save(conv_net(), source)
    config = package.get_qdq_config(
        str(source),
        reader(package, images(2)),
        calibrate_args={"symmetric": True},
        activation_type=package.QuantType.QInt8,
        activation_symmetric=True,
        nodes_to_exclude=lambda model, node: node.op_type == "Gemm",
    )
    assert isinstance(config, package.StaticQuantConfig)
    package.quantize(str(source), path, config)
    assert set(weight_scales(path)) >= {"first", "second", "third", "product"} and "gemm" not in weight_scales(path)
    assert {int(zero) for zero in activation_zeros(path)} == {0}
    check_near(path, conv_net(), images(1, seed=50)[0], 0.998)


def test_configs_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="quant_config must be a StaticQuantConfig or a DynamicQuantConfig, got d"):
        ours.quantize(block(), tmp_path / "o.onnx", {})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"calibrate_args: unknown option 'symetric' \(did you mean 'symmetric'"):
        ours.get_qdq_config(block(), reader(ours, tokens()), calibrate_args={"symetric": True})
    overridden = ours.get_qdq_config(block(), reader(ours, tokens()), tensor_quant_overrides={"n": [{"scale": 1.0}]})
    with pytest.raises(InvalidConfig, match="TensorQuantOverrides"):
        ours.quantize(block(), tmp_path / "o.onnx", overridden)


def branching() -> ModelProto:
    """A layer of each branch; one has its weights from around it."""
    kind = TensorProto.FLOAT
    then = [helper.make_node("MatMul", ["x", "w"], ["a"], "then")]
    other = [helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node("MatMul", ["r", "v"], ["b"], "else")]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["up"], "greater"),
        helper.make_node(
            "If",
            ["up"],
            ["c"],
            "if",
            then_branch=helper.make_graph(then, "then", [], [tensor("a", kind, ["n", 32])]),
            else_branch=helper.make_graph(
                other, "else", [], [tensor("b", kind, ["n", 32])], [numpy_helper.from_array(normal((32, 32), 0.2), "v")]
            ),
        ),
        helper.make_node("MatMul", ["c", "w"], ["y"], "last"),
    ]
    weights = {"w": normal((32, 32), 0.2, seed=1), "zero": np.zeros((), np.float32)}
    return model_of(nodes, [tensor("x", kind, ["n", 32])], [tensor("y", kind, ["n", 32])], weights)


@both
@pytest.mark.parametrize("bodies", [True, False])
def test_layers_in_branches_where_that_is_asked_for(package: ModuleType, bodies: bool, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_dynamic(branching(), path, extra_options={"EnableSubgraph": bodies})
    nodes = list(onnx.load(path).graph.node)
    (branch,) = (node for node in nodes if node.op_type == "If")
    inside = [node.op_type for each in branch.attribute for node in each.g.node]
    assert inside.count("MatMulInteger") == 2 * bodies and inside.count("MatMul") == 2 * (not bodies)
    assert sum(node.op_type == "MatMulInteger" for node in nodes) == 1
    for sign in (1, -1):
        check_near(path, branching(), {"x": normal((4, 32)) + np.float32(sign)}, 0.99)
