"""Weights alone in a few bits, and models made ready, by ONNX Runtime's names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ranvier.quantization
from ranvier.errors import InvalidConfig, InvalidInput, NotSupported
from ranvier.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    GPTQWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    QuantFormat,
    RTNWeightOnlyQuantConfig,
)
from ranvier.quantization.shape_inference import quant_pre_process
from tests.runtime.ort_quantization.nets import (
    block,
    check_near,
    conv_net,
    cosine,
    images,
    kinds,
    normal,
    reader,
    results,
    tokens,
)
from tests.runtime.small_models import model_of, tensor

ours = ranvier.quantization


def attributes(model: onnx.ModelProto) -> list[dict[str, Any]]:
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    return [{each.name: helper.get_attribute_value(each) for each in node.attribute} for node in nodes]


@pytest.mark.parametrize(("bits", "least"), [(8, 0.9999), (4, 0.995), (2, 0.85)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_bits_and_symmetry(bits: int, least: float, symmetric: bool, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    quantizer = MatMulNBitsQuantizer(block(), bits=bits, block_size=16, is_symmetric=symmetric, accuracy_level=1)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    found = attributes(onnx.load(path))
    assert [(each["bits"], each["block_size"], each["accuracy_level"]) for each in found] == [(bits, 16, 1)] * 2
    operands = [len(node.input) for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"]
    assert operands == ([3, 3] if symmetric else [4, 4])  # codes that lie evenly need no zeros
    check_near(path, block(), tokens(1)[0], least)


def test_nodes_and_operators(tmp_path: Path) -> None:
    excluding = MatMulNBitsQuantizer(conv_net(), block_size=16, nodes_to_exclude=["product"])
    excluding.process()
    assert not attributes(excluding.model.model)
    plain = MatMulNBitsQuantizer(conv_net(), block_size=16)
    plain.process()
    kinds_of = [node.op_type for node in plain.model.model.graph.node]
    assert kinds_of.count("MatMulNBits") == 1 and kinds_of.count("Gemm") == 1  # a Gemm only where it is asked for
    for more in ({"nodes_to_include": ["gemm"]}, {"op_types_to_quantize": ("MatMul", "Gemm")}):
        both = MatMulNBitsQuantizer(conv_net(), block_size=16, **more)
        both.process()
        assert len(attributes(both.model.model)) == 2
        expected = results(conv_net(), images(1)[0])["onnxruntime"]
        assert cosine(results(both.model.model, images(1)[0])["onnxruntime"], expected) > 0.99


def test_before_it_is_processed_the_model_is_the_given_one() -> None:
    quantizer = MatMulNBitsQuantizer(block())
    assert not attributes(quantizer.model.model)
    feed = tokens(1)[0]
    np.testing.assert_allclose(
        results(quantizer.model.model, feed)["ranvier"], results(block(), feed)["onnxruntime"], atol=1e-4
    )


def test_layers_that_share_weights_share_their_codes(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "one"), helper.make_node("MatMul", ["a", "w"], ["y"], "two")]
    model = model_of(nodes, [tensor("x", kind, ["n", 32])], [tensor("y", kind, ["n", 32])], {"w": normal((32, 32))})
    quantizer = MatMulNBitsQuantizer(model, block_size=32)
    quantizer.process()
    made = quantizer.model.model.graph
    codes = [node.input[1] for node in made.node]
    assert len(codes) == 2 and len(set(codes)) == 1
    assert [each.name for each in made.output] == ["y"]


def test_weights_beside_the_model(tmp_path: Path) -> None:
    onnx.save(block(), tmp_path / "block.onnx")
    quantizer = MatMulNBitsQuantizer(str(tmp_path / "block.onnx"), algo_config=RTNWeightOnlyQuantConfig())
    quantizer.process()
    quantizer.model.save_model_to_file(tmp_path / "coded.onnx", use_external_data_format=True)
    assert (tmp_path / "coded.onnx.data").exists() and kinds(tmp_path / "coded.onnx")["MatMulNBits"] == 2
    check_near(tmp_path / "coded.onnx", block(), tokens(1)[0], 0.99)


@pytest.mark.parametrize("size", [32, 128])  # the second is more than a sum has
def test_codes_by_samples_are_nearer(size: int) -> None:
    mixed = normal((6, 32))  # channels that go together
    feeds = [{"tokens": (normal((2, 40, 6), seed=k) @ mixed).astype(np.float32)} for k in range(4)]
    expected = results(block(), feeds[0])["onnxruntime"]
    off = []
    for config in (GPTQWeightOnlyQuantConfig(reader(ours, feeds), mse=True), RTNWeightOnlyQuantConfig()):
        quantizer = MatMulNBitsQuantizer(block(), block_size=size, algo_config=config)
        quantizer.process()
        assert [each["block_size"] for each in attributes(quantizer.model.model)] == [32, size]
        off.append(1 - cosine(results(quantizer.model.model, feeds[0])["onnxruntime"], expected))
    assert off[0] < off[1]


def test_a_configs_own_settings_win(tmp_path: Path) -> None:
    config = DefaultWeightOnlyQuantConfig(block_size=16, bits=8, accuracy_level=4)
    quantizer = MatMulNBitsQuantizer(block(), bits=4, block_size=32, algo_config=config)
    quantizer.process()
    assert [(e["bits"], e["block_size"], e["accuracy_level"]) for e in attributes(quantizer.model.model)] == [
        (8, 16, 4)
    ] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ({"block_size": 100}, "block_size must be a power of two from 16 to 256, got 100"),
        ({"accuracy_level": 9}, "accuracy_level must be None or a number from 0 to 4"),
        ({"quant_format": QuantFormat.QDQ}, "quant_format: QuantFormat.QDQ is not supported"),
        ({"op_types_to_quantize": ("Gather",)}, "op_types_to_quantize: Gather is not supported"),
        ({"quant_axes": (("MatMul", 1),)}, "quant_axes"),
        ({"channel_wised_quantize": True}, "channel_wised_quantize is not supported"),
        ({"algo_config": "RTN"}, "algo_config must be a config of this module, got str"),
    ],
)
def test_what_cannot_be_had_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        MatMulNBitsQuantizer(block(), **given)


def test_bits_of_other_algorithms_are_looked_at_too() -> None:
    with pytest.raises(InvalidConfig, match="bits must be 2, 4 or 8, got 3"):
        MatMulNBitsQuantizer(block(), bits=3, algo_config=RTNWeightOnlyQuantConfig())


def test_algorithms_that_cannot_be_had_say_what_can() -> None:
    for config in (HQQWeightOnlyQuantConfig, KQuantWeightOnlyQuantConfig):
        with pytest.raises(NotSupported, match="is not supported; DefaultWeightOnlyQuantConfig"):
            config(block_size=32)
    with pytest.raises(InvalidConfig, match="ratios is not supported"):
        RTNWeightOnlyQuantConfig(ratios={"up": 0.9})
    with pytest.raises(InvalidConfig, match="customized_weight_config is not supported"):
        RTNWeightOnlyQuantConfig(customized_weight_config={"up": {"bits": 8}})
    with pytest.raises(InvalidConfig, match="perchannel = False"):
        GPTQWeightOnlyQuantConfig(perchannel=False)
    with pytest.raises(InvalidInput, match="gave no samples"):
        MatMulNBitsQuantizer(block(), algo_config=GPTQWeightOnlyQuantConfig(reader(ours, []))).process()


ARGUMENTS = {
    MatMulNBitsQuantizer: "model bits block_size is_symmetric accuracy_level nodes_to_exclude nodes_to_include "
    "quant_format op_types_to_quantize quant_axes channel_wised_quantize algo_config",
    DefaultWeightOnlyQuantConfig: "block_size is_symmetric accuracy_level quant_format op_types_to_quantize quant_axes "
    "bits channel_wised_quantize",
    RTNWeightOnlyQuantConfig: "ratios quant_format op_types_to_quantize customized_weight_config",
    GPTQWeightOnlyQuantConfig: "calibration_data_reader percdamp block_size actorder mse perchannel quant_format "
    "op_types_to_quantize",
}


@pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
def test_arguments_are_the_others(kind: type) -> None:
    assert " ".join(inspect.signature(kind).parameters) == ARGUMENTS[kind]


# -- models made ready ------------------------------------------------------------------------------------------------


def normalized() -> onnx.ModelProto:
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"], "norm"),
        helper.make_node("Neg", ["x"], ["unused"], "idle"),
    ]
    weights = {
        "w": normal((16, 8, 3, 3), 0.2),
        "s": 1 + normal((16,), 0.1),
        "b": normal((16,), seed=1),
        "m": normal((16,), seed=2),
        "v": 1 + np.abs(normal((16,), seed=3)),
    }
    return model_of(nodes, [tensor("x", kind, ["n", 8, 6, 6])], [tensor("y", kind, ["n", 16, 4, 4])], weights)


def test_a_model_is_made_ready(tmp_path: Path) -> None:
    path = tmp_path / "ready.onnx"
    quant_pre_process(normalized(), path, skip_symbolic_shape=True)
    assert kinds(path) == {"Conv": 1}
    assert list(onnx.load(path).graph.output) == list(normalized().graph.output)
    check_near(path, normalized(), {"x": normal((2, 8, 6, 6))}, 0.999999)
    quant_pre_process(normalized(), path, skip_optimization=True, save_as_external_data=True)
    assert kinds(path)["BatchNormalization"] == 1 and (tmp_path / "ready.onnx.data").exists()


def test_others_see_that_it_was_made_ready(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import onnxruntime.quantization as theirs

    quant_pre_process(normalized(), tmp_path / "ready.onnx")
    given = reader(theirs, [{"x": normal((2, 8, 6, 6))}])
    theirs.quantize_static(str(tmp_path / "ready.onnx"), tmp_path / "coded.onnx", given)
    assert "pre-processing" not in caplog.text
    check_near(tmp_path / "coded.onnx", normalized(), {"x": normal((2, 8, 6, 6))}, 0.999)


def test_what_cannot_be_made_ready(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"external_data_location: weights are written to 'o\.onnx\.data'"):
        quant_pre_process(normalized(), tmp_path / "o.onnx", external_data_location="weights.bin")
    with pytest.raises(InvalidConfig, match="quant_pre_process has no argument 'optimise'"):
        quant_pre_process(normalized(), tmp_path / "o.onnx", optimise=True)
    with pytest.raises(InvalidConfig, match="output_model_path must be a path, got NoneType"):
        quant_pre_process(normalized())
    with pytest.raises(InvalidConfig, match="input_model must be a path or a ModelProto, got NoneType"):
        quant_pre_process(output_model_path=tmp_path / "o.onnx")
