"""The ``light_*`` models of the onnx package with weights put in.

They are the classic image networks with every weight replaced by a ConstantOfShape, that is, by one number: enough to
check that a model runs, but every channel then holds the same, errors stay invisible and a runtime could take
advantage. Here each such node becomes a seeded random initializer scaled by its use.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
_PASSING_ON = {"Unsqueeze", "Reshape", "Identity", "Cast"}
_CENTRE = {("BatchNormalization", 1): 1.0, ("BatchNormalization", 4): 1.0, ("Mul", 0): 1.0, ("Mul", 1): 1.0}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("light_*.onnx"))


def filled(name: str) -> Any:
    """The model ``name`` with weights."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    graph = model.graph
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    users: dict[str, list[tuple[Any, int]]] = defaultdict(list)
    for node in graph.node:
        for k, value in enumerate(node.input):
            users[value].append((node, k))
    shapes = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape = [int(size) for size in shapes[node.input[0]]]
        use, operand = _use(node.output[0], users)
        graph.initializer.append(numpy_helper.from_array(_values(rng, shape, use, operand), node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)
    used = {value for node in graph.node for value in node.input}
    for stale in [t for t in graph.initializer if t.name not in used]:
        graph.initializer.remove(stale)
    inputs = [v for v in graph.input if v.name in used and v.name not in shapes]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)  # from here on initializers need not be inputs
    return model


def _use(value: str, users: dict[str, list[tuple[Any, int]]]) -> tuple[str, int]:
    """The operator that computes with a weight, and as which operand."""
    node, operand = users[value][0]
    while node.op_type in _PASSING_ON:
        node, operand = users[node.output[0]][0]
    return node.op_type, operand


def _values(rng: np.random.Generator, shape: list[int], use: str, operand: int) -> np.ndarray:
    if use in ("Conv", "Gemm", "MatMul") and operand == 1:
        fan = math.prod(shape[1:])
        return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2.0 / fan))
    spread = np.float32(0.1) * (rng.random(shape, np.float32) - np.float32(0.5))
    return spread + np.float32(_CENTRE.get((use, operand), 0.0))
