"""Long short-term memory with 8-bit weights: DynamicQuantizeLSTM, which other runtimes read too.

Both matrices have a scale for each column of gates. What a step reads is rounded to 8 bits by the range it has then,
so no samples are needed; where a step is one row, reading weights is all the time there is, and they are a quarter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import remove_dead, substitute
from ranvier.passes.edit import builder, sharpen
from ranvier.passes.facts import dtype_of
from ranvier.quantize import Integers
from ranvier.runtime.quantizing.sites import beside, named_in_errors

Array = np.ndarray[Any, Any]
ORIGIN = "quantize"
MICROSOFT = "com.microsoft"
_LEAST = 4096  # weights below which nothing is gained
_USUAL = ("sigmoid", "tanh", "tanh")
_LENGTHS, _PEEPHOLES = 4, 7  # operands that may not be there


def find_recurrent(graph: Graph, *, bodies: bool = False) -> list[Node]:
    """The layers of a graph that can be coded, in order; ``bodies``: also those in bodies of loops and branches."""
    nodes = graph.all_nodes() if bodies else graph
    return [node for node in nodes if node.op == "LSTM" and not node.domain and _is_usual(node)]


def _is_usual(node: Node) -> bool:
    if dtype_of(node.inputs[0]) is not DType.float32 or node.input(_LENGTHS) or node.input(_PEEPHOLES):
        return False
    weights = [node.input(k) for k in (1, 2)]
    if any(v is None or v.const is None or v.const.size < _LEAST for v in weights):
        return False
    bias = node.input(3)
    functions = [text_of(each).lower() for each in node.attrs.get("activations") or ()]
    plain = not any(node.attrs.get(name) for name in ("input_forget", "clip", "layout"))
    usual = all(name == _USUAL[k % 3] for k, name in enumerate(functions))
    return plain and usual and (bias is None or bias.const is not None)


def recurrent_weights(node: Node) -> tuple[Value, ...]:
    """Of inputs and of states, as [directions, gates, width]."""
    return tuple(value for value in node.inputs[1:3] if value is not None)


def coded_name(layer: str) -> str:
    """Of the node that stands for a layer with codes."""
    return f"{layer}.coded"


def quantize_recurrent(nodes: Iterable[Node]) -> None:
    """Put layers with codes in place of these; those that share weights share their codes."""
    shared: dict[Value, tuple[Value, Value, Value]] = {}
    for node in nodes:
        ops = builder(node, ORIGIN)
        codes, steps = [], []
        for value in recurrent_weights(node):
            if value not in shared:
                with named_in_errors(node.name):
                    shared[value] = _coded(value)
            whole, scale, zero = shared[value]
            codes.append(whole)
            steps += [scale, zero]
        others = [node.input(k) for k in range(3, 8)]
        operands = [node.inputs[0], *codes, *others, *steps]
        attrs = {name: value for name, value in node.attrs.items() if name != "layout"}
        name = coded_name(node.name)
        count = len(node.outputs)
        made = ops.node("DynamicQuantizeLSTM", operands, attrs, outputs=count, domain=MICROSOFT, version=1, name=name)
        for old, new in zip(node.outputs, made.outputs):
            sharpen(new, old)
            if old.uses or old.is_graph_output:
                substitute(old, new, ops)
        assert node.graph is not None
        remove_dead(node.graph, [node])


def _coded(value: Value) -> tuple[Value, Value, Value]:
    """Codes of a matrix of gates, turned as the operator has them, with scales and zeros."""
    assert value.const is not None
    matrix = value.const.numpy()
    directions, gates, width = matrix.shape
    coded = Integers(8, True, "channel").quantize(matrix.reshape(-1, width))
    turned = np.ascontiguousarray(coded.codes.reshape(matrix.shape).transpose(0, 2, 1))
    scale = coded.scales.reshape(directions, gates).astype(np.float32)
    return (
        beside(value, turned, "codes"),
        beside(value, scale, "scale"),
        beside(value, np.zeros((directions, gates), np.int8), "zero"),
    )
