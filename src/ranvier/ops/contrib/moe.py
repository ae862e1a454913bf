"""com.microsoft MoE: a layer of experts, of which each token visits the few that its router likes best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.types import Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.activation import sigmoid, tanh_gelu
from ranvier.ops.contrib.attention import softmax
from ranvier.ops.contrib.rules import MICROSOFT, rounded
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op


@op("MoE", domain=MICROSOFT)
def mixture_of_experts(
    x: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_experts_bias: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float = math.inf,
    use_sparse_mixer: int = 0,
) -> Array:
    name = "MoE"
    if use_sparse_mixer:
        raise NotSupported(f"{name}: use_sparse_mixer=1; only plain top-k routing is defined here")
    tokens = widened(x).reshape(-1, x.shape[-1])
    experts = router_probs.shape[-1] if router_probs.ndim == 2 else 0
    if router_probs.shape != (len(tokens), experts) or not 1 <= k <= experts:
        raise ShapeMismatch(f"{name}: top {k} of a router {list(router_probs.shape)} does not fit {len(tokens)} tokens")
    fc1 = _Linear(name, "fc1", experts, fc1_experts_weights, fc1_experts_bias)
    fc2 = _Linear(name, "fc2", experts, fc2_experts_weights, fc2_experts_bias)
    fc3 = None if fc3_experts_weights is None else _Linear(name, "fc3", experts, fc3_experts_weights, fc3_experts_bias)
    if activation_type == "swiglu" and swiglu_fusion == 0 and fc3 is None:
        raise InvalidValue(f"{name}: swiglu needs fc3, or swiglu_fusion 1 or 2", op=name)

    def hidden(rows: Array, expert: int) -> Array:
        first = fc1(rows, expert)
        if activation_type != "swiglu":
            y = _activated(name, first, activation_type)
            return y if fc3 is None else y * fc3(rows, expert)
        if swiglu_fusion == 1:
            gate, linear = first[:, 0::2], first[:, 1::2]
        elif swiglu_fusion == 2:
            gate, linear = np.split(first, 2, axis=1)
        else:
            assert fc3 is not None
            gate, linear = first, fc3(rows, expert)
        gate, linear = np.minimum(gate, swiglu_limit), np.clip(linear, -swiglu_limit, swiglu_limit)
        return np.asarray(gate * sigmoid(gate * float(activation_alpha)) * (linear + float(activation_beta)))

    shares = softmax(widened(router_probs))
    best = np.argsort(-shares, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(shares, best, axis=1)
    if normalize_routing_weights:
        weights = weights / weights.sum(axis=1, keepdims=True)
    y = np.zeros((len(tokens), fc2.outputs), tokens.dtype)
    for expert in np.unique(best):
        row, choice = np.nonzero(best == expert)
        y[row] += weights[row, choice, None] * fc2(hidden(tokens[row], int(expert)), int(expert))
    return rounded(y.reshape(x.shape), x.dtype)


class _Linear:
    """One linear layer per expert, ``[experts, outputs, inputs]``."""

    def __init__(self, name: str, what: str, experts: int, weights: Array, bias: Array | None) -> None:
        if weights.ndim != 3 or len(weights) != experts or (bias is not None and bias.shape != weights.shape[:2]):
            shapes = [list(weights.shape), None if bias is None else list(bias.shape)]
            raise ShapeMismatch(f"{name}: {what} weights and bias {shapes} are not those of {experts} experts")
        self.what = f"{name}: {what}"
        self.weights = weights
        self.bias = bias
        self.outputs: int = weights.shape[1]

    def __call__(self, rows: Array, expert: int) -> Array:
        if rows.shape[1] != self.weights.shape[2]:
            raise ShapeMismatch(f"{self.what} takes {self.weights.shape[2]} features, got {rows.shape[1]}")
        y: Array = rows @ widened(self.weights[expert]).T
        return y if self.bias is None else y + widened(self.bias[expert])


def _activated(name: str, x: Array, activation: str) -> Array:
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "gelu":
        return tanh_gelu(x)
    if activation == "silu":
        return x * sigmoid(x)
    if activation == "identity":
        return x
    raise InvalidValue(f"{name}: unknown activation_type {activation!r}", op=name)


@mixture_of_experts.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(0)]


@mixture_of_experts.cost
def _(call: TypeCall) -> Cost:
    """Each token meets the weights of k experts."""
    tokens = math.prod(dims(call.type(0))[:-1])
    per_expert = sum(math.prod(dims(call.type(p))[1:]) for p in (2, 4, 6) if call.type(p) is not None)
    return Cost(2.0 * tokens * int(call.attr("k", 1)) * per_expert, traffic(call))
