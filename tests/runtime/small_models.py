"""Small models for the tests of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET = 20


def model_of(
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    weights: dict[str, np.ndarray] | None = None,
    *,
    opsets: dict[str, int] | None = None,
    ir_version: int = 9,
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph of a test",
        inputs,
        outputs,
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
        doc_string="what the graph does",
    )
    imports = [helper.make_opsetid(d, v) for d, v in {"": OPSET, **(opsets or {})}.items()]
    model = helper.make_model(
        graph, opset_imports=imports, producer_name="tests", doc_string="what the model is for", domain="org.example"
    )
    model.ir_version = ir_version
    model.model_version = 7
    helper.set_model_props(model, {"author": "somebody", "license": "none"})
    return model


def tensor(name: str, kind: int, shape: list[Any] | None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def linear(rows: int = 3, columns: int = 2, *, seed: int = 0) -> ModelProto:
    """``y = relu(x @ w + b)`` over any number of rows of x."""
    generator = np.random.default_rng(seed)
    return model_of(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"], "product"),
            helper.make_node("Add", ["xw", "b"], ["sum"], "bias"),
            helper.make_node("Relu", ["sum"], ["y"], "relu"),
        ],
        [tensor("x", TensorProto.FLOAT, ["n", rows])],
        [tensor("y", TensorProto.FLOAT, ["batch", columns])],
        {
            "w": generator.standard_normal((rows, columns)).astype(np.float32),
            "b": generator.standard_normal(columns).astype(np.float32),
        },
    )


def two_outputs() -> ModelProto:
    """Two named outputs of two inputs: their sum and their difference."""
    return model_of(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [tensor("a", TensorProto.FLOAT, ["n"]), tensor("b", TensorProto.FLOAT, ["n"])],
        [tensor("sum", TensorProto.FLOAT, ["n"]), tensor("difference", TensorProto.FLOAT, ["n"])],
    )


def gather() -> ModelProto:
    return model_of(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        [tensor("x", TensorProto.FLOAT, ["n"]), tensor("i", TensorProto.INT64, ["k"])],
        [tensor("y", TensorProto.FLOAT, ["k"])],
    )


def endless() -> ModelProto:
    """A loop that runs until the counter passes ``limit``."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["n", "one"], ["n_next"]),
            helper.make_node("Less", ["n_next", "limit"], ["more"]),
        ],
        "body",
        [
            tensor("step", TensorProto.INT64, []),
            tensor("again", TensorProto.BOOL, []),
            tensor("n", TensorProto.FLOAT, []),
        ],
        [tensor("more", TensorProto.BOOL, []), tensor("n_next", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.float32(1), "one")],
    )
    return model_of(
        [helper.make_node("Loop", ["", "go", "start"], ["end"], body=body)],
        [tensor("limit", TensorProto.FLOAT, [])],
        [tensor("end", TensorProto.FLOAT, [])],
        {"go": np.array(True), "start": np.array(0, np.float32)},
    )


def written(model: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path
