"""Layers whose operands stay codes: their DequantizeLinear nodes are left out, and the layers multiply codes."""

from __future__ import annotations

from ranvier.codegen.definitions.lower.quantization import is_constant
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.dtypes import DType
from ranvier.graph.ir import Value
from ranvier.providers.cpu.lower.index import tries


@tries("DequantizeLinear")
@tries("DequantizeLinear", domain="com.microsoft")
def coded(n: NodeView, b: Definitions) -> bool:
    if _met_by_words(n):
        from ranvier.providers.cpu.lower.word_layers import stays_codes

        if stays_codes(n, b):
            return True
    if not is_constant(n.node):
        return False
    from ranvier.providers.cpu.lower.dequantized_weights import stays_coded  # and with it the kernels of codes

    return stays_coded(n, b)


@tries("Conv")
def by_words(n: NodeView, b: Definitions) -> bool:
    """A convolution of 16-bit codes, where those are what the processor multiplies faster."""
    if not _is_of_words(n.input(0)):
        return False
    from ranvier.providers.cpu.lower import word_layers

    return word_layers.multiplied(n, b)


@tries("MatMul")
@tries("Gemm")
@tries("FusedGemm", domain="com.microsoft")
def by_codes(n: NodeView, b: Definitions) -> bool:
    """A product of 16-bit codes likewise; or, where the weight is one that stays coded, of its codes."""
    weight = n.input(1).producer
    if weight is None or weight.op != "DequantizeLinear":
        return False
    if by_words(n, b):
        return True
    from ranvier.providers.cpu.lower import dequantized_weights

    return dequantized_weights.multiplied(n, b)


def _met_by_words(n: NodeView) -> bool:
    """Whether codes are 16-bit data of layers, or weights of some that read such data."""
    if _is_of_words(n.outputs[0]):
        return True
    return any(position == 1 and _is_of_words(node.inputs[0]) for node, position in n.outputs[0].uses)


def _is_of_words(value: Value | None) -> bool:
    node = None if value is None else value.producer
    codes = None if node is None or node.op != "DequantizeLinear" or node.domain else node.inputs[0]
    return getattr(codes and codes.type, "dtype", None) in (DType.int16, DType.uint16)
