"""What OpenVINO reads without complaint and then means something else by.

As the standard's own cases show, and arithmetic that was held against the reference: it keeps 64-bit integers in 32
bits, saturates small ones, sums and divides integers as floats, and looks at no index before it uses it. On ARM
processors all arithmetic of integers is that of floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.graph.types import Shape, TensorType
from ranvier.providers.openvino.operands import element_type, on_arm, small_content
from ranvier.providers.openvino.quantized import quantizes_otherwise

_RESIZE = {"antialias": 0, "exclude_outside": 0, "keep_aspect_ratio_policy": "stretch"}
_LENGTHS = frozenset({"Shape", "Size", "ArgMax", "ArgMin", "NonZero"})  # results that are no larger than a tensor
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_WRAPPING = frozenset({"Abs", "Add", "Div", "Mod", "Mul", "Neg", "Pow", "Sub", "Sum"})
_BY_FLOATS = frozenset({"Div", "Mod", "Pow", "Relu"})  # and divides by zero without a word
_BY_FLOATS_ON_ARM = _WRAPPING | {"Clip", "Max", "Mean", "Min"}
_COARSE_ON_ARM = frozenset({"Erf", "Log", "Tanh"})
_SUMS = frozenset(
    {"Einsum", "Gemm", "MatMul", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean"}
    | {"ReduceProd", "ReduceSum", "ReduceSumSquare"}
)


def computes_otherwise(node: Node) -> str | None:
    """Why its answer would be another one than the standard's; None where nobody has seen that."""
    return _integers(node) or quantizes_otherwise(node) or _operator(node)


def _integers(node: Node) -> str | None:
    results = [element_type(v) for v in node.outputs if v.uses or v.is_graph_output]
    wide = [d for d in results if d is not None and d.kind in "iu" and d.itemsize == 8]
    if wide and node.op not in _LENGTHS:
        return f"OpenVINO keeps {wide[0]} in 32 bits"
    operands = [element_type(v) for v in node.inputs if v is not None]
    if node.op in _COMPARISONS and any(d is not None and d.kind in "iu" and d.itemsize == 8 for d in operands):
        return "OpenVINO compares 64-bit integers by 32 of their bits"
    made = element_type(node.outputs[0]) if node.outputs else None
    if made is None or made.kind not in "iu":
        return None
    if node.op in _WRAPPING and made.itemsize < 4:
        return f"OpenVINO ends at the largest {made} where others begin again"
    if node.op in _SUMS:
        return f"OpenVINO adds {made} as floats"
    if node.op in _BY_FLOATS:
        return f"OpenVINO computes {made} as floats"
    if node.op in _BY_FLOATS_ON_ARM and on_arm():
        return f"OpenVINO computes {made} as floats on this processor"
    return None


def _operator(node: Node) -> str | None:
    attrs = node.attrs
    if node.op == "Attention":
        if max(attrs.get(name, -1) for name in ("left_window_size", "right_window_size")) >= 0:
            return "OpenVINO does not look at the windows"
        if len(node.outputs) > 3:
            return "OpenVINO shows other scores"
        if attrs.get("is_causal", 0) and node.input(6) is not None:
            return "OpenVINO does not look whether a query may see anything"
    elif node.op == "BitShift":
        if _is(node, "i"):
            return "OpenVINO shifts signed numbers otherwise"
    elif node.op == "DFT":
        return "OpenVINO's transform is less precise, and has other shapes"
    elif node.op in ("Gather", "GatherND"):
        if not _within(node):
            return "OpenVINO does not look whether an index is within range"
    elif node.op in ("GRU", "LSTM", "RNN"):
        if attrs.get("layout", 0):
            return "OpenVINO does not look at the layout"
        if node.input(7) is not None:
            return "OpenVINO has no peepholes"
    elif node.op == "MaxPool" and attrs.get("ceil_mode", 0):
        return "OpenVINO counts other windows where sizes are rounded up"
    elif node.op == "Pad":
        if not _only_adds(node):
            return "OpenVINO writes beyond its memory where pads cut off more than there is"
    elif node.op == "Resize":
        for name, plain in _RESIZE.items():
            if attrs.get(name, plain) != plain:
                return f"OpenVINO does something else for {name} = {attrs[name]}"
        if attrs.get("mode", "nearest") == "nearest" and on_arm() and not _repeats(node):
            return "OpenVINO takes other neighbours on this processor"
    elif node.op == "RoiAlign" and attrs.get("mode", "avg") == "max":
        return "OpenVINO takes the greatest of other points"
    elif node.op == "Softplus":
        return "OpenVINO's Softplus is less precise where it is near zero"
    elif node.op in _COARSE_ON_ARM and on_arm():
        return f"OpenVINO's {node.op} is less precise where it is near zero, on this processor"
    elif node.op == "SpaceToDepth" and attrs.get("mode", "DCR") != "DCR":
        return "OpenVINO does not look at the mode"
    elif node.op == "TopK" and (node.outputs[-1].uses or node.outputs[-1].is_graph_output):
        return "OpenVINO numbers equal elements in another order"
    elif node.op in ("ReduceMax", "ReduceMin") and _is(node, "f"):
        return "OpenVINO's extremes are finite where all elements are infinite"
    elif node.op == "Tile" and (node.inputs[1] is None or node.inputs[1].const is None):
        return "OpenVINO returns memory that it never wrote where the repeats are not constant"
    return None


def _only_adds(node: Node) -> bool:
    """Is it known that nothing is cut off, and that there is enough to be mirrored?"""
    pads = np.array(node.attrs["pads"]) if "pads" in node.attrs else small_content(node.input(1))
    if pads is None or bool((pads < 0).any()):
        return False
    if node.attrs.get("mode", "constant") in ("constant", "edge"):
        return True
    shape = _shape(node.inputs[0])
    return shape is not None and all(isinstance(size, int) and size > pads.max(initial=0) for size in shape)


def _repeats(node: Node) -> bool:
    """Is it known that every element only comes several times?"""
    before, after = _shape(node.inputs[0]), _shape(node.output)
    if before is None or after is None:
        return False
    return all(isinstance(a, int) and isinstance(b, int) and a and b % a == 0 for a, b in zip(before, after))


def _within(node: Node) -> bool:
    """Is every index known, and is there such an element? Only small constants are looked at."""
    indices, shape = small_content(node.input(1)), _shape(node.inputs[0])
    if indices is None or shape is None or not indices.size:
        return False
    if node.op == "Gather":
        axis = int(node.attrs.get("axis", 0))
        sizes: list[Any] = [shape[axis]] if -len(shape) <= axis < len(shape) else []
        indices = indices.reshape(-1, 1)
    else:
        first = int(node.attrs.get("batch_dims", 0))
        sizes = list(shape[first : first + indices.shape[-1]]) if indices.ndim else []
        indices = indices.reshape(-1, max(1, len(sizes)))
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False
    return bool(np.all((indices >= -np.array(sizes)) & (indices < np.array(sizes))))


def _shape(value: Value | None) -> Shape | None:
    return value.type.shape if value is not None and isinstance(value.type, TensorType) else None


def _is(node: Node, kind: str) -> bool:
    """Is its result of this kind, as NumPy names them?"""
    found = element_type(node.output)
    return found is not None and found.kind == kind


__all__ = ["computes_otherwise"]
