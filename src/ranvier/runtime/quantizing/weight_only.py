"""Weights in a few bits, activations as they are: MatMulNBits, MatMulBnb4, or a DequantizeLinear of float8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ranvier.dtypes import of
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.contrib.weight_only import packed
from ranvier.passes.edit import builder, bypass
from ranvier.quantize import Awq, Gptq, InputMoments, Integers, Quantized, scheme
from ranvier.quantize.packing import pack_nibbles
from ranvier.runtime.quantizing.sites import Site

ORIGIN = "quantize"
MICROSOFT = "com.microsoft"
Array = np.ndarray[Any, Any]
CALIBRATED = ("gptq", "awq")
SCHEMES = ("int8w", "int4", "uint4", "int2", "uint2", "fp8", "fp8_e5m2", "nf4", "ternary", *CALIBRATED)
_LEAST_BLOCK = 16  # of MatMulNBits


def quantize_weights(
    graph: Graph,
    sites: Sequence[Site],
    name: str,
    *,
    group: int,
    moments: Mapping[str, InputMoments] | None = None,
) -> dict[str, Array]:
    """Rewrite the products of a graph in place; gives, by site, what the weights [out, in] have become."""
    if name not in SCHEMES:
        raise InvalidConfig(f"{name!r} is no scheme for weights alone")
    if group < _LEAST_BLOCK or group & (group - 1):
        raise InvalidConfig(f"a group has a power of two of at least {_LEAST_BLOCK} weights, got {group}")
    found = {}
    for site in sites:
        known = None if moments is None else moments.get(site.data.name)
        found[site.name] = _rewritten(site, name, group, known)
    return found


def _rewritten(site: Site, name: str, group: int, moments: InputMoments | None) -> Array:
    matrix = np.ascontiguousarray(site.matrix)
    if name == "nf4":
        return _bnb4(site, matrix, group)
    if name.startswith("fp8"):
        return _float8(site, matrix, name)
    factors: Array | None = None
    if name in CALIBRATED:
        if moments is None:
            raise InvalidConfig(f"{name} needs samples of the inputs")
        coded, factors = _calibrated(name, matrix, group, moments)
    elif name == "ternary":
        coded = _ternary(matrix, group)
    else:
        bits = int("".join(c for c in name if c.isdigit()))
        symmetric = name.startswith("int")
        fit = "mse" if bits < 8 else "minmax"
        coded = Integers(bits, symmetric, "group", group, signed=False, fit=fit).quantize(matrix)
    _nbits(site, coded, group, factors)
    back = coded.dequantize()
    return back if factors is None else back / factors


def _calibrated(name: str, matrix: Array, group: int, moments: InputMoments) -> tuple[Quantized, Array | None]:
    if name == "gptq":
        return Gptq(4, group).quantize(matrix, moments), None
    coded, factors = Awq(4, group).quantize(matrix, moments)
    return coded, factors


def _ternary(matrix: Array, group: int) -> Quantized:
    coded = scheme("ternary").quantize(matrix)
    groups = -(-matrix.shape[1] // group)
    return replace(
        coded,
        codes=(coded.codes + 1).astype(np.uint8),
        scales=np.full((len(matrix), groups), coded.scales.item(), np.float32),
        zeros=np.ones((len(matrix), groups), np.uint8),
        block=(1, group),
    )


def _nbits(site: Site, coded: Quantized, group: int, factors: Array | None) -> None:
    """Codes [out, in] of 0 … 2^bits - 1 with a scale for each group of a row, as MatMulNBits stores them."""
    outputs, inputs = coded.shape
    groups = -(-inputs // group)
    filled = np.zeros((outputs, groups * group), np.uint8)
    filled[:, :inputs] = coded.codes
    blocks = packed(filled.reshape(outputs, groups, group), coded.bits)
    middle = 1 << (coded.bits - 1)
    zeros = None if coded.zeros is None or (coded.zeros == middle).all() else packed(coded.zeros, coded.bits)
    order = None if coded.order is None else coded.order.astype(np.int32)
    ops = builder(site.node, ORIGIN)
    data = (
        site.data
        if factors is None
        else ops.Mul(site.data, (1.0 / factors).astype(np.float32), _name=f"{site.name}.factors")
    )
    stem = site.weight.name
    operands: list[Any] = [
        data,
        ops.constant(blocks, f"{stem}.codes"),
        ops.constant(coded.scales.reshape(-1).astype(np.float32), f"{stem}.scale"),
        None if zeros is None else ops.constant(zeros.reshape(-1), f"{stem}.zero"),
        None if order is None else ops.constant(order, f"{stem}.group"),
        site.bias,
    ]
    while operands[-1] is None:
        operands.pop()
    attrs = {"K": inputs, "N": outputs, "bits": coded.bits, "block_size": group}
    _replace(site.node, ops.node("MatMulNBits", operands, attrs, domain=MICROSOFT, version=1))


def _bnb4(site: Site, matrix: Array, group: int) -> Array:
    coded = scheme("nf4", group=group).quantize(matrix)
    ops = builder(site.node, ORIGIN)
    outputs, inputs = matrix.shape
    codes = ops.constant(pack_nibbles(coded.codes), f"{site.weight.name}.codes")
    scales = ops.constant(coded.scales.astype(np.float32), f"{site.weight.name}.absmax")
    attrs = {"K": inputs, "N": outputs, "block_size": group, "quant_type": 1}
    made = ops.node("MatMulBnb4", [site.data, codes, scales], attrs, domain=MICROSOFT, version=1)
    _replace(site.node, made, site.bias)
    return coded.dequantize()


def _float8(site: Site, matrix: Array, name: str) -> Array:
    coded = scheme(name, granularity="channel").quantize(matrix)
    ops = builder(site.node, ORIGIN)
    turned = site.outputs == 1
    codes = np.ascontiguousarray(coded.codes.T if turned else coded.codes)
    back = ops.DequantizeLinear(
        ops.constant(codes, f"{site.weight.name}.codes"),
        ops.constant(coded.scales.reshape(-1), f"{site.weight.name}.scale"),
        axis=site.outputs,
        _name=f"{site.weight.name}.dequantize",
    )
    site.node.set_input(1, back)
    assert of(codes).bits == 8
    return coded.dequantize()


def _replace(node: Node, made: Node, bias: Value | None = None) -> None:
    """The made node's result in place of the old one's, with the bias that it cannot take itself."""
    value = made.output
    value.type = node.output.type
    if bias is not None:
        value = builder(node, ORIGIN).Add(value, bias, _name=f"{node.name}.bias")
    # the new result goes by the old one's name, so that both models can be compared value by value
    if not node.output.is_graph_output:  # one that is hands its name on by itself
        value.name, node.output.name = node.output.name, value.name
    bypass(node, value, ORIGIN)
