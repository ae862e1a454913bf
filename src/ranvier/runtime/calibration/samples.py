"""Small graphs, one class of operators each, whose run times a calibration measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """A graph to run: ``count`` nodes of class ``kind`` in a row, and what to feed it with."""

    kind: str
    dtype: str
    make: Callable[[], Built]
    urgent: bool = False  # belongs to a quick calibration

    @property
    def name(self) -> str:
        return f"{self.kind} {self.dtype}"


class Built:
    """A graph under construction with one input."""

    def __init__(self, shape: Sequence[int], dtype: DType = DType.float32, name: str = "sample") -> None:
        self.graph = Graph(name, opsets={"": 21})
        self.rng = np.random.default_rng(0)
        self.dtype = dtype
        self.value = self.graph.add_input("x", TensorType(dtype, tuple(shape)))
        self.feed = {"x": self.random(shape)}
        self.measured: list[Any] = []  # the nodes whose time is wanted

    def random(self, shape: Sequence[int]) -> Array:
        if self.dtype.name in ("int8", "uint8"):
            return self.rng.integers(0, 100, tuple(shape)).astype(self.dtype.numpy)
        return self.rng.standard_normal(tuple(shape)).astype(self.dtype.numpy)

    def constant(self, array: Array) -> Value:
        return self.graph.add_constant(ConstTensor.of(array))

    def weights(self, *shape: int) -> Value:
        scale = 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
        block = (self.rng.standard_normal(4096) * scale).astype(self.dtype.numpy)
        return self.constant(np.resize(block, shape))  # random numbers for all of it would take longer than the runs

    def add(self, op: str, *others: Value | None, counted: bool = True, **attrs: Any) -> Built:
        """Another node over the last result."""
        node = self.graph.add(op, [self.value, *others], attrs)
        complete(node)
        if counted:
            self.measured.append(node)
        self.value = node.outputs[0]
        return self

    def finished(self) -> Built:
        self.value.name = "y"
        self.graph.outputs = [self.value]
        return self


def _elementwise(elements: int, dtype: DType = DType.float32) -> Built:
    return Built((elements // 64, 64), dtype).add("Relu").finished()


def _math(elements: int) -> Built:
    return Built((elements // 64, 64)).add("Sigmoid").finished()


def _fused(elements: int) -> Built:
    """What elementwise nodes add to the one they follow."""
    made = Built((elements // 64, 64)).add("Relu", counted=False)
    for k in range(6):
        scale = made.constant(np.linspace(0.5, 1.5, 64, dtype=np.float32) + k)
        made.add("Mul" if k % 2 else "Add", scale)
    return made.finished()


def _reduction(elements: int) -> Built:
    made = Built((elements // 64, 64))
    return made.add("ReduceSum", made.constant(np.array([1], np.int64))).finished()


def _normalisation(elements: int) -> Built:
    made = Built((elements // 256, 256))
    one, zero = made.constant(np.ones(256, np.float32)), made.constant(np.zeros(256, np.float32))
    return made.add("LayerNormalization", one, zero).add("Softmax").finished()


def _movement(elements: int) -> Built:
    return (
        Built((elements // 1024, 32, 32)).add("Transpose", perm=[0, 2, 1]).add("Transpose", perm=[1, 0, 2]).finished()
    )


def _gather(elements: int) -> Built:
    made = Built((elements // 64, 64))
    order = made.rng.permutation(elements // 64).astype(np.int64)
    return made.add("Gather", made.constant(order)).finished()


def _pooling(channels: int, side: int) -> Built:
    made = Built((1, channels, side, side))
    return made.add("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]).finished()


def _resize(channels: int, side: int) -> Built:
    made = Built((1, channels, side, side))
    scales = made.constant(np.array([1, 1, 2, 2], np.float32))
    return made.add("Resize", None, scales, mode="linear").finished()


def _quantise(elements: int) -> Built:
    made = Built((elements // 64, 64))
    scale, zero = made.constant(np.array(0.05, np.float32)), made.constant(np.array(128, np.uint8))
    return made.add("QuantizeLinear", scale, zero).finished()


def _product(rows: int, inner: int, columns: int, dtype: DType = DType.float32, count: int = 1) -> Built:
    made = Built((rows, inner), dtype)
    for _ in range(count):
        made.add("MatMul", made.weights(inner, columns))
    return made.finished()


def _integer_product(rows: int, inner: int, columns: int) -> Built:
    made = Built((rows, inner), DType.uint8)
    weights = made.constant(made.rng.integers(-100, 100, (inner, columns)).astype(np.int8))
    return made.add("MatMulInteger", weights).finished()


def _convolution(channels: int, side: int, kernel: int, *, group: int = 1, count: int = 4) -> Built:
    """Several in a row, so that what happens at the ends of a part counts little."""
    made = Built((1, channels, side, side))
    for _ in range(count):
        pads = [kernel // 2] * 4
        made.add("Conv", made.weights(channels, channels // group, kernel, kernel), pads=pads, group=group)
    return made.finished()


def _integer_convolution(channels: int, side: int, kernel: int) -> Built:
    made = Built((1, channels, side, side), DType.uint8)
    scale, zero = made.constant(np.array(0.05, np.float32)), made.constant(np.array(128, np.uint8))
    middle = made.constant(np.array(0, np.int8))
    for _ in range(3):
        weights = made.constant(made.rng.integers(-100, 100, (channels, channels, kernel, kernel)).astype(np.int8))
        made.add("QLinearConv", scale, zero, weights, scale, middle, scale, zero, pads=[kernel // 2] * 4)
    return made.finished()


def _first_convolution(channels: int, side: int) -> Built:
    made = Built((1, 3, side, side))
    weights = made.weights(channels, 3, 3, 3)
    return made.add("Conv", weights, pads=[1, 1, 1, 1], strides=[2, 2]).finished()


def _transposed_convolution(channels: int, side: int) -> Built:
    made = Built((1, channels, side, side))
    weights = made.weights(channels, channels, 2, 2)
    return made.add("ConvTranspose", weights, strides=[2, 2]).finished()


def _attention(heads: int, length: int) -> Built:
    made = Built((1, heads, length, 64))
    return made.add("Attention", made.value, made.value).finished()


def _recurrent(length: int, size: int) -> Built:
    made = Built((length, 1, size))
    return made.add(
        "LSTM", made.weights(1, 4 * size, size), made.weights(1, 4 * size, size), hidden_size=size
    ).finished()


def tiny() -> Built:
    """As little as can be: what is left is the launch."""
    return Built((1, 16)).add("Relu").finished()


def tiny_row(count: int = 16) -> Built:
    """Nodes that do next to nothing, and that nobody can run as one."""
    made = Built((4, 4))
    for _ in range(count):
        made.add("MatMul", made.weights(4, 4))
    return made.finished()


def looping(trips: int) -> Built:
    """A loop whose body is as little as can be: what a round takes beside it is the loop's own."""
    made = Built((1, 16))
    body = Graph("body", opsets=made.graph.opsets)
    body.add_input("step", TensorType(DType.int64, ()))
    going = body.add_input("going", TensorType(DType.bool, ()))
    node = body.add("Relu", [body.add_input("x", TensorType(DType.float32, (1, 16)))])
    complete(node)
    body.outputs = [going, node.outputs[0]]
    count = made.constant(np.array(trips, np.int64))
    loop = made.graph.add("Loop", [count, None, made.value], {"body": body})
    complete(loop)
    made.value = loop.outputs[0]
    return made.finished()


def _sample(kind: str, make: Callable[[], Built], *, dtype: str = "float32", urgent: bool = False) -> Sample:
    return Sample(kind, dtype, make, urgent)


def samples() -> list[Sample]:
    """All of them, the most telling first: whoever has little time stops early."""
    s = _sample
    return [
        s("product", lambda: _product(128, 512, 512), urgent=True),
        s("elementwise", lambda: _elementwise(1 << 18), urgent=True),
        s("conv.pointwise", lambda: _convolution(64, 28, 1), urgent=True),
        s("conv.3x3", lambda: _convolution(64, 28, 3), urgent=True),
        s("product", lambda: _product(16, 64, 64, count=8), urgent=True),
        s("elementwise", lambda: _elementwise(1 << 14), urgent=True),
        s("movement", lambda: _movement(1 << 17), urgent=True),
        s("product.thin", lambda: _product(1, 1024, 1024), urgent=True),
        s("normalisation", lambda: _normalisation(1 << 16), urgent=True),
        s("conv.depthwise", lambda: _convolution(64, 28, 3, group=64)),
        s("conv.dense", lambda: _convolution(32, 28, 5)),
        s("elementwise.fused", lambda: _fused(1 << 17)),
        s("elementwise.math", lambda: _math(1 << 17)),
        s("reduction", lambda: _reduction(1 << 17)),
        s("pooling", lambda: _pooling(64, 56)),
        s("product", lambda: _product(256, 1024, 1024)),
        s("product", lambda: _product(32, 256, 256, count=4)),
        s("conv.first", lambda: _first_convolution(32, 224)),
        s("gather", lambda: _gather(1 << 16)),
        s("product", lambda: _integer_product(128, 512, 512), dtype="int8"),
        s("conv.3x3", lambda: _integer_convolution(64, 28, 3), dtype="int8"),
        s("conv.pointwise", lambda: _integer_convolution(64, 28, 1), dtype="int8"),
        s("attention", lambda: _attention(8, 128)),
        s("recurrent", lambda: _recurrent(32, 128)),
        s("resize", lambda: _resize(32, 28)),
        s("quantise", lambda: _quantise(1 << 16), dtype="int8"),
        s("conv.transposed", lambda: _transposed_convolution(32, 28)),
        s("conv.pointwise", lambda: _convolution(16, 8, 1)),
        s("conv.pointwise", lambda: _convolution(256, 28, 1, count=2)),
        s("conv.3x3", lambda: _convolution(16, 8, 3)),
        s("conv.3x3", lambda: _convolution(128, 28, 3, count=2)),
        s("conv.dense", lambda: _convolution(16, 8, 5)),
        s("conv.dense", lambda: _convolution(64, 28, 5, count=2)),
        s("conv.depthwise", lambda: _convolution(16, 8, 3, group=16)),
        s("conv.depthwise", lambda: _convolution(96, 112, 3, group=96, count=2)),
        s("elementwise", lambda: _elementwise(1 << 22)),
        s("elementwise.math", lambda: _math(1 << 14)),
        s("elementwise.fused", lambda: _fused(1 << 14)),
        s("movement", lambda: _movement(1 << 14)),
        s("movement", lambda: _movement(1 << 21)),
        s("normalisation", lambda: _normalisation(1 << 13)),
        s("normalisation", lambda: _normalisation(1 << 20)),
        s("reduction", lambda: _reduction(1 << 15)),
        s("pooling", lambda: _pooling(16, 14)),
        s("gather", lambda: _gather(1 << 14)),
        s("product.thin", lambda: _product(1, 128, 128, count=8)),
        s("product.thin", lambda: _product(1, 2048, 2048)),
        s("product.thin", lambda: _product(1, 3072, 3072)),
        s("conv.first", lambda: _first_convolution(8, 32)),
        s("attention", lambda: _attention(4, 16)),
        s("recurrent", lambda: _recurrent(4, 32)),
        s("recurrent", lambda: _recurrent(8, 512)),
        s("resize", lambda: _resize(8, 8)),
        s("quantise", lambda: _quantise(1 << 14), dtype="int8"),
        s("product", lambda: _integer_product(32, 128, 128), dtype="int8"),
        s("conv.3x3", lambda: _integer_convolution(16, 8, 3), dtype="int8"),
        s("product", lambda: _product(128, 512, 512, DType.float64), dtype="float64"),
        s("elementwise", lambda: _elementwise(1 << 18, DType.float64), dtype="float64"),
        s("product", lambda: _product(128, 512, 512, DType.float16), dtype="float16"),
        s("elementwise", lambda: _elementwise(1 << 18, DType.float16), dtype="float16"),
    ]
