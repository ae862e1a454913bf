"""Operators of the user's own, from registration to a run, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier import errors
from tests.runtime.ort_scripts import X
from tests.runtime.small_models import linear, model_of, tensor


def custom_model(domain: str = "mine", version: int = 1, **attributes: Any) -> bytes:
    node = helper.make_node("Scale", ["x"], ["y"], "scale", domain=domain, **attributes)
    floats = [tensor("x", TensorProto.FLOAT, ["n"])], [tensor("y", TensorProto.FLOAT, None)]
    return model_of([node], *floats, opsets={domain: version}).SerializeToString()


@pytest.fixture
def registered() -> Iterator[Any]:
    """Registers like ``rv.register_op`` and takes everything back afterwards."""
    names: list[tuple[str, str]] = []

    def register(domain: str, name: str, *args: Any, **kwargs: Any) -> Any:
        definition = rv.register_op(domain, name, *args, **kwargs)
        names.append((domain, name))
        return definition

    yield register
    for domain, name in dict.fromkeys(names):
        with contextlib.suppress(errors.InvalidConfig):
            rv.unregister_op(domain, name)


def scale(x: np.ndarray, *, by: float = 2.0) -> np.ndarray:
    return x * np.float32(by)


def test_an_operator_of_ones_own(registered: Any) -> None:
    with pytest.raises(errors.UnsupportedOp, match="mine::Scale"):
        rv.load(custom_model())
    registered("mine", "Scale", scale)
    x = np.float32([1, 2])
    with rv.load(custom_model()) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], [2, 4])
    session_of_theirs = rv.InferenceSession(custom_model(by=3.0))
    np.testing.assert_array_equal(session_of_theirs.run(None, {"x": x})[0], [3, 6])
    rv.unregister_op("mine", "Scale")
    np.testing.assert_array_equal(session_of_theirs.run(None, {"x": x})[0], [3, 6])  # a session keeps what it has
    with pytest.raises(errors.UnsupportedOp):
        rv.load(custom_model())
    with pytest.raises(errors.InvalidConfig, match="mine::Scale was not registered"):
        rv.unregister_op("mine", "Scale")


def test_types_of_an_operator_of_ones_own(registered: Any) -> None:
    registered("mine", "Scale", scale, infer=lambda call: [call.type(0)])
    assert rv.InferenceSession(custom_model()).get_outputs()[0].shape == ["n"]


def test_versions_of_an_operator_of_ones_own(registered: Any) -> None:
    registered("mine", "Scale", scale)
    registered("mine", "Scale", lambda x: x * np.float32(10), version=3)
    x = np.float32([1])
    found = [rv.load(custom_model(version=v)).run({"x": x})["y"].tolist() for v in (1, 2, 3, 4)]
    assert found == [[2], [2], [10], [10]]
    rv.unregister_op("mine", "Scale", version=3)
    assert rv.load(custom_model(version=4)).run({"x": x})["y"].tolist() == [2]


def test_replacing_and_restoring(registered: Any) -> None:
    relu = linear().SerializeToString()
    expected = rv.load(relu, optimization="none").run({"x": X})["y"]
    with pytest.raises(errors.InvalidConfig, match=r"operator Relu is already declared.*replace=True"):
        rv.register_op("", "Relu", np.abs, version=14)
    registered("ai.onnx", "Relu", lambda x: -np.abs(x), version=14, replace=True)
    assert (rv.load(relu, optimization="none").run({"x": X})["y"] <= 0).all()
    registered("", "Relu", np.negative, version=14, replace=True)  # a second time: the original is still remembered
    rv.unregister_op("", "Relu")
    np.testing.assert_array_equal(rv.load(relu, optimization="none").run({"x": X})["y"], expected)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (np.square, [1, 4]),  # compiled, without a signature
        (lambda x: float(x.sum()), 3.0),
        (lambda x: x.sum(), 3.0),
        (lambda x, *, ctx: x * ctx.outputs, [1, 2]),
        (lambda *xs: xs[0], [1, 2]),
    ],
)
def test_functions_of_every_form(registered: Any, function: Any, expected: Any) -> None:
    registered("mine", "Scale", function)
    assert rv.load(custom_model()).run({"x": np.float32([1, 2])})["y"].tolist() == expected


def test_functions_that_fail(registered: Any) -> None:
    def broken(x: np.ndarray) -> Any:
        raise KeyError("inside")

    registered("mine", "Scale", broken)
    session = rv.InferenceSession(custom_model())
    with pytest.raises(errors.KernelError, match="Scale 'scale' failed on reference: KeyError: 'inside'") as caught:
        session.run(None, {"x": np.float32([1])})
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, rv.RuntimeException)
    registered("mine", "Scale", lambda x: object(), replace=True)
    with pytest.raises(errors.InvalidValue, match="the function returned object"):
        rv.load(custom_model()).run({"x": np.float32([1])})
    registered("mine", "Scale", scale, replace=True)
    with pytest.raises(errors.InvalidValue, match="unknown attribute 'bye'"):
        rv.load(custom_model(bye=1.0)).run({"x": np.float32([1])})


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("d", "", scale), {}, "needs a name"),
        (("d", "Op", 3), {}, "expected a function, got int"),
        (("d", "Op", scale), {"version": 0}, "version must be a whole number"),
        (("d", "Op", scale), {"traits": ("randm",)}, "did you mean 'random'"),
    ],
)
def test_registrations_that_are_wrong(arguments: Any, options: Any, problem: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=problem):
        rv.register_op(*arguments, **options)
