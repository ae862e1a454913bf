"""Layers that read codes of 16 bits: convolutions and products between DequantizeLinear nodes, their weights of 8 or 16
bits.

They stand in a graph as layers of floats, which any provider computes. Where the processor multiplies such codes faster
than floats the layer is made of them, and their DequantizeLinear is left out if nobody else reads it. Sums are exact:
whether int32 holds them for all codes there are is known from the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Use
from ranvier.codegen.definitions.exprs import add, cast, const, mul, op
from ranvier.codegen.definitions.lower.quantization import DERIVED
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.conv import ConvShape
from ranvier.codegen.llvm.integer import (
    PackedCodes,
    multiplies_words,
    pack_word_filters,
    suits_words,
    sums_fit,
    word_conv,
)
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Expr
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import Same
from ranvier.passes.facts import dtype_of
from ranvier.passes.fuse.codes import Left, Quantized, dequantized
from ranvier.providers.cpu.lower.integer_convolution import Convolution, shape_of
from ranvier.providers.cpu.lower.integer_product import multiply, turned
from ranvier.providers.cpu.products import CpuProducts
from ranvier.providers.cpu.products.matmul import content
from ranvier.providers.cpu.realise import Realiser
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
_DATA, _WEIGHTS = (DType.int16, DType.uint16), (DType.int8, DType.int16)
_HALF = 1 << 15
_LAYERS = frozenset({"Conv", "MatMul", "Gemm"})


@dataclass(frozen=True)
class WordLayer:
    """What a layer multiplies: codes of data, and weights as filters or as a matrix [inputs, outputs]."""

    data: Quantized
    weights: Quantized
    turned: bool  # the weights of a product lie as [outputs, inputs]

    @property
    def is_unsigned(self) -> bool:
        return dtype_of(self.data.codes) is DType.uint16

    @property
    def zero(self) -> int:
        """Of signed codes."""
        return (0 if self.data.zero is None else int(self.data.zero)) - (_HALF if self.is_unsigned else 0)

    @property
    def array(self) -> Array:
        assert self.weights.codes.const is not None
        return self.weights.codes.const.numpy()

    @property
    def scales(self) -> Array:
        """Of sums: one, or one for each output."""
        return np.asarray(self.data.scale * self.weights.scale, np.float32).reshape(-1)


def word_layer(node: Node, b: Definitions) -> WordLayer | None:
    """The layer of this partition, if it can be made of codes, and faster."""
    if node.domain or node.op not in _LAYERS or not multiplies_words(_isa(b)):
        return None
    x, result = node.inputs[0], node.outputs[0]
    if x is None or result not in b.types or x not in b.types or result in b.known:
        return None
    try:
        data, weights = dequantized(x, _DATA), dequantized(node.inputs[1], _WEIGHTS)
    except Left:
        return None
    if data is None or weights is None or not data.is_single or weights.codes.const is None:
        return None
    if data.codes not in b.types or data.codes.const is not None:
        return None
    if weights.zero is not None and weights.zero.any():
        return None
    layer = WordLayer(data, weights, node.op == "Gemm" and bool(node.attrs.get("transB", 0)))
    able = _takes_window(node, layer, b) if node.op == "Conv" else _takes_product(node, layer, b)
    return layer if able and _sums_fit(layer, is_conv=node.op == "Conv") else None


def _isa(b: Definitions) -> Isa:
    assert isinstance(b.products, CpuProducts)
    return b.products.isa


def _takes_window(node: Node, layer: WordLayer, b: Definitions) -> bool:
    image, filters = b.shape(layer.data.codes), layer.array.shape
    if layer.weights.axis not in (None, 0) or int(node.attrs.get("group", 1)) != 1:
        return False
    if not 3 <= len(filters) <= 5 or len(image) != len(filters) or image[1] != filters[1]:
        return False
    return suits_words(shape_of(NodeView(node, b), image, filters), _isa(b))


def _takes_product(node: Node, layer: WordLayer, b: Definitions) -> bool:
    attrs, shape = node.attrs, layer.array.shape
    if attrs.get("transA", 0) or attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0:
        return False
    inputs = 1 if layer.turned else 0
    data = b.shape(layer.data.codes)
    fit = len(shape) == 2 and len(data) >= 2 and data[-1] == shape[inputs]
    return fit and layer.weights.axis in (None, 1 - inputs)


def _sums_fit(layer: WordLayer, *, is_conv: bool) -> bool:
    """Whether int32 holds all sums, of codes less their zero point too."""
    codes = layer.array

    def found() -> Array:
        matrix = codes.reshape(len(codes), -1).T if is_conv else codes.T if layer.turned else codes
        return np.array([sums_fit(matrix), sums_fit(2 * matrix.astype(np.int32))])

    plain, moved = DERIVED.get([codes], ("sums of words", is_conv, layer.turned), found)
    return bool(moved if layer.zero else plain)


def stays_codes(n: NodeView, b: Definitions) -> bool:
    """Whether nobody needs the result of this DequantizeLinear: it is the data or the weights of such layers alone."""
    value = n.outputs[0]
    if value.is_graph_output or not value.uses:
        return False
    return all(position in (0, 1) and word_layer(node, b) is not None for node, position in value.uses)


def multiplied(n: NodeView, b: Definitions) -> bool:
    """Define the layer by the codes of its data and weights, where it is such a layer."""
    layer = word_layer(n.node, b)
    if layer is None:
        return False
    codes = layer.data.codes
    if layer.is_unsigned:
        codes = b.pointwise([codes], _signed, DType.int16)
    if n.op == "Conv":
        total, spread = _convolved(n, b, layer, codes), (-1, *(1,) * (len(layer.array.shape) - 2))
    else:
        weights = turned(layer.array) if layer.turned else layer.array
        zero = b.constant(np.array(layer.zero, np.int16)) if layer.zero else None
        total, spread = multiply(b, codes, b.constant(weights), zero, None), (-1,)
    scales = layer.scales.reshape(spread) if layer.scales.size > 1 else layer.scales.reshape(())
    uses = [Use(total), Use(b.constant(scales))]
    if n.has(2):
        bias = n.input(2)
        whole = len(spread) > 1 or (len(b.shape(bias)) == 1 and b.shape(bias)[0] > 1)
        uses.append(Use(bias, (b.shape(bias)[0], *(1,) * (len(spread) - 1))) if whole else Use(bias))

    def compute(e: list[Expr]) -> Expr:
        value = mul(cast(e[0], DType.float32), e[1])
        return value if len(e) < 3 else add(value, e[2])

    b.pointwise(uses, compute, DType.float32, shape=n.out_shape(), out=n.outputs[0])
    return True


def _signed(e: list[Expr]) -> Expr:
    """Codes as much less as makes them signed: the highest bit stands for the opposite."""
    return op("bits", op("bitxor", e[0], const(_HALF, e[0])), dtype=DType.int16)


def _convolved(n: NodeView, b: Definitions, layer: WordLayer, codes: Value) -> Value:
    """Sums of codes less their zero point."""
    filters = layer.weights.codes
    shape = shape_of(n, b.shape(codes), layer.array.shape)
    zero = b.constant(np.array(layer.zero, np.int16))
    return _Convolution(b, codes, filters, zero, None, shape, len(b.shape(codes)) - 2).result(None)


class _Convolution(Convolution):
    """One convolution of words."""

    def _launches(self, r: Realiser, views: list[View], target: View, epilogue: Epilogue | None) -> Sequence[Launch]:
        image, filters, zero = views
        shape, target, epilogue, p = self._side_by_side(r.isa, target, epilogue)
        kind = (p, self.shape.strides, shape.kernel, shape.dilations)
        place = ("word filters", Same(filters.storage.array), filters.offset, *kind)
        packed = r.packs.get(place, lambda: self._packed(filters, r, shape, p))
        return word_conv(image, zero, packed, target, shape, r.isa, epilogue=epilogue, threads=r.threads)

    def _packed(self, filters: View, r: Realiser, shape: ConvShape, p: int) -> PackedCodes:
        array = np.ascontiguousarray(content(filters))
        return pack_word_filters(self._moved(array, shape.depth, p), r.isa, shape)

    def _thin(self, image: View) -> bool:
        return False
