"""Layers between DequantizeLinear nodes of 16-bit codes: computed of the codes where the processor multiplies those,
and with the same results everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ranvier as rv
from ranvier.codegen.llvm import isa
from ranvier.codegen.llvm.integer import multiplies_words
from tests.providers.cpu.compare import Array, agree

RNG = np.random.default_rng(7)
FAST = multiplies_words(isa.host())
STEP = np.float32(2.0**-12)


def weights(shape: tuple[int, ...], axis: int, kind: type, most: int = 65535) -> tuple[Array, Array]:
    """Codes whose sums along the other axes are at most so large, and their scales."""
    numbers = RNG.standard_normal(shape)
    others = tuple(k for k in range(len(shape)) if k != axis)
    steps = np.maximum(np.abs(numbers).sum(others) / (most * 0.95), np.abs(numbers).max(others) / np.iinfo(kind).max)
    spread = steps.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return np.rint(numbers / spread).astype(kind), steps.astype(np.float32)


def model(
    op: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    kind: type = np.int16,
    zero: int = 0,
    unsigned: bool = False,
    bias: bool = True,
    single: bool = False,
    also: bool = False,
    weight_zero: int = 0,
    most: int = 65535,
    **attrs: Any,
) -> onnx.ModelProto:
    """``also``: the numbers of the data are a result too; ``single``: one scale for all weights."""
    axis = 1 if op == "MatMul" or (op == "Gemm" and not attrs.get("transB")) else 0
    codes, steps = weights(w, axis, kind, most // 2 if zero else most)
    outputs = w[axis]
    steps = steps.max() if single else steps
    kept = {
        "xs": STEP,
        "xz": np.array(zero + 32768, np.uint16) if unsigned else np.array(zero, np.int16),
        "w": codes,
        "ws": steps,
        "wz": np.full(steps.shape, weight_zero, kind),
        "b": RNG.standard_normal(outputs).astype(np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["data"], "data"),
        helper.make_node(
            "DequantizeLinear", ["w", "ws", "wz"], ["weights"], "weights", **({} if single else {"axis": axis})
        ),
        helper.make_node(op, ["data", "weights", *(["b"] if bias and op != "MatMul" else [])], ["p"], "layer", **attrs),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    if also:
        nodes.append(helper.make_node("Neg", ["data"], ["other"]))
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("x", 1, x)],
        [onnx.ValueInfoProto(name=name) for name in ("y", *(["other"] if also else []))],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in kept.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def of_codes(made: onnx.ModelProto, x: Array) -> bool:
    """Whether the layer is made of codes: then nothing dequantizes them."""
    with rv.load(made.SerializeToString(), providers=["cpu"]) as session:
        session.run({"x": x})
        with session.profile() as profiler:
            session.run({"x": x})
        return not any("data" in record.label.split(" + ") for record in profiler.records())


def data(*shape: int) -> Array:
    """Among it what lies beyond all codes."""
    x = RNG.standard_normal(shape).astype(np.float32)
    x.reshape(-1)[:3] = 1e9, -1e9, np.nan
    return x


TAKEN = {
    "3x3": ("Conv", (2, 16, 9, 11), (24, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "stride": ("Conv", (1, 3, 17, 16), (24, 3, 3, 3), {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    "1x1": ("Conv", (1, 16, 9, 9), (40, 16, 1, 1), {}),
    "signal": ("Conv", (1, 6, 30), (8, 6, 5), {"pads": [2, 2]}),
    "few outputs": ("Conv", (1, 4, 11, 20), (3, 4, 9, 9), {"pads": [4] * 4}),
    "same": ("Conv", (1, 8, 10, 10), (8, 8, 3, 3), {"auto_pad": "SAME_UPPER"}),
    "rows": ("MatMul", (2, 20, 48), (48, 30), {}),
    "one row": ("MatMul", (1, 47), (47, 30), {}),
    "gemm": ("Gemm", (20, 48), (48, 30), {}),
    "turned": ("Gemm", (20, 48), (30, 48), {"transB": 1}),
}


@pytest.mark.parametrize("kind", [np.int8, np.int16])
@pytest.mark.parametrize("zero", [0, -3000])
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_layers_of_codes(name: str, unsigned: bool, zero: int, kind: type) -> None:
    op, x, w, attrs = TAKEN[name]
    made, feed = model(op, x, w, kind=kind, zero=zero, unsigned=unsigned, **attrs), data(*x)
    agree(made, {"x": feed}, rtol=1e-5, atol=1e-4)
    assert of_codes(made, feed) == FAST


def test_one_scale_for_all_weights_and_no_bias() -> None:
    made = model("Conv", (1, 8, 9, 9), (16, 8, 3, 3), single=True, bias=False)
    agree(made, {"x": data(1, 8, 9, 9)}, rtol=1e-5, atol=1e-4)
    assert of_codes(made, data(1, 8, 9, 9)) == FAST


def test_numbers_that_others_read_are_there_too() -> None:
    made = model("MatMul", (20, 48), (48, 30), also=True)
    agree(made, {"x": data(20, 48)}, rtol=1e-5, atol=1e-4)


LEFT = {
    "groups": ("Conv", (1, 8, 9, 9), (16, 4, 3, 3), {"group": 2}),
    "a volume": ("Conv", (1, 8, 4, 5, 5), (16, 8, 2, 2, 2), {}),
    "a zero point of weights": ("MatMul", (20, 48), (48, 30), {"weight_zero": 3}),
    "sums that int32 may not hold": ("MatMul", (20, 48), (48, 30), {"most": 80000}),
    "scaled": ("Gemm", (20, 48), (48, 30), {"alpha": 0.5}),
    "turned data": ("Gemm", (48, 20), (48, 30), {"transA": 1}),
}


@pytest.mark.parametrize("name", LEFT)
def test_layers_of_numbers(name: str) -> None:
    op, x, w, attrs = LEFT[name]
    made, feed = model(op, x, w, **attrs), data(*x)
    agree(made, {"x": feed}, rtol=1e-5, atol=1e-4)
    assert not of_codes(made, feed)


def test_other_processors_compute_numbers() -> None:
    made, feed = model("Conv", (1, 8, 9, 9), (16, 8, 3, 3), pads=[1, 1, 1, 1]), data(1, 8, 9, 9)
    found = []
    for name in ("portable", ""):
        options = {"cpu": {"isa": name}} if name else {}
        with rv.load(made.SerializeToString(), providers=["cpu"], provider_options=options) as session:
            found.append(np.asarray(session.run({"x": feed})["y"]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-4)
