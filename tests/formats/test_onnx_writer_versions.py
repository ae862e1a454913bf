"""Files say the oldest version that has what they hold, so that other tools read them."""

from __future__ import annotations

import onnx
import pytest

from ranvier.dtypes import DType
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType


@pytest.mark.parametrize(
    ("dtype", "newest"),
    [(DType.float64, False), (DType.float32, False), (DType.float6_e2m3fn, True), (DType.int2, True)],
)
def test_only_new_element_types_need_the_newest_format(dtype: DType, newest: bool) -> None:
    graph = Graph("one", opsets={"": 21})
    x = graph.add_input("x", TensorType(dtype, (1,)))
    node = graph.add("Identity", [x], version=21)
    node.output.type = x.type
    graph.outputs = [node.output]
    assert (onnx_format.to_proto(graph).ir_version == onnx.IR_VERSION) is newest
