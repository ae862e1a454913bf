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
