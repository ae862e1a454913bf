"""Mixtures of experts: every expert for every token, weighed by zero where it was not chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, first, operand
from ranvier.ops.gradients.contrib import MICROSOFT, text
from ranvier.ops.gradients.parts import made_of


@made_of("MoE", domain=MICROSOFT)
def _mixture(b: Backward, node: Node) -> Sequence[Value]:
    x, router = first(node), node.inputs[1]
    assert router is not None
    if attribute(node, "use_sparse_mixer", 0):
        raise NotSupported("the gradient of MoE with use_sparse_mixer is not known")
    tokens = b.Unsqueeze(b.Reshape(x, b.whole(-1, b.sizes(x)[-1])), b.whole(0))

    def linear(rows: Value, place: int) -> Value:
        weight, bias = operand(node, place), operand(node, place + 1)
        made = b.MatMul(rows, b.Transpose(weight, perm=[0, 2, 1]))  # [experts, tokens, outputs]
        return made if bias is None else b.Add(made, b.Unsqueeze(bias, b.whole(1)))

    def third() -> Value | None:
        return None if operand(node, 6) is None else linear(tokens, 6)

    hidden = _activated(b, node, linear(tokens, 2), third())
    shares = b.Softmax(router, axis=-1)
    count = b.whole(int(attribute(node, "k", 1)))
    chosen, places = b.node("TopK", [shares, count], {"axis": 1}, outputs=2).outputs
    if attribute(node, "normalize_routing_weights", 0):
        chosen = b.Div(chosen, b.ReduceSum(chosen, b.whole(1), keepdims=1))
    weights = b.ScatterElements(b.zeros(shares), places, chosen, axis=1)
    each = b.Unsqueeze(b.Transpose(weights, perm=[1, 0]), b.whole(2))
    return [b.like(b.ReduceSum(b.Mul(each, linear(hidden, 4)), b.whole(0), keepdims=0), x)]


def _activated(b: Backward, node: Node, hidden: Value, third: Value | None) -> Value:
    name = text(node, "activation_type") or "relu"
    if name != "swiglu":
        made = {
            "relu": lambda: b.Relu(hidden),
            "gelu": lambda: b.Gelu(hidden, approximate="tanh"),
            "silu": lambda: b.Mul(hidden, b.Sigmoid(hidden)),
            "identity": lambda: hidden,
        }[name]()
        return made if third is None else b.Mul(made, third)
    fusion = int(attribute(node, "swiglu_fusion", 0))
    gate, line = hidden, third
    if fusion:
        size = b.sizes(hidden)[2]
        last = b.whole(2)
        if fusion == 1:  # one after the other
            gate, line = (b.Slice(hidden, b.whole(k), b.whole(size), last, b.whole(2)) for k in (0, 1))
        else:
            gate, line = b.node("Split", [hidden], {"axis": 2, "num_outputs": 2}, outputs=2).outputs
    assert line is not None
    limit = float(attribute(node, "swiglu_limit", math.inf))
    if np.isfinite(limit):
        top = b.number(limit, gate)
        gate, line = b.Min(gate, top), b.Clip(line, b.number(-limit, line), top)
    alpha, beta = (float(attribute(node, f"activation_{k}", d)) for k, d in (("alpha", 1.0), ("beta", 0.0)))
    opened = b.Mul(gate, b.Sigmoid(b.Mul(gate, b.number(alpha, gate))))
    return b.Mul(opened, b.Add(line, b.number(beta, line)))
