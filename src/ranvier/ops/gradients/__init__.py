"""Gradients of operators; see :mod:`ranvier.passes.differentiate` for those of graphs."""

from __future__ import annotations

from ranvier.ops.gradients import (
    contraction,
    contrib,
    contrib_tensor,
    early,
    elementwise,
    layers,
    lstm,
    lstm_parts,
    movement,
    nn,
    quantized,
    recurrent,
    reductions,
    regions,
    resample,
    sampling,
    scatter,
    signal,
)
from ranvier.ops.gradients.base import Backward, gradient, known_gradients, needs, rule_of, stands_for_numbers
from ranvier.ops.gradients.parts import comes_apart, has_parts, made_of, parts_of
from ranvier.ops.gradients.without import reason_against, without_gradient

__all__ = [
    "Backward",
    "comes_apart",
    "contraction",
    "contrib",
    "contrib_tensor",
    "early",
    "elementwise",
    "gradient",
    "has_parts",
    "known_gradients",
    "layers",
    "lstm",
    "lstm_parts",
    "made_of",
    "movement",
    "needs",
    "nn",
    "parts_of",
    "quantized",
    "reason_against",
    "recurrent",
    "reductions",
    "regions",
    "resample",
    "rule_of",
    "sampling",
    "scatter",
    "signal",
    "stands_for_numbers",
    "without_gradient",
]
