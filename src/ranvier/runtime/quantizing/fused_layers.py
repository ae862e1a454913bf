"""Layers that another runtime's optimizer made one node with what stands around them, as layers again.

Such a node (com.microsoft's FusedConv, FusedGemm, FusedMatMul …) has an activation, a second summand, a factor or
transposed weights in itself. Sessions fuse the same by themselves, and the forms with codes that any runtime reads are
those of the standard's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import rank_of
from ranvier.runtime.quantizing.made_constants import MadeConstants
from ranvier.runtime.quantizing.sites import can_have_codes, has_weights

ORIGIN = "fused layers"
_OF_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_OF_GEMM = ("alpha", "beta", "transA", "transB")
_PARAMETERS = ("alpha", "beta", "gamma", "axis")  # of activations
_BATCHES = ("transBatchA", "transBatchB")  # turned with their batches: seldom


def take_fused_apart(graph: Graph) -> None:
    """Here and in bodies, where the weights could be coded then."""
    made = MadeConstants()
    for node in list(graph.all_nodes()):
        apart = _WAYS.get(node.op) if node.domain == MICROSOFT else None
        found = apart(node, builder(node, ORIGIN), made) if apart is not None else None
        if found is not None:
            bypass(node, found, ORIGIN)
    made.sweep()


def _conv(node: Node, ops: GraphOps, constants: MadeConstants) -> Value | None:
    data, weight, bias, summand = (node.input(k) for k in range(4))
    if not has_weights(data, weight):
        return None
    operands = [data, weight] if bias is None else [data, weight, bias]
    made = ops.node("Conv", operands, _named(node, _OF_CONV)).output
    if summand is not None:
        made = ops.Add(made, summand, _name=f"{node.name}.added")
    return _activated(node, made, ops, dict(zip(("alpha", "beta"), node.attrs.get("activation_params") or ())))


def _gemm(node: Node, ops: GraphOps, constants: MadeConstants) -> Value | None:
    if not can_have_codes(node.input(0), node.input(1), inner=1 if node.attrs.get("transB", 0) else 0):
        return None
    made = ops.node("Gemm", [x for x in node.inputs if x is not None], _named(node, _OF_GEMM)).output
    return _activated(node, made, ops, _parameters(node))


def _matmul(node: Node, ops: GraphOps, constants: MadeConstants) -> Value | None:
    data, weight = node.input(0), node.input(1)
    across, factor = bool(node.attrs.get("transB", 0)), float(node.attrs.get("alpha", 1.0))
    if not can_have_codes(data, weight, inner=int(across)) or any(node.attrs.get(name, 0) for name in _BATCHES):
        return None
    assert data is not None and weight is not None
    matrix = constants.times(constants.turned(weight) if across else weight, factor)
    axes = list(range(rank_of(data) or 0))
    if matrix is None or (node.attrs.get("transA", 0) and not axes):
        return None
    if node.attrs.get("transA", 0):
        data = ops.Transpose(data, perm=[*axes[:-2], *axes[:-3:-1]], _name=f"{node.name}.transpose")
    made = ops.node("MatMul", [data, matrix]).output
    return _activated(node, made, ops, _parameters(node))


def _activated(node: Node, value: Value, ops: GraphOps, parameters: dict[str, Any]) -> Value:
    kind = node.attrs.get("activation") or ""
    if not kind:
        return value
    name = f"{node.name}.{kind}"
    if kind == "Clip":
        return ops.Clip(value, *(np.float32(end) for end in parameters.values()), _name=name)
    return ops.node(kind, [value], parameters, name=name).output


def _parameters(node: Node) -> dict[str, Any]:
    """Of its activation; those that are not given have the activation's own defaults."""
    given = {name: node.attrs.get(f"activation_{name}") for name in _PARAMETERS}
    return {name: number for name, number in given.items() if number is not None}


def _named(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: node.attrs[name] for name in names if name in node.attrs}


_WAYS: dict[str, Callable[[Node, GraphOps, MadeConstants], Value | None]] = {
    "FusedConv": _conv,
    "FusedGemm": _gemm,
    "FusedMatMul": _matmul,
    "FusedMatMulActivation": _matmul,
    "TransposeMatMul": _matmul,
}
