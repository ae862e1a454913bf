"""Channels of activations brought to like ranges before they share one scale, without changing what a model computes.

A convolution's output channel can be made larger if whoever reads it divides by as much, and Relu, pools, resizing and
joins let the factor pass. A channel far smaller than its neighbours would else have few of the 255 codes. The factor is
the one that balances what is lost in activations against what is lost in the weights that read them (Nagel et al.,
"Data-free quantization through weight equalization and bias correction", 2019). Factors are powers of two: float
results stay what they were, to the bit.

Other activations do not let a factor pass, so a product with a row of factors goes behind those: a kernel that has the
activation in registers multiplies once more before it rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.passes.edit import builder, bypass
from ranvier.records import dataclass
from ranvier.runtime.quantizing.samples import Feed, visit
from ranvier.runtime.quantizing.tails import tail

Array = np.ndarray[Any, Any]
ORIGIN = "equalize"
_PASS = frozenset({"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Identity", "Dropout"})
_MOST = 6  # largest factor, as a power of two


@dataclass(frozen=True)
class _Layer:
    """A convolution, or a product with a row of factors: which of the numbered channels it makes, and reads; None where
    those cannot be scaled."""

    node: Node
    makes: Array
    reads: Array | None

    @property
    def weights(self) -> Array:
        """[group, outputs of a group, inputs of a group, pixels of the kernel]; of a product the factors alone."""
        tensor = self.node.inputs[1]
        assert tensor is not None and tensor.const is not None
        numbers = tensor.const.numpy()
        if self.node.op == "Mul":
            return numbers.reshape(len(numbers), 1, 1, 1)
        groups = int(self.node.attrs.get("group", 1))
        return numbers.reshape(groups, numbers.shape[0] // groups, numbers.shape[1], -1)


class _Channels:
    """Numbers for channels; those that a sum joins have one, and some may not be scaled."""

    def __init__(self) -> None:
        self._above: list[int] = []
        self._fixed: set[int] = set()

    def new(self, count: int) -> Array:
        first = len(self._above)
        self._above.extend(range(first, first + count))
        return np.arange(first, first + count)

    def find(self, channel: int) -> int:
        while self._above[channel] != channel:
            self._above[channel] = self._above[self._above[channel]]
            channel = self._above[channel]
        return channel

    def join(self, a: Array, b: Array) -> None:
        for x, y in zip(a.tolist(), b.tolist()):
            self._above[self.find(x)] = self.find(y)

    def fix(self, channels: Array) -> None:
        self._fixed.update(channels.tolist())

    def roots(self, channels: Array) -> list[int]:
        return [self.find(channel) for channel in channels.tolist()]

    @property
    def fixed(self) -> set[int]:
        return {self.find(channel) for channel in self._fixed}


def equalize(graph: Graph, feeds: Sequence[Feed], config: SessionConfig, *, with_rows: bool = True) -> int:
    """Scale channels in place; gives the number of those that were. ``with_rows``: behind activations too."""
    channels = _Channels()
    rows = _rows_behind_activations(graph) if with_rows else []
    layers = _trace(graph, channels, {id(row) for row in rows})
    readers = [layer for layer in layers if layer.reads is not None]
    ranges: dict[str, Array] = {}

    def look(name: str, array: Array) -> None:
        sizes = np.abs(np.where(np.isfinite(array), array, 0))
        reach = sizes.max(axis=(0, *range(2, array.ndim)), initial=0.0)
        ranges[name] = np.maximum(ranges.get(name, 0.0), reach)

    visit(graph, list({_data(layer).name for layer in readers}), feeds, config, look)
    factors = _factors(channels, readers, ranges)
    for layer in layers:
        _scale(layer, factors, channels)
    for row in rows:
        data, factor = row.inputs
        if data is not None and factor is not None and factor.const is not None and (factor.const.numpy() == 1).all():
            bypass(row, data, ORIGIN)
    return len(factors)


def _rows_behind_activations(graph: Graph) -> list[Node]:
    """Products with ones behind activations that let no factor pass; those that stay ones go again later."""
    found = []
    order = {id(node): k for k, node in enumerate(graph)}
    for node in list(graph):
        if not _is_layer(node):
            continue
        behind, weights = tail(node), node.inputs[1]
        value = behind.value
        uses = [use for use in value.uses if use[0].graph is graph]  # bodies that read it have it as it is
        if all(each.op in _PASS for each in behind.nodes) or value.is_graph_output or not uses:
            continue
        assert weights is not None and weights.const is not None
        ops = builder(min((reader for reader, _ in uses), key=lambda reader: order[id(reader)]), ORIGIN)
        ones = np.ones((weights.const.shape[0], *[1] * (len(weights.const.shape) - 2)), np.float32)
        product = ops.Mul(value, ops.constant(ones, f"{value.name}.factors"))
        product.name = f"{value.name}.even"
        for reader, position in uses:
            reader.set_input(position, product)
        assert product.producer is not None
        found.append(product.producer)
    return found


def _data(layer: _Layer) -> Value:
    found = layer.node.inputs[0]
    assert found is not None
    return found


def _trace(graph: Graph, channels: _Channels, rows: set[int]) -> list[_Layer]:
    """The convolutions of a graph, and these products, in order, with channels followed from one to the next."""
    known: dict[int, Array] = {}
    layers: list[_Layer] = []
    for node in graph:
        inputs = [value for value in node.inputs if value is not None and value.const is None]
        if id(node) in rows:
            made = channels.new(node.inputs[1].const.shape[0])  # type: ignore[union-attr]
            layers.append(_Layer(node, made, None))
            known[id(node.output)] = made
            _fix(inputs, known, channels)
            continue
        if _is_layer(node):
            made = channels.new(node.inputs[1].const.shape[0])  # type: ignore[union-attr]
            layers.append(_Layer(node, made, known.get(id(node.inputs[0]))))
            known[id(node.output)] = made
            continue
        passed = _passed(node, inputs, known, channels)
        if passed is not None:
            known[id(node.output)] = passed
            continue
        _fix(node.dependencies(), known, channels)
    _fix(graph.outputs, known, channels)
    return layers


def _fix(values: Iterable[Value], known: dict[int, Array], channels: _Channels) -> None:
    for value in values:
        if id(value) in known:
            channels.fix(known[id(value)])


def _is_layer(node: Node) -> bool:
    if node.domain or node.op != "Conv" or node.inputs[0] is None or node.inputs[0].const is not None:
        return False
    constants = [value for value in node.inputs[1:] if value is not None]
    return all(value.const is not None and value.const.dtype is DType.float32 for value in constants)


def _passed(node: Node, inputs: Sequence[Value], known: dict[int, Array], channels: _Channels) -> Array | None:
    """The channels of a node's result, where factors of its operands' pass through it."""
    if not node.domain and node.op == "Mul" and len(inputs) == 2:
        return _gated(node, inputs, known, channels)
    if node.domain or not inputs or id(inputs[0]) not in known:
        return None
    first = known[id(inputs[0])]
    if node.op in _PASS:
        only = len(inputs) == 1 or node.op == "Resize"
        plain = node.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize"
        return first if only and plain and len(node.outputs) == 1 and _count(node.output) == len(first) else None
    if any(id(value) not in known for value in inputs) or len(inputs) != len(node.inputs):
        return None
    if node.op == "Concat" and node.attrs.get("axis") == 1:
        return np.concatenate([known[id(value)] for value in inputs])
    if node.op == "Add" and len(known[id(inputs[1])]) == len(first):
        channels.join(first, known[id(inputs[1])])
        return first
    return None


def _gated(node: Node, inputs: Sequence[Value], known: dict[int, Array], channels: _Channels) -> Array | None:
    """A picture times one number for each of its channels: the picture's factors pass, and the others stay."""
    picture = next((v for v in inputs if id(v) in known and v.type == node.output.type), None)
    if picture is None or _count(picture) != len(known[id(picture)]):
        return None
    _fix([value for value in inputs if value is not picture], known, channels)
    return None if all(value is picture for value in inputs) else known[id(picture)]


def _count(value: Value) -> int | None:
    shape = value.type.shape if isinstance(value.type, TensorType) else None
    return shape[1] if shape is not None and len(shape) > 1 and isinstance(shape[1], int) else None


def _factors(channels: _Channels, readers: Sequence[_Layer], ranges: dict[str, Array]) -> dict[int, float]:
    """By channel; those that stay as they are have none."""
    wanted: dict[int, float] = {}
    fixed = channels.fixed
    for layer in readers:
        assert layer.reads is not None
        if not np.isfinite(layer.weights).all():  # it will not be coded
            continue
        reach = ranges[_data(layer).name].astype(np.float64)
        weights = np.abs(layer.weights).max(axis=3)
        parts = (weights / np.maximum(weights.max(axis=2, keepdims=True), 1e-30)).max(axis=1).reshape(-1)
        share = reach / max(float(reach.max(initial=0.0)), 1e-30)
        alone = layer.weights.shape[2] == 1  # a filter with one input channel has a scale of its own
        for channel, small, part in zip(channels.roots(layer.reads), share.tolist(), parts.tolist()):
            if channel in fixed or small <= 0 or part <= 0:
                continue
            power = -math.log2(small) if alone else (math.log2(part) - math.log2(small)) / 2
            wanted[channel] = min(wanted.get(channel, math.inf), power)
    rounded = {channel: max(-_MOST, min(_MOST, round(power))) for channel, power in wanted.items()}
    return {channel: 2.0**power for channel, power in rounded.items() if power}


def _scale(layer: _Layer, factors: dict[int, float], channels: _Channels) -> None:
    def numbers(of: Array) -> Array:
        return np.array([factors.get(channel, 1.0) for channel in channels.roots(of)], np.float32)

    made = numbers(layer.makes)
    read = np.ones(1, np.float32) if layer.reads is None else numbers(layer.reads)
    if (made == 1).all() and (read == 1).all():
        return
    node, weights = layer.node, layer.weights
    groups, outputs, inputs, _ = weights.shape
    scaled = weights * made.reshape(groups, outputs, 1, 1)
    if layer.reads is not None:
        scaled = scaled / read.reshape(groups, 1, inputs, 1)
    old, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert old is not None and old.const is not None
    ops = builder(node, ORIGIN)
    node.set_input(1, ops.constant(scaled.reshape(old.const.shape), f"{old.name}.even"))
    if bias is not None and bias.const is not None:
        node.set_input(2, ops.constant(bias.const.numpy() * made, f"{bias.name}.even"))
