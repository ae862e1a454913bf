"""Layers of experts with constant weights, com.microsoft MoE: most of the weights of a model that has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.contrib.moe import PLACES, Hidden
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.passes.facts import dtype_of
from ranvier.records import dataclass
from ranvier.runtime.quantizing.sites import Site

Array = np.ndarray[Any, Any]
# between a product and those who choose by it
_ON_THE_WAY = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Clip", "Tanh", "Sigmoid", "Softmax", "LogSoftmax"),
        *("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"),
    }
)


@dataclass(frozen=True)
class Linear:
    """A linear layer for each expert: weights [experts, outputs, inputs], and [experts, outputs] to add."""

    weight: Value
    bias: Value | None

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.weight.const is not None
        return self.weight.const.shape

    @property
    def numbers(self) -> Array:
        assert self.weight.const is not None
        return self.weight.const.numpy()

    @property
    def added(self) -> Array | None:
        return None if self.bias is None or self.bias.const is None else self.bias.const.numpy()


@dataclass(frozen=True)
class Experts:
    """A layer of experts; ``linear``: by name, fc3 is there where it is read."""

    node: Node
    linear: Mapping[str, Linear]

    @property
    def name(self) -> str:
        return self.node.name or self.node.output.name

    @property
    def data(self) -> Value:
        assert self.node.inputs[0] is not None
        return self.node.inputs[0]

    @property
    def router(self) -> Value:
        assert self.node.inputs[1] is not None
        return self.node.inputs[1]

    @property
    def weights(self) -> tuple[Value, ...]:
        return tuple(each.weight for each in self.linear.values())

    @property
    def inputs(self) -> tuple[int, ...]:
        """What sums go over."""
        return tuple(dict.fromkeys(each.shape[2] for each in self.linear.values()))

    @property
    def count(self) -> int:
        return self.linear["fc1"].shape[0]

    @property
    def chosen(self) -> int:
        """Experts that a token visits."""
        return int(self.node.attrs.get("k", 1))

    @property
    def normalizes(self) -> bool:
        """Whether shares of those add up to one."""
        return bool(self.node.attrs.get("normalize_routing_weights", 0))

    @property
    def hidden(self) -> Hidden:
        return Hidden.of("MoE", self.node.attrs)


def find_experts(graph: Graph) -> list[Experts]:
    """The layers of a graph in order whose weights codes can stand for; bodies of loops and branches are left alone."""
    return [found for node in graph if (found := experts_of(node)) is not None]


def experts_of(node: Node) -> Experts | None:
    """A node as a layer of experts, where it is one of float32 whose weights are known and fit together."""
    if node.op != "MoE" or node.domain != MICROSOFT or node.attrs.get("use_sparse_mixer"):
        return None
    for read in (node.input(0), node.input(1)):
        if read is None or read.const is not None or dtype_of(read) is not DType.float32:
            return None
    hidden = Hidden.of("MoE", node.attrs)
    fused = hidden.activation == "swiglu" and hidden.fusion in (1, 2)
    linear: dict[str, Linear] = {}
    for name, (place, at) in PLACES.items():
        weight = node.input(place)
        if weight is None or (name == "fc3" and fused):  # which has both parts already
            continue
        found = Linear(weight, node.input(at))
        if not _is_known(found):
            return None
        linear[name] = found
    return Experts(node, linear) if _fit(linear, fused) else None


def _is_known(linear: Linear) -> bool:
    weights, bias = linear.weight.const, linear.bias
    if weights is None or weights.dtype is not DType.float32 or len(weights.shape) != 3:
        return False
    if bias is None:
        return True
    known = bias.const is not None and bias.const.dtype is DType.float32
    return known and bias.const is not None and bias.const.shape == weights.shape[:2]


def _fit(linear: Mapping[str, Linear], fused: bool) -> bool:
    if not {"fc1", "fc2"} <= linear.keys():
        return False
    experts, first, features = linear["fc1"].shape
    inner = first // 2 if fused else first
    wanted = {"fc1": (experts, inner * (2 if fused else 1), features), "fc2": (experts, features, inner)}
    wanted["fc3"] = (experts, inner, features)
    return all(each.shape == wanted[name] and math.prod(each.shape) for name, each in linear.items())


def find_routers(sites: Iterable[Site]) -> dict[str, str]:
    """Layers that choose experts, and why they stay as they are: with codes other experts are chosen, which changes
    results by far more than the few bytes are worth."""
    return {site.name: "it chooses experts" for site in sites if _chooses(site.node.output)}


def _chooses(value: Value) -> bool:
    for node, place in value.uses:
        if node.op in ("MoE", "QMoE") and node.domain == MICROSOFT and place == 1:
            return True
        alone = all(each is None or each is value or each.const is not None for each in node.inputs)
        if node.op in _ON_THE_WAY and not node.domain and alone and _chooses(node.output):
            return True
    return False
