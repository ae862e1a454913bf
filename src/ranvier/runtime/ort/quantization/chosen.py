"""Which nodes of a model a script wants quantized: by their operators, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph, Node
from ranvier.logs import warn_once


class Chosen:
    """``op_types_to_quantize``, ``nodes_to_quantize`` and ``nodes_to_exclude``; what is empty says nothing.

    ``gemm_too``: a Gemm counts as the MatMul it is made into.
    """

    def __init__(self, op_types: Any, nodes: Any, excluded: Any, *, gemm_too: bool = False) -> None:
        self._ops = _texts("op_types_to_quantize", op_types)
        self._nodes = _texts("nodes_to_quantize", nodes)
        self._excluded = _texts("nodes_to_exclude", excluded)
        self.named = bool(self._nodes)
        if gemm_too and "MatMul" in self._ops:
            self._ops |= {"Gemm"}

    def __contains__(self, node: Node) -> bool:
        if node.name in self._excluded or (self._nodes and node.name not in self._nodes):
            return False
        return not self._ops or node.op in self._ops

    def left(self, graph: Graph) -> frozenset[str]:
        """Names of the nodes that stay as they are."""
        return frozenset(node.name for node in graph if node not in self)

    def check(self, graph: Graph) -> None:
        """Names that no node has do nothing, and are told: one may be misspelt."""
        known = {node.name for node in graph.all_nodes() if node.name}
        for option, names in (("nodes_to_quantize", self._nodes), ("nodes_to_exclude", self._excluded)):
            for name in sorted(names - known):
                hint = nearest(name, known)
                meant = hint if "did you mean" in hint else ""
                warn_once(f"{option} {name}", f"{option}: the model has no node {name!r}{meant}")


def _texts(option: str, value: Any) -> frozenset[str]:
    if value is None:
        return frozenset()
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise InvalidConfig(f"{option} must be a list of names, got {value!r}")
    wrong = next((each for each in value if not isinstance(each, str)), None)
    if wrong is not None:
        raise InvalidConfig(f"{option} must be a list of names, it holds {wrong!r}")
    return frozenset(value)


__all__ = ["Chosen"]
