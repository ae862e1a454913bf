"""That a model is quantized already is seen in whatever form it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ranvier.formats.onnx import read
from ranvier.quantize.already import told

_CODES = np.arange(64, dtype=np.int8).reshape(8, 8) - 32
_FLOATS = _CODES.astype(np.float32) / 16
_WEIGHTS = {
    "codes": _CODES,
    "bytes": _CODES.view(np.uint8),
    "image": _CODES.reshape(8, 8, 1, 1),
    "floats": _FLOATS,
    "scale": np.float32(0.1),
    "zero": np.int8(0),
    "zero_u": np.uint8(0),
    "gates": np.ones((1, 8, 8), np.float32),
}


def read_back(name: str, codes: str = "codes") -> Any:
    return helper.make_node("DequantizeLinear", [codes, "scale", "zero"], [name])


def described(*nodes: Any, shape: tuple[int, ...] = (4, 8)) -> str:
    used = {name for node in nodes for name in node.input}
    bodies = [a.g for node in nodes for a in node.attribute if a.HasField("g")]
    used |= {name for body in bodies for node in body.node for name in node.input}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in _WEIGHTS.items() if name in used],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return told(read(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()))


node = helper.make_node
FORMS = {
    "QDQ": ([read_back("w"), node("MatMul", ["x", "w"], ["y"])], "1 MatMul behind DequantizeLinear"),
    "QDQ, turned": (
        [read_back("w"), node("Transpose", ["w"], ["t"]), node("Gemm", ["x", "t"], ["y"])],
        "1 Gemm behind DequantizeLinear",
    ),
    "QDQ of floats": (
        [
            node("QuantizeLinear", ["floats", "scale", "zero"], ["codes_"]),
            read_back("w", "codes_"),
            node("MatMul", ["w", "x"], ["y"]),
        ],
        "1 MatMul behind DequantizeLinear",
    ),
    "integers": (
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", ["q", "bytes", "z"], ["y"])],
        "1 MatMulInteger",
    ),
    "QLinear": (
        [
            node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            node("QLinearMatMul", ["q", "scale", "zero", "codes", "scale", "zero", "scale", "zero"], ["y"]),
        ],
        "1 QLinearMatMul",
    ),
    "groups": (
        [node("MatMulNBits", ["x", "bytes", "scale"], ["y"], domain="com.microsoft", K=8, N=8, bits=8, block_size=16)],
        "1 MatMulNBits",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str) -> None:
    nodes, what = FORMS[name]
    shape = (8, 4) if name == "QDQ of floats" else (4, 8)
    assert f"quantized already: 1 layer in codes ({what}), none left in float" in described(*nodes, shape=shape)


def test_layers_left_in_float() -> None:
    found = described(
        read_back("w"),
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("MatMul", ["b", "floats"], ["c"]),
        node("MatMul", ["c", "c"], ["y"]),  # no weights
    )
    assert "2 layers in codes (2 MatMul behind DequantizeLinear), 1 left in float" in found


def test_layers_of_bodies_count() -> None:
    body = helper.make_graph(
        [read_back("w"), node("MatMul", ["x", "w"], ["inner"])],
        "body",
        [],
        [helper.make_empty_tensor_value_info("inner")],
    )
    true = node("Constant", [], ["true"], value=numpy_helper.from_array(np.array(True)))
    found = described(true, node("If", ["true"], ["y"], then_branch=body, else_branch=body))
    assert "2 layers in codes" in found


def test_models_in_float_are_none(tmp_path: Path) -> None:
    assert described(node("MatMul", ["x", "floats"], ["y"])) == ""
    # activations in codes alone
    rounded = [node("QuantizeLinear", ["x", "scale", "zero"], ["q"]), read_back("r", "q")]
    assert described(*rounded, node("MatMul", ["r", "floats"], ["y"])) == ""
