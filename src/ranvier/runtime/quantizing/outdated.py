"""Operators of ONNX's first opset that no later one has, in words that any runtime reads."""

from __future__ import annotations

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder, bypass

ORIGIN = "outdated"
_END = np.iinfo(np.int64).max


def replace_outdated(graph: Graph) -> None:
    for node in list(graph):
        make = {"Affine": _affine, "ImageScaler": _scaled, "Crop": _cropped}.get(node.op)
        if make is not None and not node.domain:
            bypass(node, make(node), ORIGIN)


def _affine(node: Node) -> Value:
    ops = builder(node, ORIGIN)
    scaled = ops.Mul(node.inputs[0], np.float32(node.attrs.get("alpha", 1.0)))
    return ops.Add(scaled, np.float32(node.attrs.get("beta", 0.0)))


def _scaled(node: Node) -> Value:
    ops = builder(node, ORIGIN)
    found = ops.Mul(node.inputs[0], np.float32(node.attrs.get("scale", 1.0)))
    row = np.array(node.attrs.get("bias", ()), np.float32)
    return ops.Add(found, row.reshape(-1, 1, 1)) if row.size else found


def _cropped(node: Node) -> Value:
    """Pixels off the four sides, or a window of a size behind those of two."""
    left, top, right, bottom = (int(size) for size in node.attrs["border"])
    ends = [-bottom or _END, -right or _END]
    if node.attrs.get("scale"):
        height, width = (int(size) for size in node.attrs["scale"])
        ends = [top + height, left + width]
    axes = np.array([2, 3], np.int64)
    return builder(node, ORIGIN).Slice(node.inputs[0], np.array([top, left]), np.array(ends), axes)
