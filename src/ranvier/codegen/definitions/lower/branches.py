"""If whose condition follows from shapes: the branch that is taken becomes part of what is around it."""

from __future__ import annotations

from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.infer import SHAPE_MATH

_DEEP = 32  # steps of arithmetic between shapes and a condition


def _follows_from_shapes(value: Value | None, depth: int = _DEEP) -> bool:
    if value is None or value.const is not None:
        return True
    node = value.producer
    if node is None or node.domain or node.op not in SHAPE_MATH or not depth:
        return False
    return node.op in ("Shape", "Size") or all(_follows_from_shapes(v, depth - 1) for v in node.inputs)


def _check(node: Node) -> str | None:
    return None if _follows_from_shapes(node.input(0)) else "the condition depends on data"


@lowers("If", values=(0,), check=_check, inlines="a branch")
def if_(n: NodeView, b: Definitions) -> None:
    taken = n.need(0).reshape(-1)[0]
    branch: Graph = n.attrs["then_branch" if taken else "else_branch"]
    assert b.expand is not None
    b.expand(branch)
    for k, (outer, inner) in enumerate(zip(n.outputs, branch.outputs)):
        if not n.wants(k):
            continue
        if inner not in b.types and inner.const is not None:
            b.types[inner] = inner.const.type
        b.identity(inner, out=outer)
