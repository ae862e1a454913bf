"""Weights in a few bits, activations as they are: MatMulNBits, MatMulBnb4, or a DequantizeLinear of float8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder, bypass
from ranvier.quantize import Awq, Gptq, InputMoments, Integers, Quantized, scheme
from ranvier.quantize.schemes import added_names, takes
from ranvier.records import dataclass
from ranvier.runtime.quantizing.coded_forms import bnb4_form, nbits_form
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP, at_most, in_groups, storable
from ranvier.runtime.quantizing.sites import Site, beside, named_in_errors

ORIGIN = "quantize"
_BIAS = 5  # where MatMulNBits has it
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
        if not joined.count:  # it reads no rows in any sample
            return codes_of(matrix, f"uint{bits}", group)
        if name == "gptq":
            return Coded(Gptq(bits, group, symmetric=False, reorder=True).quantize(matrix, joined))
        return Coded(*Awq(bits, group).quantize(matrix, joined))
    bits = int("".join(c for c in name if c.isdigit()))  # its own
    symmetric, fit = name.startswith("int"), "mse" if bits < 8 else "minmax"
    return Coded(Integers(bits, symmetric, "group", group, signed=False, fit=fit).quantize(matrix))


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
    form = nbits_form(found.codes, level)
    weights = _constants(sites, form.operands, ("codes", "scale", "zero"))
    for site in sites:
        ops = builder(site.node, ORIGIN)
        data = site.data
        if found.factors is not None:
            data = ops.Mul(data, (1.0 / found.factors).astype(np.float32), _name=f"{site.name}.factors")
        row = site.row
        operands: list[Value | None] = [data, *weights]
        if row is not None and site.bias is not None:
            operands += [None] * (_BIAS - len(operands))
            operands.append(ops.constant(row, f"{site.bias.name}.row"))
        put_instead(site.node, ops.node(form.op, operands, dict(form.attrs), domain=form.domain, version=1))


def _bnb4(sites: Sequence[Site], coded: Quantized) -> None:
    form = bnb4_form(coded)
    weights = _constants(sites, form.operands, ("codes", "absmax"))
    for site in sites:
        ops = builder(site.node, ORIGIN)
        made = ops.node(form.op, [site.data, *weights], dict(form.attrs), domain=form.domain, version=1)
        put_instead(site.node, made, site.bias)


def _float8(sites: Sequence[Site], coded: Quantized) -> None:
    """The weights of layers behind one DequantizeLinear."""
    axis = sites[0].outputs
    codes = np.ascontiguousarray(coded.codes.T if axis == 1 else coded.codes)
    operands = _constants(sites, (codes, coded.scales.reshape(-1)), ("codes", "scale"))
    back: dict[Graph, Value] = {}  # by the graph that reads it: one body does not see what another computes
    for site in sites:
        if site.graph not in back:
            ops = builder(site.node, ORIGIN)
            back[site.graph] = ops.DequantizeLinear(*operands, axis=axis, _name=f"{site.name}.weight.dequantize")
        site.node.set_input(1, back[site.graph])


def _constants(sites: Sequence[Site], arrays: Iterable[Array], names: Iterable[str]) -> list[Value]:
    """Where the weights are that they stand for, so that whoever reads those sees them too."""
    return [beside(sites[0].weight, array, name) for array, name in zip(arrays, names)]


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
