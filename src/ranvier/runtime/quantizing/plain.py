"""Products in the plain form that operators with codes have: data times a matrix, and at most a row of constants.

What else a Gemm may do is taken out of it: data are transposed before it, factors go into its constants, and what is
added but is no constant row, as an input of the model, is added behind it. A matrix for each of a batch of one is a
matrix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import rank_of
from ranvier.runtime.quantizing.sites import beside, could_be_coded, is_plain, is_row

ORIGIN = "plain"
Array = np.ndarray[Any, Any]


def make_products_plain(graph: Graph) -> None:
    """Those whose weights could be coded then; others stay as they are."""
    made = _Constants()
    for node in list(graph.all_nodes()):
        if node.op == "MatMul" and not node.domain:
            _drop_batch_of_one(node, made)
        elif node.op == "Gemm" and could_be_coded(node) and not is_plain(node):
            _take_apart(node, made)
    made.sweep()


class _Constants:
    """Constants made of others, each once: layers that share weights share them still."""

    def __init__(self) -> None:
        self._made: dict[tuple[Value, object], Value] = {}

    def times(self, value: Value, factor: float) -> Value | None:
        """A constant times a factor, rounded once; None where it is none, or has numbers then that are not finite."""
        if factor == 1.0:
            return value
        if value.const is None or not math.isfinite(factor):
            return None
        with np.errstate(over="ignore"):
            product = (value.const.numpy().astype(np.float64) * factor).astype(np.float32)
        return self._constant(value, factor, product, "scaled") if np.isfinite(product).all() else None

    def matrix(self, value: Value) -> Value:
        """A batch of one matrix as that matrix."""
        assert value.const is not None
        return self._constant(value, "matrix", value.const.numpy().reshape(value.const.shape[-2:]), "matrix")

    def _constant(self, value: Value, what: object, array: Array, called: str) -> Value:
        if (value, what) not in self._made:
            self._made[value, what] = beside(value, array, called)
        return self._made[value, what]

    def sweep(self) -> None:
        """Take away those that nobody reads any more."""
        for value in dict.fromkeys(value for value, _ in self._made):
            graph = value.owner
            if graph is not None and value.name in graph.constants and not value.uses and not value.is_graph_output:
                graph.remove_constant(value)


def _drop_batch_of_one(node: Node, made: _Constants) -> None:
    weight, rank = node.inputs[1], rank_of(node.inputs[0])
    if weight is None or weight.const is None or rank is None:
        return
    shape = weight.const.shape
    if 2 < len(shape) <= rank and all(size == 1 for size in shape[:-2]):  # the result has the rank of the data
        node.set_input(1, made.matrix(weight))


def _take_apart(node: Node, made: _Constants) -> None:
    ops = builder(node, ORIGIN)
    data, weight, bias = node.inputs[0], node.inputs[1], node.input(2)
    assert weight is not None
    weight = made.times(weight, node.attrs.get("alpha", 1.0))
    if weight is None:
        return
    if bias is not None:
        beta = node.attrs.get("beta", 1.0)
        bias = made.times(bias, beta) or ops.Mul(bias, np.float32(beta), _name=f"{node.name}.beta")
    if node.attrs.get("transA", 0):
        data = ops.Transpose(data, perm=[1, 0], _name=f"{node.name}.transpose")
    row = bias if is_row(bias) else None
    operands = [data, weight] if row is None else [data, weight, row]
    result = ops.node("Gemm", operands, {"transB": node.attrs.get("transB", 0)}, name=node.name).output
    if bias is not None and row is None:
        result.name = f"{node.output.name}.product"
        result = ops.Add(result, bias, _name=f"{node.name}.added")
    if not node.output.is_graph_output:  # one that is hands its name on by itself
        result.name, node.output.name = node.output.name, result.name
    bypass(node, result, ORIGIN)
