"""Mixtures of experts: every expert for every token, weighed by zero where it was not chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.contrib.levels import E2M1_LEVELS
from ranvier.ops.contrib.moe import PLACES as MOE
from ranvier.ops.contrib.moe import Hidden
from ranvier.ops.contrib.quantized_moe import FLOAT4_BLOCKS, PLACES, ROUTER_WEIGHTS, Stored, shares_add_up
from ranvier.ops.gradients import few_bits
from ranvier.ops.gradients.base import Backward, attribute, first, operand
from ranvier.ops.gradients.contrib import MICROSOFT
from ranvier.ops.gradients.parts import made_of

# a layer for each expert: weights [experts, outputs, inputs] and bias
Linear = tuple[Value, Value | None]


@made_of("MoE", domain=MICROSOFT)
def _mixture(b: Backward, node: Node) -> Sequence[Value]:
    layers: list[Linear | None] = []
    for place, bias in MOE.values():
        weight = operand(node, place)
        layers.append(None if weight is None else (weight, operand(node, bias)))
    return _mixed(b, node, layers, bool(attribute(node, "normalize_routing_weights", 0)), None)


@made_of("QMoE", domain=MICROSOFT)
def _quantized(b: Backward, node: Node) -> Sequence[Value]:
    """Codes and scales stay what they are: the weights are the numbers that they stand for."""
    if any(given is not None for given in node.inputs[ROUTER_WEIGHTS + 3 :]):
        raise NotSupported("the gradient of QMoE with activations in float8 is not known")
    if attribute(node, "weights_prepacked", -1) == 1:
        raise NotSupported("the gradient of QMoE with weights_prepacked is not known")
    layers: list[Linear | None] = []
    for name, (weights, _, bias, *_) in PLACES.items():
        if operand(node, weights) is None:
            layers.append(None)
        else:
            layers.append((b.cast(_decoded(b, node, name), b.dtype(first(node))), operand(node, bias)))
    weigher = operand(node, ROUTER_WEIGHTS)
    normalize = shares_add_up(int(attribute(node, "normalize_routing_weights", 0)), weigher is not None)
    return _mixed(b, node, layers, normalize, weigher)


def _decoded(b: Backward, node: Node, name: str) -> Value:
    """The weights [experts, outputs, inputs] of a layer; codes may be an input, as those of a module are."""
    stored = Stored.of(node.attrs, name)
    weights, scales, _, zeros, whole = (None if place is None else operand(node, place) for place in PLACES[name])
    assert weights is not None
    bits = stored.width
    codes = weights if stored.kind == "fp8" else few_bits.unpacked(b, weights, bits)
    _, outputs, inputs = b.sizes(codes)
    block = stored.block if stored.block > 0 else FLOAT4_BLOCKS.get(stored.kind, inputs)

    def along(numbers: Value) -> Value:
        """What groups have one of, for each input."""
        if len(b.sizes(numbers)) == 2:  # one for a row
            return b.Unsqueeze(numbers, b.whole(2))
        return few_bits.stretched(b, numbers, inputs, block, axis=2)

    if stored.kind in FLOAT4_BLOCKS:
        values = few_bits.looked_up(b, E2M1_LEVELS, codes)
    else:
        values = b.cast(codes, DType.float32)
    if stored.kind == "int" and zeros is None:
        values = b.Sub(values, b.number(float(1 << (bits - 1)), values))
    elif zeros is not None:
        if not b.dtype(zeros).is_float:  # codes themselves; those of rows are packed along the rows
            count, axis = (outputs, 1) if len(b.sizes(zeros)) == 2 else (inputs // block, 2)
            zeros = b.Slice(few_bits.unpacked(b, zeros, bits), b.whole(0), b.whole(count), b.whole(axis))
        values = b.Sub(values, along(b.cast(zeros, DType.float32)))
    if scales is not None:
        factors = b.cast(scales, DType.float32)
        if stored.kind == "fp8":  # blocks are square
            factors = few_bits.stretched(b, factors, outputs, block, axis=1)
        values = b.Mul(values, along(factors))
    return values if whole is None else b.Mul(values, b.Reshape(b.cast(whole, DType.float32), b.whole(-1, 1, 1)))


def _mixed(
    b: Backward, node: Node, layers: Sequence[Linear | None], normalize: bool, weigher: Value | None
) -> Sequence[Value]:  # fmt: skip
    x, router = first(node), node.inputs[1]
    assert router is not None
    if attribute(node, "use_sparse_mixer", 0):
        raise NotSupported(f"the gradient of {node.op} with use_sparse_mixer is not known")
    tokens = b.Unsqueeze(b.Reshape(x, b.whole(-1, b.sizes(x)[-1])), b.whole(0))

    def linear(rows: Value, layer: Linear) -> Value:
        weight, bias = layer
        made = b.MatMul(rows, b.Transpose(weight, perm=[0, 2, 1]))  # [experts, tokens, outputs]
        return made if bias is None else b.Add(made, b.Unsqueeze(bias, b.whole(1)))

    fc1, fc2, fc3 = layers
    assert fc1 is not None and fc2 is not None
    hidden = _activated(b, node, linear(tokens, fc1), None if fc3 is None else linear(tokens, fc3))
    shares = b.Softmax(router, axis=-1)
    count = b.whole(int(attribute(node, "k", 1)))
    _, places = b.node("TopK", [router, count], {"axis": 1}, outputs=2).outputs
    chosen = b.GatherElements(shares if weigher is None else weigher, places, axis=1)
    if normalize:
        chosen = b.Div(chosen, b.ReduceSum(chosen, b.whole(1), keepdims=1))
    weights = b.ScatterElements(b.zeros(shares), places, chosen, axis=1)
    each = b.Unsqueeze(b.Transpose(weights, perm=[1, 0]), b.whole(2))
    return [b.like(b.ReduceSum(b.Mul(each, linear(hidden, fc2)), b.whole(0), keepdims=0), x)]


def _activated(b: Backward, node: Node, hidden: Value, third: Value | None) -> Value:
    between = Hidden.of(node.op, node.attrs)
    if between.activation != "swiglu":
        made = {
            "relu": lambda: b.Relu(hidden),
            "gelu": lambda: b.Gelu(hidden, approximate="tanh"),
            "silu": lambda: b.Mul(hidden, b.Sigmoid(hidden)),
            "identity": lambda: hidden,
        }[between.activation]()
        return made if third is None else b.Mul(made, third)
    gate, line = hidden, third
    if between.fusion:
        size = b.sizes(hidden)[2]
        last = b.whole(2)
        if between.fusion == 1:  # one after the other
            gate, line = (b.Slice(hidden, b.whole(k), b.whole(size), last, b.whole(2)) for k in (0, 1))
        else:
            gate, line = b.node("Split", [hidden], {"axis": 2, "num_outputs": 2}, outputs=2).outputs
    assert line is not None
    if np.isfinite(between.limit):
        top = b.number(between.limit, gate)
        gate, line = b.Min(gate, top), b.Clip(line, b.number(-between.limit, line), top)
    opened = b.Mul(gate, b.Sigmoid(b.Mul(gate, b.number(between.alpha, gate))))
    return b.Mul(opened, b.Add(line, b.number(between.beta, line)))
