"""Folds what is done to every channel of a layer's result into the layer: BatchNormalization, scales, biases.

A layer (Conv, ConvTranspose, Gemm, MatMul) with constant weights, followed by ``y * gain + shift`` per output channel,
is a layer with other weights. They are computed in float64 and rounded once, so a result differs from the unfolded one
by rounding. That is done for BatchNormalization, whose own formula is not rounded in any fixed way either; other
arithmetic is folded at level ``basic`` only where no result changes, and at ``aggressive`` otherwise.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.base import PassContext
from ranvier.passes.edit import bypass
from ranvier.passes.facts import dtype_of, rank_of
from ranvier.passes.layers import Layer, NotFoldable, layer_of, per_channel
from ranvier.passes.reassociate import reassociate

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_SINGLY_ROUNDED = (DType.float32, DType.float64)  # narrower types round after the product, and again after the bias


class FoldAffine:
    name: ClassVar[str] = "fold_affine"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for node in each:
                if node.domain:
                    continue
                if node.op == "BatchNormalization":
                    self._batch_normalization(node, ctx)
                elif node.op in ARITHMETIC and node.version >= 7:  # before, operands were aligned by attributes
                    self._arithmetic(node, ctx)
        return ctx.changes > 0

    def _batch_normalization(self, node: Node, ctx: PassContext) -> None:
        operand = node.inputs[0]
        try:
            if node.version < 9:
                raise NotFoldable("it has an old form")
            if node.attrs.get("training_mode", 0) or len(node.outputs) > 1:
                raise NotFoldable("it trains")
            layer = layer_of(operand)
            if layer is None:
                raise NotFoldable("no layer before it")
            if layer.axis != 1 and rank_of(operand) != 2:
                raise NotFoldable("its channels are not those of the layer")
            scale, bias, mean, var = (_constant(v) for v in node.inputs[1:5])
            with np.errstate(all="ignore"):
                gain = scale / np.sqrt(var + node.attrs.get("epsilon", 1e-5))
                shift = bias - mean * gain
            layer.fold(gain, shift, self.name)
        except NotFoldable as reason:
            ctx.left("BatchNormalization", str(reason))
            return
        bypass(node, layer.node.output, self.name)
        ctx.changed(f"BatchNormalization into {layer.node.op}")

    def _arithmetic(self, node: Node, ctx: PassContext) -> None:
        aggressive = ctx.config.optimization == "aggressive"
        if reassociate(node, aggressive):
            ctx.changed(f"constants of {node.op}")
        for position in (0, 1):
            operand, other = node.inputs[position], node.inputs[1 - position]
            layer = layer_of(operand)
            if layer is None or other is None:
                continue
            try:
                self._into_layer(node, layer, position, other, aggressive)
            except NotFoldable as reason:
                ctx.left(f"{node.op} after {layer.node.op}", str(reason))
                continue
            bypass(node, layer.node.output, self.name)
            ctx.changed(f"{node.op} into {layer.node.op}")
            return

    def _into_layer(self, node: Node, layer: Layer, position: int, other: Value, aggressive: bool) -> None:
        """Fold ``layer ∘ other``, where the layer is operand ``position`` of the node."""
        if node.op == "Div" and position == 1:
            raise NotFoldable("it divides by the layer's result")
        plain = node.op == "Add" or (node.op == "Sub" and position == 0)
        exact = plain and layer.bias is None and dtype_of(layer.node.output) in _SINGLY_ROUNDED
        if not (exact or aggressive):
            raise NotFoldable("rounding would differ")
        if node.op == "Add" and layer.bias is None and layer.takes_bias(other):
            layer.set_bias(other, self.name)
            return
        channels = per_channel(other, layer)
        one, zero = np.ones_like(channels), np.zeros_like(channels)
        with np.errstate(all="ignore"):
            gain, shift = {
                "Add": (one, channels),
                "Sub": (one, -channels) if position == 0 else (-one, channels),
                "Mul": (channels, zero),
                "Div": (one / channels, zero),
            }[node.op]
        layer.fold(gain, shift, self.name)


def _constant(value: Value | None) -> np.ndarray:
    if value is None or value.const is None:
        raise NotFoldable("a parameter is not constant")
    return value.const.numpy().astype(np.float64)
