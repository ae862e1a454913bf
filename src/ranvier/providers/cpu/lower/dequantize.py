"""Weights that stay codes of few bits: their DequantizeLinear is left out, and the products multiply codes."""

from __future__ import annotations

from ranvier.codegen.definitions.lower.quantization import is_constant
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.providers.cpu.lower.index import tries


@tries("DequantizeLinear")
@tries("DequantizeLinear", domain="com.microsoft")
def coded(n: NodeView, b: Definitions) -> bool:
    if not is_constant(n.node):
        return False
    from ranvier.providers.cpu.lower.dequantized_weights import stays_coded  # and with it the kernels of codes

    return stays_coded(n, b)


@tries("MatMul")
@tries("Gemm")
@tries("FusedGemm", domain="com.microsoft")
def by_codes(n: NodeView, b: Definitions) -> bool:
    """Where the weight is one that stays coded, the product is made of its codes."""
    weight = n.input(1).producer
    if weight is None or weight.op != "DequantizeLinear":
        return False
    from ranvier.providers.cpu.lower import dequantized_weights

    return dequantized_weights.multiplied(n, b)
