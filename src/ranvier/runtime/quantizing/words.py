"""16-bit activations for layers that 8 bits hurt: pairs of QuantizeLinear and DequantizeLinear that standards since
2024 have (opset 21).

Data has one scale, a power of two, no zero point, and room above the largest value that samples showed; weights have a
scale for each output channel and as many bits as sums of any such data leave room for in 32, or 8. What such a layer
adds to the error is mostly nothing beside what 8 bits do, and processors that multiply bytes multiply these twice as
fast as floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder
from ranvier.runtime.quantizing.rounding import SUM_OF_WORDS, Rounding, groups_of
from ranvier.runtime.quantizing.sites import Site
from ranvier.runtime.quantizing.static import ORIGIN, Range, Shared, bias_of, later_bias, mean_loss, put_pair

Array = np.ndarray[Any, Any]
OPSET = 21  # the first that quantizes to 16 bits
_ROOM = 1.25  # times the largest value of samples
_LARGEST = (1 << 15) - 1
_LEAST = -60  # exponent of a step: products of two are numbers still
_PLANE = 4  # axes of weights, at most: beyond, windows are no planes


def are_fast(config: SessionConfig) -> bool:
    """Whether the processor that sessions generate code for multiplies codes of 16 bits faster than floats."""
    from ranvier.codegen.llvm import isa
    from ranvier.codegen.llvm.integer import multiplies_words

    name = str(config.provider_options.get("cpu", {}).get("isa", ""))
    try:
        return multiplies_words(isa.chosen(name) if name else isa.host())
    except NotSupported:
        return False


def takes_words(site: Site) -> bool:
    """Whether kernels of words multiply such a layer, and codes of 8 bits leave its sums in 32."""
    numbers = site.numbers
    if groups_of(site) > 1 or numbers.ndim > _PLANE:
        return False
    rows = np.abs(np.moveaxis(numbers, site.outputs, 0).reshape(numbers.shape[site.outputs], -1))
    largest = rows.max(axis=1)
    if not np.isfinite(largest).all():
        return False
    sums = rows.sum(axis=1, dtype=np.float64) * 127 / np.where(largest > 0, largest, 1)
    return bool((sums + rows.shape[1] / 2 < SUM_OF_WORDS).all())


def quantize_words(
    sites: Sequence[Site],
    ranges: Mapping[str, Range],
    rounding: Rounding,
    means: Mapping[str, Array],
    shared: Shared,
) -> None:
    """Rewrite layers in place; ``ranges`` has those of their data, by names of layers."""
    readers: dict[tuple[Graph, Value], list[tuple[Node, int]]] = {}
    bounds: dict[tuple[Graph, Value], Range] = {}
    for site in sites:
        key = site.graph, site.data
        readers.setdefault(key, []).append((site.node, 0))
        bounds[key] = ranges[site.name]
    for site in sites:
        _layer(site, rounding, means.get(site.name), shared)
    for (graph, value), uses in readers.items():
        put_pair(graph, value, uses, _step(*bounds[graph, value]), np.zeros((), np.int16))


def _step(low: float, high: float) -> np.float32:
    """A power of two, which nothing is divided by."""
    most = max(abs(low), abs(high)) * _ROOM
    exponent = math.ceil(math.log2(most / _LARGEST)) if most > 0 else -16
    return np.float32(2.0 ** min(max(exponent, _LEAST), -_LEAST))


def _layer(site: Site, rounding: Rounding, mean: Array | None, shared: Shared) -> None:
    codes, steps, lost = rounding.words(site)
    bias = None if mean is None else bias_of(site, lost, mean)
    node = site.node
    node.set_input(1, shared.back(site, codes, steps))
    if node.op == "MatMul" and mean is not None:
        later_bias(site, mean_loss(site, lost, mean))
    elif bias is not None:
        made = builder(node, ORIGIN).constant(bias.astype(np.float32), f"{site.name}.bias")
        node.set_inputs([*node.inputs[:2], made])
