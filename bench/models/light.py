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
_NORMALIZING = {"BatchNormalization", "Mul", "Add"}
_BRANCH = 0.3  # scale of what is added to a residual stream, which would else grow with every block


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
        user, operand = _use(node.output[0], users)
        rectified = _reaches(user.output[0], users, "Relu")
        values = _values(rng, shape, user.op_type, operand, math.sqrt(2.0) if rectified else 1.0)
        if (user.op_type, operand) == ("BatchNormalization", 1) and _reaches(user.output[0], users, "Sum"):
            values *= np.float32(_BRANCH)
        graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
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


def _use(value: str, users: dict[str, list[tuple[Any, int]]]) -> tuple[Any, int]:
    """The node that computes with a weight, and as which operand."""
    node, operand = users[value][0]
    while node.op_type in _PASSING_ON:
        node, operand = users[node.output[0]][0]
    return node, operand


def _reaches(value: str, users: dict[str, list[tuple[Any, int]]], op: str) -> bool:
    """Does a value go into such an operator, maybe by way of a normalization?"""
    return any(
        node.op_type == op or (node.op_type in _NORMALIZING and _reaches(node.output[0], users, op))
        for node, _ in users[value]
    )


def _values(rng: np.random.Generator, shape: list[int], use: str, operand: int, gain: float) -> np.ndarray:
    if use in ("Conv", "Gemm", "MatMul") and operand == 1:
        fan = math.prod(shape[1:])
        return rng.standard_normal(shape, np.float32) * np.float32(gain / math.sqrt(fan))
    spread = np.float32(0.1) * (rng.random(shape, np.float32) - np.float32(0.5))
    return spread + np.float32(_CENTRE.get((use, operand), 0.0))
