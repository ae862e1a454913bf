"""Operators, each declared once. Importing this package declares them all.

The framework stands here: ``registry`` (``@op``), ``infer`` (types of a whole graph), ``estimate`` (cost), ``proto``
(between the IR and ONNX's messages). The declarations stand in the folders, by family.
"""

import importlib

from ranvier.ops.registry import Call, Cost, OpDef, TypeCall, declared, evaluate, find, get, op

FAMILIES = {
    "tensor": "activation cast creation elementwise indexing movement randomness reduction top_k",
    "nn": "attention contraction conv detection grid image loss normalization pool quantization recurrent resample"
    " signal training",
    "flow": "control sequence",
    "text": "strings",
    "ml": "features labels linear maps trees",
    "contrib": "activation attention fused grouped_attention moe normalization packed_attention position qlinear"
    " quantization quantized_moe tensor weight_only",
    "own": "after bitlinear lstm",
}
for _folder, _modules in FAMILIES.items():
    for _module in _modules.split():
        importlib.import_module(f"ranvier.ops.{_folder}.{_module}")
importlib.import_module("ranvier.ops.standard")  # last: it answers for whatever has no declaration
importlib.import_module("ranvier.ops.plugins")  # … and this for domains that nobody here knows

from ranvier.ops.infer import NEWEST, TypeInference, annotate, complete, infer_outputs  # noqa: E402 - needs the above

__all__ = [
    "NEWEST",
    "Call",
    "Cost",
    "OpDef",
    "TypeCall",
    "TypeInference",
    "annotate",
    "complete",
    "declared",
    "evaluate",
    "find",
    "get",
    "infer_outputs",
    "op",
]
