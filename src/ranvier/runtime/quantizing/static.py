"""8-bit weights and activations, as pairs of QuantizeLinear and DequantizeLinear that any runtime reads.

Weights have a scale for each output channel; activations one for the tensor, from samples. What lies between
quantized layers stays in 8 bits where it can: the result of a layer is coded behind its activation, and sums,
products, pools and joins of coded values are coded again. Where a layer's result is only added to another value, the
sum alone is coded: the layer adds before it rounds. Layers in bodies of branches and loops round what they read there,
also where it comes from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.passes.edit import builder
from ranvier.passes.facts import only_use
from ranvier.quantize import Integers
from ranvier.runtime.quantizing.rounding import Rounding, Weights, groups_of, weights_of
from ranvier.runtime.quantizing.sites import Site, beside, by_graph
from ranvier.runtime.quantizing.tails import multiply_instead, tail

ORIGIN = "quantize"
Range = tuple[float, float]
Array = np.ndarray[Any, Any]
Use = tuple[Node, int]
_JOINS = frozenset({"Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool", "MaxPool", "Resize"})
_SUMS = frozenset({"Add", "Mul"})  # what a layer does to its result with another value before it rounds
_MOVES = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "MaxPool", "Slice", "Split", "DepthToSpace"}
)


def coded_values(sites: Sequence[Site], *, joins: bool = True, left: Container[str] = ()) -> list[str]:
    """Names of the values that get a pair: what layers read, what they give behind their activation, joins of those.
    Nodes whose names are ``left`` neither read nor give codes."""
    if not joins:
        return list(dict.fromkeys(site.data.name for site in sites))
    found = (_coded_values(graph, those, left) for graph, those in by_graph(sites).items())
    return list(dict.fromkeys(name for names in found for name in names))


def _coded_values(graph: Graph, sites: Sequence[Site], left: Container[str]) -> list[str]:
    layers = {id(site.node) for site in sites}
    found: dict[str, None] = {}
    coded: set[int] = set()
    unrounded, staying = _unrounded(graph, sites), _staying(graph, layers, left)
    for site in sites:
        found[site.data.name] = None
        coded.add(id(site.data))
    for node in graph:
        if node.domain or not node.outputs or node.name in left:
            continue
        if id(node) in layers or (node.op in _JOINS and all(id(v) in coded for v in _operands(node))):
            value = tail(node).value
            if id(value) in unrounded:
                coded.add(id(value))
            elif id(value) in staying:
                found[value.name] = None
                coded.add(id(value))
        elif node.op in _MOVES and id(node.inputs[0]) in coded:
            coded.update(map(id, node.outputs))
    return list(found)


def _unrounded(graph: Graph, sites: Sequence[Site]) -> set[int]:
    """Results of layers that a layer adds to another value of its shape at once: of the operands of a sum the last."""
    order = {id(node): k for k, node in enumerate(graph)}
    last: dict[int, tuple[int, Value]] = {}
    for site in sites:
        value = tail(site.node).value
        reader = only_use(value)
        if reader is None or reader.op not in _SUMS or reader.domain or reader.graph is not graph:
            continue
        shapes = {each.type.shape if isinstance(each.type, TensorType) else None for each in _operands(reader)}
        if len(_operands(reader)) == 2 and len(shapes) == 1 and None not in shapes:
            last[id(reader)] = max(last.get(id(reader), (-1, value)), (order[id(site.node)], value), key=itemgetter(0))
    return {id(value) for _, value in last.values()}


def _operands(node: Node) -> list[Value]:
    """What a join works on; the sizes of a Resize are not."""
    given = node.inputs[:1] if node.op == "Resize" else node.inputs
    return [value for value in given if value is not None and value.const is None]


def _staying(graph: Graph, layers: set[int], left: Container[str]) -> set[int]:
    """Values whose codes get to layers, whoever reads them; elsewhere a pair would only lose bits."""
    found: set[int] = set()

    def leads(node: Node, position: int) -> bool:
        if id(node) in layers:
            return position == 0
        if node.graph is not graph or node.domain or node.op not in (_JOINS | _MOVES) or node.name in left:
            return False
        ends = [tail(node).value] if node.op in _JOINS else [value for value in node.outputs if value.uses]
        return all(id(value) in found for value in ends)

    for node in reversed(list(graph)):
        for value in node.outputs:
            if value.uses and not value.is_graph_output and all(leads(*use) for use in value.uses):
                found.add(id(value))
    return found


def quantize_static(
    graph: Graph,
    sites: Sequence[Site],
    ranges: Mapping[str, Range],
    *,
    signed: bool = False,
    symmetric: bool | None = None,
    rounding: Rounding | None = None,
    means: Mapping[str, Array] | None = None,
    joins: bool = True,
    left: Container[str] = (),
    rounded: Collection[str] = (),
    shared: Shared | None = None,
) -> None:
    """Rewrite the layers of a graph in place; ``ranges`` has those of ``coded_values``, and of values that are
    ``rounded`` for all who read them.

    Codes of activations that are ``signed`` are ``symmetric`` too, others are not, unless it is said. Nodes whose names
    are ``left`` stay as they are.
    ``rounding`` of weights: to the nearest codes unless given. ``means`` of the input channels of layers, by names of
    layers: what rounding of weights adds to a result on average comes off its bias. Without ``joins`` layers alone read
    codes, and what lies between them is not rounded for others. ``shared``: codes of weights that others know of.
    """
    even = signed if symmetric is None else symmetric
    activations, rounding = Integers(8, even, "tensor", signed=signed), rounding or Rounding()
    scales: dict[str, np.float32] = {}
    for each, those in {graph: list[Site](), **by_graph(sites)}.items():
        names = {value.name: value for value in each.values()} | {site.data.name: site.data for site in those}
        layers = {id(site.node) for site in those}
        staying = _staying(each, layers, left) if joins else set()
        further = rounded if each is graph else ()
        own = {**ranges, **_before_pools(each, ranges, staying)}
        for name in dict.fromkeys((*coded_values(those, joins=joins, left=left), *further)):
            if name in ranges and name in names:
                value = names[name]
                read = [use for use in value.uses if use[0].graph is each]  # bodies that read it have it as it is
                if name not in further and id(value) not in staying:
                    read = [use for use in read if id(use[0]) in layers and use[1] == 0]
                scale = _pair(each, value, read, own[name], activations, outputs=name in further)
                scales[name] = scales[value.name] = scale  # an output's name goes to what it is behind the pair
    shared = shared or Shared()
    for site in sites:
        _layer(site, rounding, scales, (means or {}).get(site.name), shared)
        behind = tail(site.node)
        if behind.value.name in scales:
            for node in behind.nodes:
                multiply_instead(node, ORIGIN)


def _before_pools(graph: Graph, ranges: Mapping[str, Range], staying: Container[int]) -> dict[str, Range]:
    """Ranges of what nothing but a MaxPool reads: those of its result. The largest code is that of the largest number,
    so codes with one scale on both sides are rounded once."""
    found: dict[str, Range] = {}
    for node in reversed(list(graph)):
        if node.op != "MaxPool" or node.domain or node.inputs[0] is None:
            continue
        value, result = node.inputs[0], node.outputs[0]
        bounds = found.get(result.name) or ranges.get(result.name)
        if bounds is not None and id(value) in staying and id(result) in staying and only_use(value) is node:
            found[value.name] = bounds
    return found


def _pair(
    graph: Graph, value: Value, uses: Sequence[Use], bounds: Range, scheme: Integers, *, outputs: bool = False
) -> np.float32:
    """Put a pair between a value and those who read codes, if it is among the ``outputs`` these too; gives the
    scale."""
    low, high = min(0.0, bounds[0]), max(0.0, bounds[1])
    scale, zero = scheme.parameters(np.array(low), np.array(high))
    point = np.asarray(zero, np.int8 if scheme.signed else np.uint8).reshape(())
    return put_pair(graph, value, uses, np.float32(scale), point, outputs=outputs)


def put_pair(
    graph: Graph, value: Value, uses: Sequence[Use], scale: np.float32, zero: Array, *, outputs: bool = False
) -> np.float32:
    """As above, with codes of the type of ``zero``."""
    first = min((node for node, _ in uses), key=_position(graph), default=None)
    ops = GraphOps(graph, first, ORIGIN, complete)
    stem = f"{value.name}.words" if zero.itemsize > 1 else value.name
    step, point = ops.constant(scale, f"{stem}.scale"), ops.constant(zero, f"{stem}.zero")
    codes = ops.QuantizeLinear(value, step, point, _name=f"{stem}.quantize")
    back = ops.DequantizeLinear(codes, step, point, _name=f"{stem}.dequantize")
    for node, position in uses:
        node.set_input(position, back)
    if outputs and value.is_graph_output:
        graph.outputs = [back if each is value else each for each in graph.outputs]
        value.name, back.name = back.name, value.name
    return scale


def _position(graph: Graph):  # type: ignore[no-untyped-def]
    order = {id(node): k for k, node in enumerate(graph)}
    return lambda node: order[id(node)]


def mean_loss(site: Site, lost: Array, mean: Array) -> Array:
    """What lost weights [outputs, ...] take off each output channel on average."""
    groups = groups_of(site)
    inputs = lost.reshape(groups, len(lost) // groups, mean.size // groups, -1).sum(axis=3)
    return np.asarray(np.einsum("goi,gi->go", inputs, mean.reshape(groups, -1)).reshape(-1))


def narrow_weights(sites: Sequence[Site], rounding: Rounding, means: Mapping[str, Array]) -> None:
    """Put numbers of bfloat16 in place of the weights of layers that are multiplied in it. Weights that are never
    negative stay as they are: what they add up, bands of a spectrum, goes into logarithms, and is as exact as its parts
    only while no other sign is among them."""
    shared: dict[Weights, Value] = {}
    for site in sites:
        if site.numbers.min(initial=0.0) >= 0.0:
            continue
        values, key = rounding.bfloat(site), weights_of(site)
        mean = means.get(site.name)
        shift = None if mean is None else mean_loss(site, np.moveaxis(site.numbers, site.outputs, 0) - values, mean)
        if key not in shared:
            shared[key] = beside(site.weight, np.ascontiguousarray(np.moveaxis(values, 0, site.outputs)), "bfloat")
        if shift is not None and site.node.op == "MatMul":
            later_bias(site, shift)
        elif shift is not None and (site.bias is None or site.bias.const is not None):
            bias = shift if site.row is None else site.row + shift
            moved = builder(site.node, ORIGIN).constant(bias.astype(np.float32), f"{site.weight.name}.bfloat.bias")
            site.node.set_inputs([*site.node.inputs[:2], moved])
        site.node.set_input(1, shared[key])


class Shared:
    """Codes of weights, each once, and for every graph what gives the numbers back: a body does not see what another
    computes."""

    def __init__(self) -> None:
        self._codes: dict[tuple[Weights, Any], tuple[Value, Value, Value]] = {}
        self._back: dict[tuple[Weights, Any, Graph], Value] = {}

    def back(self, site: Site, codes: Array, steps: Array) -> Value:
        """The numbers of a layer's weights; codes have the axis of outputs in front."""
        key, weight = (weights_of(site), codes.dtype), site.weight
        if key not in self._codes:
            self._codes[key] = (
                beside(weight, np.ascontiguousarray(np.moveaxis(codes, 0, site.outputs)), "codes"),
                beside(weight, steps, "scale"),
                beside(weight, np.zeros(steps.shape, codes.dtype), "zero"),
            )
        if (*key, site.graph) not in self._back:
            name = f"{site.name}.weight.dequantize"
            made = builder(site.node, ORIGIN).DequantizeLinear(*self._codes[key], axis=site.outputs, _name=name)
            self._back[*key, site.graph] = made
        return self._back[*key, site.graph]


def _layer(
    site: Site, rounding: Rounding, scales: Mapping[str, np.float32], mean: Array | None, shared: Shared
) -> None:
    node = site.node
    first, steps, lost = rounding.codes(site)
    bias = bias_of(site, lost, mean)
    node.set_input(1, shared.back(site, first, steps))
    if node.op == "MatMul" and mean is not None:
        later_bias(site, mean_loss(site, lost, mean))
        return
    data = scales.get(_source(site.data))
    if bias is None or data is None:
        return
    fine = (data * steps).astype(np.float32)
    whole = np.rint(bias / fine)
    if np.abs(whole).max(initial=0) < 2**31:
        ops, name = builder(node, ORIGIN), (site.bias or site.weight).name
        back = ops.DequantizeLinear(
            ops.constant(whole.astype(np.int32), f"{name}.whole"),
            ops.constant(fine, f"{name}.whole.scale"),
            ops.constant(np.zeros(fine.shape, np.int32), f"{name}.whole.zero"),
            axis=0,
            _name=f"{site.name}.bias.dequantize",
        )
        node.set_inputs([*node.inputs[:2], back])


def bias_of(site: Site, lost: Array, mean: Array | None) -> Array | None:
    """The bias of a layer, with what its weights lost, times their inputs on average; None where it has none to set."""
    if site.node.op == "MatMul" or (site.bias is not None and site.bias.const is None):
        return None
    if mean is None:
        return site.row
    return np.asarray(mean_loss(site, lost, mean) + (0.0 if site.row is None else site.row))


def later_bias(site: Site, shift: Array) -> None:
    found = added_row(site.node, len(shift))
    if found is not None:
        reader, position, value = found
        assert value.const is not None
        moved = (value.const.numpy() + shift).astype(np.float32)
        reader.set_input(position, builder(reader, ORIGIN).constant(moved, f"{value.name}.moved"))


def added_row(product: Node, columns: int) -> tuple[Node, int, Value] | None:
    """A product has no bias of its own; a row of constants that is added to it next serves as one."""
    reader = only_use(product.output)
    if reader is None or reader.op != "Add" or reader.domain or product.output.is_graph_output:
        return None
    for position, value in enumerate(reader.inputs):
        if value is not None and value.const is not None and value.const.shape == (columns,):
            return reader, position, value
    return None


def _source(value: Value) -> str:
    """The value behind a pair."""
    maker = value.producer
    if maker is not None and maker.op == "DequantizeLinear" and maker.inputs[0] is not None:
        codes = maker.inputs[0].producer
        if codes is not None and codes.op == "QuantizeLinear" and codes.inputs[0] is not None:
            return codes.inputs[0].name
    return value.name
