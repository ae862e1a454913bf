"""Evaluates nodes whose operands are all constants, and inlines the branch that a constant condition takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ranvier.config import Level, SessionConfig
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import substitute
from ranvier.graph.types import TensorType
from ranvier.ops import annotate
from ranvier.ops.allocation import tensor_limit
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, inline, into_constants, sharpen
from ranvier.passes.evaluate import Evaluator
from ranvier.passes.facts import is_pure

STEPS = 10_000  # nodes run for one folded node; more means a loop that is better left to the run
SECONDS = 10.0  # for all folded nodes together

# Operators that stay although their operands are constant, and why.
KEEP: dict[tuple[str, str], str] = {
    ("", "DequantizeLinear"): "quantized weights stay quantized for providers that compute with them",
    ("com.microsoft", "DequantizeLinear"): "quantized weights stay quantized for providers that compute with them",
}
# Operators whose result may be far larger than their operands; without a known result type they are not tried.
GROWING = frozenset({"ConstantOfShape", "EyeLike", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"})


class FoldConstants:
    name: ClassVar[str] = "fold_constants"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types", "folded"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self._seconds_left = SECONDS

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        inlined = 0
        for each in list(graph.all_graphs()):
            if each is graph or (each.parent is not None and each.parent.graph is not None):
                inlined += self._fold(list(each), ctx)
        if inlined:
            annotate(graph)  # results of a branch are known better than those of an If
        return ctx.changes > 0

    def _fold(self, nodes: list[Node], ctx: PassContext) -> int:
        """Fold what can be folded; returns the number of inlined branches."""
        inlined = 0
        for node in nodes:
            if node.graph is None or not node.outputs:
                continue
            if node.op == "If" and not node.domain:
                condition = node.inputs[0]
                if condition is not None and condition.const is not None and condition.const.size == 1:
                    inlined += 1 + self._fold(self._inline(node, condition.const.numpy(), ctx), ctx)
                    continue
            if _is_constant(node):
                self._evaluate(node, ctx)
        return inlined

    def _inline(self, node: Node, condition: np.ndarray, ctx: PassContext) -> list[Node]:
        assert node.graph is not None
        body = node.attrs["then_branch" if bool(condition.reshape(())) else "else_branch"]
        nodes, results = inline(body, node)
        for old, new in zip(node.outputs, results):
            sharpen(new, old)
            substitute(old, new, builder(node, self.name))
        node.graph.remove(node)
        ctx.changed("If with a constant condition")
        return nodes

    def _evaluate(self, node: Node, ctx: PassContext) -> None:
        reason = KEEP.get((node.domain, node.op)) or _too_large(node, ctx.config.fold_limit)
        if reason is None and not (is_pure(node) and all(map(is_pure, _inner_nodes(node)))):
            reason = "it is not a function of its operands"
        if reason is not None:
            ctx.left(node.op, reason)
            return
        evaluator = Evaluator(STEPS, self._seconds_left)
        try:
            with tensor_limit(_allowed(node, ctx.config)):
                results = evaluator.node(node, {})
        except MemoryError:
            ctx.left(node.op, "evaluating it takes too much memory")
            return
        except Exception as error:  # the run reports it, if it ever gets there
            ctx.left(node.op, f"its reference raised {type(error).__name__}")
            return
        finally:
            self._seconds_left -= evaluator.spent
        results += (None,) * (len(node.outputs) - len(results))
        wanted = [r for v, r in zip(node.outputs, results) if v.uses or v.is_graph_output]
        if not all(isinstance(r, np.ndarray) for r in wanted):
            ctx.left(node.op, "a result is not a tensor")
        elif _outgrows(sum(r.nbytes for r in wanted), node, ctx.config.fold_limit):
            ctx.left(node.op, "result is larger than fold_limit")
        elif into_constants(node, results, self.name):
            ctx.changed(node.op)


def _is_constant(node: Node) -> bool:
    """Every operand, and everything its subgraphs capture, is a constant."""
    for value in node._inputs:
        if value is not None and value.const is None:
            return False
    return not node.attrs or not node.has_subgraphs or all(v.const is not None for v in node.captures())


def _inner_nodes(node: Node) -> Iterator[Node]:
    for body in node.subgraphs():
        yield from body.all_nodes()


def _too_large(node: Node, limit: int) -> str | None:
    total = 0
    for value in node.outputs:
        size = _nbytes(value)
        if size is not None:
            total += size
        elif node.op in GROWING:
            return "size of the result is unknown"
    return "result is larger than fold_limit" if _outgrows(total, node, limit) else None


def _outgrows(nbytes: int, node: Node, limit: int) -> bool:
    """A result may be large only where it takes the place of operands that are at least as large."""
    return nbytes > limit and nbytes > _replaced_bytes(node)


def _replaced_bytes(node: Node) -> int:
    """Bytes of the constants that nobody else reads: they go when the node's result takes their place."""
    operands = {v: v.const for v in node.inputs if v is not None and v.const is not None}
    return sum(t.nbytes for v, t in operands.items() if not v.is_graph_output and all(u is node for u, _ in v.uses))


def _allowed(node: Node, config: SessionConfig) -> int:
    """The most bytes a result may have to be kept: making more than that would be for nothing."""
    most = max(config.fold_limit, _replaced_bytes(node))
    return most if config.limits.tensor_bytes is None else min(most, config.limits.tensor_bytes)


def _nbytes(value: Value) -> int | None:
    return value.type.nbytes if isinstance(value.type, TensorType) else None
