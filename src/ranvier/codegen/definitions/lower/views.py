"""Operators that show the same memory differently: no work at run time unless a layout forces a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.codegen.definitions.defs import Declined, broadcast
from ranvier.codegen.definitions.lower.index import lowers
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import ALL, NARROW
from ranvier.codegen.storage import View
from ranvier.graph.ir import Node, Value
from ranvier.ops.operands import clipped


@lowers("Reshape", "Flatten", "Squeeze", "Unsqueeze", values=(1,), dtypes=ALL | NARROW)
def reshape(n: NodeView, b: Definitions) -> None:
    b.reshape(n.input(0), n.out_shape(), out=n.outputs[0])


@lowers("Transpose", dtypes=ALL | NARROW)
def transpose(n: NodeView, b: Definitions) -> None:
    perm = n.attr("perm") or tuple(reversed(range(n.rank(0))))
    b.transpose(n.input(0), tuple(int(p) for p in perm), out=n.outputs[0])


@lowers("Expand", values=(1,))
def expand(n: NodeView, b: Definitions) -> None:
    target = n.out_shape()
    if broadcast(n.shape(0), n.ints(1)) != target:
        raise Declined(f"Expand: {n.shape(0)} to {n.ints(1)}")
    b.alias(n.input(0), lambda view: view.expanded(target), target, out=n.outputs[0])


@lowers("Split", values=(1,))
def split(n: NodeView, b: Definitions) -> None:
    axis = n.attr("axis", 0) % max(1, n.rank(0))
    start = 0
    for k, out in enumerate(n.outputs):
        size = n.out_shape(k)[axis] if n.wants(k) else _piece(n, k, axis)
        if n.wants(k):
            _piece_of(n, b, axis, start, out)
        start += size


def _piece(n: NodeView, k: int, axis: int) -> int:
    """The size of a piece that nobody asks for: its type may not be known."""
    sizes = n.axes(1, "split")
    if sizes is not None:
        return sizes[k]
    whole, count = n.shape(0)[axis], int(n.attr("num_outputs", len(n.outputs)))
    each = -(-whole // count)
    return min(each, max(0, whole - k * each))


def _piece_of(n: NodeView, b: Definitions, axis: int, start: int, out: Value) -> None:
    shape = b.shape(out)
    starts = tuple(start if k == axis else 0 for k in range(len(shape)))
    b.alias(n.input(0), lambda view: sliced(view, starts, (1,) * len(shape), shape), shape, out=out)


def sliced(view: View, starts: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]) -> View:
    offset = view.offset + sum(a * s for a, s in zip(starts, view.strides))
    return View(view.storage, view.dtype, shape, tuple(p * s for p, s in zip(steps, view.strides)), offset)


@lowers("Slice", values=(1, 2, 3, 4))
def slice_(n: NodeView, b: Definitions) -> None:
    shape = n.shape(0)
    steps: Sequence[int]
    if n.version < 10:
        begin, end = n.attr("starts"), n.attr("ends")
        axes, steps = n.attr("axes") or range(len(begin)), [1] * len(begin)
    else:
        begin, end = n.ints(1), n.ints(2)
        axes = n.ints(3) if n.has(3) else range(len(begin))
        steps = n.ints(4) if n.has(4) else [1] * len(begin)
    first, step, out = [0] * len(shape), [1] * len(shape), n.out_shape()
    for axis, low, high, by in zip(axes, begin, end, steps):
        if not by:
            raise Declined("Slice: a step of 0")
        axis %= len(shape)
        if by == 1:
            first[axis] = clipped(low, shape[axis]) if out[axis] else 0
            continue
        window = range(shape[axis])[int(low) : int(high) : int(by)]
        # a step past the end is never taken: one of any size would only overflow an address
        first[axis], step[axis] = (window.start if len(window) else 0), (int(by) if len(window) > 1 else 1)
    starts, strides = tuple(first), tuple(step)
    b.alias(n.input(0), lambda view: sliced(view, starts, strides, out), out, out=n.outputs[0])


def _window_of(node: Node) -> str | None:
    return None if node.attrs.get("scale") is None or len(node.attrs["scale"]) == 2 else "scale needs 2 values"


@lowers("Crop", check=_window_of)
def crop(n: NodeView, b: Definitions) -> None:
    left, top = [int(x) for x in n.attr("border", (0, 0, 0, 0))[:2]]
    starts, out = (0, 0, top, left), n.out_shape()
    b.alias(n.input(0), lambda view: sliced(view, starts, (1, 1, 1, 1), out), out, out=n.outputs[0])


@lowers("DepthToSpace", "SpaceToDepth")
def blocks(n: NodeView, b: Definitions) -> None:
    batch, channels, height, width = n.shape(0)
    size, dcr = int(n.attr("blocksize")), n.attr("mode", "DCR") == "DCR"
    if n.op == "DepthToSpace":
        depth = channels // (size * size)
        cut = (batch, size, size, depth, height, width) if dcr else (batch, depth, size, size, height, width)
        perm = (0, 3, 4, 1, 5, 2) if dcr else (0, 1, 4, 2, 5, 3)
    else:
        cut = (batch, channels, height // size, size, width // size, size)
        perm = (0, 3, 5, 1, 2, 4) if dcr else (0, 1, 3, 5, 2, 4)
    parts = b.transpose(b.reshape(n.input(0), cut), perm)
    b.reshape(parts, n.out_shape(), out=n.outputs[0])


@lowers("Dropout", check=lambda node: _trains(node))
def dropout(n: NodeView, b: Definitions) -> None:
    b.identity(n.input(0), out=n.outputs[0])
    if n.wants(1):
        ones = b.constant(np.ones((), n.out_dtype(1).numpy), n.out_dtype(1))
        target = n.out_shape(1)
        b.alias(ones, lambda view: view.expanded(target), target, out=n.outputs[1])


def _trains(node: Node) -> str | None:
    mode = node.input(2)
    if mode is not None and (mode.const is None or bool(mode.const.numpy())):
        return "training mode"
    if node.version < 7 and not node.attrs.get("is_test", 0):
        return "training mode"
    return None
