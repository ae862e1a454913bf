"""Provider-independent optimization: passes over the graph, run in order by the manager.

``default_passes`` is the whole pipeline. Constants and shapes come first, because everything else reads them; fusion
comes after, on a graph without detours; the last steps clear away what fusion left over.
"""

from __future__ import annotations

from ranvier.passes.base import OptimizationPass, PassContext, RulePass
from ranvier.passes.cancel import Cancel
from ranvier.passes.common_subexpressions import CommonSubexpressions
from ranvier.passes.dead_code import DeadCode
from ranvier.passes.fold_affine import FoldAffine
from ranvier.passes.fold_constants import FoldConstants
from ranvier.passes.fold_shapes import FoldShapes
from ranvier.passes.fuse import fusion_passes
from ranvier.passes.gather_rows import GatherRows
from ranvier.passes.kept_gates import KeptGates
from ranvier.passes.loop_invariants import LoopInvariants
from ranvier.passes.loop_products import LoopProducts
from ranvier.passes.manager import PassManager, PassReport, passes_for
from ranvier.passes.modernise import Modernise
from ranvier.passes.parallel_layers import ParallelLayers
from ranvier.passes.subnormals import SubnormalWeights


def default_passes() -> list[OptimizationPass]:
    """All passes in the order in which they run; a pass that opens the way for an earlier one is followed by it."""
    return [
        DeadCode(),
        Modernise(),
        FoldShapes(),
        FoldConstants(),
        LoopInvariants(),
        # an inlined branch and a folded target make more shapes known
        FoldShapes(),
        FoldConstants(),
        Cancel(),
        CommonSubexpressions(),
        GatherRows(),
        KeptGates(),
        FoldAffine(),
        LoopProducts(),
        ParallelLayers(),
        SubnormalWeights(),
        DeadCode(),
        *fusion_passes(),
        FoldConstants(),
        Cancel(),
        CommonSubexpressions(),
        DeadCode(),
    ]


__all__ = [
    "Cancel",
    "CommonSubexpressions",
    "DeadCode",
    "FoldAffine",
    "FoldConstants",
    "FoldShapes",
    "GatherRows",
    "KeptGates",
    "LoopInvariants",
    "LoopProducts",
    "Modernise",
    "OptimizationPass",
    "ParallelLayers",
    "PassContext",
    "PassManager",
    "PassReport",
    "RulePass",
    "SubnormalWeights",
    "default_passes",
    "passes_for",
]
