"""ONNX Runtime as an oracle of 8-bit models.

On x86 without VNNI it adds two products of an unsigned and a signed byte in 16 bits, which saturate. Layers between
QuantizeLinear and DequantizeLinear compute in float32 where it does not make 8-bit operators of them; for operators
that are such already it turns signed weights into unsigned ones if told so, whose products are exact. It cannot turn
weights that two of them share, so each is given its own; nor those of QLinear operators that read signed codes, which
are left as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

_OPERATORS = {"MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM"}


def exact(source: Path | onnx.ModelProto) -> Any:
    """A session that adds up products of codes without loss, on every processor."""
    import onnxruntime  # tests that can do without are skipped where there is none

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    model: Any = onnx.load(source) if isinstance(source, Path) else source
    given: Any = str(source) if isinstance(source, Path) else model.SerializeToString()
    operators = {node.op_type for node in model.graph.node}
    linear = any(each.startswith("QLinear") for each in operators)
    if operators & _OPERATORS and not linear:
        options.add_session_config_entry("session.x64quantprecision", "1")
        given = _unshared(model).SerializeToString()
    elif not linear:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def _unshared(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    weights, seen = {each.name: each for each in made.graph.initializer}, set()
    for number, node in enumerate(made.graph.node):
        for k, name in enumerate(node.input):
            if name in weights and name in seen:
                own = made.graph.initializer.add()
                own.CopyFrom(weights[name])
                own.name = node.input[k] = f"{name} of node {number}, {k}"
            seen.add(name)
    return made
