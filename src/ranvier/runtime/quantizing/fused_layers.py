"""Layers that another runtime's optimizer made one node with what stands around them, as layers again.

Such a node (com.microsoft's FusedConv, FusedGemm, FusedMatMul …) has an activation, a second summand, a factor or
transposed weights in itself. Sessions fuse the same by themselves, and the forms with codes that any runtime reads are
those of the standard's layers, which gradients know such nodes by. Passes that run later bring weights that are turned
or scaled then into their layers.
"""

from __future__ import annotations

import contextlib

from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.gradients import by_parts
from ranvier.passes.edit import bypass
from ranvier.runtime.quantizing.sites import has_weights

ORIGIN = "fused layers"
_FUSED = frozenset({"FusedConv", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "TransposeMatMul"})


def take_fused_apart(graph: Graph) -> None:
    """Here and in bodies, where the weights may have codes then."""
    for node in list(graph.all_nodes()):
        if node.op in _FUSED and node.domain == MICROSOFT and has_weights(node.input(0), node.input(1)):
            with contextlib.suppress(NotSupported):  # where the rank of what is turned is not known
                bypass(node, by_parts(node)[0], ORIGIN)
