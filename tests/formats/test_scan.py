"""Weights that are cut out of a model file are those the real parser would have found."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.formats import onnx as onnx_format
from ranvier.formats.onnx.scan import CUT_FROM, skeleton

ELEMENTS = CUT_FROM // 4 + 3
DATA = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)


def model_with(*tensors: TensorProto) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    nodes = [helper.make_node("Identity", [t.name], [f"{t.name}.out"]) for t in tensors]
    outputs = [helper.make_tensor_value_info(f"{i.name}.out", i.type.tensor_type.elem_type, None) for i in infos]
    graph = helper.make_graph(nodes, "g", [], outputs, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def as_floats(name: str, data: np.ndarray, kind: int = TensorProto.FLOAT) -> TensorProto:
    return helper.make_tensor(name, kind, data.shape, data.tolist())


def read_back(message: bytes) -> dict[str, np.ndarray]:
    graph = onnx_format.read(message)
    return {name: value.const.numpy() for name, value in graph.constants.items() if value.const is not None}


@pytest.mark.parametrize("form", ["raw", "floats"])
def test_large_weights_are_cut_out(form: str) -> None:
    large = numpy_helper.from_array(DATA, "w") if form == "raw" else as_floats("w", DATA)
    small = as_floats("s", DATA[:5])
    message = model_with(small, large, as_floats("t", DATA[5:9])).SerializeToString()
    found = skeleton(memoryview(message))
    assert list(found.weights) == [1]
    assert len(found.message) < len(message) - DATA.nbytes
    offset, length = found.weights[1]
    np.testing.assert_array_equal(np.frombuffer(message[offset : offset + length], np.float32), DATA)
    rest = onnx.ModelProto.FromString(found.message)
    assert [t.name for t in rest.graph.initializer] == ["s", "w", "t"]
    back = read_back(message)
    for name, want in (("s", DATA[:5]), ("w", DATA), ("t", DATA[5:9])):
        np.testing.assert_array_equal(back[name], want)


def test_numbers_that_are_not_as_they_lie_in_memory_are_left_to_the_parser() -> None:
    doubles = as_floats("d", DATA.astype(np.float64), TensorProto.DOUBLE)
    halves = as_floats("h", DATA.astype(np.float16), TensorProto.FLOAT16)
    complexes = as_floats("c", DATA.astype(np.complex64), TensorProto.COMPLEX64)
    message = model_with(doubles, halves, complexes).SerializeToString()
    assert skeleton(memoryview(message)).weights == {}
    back = read_back(message)
    np.testing.assert_array_equal(back["d"], DATA.astype(np.float64))
    np.testing.assert_array_equal(back["h"], DATA.astype(np.float16))
    np.testing.assert_array_equal(back["c"], DATA.astype(np.complex64))


def test_a_field_given_twice_is_left_to_the_parser() -> None:
    """A packed list may come in pieces, which a parser joins; of raw data the last one counts."""
    pieces = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[ELEMENTS + 7]).SerializeToString()
    for part in (DATA, DATA[:7]):
        pieces += TensorProto(float_data=part).SerializeToString()
    graph = model_with(as_floats("w", DATA)).graph
    del graph.initializer[:]
    body = graph.SerializeToString() + _field(5, pieces)
    message = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)]).SerializeToString()
    message += _field(7, body)
    assert skeleton(memoryview(message)).weights == {}
    np.testing.assert_array_equal(read_back(message)["w"], np.concatenate([DATA, DATA[:7]]))


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of the wire format."""
    length, size = bytearray(), len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + content
