"""Weights too small to matter become zero: float32 values below 2^-126, which processors multiply a hundred times as
slowly as others.

Training with weight decay leaves them behind in channels that died: a detector of text has 255,000 in two layers and
ran four times as fast without. What is lost is below 1.2e-38 of what a weight meets, so only a sum whose terms are all
of that size can tell, and an infinity that met such a weight becomes NaN, as with a weight of zero. Activations are
computed as IEEE 754 has it, subnormal ones included.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node
from ranvier.graph.tensors import ConstTensor
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder

Array = np.ndarray[Any, Any]

_LAYERS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "RNN"})
_AT_ONCE = 1 << 15  # numbers looked at together: they and what is made of them stay in the second-level cache
_EXPONENT, _FRACTION = 0x7F80_0000, 0x007F_FFFF


class SubnormalWeights:
    name: ClassVar[str] = "subnormal_weights"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        known: dict[ConstTensor, ConstTensor | None] = {}  # what a constant became; None where it stays
        for node in graph.all_nodes():
            if _is_layer(node) or _adds_bias(node):
                self._clear(node, known, ctx)
        return ctx.changes > 0

    def _clear(self, node: Node, known: dict[ConstTensor, ConstTensor | None], ctx: PassContext) -> None:
        for position, value in enumerate(node.inputs):
            if value is None or value.const is None:
                continue
            const = value.const
            if const not in known:
                known[const] = self._without(const, ctx)
            cleared = known[const]
            if cleared is not None:
                node.set_input(position, builder(node, self.name).constant(cleared, value.name))

    def _without(self, const: ConstTensor, ctx: PassContext) -> ConstTensor | None:
        # what can be made again is computed, and read once more only where it is needed
        if const.dtype.numpy != np.float32 or const.again:
            return None
        cleared = without_subnormals(const.raw())
        const.release()
        if cleared is None:
            return None
        ctx.changed("tensor")
        return ConstTensor.of(cleared)


def _is_layer(node: Node | None) -> bool:
    return node is not None and node.op in _LAYERS and not node.domain


def _adds_bias(node: Node) -> bool:
    """What a dead channel adds to its zeros is what the next layer multiplies."""
    return node.op == "Add" and not node.domain and any(_is_layer(v.producer) for v in node.inputs if v is not None)


def without_subnormals(array: Array) -> Array | None:
    """A copy with zeros (of the same sign) for subnormal numbers; None where there are none."""
    bits = np.ravel(array, order="K").view(np.uint32)
    room = np.empty(min(_AT_ONCE, bits.size), np.uint32)
    for start in range(0, bits.size, _AT_ONCE):
        part = bits[start : start + _AT_ONCE]
        found = room[: part.size]
        np.bitwise_and(part, _EXPONENT, out=found)
        if not found.min() and np.any(part[found == 0] & _FRACTION):
            cleared = np.array(array)
            np.multiply(cleared, 0, out=cleared, where=np.abs(cleared) < np.finfo(np.float32).tiny)
            return cleared
    return None
