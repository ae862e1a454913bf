"""The provider mlx, wherever the package is installed: what its conformance cases do not ask."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranvier as rv
from ranvier import errors
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.providers.mlx import kernel as mlx_kernel
from ranvier.runtime.session import Session

pytest.importorskip("mlx.core")

F32, I64 = DType.float32, DType.int64
RANDOM = np.random.default_rng(11)


def graph(*inputs: tuple[str, DType, tuple[Any, ...]]) -> tuple[Graph, list[Value]]:
    made = Graph("small", opsets={"": 21})
    return made, [made.add_input(name, TensorType(dtype, shape)) for name, dtype, shape in inputs]


def add(made: Graph, op: str, operands: list[Value | None], version: int, kind: TensorType, **attrs: Any) -> Value:
    value = made.add(op, operands, attrs, version=version).output
    value.type = kind
    return value


def constant(made: Graph, array: Any, name: str) -> Value:
    return made.add_constant(ConstTensor.of(np.asarray(array)), name)


def session(made: Graph, result: Value, **options: Any) -> Session:
    result.name = "y"
    made.outputs = [result]
    found = rv.load(
        made, optimization="none", providers=["mlx", "reference"], provider_options={"mlx": options}, fallback="off"
    )
    assert {node.provider for node in found.report.nodes} == {"mlx"}
    return found


def heads(**options: Any) -> Session:
    """``[batch, time, 12]`` as ``[batch, 3, time, 4]`` by a shape that is computed on the way."""
    batch, time = Symbol("batch"), Symbol("time")
    made, (x,) = graph(("x", F32, (batch, time, 12)))
    shape = add(made, "Shape", [x], 21, TensorType(I64, (3,)))
    lead = add(
        made,
        "Slice",
        [shape, constant(made, np.array([0]), "first"), constant(made, np.array([2]), "last")],
        13,
        TensorType(I64, (2,)),
    )
    sizes = add(made, "Concat", [lead, constant(made, np.array([3, 4]), "split")], 13, TensorType(I64, (4,)), axis=0)
    split = add(made, "Reshape", [x, sizes], 21, TensorType(F32, (batch, time, 3, 4)))
    turned = add(made, "Transpose", [split], 21, TensorType(F32, (batch, 3, time, 4)), perm=[0, 2, 1, 3])
    y = add(made, "Exp", [turned], 13, TensorType(F32, (batch, 3, time, 4)))
    return session(made, y, **options)


@pytest.mark.parametrize("fuse", [False, True])
def test_sizes_are_computed_on_the_way(fuse: bool) -> None:
    if fuse and shutil.which("g++") is None and sys.platform != "darwin":
        pytest.skip("mlx needs a C++ compiler to fuse on a processor")
    with heads(fuse=fuse) as made:
        for batch, time in ((1, 2), (2, 5), (1, 2)):
            x = RANDOM.standard_normal((batch, time, 12)).astype(np.float32)
            wanted = np.exp(x.reshape(batch, time, 3, 4).transpose(0, 2, 1, 3))
            found = made.run({"x": x})["y"]
            assert found.flags.c_contiguous
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("fuse", [False, True])
def test_contents_that_shape_a_result_are_part_of_what_is_compiled(fuse: bool) -> None:
    if fuse and shutil.which("g++") is None and sys.platform != "darwin":
        pytest.skip("mlx needs a C++ compiler to fuse on a processor")
    made, (x, sizes) = graph(("x", F32, (12,)), ("sizes", I64, (2,)))
    split = add(made, "Reshape", [x, sizes], 21, TensorType(F32, (Symbol("a"), Symbol("b"))))
    y = add(made, "Neg", [split], 13, TensorType(F32, (Symbol("a"), Symbol("b"))))
    with session(made, y, fuse=fuse) as opened:
        x_given = np.arange(12, dtype=np.float32)
        for shape in ((3, 4), (2, 6), (12, 1), (3, 4)):
            found = opened.run({"x": x_given, "sizes": np.array(shape)})["y"]
            np.testing.assert_array_equal(found, -x_given.reshape(shape))


def test_weights_are_turned_once_and_the_result_is_right() -> None:
    made, (x,) = graph(("x", F32, (1, 4, 6, 5)))
    weights = RANDOM.standard_normal((6, 2, 3, 3)).astype(np.float32)
    bias = RANDOM.standard_normal(6).astype(np.float32)
    operands: list[Value | None] = [x, constant(made, weights, "w"), constant(made, bias, "b")]
    y = add(made, "Conv", operands, 22, TensorType(F32, (1, 6, 3, 5)), group=2, pads=[1, 2, 0, 0], strides=[2, 1])
    with session(made, y) as opened:
        given = RANDOM.standard_normal((1, 4, 6, 5)).astype(np.float32)
        padded = np.pad(given, ((0, 0), (0, 0), (1, 0), (2, 0)))
        wanted = np.empty((1, 6, 3, 5), np.float32)
        for m, i, j in np.ndindex(6, 3, 5):
            first = 2 * (m // 3)
            window = padded[0, first : first + 2, 2 * i : 2 * i + 3, j : j + 3]
            wanted[0, m, i, j] = (window * weights[m]).sum() + bias[m]
        for _ in range(2):
            np.testing.assert_allclose(opened.run({"x": given})["y"], wanted, rtol=1e-4, atol=1e-4)


def test_a_result_that_is_a_weight_belongs_to_the_caller() -> None:
    made, (x,) = graph(("x", F32, (4,)))
    weight = constant(made, np.arange(4, dtype=np.float32), "w")
    copied = add(made, "Identity", [weight], 21, TensorType(F32, (4,)))
    total = add(made, "Add", [x, copied], 14, TensorType(F32, (4,)))
    total.name = "total"
    copied.name = "copied"
    made.outputs = [total, copied]
    with rv.load(made, optimization="none", providers=["mlx", "reference"]) as opened:
        zeros = np.zeros(4, np.float32)
        opened.run({"x": zeros})["copied"][:] = 99
        found = opened.run({"x": zeros})
        np.testing.assert_array_equal(found["total"], np.arange(4))
        np.testing.assert_array_equal(found["copied"], np.arange(4))


def test_bfloat16_crosses_over_unharmed() -> None:
    made, (x,) = graph(("x", DType.bfloat16, (3,)))
    y = add(made, "Neg", [x], 13, TensorType(DType.bfloat16, (3,)))
    with session(made, y) as opened:
        given = np.array([1.5, -2.0, np.inf]).astype(ml_dtypes.bfloat16)
        found = opened.run({"x": given})["y"]
        assert found.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.astype(np.float32), [-1.5, 2.0, -np.inf])


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_whole_numbers_are_not_divided_by_zero(op: str) -> None:
    kind = TensorType(DType.int32, (4,))
    made, (a, b) = graph(("a", DType.int32, (4,)), ("b", DType.int32, (4,)))
    y = add(made, op, [a, b], 14 if op == "Div" else 13, kind)
    with session(made, y) as opened:
        dividend = np.array([7, -7, 7, -7], np.int32)
        divisor = np.array([2, 2, -2, -2], np.int32)
        found = opened.run({"a": dividend, "b": divisor})["y"].tolist()
        assert found == ([3, -3, -3, 3] if op == "Div" else [1, 1, -1, -1])
        with pytest.raises(errors.InvalidValue, match="divided by zero"):
            opened.run({"a": dividend, "b": np.array([1, 0, 1, 1], np.int32)})


@pytest.mark.parametrize("index", [3, -4, 2**40])
def test_an_index_outside_reads_nothing(index: int) -> None:
    made, (x, at) = graph(("x", F32, (3, 2)), ("at", I64, (1,)))
    y = add(made, "Gather", [x, at], 13, TensorType(F32, (1, 2)), axis=0)
    with session(made, y) as opened:
        given = np.arange(6, dtype=np.float32).reshape(3, 2)
        np.testing.assert_array_equal(opened.run({"x": given, "at": np.array([-1])})["y"], given[2:])
        with pytest.raises(errors.InvalidValue, match="outside an axis of 3"):
            opened.run({"x": given, "at": np.array([index])})


def test_what_it_leaves_has_a_reason() -> None:
    made, (x,) = graph(("x", DType.float64, (2,)))
    y = add(made, "Relu", [x], 14, TensorType(DType.float64, (2,)))
    found = add(made, "NonZero", [y], 13, TensorType(I64, (1, Symbol("n"))))
    made.outputs = [found]
    with rv.load(made, optimization="none", providers=["mlx", "reference"]) as opened:
        reasons = [dict(node.declined)["mlx"] for node in opened.report.nodes]
        assert reasons == ["Metal has no float64", "it is not lowered to mlx"]


def test_a_result_of_another_type_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (x,) = graph(("x", F32, (3,)))
    y = add(made, "Neg", [x], 13, TensorType(F32, (3,)))
    y.name = "y"
    made.outputs = [y]
    monkeypatch.setattr(mlx_kernel, "to_numpy", lambda array: np.zeros(3, np.float64))
    with rv.load(made, optimization="none", providers=["mlx", "reference"]) as opened:
        found = opened.run({"x": np.ones(3, np.float32)})["y"]
        assert found.dtype == np.float32 and found.tolist() == [-1, -1, -1]
        assert any("mlx failed while running" in text for text in opened.report.fallbacks)


def test_options_are_checked() -> None:
    with pytest.raises(errors.InvalidConfig, match="gpu"):
        heads(device="gpus")
    with pytest.raises(errors.InvalidConfig, match="device"):
        heads(devices="cpu")
    with heads(device="cpu") as made:
        assert made.run({"x": np.zeros((1, 1, 12), np.float32)})["y"].shape == (1, 3, 1, 4)
