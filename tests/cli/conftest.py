"""Small models and a way to call the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from ranvier.cli.app import cli

Call = Callable[..., Result]

WHEEL = Path(onnx.__file__).parent / "backend" / "test" / "data"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as the terminal; the tests read whole cells."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def call() -> Call:
    """``call("run", path, …)`` runs the command in this process."""

    def invoke(*args: Any) -> Result:
        return CliRunner().invoke(cli, [str(a) for a in args], prog_name="ranvier")

    return invoke


@pytest.fixture
def call_json(call: Call) -> Callable[..., Any]:
    """Like ``call``, with ``--json``: the one document on stdout, after checking the exit code."""

    def invoke(*args: Any, code: int = 0) -> Any:
        result = call(*args, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return invoke


def save_model(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    weights: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> Path:
    """A model file; inputs and outputs map a name to a shape (float32) or to (element type, shape)."""

    def info(name: str, kind: Any) -> Any:
        dtype, shape = kind if isinstance(kind, tuple) else (TensorProto.FLOAT, kind)
        return helper.make_tensor_value_info(name, dtype, shape)

    graph = helper.make_graph(
        nodes,
        options.pop("name", "small"),
        [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = options.pop("opsets", [helper.make_opsetid("", 21)])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10, **options), path)
    return path


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """``y = softmax(relu(x @ w + b))`` over a free batch: 4 nodes, 4 inputs, 5 classes."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="multiply"),
        helper.make_node("Add", ["m", "b"], ["a"], name="add_bias"),
        helper.make_node("Relu", ["a"], ["r"], name="rectify"),
        helper.make_node("Softmax", ["r"], ["y"], name="normalise"),
    ]
    weights = {"w": rng.standard_normal((4, 5)).astype(np.float32), "b": np.zeros(5, np.float32)}
    return save_model(tmp_path / "dense.onnx", nodes, {"x": ["batch", 4]}, {"y": ["batch", 5]}, weights)


@pytest.fixture
def two_inputs(tmp_path: Path) -> Path:
    """``sum = a + b``, ``difference = a - b`` over one symbolic dim."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"], name="plus"),
        helper.make_node("Sub", ["a", "b"], ["difference"], name="minus"),
    ]
    shapes = {"a": ["n", 2], "b": ["n", 2]}
    return save_model(tmp_path / "two.onnx", nodes, shapes, {"sum": ["n", 2], "difference": ["n", 2]})


@pytest.fixture
def branching(tmp_path: Path) -> Path:
    """An ``If`` with a body that uses a value from outside."""

    def branch(op: str) -> Any:
        node = helper.make_node(op, ["x"], [f"{op}_out"], name=f"inner_{op}")
        return helper.make_graph([node], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [3])])

    node = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch("Neg"), else_branch=branch("Abs"))
    return save_model(tmp_path / "if.onnx", [node], {"c": (TensorProto.BOOL, []), "x": [3]}, {"y": [3]})


@pytest.fixture
def picture_model(tmp_path: Path) -> Callable[..., Path]:
    """An identity over an input of the given shape."""

    def make(shape: list[Any], dtype: int = TensorProto.FLOAT) -> Path:
        node = helper.make_node("Identity", ["image"], ["same"], name="same_node")
        return save_model(tmp_path / "picture.onnx", [node], {"image": (dtype, shape)}, {"same": (dtype, shape)})

    return make
