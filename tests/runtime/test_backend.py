"""The interface of ``onnx.backend``, and the standard's own suite through it."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np
import onnx.backend.base
import onnx.backend.test
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier.errors import DeviceMismatch, InvalidConfig, InvalidInput
from tests.runtime.small_models import linear, model_of, tensor, two_outputs

X = np.ones((2, 3), np.float32)


def test_it_is_a_backend() -> None:
    assert issubclass(rv.Backend, onnx.backend.base.Backend)
    assert rv.Backend.supports_device("CPU")
    assert rv.Backend.supports_device("CPU:0")
    assert not rv.Backend.supports_device("CUDA")


def test_prepare_and_run() -> None:
    prepared = rv.Backend.prepare(linear(), optimization="none")
    assert isinstance(prepared, onnx.backend.base.BackendRep)
    assert prepared.session.config.optimization == "none"
    with rv.load(linear()) as session:
        expected = session.run({"x": X})["y"]
    for given in ([X], (X,), X, {"x": X}):
        outputs = prepared.run(given)
        assert isinstance(outputs, tuple)
        np.testing.assert_allclose(outputs[0], expected, rtol=1e-6)
        np.testing.assert_allclose(outputs["y"], expected, rtol=1e-6)
    assert rv.Backend.run_model(linear(), [X])[0].shape == (2, 2)
    prepared.run([X], run_options=rv.RunOptions(timeout=10.0))


def test_two_outputs_in_order() -> None:
    a, b = np.float32([1, 2]), np.float32([3, 5])
    total, difference = rv.Backend.run_model(two_outputs(), [a, b])
    assert (total.tolist(), difference.tolist()) == ([4, 7], [-2, -3])


def test_inputs_with_a_default_may_be_left_out() -> None:
    model = linear()
    model.graph.input.append(tensor("w", TensorProto.FLOAT, [3, 2]))
    prepared = rv.Backend.prepare(model)
    assert prepared.run([X])[0].shape == (2, 2)
    given = prepared.run([X, np.zeros((3, 2), np.float32)])[0]
    assert (given[0] == given[1]).all()
    with pytest.raises(InvalidInput, match="3 inputs given, the model takes 1: x"):
        prepared.run([X, X, X])


def test_compatible() -> None:
    unknown = model_of(
        [helper.make_node("Nope", ["x"], ["y"], domain="d")], [tensor("x", 1, [1])], [tensor("y", 1, [1])]
    )
    assert rv.Backend.is_compatible(linear())
    assert not rv.Backend.is_compatible(linear(), "CUDA")
    assert not rv.Backend.is_compatible(unknown)
    assert not rv.Backend.is_compatible(onnx.ModelProto())


def test_what_is_wrong_raises() -> None:
    with pytest.raises(DeviceMismatch, match="device 'CUDA' is not supported"):
        rv.Backend.prepare(linear(), "CUDA")
    with pytest.raises(InvalidConfig, match="unknown option 'optimisation'"):
        rv.Backend.prepare(linear(), optimisation="none")
    with pytest.raises(InvalidConfig, match="options belong to prepare"):
        rv.Backend.prepare(linear()).run([X], threads=1)


@pytest.mark.parametrize(
    ("node", "inputs", "options", "expected"),
    [
        (helper.make_node("Relu", ["x"], ["y"]), [np.float32([-1, 2])], {}, [[0, 2]]),
        (helper.make_node("Clip", ["x"], ["y"], max=1.0), [np.float32([-1, 2])], {"opset_version": 6}, [[-1, 1]]),
        (helper.make_node("Add", ["x", "x"], ["y"]), [np.float32([1])], {}, [[2]]),
        (helper.make_node("Clip", ["x", "", "m"], ["y"]), [np.float32([-1, 2]), np.float32(1)], {}, [[-1, 1]]),
        (helper.make_node("Split", ["x"], ["a", "b"], num_outputs=2), [np.float32([1, 2])], {}, [[1], [2]]),
        (helper.make_node("SequenceLength", ["s"], ["n"]), [[np.zeros(1), np.zeros(2)]], {}, [2]),
        (
            helper.make_node("Binarizer", ["x"], ["y"], domain="ai.onnx.ml", threshold=1.0),
            [np.float32([0, 2])],
            {},
            [[0, 1]],
        ),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else None,
)
def test_one_node(node: Any, inputs: list[Any], options: dict[str, Any], expected: list[Any]) -> None:
    outputs = rv.Backend.run_node(node, inputs, **options)
    assert [o.tolist() for o in outputs] == expected
    info = [(o.dtype, o.shape) for o in outputs]
    assert [o.tolist() for o in rv.Backend.run_node(node, inputs, outputs_info=info, **options)] == expected


def test_one_node_by_names() -> None:
    node = helper.make_node("Sub", ["a", "b"], ["y"])
    assert rv.Backend.run_node(node, {"a": np.float32([3]), "b": np.float32([1])})["y"].tolist() == [2]
    with pytest.raises(InvalidInput, match="Sub names 2 inputs, got 1"):
        rv.Backend.run_node(node, [X])


PART = ("test_relu_", "test_add_", "test_softmax_axis", "test_sequence_insert", "test_if_opt", "test_cast_")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the suite makes its data with overflows and divisions by zero
def test_the_suite_of_the_standard() -> None:
    """The whole suite runs in tests/conformance; here a part of it goes through the standard's own runner."""
    runner = onnx.backend.test.BackendTest(rv.Backend, __name__)
    for pattern in PART:
        runner.include(pattern)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(runner.test_cases["OnnxBackendNodeModelTest"])
    result = unittest.TestResult()
    suite.run(result)
    assert [(str(test), trace) for test, trace in [*result.failures, *result.errors]] == []
    ran = result.testsRun - len(result.skipped)
    assert ran >= 80, f"only {ran} cases ran"
