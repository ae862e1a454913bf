"""Operator declarations, by family. Importing this package declares them all."""

import importlib

from ranvier.ops.registry import Call, Cost, OpDef, TypeCall, declared, evaluate, find, get, op

FAMILIES = (
    "elementwise",
    "creation",
    "activation",
    "cast",
    "reduction",
    "top_k",
    "movement",
    "indexing",
    "contraction",
    "conv",
    "pool",
    "normalization",
    "recurrent",
    "attention",
    "resample",
    "loss",
    "signal",
    "detection",
    "quantization",
    "sequence",
    "control",
    "text",
    "randomness",
    "image",
    "training",
    "ml",
    "ml_labels",
    "ml_linear",
    "ml_maps",
    "ml_trees",
    "contrib_activation",
    "contrib_attention",
    "contrib_fused",
    "contrib_grouped_attention",
    "contrib_moe",
    "contrib_normalization",
    "contrib_packed_attention",
    "contrib_position",
    "contrib_qlinear",
    "contrib_quantization",
    "contrib_tensor",
    "contrib_weight_only",
    "standard",
)
import pathlib as _p
for _family in FAMILIES:
    if (_p.Path(__file__).parent / f"{_family}.py").exists():
        try: importlib.import_module(f"ranvier.ops.{_family}")
        except Exception as e: print("skip", _family, e)

from ranvier.ops.infer import NEWEST, TypeInference, annotate, complete, infer_outputs

__all__ = ["Call", "Cost", "OpDef", "TypeCall", "TypeInference", "NEWEST", "annotate", "complete", "declared", "evaluate", "find", "get", "infer_outputs", "op"]
