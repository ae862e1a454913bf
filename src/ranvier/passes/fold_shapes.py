"""Folds computations on shapes: what follows from known dimensions becomes a constant.

Where a batch or a length is only a symbol, a Reshape still gets a constant target when its symbolic entries are those
of its operand at the same place (0 copies them) and at most one entry is left over (-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Dim, Shape, TensorType
from ranvier.ops.infer import TypeInference
from ranvier.ops.shape_data import known_dims, takes_part
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, bypass, into_constants
from ranvier.passes.facts import is_pure, shape_of

SOURCES = frozenset({"Shape", "Size"})


class FoldShapes:
    name: ClassVar[str] = "fold_shapes"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset({"folded"})

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        self._visit(graph, TypeInference(annotated=True), ctx)
        return ctx.changes > 0

    def _visit(self, graph: Graph, facts: TypeInference, ctx: PassContext) -> None:
        """``facts`` learns about shape data only: whatever else a rule asks for is on the values already."""
        for node in graph:
            if (node.op in SOURCES and not node.domain) or self._all_known(node, facts):
                facts.visit(node)
                self._fold(node, facts, ctx)
            elif not node.domain and node.op in _TARGETS and len(node.inputs) == 2:
                target = node.inputs[1]
                if target is not None and target.const is None:
                    _TARGETS[node.op](node, known_dims(facts, target), ctx)
            elif node.attrs and node.has_subgraphs:
                for body in node.subgraphs():
                    self._visit(body, facts, ctx)

    def _all_known(self, node: Node, facts: TypeInference) -> bool:
        """Every operand is shape data or a small constant; the latter may have been made by this pass."""
        for value in node._inputs:
            if value is not None and value not in facts.values and value not in facts.dims:
                if value.const is None or not takes_part(value.const):
                    return False
                facts.know(value)
        return bool(node._inputs)

    def _fold(self, node: Node, facts: TypeInference, ctx: PassContext) -> None:
        results = [_exact(value, facts) for value in node.outputs]
        if not any(r is None for r in results) and is_pure(node) and into_constants(node, results, self.name):
            ctx.changed(node.op)


def _exact(value: Value, facts: TypeInference) -> np.ndarray | None:
    """The data of a value, where every element of it is a number."""
    found = facts.values.get(value)
    if found is not None:
        return found
    dims = facts.dims.get(value)
    known = facts.types.get(value)
    if dims is None or not all(type(d) is int for d in dims) or not isinstance(known, TensorType):
        return None
    if known.dtype not in (DType.int64, DType.int32) or known.rank not in (0, 1) or known.size != len(dims):
        return None
    return np.array(dims, known.dtype.numpy).reshape([] if known.rank == 0 else -1)


# -- operators with a target shape ------------------------------------------------------------------------------------


def _reshape(node: Node, dims: Shape | None, ctx: PassContext) -> None:
    target, allow_zero = _target(node, dims)
    if target is None:
        ctx.left("Reshape", "more than one entry of its target is unknown" if dims else "its target is data")
        return
    node.set_input(1, builder(node, FoldShapes.name).constant(np.array(target, np.int64)))
    if allow_zero:
        node.attrs["allowzero"] = 1
    else:
        node.attrs.pop("allowzero", None)
    ctx.changed("target of Reshape")


def _target(node: Node, dims: Shape | None) -> tuple[list[int] | None, bool]:
    """A constant target that gives the same result at every size of the symbols, and whether its zeros are sizes."""
    result = shape_of(node.output)
    if result is not None and all(type(d) is int for d in result):
        if 0 not in result:
            return list(result), False  # type: ignore[arg-type]
        return (list(result), True) if node.version >= 14 else (None, False)  # type: ignore[arg-type]
    if dims is None or node.attrs.get("allowzero", 0):
        return None, False
    source = shape_of(node.inputs[0])
    target = [_entry(dim, k, source) for k, dim in enumerate(dims)]
    if target.count(None) + target.count(-1) > 1:
        return None, False
    # What is left over is determined by the number of elements. A copied dimension of size 0 does not spoil that:
    # it stands on both sides.
    return [-1 if entry is None else entry for entry in target], False


def _entry(dim: Dim, position: int, source: Shape | None) -> int | None:
    if type(dim) is int:
        return dim
    if dim is not None and source is not None and position < len(source) and source[position] == dim:
        return 0
    return None


def _expand(node: Node, dims: Shape | None, ctx: PassContext) -> None:
    """Expanding to one's own shape; a size of 1 keeps what is there."""
    operand = node.inputs[0]
    shape = shape_of(operand)
    if dims is None or operand is None or shape is None or len(dims) > len(shape):
        return
    aligned: Sequence[Dim] = shape[len(shape) - len(dims) :]
    if all(d == 1 or (d is not None and d == own) for d, own in zip(dims, aligned)):
        bypass(node, operand, FoldShapes.name)
        ctx.changed("Expand to its own shape")


_TARGETS = {"Reshape": _reshape, "Expand": _expand}
