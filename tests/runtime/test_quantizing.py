"""Quantized models: that other runtimes read them, that they are what they say, that bad ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, InvalidInput, NotSupported
from ranvier.formats.onnx import read, save
from ranvier.formats.onnx.retarget import retarget
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType
from ranvier.runtime.quantizing import NotWorthIt, Quantization, Quantizer, feeds_of, prepared
from ranvier.runtime.quantizing.options import ALL_SCHEMES
from ranvier.runtime.quantizing.report import told_below
from ranvier.runtime.session import Session
from tests.exact_peer import exact

Array = np.ndarray[Any, Any]
CONFIG = SessionConfig(threads=1)
SLOW = 1e9  # speed is no matter here


def model(path: Path, opset: int = 17) -> Path:
    """Two convolutions with a sum around them, a pool, two products."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((16, 3, 3, 3)) * 0.2,
        "b1": rng.standard_normal(16) * 0.1,
        "w2": rng.standard_normal((16, 16, 3, 3)) * 0.1,
        "w3": rng.standard_normal((16, 64)) * 0.2,
        "b3": rng.standard_normal(64) * 0.1,
        "w4": rng.standard_normal((64, 10)) * 0.2,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c2", "r1"], ["s"], "sum"),
        helper.make_node("Relu", ["s"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["g"], "dense1"),
        helper.make_node("Relu", ["g"], ["r3"], "relu3"),
        helper.make_node("MatMul", ["r3", "w4"], ["y"], "dense2"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 10])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


@pytest.fixture
def data() -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal((32, 3, 8, 8)).astype(np.float32)}


def quantized(path: Path, data: dict[str, Array], **options: Any) -> tuple[Any, Any]:
    graph = prepared(model(path), CONFIG)
    settings = {"slower": SLOW, **options}
    return Quantizer(graph, feeds_of(graph, data), Quantization(**settings), CONFIG).run()


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_other_runtimes_read_it(tmp_path: Path, data: dict[str, Array], scheme: str) -> None:
    graph, report = quantized(tmp_path / "m.onnx", data, scheme=scheme, group=16)
    save(graph, tmp_path / "q.onnx")
    feed = {"x": data["x"][:8]}
    theirs = exact(tmp_path / "q.onnx").run(None, feed)[0]
    with Session(tmp_path / "q.onnx", CONFIG) as session:
        ours = next(iter(session.run(feed).values()))
    with Session(tmp_path / "m.onnx", CONFIG) as session:
        original = next(iter(session.run(feed).values()))
    scale = np.abs(original).max()
    assert np.abs(ours - theirs).max() < (0.02 if scheme == "int8" else 1e-4) * scale  # a step of a code, or rounding
    bound = {"ternary": 1.5, "int2": 1.0, "uint2": 1.0}.get(scheme, 0.25)
    assert report.difference.error < bound and np.linalg.norm(ours - original) < bound * np.linalg.norm(original)
    assert report.bytes_after < report.bytes_before
    coded = {layer.name: layer for layer in report.layers if layer.scheme == scheme}
    convolutions = {"int8": {"conv1", "conv2"}, "int8_dynamic": {"conv2"}}.get(scheme, set())
    assert set(coded) == {"dense1", "dense2"} | convolutions
    assert all(layer.error is not None and layer.bytes_after < layer.bytes_before for layer in coded.values())


def test_int8_stays_in_8_bits_between_layers(tmp_path: Path, data: dict[str, Array]) -> None:
    graph, _ = quantized(tmp_path / "m.onnx", data)
    reads = {node.name: [v.producer.op for v in node.inputs if v is not None and v.producer] for node in graph}
    for name in ("conv1", "conv2", "pool", "dense1", "dense2"):
        assert set(reads[name]) <= {"DequantizeLinear", "Flatten"}, name
    assert reads["sum"] == ["Conv", "DequantizeLinear"], "a layer adds before it rounds"
    assert reads["relu1"] == ["Conv"], "codes are made after the activation"


@pytest.mark.parametrize("ranges", ["minmax", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("signed", [False, True])
def test_ways_to_find_ranges(tmp_path: Path, data: dict[str, Array], ranges: str, signed: bool) -> None:
    _, report = quantized(tmp_path / "m.onnx", data, ranges=ranges, signed=signed)
    assert report.difference.cosine > 0.98


def test_layers_that_hurt_stay_in_float(tmp_path: Path, data: dict[str, Array]) -> None:
    _, loose = quantized(tmp_path / "m.onnx", data, scheme="int2", group=16)
    _, tight = quantized(tmp_path / "m.onnx", data, scheme="int2", group=16, max_error=loose.difference.error * 0.9)
    assert tight.difference.error <= loose.difference.error * 0.9
    assert [layer.reason for layer in tight.layers].count("it hurt the results") >= 1


def test_layers_by_name(tmp_path: Path, data: dict[str, Array]) -> None:
    _, report = quantized(tmp_path / "m.onnx", data, keep=("conv*",))
    assert {layer.name: layer.reason for layer in report.layers if layer.reason} == dict.fromkeys(
        ("conv1", "conv2"), "asked for"
    )
    with pytest.raises(InvalidConfig, match="no layer is called 'convv'"):
        quantized(tmp_path / "m.onnx", data, keep=("convv",))


def test_what_is_not_worth_it_is_refused(tmp_path: Path, data: dict[str, Array]) -> None:
    graph = prepared(model(tmp_path / "m.onnx"), CONFIG)
    feeds = feeds_of(graph, data, 2)
    quantizer = Quantizer(graph, feeds, Quantization("int4", group=16, slower=1e-6), CONFIG)
    with pytest.raises(NotWorthIt, match="times as long was asked for") as refused:
        quantizer.run()
    assert refused.value.report.speedup > 0
    made, report = quantizer.run(force=True)
    assert report.problems and len(made)


def test_samples(tmp_path: Path, data: dict[str, Array]) -> None:
    graph = prepared(model(tmp_path / "m.onnx"), CONFIG)
    assert [len(feed["x"]) for feed in feeds_of(graph, data)] == [2] * 16
    with pytest.raises(InvalidInput, match="lack the inputs 'x'"):
        feeds_of(graph, {"y": data["x"]})
    with pytest.raises(InvalidConfig, match="needs samples"):
        Quantizer(graph, [], Quantization("int8"), CONFIG)
    fixed = Graph(opsets={"": 21})
    for name in ("a", "b"):
        fixed.add_input(name, TensorType(DType.float32, (2, 3)))
    both = {"a": np.zeros((8, 3)), "b": np.zeros((8, 3))}
    assert len(feeds_of(fixed, both)) == 4
    assert len(feeds_of(fixed, {**both, "b": np.zeros((2, 3))})) == 4, "one sample serves all runs"
    with pytest.raises(InvalidInput, match="'a' for 4, 'b' for 3"):
        feeds_of(fixed, {**both, "b": np.zeros((6, 3))})
    _, report = Quantizer(graph, [], Quantization("int4", group=16), CONFIG).run()
    assert report.samples == 0 and report.bytes_after < report.bytes_before


def test_old_models_come_out_in_an_opset_that_others_have(tmp_path: Path, data: dict[str, Array]) -> None:
    graph = prepared(model(tmp_path / "old.onnx", opset=11), CONFIG)
    made, _ = Quantizer(graph, feeds_of(graph, data), Quantization(slower=SLOW), CONFIG).run()
    save(made, tmp_path / "q.onnx")
    assert onnx.load(tmp_path / "q.onnx").opset_import[0].version == 21
    onnxruntime.InferenceSession(str(tmp_path / "q.onnx")).run(None, {"x": data["x"][:1]})


def test_what_is_new_has_no_older_form(tmp_path: Path) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=10, saturate=0)
    x, y = (helper.make_tensor_value_info(n, t, [2]) for n, t in (("x", 1), ("y", 10)))
    proto = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 21)])
    graph = read(proto)
    with pytest.raises(NotSupported, match="attribute saturate"):
        retarget(graph, 13)
    retarget(graph, 19)
    assert graph.nodes[0].version == 19 and graph.opsets[""] == 19


def test_operators_of_the_first_opset_have_words_in_later_ones() -> None:
    nodes = [
        helper.make_node("ImageScaler", ["x"], ["s"], scale=0.5, bias=[1.0, -2.0, 3.0]),
        helper.make_node("Affine", ["s"], ["a"], alpha=2.0, beta=-1.0),
        helper.make_node("Crop", ["a"], ["y"], border=[1, 2, 3, 0]),
        helper.make_node("Crop", ["a"], ["z"], border=[1, 2, 0, 0], scale=[3, 4]),
    ]
    x, *ends = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [1, 3, 8, 9]), ("y", None), ("z", None)))
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], ends), opset_imports=[helper.make_opsetid("", 5)])
    graph = prepared(read(proto), CONFIG)
    assert not {"ImageScaler", "Affine", "Crop"} & {node.op for node in graph}
    array = np.random.default_rng(0).standard_normal((1, 3, 8, 9)).astype(np.float32)
    whole = (array * 0.5 + np.array([1.0, -2.0, 3.0], np.float32).reshape(3, 1, 1)) * 2 - 1
    with Session(graph, CONFIG) as session:
        found = session.run({"x": array})
    np.testing.assert_allclose(found["y"], whole[:, :, 2:, 1:6], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["z"], whole[:, :, 2:5, 1:5], rtol=1e-5, atol=1e-6)


def of_old(opset: int, node: Any, **weights: Array) -> Any:
    """A layer, its result in a shape that comes with the run, and a node of an old opset that reads it as ``u``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "layer"),
        helper.make_node("Reshape", ["a", "shape"], ["u"]),
        node,
    ]
    numbers = {"w": np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32), **weights}
    inputs = (("x", 1, [2, 32]), ("shape", 7, ["rank"]), ("i", 7, [4]))
    net = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in numbers.items()],
    )
    return helper.make_model(net, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)


OLD_FEED = {
    "x": np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32),
    "shape": np.array([2, 4, 6]),
    "i": np.array([-1, 2, 3, -9]),
}


@pytest.mark.parametrize(
    "proto",
    [
        *(
            of_old(9, helper.make_node(op, ["u"], ["y"], **axis))
            for op in ("Softmax", "LogSoftmax", "Hardmax")
            for axis in ({}, {"axis": 0}, {"axis": 1}, {"axis": 2})
        ),
        of_old(11, helper.make_node("Softmax", ["u"], ["y"], axis=-2)),
        of_old(
            *(9, helper.make_node("OneHot", ["i", "d", "v"], ["y"])),
            d=np.array([3]),
            v=np.array([0.0, 1.0], np.float32),
        ),
    ],
    ids=lambda proto: "-".join([proto.graph.node[2].op_type, *(str(each.i) for each in proto.graph.node[2].attribute)]),
)
def test_what_an_old_opset_meant_stays_where_ranks_come_with_the_run(proto: Any) -> None:
    config = CONFIG.updated(providers=("reference",))
    with Session(read(proto), config) as session:
        expected = session.run(OLD_FEED)["y"]
    graph = prepared(read(proto), config)
    assert graph.opsets[""] == 21
    with Session(graph, config) as session:
        np.testing.assert_allclose(session.run(OLD_FEED)["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "opset, node, weights, why",
    [
        (18, ("GroupNormalization", {"num_groups": 2}), {"s": (2,), "b": (2,)}, "number of channels is unknown"),
        (6, ("PRelu", {}), {"s": (4,)}, "rank of the operand is unknown"),
        (6, ("Add", {"broadcast": 1, "axis": 1}), {"s": (4,)}, "rank of the operand is unknown"),
        (6, ("Dropout", {}), {}, "it drops at random"),
    ],
)
def test_what_would_mean_something_else_is_refused(
    opset: int, node: tuple[str, dict[str, Any]], weights: dict[str, tuple[int, ...]], why: str
) -> None:
    op, attrs = node
    arrays = {name: np.ones(shape, np.float32) for name, shape in weights.items()}
    graph = read(of_old(opset, helper.make_node(op, ["u", *weights], ["y"], "last", **attrs), **arrays))
    with pytest.raises(NotSupported, match=rf"node 'last' \({op}\) has no form in opset 21") as caught:
        prepared(graph, CONFIG)
    assert why in caught.value.__notes__[0]


@pytest.mark.parametrize("rest", ["float32", "bf16"])
def test_a_convolution_and_a_product_of_the_same_value(tmp_path: Path, rest: str) -> None:
    """They take other axes for channels."""
    rng, kind = np.random.default_rng(5), onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv"),
        helper.make_node("MatMul", ["x", "u"], ["b"], "product"),
    ]
    weights = {"w": rng.normal(0, 0.1, (16, 8, 3, 3)), "u": rng.normal(0, 0.2, (32, 16))}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [1, 8, 8, 32])],
        [helper.make_tensor_value_info(name, kind, None) for name in "ab"],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    samples = {"x": (1 + rng.normal(size=(6, 8, 8, 32))).astype(np.float32)}
    found = prepared(path, CONFIG)
    _, report = Quantizer(
        found, feeds_of(found, samples), Quantization(scheme="int8", rest=rest, slower=SLOW), CONFIG
    ).run()
    assert report.difference.error < 0.05 and len(report.layers) == 2


@pytest.mark.parametrize(
    ("value", "limit", "told"),
    [
        (0.9981234567, 0.999, "0.998123"),
        (0.99999999, 1.0, "0.99999999"),
        (float(np.nextafter(1, 0)), 1.0, "0.9999999999999999"),
        (-0.5, 0.999, "-0.500000"),
        (float("nan"), 0.999, "nan"),
    ],
)
def test_what_is_below_a_limit_is_told_so_that_it_shows(value: float, limit: float, told: str) -> None:
    assert told_below(value, limit) == told
