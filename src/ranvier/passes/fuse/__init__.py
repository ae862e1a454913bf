"""Fusion: what exporters spell out in many operators becomes the one standard operator it is.

Every target is an operator of the ONNX standard, so a fused graph can be exported, and any provider can take it apart
again. A near miss is left as it is, with the reason in the pass's report.
"""

from __future__ import annotations

from ranvier.passes.base import OptimizationPass
from ranvier.passes.fuse.activation import ActivationFusion, ExactActivationFusion
from ranvier.passes.fuse.attention import AttentionFusion, LayoutFusion
from ranvier.passes.fuse.channels import ChannelFusion
from ranvier.passes.fuse.code_moves import CodeMoves
from ranvier.passes.fuse.code_tables import CodeTables
from ranvier.passes.fuse.normalization import NormalizationFusion
from ranvier.passes.fuse.quantized import QuantizedFusion
from ranvier.passes.fuse.rope import RotaryFusion


def fusion_passes() -> list[OptimizationPass]:
    """All fusion passes in order: later ones look for what earlier ones made."""
    return [
        CodeMoves(),
        QuantizedFusion(),
        CodeTables(),
        ExactActivationFusion(),
        LayoutFusion(),
        ActivationFusion(),
        NormalizationFusion(),
        ChannelFusion(),
        RotaryFusion(),
        AttentionFusion(),
    ]


__all__ = ["fusion_passes"]
