"""Small models in the standard's text form, and nesting that no text could hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

HEAD = '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>\n'


def model(text: str) -> ModelProto:
    """A model from ``name (inputs) => (outputs) { nodes }`` and, behind it, functions of the domain ``local``."""
    return onnx.parser.parse_model(HEAD + text)


def function(text: str) -> str:
    return f'\n<domain: "local", opset_import: ["" : 21, "local" : 1]>\n{text}'


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def scalar(value: Any, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
    return np.array(value, dtype)


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def info(name: str, kind: int = TensorProto.FLOAT, shape: Any = ("n",)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def nested_ifs(depth: int) -> ModelProto:
    """``If`` in ``If``, built in memory: protobuf would not read so deep a message."""
    made, graph = _top([info("x"), info("c", TensorProto.BOOL, ())])
    for level in range(depth):
        graph.output.append(info(f"y{level}"))
        node = graph.node.add(op_type="If", name=f"if{level}", input=["c"], output=[f"y{level}"])
        other = node.attribute.add(name="else_branch", type=AttributeProto.GRAPH).g
        other.name = f"else{level}"
        _negate(other, f"e{level}")
        graph = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g
        graph.name = f"then{level}"
    _negate(graph, "last")
    return made


def nested_loops(depth: int) -> ModelProto:
    """``Loop`` in ``Loop``, the innermost doubling what it carries, so that no shape stays what it was."""
    made, graph = _top([info("x"), info("c", TensorProto.BOOL, ()), info("steps", TensorProto.INT64, ())])
    carried = "x"
    for level in range(depth):
        graph.output.append(info(f"y{level}", shape=None))
        node = graph.node.add(op_type="Loop", name=f"loop{level}", input=["steps", "c", carried], output=[f"y{level}"])
        graph = node.attribute.add(name="body", type=AttributeProto.GRAPH).g
        graph.name = f"body{level}"
        graph.input.append(info(f"i{level}", TensorProto.INT64, ()))
        graph.input.append(info(f"going{level}", TensorProto.BOOL, ()))
        graph.input.append(info(f"a{level}", shape=None))
        graph.node.add(op_type="Identity", input=[f"going{level}"], output=[f"more{level}"])
        graph.output.append(info(f"more{level}", TensorProto.BOOL, ()))
        carried = f"a{level}"
    node = graph.node.add(op_type="Concat", input=[carried, carried], output=["last"])
    node.attribute.append(helper.make_attribute("axis", 0))
    graph.output.append(info("last", shape=None))
    return made


def doubling(op: str, kind: str, times: int = 200) -> ModelProto:
    """``v = op(v, v)`` over and over."""
    steps = "".join(f" v{k} = {op} (v{k - 1}, v{k - 1})" for k in range(1, times + 1))
    return model(f"doubling ({kind}[n] v0) => ({kind}[m] y) {{{steps} y = Identity(v{times}) }}")


def _top(inputs: list[onnx.ValueInfoProto]) -> tuple[ModelProto, GraphProto]:
    made = ModelProto(ir_version=10)
    made.opset_import.add(version=21)
    made.graph.name = "top"
    made.graph.input.extend(inputs)
    return made, made.graph


def _negate(graph: GraphProto, name: str) -> None:
    graph.node.add(op_type="Neg", input=["x"], output=[name])
    graph.output.append(info(name))
