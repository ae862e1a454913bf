"""ONNX in and out: every kind of source, every place weights can be, every element type."""

from __future__ import annotations

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.dtypes import DType
from ranvier.errors import IntegrityError, InvalidModel, NotSupported, ResourceLimit, WeightError
from ranvier.formats import onnx as onnx_format
from ranvier.graph import TensorType, verify

OPSET = [helper.make_opsetid("", 21)]


def info(name: str, kind: int = TensorProto.FLOAT, shape: object = ("n", 4)):
    return helper.make_tensor_value_info(name, kind, shape)


def linear(weights: np.ndarray | None = None) -> onnx.ModelProto:
    """y = relu(x · w), with w large enough to be cut out of the file."""
    weights = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32) if weights is None else weights
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"), helper.make_node("Relu", ["h"], ["y"])]
    graph = helper.make_graph(
        nodes, "linear", [info("x")], [info("y", shape=("n", 512))], [numpy_helper.from_array(weights, "w")]
    )
    model = helper.make_model(graph, opset_imports=OPSET, producer_name="tests", ir_version=10)
    model.metadata_props.add(key="author", value="somebody")
    return model


X = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)


def expected(model: onnx.ModelProto) -> np.ndarray:
    return np.maximum(X @ numpy_helper.to_array(model.graph.initializer[0]), 0)


def test_every_kind_of_source(tmp_path: Path) -> None:
    model = linear()
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    sources = [path, str(path), path.read_bytes(), bytearray(path.read_bytes()), model, io.BytesIO(path.read_bytes())]
    with path.open("rb") as file:
        for source in [*sources, file]:
            np.testing.assert_allclose(rv.load(source).run({"x": X})["y"], expected(model), rtol=1e-5, atol=1e-6)
    assert model == linear(), "the caller's message is not changed"
    for suffix in ("onnxtxt", "textproto", "json"):
        text = tmp_path / f"m.{suffix}"
        onnx.save(model, text)
        np.testing.assert_allclose(rv.load(text).run({"x": X})["y"], expected(model), rtol=1e-4, atol=1e-5)


def test_weights_stay_in_the_file_until_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(linear().SerializeToString())
    graph = onnx_format.read(path)
    tensor = graph.constants["w"].const
    assert not tensor.is_loaded and tensor.source == "the model file"
    array = tensor.numpy()
    assert not array.flags.owndata and not array.flags.writeable  # a view of the mapped file
    np.testing.assert_array_equal(array, numpy_helper.to_array(linear().graph.initializer[0]))


def test_model_facts_and_types() -> None:
    graph = onnx_format.read(linear())
    verify(graph)
    assert graph.metadata["producer_name"] == "tests" and graph.metadata["custom"] == {"author": "somebody"}
    assert str(graph.outputs[0].type) == "float32[n, 512]"
    assert [n.version for n in graph] == [13, 14]


# -- external data --------------------------------------------------------------------------------------------------


def external(tmp_path: Path, **changes: str) -> Path:
    model = linear()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    entries = {e.key: e.value for e in model.graph.initializer[0].external_data} | changes
    del model.graph.initializer[0].external_data[:]
    for key, value in entries.items():
        model.graph.initializer[0].external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "m.onnx"


def test_external_data_is_mapped(tmp_path: Path) -> None:
    path = external(tmp_path)
    np.testing.assert_allclose(rv.load(path).run({"x": X})["y"], expected(linear()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        rv.load(path.read_bytes(), base_dir=tmp_path).run({"x": X})["y"], expected(linear()), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(WeightError, match="base_dir"):
        rv.load(path.read_bytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"location": "../secret"}, "inside the model's folder"),
        ({"location": "/etc/passwd"}, "inside the model's folder"),
        ({"location": "missing.bin"}, "does not exist"),
        ({"location": ""}, "inside the model's folder"),
        ({"offset": "100"}, "bytes 100 to"),
        ({"offset": "-8"}, "bytes -8 to"),
        ({"offset": "many"}, "not a number"),
    ],
)
def test_bad_external_data(tmp_path: Path, change: dict[str, str], message: str) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 8192)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(WeightError, match=message):
        rv.load(external(folder, **change))


def test_a_link_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external(folder)
    (folder / "w.bin").rename(tmp_path / "outside.bin")
    (folder / "w.bin").symlink_to(tmp_path / "outside.bin")
    with pytest.raises(WeightError, match="outside the model's folder"):
        rv.load(path)


def test_links_into_a_shared_store_work_when_the_model_is_one_too(tmp_path: Path) -> None:
    """The layout of content-addressed caches: both files are links to blobs in one folder."""
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    external(store)
    (snapshot / "m.onnx").symlink_to(store / "m.onnx")
    (snapshot / "w.bin").symlink_to(store / "w.bin")
    np.testing.assert_allclose(
        rv.load(snapshot / "m.onnx").run({"x": X})["y"], expected(linear()), rtol=1e-5, atol=1e-6
    )


def test_a_wrong_checksum_is_found(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="checksum"):
        rv.load(external(tmp_path, checksum="0" * 40)).run({"x": X})


def test_saving_with_external_data(tmp_path: Path) -> None:
    graph = onnx_format.read(linear())
    onnx_format.save(graph, tmp_path / "out.onnx", external_data=True)
    assert (tmp_path / "out.onnx.data").stat().st_size == 4 * 512 * 4
    np.testing.assert_allclose(
        rv.load(tmp_path / "out.onnx").run({"x": X})["y"], expected(linear()), rtol=1e-5, atol=1e-6
    )
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]


def test_a_model_over_two_gigabytes_of_weights_through_external_data(tmp_path: Path) -> None:
    """The file is sparse, and only the few rows that are used are ever read."""
    rows = (1 << 31) // (4 * 256) + 8
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(rows * 256 * 4)
        file.seek((rows - 1) * 256 * 4)
        file.write(np.full(256, 3, np.float32).tobytes())
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, 256], data_location=TensorProto.EXTERNAL)
    table.external_data.add(key="location", value="big.bin")
    node = helper.make_node("Gather", ["table", "i"], ["y"])
    graph = helper.make_graph(
        [node], "big", [info("i", TensorProto.INT64, ["k"])], [info("y", shape=["k", 256])], [table]
    )
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, opset_imports=OPSET, ir_version=10).SerializeToString())
    out = rv.load(tmp_path / "m.onnx").run({"i": np.array([rows - 1, 0])})["y"]
    assert out[0].sum() == 3 * 256 and out[1].sum() == 0


# -- element types and other kinds of values ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_element_type_goes_in_and_out(dtype: DType) -> None:
    if dtype is DType.string:
        array = np.array(["a", "b", "ç"] * 3, dtype=object)
    elif dtype is DType.bool:
        array = np.array([True, False, True] * 3)
    else:  # more than fit where each of fewer bits has a byte
        array = np.array([1, 0 if dtype is not DType.float8_e8m0fnu else 2, 1] * 3).astype(dtype.numpy)
    tensor = (
        helper.make_tensor("c", TensorProto.STRING, [9], [s.encode() for s in array])
        if dtype is DType.string
        else numpy_helper.from_array(array, "c")
    )
    node = helper.make_node("Identity", ["c"], ["y"])
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", dtype.onnx, [9])], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    for source in (model, onnx_format.to_proto(onnx_format.read(model))):
        out = rv.load(source).run({})["y"]
        assert out.dtype == array.dtype
        np.testing.assert_array_equal(out, array)


def test_packed_types_in_external_files(tmp_path: Path) -> None:
    array = np.arange(-8, 8).astype(ml_dtypes.int4).repeat(401)[:6401]
    node = helper.make_node("Cast", ["c"], ["y"], to=TensorProto.INT32)
    tensor = numpy_helper.from_array(array, "c")
    graph = helper.make_graph([node], "g", [], [info("y", TensorProto.INT32, [6401])], [tensor])
    model = helper.make_model(graph, opset_imports=OPSET)
    onnx_format.save(onnx_format.read(model), tmp_path / "m.onnx", external_data=True)
    assert (tmp_path / "m.onnx.data").stat().st_size == 3201
    np.testing.assert_array_equal(rv.load(tmp_path / "m.onnx").run({})["y"], array.astype(np.int32))


def test_sparse_initializers() -> None:
    for indices in (np.array([1, 5]), np.array([[0, 1], [1, 2]])):
        values = numpy_helper.from_array(np.float32([7, 9]), "s")
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "i"), [2, 3])
        node = helper.make_node("Identity", ["s"], ["y"])
        graph = helper.make_graph([node], "g", [], [info("y", shape=[2, 3])], sparse_initializer=[sparse])
        out = rv.load(helper.make_model(graph, opset_imports=OPSET)).run({})["y"]
        np.testing.assert_array_equal(out, np.float32([[0, 7, 0], [0, 0, 9]]))


FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
agraph (float[n] x) => (float[n] y) { h = local.twice(x) y = local.shift <by = 3.0> (h) }
<domain: "local", opset_import: ["" : 21]>
twice (a) => (b) { b = Add(a, a) }
<domain: "local", opset_import: ["" : 21, "local" : 1]>
shift <by> (a) => (b) { c = local.twice(a) v = Constant <value_float: float = @by> () b = Add(c, v) }
"""


def test_functions_are_inlined() -> None:
    graph = onnx_format.read(onnx.parser.parse_model(FUNCTIONS))
    assert {n.op for n in graph} == {"Add"}
    out = rv.load(onnx.parser.parse_model(FUNCTIONS)).run({"x": np.float32([1, 2])})["y"]
    np.testing.assert_array_equal(out, np.float32([7, 11]))


def test_initializers_as_inputs() -> None:
    """From IR version 4 on an initializer that is also an input is a default; before, it is a constant."""
    for ir_version, overridable in ((3, False), (8, True)):
        model = linear()
        model.graph.input.append(info("w", shape=[4, 512]))
        model.ir_version = ir_version
        model.opset_import[0].version = 8
        session = rv.load(model)
        assert list(session.inputs) == ["x"]
        assert list(session.optional_inputs) == (["w"] if overridable else [])
        np.testing.assert_allclose(session.run({"x": X})["y"], expected(model), rtol=1e-5, atol=1e-6)
        if overridable:
            assert session.run({"x": X, "w": np.zeros((4, 512), np.float32)})["y"].sum() == 0
        exported = onnx_format.to_proto(onnx_format.read(model))
        assert list(rv.load(exported).optional_inputs) == (["w"] if overridable else [])


def test_nodes_out_of_order_still_load() -> None:
    model = linear()
    model.graph.node.append(model.graph.node.pop(0))
    np.testing.assert_allclose(rv.load(model).run({"x": X})["y"], expected(model), rtol=1e-5, atol=1e-6)


def test_outputs_that_are_inputs_constants_or_repeated() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [info("x")],
        [info("x"), info("c", shape=[1]), info("y"), info("y")],
        [numpy_helper.from_array(np.float32([5]), "c")],
    )
    with rv.load(helper.make_model(graph, opset_imports=OPSET, ir_version=10)) as session:
        out = session.run({"x": X})
        np.testing.assert_array_equal(out["x"], X)
        np.testing.assert_array_equal(out["y"], np.maximum(X, 0))
        out["c"][0] = 9  # what a caller gets is the caller's
        out["x"][0] = 9
        assert session.run({"x": X})["c"][0] == 5 and X[0, 0] != 9


# -- what is wrong is named -----------------------------------------------------------------------------------------


def broken(change) -> onnx.ModelProto:
    model = linear()
    change(model.graph)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: g.node[0].input.__setitem__(0, "ghost"),
            "'ghost' is not defined",
        ),
        (lambda g: g.node[1].output.__setitem__(0, "h"), "'h' is already taken"),
        (lambda g: g.output[0].__setattr__("name", "ghost"), "output 'ghost' is not defined"),
        (lambda g: g.node[0].input.append("x"), "takes 2 inputs, got 3"),
        (lambda g: g.initializer.append(g.initializer[0]), "two initializers are named 'w'"),
        (lambda g: g.input.append(g.input[0]), "two inputs are named 'x'"),
        (lambda g: g.initializer[0].dims.append(3), "takes 24576 bytes, its data has 8192"),
        (lambda g: g.initializer[0].dims.__setitem__(0, -4), "negative size"),
        (lambda g: setattr(g.initializer[0], "data_type", 77), "unknown element type 77"),
        (lambda g: g.node[0].input.__setitem__(0, "y"), "cycle"),
        (lambda g: setattr(g.node[0], "op_type", "Concat"), "required attribute 'axis' is missing"),
    ],
)
def test_broken_models_name_what_is_wrong(change, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        rv.load(broken(change))


def test_limits() -> None:
    model = linear()
    for limits, name in (
        (rv.Limits(model_bytes=100), "model_bytes"),
        (rv.Limits(tensor_bytes=1000), "tensor_bytes"),
        (rv.Limits(graph_nodes=1), "graph_nodes"),
    ):
        with pytest.raises(ResourceLimit, match=name) as caught:
            rv.load(model.SerializeToString(), limits=limits)
        assert caught.value.limit == name and caught.value.actual > caught.value.allowed


def test_an_unknown_opset_says_what_is_known() -> None:
    model = linear()
    model.opset_import[0].version = 999
    with pytest.raises(NotSupported, match="opset 999"):
        rv.load(model)


def test_symbolic_dims() -> None:
    session = rv.load(linear(), symbol_bounds={"n": (1, 3)})
    assert session.inputs["x"] == TensorType(DType.float32, (session.graph.symbols["n"], 4))
    with pytest.raises(rv.errors.ShapeMismatch, match="outside its bounds"):
        session.run({"x": np.zeros((4, 4), np.float32)})


def test_nodes_have_names_of_their_own_in_a_file() -> None:
    """Those of the model keep theirs, wherever they stand; who has none needs none."""
    graph = onnx_format.read(
        helper.make_model(
            helper.make_graph(
                [helper.make_node("Neg", ["x"], ["a"], "n"), helper.make_node("Abs", ["a"], ["y"], "n")],
                "g",
                [helper.make_tensor_value_info("x", 1, [2])],
                [helper.make_tensor_value_info("y", 1, [2])],
            )
        )
    )
    first, last = graph.nodes
    made = [
        graph.add("Neg", [first.inputs[0]], version=13, name=name, origin="test", before=first) for name in ("n", "")
    ]
    for node in made:
        node.output.type = last.output.type
    last.set_input(0, made[0].output)
    assert [node.name for node in onnx_format.to_proto(graph).graph.node] == ["n.2", "", "n", "n.1"]
