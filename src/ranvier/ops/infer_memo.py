"""What the standard's inference was asked before.

A model asks the same questions for every layer, and again whenever its graph is walked. Answers depend on nothing but
the question, so they serve all models of the process.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops.infer_plain import ARITHMETIC, COMPARISONS, LIKE_FIRST

_MOST = 1 << 14  # remembered answers
_LARGEST = 256  # bytes of an operand's content in a question that is remembered

# Types of results do not depend on what the operands hold.
_BLIND = (
    LIKE_FIRST
    | ARITHMETIC
    | COMPARISONS
    | frozenset(
        """And AveragePool BatchNormalization Cast CastLike Concat Conv ConvInteger ConvTranspose DepthToSpace
        DequantizeLinear Dropout DynamicQuantizeLinear Flatten Gather GatherElements Gemm GlobalAveragePool
        GlobalMaxPool GroupNormalization Identity InstanceNormalization LSTM GRU RNN LayerNormalization
        LogSoftmax MatMul MatMulInteger Max MaxPool Mean Min Not Or PRelu Pow QLinearConv QLinearMatMul QuantizeLinear
        RMSNormalization Shape Size Softmax SpaceToDepth Sum Transpose Where Xor""".split()  # noqa: SIM905
    )
)


class Memo:
    """Answers by question; full, it starts anew."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, list[Type | None]] = {}

    def find(self, question: Hashable) -> list[Type | None] | None:
        return self._answers.get(question)

    def keep(self, question: Hashable, answer: list[Type | None]) -> None:
        if len(self._answers) >= _MOST:
            self._answers.clear()
        self._answers[question] = answer


def contents(node: Node, values: Mapping[Value, np.ndarray[Any, Any]]) -> dict[int, np.ndarray[Any, Any]]:
    """By position, the known operands that the result's type may depend on."""
    if node.domain == "" and node.op in _BLIND:
        return {}
    found = {}
    for k, value in enumerate(node._inputs):
        known = values.get(value) if value is not None else None
        if known is not None:
            found[k] = known
    return found


def question(node: Node, operands: Sequence[Type | None], known: Mapping[int, np.ndarray[Any, Any]]) -> Hashable | None:
    """Equal for equal questions; None for those that are not worth remembering."""
    parts: list[Hashable] = [node.op, node.domain, node.version, len(node.outputs)]
    for operand in operands:
        if operand is not None and type(operand) is not TensorType:
            return None  # types of other kinds compare equal where they are not
        parts.append(operand)
    for k, array in known.items():
        if array.nbytes > _LARGEST or array.dtype == object:
            return None
        parts.append((k, array.dtype.str, array.shape, array.tobytes()))
    for name, attr in node.attrs.items():
        kind = type(attr)
        if kind in _PLAIN:
            parts.append((name, kind, attr))
        elif kind is list or kind is tuple:
            if not all(type(item) in _PLAIN for item in attr):
                return None
            parts.append((name, tuple(map(type, attr)), tuple(attr)))
        elif attr is not None:
            return None
    return tuple(parts)


_PLAIN = frozenset({int, float, str, bytes, bool})
