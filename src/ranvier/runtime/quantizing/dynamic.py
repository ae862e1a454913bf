"""Weights in 8 bits, activations rounded to 8 bits by the range they have when they come: no samples are needed.

A layer is DynamicQuantizeLinear, MatMulInteger or ConvInteger, and the sums times both scales: the standard's own
operators, in the order in which other runtimes look for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.edit import builder
from ranvier.passes.fuse.quantized import WINDOW
from ranvier.quantize import Integers
from ranvier.records import dataclass
from ranvier.runtime.quantizing.rounding import Weights, terms_of, weights_of
from ranvier.runtime.quantizing.sites import Site, beside, find_sites, named_in_errors
from ranvier.runtime.quantizing.weight_only import put_instead

ORIGIN = "quantize"
DYNAMIC = "int8_dynamic"  # the scheme
Array = np.ndarray[Any, Any]
_LEAST_TERMS = 32  # of a convolution's sums: with fewer, as in those of single channels, rounding costs what codes save


def dynamic_sites(graph: Graph, *, bodies: bool = False) -> list[Site]:
    """The layers of a graph that gain by it, in order; ``bodies``: also those in bodies of loops and branches."""
    sites = find_sites(graph, bodies=bodies)
    return [site for site in sites if site.inner is not None or terms_of(site) >= _LEAST_TERMS]


def quantize_dynamic(sites: Sequence[Site], *, bits: int = 8, signed: bool = True, per_channel: bool = True) -> None:
    """Rewrite layers in place; ``bits`` and ``signed`` are for codes of weights, which have a scale for
    each output channel or one for all. Layers that read the same round it once, those that share weights share their
    codes."""
    scheme = Integers(bits, True, "channel" if per_channel else "tensor", signed=signed)
    rounded: dict[tuple[Value, Graph], list[Value]] = {}  # a body does not see what another computes
    shared: dict[Weights, _Codes] = {}
    for site in sites:
        node, ops, key = site.node, builder(site.node, ORIGIN), weights_of(site)
        read = site.data, site.graph
        if read not in rounded:
            rounded[read] = _rounded(site.data, ops)
        if key not in shared:
            with named_in_errors(site.name):
                shared[key] = _coded(site, scheme)
        codes, step, zero = rounded[read]
        weights = shared[key]
        operands = [codes, weights.codes, zero, *weights.zero]
        kind = "MatMulInteger" if site.inner is not None else "ConvInteger"
        attrs = {name: node.attrs[name] for name in WINDOW if name in node.attrs and site.inner is None}
        whole = ops.node(kind, operands, attrs, name=site.name).output
        both = ops.Mul(step, weights.scales, _name=f"{site.name}.scales")
        sums = ops.Cast(whole, to=DType.float32.onnx, _name=f"{site.name}.sums")
        put_instead(node, ops.node("Mul", [sums, both], name=f"{site.name}.scaled"), _bias(site, ops))


@dataclass(frozen=True)
class _Codes:
    """Of weights, as the operator on codes has them; the zero is left out where it is zero."""

    codes: Value
    scales: Value
    zero: tuple[Value, ...]


def _rounded(data: Value, ops: GraphOps) -> list[Value]:
    """Codes of a value, their scale and their zero."""
    return list(ops.node("DynamicQuantizeLinear", [data], outputs=3, name=f"{data.name}.quantize").outputs)


def _coded(site: Site, scheme: Integers) -> _Codes:
    moved, weight = np.moveaxis(site.numbers, site.outputs, 0), site.weight
    coded = scheme.quantize(moved.reshape(len(moved), -1))
    whole = coded.codes.reshape(moved.shape)
    whole = whole if site.inner is None else whole.T  # products read [in, out]
    scales = coded.scales.astype(np.float32).reshape(_spread(site) if scheme.granularity == "channel" else ())
    middle = () if scheme.signed else (beside(weight, np.asarray(1 << (scheme.bits - 1), np.uint8), "zero"),)
    codes = beside(weight, np.ascontiguousarray(whole), "codes")
    return _Codes(codes, beside(weight, scales, "scale"), middle)


def _spread(site: Site) -> tuple[int, ...]:
    """The shape in which a number for each output channel meets a result."""
    return (-1,) if site.inner is not None else (-1, *[1] * (site.numbers.ndim - 2))


def _bias(site: Site, ops: GraphOps) -> Value | None:
    """What is added to scaled sums."""
    if site.bias is None or site.inner is not None:
        return site.bias
    if site.bias.const is not None:
        return ops.constant(site.bias.const.numpy().reshape(_spread(site)), f"{site.bias.name}.spread")
    return ops.Reshape(site.bias, np.array(_spread(site)), _name=f"{site.name}.bias.spread")
