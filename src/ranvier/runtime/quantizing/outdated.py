"""Operators as ONNX's first opsets had them and no later one does, in words that any runtime reads.

Sessions run what is left here by its old meaning, but a file has one opset for all of its nodes.
"""

from __future__ import annotations

import numpy as np

from ranvier.graph.ir import Graph, Node, Value
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import dtype_of, rank_of

ORIGIN = "outdated"
_END = np.iinfo(np.int64).max


def replace_outdated(graph: Graph) -> None:
    """Here and in bodies; what has another form whatever is known of its operands is left to be modernised."""
    for node in [node for each in graph.all_graphs() for node in each]:
        make = _MAKERS.get(node.op)
        made = make(node) if make is not None and not node.domain else None
        if made is not None:
            bypass(node, made, ORIGIN)


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


def _over_the_rest(node: Node) -> Value | None:
    """All dimensions from ``axis`` on were one. Where the rank is known, so is whether that is the last one alone."""
    if node.version >= 13 or rank_of(node.inputs[0]) is not None:
        return None
    ops = builder(node, ORIGIN)
    rows = ops.Flatten(node.inputs[0], axis=node.attrs.get("axis", 1))
    return ops.Reshape(ops.node(node.op, [rows], {"axis": -1}).output, ops.Shape(node.inputs[0]))


def _without_negatives(node: Node) -> Value | None:
    """Indices below zero were outside, as those from the depth on are still; later they count from the end."""
    indices, depth, marks = node.inputs
    dtype = dtype_of(indices)
    if node.version >= 11 or dtype is None:
        return None
    ops = builder(node, ORIGIN)
    outside = ops.Cast(ops.Reshape(depth, np.array([], np.int64)), to=dtype.onnx)
    inside = ops.Where(ops.Less(indices, np.zeros((), dtype.numpy)), outside, indices)
    return ops.OneHot(inside, depth, marks, **node.attrs)


_MAKERS = {
    "Affine": _affine,
    "ImageScaler": _scaled,
    "Crop": _cropped,
    "Softmax": _over_the_rest,
    "LogSoftmax": _over_the_rest,
    "Hardmax": _over_the_rest,
    "OneHot": _without_negatives,
}
