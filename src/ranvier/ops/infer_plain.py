"""Types by rules so plain that the standard's inference need not be asked.

A question to it costs about a tenth of a millisecond, most of which goes into messages to and fro. The rules here
answer what models are mostly made of, where sizes are known; in any doubt they give None, and it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import Shape, TensorType, Type

Known = Mapping[Value, np.ndarray[Any, Any]]  # operands whose content is known
Rule = Callable[[Node, TensorType, Sequence[Type | None], Known], TensorType | None]

# Results are like the first operand, whatever that is.
LIKE_FIRST = frozenset(
    """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
    Identity LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish
    Tan Tanh ThresholdedRelu""".split()  # noqa: SIM905
)
ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
COMPARISONS = frozenset({"Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"})


def quick_answer(node: Node, operands: Sequence[Type | None], known: Known) -> list[Type | None] | None:
    """The types of the results, or None where no rule applies."""
    if node.domain or len(node.outputs) != 1 or not operands:
        return None
    first = operands[0]
    if type(first) is not TensorType or first.dtype is None:
        return None
    op = node.op
    if op in LIKE_FIRST:
        return [first]
    rule = _RULES.get(op)
    found = rule(node, first, operands, known) if rule is not None else None
    return None if found is None else [found]


def _second(operands: Sequence[Type | None]) -> TensorType | None:
    found = operands[1] if len(operands) > 1 else None
    return found if type(found) is TensorType and found.shape is not None else None


def _numbers(shape: Shape | None) -> tuple[int, ...] | None:
    """A shape all of whose dims are sizes."""
    if shape is None:
        return None
    return shape if all(isinstance(d, int) for d in shape) else None  # type: ignore[return-value]


# -- elementwise ------------------------------------------------------------------------------------------------------


def _pairwise(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    second = _second(operands)
    if second is None or second.dtype is not first.dtype or len(operands) != 2 or node.version < 7:
        return None  # the broadcasting of versions before 7 is another one
    shape = broadcast(first.shape, second.shape)
    if shape is None:
        return None
    return TensorType(DType.bool if node.op in COMPARISONS else first.dtype, shape)


def broadcast(a: Shape | None, b: Shape | None) -> Shape | None:
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


def _cast(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    number = node.attrs.get("to")
    if type(number) is not int:
        return None
    try:
        return TensorType(dtypes.from_onnx(number), first.shape)
    except DTypeMismatch:
        return None


def _along_axis(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    axis = node.attrs.get("axis", -1 if node.version >= 13 else 1)
    rank = -1 if first.shape is None else len(first.shape)
    return first if -rank <= axis < rank else None


def _dequantized(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    scale = _second(operands)
    if scale is None or scale.dtype is None or node.attrs.get("output_dtype"):
        return None
    return TensorType(DType.float32 if node.version < 19 else scale.dtype, first.shape)


def _quantized(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    zero = operands[2] if len(operands) > 2 else None
    if type(zero) is not TensorType or zero.dtype is None or node.attrs.get("output_dtype"):
        return None
    return TensorType(zero.dtype, first.shape)


# -- movement ---------------------------------------------------------------------------------------------------------


def _shape(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    if first.shape is None:
        return None
    count = len(first.shape[slice(node.attrs.get("start", 0), node.attrs.get("end"))])
    return TensorType(DType.int64, (count,))


def _transposed(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    perm = node.attrs.get("perm")
    if first.shape is None or not perm or sorted(perm) != list(range(len(first.shape))):
        return None
    return TensorType(first.dtype, tuple(first.shape[p] for p in perm))


def _joined(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    axis = node.attrs.get("axis")
    if first.shape is None or axis is None or node.version < 4:
        return None
    rank = len(first.shape)
    if not -rank <= axis < rank:
        return None
    axis %= rank
    total = 0
    for each in operands:
        if type(each) is not TensorType or each.dtype is not first.dtype or each.shape is None:
            return None
        shape = each.shape
        if len(shape) != rank or not isinstance(shape[axis], int):
            return None
        for k, (a, b) in enumerate(zip(shape, first.shape)):
            if k != axis and (a is None or a != b):
                return None
        total += shape[axis]
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _axes(node: Node, known: Known) -> tuple[int, ...] | None:
    """The axes of a Squeeze or Unsqueeze, from the attribute or, in newer versions, a known operand."""
    if node.version < 13:
        given = node.attrs.get("axes")
        return None if given is None or (node.version < 11 and min(given, default=0) < 0) else tuple(given)
    operand = node.input(1)
    found = known.get(operand) if operand is not None else None
    return None if found is None or found.ndim > 1 else tuple(found.reshape(-1).tolist())


def _unsqueezed(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    axes = _axes(node, known)
    if axes is None or first.shape is None:
        return None
    rank = len(first.shape) + len(axes)
    if not all(-rank <= a < rank for a in axes) or len({a % rank for a in axes}) != len(axes):
        return None
    shape = list(first.shape)
    for axis in sorted(a % rank for a in axes):
        shape.insert(axis, 1)
    return TensorType(first.dtype, tuple(shape))


def _squeezed(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    axes, shape = _axes(node, known), first.shape
    if axes is None or shape is None:
        return None
    rank = len(shape)
    if not all(-rank <= a < rank and shape[a] == 1 for a in axes):
        return None
    gone = {a % rank for a in axes}
    if len(gone) != len(axes):
        return None
    return TensorType(first.dtype, tuple(d for k, d in enumerate(shape) if k not in gone))


def _gathered(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    indices = _second(operands)
    axis = node.attrs.get("axis", 0)
    if indices is None or indices.shape is None or first.shape is None:
        return None
    rank = len(first.shape)
    if not -rank <= axis < rank:
        return None
    axis %= rank
    return TensorType(first.dtype, (*first.shape[:axis], *indices.shape, *first.shape[axis + 1 :]))


# -- products and windows ---------------------------------------------------------------------------------------------


def _multiplied(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    second = _second(operands)
    a, b = first.shape, None if second is None else second.shape
    if second is None or second.dtype is not first.dtype or a is None or b is None or min(len(a), len(b)) < 2:
        return None
    if not isinstance(a[-1], int) or a[-1] != b[-2]:
        return None
    batch = broadcast(a[:-2], b[:-2])
    return None if batch is None else TensorType(first.dtype, (*batch, a[-2], b[-1]))


def _gemm(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    second = _second(operands)
    a, b = first.shape, None if second is None else second.shape
    if second is None or a is None or b is None or len(a) != 2 or len(b) != 2 or node.version < 7:
        return None
    rows, inner = a[::-1] if node.attrs.get("transA") else a
    same, columns = b[::-1] if node.attrs.get("transB") else b
    return None if inner is None or inner != same else TensorType(first.dtype, (rows, columns))


def _convolved(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    return _convolution(node, first, _second(operands), first.dtype)


def _quantized_conv(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    w, zero = (operands[3], operands[7]) if len(operands) > 7 else (None, None)
    if type(w) is not TensorType or type(zero) is not TensorType:
        return None
    return _convolution(node, first, w, zero.dtype)


def _convolution(node: Node, first: TensorType, w: TensorType | None, dtype: DType | None) -> TensorType | None:
    """A convolution whose kernel has sizes; those of the image and the batch may be anything."""
    if w is None or w.shape is None or first.shape is None or dtype is None:
        return None
    kernel = _numbers(w.shape[2:])
    if kernel is None or tuple(node.attrs.get("kernel_shape") or kernel) != kernel:
        return None
    sizes = _window(node.attrs, first.shape[2:], kernel)
    return None if sizes is None else TensorType(dtype, (first.shape[0], w.shape[0], *sizes))


def _pooled(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    kernel = node.attrs.get("kernel_shape")
    if not kernel or first.shape is None or len(first.shape) < 2 or node.attrs.get("ceil_mode"):
        return None
    sizes = _window(node.attrs, first.shape[2:], tuple(kernel))
    return None if sizes is None else TensorType(first.dtype, (*first.shape[:2], *sizes))


def _window(attrs: Mapping[str, Any], image: Shape, kernel: tuple[int, ...]) -> Shape | None:
    """Sizes after a window of ``kernel`` has gone over the image, open where the image's are."""
    rank = len(image)
    if rank < 1 or len(kernel) != rank or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    strides = attrs.get("strides") or (1,) * rank
    dilations = attrs.get("dilations") or (1,) * rank
    pads = attrs.get("pads") or (0,) * (2 * rank)
    if len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        return None
    sizes: list[int | None] = []
    for k, (size, taps) in enumerate(zip(image, kernel)):
        if strides[k] < 1 or dilations[k] < 1 or taps < 1:
            return None
        if not isinstance(size, int):
            sizes.append(None)
            continue
        room = size + pads[k] + pads[rank + k] - (taps - 1) * dilations[k] - 1
        if room < 0:
            return None
        sizes.append(room // strides[k] + 1)
    return tuple(sizes)


def _averaged(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    """One number for every channel."""
    if first.shape is None or len(first.shape) < 3:
        return None
    return TensorType(first.dtype, (*first.shape[:2], *(1,) * (len(first.shape) - 2)))


def _reshaped(node: Node, first: TensorType, operands: Sequence[Type | None], known: Known) -> TensorType | None:
    """A known shape to a known target."""
    operand = node.input(1)
    target = known.get(operand) if operand is not None else None
    shape = _numbers(first.shape)
    if target is None or target.ndim != 1 or shape is None or node.version < 5 or 0 in shape:
        return None
    wanted = target.tolist()
    if 0 in wanted:
        if node.attrs.get("allowzero") or any(d == 0 and k >= len(shape) for k, d in enumerate(wanted)):
            return None
        wanted = [shape[k] if d == 0 else d for k, d in enumerate(wanted)]
    if wanted.count(-1) > 1 or any(d < -1 for d in wanted):
        return None
    total = math.prod(shape)
    if -1 in wanted:
        at = wanted.index(-1)
        rest = math.prod(d for d in wanted if d != -1)
        if total % rest:
            return None
        wanted[at] = total // rest
    return TensorType(first.dtype, tuple(wanted)) if math.prod(wanted) == total else None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(ARITHMETIC | COMPARISONS, _pairwise),
    "AveragePool": _pooled,
    "Cast": _cast,
    "Concat": _joined,
    "Conv": _convolved,
    "DequantizeLinear": _dequantized,
    "Gather": _gathered,
    "Gemm": _gemm,
    "GlobalAveragePool": _averaged,
    "GlobalMaxPool": _averaged,
    "LogSoftmax": _along_axis,
    "MatMul": _multiplied,
    "MaxPool": _pooled,
    "QLinearConv": _quantized_conv,
    "QuantizeLinear": _quantized,
    "Reshape": _reshaped,
    "Shape": _shape,
    "Softmax": _along_axis,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
