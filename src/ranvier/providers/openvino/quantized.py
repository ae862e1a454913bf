"""What OpenVINO means otherwise by operators that quantize, as arithmetic shows that was held against the reference.

It cuts fractions off where a signed result has scales that are no constants. What it adds up are floats. It rounds
after it has added the zero point, so that what lies halfway between two codes goes to the other one where that is odd:
so little that it is left to it, for models would be cut at half of their layers.
"""

from __future__ import annotations

import math

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.openvino.operands import element_type, on_arm

_SCALES = {"QLinearConv": 6, "QLinearMatMul": 6, "QuantizeLinear": 1}  # where those of the result stand
_EXACT = 1 << 24  # up to here a float32 holds every integer


def quantizes_otherwise(node: Node) -> str | None:
    """Why codes or sums would be other ones than the standard's; None where nobody has seen that."""
    if node.domain == "com.microsoft" and node.op.startswith("QLinear"):
        return "OpenVINO cuts fractions off, and begins again where others end at the largest code"
    if node.op in ("DynamicQuantizeLSTM", "DynamicQuantizeMatMul"):
        return "OpenVINO does not round what is multiplied by the weights"
    if node.op == "DynamicQuantizeLinear":
        return "OpenVINO rounds otherwise"
    if node.op in _SCALES:
        return _codes(node) or _compiled(node)
    if node.op == "DequantizeLinear":
        given, made = element_type(node.inputs[0]), element_type(node.output)
        if given is not None and given.itemsize > 1 and made == np.float16:
            return f"OpenVINO puts {given} into half precision before it multiplies"
    if node.op in ("ConvInteger", "MatMulInteger") and _largest_sum(node) > _EXACT:
        return "OpenVINO adds int32 as floats"
    return None


def _codes(node: Node) -> str | None:
    """Of an operator that makes codes: whether each is the nearest one."""
    scale = node.input(_SCALES[node.op])
    made = element_type(node.output)
    if made is None or made.itemsize > 1:
        return "OpenVINO is not exact to the last of 16 bits"
    if node.op == "QuantizeLinear" and element_type(node.inputs[0]) != np.float32:
        return "OpenVINO divides in another precision"
    if made.kind == "i" and (scale is None or scale.const is None):
        return f"OpenVINO cuts off the fractions of {made} where the scale is not constant"
    return None


def _compiled(node: Node) -> str | None:
    if node.op != "QLinearConv" or node.input(8) is None or not on_arm():
        return None
    weights = node.inputs[3]
    fails = weights is not None and weights.const is not None
    return "OpenVINO cannot compile it with a bias on this processor" if fails else None


def _largest_sum(node: Node) -> float:
    """Beyond which no sum of its products can be."""
    (a, b), zeros = node.inputs[:2], (node.input(2), node.input(3))
    by = b.type.shape if b is not None and isinstance(b.type, TensorType) else None
    if a is None or b is None or by is None:
        return math.inf
    # of a convolution's weights all but the first axis are added up, of a matrix the rows
    added = by[1:] if node.op == "ConvInteger" else by[-2:-1] or by
    if not all(isinstance(size, int) for size in added):
        return math.inf
    return math.prod(int(size) for size in added if isinstance(size, int)) * math.prod(map(_reach, (a, b), zeros))


def _reach(value: Value, zero: Value | None) -> int:
    """The largest distance of its codes from their zero point."""
    return 128 if zero is None and element_type(value) == np.int8 else 255


__all__ = ["quantizes_otherwise"]
