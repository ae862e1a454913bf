"""Layers with constant weights: Conv, ConvTranspose, Gemm and MatMul as ``weights · x + bias`` per output channel."""

from __future__ import annotations

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops import NEWEST
from ranvier.ops.proto import schema_of
from ranvier.passes.edit import builder
from ranvier.passes.facts import dtype_of, only_use, rank_of, shape_of
from ranvier.records import dataclass

Array = np.ndarray


class NotFoldable(Exception):
    """Why a node cannot become part of a layer."""


@dataclass
class Layer:
    """A layer whose result is read by one node only."""

    node: Node
    weights: Value
    bias: Value | None
    channels: int
    axis: int  # of the channels in the result: 1, or -1 for the last one

    def fold(self, gain: Array, shift: Array, origin: str) -> None:
        """Make the layer compute ``gain * y + shift``; raises NotFoldable, and changes nothing, where it cannot."""
        if gain.shape != (self.channels,) or shift.shape != (self.channels,):
            raise NotFoldable("parameters are not one per channel")
        scales = bool(np.any(gain != 1))
        weights = self._scaled(gain) if scales else None
        offset = shift if self.bias is None else shift + gain * self._bias_per_channel()
        dtype = dtype_of(self.node.output)
        assert dtype is not None
        bias = _rounded(offset, dtype.numpy)
        shifts = self.bias is not None or not scales or bool(np.any(bias))
        if shifts and self.node.op == "MatMul" and not self._is_matrix_product():
            raise NotFoldable("a MatMul of higher rank has no bias")
        op = builder(self.node, origin)
        if weights is not None:
            self.node.set_input(1, op.constant(weights, self.weights.name))
        if shifts:
            self._attach(op.constant(bias, f"{self.node.name}.bias"))
        self.node.origin = origin

    def takes_bias(self, value: Value) -> bool:
        """``value``, constant or not, can be the bias operand as it is."""
        if self.node.op in ("Conv", "ConvTranspose"):
            return False  # what is added there has dimensions of size 1 that the operand must not have
        if self.node.op == "MatMul" and not self._is_matrix_product():
            return False
        if value.producer is not None and value.producer.graph is self.node.graph:
            return False  # it may be computed after the layer
        return dtype_of(value) is dtype_of(self.node.output) and shape_of(value) in (
            (self.channels,),
            (1, self.channels),
        )

    def set_bias(self, value: Value, origin: str) -> None:
        self._attach(value)
        self.node.origin = origin

    def _attach(self, bias: Value) -> None:
        node = self.node
        if node.op == "MatMul":
            node.op = "Gemm"
            node.version = schema_of("", "Gemm", NEWEST).since_version
        if node.op == "Gemm":
            node.attrs.pop("beta", None)
        node.set_input(2, bias)

    def _is_matrix_product(self) -> bool:
        return rank_of(self.node.inputs[0]) == 2 and rank_of(self.node.inputs[1]) == 2

    def _scaled(self, gain: Array) -> Array:
        node = self.node
        if self.weights.const is None:
            raise NotFoldable("weights are not constant")
        given = self.weights.const.raw()
        if node.op == "Conv":
            scaled = _product(given, gain.reshape(-1, *(1,) * (given.ndim - 1)))
        elif node.op == "ConvTranspose":  # [in, out / groups, …]; each group of inputs makes its own outputs
            groups = node.attrs.get("group", 1)
            grouped = given.reshape(groups, -1, *given.shape[1:])
            scaled = _product(grouped, gain.reshape(groups, 1, -1, *(1,) * (given.ndim - 2))).reshape(given.shape)
        else:
            scaled = _product(given, gain[:, None] if node.attrs.get("transB", 0) else gain)
        self.weights.const.release()
        return scaled

    def _bias_per_channel(self) -> Array:
        if self.bias is None or self.bias.const is None:
            raise NotFoldable("bias is not constant")
        bias = self.bias.const.numpy().astype(np.float64)
        if self.node.op == "Gemm":
            if bias.ndim > 1 and bias.shape[0] != 1:
                raise NotFoldable("bias differs from row to row")
            bias = np.broadcast_to(bias.reshape(-1), (self.channels,)) * self.node.attrs.get("beta", 1.0)
        return bias


def layer_of(value: Value | None) -> Layer | None:
    """The layer that makes ``value``, when nobody but one node reads it."""
    node = value.producer if value is not None else None
    if value is None or node is None or node.domain or node.op not in _LAYERS or only_use(value) is None:
        return None
    if node.op == "Gemm" and node.version < 7:
        return None
    dtype, shape = dtype_of(value), shape_of(node.inputs[1])
    if dtype is None or not dtype.is_float or shape is None or len(shape) < 2:
        return None
    weights, bias = node.inputs[1], node.input(2)
    assert weights is not None
    if node.op == "Conv":
        channels, axis = shape[0], 1
    elif node.op == "ConvTranspose":
        channels, axis = shape[1], 1
        channels = channels * node.attrs.get("group", 1) if isinstance(channels, int) else None
    elif node.op == "Gemm":
        channels, axis = shape[0 if node.attrs.get("transB", 0) else 1], -1
    elif len(shape) != 2:
        return None
    else:
        channels, axis = shape[1], -1
    return Layer(node, weights, bias, channels, axis) if isinstance(channels, int) else None


_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def per_channel(value: Value, layer: Layer) -> Array:
    """A constant that broadcasts against a layer's result along its channels only, as one number per channel."""
    if value.const is None:
        raise NotFoldable("other operand is not constant")
    array = value.const.numpy()
    rank = rank_of(layer.node.output if layer.node.op == "MatMul" else layer.weights)  # Conv and Gemm keep the rank
    if rank is None or array.ndim > rank:
        raise NotFoldable("other operand has the higher rank")
    shape = (1,) * (rank - array.ndim) + array.shape
    axis = layer.axis % rank
    if any(size != 1 for k, size in enumerate(shape) if k != axis) or shape[axis] not in (1, layer.channels):
        raise NotFoldable("other operand differs within a channel")
    return np.broadcast_to(array.reshape(-1), (layer.channels,)).astype(np.float64)


def _product(weights: Array, gain: Array) -> Array:
    """Computed in float64 and rounded once, piece by piece: large weights are not kept in both precisions."""
    if weights.dtype != np.float32:
        return _rounded(weights.astype(np.float64) * gain, weights.dtype)
    with np.errstate(over="ignore"):
        scaled = np.empty(weights.shape, np.float32)
        np.multiply(weights, gain, out=scaled, dtype=np.float64, casting="same_kind")
    if not np.isfinite(scaled).all():
        raise NotFoldable("a weight would not be finite")
    return scaled


def _rounded(exact: Array, dtype: np.dtype) -> Array:
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    if not np.all(np.isfinite(rounded.astype(np.float64))):
        raise NotFoldable("a weight would not be finite")
    return rounded
