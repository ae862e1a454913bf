"""Gradients of operators; see :mod:`ranvier.passes.differentiate` for those of graphs."""

from __future__ import annotations

from ranvier.ops.gradients import (
    contraction,
    contrib,
    elementwise,
    layers,
    lstm,
    movement,
    nn,
    quantized,
    recurrent,
    reductions,
    resample,
    sampling,
    scatter,
    signal,
)
from ranvier.ops.gradients.base import Backward, gradient, known_gradients, needs, rule_of, stands_for_numbers
from ranvier.ops.gradients.nn import made_of, parts_of

__all__ = [
    "Backward",
    "contraction",
    "contrib",
    "elementwise",
    "gradient",
    "known_gradients",
    "layers",
    "lstm",
    "made_of",
    "movement",
    "needs",
    "nn",
    "parts_of",
    "quantized",
    "recurrent",
    "reductions",
    "resample",
    "rule_of",
    "sampling",
    "scatter",
    "signal",
    "stands_for_numbers",
]
