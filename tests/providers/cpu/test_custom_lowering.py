"""Operators of the user's own compiled into the model; the NumPy body is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.codegen.loops.ir import Nest
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.providers.cpu.custom import lower_op, unlower_op
from tests.codegen.harness import ISAS

DOMAIN = "test.lowered"
FLOAT = onnx.TensorProto.FLOAT


def scaled(x: Any, bias: Any = None, *, by: float = 1.0) -> Any:
    """x scaled by the norm of its row, plus a bias where there is one."""
    y = x * np.float32(by) / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6))
    return (y if bias is None else y + bias).astype(x.dtype)


def loops_of_scaled(loops: Any, x: Any, bias: Any, out: Any, *, by: float = 1.0) -> Nest:
    loops.over(*x.shape, row=(-1,))
    y = x * by / loops.sqrt(loops.sum(x * x) + 1e-6)
    return loops.store(out, y if bias is None else y + bias)


@pytest.fixture(autouse=True)
def operator() -> Iterator[None]:
    rv.register_op(DOMAIN, "Scaled", scaled, infer=lambda call: [call.type(0)])
    yield
    rv.unregister_op(DOMAIN, "Scaled")


@pytest.fixture
def lowered() -> Iterator[None]:
    lower_op(DOMAIN, "Scaled", loops_of_scaled)
    yield
    unlower_op(DOMAIN, "Scaled")


def model(bias: bool = True, kind: int = FLOAT, **attrs: Any) -> bytes:
    """The operator between two of the standard's, which the CPU compiles together with it."""
    operands = ["h", "b"] if bias else ["h", ""]
    nodes = [
        helper.make_node("Tanh", ["x"], ["h"]),
        helper.make_node("Scaled", operands, ["s"], domain=DOMAIN, **attrs),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, kind, ["m", "n"]) for name in "xy"]
    inputs = [ends[0], *([helper.make_tensor_value_info("b", kind, ["n"])] if bias else [])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(helper.make_graph(nodes, "m", inputs, ends[1:]), opset_imports=opsets)
    data: bytes = made.SerializeToString()
    return data


def data(m: int, n: int, bias: bool = True) -> dict[str, Any]:
    made = np.random.default_rng(m + n)
    found = {"x": made.standard_normal((m, n)).astype(np.float32)}
    return found | ({"b": made.standard_normal(n).astype(np.float32)} if bias else {})


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.key)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("attrs", [{}, {"by": 2.5}])
def test_it_computes_what_the_body_does(lowered: None, isa: Any, bias: bool, attrs: Any) -> None:
    options = {"cpu": {"isa": isa.name}}
    with (
        rv.load(model(bias, **attrs), providers=["cpu"], provider_options=options) as compiled,
        rv.load(model(bias, **attrs), providers=["reference"]) as reference,
    ):
        assert {node.provider for node in compiled.report.nodes} == {"cpu"}
        for m, n in ((1, 1), (7, 33), (300, 260), (0, 4)):
            x = data(m, n, bias)
            np.testing.assert_allclose(compiled.run(x)["y"], reference.run(x)["y"], rtol=2e-5, atol=1e-6)


def test_without_loops_the_operator_stays_with_its_body() -> None:
    with rv.load(model(), providers=["cpu", "reference"], optimization="none") as session:
        placed = {node.op: node.provider for node in session.report.nodes}
    assert placed == {"Tanh": "cpu", "Scaled": "reference", "Relu": "cpu"}


def test_a_body_that_was_replaced_is_what_counts(lowered: None) -> None:
    rv.register_op(DOMAIN, "Scaled", lambda x, b: -x, infer=lambda call: [call.type(0)], replace=True)
    with rv.load(model(), providers=["cpu", "reference"]) as session:
        x = data(3, 4)
        np.testing.assert_allclose(session.run(x)["y"], np.maximum(-np.tanh(x["x"]), 0), rtol=1e-6)
        (node,) = [n for n in session.report.nodes if n.op == "Scaled"]
    assert node.provider == "reference"
    assert any("another function stands" in reason for _, reason in node.declined)


def test_attributes_the_loops_do_not_know_leave_the_node_to_the_body() -> None:
    lower_op(DOMAIN, "Scaled", lambda loops, x, bias, out: loops.store(out, x))
    try:
        with rv.load(model(by=3.0), providers=["cpu", "reference"]) as session:
            (node,) = [n for n in session.report.nodes if n.op == "Scaled"]
            assert node.provider == "reference"
            assert any("other operands or attributes" in reason for _, reason in node.declined)
    finally:
        unlower_op(DOMAIN, "Scaled")


def test_loops_that_are_refused_leave_the_part_to_the_bodies(caplog: pytest.LogCaptureFixture) -> None:
    lower_op(DOMAIN, "Scaled", lambda loops, x, bias, out: loops.store(out, out + x))
    try:
        with (
            rv.load(model(), providers=["cpu"]) as session,
            rv.load(model(), providers=["reference"]) as reference,
        ):
            x = data(5, 6)
            np.testing.assert_allclose(session.run(x)["y"], reference.run(x)["y"], rtol=1e-5)
        assert "is only written to" in caplog.text
    finally:
        unlower_op(DOMAIN, "Scaled")


def test_types_can_be_left_out(lowered: None) -> None:
    unlower_op(DOMAIN, "Scaled")
    lower_op(DOMAIN, "Scaled", loops_of_scaled, dtypes={DType.float64})
    with rv.load(model(), providers=["cpu", "reference"]) as session:
        (node,) = [n for n in session.report.nodes if n.op == "Scaled"]
    assert node.provider == "reference"


def test_what_can_be_lowered() -> None:
    with pytest.raises(InvalidConfig, match="register_op comes first"):
        lower_op(DOMAIN, "Missing", loops_of_scaled)
    with pytest.raises(InvalidConfig, match="Relu is compiled already"):
        lower_op("ai.onnx", "Relu", loops_of_scaled)
    with pytest.raises(InvalidConfig, match="expected a function, got int"):
        lower_op(DOMAIN, "Scaled", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="has no loops"):
        unlower_op(DOMAIN, "Scaled")
    for options, said in (({}, "no type rule"), ({"traits": ("random",), "infer": len}, "depends on more")):
        rv.register_op(DOMAIN, "Odd", lambda x: x, **options)  # type: ignore[arg-type]
        try:
            with pytest.raises(InvalidConfig, match=said):
                lower_op(DOMAIN, "Odd", loops_of_scaled)
        finally:
            rv.unregister_op(DOMAIN, "Odd")
