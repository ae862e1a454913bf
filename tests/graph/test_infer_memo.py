"""Types found without asking the standard are those it would have given."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Symbol, TensorType
from ranvier.ops import infer
from ranvier.ops.infer_memo import contents, question, quick_answer
from ranvier.ops.proto import schema_of

DIMS = [(), (1,), (3,), (2, 3), (2, 1), (Symbol("n"), 3), (1, Symbol("n")), (0, 3), (None, 3), None]


def node_of(op: str, types: list[TensorType], attrs: dict | None = None) -> Node:
    version = schema_of("", op, infer.NEWEST).since_version
    return Graph().add(op, [Value(f"x{k}", t) for k, t in enumerate(types)], attrs or {}, version=version)


def asked(node: Node, types: list[TensorType]) -> list:
    return infer._ask_standard(schema_of("", node.op, node.version), node, types, {})


@pytest.mark.parametrize("op", ["Add", "Div", "Less", "Equal"])
def test_broadcasting(op: str) -> None:
    answered = 0
    for a, b in itertools.product(DIMS, DIMS):
        types = [TensorType(DType.float32, a), TensorType(DType.float32, b)]
        node = node_of(op, types)
        quick = quick_answer(node, types)
        if quick is not None:
            answered += 1
            assert quick == asked(node, types), (a, b)
    assert answered >= 30


@pytest.mark.parametrize("op", ["Relu", "Clip", "Sigmoid", "Sqrt", "Erf"])
def test_results_like_the_operand(op: str) -> None:
    for shape in DIMS:
        types = [TensorType(DType.float32, shape)]
        node = node_of(op, types)
        assert quick_answer(node, types) == asked(node, types)


def test_convolutions() -> None:
    rng = np.random.default_rng(0)
    answered = 0
    for _ in range(200):
        rank = int(rng.integers(1, 4))
        image = (Symbol("n"), 4, *(int(d) for d in rng.integers(1, 12, rank)))
        kernel = (6, 4, *(int(d) for d in rng.integers(1, 4, rank)))
        attrs = {
            "strides": [int(d) for d in rng.integers(1, 4, rank)],
            "dilations": [int(d) for d in rng.integers(1, 3, rank)],
            "pads": [int(d) for d in rng.integers(0, 3, 2 * rank)],
        }
        types = [TensorType(DType.float32, image), TensorType(DType.float32, kernel)]
        node = node_of("Conv", types, {k: v for k, v in attrs.items() if rng.integers(2)})
        quick = quick_answer(node, types)
        if quick is not None:
            answered += 1
            assert quick == asked(node, types), (image, kernel, node.attrs)
    assert answered > 100


def test_other_paddings_are_asked_for() -> None:
    types = [TensorType(DType.float32, (1, 4, 7, 7)), TensorType(DType.float32, (6, 4, 3, 3))]
    assert quick_answer(node_of("Conv", types, {"auto_pad": "SAME_UPPER"}), types) is None


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
