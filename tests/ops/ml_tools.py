"""What the tests of ``ai.onnx.ml`` and of strings share: ONNX Runtime as an oracle for one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, TypeProto, helper, numpy_helper

from ranvier.dtypes import of
from ranvier.ops.registry import evaluate as evaluate_any

ML = "ai.onnx.ml"


def evaluate(name: str, *inputs: Any, version: int = 1, outputs: int = 1, **attrs: Any) -> Any:
    """An operator of ``ai.onnx.ml`` by its reference."""
    return evaluate_any(name, *inputs, domain=ML, version=version, outputs=outputs, **attrs)


def onnxruntime_answer(
    name: str, *inputs: Any, domain: str = ML, version: int = 1, outputs: int = 1, **attrs: Any
) -> Any:
    """What ONNX Runtime computes for one node; the test is skipped where it is not installed."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    attrs = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    names = [f"x{k}" for k in range(len(inputs))]
    results = [f"y{k}" for k in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(name, names, results, domain=domain, **attrs)],
        "one_node",
        [helper.make_value_info(n, _proto_type(x)) for n, x in zip(names, inputs)],
        [helper.make_empty_tensor_value_info(n) for n in results],
    )
    opsets = [helper.make_opsetid(domain, version)] + ([helper.make_opsetid("", 17)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    answers = session.run(None, dict(zip(names, inputs)))
    return answers[0] if outputs == 1 else answers


def _proto_type(x: Any) -> TypeProto:
    if isinstance(x, dict):
        key = TensorProto.STRING if isinstance(next(iter(x)), str) else TensorProto.INT64
        return helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    return helper.make_tensor_type_proto(of(x).onnx, x.shape)


def assert_like(got: Any, want: Any) -> None:
    """The same element type, shape and, for floats nearly, values."""
    if isinstance(want, list):
        assert got == want
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if want.dtype == object:
        assert got.tolist() == want.tolist()
    else:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def assert_like_onnxruntime(name: str, *inputs: Any, version: int = 1, outputs: int = 1, **attrs: Any) -> None:
    got = evaluate(name, *inputs, version=version, outputs=outputs, **attrs)
    want = onnxruntime_answer(name, *inputs, version=version, outputs=outputs, **attrs)
    for mine, theirs in zip(got, want) if outputs > 1 else [(got, want)]:
        assert_like(mine, theirs)
