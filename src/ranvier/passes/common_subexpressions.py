"""Computes equal things once: nodes with the same operator, attributes and operands, and constants of equal content.

A subgraph may use a value of the graph around it, so it also reuses what was computed there before.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import substitute
from ranvier.ops.proto import schema_of
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, sharpen
from ranvier.passes.facts import is_pure

SMALL = 1 << 16  # bytes; larger constants are compared by identity only
LONG = 1 << 10  # items of an attribute, likewise
CROWDED = 256  # uses; a constant with more of them would make each later removal of a use slow

# Where swapping the operands changes no bit. (Of Max and Min it decides which of two zeros or NaNs comes out.)
COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})
# Cheap, and part of what reads them: a provider takes a layer together with the dequantization before it.
APART = frozenset({"DequantizeLinear"})


class CommonSubexpressions:
    name: ClassVar[str] = "common_subexpressions"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        _Scope(ctx).visit(graph)
        return ctx.changes > 0


class _Scope:
    """What has been computed so far, here and in the graphs around."""

    def __init__(self, ctx: PassContext, outer: _Scope | None = None) -> None:
        self.ctx = ctx
        # copies, not chains: nested graphs are few and small, look-ups many
        self.nodes: dict[Hashable, Node] = dict(outer.nodes) if outer else {}
        self.constants: dict[Hashable, Value] = dict(outer.constants) if outer else {}
        # a constant is named by its content, any other value by itself
        self.tokens: dict[int, Hashable] = dict(outer.tokens) if outer else {}

    def visit(self, graph: Graph) -> None:
        self._merge_constants(graph)
        for node in graph:
            if node.attrs and node.has_subgraphs:
                for body in node.subgraphs():
                    _Scope(self.ctx, self).visit(body)
                continue
            key = self._key(node)
            known = self.nodes.get(key)
            if known is None:
                self.nodes[key] = node
            elif node.op not in APART and is_pure(node):
                self._merge(node, known)

    def _merge_constants(self, graph: Graph) -> None:
        leaving = {id(v) for v in graph.outputs}
        for value in list(graph.constants.values()):
            content = _content(value)
            if content is None:
                continue
            self.tokens[id(value)] = content
            known = self.constants.get(content)
            if known is None or len(known.uses) > CROWDED:
                self.constants[content] = value
            elif id(value) not in leaving and value.uses:
                value.replace_by(known)
                graph.remove_constant(value)
                del self.tokens[id(value)]  # the number may be given to another object
                self.ctx.changed("constant")

    def _key(self, node: Node) -> Hashable:
        tokens = self.tokens
        operands = [0 if v is None else tokens.get(id(v), id(v)) for v in node._inputs]
        if len(operands) == 2 and node.op in COMMUTATIVE and not node.domain and node.version >= 7:
            operands.sort(key=hash)
        attrs = _attrs_key(node) if node.attrs else _NONE
        return (node.op, node.domain, node.version, len(node.outputs), attrs, *operands)

    def _merge(self, node: Node, known: Node) -> None:
        if node.op == "Identity" and node.output.is_graph_output:
            return  # it is there to give an output a name of its own
        graph = node.graph
        assert graph is not None
        for old, new in zip(node.outputs, known.outputs):
            if old.uses or old.is_graph_output:
                sharpen(new, old)
                substitute(old, new, builder(node, CommonSubexpressions.name))
        graph.remove(node)
        self.ctx.changed(node.op)


def _content(value: Value) -> Hashable | None:
    """What a small constant holds, so that equal ones are equal; None for a large one, or one that is to be made."""
    tensor = value.const
    if tensor is None or tensor.nbytes > SMALL or tensor.again:
        return None
    array = tensor.numpy()
    if tensor.dtype is DType.string:
        return tensor.dtype, tensor.shape, tuple(array.ravel().tolist())
    return tensor.dtype, tensor.shape, array.tobytes()


_NONE: frozenset[Hashable] = frozenset()


def _attrs_key(node: Node) -> Hashable:
    defaults = _defaults(node.domain, node.op, node.version)
    frozen = ((name, _frozen(attr)) for name, attr in node.attrs.items() if attr is not None)
    return frozenset(item for item in frozen if item not in defaults)


def _frozen(attr: Any) -> Hashable:
    """Equal for equal attributes, with 1, 1.0 and True apart, and 0.0 and -0.0 too."""
    if isinstance(attr, np.ndarray):
        content = tuple(attr.ravel().tolist()) if attr.dtype == object else attr.tobytes()
        return str(attr.dtype), attr.shape, content
    if isinstance(attr, list | tuple):
        # the nodes of a forest cost more to read than it could save
        return id(attr) if len(attr) > LONG else tuple(map(_frozen, attr))
    if isinstance(attr, float):
        return attr.hex()
    return type(attr), attr


_DEFAULTS: dict[tuple[str, str, int], frozenset[Hashable]] = {}


def _defaults(domain: str, op: str, version: int) -> frozenset[Hashable]:
    """Attributes of a standard operator that say no more than their absence."""
    key = (domain, op, version)
    found = _DEFAULTS.get(key)
    if found is None:
        schema = schema_of(domain, op, version) if version else None
        attrs = schema.attributes.items() if schema is not None else ()
        found = frozenset((name, _plain(a.default_value)) for name, a in attrs if a.default_value.name)
        _DEFAULTS[key] = found
    return found


def _plain(proto: Any) -> Hashable:
    from ranvier.ops.proto import attr_from_proto

    return _frozen(attr_from_proto(proto, _no_graph))


def _no_graph(proto: Any) -> Graph:
    raise ValueError("a default is no graph")
