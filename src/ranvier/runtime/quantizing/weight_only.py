"""Weights in a few bits, activations as they are: MatMulNBits, MatMulBnb4, or a DequantizeLinear of float8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.contrib.weight_only import packed
from ranvier.passes.edit import builder, bypass
from ranvier.quantize import Awq, Gptq, InputMoments, Integers, Quantized, scheme
from ranvier.quantize.packing import pack_nibbles
from ranvier.quantize.schemes import added_names, takes
from ranvier.records import dataclass
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, in_groups, storable
from ranvier.runtime.quantizing.sites import Site, named_in_errors

ORIGIN = "quantize"
MICROSOFT = "com.microsoft"
Array = np.ndarray[Any, Any]
CALIBRATED = ("gptq", "awq")
SCHEMES = ("int8w", "int4", "uint4", "int2", "uint2", "fp8", "fp8_e5m2", "nf4", "ternary", *CALIBRATED)


def scheme_names() -> tuple[str, ...]:
    """Own schemes for weights alone, then those that other packages bring."""
    return (*SCHEMES, *(name for name in added_names() if name not in SCHEMES))


@dataclass(frozen=True)
class Coded:
    """Codes of the weights [out, in] of a layer, times factors by which its inputs are to be divided."""

    codes: Quantized
    factors: Array | None = None


Known = dict[tuple[str, int], Coded]  # by the name of weights, and the axis of output channels


def quantize_weights(
    graph: Graph,
    sites: Sequence[Site],
    name: str,
    *,
    group: int,
    bits: int = 4,
    level: int = 0,
    moments: Mapping[str, InputMoments] | None = None,
    known: Known | None = None,
) -> None:
    """Rewrite the products of a graph in place. Codes are found once for ``known`` weights, however many models are
    made, and layers that share weights share them still. ``bits`` are those of GPTQ and AWQ; ``level`` is MatMulNBits'
    own word for what activations may be rounded to."""
    if name not in scheme_names():
        raise InvalidConfig(f"{name!r} is no scheme for weights alone")
    if not LEAST_GROUP <= group <= MOST_GROUP or group & (group - 1):
        raise InvalidConfig(f"a group has a power of two from {LEAST_GROUP} to {MOST_GROUP} of weights, got {group}")
    known = {} if known is None else known
    sharing: dict[tuple[str, int], list[Site]] = {}
    for site in sites:
        sharing.setdefault((site.weight.name, site.outputs), []).append(site)
    for key, those in sharing.items():
        if key not in known:
            read = dict.fromkeys(site.data.name for site in those)
            with named_in_errors(those[0].name):
                found = [each for data in read if (each := (moments or {}).get(data)) is not None]
                known[key] = codes_of(np.ascontiguousarray(those[0].matrix), name, group, found, bits)
        _write(those, known[key], level)


def codes_of(matrix: Array, name: str, group: int, moments: Sequence[InputMoments] = (), bits: int = 4) -> Coded:
    """Weights [out, in] by a scheme; ``moments`` of what each layer reads that has them, and ``bits`` for schemes that
    look at those."""
    if name in added_names():  # also one that took the place of an own one
        return Coded(_by_others(name, matrix, group))
    if name == "nf4":  # groups go on from row to row
        return Coded(scheme("nf4", group=at_most(group, matrix.size)).quantize(matrix))
    group = at_most(group, matrix.shape[1])
    if name.startswith("fp8"):
        return Coded(scheme(name, granularity="channel").quantize(matrix))
    if name == "ternary":
        return Coded(in_groups(scheme("ternary").quantize(matrix), group))
    if name in CALIBRATED:
        if not moments:
            raise InvalidConfig(f"{name} needs samples of the inputs")
        joined = InputMoments.joined(moments)
        if name == "gptq":
            return Coded(Gptq(bits, group, symmetric=False, reorder=True).quantize(matrix, joined))
        return Coded(*Awq(bits, group).quantize(matrix, joined))
    bits = int("".join(c for c in name if c.isdigit()))  # its own
    symmetric, fit = name.startswith("int"), "mse" if bits < 8 else "minmax"
    return Coded(Integers(bits, symmetric, "group", group, signed=False, fit=fit).quantize(matrix))


def at_most(group: int, weights: int) -> int:
    """A group that holds no more than there is, as a power of two."""
    return min(group, max(LEAST_GROUP, 1 << (weights - 1).bit_length()))


def _by_others(name: str, matrix: Array, group: int) -> Quantized:
    made = (scheme(name, group=group) if takes(name, "group") else scheme(name)).quantize(matrix)
    if not isinstance(made, Quantized) or made.shape != matrix.shape:
        raise InvalidConfig(f"scheme {name!r} gives no codes for weights {list(matrix.shape)}: {made!r:.200}")
    return storable(made, group)


def _write(sites: Sequence[Site], coded: Coded, level: int) -> None:
    if coded.codes.table is not None:
        _bnb4(sites, coded.codes)
    elif coded.codes.codes.dtype.kind in "iu":
        _nbits(sites, coded, level)
    else:
        _float8(sites, coded.codes)


def _nbits(sites: Sequence[Site], found: Coded, level: int) -> None:
    """Codes [out, in] of 0 … 2^bits - 1 with a scale for each group of a row, as MatMulNBits stores them."""
    coded = found.codes
    outputs, inputs = coded.shape
    group = at_most(coded.block[1], inputs)
    groups = -(-inputs // group)
    filled = np.zeros((outputs, groups * group), np.uint8)
    filled[:, :inputs] = coded.codes
    blocks = packed(filled.reshape(outputs, groups, group), coded.bits)
    zeros = coded.zeros
    if zeros is not None and (zeros == 1 << (coded.bits - 1)).all():
        zeros = None  # the operator's own
    elif zeros is not None and zeros.dtype.kind != "f":
        zeros = packed(zeros, coded.bits)
    stem, first = sites[0].weight.name, builder(sites[0].node, ORIGIN)
    weights = [
        first.constant(blocks, f"{stem}.codes"),
        first.constant(coded.scales.reshape(-1).astype(np.float32), f"{stem}.scale"),
        None if zeros is None else first.constant(zeros.reshape(-1), f"{stem}.zero"),
    ]
    attrs = {"K": inputs, "N": outputs, "bits": coded.bits, "block_size": group}
    attrs |= {"accuracy_level": level} if level else {}
    for site in sites:
        ops = builder(site.node, ORIGIN)
        data = site.data
        if found.factors is not None:
            data = ops.Mul(data, (1.0 / found.factors).astype(np.float32), _name=f"{site.name}.factors")
        row = site.row
        bias = None if row is None or site.bias is None else ops.constant(row, f"{site.bias.name}.row")
        operands: list[Value | None] = [data, *weights, None, bias]
        while operands[-1] is None:
            operands.pop()
        put_instead(site.node, ops.node("MatMulNBits", operands, attrs, domain=MICROSOFT, version=1))


def _bnb4(sites: Sequence[Site], coded: Quantized) -> None:
    outputs, inputs = coded.shape
    (group,) = coded.block
    stem, first = sites[0].weight.name, builder(sites[0].node, ORIGIN)
    codes = first.constant(pack_nibbles(coded.codes), f"{stem}.codes")
    scales = first.constant(coded.scales.astype(np.float32), f"{stem}.absmax")
    attrs = {"K": inputs, "N": outputs, "block_size": group, "quant_type": 1}
    for site in sites:
        ops = builder(site.node, ORIGIN)
        made = ops.node("MatMulBnb4", [site.data, codes, scales], attrs, domain=MICROSOFT, version=1)
        put_instead(site.node, made, site.bias)


def _float8(sites: Sequence[Site], coded: Quantized) -> None:
    """The weights of layers behind one DequantizeLinear."""
    axis, stem, first = sites[0].outputs, sites[0].weight.name, builder(sites[0].node, ORIGIN)
    back = first.DequantizeLinear(
        first.constant(np.ascontiguousarray(coded.codes.T if axis == 1 else coded.codes), f"{stem}.codes"),
        first.constant(coded.scales.reshape(-1), f"{stem}.scale"),
        axis=axis,
        _name=f"{sites[0].name}.weight.dequantize",
    )
    for site in sites:
        site.node.set_input(1, back)


def put_instead(node: Node, made: Node, bias: Value | None = None) -> None:
    """The made node's result in place of the old one's, with the bias that it cannot take itself."""
    value = made.output
    value.type = node.output.type
    if bias is not None:
        value = builder(node, ORIGIN).Add(value, bias, _name=f"{node.name}.bias")
    # the new result goes by the old one's name, so that both models can be compared value by value
    if not node.output.is_graph_output:  # one that is hands its name on by itself
        value.name, node.output.name = node.output.name, value.name
    bypass(node, value, ORIGIN)
