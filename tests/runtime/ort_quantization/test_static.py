"""``quantize_static`` of ONNX Runtime's scripts: the same script under both packages, each file in both runtimes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization
import pytest
from onnx import TensorProto, helper

import ranvier.quantization
from ranvier.errors import InvalidConfig, InvalidInput, ShapeMismatch
from tests.runtime.ort_quantization.nets import (
    activation_scales,
    activation_zeros,
    block,
    check_near,
    constants,
    conv_net,
    images,
    kinds,
    normal,
    reader,
    results,
    tokens,
    uneven_net,
    weight_scales,
)
from tests.runtime.small_models import model_of, tensor

ours = ranvier.quantization
PACKAGES = [ranvier.quantization, onnxruntime.quantization]
both = pytest.mark.parametrize("package", PACKAGES, ids=["ranvier", "onnxruntime"])


@both
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("codes", ["QInt8", "QUInt8"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_convolutional_net(package: ModuleType, form: str, codes: str, per_channel: bool, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_static(
        conv_net(),
        path,
        reader(package, images()),
        quant_format=package.QuantFormat[form],
        per_channel=per_channel,
        activation_type=package.QuantType[codes],
    )
    onnx.checker.check_model(onnx.load(path))
    check_near(path, conv_net(), images(1, seed=50)[0], 0.999)
    assert kinds(path)["Conv" if form == "QDQ" else "QLinearConv"] == 3
    assert {zero.dtype.name for zero in activation_zeros(path)} == {"int8" if codes == "QInt8" else "uint8"}


@both
@pytest.mark.parametrize("method", ["MinMax", "Entropy", "Percentile"])
def test_a_block_of_products(package: ModuleType, method: str, tmp_path: Path) -> None:
    source, path = tmp_path / "block.onnx", tmp_path / "coded.onnx"
    onnx.save(block(), source)
    how = package.CalibrationMethod[method]
    package.quantize_static(str(source), str(path), reader(package, tokens()), calibrate_method=how, per_channel=True)
    check_near(path, block(), tokens(1, seed=50)[0], 0.995)


def test_operators_on_codes_are_the_standards(tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    form = ours.QuantFormat.QOperator
    ours.quantize_static(block(), path, reader(ours, tokens()), form, per_channel=True)
    check_near(path, block(), tokens(1, seed=50)[0], 0.999)
    assert kinds(path)["MatMulInteger"] == 2 and not kinds(path)["MatMul"]
    straight = _straight()
    ours.quantize_static(straight, path, reader(ours, [{"x": normal((4, 32))}]), form)
    check_near(path, straight, {"x": normal((4, 32), seed=5)}, 0.999)
    assert kinds(path)["QLinearMatMul"] == 1 and kinds(path)["MatMulInteger"] == 1
    assert {node.domain for node in onnx.load(path).graph.node} == {""}


def _straight() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["xa"], "one"),
        helper.make_node("Relu", ["xa"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "two"),
    ]
    x, y = tensor("x", TensorProto.FLOAT, ["n", 32]), tensor("y", TensorProto.FLOAT, ["n", 16])
    return model_of(nodes, [x], [y], {"a": normal((32, 48), 0.2), "b": normal((48, 16), 0.2)})


@pytest.mark.parametrize("form", list(ours.QuantFormat))
def test_what_a_convolution_gives_as_an_output_keeps_its_name(form: Any, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["features"], "conv"),
        helper.make_node("Sigmoid", ["features"], ["gate"], "gate"),
        helper.make_node("Conv", ["gate", "v"], ["y"], "last"),
    ]
    kind = TensorProto.FLOAT
    outputs = [tensor("y", kind, ["n", 16, 4, 4]), tensor("features", kind, ["n", 16, 4, 4])]
    weights = {"w": normal((16, 16, 3, 3), 0.1), "v": normal((16, 16, 1, 1), 0.3)}
    model = model_of(nodes, [tensor("x", kind, ["n", 16, 6, 6])], outputs, weights)
    path = tmp_path / "coded.onnx"
    ours.quantize_static(model, path, reader(ours, [{"x": normal((2, 16, 6, 6))}]), form)
    written = onnx.load(path)
    assert [each.name for each in written.graph.output] == ["y", "features"]
    assert [each.type for each in written.graph.output] == [each.type for each in model.graph.output]
    assert [each.type for each in written.graph.input] == [each.type for each in model.graph.input]
    assert kinds(path)["QLinearConv"] == (2 if form is ours.QuantFormat.QOperator else 0)
    check_near(path, model, {"x": normal((2, 16, 6, 6), seed=5)}, 0.999)


def test_a_bias_behind_an_output_is_in_the_sums_own_scale(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["features"], "conv"),
        helper.make_node("Conv", ["features", "v", "b"], ["y"], "last"),
    ]
    w, v = normal((16, 16, 3, 3), 0.1), normal((16, 16, 1, 1), 0.3)
    w[0], v[:, 0] = 0, 50  # a channel that is never there has the largest weights: sums are coarse beside results
    outputs = [tensor("y", kind, ["n", 16, 4, 4]), tensor("features", kind, ["n", 16, 4, 4])]
    model = model_of(nodes, [tensor("x", kind, ["n", 16, 6, 6])], outputs, {"w": w, "v": v, "b": normal((16,))})
    path = tmp_path / "coded.onnx"
    form = ours.QuantFormat.QOperator
    ours.quantize_static(model, path, reader(ours, [{"x": normal((2, 16, 6, 6))}]), form)
    assert kinds(path)["QLinearConv"] == 2


def test_a_convolution_that_a_body_reads_too(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    bodies = {
        name: helper.make_graph(
            [helper.make_node(op, ["c"], [f"{op}.c"], op)], name, [], [tensor(f"{op}.c", kind, None)]
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Sigmoid"))
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("If", ["negated"], ["chosen"], "if", **bodies),
        helper.make_node("Add", ["c", "chosen"], ["y"], "sum"),
    ]
    inputs = [tensor("x", kind, ["n", 16, 6, 6]), tensor("negated", TensorProto.BOOL, [])]
    model = model_of(nodes, inputs, [tensor("y", kind, None)], {"w": normal((16, 16, 3, 3), 0.1)})
    path, x = tmp_path / "coded.onnx", normal((2, 16, 6, 6))
    given = reader(ours, [{"x": x, "negated": np.array(False)}])
    ours.quantize_static(model, path, given, ours.QuantFormat.QOperator, per_channel=True)
    assert kinds(path)["ConvInteger"] == 1
    check_near(path, model, {"x": x, "negated": np.array(False)}, 0.999)


@both
def test_scales_of_weights_are_of_a_tensor_or_of_channels(package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_static(conv_net(), path, reader(package, images()))
    assert {name: scale.size for name, scale in weight_scales(path).items()} == dict.fromkeys(weight_scales(path), 1)
    package.quantize_static(conv_net(), path, reader(package, images()), per_channel=True)
    sizes = {name: scale.size for name, scale in weight_scales(path).items()}
    assert sizes["first"] == 12 and sizes["third"] == 24


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_one_scale_for_weights_with_normalizations_in_them(form: str, tmp_path: Path) -> None:
    path, held = tmp_path / "coded.onnx", images(4, seed=50)
    expected = np.concatenate([results(uneven_net(), feed)["onnxruntime"] for feed in held])
    errors: dict[str, list[float]] = {}
    for package in PACKAGES:  # the other one leaves normalizations as they are
        package.quantize_static(uneven_net(), path, reader(package, images()), package.QuantFormat[form])
        assert {scale.size for scale in weight_scales(path).values()} <= {1}
        found = [results(path, feed) for feed in held]
        for runtime in found[0]:
            lost = np.concatenate([each[runtime] for each in found]) - expected
            errors.setdefault(package.__name__, []).append(float(np.linalg.norm(lost) / np.linalg.norm(expected)))
    assert max(errors["ranvier.quantization"]) < min(errors["onnxruntime.quantization"]), errors


@pytest.mark.parametrize("form", list(ours.QuantFormat))
def test_what_weights_lose_on_average_comes_off_biases(form: Any, tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["features"], "conv"),
        helper.make_node("Conv", ["features", "v"], ["y"], "last"),
        helper.make_node("MatMul", ["y", "u"], ["product"], "product"),
        helper.make_node("Add", ["product", "row"], ["z"], "row"),
    ]
    weights = {"w": normal((16, 16, 1, 1), 0.1), "b": np.full(16, 2, np.float32), "v": normal((16, 16, 1, 1), 0.1)}
    weights |= {"u": normal((16, 16), 0.1), "row": normal((16,))}
    for name in "wvu":
        weights[name].reshape(16, 16)[3, 5] = 20  # codes of all others are coarse
    shape = ["n", 16, 16, 16]
    outputs = [tensor(name, kind, shape) for name in ("z", "features", "y")]  # these are read in codes too
    model = model_of(nodes, [tensor("x", kind, shape)], outputs, weights)
    path, feed = tmp_path / "coded.onnx", {"x": 2 + normal((2, 16, 16, 16), 0.1)}
    ours.quantize_static(model, path, reader(ours, [feed]), form)
    session, coded = (ranvier.InferenceSession(each) for each in (model.SerializeToString(), str(path)))
    for name, axes in (("features", (0, 2, 3)), ("y", (0, 2, 3)), ("z", (0, 1, 2))):
        (was,), (now,) = session.run([name], feed), coded.run([name], feed)
        others = np.arange(16) != (5 if name == "z" else 3)
        assert np.abs((now - was).mean(axis=axes)[others]).max() < 0.1, name


def test_a_convolution_and_a_product_of_the_same_value(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv"),
        helper.make_node("MatMul", ["x", "u"], ["b"], "product"),
    ]
    weights = {"w": normal((8, 8, 3, 3), 0.1), "u": normal((32, 16), 0.2)}
    outputs = [tensor("a", kind, None), tensor("b", kind, None)]
    model = model_of(nodes, [tensor("x", kind, [1, 8, 8, 32])], outputs, weights)
    path, feed = tmp_path / "coded.onnx", {"x": 1 + normal((1, 8, 8, 32))}
    ours.quantize_static(model, path, reader(ours, [feed]))
    assert set(weight_scales(path)) == {"conv", "product"}
    check_near(path, model, feed, 0.999)


@pytest.mark.parametrize("given", [{"per_channel": True}, {"per_channel": True, "reduce_range": True}, {}])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(None)], ids=["some", "all"])
def test_biases_of_channels_without_weights_stay_fine(rows: slice, given: dict[str, Any], tmp_path: Path) -> None:
    weight, bias = normal((16, 32), 0.2), normal((16,), 0.01)
    weight[rows] = 0
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm", transB=1)
    x, y = tensor("x", TensorProto.FLOAT, ["n", 32]), tensor("y", TensorProto.FLOAT, ["n", 16])
    model, path = model_of([node], [x], [y], {"w": weight, "b": bias}), tmp_path / "coded.onnx"
    feed = {"x": normal((4, 32))}
    ours.quantize_static(model, path, reader(ours, [feed]), **given)
    assert set(weight_scales(path)) == {"gemm"}
    for found in results(path, feed).values():
        np.testing.assert_allclose(found[:, rows], np.broadcast_to(bias, (4, 16))[:, rows], atol=1e-3)


@both
def test_a_reduced_range_has_codes_of_seven_bits(package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    package.quantize_static(conv_net(), path, reader(package, images()), reduce_range=True, per_channel=True)
    codes = [array for array in constants(path).values() if array.dtype == np.int8 and array.ndim > 1]
    assert len(codes) == 5 and 60 < max(int(np.abs(each.astype(int)).max()) for each in codes) <= 64
    check_near(path, conv_net(), images(1, seed=50)[0], 0.998)


@both
def test_chosen_operators_and_nodes_alone(package: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"op_types_to_quantize": ["Conv"]}, {"first", "second", "third"}),
        ({"op_types_to_quantize": ["MatMul", "Gemm"]}, {"gemm", "product"}),
        ({"nodes_to_exclude": ["first", "product"]}, {"second", "third", "gemm"}),
        ({"nodes_to_quantize": ["second", "gemm"]}, {"second", "gemm"}),
        ({"nodes_to_quantize": ["second", "gemm"], "nodes_to_exclude": ["gemm"]}, {"second"}),
    ]
    for chosen, expected in cases:
        package.quantize_static(conv_net(), path, reader(package, images(2)), **chosen)
        assert set(weight_scales(path)) == expected, chosen
        check_near(path, conv_net(), images(1, seed=50)[0], 0.999)


@pytest.mark.parametrize("chosen", [{"nodes_to_exclude": ["sum"]}, {"op_types_to_quantize": ["Conv"]}])
def test_a_sum_that_is_left_out_is_not_rounded(chosen: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    ours.quantize_static(conv_net(), path, reader(ours, images(2)))
    written = onnx.load(path)
    makers = {name: node.op_type for node in written.graph.node for name in node.output}
    (around,) = [node for node in written.graph.node if node.name == "sum"]
    assert "DequantizeLinear" in {makers[name] for name in around.input}
    ours.quantize_static(conv_net(), path, reader(ours, images(2)), **chosen)
    written = onnx.load(path)
    makers = {name: node.op_type for node in written.graph.node for name in node.output}
    (around,) = [node for node in written.graph.node if node.name == "sum"]
    assert {makers[name] for name in around.input} == {"Conv", "Relu"}


def test_a_pool_that_is_left_out_gives_no_codes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "one"),
        helper.make_node("AveragePool", ["x"], ["p"], "average", kernel_shape=[3, 3]),
        helper.make_node("MaxPool", ["p"], ["m"], "largest", kernel_shape=[2, 2]),
        helper.make_node("Conv", ["m", "v"], ["b"], "two"),
        helper.make_node("Add", ["a", "b"], ["y"], "sum"),
    ]
    kind = TensorProto.FLOAT
    weights = {"w": normal((16, 16, 4, 4), 0.1), "v": normal((16, 16, 1, 1), 0.3)}
    model = model_of(nodes, [tensor("x", kind, [1, 16, 8, 8])], [tensor("y", kind, [1, 16, 5, 5])], weights)
    path = tmp_path / "coded.onnx"
    feeds = [{"x": normal((1, 16, 8, 8))}]
    ours.quantize_static(model, path, reader(ours, feeds))
    assert "p" in activation_scales(path)
    ours.quantize_static(model, path, reader(ours, feeds), nodes_to_exclude=["average"])
    assert set(activation_scales(path)) == {"x", "m"}
    check_near(path, model, feeds[0], 0.999)


def test_names_that_no_node_has_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    ours.quantize_static(conv_net(), tmp_path / "o.onnx", reader(ours, images(1)), nodes_to_exclude=["frist"])
    assert "the model has no node 'frist' (did you mean 'first'?)" in caplog.text + capsys.readouterr().err


def test_a_model_without_layers_is_written_as_it_is(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "coded.onnx"
    ours.quantize_static(conv_net(), path, reader(ours, images(1)), op_types_to_quantize=["LSTM"])
    assert kinds(path)["Conv"] == 3 and not kinds(path)["QuantizeLinear"]
    assert "no layer of this model can be quantized" in caplog.text


# -- readers ----------------------------------------------------------------------------------------------------------


def test_a_reader_is_used_to_its_end(tmp_path: Path) -> None:
    feeds = images(3)
    feeds[2]["image"] = feeds[2]["image"] * 100  # the range of the last one shows
    path = tmp_path / "coded.onnx"
    given = reader(ours, feeds)
    ours.quantize_static(conv_net(), path, given)
    assert given.get_next() is None
    reach = max(float(np.ptp(np.append(feed["image"], 0))) for feed in feeds)
    assert activation_scales(path)["image"] == pytest.approx(reach / 255, rel=1e-5)
    with pytest.raises(InvalidInput, match="gave no samples"):
        ours.quantize_static(conv_net(), path, given)


def test_any_object_with_get_next_is_a_reader(tmp_path: Path) -> None:
    class Plain:
        left = 2

        def get_next(self) -> Any:
            self.left -= 1
            return images(1)[0] if self.left >= 0 else None

    assert isinstance(Plain(), ours.CalibrationDataReader)
    ours.quantize_static(conv_net(), tmp_path / "coded.onnx", Plain())  # type: ignore[arg-type]
    assert kinds(tmp_path / "coded.onnx")["QuantizeLinear"]
    assert len(list(reader(ours, images(2)))) == 2


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([], "gave no samples"),
        ([{"imgae": normal((2, 3, 8, 8))}], r"sample 0: the model has no input 'imgae' \(did you mean 'image'"),
        ([images(1)[0], {}], ""),
        ([images(1)[0], {"image": normal((2, 4, 8, 8))}], "image"),
        ([images(1)[0], [1]], "sample 1 must be a dict"),
    ],
)
def test_samples_that_do_not_fit(feeds: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    if not message:  # what is empty is the end
        ours.quantize_static(conv_net(), path, reader(ours, feeds))
        return
    with pytest.raises(ValueError, match=message):
        ours.quantize_static(conv_net(), path, reader(ours, feeds))
    assert not path.exists()


def test_a_sample_of_another_shape_is_named(tmp_path: Path) -> None:
    feeds = [images(1)[0], {"image": normal((2, 4, 8, 8))}]
    with pytest.raises(ShapeMismatch, match=r"input 'image': expected float32\[n, 3, 8, 8\]") as caught:
        ours.quantize_static(conv_net(), tmp_path / "o.onnx", reader(ours, feeds))
    assert caught.value.__notes__ == ["sample 1"]


@pytest.mark.parametrize("shapes", [[(1, 3, 8, 8), (1, 4, 8, 8)], [(1, 4, 8, 8)], [(3,)]])
def test_samples_with_other_channels_than_a_layer_reads(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    kind, node = TensorProto.FLOAT, helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    model = model_of([node], [tensor("x", kind, None)], [tensor("y", kind, None)], {"w": normal((32, 3, 3, 3))})
    with pytest.raises(InvalidInput, match="node 'conv' reads 3 channels, a sample of 'x' has"):
        ours.quantize_static(model, tmp_path / "o.onnx", reader(ours, [{"x": normal(shape)} for shape in shapes]))


def test_an_input_that_samples_lack_is_named(tmp_path: Path) -> None:
    kind = TensorProto.FLOAT
    nodes = [helper.make_node("Add", ["x", "z"], ["s"], "s"), helper.make_node("MatMul", ["s", "w"], ["y"], "p")]
    inputs = [tensor("x", kind, ["n", 32]), tensor("z", kind, ["n", 32])]
    model = model_of(nodes, inputs, [tensor("y", kind, ["n", 32])], {"w": normal((32, 32))})
    with pytest.raises(InvalidInput, match="sample 0 lacks the inputs 'z'"):
        ours.quantize_static(model, tmp_path / "o.onnx", reader(ours, [{"x": normal((1, 32))}]))


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    model = conv_net()
    broken = onnx.numpy_helper.from_array(np.full((32, 10), np.nan, np.float32), "w5")
    model.graph.initializer[7].CopyFrom(broken)
    with pytest.raises(InvalidConfig) as caught:
        ours.quantize_static(model, tmp_path / "o.onnx", reader(ours, images(1)))
    assert "weights of node 'product'; nodes_to_exclude leaves a node as it is" in caught.value.__notes__
    ours.quantize_static(model, tmp_path / "o.onnx", reader(ours, images(1)), nodes_to_exclude=["product"])


@pytest.mark.parametrize("given", [None, 5, [1]])
def test_what_is_no_reader(given: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="calibration_data_reader must have a method get_next"):
        ours.quantize_static(conv_net(), tmp_path / "coded.onnx", given)


# -- files ------------------------------------------------------------------------------------------------------------


def test_weights_beside_the_model(tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    ours.quantize_static(conv_net(), path, reader(ours, images(1)), use_external_data_format=True)
    assert (tmp_path / "coded.onnx.data").stat().st_size > 1000
    check_near(path, conv_net(), images(1, seed=50)[0], 0.998)


def test_a_message_is_not_changed_and_a_file_may_be_replaced(tmp_path: Path) -> None:
    model = conv_net()
    before = model.SerializeToString()
    path = tmp_path / "model.onnx"
    ours.quantize_static(model, path, reader(ours, images(1)))
    assert model.SerializeToString() == before
    onnx.save(model, path)
    ours.quantize_static(path, path, reader(ours, images(1)))
    assert kinds(path)["QuantizeLinear"]


def test_places_that_cannot_be_written_are_refused_before_samples_are_read(tmp_path: Path) -> None:
    given = reader(ours, images(1))
    for target in (tmp_path, tmp_path / "absent" / "o.onnx"):
        with pytest.raises(InvalidConfig, match="model_output"):
            ours.quantize_static(conv_net(), target, given)
    with pytest.raises(InvalidConfig, match="model_input must be a path or a ModelProto, got bytes"):
        ours.quantize_static(b"", tmp_path / "o.onnx", given)
    assert given.get_next() is not None


def test_providers_look_at_samples(tmp_path: Path) -> None:
    path = tmp_path / "coded.onnx"
    ours.quantize_static(conv_net(), path, reader(ours, images(1)), calibration_providers=["CPUExecutionProvider"])
    assert kinds(path)["QuantizeLinear"]
    with pytest.raises(ValueError, match="a provider is a name"):
        ours.quantize_static(conv_net(), path, reader(ours, images(1)), calibration_providers=[5])
