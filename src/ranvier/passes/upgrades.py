"""How an operator's older form becomes its newer one, for every standard operator whose form has changed.

An upgrade changes its node in place, from any version below ``below`` to the form of version ``below``, and returns
None; or it changes nothing and returns the reason why this node has to stay as it is. Several upgrades of one
operator run one after the other, by rising version; one that changes the operator itself leaves its newest form.
Revisions that only admit more types need no upgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from ranvier.graph.ir import Node
from ranvier.graph.rewrite import GraphOps
from ranvier.ops.registry import Array
from ranvier.passes.facts import array_of, dtype_of, is_wanted, rank_of, shape_of

Upgrade = Callable[[Node, GraphOps], str | None]
UPGRADES: dict[str, list[tuple[int, Upgrade]]] = {}  # by operator: (below, upgrade), by rising `below`

UNKNOWN_RANK = "rank of the operand is unknown"
UNKNOWN_TYPE = "element type of the operand is unknown"
_FLOAT_MAX = float(np.finfo(np.float32).max)


def upgrade(*ops: str, below: int) -> Callable[[Upgrade], Upgrade]:
    def declare(function: Upgrade) -> Upgrade:
        for op in ops:
            UPGRADES.setdefault(op, []).append((below, function))
            UPGRADES[op].sort(key=lambda entry: entry[0])
        return function

    return declare


def _int64(values: Sequence[int] | int) -> Array:
    return np.array(values, np.int64)


# -- attributes that became operands --------------------------------------------------------------------------------


@upgrade("ReduceSum", "Squeeze", below=13)
@upgrade(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare", below=18,
)  # fmt: skip
def _optional_axes(node: Node, op: GraphOps) -> str | None:
    """An empty list meant the same as none, and does so as an operand."""
    axes = node.attrs.pop("axes", None)
    if axes:
        node.set_input(1, op.constant(_int64(axes)))
    return None


@upgrade("Unsqueeze", below=13)
def _unsqueeze(node: Node, op: GraphOps) -> str | None:
    node.set_input(1, op.constant(_int64(node.attrs.pop("axes"))))
    return None


@upgrade("Reshape", below=5)
def _reshape(node: Node, op: GraphOps) -> str | None:
    node.set_input(1, op.constant(_int64(node.attrs.pop("shape", ()))))
    return None


@upgrade("Slice", below=10)
def _slice(node: Node, op: GraphOps) -> str | None:
    starts, ends = node.attrs.pop("starts"), node.attrs.pop("ends")
    axes = node.attrs.pop("axes", None) or range(len(starts))
    node.set_inputs([node.inputs[0], *(op.constant(_int64(list(v))) for v in (starts, ends, axes))])
    return None


@upgrade("TopK", below=10)
def _top_k(node: Node, op: GraphOps) -> str | None:
    node.set_input(1, op.constant(_int64([node.attrs.pop("k")])))
    return None


@upgrade("TopK", below=11)
def _top_k_order(node: Node, op: GraphOps) -> str | None:
    """`largest` and `sorted` were always on, which is their default."""
    return None


@upgrade("Clip", below=11)
def _clip(node: Node, op: GraphOps) -> str | None:
    """The bounds that stood by default are kept: they do cut infinities."""
    dtype = dtype_of(node.inputs[0])
    if dtype is None:
        return UNKNOWN_TYPE
    bounds = node.attrs.pop("min", -_FLOAT_MAX), node.attrs.pop("max", _FLOAT_MAX)
    with np.errstate(over="ignore"):
        for position, bound in enumerate(bounds, start=1):
            node.set_input(position, op.constant(np.asarray(bound, dtype.numpy)))
    return None


@upgrade("Pad", below=2)
def _pad_name(node: Node, op: GraphOps) -> str | None:
    node.attrs["pads"] = node.attrs.pop("paddings")
    return None


@upgrade("Pad", below=11)
def _pad(node: Node, op: GraphOps) -> str | None:
    dtype = dtype_of(node.inputs[0])
    if dtype is None:
        return UNKNOWN_TYPE
    pads, value = node.attrs.pop("pads"), node.attrs.pop("value", 0.0)
    node.set_input(1, op.constant(_int64(pads)))
    if value != 0:
        node.set_input(2, op.constant(np.asarray(value, dtype.numpy)))
    return None


@upgrade("Split", below=13)
def _split_sizes(node: Node, op: GraphOps) -> str | None:
    sizes = node.input(1)
    if sizes is not None:  # version 1 had them as a floating-point operand
        found = array_of(sizes)
        if found is None:
            return "sizes are computed"
        node.set_input(1, op.constant(found.astype(np.int64)))
    elif node.attrs.get("split"):
        node.set_input(1, op.constant(_int64(node.attrs["split"])))
    node.attrs.pop("split", None)
    return None


@upgrade("Split", below=18)
def _split_count(node: Node, op: GraphOps) -> str | None:
    if node.input(1) is None:
        node.attrs["num_outputs"] = len(node.outputs)
    return None


@upgrade("Dropout", below=12)
def _dropout(node: Node, op: GraphOps) -> str | None:
    if node.version < 7 and not node.attrs.get("is_test", 0):
        return "it drops at random"
    if node.version < 10 and is_wanted(node, 1):
        return "its mask is used, and had another type"
    node.attrs.pop("is_test", None)
    ratio = node.attrs.pop("ratio", 0.5)
    if 0 <= ratio < 1:  # older versions did not look at it
        node.set_input(1, op.constant(np.float32(ratio)))
    return None


@upgrade("DFT", below=20)
def _dft(node: Node, op: GraphOps) -> str | None:
    node.set_input(2, op.constant(_int64(node.attrs.pop("axis", 1))))
    return None


@upgrade("Tile", below=6)
def _tile(node: Node, op: GraphOps) -> str | None:
    rank = rank_of(node.inputs[0])
    tiles, axis = array_of(node.input(1)), array_of(node.input(2))
    if rank is None:
        return UNKNOWN_RANK
    if tiles is None or axis is None:
        return "repeats are computed"
    repeats = [1] * rank
    repeats[int(axis.item())] = int(tiles.item())
    node.set_inputs([node.inputs[0], op.constant(_int64(repeats))])
    return None


# -- attributes that changed their default, spelling or type ----------------------------------------------------------


@upgrade("Concat", below=4)
def _concat(node: Node, op: GraphOps) -> str | None:
    node.attrs.setdefault("axis", 1)
    return None


@upgrade("Selu", below=6)
def _selu(node: Node, op: GraphOps) -> str | None:
    node.attrs.setdefault("alpha", float(np.float32(1.6732)))
    node.attrs.setdefault("gamma", float(np.float32(1.0507)))
    return None


@upgrade("Cast", below=6)
def _cast(node: Node, op: GraphOps) -> str | None:
    name = str(node.attrs["to"]).upper()
    if name not in TensorProto.DataType.keys():  # noqa: SIM118 - an enum wrapper, not a dict
        return f"{name!r} is no element type"
    node.attrs["to"] = TensorProto.DataType.Value(name)
    return None


@upgrade("LpPool", "GlobalLpPool", below=2)
def _lp_pool(node: Node, op: GraphOps) -> str | None:
    p = node.attrs.get("p", 2.0)
    if float(p) != int(p):
        return "p is not a whole number"
    if node.op == "LpPool" and "kernel_shape" not in node.attrs:
        return "kernel_shape is missing"
    node.attrs["p"] = int(p)
    return None


@upgrade("GridSample", below=20)
def _grid_sample(node: Node, op: GraphOps) -> str | None:
    mode = node.attrs.get("mode", "bilinear")
    node.attrs["mode"] = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return None


@upgrade("RoiAlign", below=16)
def _roi_align(node: Node, op: GraphOps) -> str | None:
    node.attrs["coordinate_transformation_mode"] = "output_half_pixel"
    return None


@upgrade("Range", below=27)
def _range(node: Node, op: GraphOps) -> str | None:
    """What the new attribute controls concerns half-precision types, which were not allowed before."""
    return None


@upgrade("Shape", below=15)
def _shape(node: Node, op: GraphOps) -> str | None:
    """It gave all dimensions, which is what it does without the new attributes."""
    return None


# -- broadcasting that was asked for by attributes --------------------------------------------------------------------


@upgrade("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor", below=7)
def _broadcast(node: Node, op: GraphOps) -> str | None:
    """The second operand covers dimensions of the first from ``axis`` on: it gets dimensions of size 1 behind it."""
    axis = node.attrs.get("axis")
    if node.attrs.get("broadcast", 0):
        a, b = shape_of(node.inputs[0]), shape_of(node.inputs[1])
        if axis is not None and (a is None or b is None):
            return UNKNOWN_RANK
        if a is not None and b is not None and len(b) > len(a):  # legal for a single element
            node.set_input(1, op.Reshape(node.inputs[1], _int64([])))
        elif a and b and axis is not None:
            behind = len(a) - axis % len(a) - len(b)
            if behind > 0:
                node.set_input(1, op.Unsqueeze(node.inputs[1], _int64(list(range(len(b), len(b) + behind)))))
    node.attrs.pop("broadcast", None)
    node.attrs.pop("axis", None)
    return None


@upgrade("Gemm", below=7)
def _gemm(node: Node, op: GraphOps) -> str | None:
    node.attrs.pop("broadcast", None)
    return None


@upgrade("PRelu", below=7)
def _prelu(node: Node, op: GraphOps) -> str | None:
    """One slope per channel, where channels are dimension 1."""
    x, slope = shape_of(node.inputs[0]), shape_of(node.inputs[1])
    if x is None or slope is None or (len(slope) == 1 and type(slope[0]) is not int):
        return UNKNOWN_RANK
    if len(slope) == 1 and slope[0] != 1 and len(x) > 2:
        node.set_input(1, op.Unsqueeze(node.inputs[1], _int64(list(range(1, len(x) - 1)))))
    return None


# -- operators that changed their meaning ---------------------------------------------------------------------------


@upgrade("BatchNormalization", below=7)
def _batch_normalization_flag(node: Node, op: GraphOps) -> str | None:
    if not node.attrs.get("is_test", 0):
        return "it trains"
    if len(node.outputs) > 1:
        return "it lists the outputs of training"
    node.attrs.pop("is_test")
    return None


@upgrade("BatchNormalization", below=9)
def _batch_normalization_spatial(node: Node, op: GraphOps) -> str | None:
    if not node.attrs.get("spatial", 1):
        return "it has statistics per element"
    node.attrs.pop("spatial", None)
    return None


@upgrade("BatchNormalization", below=14)
def _batch_normalization_outputs(node: Node, op: GraphOps) -> str | None:
    return "it trains" if len(node.outputs) > 1 else None


@upgrade("Softmax", "LogSoftmax", "Hardmax", below=13)
def _softmax(node: Node, op: GraphOps) -> str | None:
    """All dimensions from ``axis`` on were one: flatten, unless only the last one is meant."""
    x = node.inputs[0]
    rank = rank_of(x)
    if rank is None:
        return UNKNOWN_RANK
    axis = node.attrs.get("axis", 1)
    split = axis + rank if axis < 0 else axis
    node.attrs["axis"] = -1
    if split == rank - 1 and rank > 0:
        return None
    rows = op.Flatten(x, axis=split)
    rows = op.node(node.op, [rows], {"axis": -1}).output
    node.op = "Reshape"
    node.attrs = {}
    node.set_inputs([rows, op.Shape(x)])
    return None


@upgrade("GroupNormalization", below=21)
def _group_normalization(node: Node, op: GraphOps) -> str | None:
    """Scale and bias were per group; now they are per channel."""
    shape = shape_of(node.inputs[0])
    groups = node.attrs["num_groups"]
    if shape is None or len(shape) < 2 or type(shape[1]) is not int or shape[1] % groups:
        return "number of channels is unknown"
    size = shape[1] // groups
    for position in (1, 2):
        column = op.Unsqueeze(node.inputs[position], _int64([1]))
        spread = op.Expand(column, _int64([groups, size]))
        node.set_input(position, op.Reshape(spread, _int64([groups * size])))
    return None


@upgrade("Scatter", below=11)
@upgrade("Scatter", below=12)
def _scatter(node: Node, op: GraphOps) -> str | None:
    """Version 11 is the deprecation."""
    node.op = "ScatterElements"
    return None


# Upsample and the first Resize: a pixel of the result at p comes from p / scale.
_ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


@upgrade("Upsample", below=10)
@upgrade("Upsample", below=11)
def _upsample(node: Node, op: GraphOps) -> str | None:
    """Version 10 is the deprecation."""
    x, scales = node.inputs[0], node.input(1)
    if node.version < 7:
        factors = [1.0, 1.0, node.attrs.pop("height_scale"), node.attrs.pop("width_scale")]
        scales = op.constant(np.array(factors, np.float32))
    elif node.version < 9:
        scales = op.constant(np.array(node.attrs.pop("scales"), np.float32))
    mode = node.attrs.get("mode", "nearest")
    node.op = "Resize"
    node.attrs = _resize_attrs("linear" if mode == "bilinear" else mode)
    node.set_inputs([x, None, scales])
    return None


@upgrade("Resize", below=11)
def _resize(node: Node, op: GraphOps) -> str | None:
    x, scales = node.inputs
    node.attrs = _resize_attrs(node.attrs.get("mode", "nearest"))
    node.set_inputs([x, None, scales])
    return None


def _resize_attrs(mode: str) -> dict[str, Any]:
    return {"mode": mode, **_ASYMMETRIC}


# -- what was there before the standard had it ------------------------------------------------------------------------


@upgrade("LayerNormalization", below=17)
def _layer_normalization(node: Node, op: GraphOps) -> str | None:
    """ONNX Runtime's optimizer writes it into models of any opset, and takes operands of several types."""
    kinds = {dtype_of(value) for value in node.inputs if value is not None}
    if None in kinds:
        return UNKNOWN_TYPE
    return "its operands are of several types" if len(kinds) > 1 else None


__all__ = ["UPGRADES", "Upgrade", "upgrade"]
