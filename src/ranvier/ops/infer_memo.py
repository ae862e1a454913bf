"""What the standard's inference need not be asked, and what it was asked before.

A question costs it about a tenth of a millisecond, most of which goes into messages to and fro; a model asks the same
ones for every layer, and again whenever its graph is walked. Answers depend on nothing but the question, so they
serve all models of the process.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type

_MOST = 1 << 14  # remembered answers
_LARGEST = 256  # bytes of an operand's content in a question that is remembered

# Results are like the first operand, whatever that is.
_LIKE_FIRST = frozenset(
    """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
    LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh
    ThresholdedRelu""".split()  # noqa: SIM905
)
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_COMPARISONS = frozenset({"Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"})

# Types of results do not depend on what the operands hold.
_BLIND = (
    _LIKE_FIRST
    | _ARITHMETIC
    | _COMPARISONS
    | frozenset(
        """And AveragePool BatchNormalization Cast CastLike Concat Conv ConvInteger ConvTranspose DepthToSpace
        DequantizeLinear Dropout DynamicQuantizeLinear Flatten Gather GatherElements Gemm GlobalAveragePool
        GlobalMaxPool GroupNormalization Identity InstanceNormalization LSTM GRU RNN LayerNormalization
        LogSoftmax MatMul MatMulInteger Max MaxPool Mean Min Not Or PRelu Pow QLinearConv QLinearMatMul QuantizeLinear
        RMSNormalization Shape Size Softmax SpaceToDepth Sum Transpose Where Xor""".split()  # noqa: SIM905
    )
)


def quick_answer(node: Node, operands: Sequence[Type | None]) -> list[Type | None] | None:
    """Types of the results by rules so plain that they need no asking; None where they do not apply."""
    if node.domain or len(node.outputs) != 1 or not operands:
        return None
    first = operands[0]
    if type(first) is not TensorType or first.dtype is None:
        return None
    op = node.op
    if op in _LIKE_FIRST:
        return [first]
    if op == "Conv":
        return _convolved(first, operands[1] if len(operands) > 1 else None, node.attrs)
    if len(operands) != 2 or node.version < 7 or (op not in _ARITHMETIC and op not in _COMPARISONS):
        return None  # the broadcasting of earlier versions is another one
    second = operands[1]
    if type(second) is not TensorType or second.dtype is not first.dtype:
        return None
    shape = _broadcast(first.shape, second.shape)
    if shape is None:
        return None
    return [TensorType(first.dtype if op in _ARITHMETIC else DType.bool, shape)]


def _broadcast(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The common shape; None where it is not plain to see, or there is none."""
    if a is None or b is None:
        return None
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    found = list(a)
    for k, size in enumerate(b, lead):
        other = found[k]
        if size is None or other is None:
            return None
        if other == size or size == 1:
            continue
        if other != 1:
            return None
        found[k] = size
    return tuple(found)


def _convolved(x: TensorType, w: Type | None, attrs: Mapping[str, Any]) -> list[Type | None] | None:
    """A convolution whose image and kernel have sizes; the batch may be anything."""
    if type(w) is not TensorType or x.shape is None or w.shape is None or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    rank = len(x.shape) - 2
    kernel = w.shape[2:]
    if rank < 1 or len(kernel) != rank or tuple(attrs.get("kernel_shape") or kernel) != kernel:
        return None
    strides = attrs.get("strides") or (1,) * rank
    dilations = attrs.get("dilations") or (1,) * rank
    pads = attrs.get("pads") or (0,) * (2 * rank)
    if len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        return None
    sizes: list[Any] = []
    for k, (size, taps) in enumerate(zip(x.shape[2:], kernel)):
        if type(size) is not int or type(taps) is not int or strides[k] < 1 or dilations[k] < 1 or taps < 1:
            return None
        room = size + pads[k] + pads[rank + k] - (taps - 1) * dilations[k] - 1
        if room < 0:
            return None
        sizes.append(room // strides[k] + 1)
    return [TensorType(x.dtype, (x.shape[0], w.shape[0], *sizes))]


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
