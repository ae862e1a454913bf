"""Questions to the standard's inference are remembered by everything that counts."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops import infer
from ranvier.ops.infer_memo import contents, question
from ranvier.ops.proto import schema_of


def node_of(op: str, types: list[TensorType], attrs: dict | None = None) -> Node:
    version = schema_of("", op, infer.NEWEST).since_version
    return Graph().add(op, [Value(f"x{k}", t) for k, t in enumerate(types)], attrs or {}, version=version)


def test_questions_differ_by_everything_that_counts() -> None:
    x = TensorType(DType.float32, (2, 3))
    shape = TensorType(DType.int64, (2,))

    def of(op: str, attrs: dict, target: list[int]) -> object:
        node = node_of(op, [x, shape], attrs)
        values = {node.inputs[1]: np.array(target, np.int64)}
        return question(node, [x, shape], contents(node, values))  # type: ignore[arg-type]

    found = [
        of("Reshape", {}, [3, 2]),
        of("Reshape", {}, [6, 1]),
        of("Reshape", {"allowzero": 1}, [3, 2]),
        of("Reshape", {"allowzero": True}, [3, 2]),
        of("Expand", {}, [3, 2]),
    ]
    assert len(set(found)) == len(found)
    assert of("Reshape", {}, [3, 2]) == found[0]
