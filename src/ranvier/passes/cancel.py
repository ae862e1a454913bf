"""Removes nodes that change nothing, and pairs that undo each other.

Rules are functions declared for operators (``neutral``: arithmetic; ``views``: shapes and order). A rule returns

- a Value: it can take the place of the node's result;
- ``CHANGED``: the node was rewritten in place;
- a string: it would apply, but for this reason;
- None: it does not apply.

Each rule keeps every bit of every result, unless it says otherwise.
"""

from __future__ import annotations

from typing import ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes import neutral, transposes, views
from ranvier.passes.base import PassContext
from ranvier.passes.cancel_rules import Rule, rules_for
from ranvier.passes.edit import bypass, prune

MODULES = (neutral, transposes, views)  # imported for the rules they declare


class Cancel:
    name: ClassVar[str] = "cancel"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset({"folded"})

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for node in each:
                # a rewritten node may meet another rule; each rewrite skips a node above it, so this ends
                while node.graph is each and self._apply(node, ctx):
                    pass
        return ctx.changes > 0

    def _apply(self, node: Node, ctx: PassContext) -> bool:
        return any(_try(rule, node, ctx) for rule in rules_for(node.domain, node.op))


def _try(rule: Rule, node: Node, ctx: PassContext) -> bool:
    op, operands = node.op, node.inputs
    found = rule(node, ctx)
    if found is None:
        return False
    if isinstance(found, str):
        ctx.left(op, found)
        return False
    if isinstance(found, Value) and not bypass(node, found, Cancel.name):
        return False
    prune(operands)
    ctx.changed(f"{op}: {rule.__name__}")
    return True
