"""``ranvier run`` and where its inputs come from."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.cli import exit_codes
from ranvier.cli.inputs import InputRequest, collect
from ranvier.formats.onnx import read

from .conftest import WHEEL, save_model


def test_random_inputs_are_said_and_reproducible(call, call_json, dense):
    result = call("run", dense)
    assert result.exit_code == 0
    assert "random values for x, with batch=1" in result.stderr
    assert "float32[1, 5]" in result.stdout and "most probable classes of y" in result.stdout
    first, again, other = (call_json("run", dense, "--seed", seed)["outputs"]["y"]["values"] for seed in (3, 3, 4))
    assert first == again != other


def test_json_facts(call_json, dense):
    found = call_json("run", dense, "--set", "batch=2", "--repeat", 3)
    output = found["outputs"]["y"]
    assert output["shape"] == [2, 5] and len(output["values"]) == 10 and not output["truncated"]
    assert output["min"] <= output["mean"] <= output["max"]
    assert [len(row) for row in output["top"]] == [5, 5]
    assert found["latency_seconds"]["runs"] == 3 and found["latency_seconds"]["median"] > 0
    assert found["inputs"]["x"] == {"source": "random", "type": "float32[2, 4]"}
    assert sum(found["nodes_by_provider"].values()) > 0


def test_npy_and_npz_inputs(call_json, two_inputs, tmp_path):
    a, b = np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((3, 2), np.float32)
    np.save(tmp_path / "a.npy", a)
    np.savez(tmp_path / "b.npz", anything=b)
    found = call_json("run", two_inputs, "-i", f"a={tmp_path}/a.npy", "-i", f"b={tmp_path}/b.npz")
    assert found["outputs"]["sum"]["values"] == (a + b).ravel().tolist()

    np.savez(tmp_path / "both.npz", a=a, b=b)
    found = call_json("run", two_inputs, "--inputs", tmp_path / "both.npz", "--output", "difference")
    assert list(found["outputs"]) == ["difference"]
    assert found["outputs"]["difference"]["values"] == (a - b).ravel().tolist()


def test_partly_given_inputs(call, call_json, two_inputs, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((7, 2), np.float32))
    result = call("run", two_inputs, "-i", f"a={tmp_path}/a.npy")
    assert result.exit_code == exit_codes.INVALID_INPUT and "'b' is missing" in result.stderr
    found = call_json("run", two_inputs, "-i", f"a={tmp_path}/a.npy", "--random")
    assert found["inputs"]["b"] == {"source": "random", "type": "float32[7, 2]"}


def test_random_of_a_shape(call, call_json, dense):
    found = call_json("run", dense, "-i", "x=random:6x4")
    assert found["outputs"]["y"]["shape"] == [6, 5]
    assert call("run", dense, "-i", "random").exit_code == 0  # one input needs no name
    assert call("run", dense, "-i", "x=random:6x3").exit_code == exit_codes.INVALID_INPUT


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("z=random", "no input 'z'"),
        ("x=missing.npy", "no file"),
        ("x={folder}/text.txt", "unknown kind of file"),
        ("x={folder}/broken.npy", "cannot read"),
        ("x={folder}/broken.pb", "cannot read"),
        ("x={folder}/broken.png", "cannot read image"),
    ],
)
def test_bad_inputs(call, picture_model, tmp_path, spec, expected):
    model = picture_model([1, 3, 4, 4])
    for name in ("text.txt", "broken.npy", "broken.pb", "broken.png"):
        (tmp_path / name).write_bytes(b"\xffnonsense")
    spec = spec.replace("x=", "image=").format(folder=tmp_path)
    result = call("run", model, "-i", spec)
    assert result.exit_code == exit_codes.INVALID_INPUT
    assert expected in result.stderr


def test_wrong_type_is_an_invalid_input(call, dense, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 4)))
    result = call("run", dense, "-i", f"x={tmp_path}/x.npy")
    assert result.exit_code == exit_codes.INVALID_INPUT
    assert "expected float32[batch, 4], got float64[1, 4]" in result.stderr


def test_unknown_dimension(call, dense):
    result = call("run", dense, "--set", "bach=3")
    assert result.exit_code == exit_codes.USAGE and "did you mean 'batch'" in result.stderr
    assert call("run", dense, "--set", "batch=-3").exit_code == exit_codes.USAGE


def test_failing_node(call, tmp_path):
    nodes = [helper.make_node("Gather", ["table", "index"], ["row"], name="pick")]
    weights = {"table": np.zeros((2, 3), np.float32)}
    model = save_model(tmp_path / "g.onnx", nodes, {"index": (TensorProto.INT64, [1])}, {"row": [1, 3]}, weights)
    np.save(tmp_path / "i.npy", np.array([7]))
    result = call("run", model, "-i", f"index={tmp_path}/i.npy")
    assert result.exit_code == exit_codes.RUN_FAILED
    assert "Gather" in result.stderr and "'pick'" in result.stderr


def test_outputs_as_files(call, two_inputs, tmp_path):
    assert call("run", two_inputs, "-o", tmp_path / "out.npz", "--set", "n=2").exit_code == 0
    with np.load(tmp_path / "out.npz") as file:
        assert sorted(file.files) == ["difference", "sum"] and file["sum"].shape == (2, 2)
    assert call("run", two_inputs, "-o", tmp_path / "folder", "--no-print").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["difference.npy", "sum.npy"]
    assert call("run", two_inputs, "-o", tmp_path / "one.npy", "--output", "sum").exit_code == 0
    assert np.load(tmp_path / "one.npy").shape == (1, 2)
    blocked = tmp_path / "two.onnx" / "x.npz"  # a file is in the way
    assert call("run", two_inputs, "-o", blocked).exit_code == exit_codes.RUN_FAILED


def test_output_names_that_python_uses(call, tmp_path):
    nodes = [helper.make_node("Neg", ["x"], ["file"], name="n"), helper.make_node("Abs", ["x"], ["a/b"], name="m")]
    model = save_model(tmp_path / "m.onnx", nodes, {"x": [2]}, {"file": [2], "a/b": [2]})
    assert call("run", model, "-o", tmp_path / "out.npz").exit_code == 0
    with np.load(tmp_path / "out.npz") as file:
        assert sorted(file.files) == ["a/b", "file"]
    assert call("run", model, "-o", tmp_path / "folder").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["a_b.npy", "file.npy"]


def test_types_numpy_does_not_know_survive_files(call, call_json, tmp_path):
    nodes = [helper.make_node("Identity", ["x"], ["y"], name="same")]
    kind = (TensorProto.BFLOAT16, [3])
    model = save_model(tmp_path / "bf16.onnx", nodes, {"x": kind}, {"y": kind})
    assert call("run", model, "-o", tmp_path / "y.npy").exit_code == 0
    found = call_json("run", model, "-i", f"x={tmp_path}/y.npy")
    assert found["outputs"]["y"]["type"] == "bfloat16[3]" and found["inputs"]["x"]["source"].endswith("y.npy")


def test_strings(call_json, tmp_path):
    nodes = [helper.make_node("StringNormalizer", ["s"], ["t"], name="upper", case_change_action="UPPER")]
    kind = (TensorProto.STRING, ["n"])
    model = save_model(tmp_path / "s.onnx", nodes, {"s": kind}, {"t": kind})
    np.save(tmp_path / "s.npy", np.array(["node", "of"]))
    assert call_json("run", model, "-i", f"s={tmp_path}/s.npy")["outputs"]["t"]["values"] == ["NODE", "OF"]
    assert all(isinstance(s, str) for s in call_json("run", model)["outputs"]["t"]["values"])


def test_conformance_folder(call_json):
    case = WHEEL / "simple" / "test_single_relu_model"
    found = call_json("run", case / "model.onnx", "--inputs", case / "test_data_set_0")
    expected = numpy_helper.to_array(TensorProto.FromString((case / "test_data_set_0" / "output_0.pb").read_bytes()))
    (output,) = found["outputs"].values()
    np.testing.assert_allclose(output["values"], expected.ravel())


def test_sequences_from_messages(call, call_json, tmp_path):
    case = WHEEL / "simple" / "test_sequence_model1"
    found = call_json("run", case / "model.onnx", "--inputs", case / "test_data_set_0")
    assert found["outputs"]
    assert call("run", case / "model.onnx", "--inputs", tmp_path).exit_code == exit_codes.INVALID_INPUT
    # a sequence as an input of its own
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    info = helper.make_value_info("s", helper.make_sequence_type_proto(tensor))
    node = helper.make_node("SequenceLength", ["s"], ["n"], name="count")
    graph = helper.make_graph([node], "g", [info], [helper.make_tensor_value_info("n", TensorProto.INT64, [])])
    path = tmp_path / "sequence.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    )
    message = numpy_helper.from_list([np.zeros(2, np.float32)] * 3)
    (tmp_path / "s.pb").write_bytes(message.SerializeToString())
    assert call_json("run", path, "-i", f"s={tmp_path}/s.pb")["outputs"]["n"]["values"] == [3]


def test_random_values_fit_their_meaning(tmp_path):
    ints = (TensorProto.INT64, ["batch", "steps"])
    nodes = [helper.make_node("Identity", ["input_ids"], ["y"])]
    inputs = {
        "input_ids": ints,
        "attention_mask": ints,
        "token_type_ids": ints,
        "wave": ["batch", "samples"],
        "lengths": (TensorProto.INT64, ["batch"]),
        "pixels": (TensorProto.UINT8, ["batch", 4, 4]),
        "image": ["batch", 3, "h", "w"],
        "past": ["batch", "past + steps"],
        "flag": (TensorProto.BOOL, []),
    }
    graph = read(save_model(tmp_path / "m.onnx", nodes, inputs, {"y": ints}))
    values = collect(graph, InputRequest(), {"past": 5}).values
    assert values["input_ids"].shape == (1, 16) and 0 <= values["input_ids"].min() <= values["input_ids"].max() < 10
    assert (values["attention_mask"] == 1).all() and (values["token_type_ids"] == 0).all()
    assert values["wave"].shape == (1, 16_000) and values["lengths"].item() > 0
    assert values["pixels"].max() > 100 and values["image"].shape == (1, 3, 224, 224)
    assert values["past"].shape == (1, 21)
    assert list(values) == list(inputs)
