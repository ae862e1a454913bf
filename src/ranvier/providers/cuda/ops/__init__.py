"""Operators as functions over tensors of torch, a module for each family; importing one fills the table."""

from __future__ import annotations

import importlib

FAMILIES = (
    "attention",
    "contrib_attention",
    "contrib_fused",
    "convolution",
    "elementwise",
    "experts",
    "features",
    "indexing",
    "integer_products",
    "losses",
    "movement",
    "normalization",
    "optimizers",
    "pooling",
    "products",
    "qlinear",
    "quantization",
    "randomness",
    "recurrent",
    "recurrent_training",
    "reductions",
    "resample",
    "sampling",
    "signal",
    "weight_only",
)


def load_all() -> None:
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
