"""Models that break the rules, or keep them in bad faith: each is refused, with the reason and the place."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.errors import InvalidModel, NotSupported, RanvierError, ResourceLimit, UnsupportedOp, WeightError
from tests.faults.models import function, info, model, nested_ifs

Change = Callable[[ModelProto], Any]


def linear() -> ModelProto:
    """y = relu(x · w)."""
    made = model(
        "linear (float[n, 2] x) => (float[n, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> "
        "{ h = MatMul(x, w) y = Relu(h) }"
    )
    made.graph.node[0].name, made.graph.node[1].name = "product", "positive"
    return made


def change(where: Callable[[ModelProto], Any], **values: Any) -> Change:
    def apply(made: ModelProto) -> None:
        for name, value in values.items():
            setattr(where(made), name, value)

    return apply


def at(where: Callable[[ModelProto], Any], key: int, value: Any) -> Change:
    return lambda made: where(made).__setitem__(key, value)


# -- names, cycles, counts ------------------------------------------------------------------------------------------

STRUCTURE: dict[str, tuple[Change, str]] = {
    "an operand that is not there": (
        at(lambda m: m.graph.node[0].input, 0, "ghost"),
        r"node 'product' \(MatMul\): input 'ghost' is not defined",
    ),
    "a required operand left out": (
        at(lambda m: m.graph.node[0].input, 0, ""),
        r"node 'product' \(MatMul\): input 'A' is required and has no name",
    ),
    "a cycle of two nodes": (at(lambda m: m.graph.node[0].input, 0, "y"), "'linear' has a cycle through 'product'"),
    "a node that reads its own result": (
        at(lambda m: m.graph.node[1].input, 0, "y"),
        "'linear' has a cycle through 'positive'",
    ),
    "a name defined twice": (
        at(lambda m: m.graph.node[1].output, 0, "h"),
        r"node 'positive' \(Relu\): the name 'h' is already taken",
    ),
    "a result named like an input": (
        at(lambda m: m.graph.node[1].output, 0, "x"),
        r"node 'positive' \(Relu\): the name 'x' is already taken",
    ),
    "two inputs of one name": (
        lambda m: m.graph.input.append(m.graph.input[0]),
        "graph 'linear': two inputs are named 'x'",
    ),
    "two initializers of one name": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]),
        "graph 'linear': two initializers are named 'w'",
    ),
    "an input without a name": (change(lambda m: m.graph.input[0], name=""), "an input has no name"),
    "an initializer without a name": (change(lambda m: m.graph.initializer[0], name=""), "initializer 0 has no name"),
    "an output that is not there": (change(lambda m: m.graph.output[0], name="ghost"), "output 'ghost' is not defined"),
    "no graph at all": (lambda m: m.ClearField("graph"), "holds no graph"),
    "too many operands": (
        lambda m: m.graph.node[1].input.append("x"),
        r"node 'positive' \(Relu\): takes 1 inputs, got 2",
    ),
    "too few results": (lambda m: m.graph.node[1].ClearField("output"), "has 1 outputs, the model lists 0"),
    "an unknown element type": (
        change(lambda m: m.graph.input[0].type.tensor_type, elem_type=99),
        "value 'x': unknown ONNX element type 99",
    ),
    "more axes than an array can have": (
        lambda m: m.graph.input[0].type.tensor_type.shape.dim.extend(
            onnx.TensorShapeProto.Dimension(dim_value=1) for _ in range(70)
        ),
        "value 'x': 72 dimensions; at most 64 are possible",
    ),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_broken_structure(case: str) -> None:
    damage, message = STRUCTURE[case]
    made = linear()
    damage(made)
    with pytest.raises(InvalidModel, match=message):
        rv.load(made)
    with pytest.raises(InvalidModel, match=message):
        rv.load(made.SerializeToString(), optimization="none")


def test_a_cycle_through_a_body() -> None:
    made = model(
        "g (bool c, float[n] x) => (float[n] y) { y = If (c) <then_branch = t () => (float[n] a) "
        "{ a = Neg(y) }, else_branch = e () => (float[n] b) { b = Abs(x) }> }"
    )
    with pytest.raises(InvalidModel, match="cycle through 'y'"):
        rv.load(made)


def test_unknown_operators_are_listed_all_at_once() -> None:
    made = linear()
    made.graph.node[0].op_type, made.graph.node[1].op_type = "Teleport", "Levitate"
    with pytest.raises(UnsupportedOp, match=r"2 unsupported(.|\n)*Teleport-21 at 'product'(.|\n)*Levitate-21"):
        rv.load(made)


@pytest.mark.parametrize("version", [0, -1, 999, 2**63 - 1])
def test_opsets_that_do_not_exist(version: int) -> None:
    made = linear()
    made.opset_import[0].version = version
    with pytest.raises(NotSupported, match=f"opset {version}"):
        rv.load(made)


# -- attributes -----------------------------------------------------------------------------------------------------

ATTRIBUTES = {
    "missing": ("Concat", {}, r"node 'node' \(Concat\): required attribute 'axis' is missing"),
    "of another type": ("Concat", {"axis": 1.5}, "attribute 'axis' must be INT, got FLOAT"),
    "no element type": ("Cast", {"to": 77}, r"node 'node' \(Cast\): attribute 'to' is 77, which is no element type"),
    "a tensor in a file": (
        "ConstantOfShape",
        {"value": TensorProto(data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)},
        "external data is possible for initializers and constants only",
    ),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_broken_attributes(case: str) -> None:
    op, attributes, message = ATTRIBUTES[case]
    node = helper.make_node(op, ["x"], ["y"], name="node", **attributes)
    graph = helper.make_graph([node], "g", [info("x")], [info("y", shape=None)])
    with pytest.raises(InvalidModel, match=message):
        rv.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))


def test_an_attribute_given_twice() -> None:
    made = model("g (float[n] x) => (float[n] y) { y = LeakyRelu <alpha = 0.5> (x) }")
    made.graph.node[0].attribute.append(made.graph.node[0].attribute[0])
    with pytest.raises(InvalidModel, match="attribute 'alpha' is given twice"):
        rv.load(made)


def test_an_attribute_of_a_function_outside_one() -> None:
    made = model("g (float[n] x) => (float[n] y) { y = LeakyRelu <alpha = 0.5> (x) }")
    made.graph.node[0].attribute[0].ref_attr_name = "slope"
    with pytest.raises(InvalidModel, match="refers to a function's attribute"):
        rv.load(made)


def test_huge_attributes_are_read_and_refused_by_the_operator() -> None:
    made = model("g (float[n, m] x) => (float[?, ?] y) { y = Transpose (x) }")
    attr = made.graph.node[0].attribute.add(name="perm", type=AttributeProto.INTS)
    attr.ints.extend(reversed(range(1_000_000)))
    with rv.load(made) as session, pytest.raises(RanvierError, match="Transpose"):
        session.run({"x": np.zeros((2, 2), np.float32)})


def test_a_length_of_a_hundred_megabytes_with_nothing_behind_it() -> None:
    data = linear().SerializeToString() + b"\x3a\x80\x80\x80\x32"  # field 7 (the graph), 100 MiB
    with pytest.raises(InvalidModel, match="not an ONNX model"):
        rv.load(data)


# -- weights --------------------------------------------------------------------------------------------------------

WEIGHTS: dict[str, tuple[Change, str]] = {
    "too short": (
        lambda m: setattr(m.graph.initializer[0], "raw_data", m.graph.initializer[0].raw_data[:-1]),
        r"initializer 'w': float32\[2, 3\] takes 24 bytes, its data has 23",
    ),
    "an absurd size": (lambda m: m.graph.initializer[0].dims.__setitem__(0, 10**15), "tensor_bytes"),
    "a negative size": (lambda m: m.graph.initializer[0].dims.__setitem__(0, -2), "negative size in shape"),
    "an unknown type": (change(lambda m: m.graph.initializer[0], data_type=77), "unknown element type 77"),
    "too many axes": (lambda m: m.graph.initializer[0].dims.extend([1] * 70), "72 dimensions; at most 64"),
    "strings as bytes": (change(lambda m: m.graph.initializer[0], data_type=8), "strings cannot be stored as raw data"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_broken_weights(case: str) -> None:
    damage, message = WEIGHTS[case]
    made = linear()
    made.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((2, 3), np.float32), "w"))
    damage(made)
    with pytest.raises((InvalidModel, ResourceLimit), match=message):
        rv.load(made)


@pytest.mark.parametrize(
    ("indices", "dims", "message"),
    [
        ([1, 99], [2, 3], "indices do not fit shape"),
        ([1, -1], [2, 3], "indices do not fit shape"),
        ([[0, 1], [5, 5]], [2, 3], "indices do not fit shape"),
        ([[0, 1, 1], [0, 0, 0]], [2, 3], "indices do not fit shape"),
        ([0, 1], [10**8, 10**8], "tensor_bytes"),
        ([0, 1], [-2, 3], "negative size"),
    ],
)
def test_broken_sparse_weights(indices: list[Any], dims: list[int], message: str) -> None:
    values = numpy_helper.from_array(np.float32([7, 9]), "s")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices), "i"), [2, 3])
    sparse.dims[:] = dims
    node = helper.make_node("Identity", ["s"], ["y"])
    graph = helper.make_graph([node], "g", [], [info("y", shape=None)], sparse_initializer=[sparse])
    with pytest.raises(RanvierError, match=message):
        rv.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))


# -- files ----------------------------------------------------------------------------------------------------------

OUTSIDE = "inside the model's folder|outside the model's folder"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../secret.bin", OUTSIDE),
        ("sub/../../secret.bin", OUTSIDE),
        ("./../secret.bin", OUTSIDE),
        ("{tmp}/secret.bin", OUTSIDE),
        ("/etc/passwd", OUTSIDE),
        ("//etc/passwd", OUTSIDE),
        ("link.bin", OUTSIDE),
        ("linked/secret.bin", OUTSIDE),
        ("..", OUTSIDE),
        ("", OUTSIDE),
        ("a\0b", OUTSIDE),
        (".", "does not exist"),
        ("sub", "does not exist"),
        ("..\\secret.bin", "does not exist"),
        ("%2e%2e/secret.bin", "does not exist"),
        ("~/secret.bin", "does not exist"),
        ("file:///etc/passwd", "does not exist"),
        ("fifo", "does not exist"),
        ("n" * 5000, "cannot be used"),
        ("circle", "cannot be used|does not exist|outside"),
    ],
)
@pytest.mark.parametrize("place", ["initializer", "constant"])
def test_external_data_stays_in_the_folder(tmp_path: Path, location: str, message: str, place: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret.bin").write_bytes(b"x" * 24)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "circle").symlink_to(folder / "circle")
    os.mkfifo(folder / "fifo")
    tensor = TensorProto(name="w", data_type=1, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location.format(tmp=tmp_path))
    made = linear()
    if place == "initializer":
        made.graph.initializer[0].CopyFrom(tensor)
    else:
        del made.graph.initializer[:]
        made.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(WeightError, match=message):
        rv.load(folder / "m.onnx")


def test_external_data_of_a_constant_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.ones((2, 3), np.float32).tobytes())
    tensor = TensorProto(data_type=1, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    made = linear()
    del made.graph.initializer[:]
    made.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    out = rv.load(made, base_dir=tmp_path).run({"x": np.ones((1, 2), np.float32)})["y"]
    np.testing.assert_array_equal(out, [[2, 2, 2]])


@pytest.mark.parametrize(
    "name", ["missing.onnx", "folder", "empty.onnx", "fifo", "n" * 5000, "a\0b", "noise.onnx", "text.json", "t.onnxtxt"]
)
def test_files_that_are_no_models(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.onnx").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "noise.onnx").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "t.onnxtxt").write_text("<ir_version: 10> g (float x) => (y) { y = ")
    with pytest.raises(InvalidModel, match="model"):
        rv.load(tmp_path / name)


@pytest.mark.parametrize("source", [None, 7, 1.5, object(), [], {}, io.StringIO("text"), b"", b"\0" * 50])
def test_things_that_are_no_models(source: Any) -> None:
    with pytest.raises(InvalidModel, match="model"):
        rv.load(source)


def test_a_view_with_gaps_is_read_as_its_bytes() -> None:
    data = np.repeat(np.frombuffer(linear().SerializeToString(), np.uint8), 2)
    session = rv.load(memoryview(data)[::2])
    assert list(session.inputs) == ["x"]


# -- nesting and functions ------------------------------------------------------------------------------------------


def test_nesting_up_to_the_limit_runs_and_beyond_it_is_refused() -> None:
    inputs = {"x": np.float32([1, 2]), "c": np.array(True)}
    with rv.load(nested_ifs(40)) as session:
        np.testing.assert_array_equal(session.run(inputs)["y0"], [-1, -2])
    with pytest.raises(ResourceLimit, match="graph_depth") as caught:
        rv.load(nested_ifs(500))
    assert (caught.value.limit, caught.value.allowed, caught.value.actual) == ("graph_depth", 64, 65)


@pytest.mark.parametrize("opening", ["y = If(c) <then_branch = t () => (float[n] y) {", "seq("])
def test_deeply_nested_text(tmp_path: Path, opening: str) -> None:
    closing = "}>" if opening.endswith("{") else ")"
    (tmp_path / "m.onnxtxt").write_text(f"g (float[n] x) => (float[n] y) {{ {opening * 50_000} {closing * 50_000} }}")
    with pytest.raises(ResourceLimit, match="graph_depth"):
        rv.load(tmp_path / "m.onnxtxt")


@pytest.mark.parametrize("depth", [40, 500])
def test_a_message_deeper_than_protobuf_reads(depth: int) -> None:
    def wrapped(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(depth):
        graph = wrapped(1, wrapped(5, wrapped(6, graph)))  # a graph's node, its attribute, the attribute's graph
    with pytest.raises(InvalidModel, match="not an ONNX model"):
        rv.load(wrapped(7, graph))


FUNCTIONS = {
    "that calls itself": (
        "g (float[n] x) => (float[n] y) { y = local.f(x) }" + function("f (a) => (b) { b = local.f(a) }"),
        InvalidModel,
        "functions call themselves: 'local::f' → 'local::f'",
    ),
    "that call each other": (
        "g (float[n] x) => (float[n] y) { y = local.f(x) }"
        + function("f (a) => (b) { b = local.h(a) }")
        + function("h (a) => (b) { b = local.f(a) }"),
        InvalidModel,
        "'local::f' → 'local::h' → 'local::f'",
    ),
    "that calls itself in a branch": (
        "g (float[n] x, bool c) => (float[n] y) { y = local.f(x, c) }"
        + function(
            "f (a, c) => (b) { b = If (c) <then_branch = t () => (d) { d = local.f(a, c) }, "
            "else_branch = e () => (k) { k = Neg(a) }> }"
        ),
        InvalidModel,
        "functions call themselves",
    ),
    "of one name": (
        "g (float[n] x) => (float[n] y) { y = local.f(x) }"
        + function("f (a) => (b) { b = Neg(a) }")
        + function("f (a) => (b) { b = Abs(a) }"),
        InvalidModel,
        "two functions are named 'local::f'",
    ),
    "that is missing": (
        "g (float[n] x) => (float[n] y) { y = local.f(x) }" + function("h (a) => (b) { b = Neg(a) }"),
        UnsupportedOp,
        "local::f-1 at 'y'",
    ),
    "that double 40 times": (
        "g (float[n] x) => (float[n] y) { y = local.f0(x) }"
        + "".join(function(f"f{k} (a) => (b) {{ c = local.f{k + 1}(a) b = local.f{k + 1}(c) }}") for k in range(40))
        + function("f40 (a) => (b) { b = Neg(a) }"),
        ResourceLimit,
        "graph_nodes",
    ),
    "in a chain of 300": (
        "g (float[n] x) => (float[n] y) { y = local.f0(x) }"
        + "".join(function(f"f{k} (a) => (b) {{ b = local.f{k + 1}(a) }}") for k in range(300))
        + function("f300 (a) => (b) { b = Neg(a) }"),
        ResourceLimit,
        "graph_depth",
    ),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions(case: str) -> None:
    text, error, message = FUNCTIONS[case]
    with pytest.raises(error, match=message):
        rv.load(model(text))


BODIES = {
    "If without a result": "y = If (c) <then_branch = t () => () {}, "
    "else_branch = e () => (float[n] b) { b = Abs(x) }>",
    "If with an input": "y = If (c) <then_branch = t (float[n] q) => (float[n] a) { a = Neg(q) }, "
    "else_branch = e () => (float[n] b) { b = Abs(x) }>",
    "Loop with too few inputs": "y = Loop (, c, x) <body = b (int64 i) => (bool g, float[n] r) "
    "{ r = Neg(x) g = Identity(c) }>",
    "Loop with too few results": "y = Loop (, c, x) <body = b (int64 i, bool g, float[n] a) => (bool g) { }>",
    "Scan with too few inputs": "y = Scan <num_scan_inputs = 1, body = b (float e) => (float r) { r = Neg(e) }> (x, x)",
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_do_not_fit_their_node(case: str) -> None:
    with pytest.raises(InvalidModel, match=r"node 'y' \(\w+\): '\w+' must take \d and give \d values"):
        rv.load(model(f"g (bool c, float[n] x) => (float[n] y) {{ {BODIES[case]} }}"))


# -- questions that native code must not be asked -------------------------------------------------------------------

UNSAFE = {
    "LayerNormalization": (
        "g (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = LayerNormalization <axis = 1000000000000000> (x, s) }"
    ),
    "GatherND": "g (float[2, 3] x, int64[2, 1] i) => (float[?] y) { y = GatherND <batch_dims = -7> (x, i) }",
    "Split": "g (float[6] x) => (float[?] y, float[?] z) { y, z = Split <num_outputs = 1> (x) }",
    "Split-many": "g (float[6] x) => (float[?] y) { y = Split <num_outputs = 1000000000000000> (x) }",
    "Expand": "g (float[3] x, int64[1000000000] s) => (float[?] y) { y = Expand(x, s) }",
    "Einsum": 'g (float[3] x) => (float[?] y) { y = Einsum <equation = "]i"> (x) }',
    "Einsum-dots": 'g (float[3] x) => (float[?] y) { y = Einsum <equation = ".i"> (x) }',
}


@pytest.mark.parametrize("case", UNSAFE)
def test_attributes_that_would_crash_or_hang_the_standards_inference(case: str) -> None:
    """The guard in ``ops/infer_guard.py``: without it some of these end the process."""
    with rv.load(model(UNSAFE[case]), optimization="none") as session:
        inputs = {
            name: np.zeros([size if size < 100 else 1 for size in declared.shape], declared.dtype.numpy)
            for name, declared in session.inputs.items()
        }
        with pytest.raises(RanvierError, match=case.partition("-")[0] + "|input 's'"):
            session.run(inputs)
