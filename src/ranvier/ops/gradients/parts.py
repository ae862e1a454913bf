"""Operators as the plain ones they are made of: written out by those, their gradients follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, rule_of
from ranvier.ops.gradients.functions import has_definition, written_out

Parts = Callable[[Backward, Node], Sequence[Value]]
_PARTS: dict[tuple[str, str], Parts] = {}
_INSTEAD: dict[tuple[str, str], Callable[[Node], bool]] = {}  # when parts come before the operator's own rule


def made_of(*names: str, domain: str = "", when: Callable[[Node], bool] | None = None) -> Callable[[Parts], Parts]:
    """Declare an operator by plain ones: a function that makes them and gives their results, one for each output.

    An operator with a rule of its own may have parts, too, for the nodes that its rule does not know: ``when`` tells.
    """

    def register(parts: Parts) -> Parts:
        for name in names:
            _PARTS[domain, name] = parts
            if when is not None:
                _INSTEAD[domain, name] = when
        return parts

    return register


def parts_of(node: Node) -> Parts | None:
    """What makes a node of plain ones: our own way, or the standard's definition of its operator."""
    return _PARTS.get((node.domain, node.op)) or (written_out if has_definition(node) else None)


def by_parts(node: Node) -> Sequence[Value]:
    """The results of a node that has parts, made by those before it."""
    parts = parts_of(node)
    assert parts is not None and node.graph is not None
    maker = Backward(node.graph)
    maker.before = node
    return parts(maker, node)


def comes_apart(node: Node) -> bool:
    """Whether a node is to be written out before it is derived."""
    if rule_of(node.domain, node.op) is None:
        return parts_of(node) is not None
    when = _INSTEAD.get((node.domain, node.op))
    return when is not None and when(node)


def has_parts(domain: str, name: str) -> bool:
    """Whether the operator is declared by plain ones."""
    return (domain, name) in _PARTS
