"""Convolutions and products between dequantize and quantize become the standard's operators on codes.

Exporters write quantized layers as float operators between DequantizeLinear and QuantizeLinear. The same layer on
codes has exact integer sums and one rounding, so its result is that of the float form up to a tie that rounds the
other way: at most one step of the result's own scale. The mean of an image becomes that of its codes, for the same
reason. Layers whose result is not quantized multiply codes all the same and scale the sums, which changes the float
result by rounding only.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.registry import Array
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder, bypass, prune
from ranvier.passes.facts import array_of, only_use, rank_of, shape_of
from ranvier.passes.fuse.code_moves import bounds_of, clipped
from ranvier.passes.fuse.codes import BYTES, Left, Quantized, code_type, dequantized, parameters, result_of, triple

_LONGEST = 1 << 15  # products of two codes, less zero points, that int32 holds the sum of
WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")  # what convolutions on codes have too


class QuantizedFusion:
    name: ClassVar[str] = "fuse_quantized"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        for each in list(graph.all_graphs()):
            for node in list(each):
                if node.graph is not None and node.op == "QuantizeLinear" and not node.domain:
                    self._layer(node, ctx)
            for node in list(each):
                if node.graph is not None and node.op in ("Conv", "Gemm", "MatMul") and not node.domain:
                    self._sums(node, ctx)
        return ctx.changes > 0

    def _sums(self, node: Node, ctx: PassContext) -> None:
        try:
            made = _scaled_sums(node, builder(node, self.name))
        except Left as reason:
            ctx.left(node.op, str(reason))
            return
        operands = list(node.inputs)
        if made is not None and bypass(node, made, self.name):
            prune(operands)
            ctx.changed(f"{node.op} on sums")

    def _layer(self, last: Node, ctx: PassContext) -> None:
        found = _between(last)
        if found is None:
            return
        node, low, high = found
        try:
            made = _fused(node, last, low, high, builder(last, self.name))
        except Left as reason:
            ctx.left(node.op, str(reason))
            return
        operands = list(last.inputs)
        if bypass(last, made, self.name):
            prune(operands)
            ctx.changed(node.op)


def _between(last: Node) -> tuple[Node, float, float] | None:
    """The layer whose result is quantized, and the bounds its activation puts on it."""
    low, high = -math.inf, math.inf
    value = last.inputs[0]
    node = value.producer if value is not None else None
    if value is None or node is None or only_use(value) is not last:
        return None
    if node.op in ("Relu", "Clip") and not node.domain:
        bounds = bounds_of(node)
        if bounds is None:
            return None
        low, high = bounds
        value = node.inputs[0]
        before = value.producer if value is not None else None
        if value is None or before is None or only_use(value) is not node:
            return None
        node = before
    return (node, low, high) if node.op in ("Conv", "MatMul", "GlobalAveragePool") and not node.domain else None


def _fused(node: Node, last: Node, low: float, high: float, op: GraphOps) -> Value:
    """The layer on codes, with its activation."""
    target = code_type(last)
    result = parameters(last)
    if not result.is_single:
        raise Left("the result is quantized along an axis")
    x = dequantized(node.input(0))
    if x is None:
        raise Left("an operand is not given by codes")
    if not x.is_single:
        raise Left("the operand is quantized along an axis")
    if node.op == "GlobalAveragePool":
        return clipped(_mean(node, x, result, target, op), (low, high), result, op)
    w = dequantized(node.input(1))
    if w is None:
        raise Left("an operand is not given by codes")
    made = _conv(node, x, w, result, target, op) if node.op == "Conv" else _product(node, x, w, result, target, op)
    return clipped(made, (low, high), result, op)


def _mean(node: Node, x: Quantized, y: Quantized, target: DType, op: GraphOps) -> Value:
    """The mean of codes: their sum is exact, so that what lies half-way between two codes is seen to."""
    shape = shape_of(x.codes)
    if shape is None or len(shape) < 3 or not all(isinstance(d, int) for d in shape[2:]):
        raise Left("the image's size is not known")
    count = math.prod(int(d) for d in shape[2:] if isinstance(d, int))
    if not 0 < count < _LONGEST:
        raise Left("int32 might not hold the sums")
    axes = op.constant(np.arange(2, len(shape)))
    total = op.ReduceSum(op.Cast(x.codes, to=DType.int32.onnx), axes, keepdims=1)
    shift = 0 if x.zero is None else count * int(x.zero)
    if shift:
        total = op.Sub(total, op.constant(np.array(shift, np.int32)))
    mean = op.Div(op.Cast(total, to=DType.float32.onnx), op.constant(np.array(count, np.float32)))
    step = (y.scale.astype(np.float64) / x.scale.astype(np.float64)).astype(np.float32)  # 1 where scales are equal
    return op.QuantizeLinear(mean, op.constant(step), result_of(y, target, op)[1])


def _conv(node: Node, x: Quantized, w: Quantized, y: Quantized, target: DType, op: GraphOps) -> Value:
    shape = shape_of(w.codes)
    if shape is None or not all(isinstance(d, int) for d in shape):
        raise Left("the filters' shape is not known")
    sizes = [int(d) for d in shape if isinstance(d, int)]
    if math.prod(sizes[1:]) >= _LONGEST:
        raise Left("int32 might not hold the sums")
    if w.axis not in (None, 0):
        raise Left("the filters are quantized along another axis than that of the outputs")
    operands = [*triple(x, op), *triple(w, op), *result_of(y, target, op)]
    bias = node.input(2)
    if bias is not None:
        operands.append(op.constant(_bias(bias, x, w, y, sizes[0])))
    attrs = {name: node.attrs[name] for name in WINDOW if name in node.attrs}
    return op.node("QLinearConv", operands, attrs).output


def _bias(bias: Value, x: Quantized, w: Quantized, y: Quantized, count: int) -> Array:
    """The bias in units of the sums."""
    unit = np.broadcast_to(np.asarray(x.scale * w.scale, np.float32).reshape(-1), (count,))
    given = dequantized(bias, (DType.int32,))
    if given is not None and given.codes.const is not None and (given.zero is None or not given.zero.any()):
        scale = np.broadcast_to(given.scale.reshape(-1), (count,)) if given.scale.size in (1, count) else None
        if scale is not None and np.all(np.abs(scale - unit) <= 1e-5 * unit):
            return np.asarray(given.codes.const.numpy().reshape(count))
    if given is not None and given.codes.const is not None:
        zero = 0 if given.zero is None else given.zero.astype(np.float64)
        numbers = (given.codes.const.numpy() - zero) * given.scale.astype(np.float64)
    else:
        array = array_of(bias)
        if array is None:
            raise Left("the bias is not constant")
        numbers = array.astype(np.float64)
    if np.any(unit > y.scale / 16):
        raise Left("the bias would be rounded too coarsely")
    codes = np.rint(numbers.reshape(count) / unit)
    if np.any(np.abs(codes) >= 2**30):
        raise Left("the bias is too large for the sums")
    return codes.astype(np.int32)


def _product(node: Node, x: Quantized, w: Quantized, y: Quantized, target: DType, op: GraphOps) -> Value:
    rank, shape = rank_of(w.codes), shape_of(w.codes)
    if rank is None or shape is None or rank < 2 or (rank_of(x.codes) or 0) < 2:
        raise Left("an operand is a vector, or its rank is not known")
    depth = shape[-2]
    # a depth that is not known is a sequence's, seldom so long; where it is, the product is made in pieces
    if isinstance(depth, int) and depth >= _LONGEST:
        raise Left("int32 might not hold the sums")
    if w.axis is not None and (rank != 2 or w.axis != 1):
        raise Left("the right operand is quantized along another axis than that of the columns")
    return op.node("QLinearMatMul", [*triple(x, op), *triple(w, op), *result_of(y, target, op)]).output


# -- layers with a float result ---------------------------------------------------------------------------------------


def _scaled_sums(node: Node, op: GraphOps) -> Value | None:
    """A layer of an operand and constant weights, both given by codes; None for other layers."""
    x, w = (dequantized(node.input(k)) for k in (0, 1))
    if x is None or w is None or w.codes.const is None:
        return None
    if not x.is_single:
        raise Left("the operand is quantized along an axis")
    weights, rank, attrs = w.codes.const.numpy(), rank_of(x.codes), {}
    columns, bias = weights.ndim - 1, None
    if node.op == "Gemm":
        if node.attrs.get("transA", 0) or node.attrs.get("alpha", 1.0) != 1 or node.attrs.get("beta", 1.0) != 1:
            raise Left("the product is transposed or scaled")
        if node.attrs.get("transB", 0):
            weights, columns = np.ascontiguousarray(weights.T), 0
    elif node.op == "Conv":
        columns = 0
        attrs = {name: node.attrs[name] for name in WINDOW if name in node.attrs}
    if node.op != "Conv" and (rank is None or rank < 2 or weights.ndim != 2):
        raise Left("an operand is not a matrix, or its rank is not known")
    depth = weights[0].size if node.op == "Conv" else weights.shape[0]
    if depth >= _LONGEST:
        raise Left("int32 might not hold the sums")
    if w.axis not in (None, columns):
        raise Left("the weights are quantized along another axis than that of the outputs")
    spread = (-1, *(1,) * (weights.ndim - 2)) if node.op == "Conv" else (-1,)
    if node.op != "MatMul" and node.input(2) is not None:
        bias = _numbers(node.input(2))
        if node.op == "Conv":
            bias = bias.reshape(spread)
    codes = w.codes if weights is w.codes.const.numpy() else op.constant(weights)
    zeros = [triple(q, op)[2] for q in (x, w)]
    name = "ConvInteger" if node.op == "Conv" else "MatMulInteger"
    total = op.node(name, [x.codes, codes, *zeros], attrs).output
    scale = np.asarray(x.scale * w.scale, np.float32)
    value = op.Mul(op.Cast(total, to=DType.float32.onnx), op.constant(scale if w.is_single else scale.reshape(spread)))
    return value if bias is None else op.Add(value, op.constant(bias))


def _numbers(value: Value | None) -> Array:
    """The float32 content of a bias that is constant, or made from constant codes."""
    array = array_of(value)
    if array is not None:
        return array
    given = dequantized(value, (DType.int32, *BYTES))
    if given is None or given.codes.const is None:
        raise Left("the bias is not constant")
    codes, zero = given.codes.const.numpy().astype(np.float32), given.zero
    along = () if given.axis is None else (-1, *(1,) * (codes.ndim - 1 - given.axis))
    if zero is not None:
        codes = codes - zero.astype(np.float32).reshape(along)
    return np.asarray(codes * given.scale.reshape(along), np.float32)
