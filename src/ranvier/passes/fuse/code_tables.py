"""Elementwise work between codes and codes becomes a table.

What lies between one DequantizeLinear and a QuantizeLinear and has no other tensor as operand is a function of a code:
256 results, worked out here. A Gather from them takes the place of an activation, however it was written, and gives the
same codes bit for bit.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.registry import Array
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, bypass, prune
from ranvier.passes.evaluate import Evaluator
from ranvier.passes.facts import dtype_of, is_elementwise, is_pure, widens
from ranvier.passes.fuse.codes import Left, code_type, dequantized, parameters

_MOST = 40  # nodes of a function
_FEWEST = 3  # below that, computing costs no more than looking up
_DEAR = frozenset({"Erf", "Exp", "Gelu", "HardSwish", "Log", "Mish", "Pow", "Sigmoid", "Softplus", "Swish", "Tanh"})
_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear"})


class CodeTables:
    name: ClassVar[str] = "tabulate_codes"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            # from the end: the longest function that leads to a code, not the first piece of it
            order = {id(node): k for k, node in enumerate(each)}
            for node in reversed(list(each)):
                if node.graph is not None and node.op == "QuantizeLinear" and not node.domain:
                    self._tabulate(node, order, ctx)
        return ctx.changes > 0

    def _tabulate(self, last: Node, order: dict[int, int], ctx: PassContext) -> None:
        try:
            code_type(last)
            if not parameters(last).is_single:
                return
            found = _function(last, order)
        except Left:
            return
        if found is None:
            return
        source, nodes = found
        if any(widens(source, v.const.shape) for n in nodes for v in n.inputs if v is not None and v.const is not None):
            ctx.left(last.op, "a constant may widen the operand")
            return
        try:
            table = _results(last, source, nodes)
        except RanvierError as error:
            ctx.left(last.op, str(error))
            return
        op = builder(last, self.name)
        # signed codes count from the end of the table, as positions below zero do
        looked_up = op.Gather(op.constant(table), op.Cast(source, to=DType.int32.onnx), axis=0)
        before = list(last.inputs)
        if bypass(last, looked_up, self.name):
            prune(before)
            ctx.changed("table")


def _function(last: Node, order: dict[int, int]) -> tuple[Value, list[Node]] | None:
    """The codes that everything before ``last`` comes from, and the nodes between; None where it is no function of
    one tensor, needed elsewhere on the way, or too short to be worth a table."""
    nodes: dict[int, Node] = {}
    frontier: dict[int, Value] = {}
    best: tuple[Value, list[Node]] | None = None
    here: Node | None = last
    while here is not None and _expand(here, nodes, frontier):
        if len(frontier) == 1 and _is_closed(nodes, last):
            (source,) = frontier.values()
            best = source, sorted(nodes.values(), key=lambda n: order[id(n)])
        # what comes last in the graph cannot be what the others come from
        latest = max(frontier.values(), key=lambda v: order.get(id(v.producer), -1), default=None)
        here = latest.producer if latest is not None and not latest.is_graph_output else None
        if here is None or here.op != "QuantizeLinear" or here.domain or id(here) not in order:
            break
        assert latest is not None
        del frontier[id(latest)]
    if best is None:
        return None
    ops = [n.op for n in best[1]]
    worth = any(op in _DEAR for op in ops) or sum(op not in _QUANTIZING for op in ops) >= _FEWEST
    return best if worth else None


def _expand(last: Node, nodes: dict[int, Node], frontier: dict[int, Value]) -> bool:
    """Take in the float nodes that lead to a QuantizeLinear, up to the codes they come from."""
    if not _pointwise(last) or len(nodes) > _MOST:
        return False
    nodes[id(last)] = last
    waiting = [last.inputs[0]]
    while waiting:
        value = waiting.pop()
        if value is None:
            continue
        if value.const is not None:
            if value.const.size != 1:
                return False
            continue
        node = value.producer
        if node is None or value.is_graph_output or node.domain or len(node.outputs) != 1 or not _pointwise(node):
            return False
        if id(node) in nodes:
            continue
        nodes[id(node)] = node
        given = dequantized(value)
        if given is None or given.codes.const is not None:
            waiting.extend(node.inputs)
        elif id(given.codes.producer) not in nodes:
            frontier[id(given.codes)] = given.codes
    return True


def _is_closed(nodes: dict[int, Node], last: Node) -> bool:
    """Nobody else reads what is computed on the way, of constants apart."""
    inside = (n for n in nodes.values() if n is not last and any(v and v.const is None for v in n.inputs))
    return all(id(user) in nodes for n in inside for v in n.outputs for user, _ in v.uses)


def _pointwise(node: Node) -> bool:
    if node.op in _QUANTIZING:
        return all(v is None or (v.const is not None and v.const.size == 1) for v in node.inputs[1:])
    return is_elementwise(node) and is_pure(node) and "axis" not in node.attrs and not node.has_subgraphs


def _results(last: Node, source: Value, nodes: list[Node]) -> Array:
    """The result for every code, in the order of their bits."""
    every = np.arange(256, dtype=np.uint8)
    if dtype_of(source) is DType.int8:
        every = every.view(np.int8)
    env = {source: every}
    run = Evaluator()
    for node in nodes:
        env.update(zip(node.outputs, run.node(node, env)))
    return np.ascontiguousarray(env[last.output].reshape(-1))  # constants of size 1 may have had more axes
