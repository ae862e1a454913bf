"""A layer of experts, of which each token visits the few that its router likes best: com.microsoft MoE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.attributes import text_of
from ranvier.graph.types import Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.activation import sigmoid, tanh_gelu
from ranvier.ops.contrib.attention import softmax
from ranvier.ops.contrib.rules import MICROSOFT, rounded
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op
from ranvier.records import dataclass

# operands of each layer: weights and bias
PLACES = {"fc1": (2, 3), "fc2": (4, 5), "fc3": (6, 7)}


class Linear(Protocol):
    """A linear layer for each expert."""

    outputs: int

    def __call__(self, rows: Array, expert: int) -> Array: ...


@dataclass(frozen=True)
class Hidden:
    """What happens between the first layers of an expert and its last."""

    name: str  # of the operator
    activation: str
    fusion: int  # how swiglu's two parts come: as two layers (0), one after the other in pairs (1), in halves (2)
    alpha: float
    beta: float
    limit: float

    @classmethod
    def of(cls, name: str, attrs: Mapping[str, Any]) -> Hidden:
        """By the attributes of a node."""
        activation, fusion = text_of(attrs.get("activation_type", "relu")), int(attrs.get("swiglu_fusion", 0))
        numbers = (("activation_alpha", 1.0), ("activation_beta", 0.0), ("swiglu_limit", math.inf))
        return cls(name, activation, fusion, *(float(attrs.get(each, usual)) for each, usual in numbers))

    def __call__(self, first: Array, third: Array | None) -> Array:
        if self.activation != "swiglu":
            y = _activated(self.name, first, self.activation)
            return y if third is None else y * third
        if self.fusion == 1:
            gate, linear = first[:, 0::2], first[:, 1::2]
        elif self.fusion == 2:
            gate, linear = np.split(first, 2, axis=1)
        elif third is None:
            raise InvalidValue(f"{self.name}: swiglu needs fc3, or swiglu_fusion 1 or 2", op=self.name)
        else:
            gate, linear = first, third
        gate, linear = np.minimum(gate, self.limit), np.clip(linear, -self.limit, self.limit)
        return np.asarray(gate * sigmoid(gate * self.alpha) * (linear + self.beta))


def mixed(
    x: Array, router: Array, hidden: Hidden, layers: tuple[Linear, Linear, Linear | None], k: int, normalize: bool,
    weigher: Array | None = None,
) -> Array:  # fmt: skip
    """Each token's best ``k`` experts by its row of ``router``, added up by their shares there, or by what ``weigher``
    has in their places."""
    name = hidden.name
    fc1, fc2, fc3 = layers
    tokens = widened(x).reshape(-1, x.shape[-1])
    experts = router.shape[-1] if router.ndim == 2 else 0
    if router.shape != (len(tokens), experts) or not 1 <= k <= experts:
        raise ShapeMismatch(f"{name}: top {k} of a router {list(router.shape)} does not fit {len(tokens)} tokens")
    if weigher is not None and weigher.shape != router.shape:
        raise ShapeMismatch(f"{name}: router_weights {list(weigher.shape)} for a router {list(router.shape)}")
    likes = widened(router)
    best = np.argsort(-likes, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(softmax(likes) if weigher is None else widened(weigher), best, axis=1)
    if normalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    y = np.zeros((len(tokens), fc2.outputs), tokens.dtype)
    for expert in map(int, np.unique(best)):
        row, choice = np.nonzero(best == expert)
        rows = tokens[row]
        inner = hidden(fc1(rows, expert), None if fc3 is None else fc3(rows, expert))
        y[row] += weights[row, choice, None] * fc2(inner, expert)
    if y.shape[1] != x.shape[-1]:
        raise ShapeMismatch(f"{name}: experts make {y.shape[1]} features of {x.shape[-1]}")
    return rounded(y.reshape(x.shape), x.dtype)


def no_sparse_mixer(name: str, use_sparse_mixer: int) -> None:
    if use_sparse_mixer:
        raise NotSupported(f"{name}: use_sparse_mixer=1; only plain top-k routing is defined here")


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
    no_sparse_mixer(name, use_sparse_mixer)
    hidden = Hidden(name, activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit)
    experts = router_probs.shape[-1] if router_probs.ndim else 0
    layers = (
        _Linear(name, "fc1", experts, fc1_experts_weights, fc1_experts_bias),
        _Linear(name, "fc2", experts, fc2_experts_weights, fc2_experts_bias),
        None if fc3_experts_weights is None else _Linear(name, "fc3", experts, fc3_experts_weights, fc3_experts_bias),
    )
    return mixed(x, router_probs, hidden, layers, k, bool(normalize_routing_weights))


def check_experts(name: str, what: str, experts: int, weights: Any, bias: Any) -> None:
    """Arrays, or tensors, are a layer for each expert."""
    if weights.ndim != 3 or len(weights) != experts or (bias is not None and bias.shape != weights.shape[:2]):
        shapes = [list(weights.shape), None if bias is None else list(bias.shape)]
        raise ShapeMismatch(f"{name}: {what} weights and bias {shapes} are not those of {experts} experts")


class _Linear:
    """One linear layer per expert, ``[experts, outputs, inputs]``."""

    def __init__(self, name: str, what: str, experts: int, weights: Array, bias: Array | None) -> None:
        check_experts(name, what, experts, weights, bias)
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
