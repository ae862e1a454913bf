"""Attention that has the weights of queries, keys and values in itself, as a product and attention behind it.

Exporters' optimizers make one node of both (com.microsoft's Attention), whose weights nothing but that operator reads.
Apart, the product is a layer like others, for every scheme; MultiHeadAttention does the rest, and other runtimes have
it too. (The parts that gradients know it by have scores as tensors, and would be slower.) A past in one tensor is taken
apart before it, and the present put together behind it. What cannot be said like that, as rotary embedding without
tables, stays one node.
"""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps, substitute
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import dtype_of, is_wanted, shape_of
from ranvier.runtime.quantizing.sites import can_have_codes

ORIGIN = "projection"
_SAME = ("num_heads", "scale", "mask_filter_value", "unidirectional")  # attributes that both operators have
_WEIGHT, _BIAS, _MASK, _PAST, _ADDED = range(1, 6)
_PRESENT = 1


def take_out_projections(graph: Graph) -> None:
    """Here and in bodies, where the weights could be coded then."""
    for node in list(graph.all_nodes()):
        if node.op == "Attention" and node.domain == MICROSOFT and _can_be_parted(node):
            _part(node)


def _can_be_parted(node: Node) -> bool:
    data, weight, mask = node.input(0), node.input(_WEIGHT), node.input(_MASK)
    if not can_have_codes(data, weight) or sum(_sizes(node)) != _columns(node):
        return False
    if node.attrs.get("do_rotary", 0) or node.attrs.get("past_present_share_buffer", 0):
        return False
    past = node.input(_PAST)
    if past is None and is_wanted(node, _PRESENT):
        return False
    return (past is None or dtype_of(past) is DType.float32) and (mask is None or _is_mask_of_both(mask, data))


def _is_mask_of_both(mask: Value, data: Value | None) -> bool:
    """Whether the operators read it alike: lengths of sequences, or zeros and ones for keys, or for queries and keys.
    The ends and starts of keys, and masks of the longest sequence, are Attention's alone."""
    shape, rows = shape_of(mask), shape_of(data)
    if shape is None:
        return False
    if len(shape) == 1:
        return rows is not None and shape[0] is not None and shape[0] == rows[0]
    return len(shape) in (2, 3) and shape[-1] != 1  # one number for all keys says nothing


def _columns(node: Node) -> int:
    weight = node.input(_WEIGHT)
    assert weight is not None and weight.const is not None
    return int(weight.const.shape[1])


def _sizes(node: Node) -> list[int]:
    """Columns of queries, of keys and of values."""
    given = node.attrs.get("qkv_hidden_sizes")
    return [int(size) for size in given] if given else [_columns(node) // 3] * 3


def _part(node: Node) -> None:
    ops, name = builder(node, ORIGIN), node.name
    made = ops.MatMul(node.inputs[0], node.inputs[_WEIGHT], _name=name)
    bias = node.input(_BIAS)
    if bias is not None:
        made = ops.Add(made, bias, _name=f"{name}.bias")
    heads = ops.node("Split", [made, np.array(_sizes(node))], {"axis": -1}, outputs=3, name=f"{name}.split").outputs
    past = node.input(_PAST)
    before = _both(ops, past, name) if past is not None else []
    operands = [*heads, None, node.input(_MASK), node.input(_ADDED), *before]
    while operands[-1] is None:
        operands.pop()
    attrs = {each: node.attrs[each] for each in _SAME if each in node.attrs}
    count = 3 if before else 1
    called = f"{name}.heads"
    result = ops.node("MultiHeadAttention", operands, attrs, outputs=count, domain=MICROSOFT, name=called)
    if is_wanted(node, _PRESENT):
        axis = np.array([0])
        rows = [ops.Unsqueeze(each, axis, _name=f"{name}.row{k}") for k, each in enumerate(result.outputs[1:])]
        substitute(node.outputs[_PRESENT], ops.Concat(*rows, axis=0, _name=f"{name}.present"), ops)
    bypass(node, result.output, ORIGIN)


def _both(ops: GraphOps, past: Value, name: str) -> list[Value]:
    """Keys and values of a past that lie one after the other."""
    parts = ops.node("Split", [past, np.array([1, 1])], {"axis": 0}, outputs=2, name=f"{name}.past").outputs
    return [ops.Squeeze(part, np.array([0]), _name=f"{name}.past{k}") for k, part in enumerate(parts)]
