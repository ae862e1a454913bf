"""Constants in files: read as they lie, aligned where asked for, given back and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.formats import onnx as onnx_format
from ranvier.graph.tensors import ConstTensor


def written(path: Path, pad: str, *, transposed: bool) -> np.ndarray:
    weights = np.random.default_rng(0).standard_normal((256, 192)).astype(np.float32)
    stored = weights.T.copy() if transposed else weights
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name=pad, transB=int(transposed))
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 192])],
        [numpy_helper.from_array(stored, "w")],
    )
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return weights


@pytest.mark.parametrize("pad", ["", "a", "ab", "abc"])  # one of these puts the weights where floats are aligned
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_any_alignment(tmp_path: Path, pad: str, transposed: bool) -> None:
    weights = written(tmp_path / "m.onnx", pad, transposed=transposed)
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    session = rv.load(tmp_path / "m.onnx")
    for _ in range(2):
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pad", ["", "a", "ab", "abc"])
def test_released_data_is_read_again(tmp_path: Path, pad: str) -> None:
    weights = written(tmp_path / "m.onnx", pad, transposed=False)
    tensor = onnx_format.read(str(tmp_path / "m.onnx")).constants["w"].const
    assert tensor is not None
    raw = tensor.raw()
    assert raw is tensor.raw() and not raw.flags.writeable
    tensor.release()
    np.testing.assert_array_equal(raw, weights)
    found = tensor.numpy()
    assert found.flags.aligned and found is tensor.numpy()
    tensor.release()
    np.testing.assert_array_equal(found, weights)


def test_memory_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    weights = written(tmp_path / "m.onnx", "", transposed=False)
    content = (tmp_path / "m.onnx").read_bytes()
    tensor = onnx_format.read(content).constants["w"].const
    assert tensor is not None
    tensor.release()
    np.testing.assert_array_equal(tensor.numpy(), weights)
    assert onnx.load_from_string(content).graph.initializer[0].name == "w"
    array = np.arange(100_000)
    own = ConstTensor.of(array)
    own.release()
    np.testing.assert_array_equal(own.numpy(), np.arange(100_000))
