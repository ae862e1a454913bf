"""ONNX Runtime as an oracle of 8-bit models.

On x86 without VNNI it adds two products of an unsigned and a signed byte in 16 bits, which saturate. Layers between
QuantizeLinear and DequantizeLinear compute in float32 where it does not make 8-bit operators of them; for operators
that are such already it turns signed weights into unsigned ones if told so, whose products are exact.
"""

from __future__ import annotations

from typing import Any


def exact(*, operators: bool = False) -> Any:
    """``operators``: does the model have 8-bit operators, or QuantizeLinear and DequantizeLinear around others?"""
    import onnxruntime  # tests that can do without are skipped where there is none

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if operators:
        options.add_session_config_entry("session.x64quantprecision", "1")
    else:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options
