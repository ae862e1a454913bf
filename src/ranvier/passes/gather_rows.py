"""Rows of a table are gathered before arithmetic is done with all of them.

Tables of words are often stored in few bits, and turned into numbers by a Cast and a Mul: that is constant, but folding
it would take several times the memory, and computing it takes longer than all that is done with the few rows which are
looked up. Arithmetic of single elements is the same before and after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, bypass, prune
from ranvier.passes.facts import shape_of

_PAIRS = frozenset({"Add", "Div", "Mul", "Sub"})
_ELEMENTWISE = _PAIRS | {"Cast", "Neg"}
_BROADCASTING = 7  # before this version operands were aligned by attributes


class GatherRows:
    name: ClassVar[str] = "gather_rows"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in graph.all_graphs():
            for node in list(each):
                if node.graph is not None and _gathers_rows(node):
                    self._rewrite(node, ctx)
        return ctx.changes > 0

    def _rewrite(self, node: Node, ctx: PassContext) -> None:
        table = node.input(0)
        assert table is not None
        readers_gather = all(_gathers_rows(reader) and at == 0 for reader, at in table.uses)
        if not readers_gather or table.is_graph_output or not _is_elementwise(table):
            return
        if _has_as_many(node.input(1), table):
            ctx.left("Gather", "there are no more rows than are looked up")
            return
        if bypass(node, _rows(table, node, builder(node, self.name)), self.name):
            prune([table])
            ctx.changed("Gather")


def _gathers_rows(node: Node) -> bool:
    return node.op == "Gather" and not node.domain and int(node.attrs.get("axis", 0)) == 0


def _is_elementwise(value: Value) -> bool:
    """Whether a value is worked out of constants, each element by itself."""
    node, whole = value.producer, shape_of(value)
    if node is None or node.domain or node.op not in _ELEMENTWISE:
        return False
    if node.op in _PAIRS and node.version < _BROADCASTING:
        return False
    if not whole or not all(isinstance(d, int) for d in whole):
        return False
    return all(each is not None and _has_rows(each, whole) for each in node.inputs)


def _has_rows(value: Value, whole: Sequence[object]) -> bool:
    """Of an operand of what has this shape: a constant, or something like that with as many rows."""
    own = shape_of(value)
    if own is None or len(own) > len(whole):
        return False
    if value.const is not None:
        return True
    alone = len(value.uses) == 1 and not value.is_graph_output
    return alone and len(own) == len(whole) and own[0] == whole[0] and _is_elementwise(value)


def _has_as_many(indices: Value | None, table: Value) -> bool:
    wanted, shape = None if indices is None else shape_of(indices), shape_of(table)
    if wanted is None or shape is None or not all(isinstance(d, int) for d in wanted):
        return False
    rows = shape[0]
    return isinstance(rows, int) and math.prod(d for d in wanted if isinstance(d, int)) >= rows


def _rows(value: Value, gather: Node, ops: GraphOps) -> Value:
    """The rows of a value that are looked up."""
    if value.const is not None:
        return ops.Gather(value, gather.input(1), axis=0)
    node, whole = value.producer, shape_of(value)
    assert node is not None and whole is not None
    operands: list[Value] = []
    for each in node.inputs:
        own = None if each is None else shape_of(each)
        assert each is not None and own is not None
        if len(own) < len(whole):
            operands.append(each)
        elif own[0] == whole[0]:
            operands.append(_rows(each, gather, ops))
        else:  # one row for all: without its axis it belongs to any number of rows
            assert each.const is not None
            operands.append(ops.constant(each.const.numpy().reshape(each.const.shape[1:]), each.name))
    return ops.node(node.op, operands, dict(node.attrs), version=node.version).output
