"""8-bit weights and activations, as pairs of QuantizeLinear and DequantizeLinear that any runtime reads.

Weights have a scale for each output channel; activations one for the tensor, from samples. What lies between
quantized layers stays in 8 bits where it can: activations of a layer are coded after its Relu or Clip, and sums,
products, pools and joins of coded values are coded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder
from ranvier.passes.facts import only_use
from ranvier.quantize import Integers
from ranvier.runtime.quantizing.sites import Site

ORIGIN = "quantize"
Range = tuple[float, float]
_TAILS = frozenset({"Relu", "Clip"})
_JOINS = frozenset({"Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool", "MaxPool"})
_MOVES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool"})


def coded_values(graph: Graph, sites: Sequence[Site]) -> list[str]:
    """Names of the values that get a pair: what layers read, what they give after their tail, and joins of those."""
    layers = {id(site.node) for site in sites}
    found: dict[str, None] = {}
    coded: set[int] = set()
    for site in sites:
        found[site.data.name] = None
        coded.add(id(site.data))
    for node in graph:
        if id(node) in layers:
            value = tail(node)
            if not value.is_graph_output and _stays(value, layers):
                found[value.name] = None
                coded.add(id(value))
        elif node.op in _JOINS and not node.domain and node.outputs:
            value = tail(node)
            operands = [v for v in node.inputs if v is not None and v.const is None]
            if all(id(v) in coded for v in operands) and not value.is_graph_output and _stays(value, layers):
                found[value.name] = None
                coded.add(id(value))
        elif node.op in _MOVES and not node.domain and node.inputs[0] is not None and id(node.inputs[0]) in coded:
            coded.add(id(node.output))
    return list(found)


def tail(node: Node) -> Value:
    """The result of a node after the activation that alone reads it."""
    value = node.output
    while True:
        use = only_use(value)
        if use is None or value.is_graph_output or use.op not in _TAILS or use.domain:
            return value
        value = use.output


def _stays(value: Value, layers: set[int]) -> bool:
    """Whether all who read a value can read codes; else a pair would only lose bits."""
    for node, position in value.uses:
        if id(node) in layers and position == 0:
            continue
        if node.domain or node.op not in (_JOINS | _MOVES | _TAILS):
            return False
    return bool(value.uses)


def quantize_static(
    graph: Graph, sites: Sequence[Site], ranges: Mapping[str, Range], *, signed: bool = False, fit: str = "minmax"
) -> None:
    """Rewrite the layers of a graph in place; ``ranges`` has those of ``coded_values``."""
    activations = Integers(8, signed, "tensor", signed=signed)
    weights = Integers(8, True, "channel", fit=fit)
    scales: dict[str, np.float32] = {}
    names = {value.name: value for value in graph.values()}
    for name in coded_values(graph, sites):
        if name in ranges and name in names:
            scales[name] = _pair(graph, names[name], ranges[name], activations)
    for site in sites:
        _layer(site, weights, scales)


def _pair(graph: Graph, value: Value, bounds: Range, scheme: Integers) -> np.float32:
    """Put a pair behind a value for all who read it; gives the scale."""
    low, high = min(0.0, bounds[0]), max(0.0, bounds[1])
    scale, zero = scheme.parameters(np.array(low), np.array(high))
    uses = list(value.uses)
    first = min((node for node, _ in uses), key=_position(graph))
    ops = builder(first, ORIGIN)
    step = ops.constant(np.float32(scale), f"{value.name}.scale")
    point = ops.constant(np.asarray(zero, np.int8 if scheme.signed else np.uint8).reshape(()), f"{value.name}.zero")
    codes = ops.QuantizeLinear(value, step, point, _name=f"{value.name}.quantize")
    back = ops.DequantizeLinear(codes, step, point, _name=f"{value.name}.dequantize")
    for node, position in uses:
        node.set_input(position, back)
    return np.float32(scale)


def _position(graph: Graph):  # type: ignore[no-untyped-def]
    order = {id(node): k for k, node in enumerate(graph)}
    return lambda node: order[id(node)]


def _layer(site: Site, scheme: Integers, scales: Mapping[str, np.float32]) -> None:
    node = site.node
    ops = builder(node, ORIGIN)
    numbers = site.numbers
    moved = np.moveaxis(numbers, site.outputs, 0)
    coded = scheme.quantize(moved.reshape(len(moved), -1))
    codes = np.moveaxis(coded.codes.reshape(moved.shape), 0, site.outputs)
    steps = coded.scales.reshape(-1).astype(np.float32)
    name = site.weight.name
    weight = ops.DequantizeLinear(
        ops.constant(np.ascontiguousarray(codes), f"{name}.codes"),
        ops.constant(steps, f"{name}.scale"),
        ops.constant(np.zeros(steps.shape, np.int8), f"{name}.zero"),
        axis=site.outputs,
        _name=f"{name}.dequantize",
    )
    node.set_input(1, weight)
    data = scales.get(_source(site.data))
    if site.bias is not None and site.bias.const is not None and data is not None:
        fine = (data * steps).astype(np.float32)
        bias = np.rint(site.bias.const.numpy().astype(np.float64) / fine)
        if np.abs(bias).max(initial=0) < 2**31:
            whole = ops.constant(bias.astype(np.int32), f"{site.bias.name}.codes")
            step = ops.constant(fine, f"{site.bias.name}.scale")
            zero = ops.constant(np.zeros(fine.shape, np.int32), f"{site.bias.name}.zero")
            node.set_input(2, ops.DequantizeLinear(whole, step, zero, axis=0, _name=f"{site.bias.name}.dequantize"))


def _source(value: Value) -> str:
    """The value behind a pair."""
    maker = value.producer
    if maker is not None and maker.op == "DequantizeLinear" and maker.inputs[0] is not None:
        codes = maker.inputs[0].producer
        if codes is not None and codes.op == "QuantizeLinear" and codes.inputs[0] is not None:
            return codes.inputs[0].name
    return value.name
