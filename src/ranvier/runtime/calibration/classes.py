"""Operators by what their time depends on: one rate is measured for a class, not for every operator."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ranvier.graph import families
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.ops import registry
from ranvier.ops.costs import dims, nbytes
from ranvier.ops.estimate import node_cost
from ranvier.records import dataclass

Types = Mapping[Value, Type | None]

VIEW = "view"  # nothing is computed
BY_ARITHMETIC = frozenset(
    {
        "product",
        "product.thin",
        "conv.pointwise",
        "conv.3x3",
        "conv.dense",
        "conv.first",
        "conv.depthwise",
        "conv.transposed",
        "attention",
        "recurrent",
        "trees",
    }
)
BY_BYTES = frozenset(
    {"elementwise", "elementwise.math", "elementwise.fused", "reduction", "normalisation", "pooling", "movement"}
    | {"gather", "resize", "quantise", "other"}
)
CLASSES = (*sorted(BY_ARITHMETIC), *sorted(BY_BYTES))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names("Reshape Squeeze Unsqueeze Flatten Identity Dropout Shape Size Constant CastLike Split")
_MATH = _names(
    """Exp Log Sigmoid Tanh Erf Gelu FastGelu BiasGelu QuickGelu Softplus Mish Swish Pow Sin Cos Sqrt Elu Selu Celu
    HardSwish Softsign Reciprocal Atan Sinh Cosh Tan Asin Acos Asinh Acosh Atanh"""
)
_GATHERS = _names("Gather GatherElements GatherND ScatterElements ScatterND Scatter TopK NonZero OneHot")
_NORMALISING = _names("Softmax LogSoftmax Hardmax")
_QUANTISING = _names("QuantizeLinear DequantizeLinear DynamicQuantizeLinear")
_RECURRENT = _names("LSTM GRU RNN DynamicQuantizeLSTM")
_POOLS = _names("MaxPool AveragePool GlobalMaxPool GlobalAveragePool LpPool GlobalLpPool")
_PRODUCTS = _names("Einsum DFT STFT")
_FEW_CHANNELS = 4
_THIN = 4  # rows of a product that reads its weights once for each of them


@dataclass(frozen=True)
class Work:
    """A node as a calibration sees it: its class, the element type that counts, and how much it does."""

    kind: str
    dtype: str
    amount: float  # operations or bytes, as the class has it


def work_of(node: Node, known: Mapping[Value, Type] | None = None) -> Work:
    """What a node does, with the types of values that are ``known`` where those in the graph are not precise enough."""
    kind = class_of(node, known)
    if kind == VIEW:
        return Work(VIEW, "", 0.0)
    cost = node_cost(node, known)
    amount = cost.flops if kind in BY_ARITHMETIC else cost.bytes
    return Work(kind, element_type(node, known), float(amount))


def element_type(node: Node, types: Types | None = None) -> str:
    """``int8`` for all that computes with bytes, else the type of the first operand that has one."""
    found = ""
    for value in (*node.inputs, *node.outputs):
        kind = None if value is None else _type(value, types)
        if isinstance(kind, TensorType) and kind.dtype is not None:
            name = kind.dtype.name
            if name in ("int8", "uint8"):
                return "int8"
            found = found or name
    return found or "float32"


def class_of(node: Node, types: Types | None = None) -> str:
    """The class of a node, by its operator and by what stands before it."""
    found = _class_by_itself(node, types)
    return "elementwise.fused" if found == "elementwise" and _follows(node, types) else found


def _class_by_itself(node: Node, types: Types | None) -> str:
    op = node.op
    definition = registry.find(node.domain, op, node.version)
    if op in _VIEWS or (definition is not None and "view" in definition.traits):
        return VIEW
    if "Conv" in op:
        return _convolution(node, types)
    if op in _RECURRENT:
        return "recurrent"
    if "Attention" in op:
        return "attention"
    if op in _PRODUCTS or "MatMul" in op or "Gemm" in op:
        return _product(node, types)
    if "TreeEnsemble" in op:
        return "trees"
    if op in _QUANTISING:
        return "quantise"
    if op in _NORMALISING or "Normalization" in op or op in ("GroupNorm", "LRN"):
        return "normalisation"
    if op in _POOLS:
        return "pooling"
    if op.startswith(("Reduce", "ArgM", "Cum")):
        return "reduction"
    if op in _GATHERS:
        return "gather"
    if op in ("Resize", "Upsample", "GridSample", "AffineGrid", "RoiAlign"):
        return "resize"
    if op in _MATH:
        return "elementwise.math"
    if definition is not None and "elementwise" in definition.traits:
        return "elementwise"
    if families.family_of(node) is families.MOVEMENT:
        return "movement"
    return "other"


def _follows(node: Node, types: Types | None) -> bool:
    """Can it run inside the node before it, on results that are still at hand?"""
    for value in node.inputs:
        before = None if value is None else value.producer
        if before is not None and value is not None and len(value.uses) == 1 and before.graph is node.graph:
            return _class_by_itself(before, types) not in (VIEW, "movement", "gather", "resize", "other", "trees")
    return False


def _convolution(node: Node, types: Types | None) -> str:
    if "Transpose" in node.op:
        return "conv.transposed"
    position = 3 if node.op == "QLinearConv" else 1
    weight = dims(_type(node.input(position), types)) if len(node.inputs) > position else ()
    group = node.attrs.get("group", 1)
    if len(weight) < 3 or not isinstance(group, int):
        return "conv.dense"
    if group > 1 and weight[1] <= _FEW_CHANNELS:
        return "conv.depthwise"
    if weight[1] <= _FEW_CHANNELS:
        return "conv.first"
    if math.prod(weight[2:]) == 1:
        return "conv.pointwise"
    stepping = (*node.attrs.get("strides", ()), *node.attrs.get("dilations", ()))
    # what there are ways for that save multiplications
    return "conv.3x3" if weight[2:] == (3, 3) and all(s == 1 for s in stepping) else "conv.dense"


def _product(node: Node, types: Types | None) -> str:
    """Thin ones, a vector times a matrix, are bound by memory."""
    result = dims(_type(node.outputs[0], types))
    columns = result[-1] if result else 1
    rows = result[-2] if len(result) > 1 else 1
    return "product.thin" if min(rows, columns) <= _THIN else "product"


def _type(value: Value | None, types: Types | None) -> Type | None:
    if value is None:
        return None
    found = types.get(value) if types else None
    return value.type if found is None else found


def weight_bytes(node: Node) -> float:
    """Bytes of the constants a node reads."""
    return float(sum(v.const.nbytes for v in node.inputs if v is not None and v.const is not None))


def bytes_of(value: Value, types: Types | None = None) -> float:
    """The size of a value; a dimension that is not known counts as 1."""
    return float(nbytes(_type(value, types)))
