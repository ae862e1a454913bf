"""Samples at free places and columns of windows, as gathers and sums whose gradients are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand, text
from ranvier.ops.gradients.parts import made_of

_SHARPNESS = -0.75  # of the cubic, as the operator has it
Tap = tuple[Value, Value | None, Value | None]  # along one axis: element, whether it exists, weight


# -- GridSample -----------------------------------------------------------------------------------------------------


@made_of("GridSample")
def _grid_sample(b: Backward, node: Node) -> Sequence[Value]:
    """Every element that contributes to a point is gathered and weighed; the weights follow the grid."""
    x, grid = node.inputs
    assert x is not None and grid is not None
    mode, padding = text(node, "mode", "linear"), text(node, "padding_mode", "zeros")
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    align = bool(attribute(node, "align_corners", 0))
    batch, channels, *spatial = b.sizes(x)
    rank, counted = len(spatial), b.sizes(grid)[1:-1]
    points = math.prod(counted)
    flat = b.cast(b.Reshape(grid, b.whole(batch, points, rank)), b.dtype(x))
    taps = []
    for axis, length in enumerate(spatial):  # the grid names the last axis first
        place = rank - 1 - axis
        at = b.Squeeze(b.Slice(flat, b.whole(place), b.whole(place + 1), b.whole(2)), b.whole(2))
        taps.append(_axis_taps(b, at, length, align, method, padding))
    pixels = b.Reshape(x, b.whole(batch, channels, math.prod(spatial)))
    parts = []
    for chosen in itertools.product(*taps):
        index, exists, weight = combined(b, chosen, spatial)
        wide = b.Expand(b.Unsqueeze(index, b.whole(1)), b.whole(batch, channels, points))
        found = b.GatherElements(pixels, wide, axis=2)
        if weight is not None:
            found = b.Mul(found, b.Unsqueeze(weight, b.whole(1)))
        parts.append(found if exists is None else b.where(b.Unsqueeze(exists, b.whole(1)), found))
    return [b.Reshape(b.add_all(parts), b.whole(batch, channels, *counted))]


def _axis_taps(b: Backward, points: Value, length: int, align: bool, method: str, padding: str) -> list[Tap]:
    """The elements one axis contributes to each point, whose coordinates run from -1 to 1."""

    def number(value: float) -> Value:
        return b.number(value, points)

    low, high = (0.0, length - 1.0) if align else (-0.5, length - 0.5)
    half = (high - low) / 2
    at = b.Add(b.Mul(points, number(half)), number(half + low))
    if method == "nearest":
        at = b.Round(at)
    if padding == "border" and method != "cubic":
        outside = b.Or(b.Less(at, number(low)), b.Greater(at, number(high)))
        at = b.Where(outside, b.Clip(at, number(0.0), number(length - 1.0)), at)
    elif padding == "reflection":
        at = _reflected(b, at, low, high)
    floor = b.Floor(at)
    neighbours: list[tuple[Value, Value | None]]
    if method == "nearest":
        neighbours = [(at, None)]
    else:
        part = b.Sub(at, floor)
        rest = b.Sub(number(1.0), part)
        if method == "linear":
            weights = [rest, part]
        else:
            near, far = _cubic_near, _cubic_far
            weights = [
                far(b, b.Add(part, number(1.0))),
                near(b, part),
                near(b, rest),
                far(b, b.Add(rest, number(1.0))),
            ]
        start = 0 if method == "linear" else -1
        neighbours = [(b.Add(floor, number(float(start + k))), weight) for k, weight in enumerate(weights)]
    taps: list[Tap] = []
    for place, weight in neighbours:
        if padding == "reflection":
            place = _reflected(b, place, low, high)
            place = b.Mul(b.Sign(place), b.Floor(b.Abs(place)))
        exists = None
        if padding == "zeros":
            exists = b.And(b.GreaterOrEqual(place, number(0.0)), b.Less(place, number(float(length))))
        inside = b.Clip(place, number(0.0), number(length - 1.0))
        taps.append((b.Cast(inside, to=DType.int64.onnx), exists, weight))
    return taps


def _cubic_near(b: Backward, t: Value) -> Value:
    """The weight of an element that is up to one away."""
    a = _SHARPNESS
    inner = b.Sub(b.Mul(t, b.number(a + 2, t)), b.number(a + 3, t))
    return b.Add(b.Mul(inner, b.Mul(t, t)), b.number(1.0, t))


def _cubic_far(b: Backward, t: Value) -> Value:
    """The weight of an element that is between one and two away."""
    inner = b.Add(b.Mul(b.Sub(t, b.number(5.0, t)), t), b.number(8.0, t))
    return b.Mul(b.Sub(b.Mul(inner, t), b.number(4.0, t)), b.number(_SHARPNESS, t))


def _reflected(b: Backward, at: Value, low: float, high: float) -> Value:
    """Positions outside of ``[low, high]`` thrown back and forth between the two until they lie inside."""

    def number(value: float) -> Value:
        return b.number(value, at)

    span = high - low
    if span <= 0:
        return b.Add(b.Mul(at, number(0.0)), number(low))
    below = b.Less(at, number(low))
    beyond = b.Where(below, b.Sub(number(low), at), b.Sub(at, number(high)))
    turns = b.Floor(b.Div(beyond, number(span)))
    rest = b.Sub(beyond, b.Mul(turns, number(span)))
    halves = b.Mul(turns, number(0.5))
    from_low = b.Equal(b.Equal(halves, b.Floor(halves)), below)
    thrown = b.Where(from_low, b.Add(rest, number(low)), b.Sub(number(high), rest))
    inside = b.And(b.GreaterOrEqual(at, number(low)), b.LessOrEqual(at, number(high)))
    return b.Where(inside, at, thrown)


def combined(b: Backward, taps: Sequence[Tap], spatial: Sequence[int]) -> Tap:
    """One tap per axis as a single one into the flattened image."""
    index, exists, weight = taps[0]
    for (place, there, factor), length in zip(taps[1:], spatial[1:]):
        index = b.Add(b.Mul(index, b.constant(np.asarray(length, np.int64))), place)
        exists = there if exists is None else exists if there is None else b.And(exists, there)
        weight = factor if weight is None else weight if factor is None else b.Mul(weight, factor)
    return index, exists, weight


# -- windows --------------------------------------------------------------------------------------------------------


@gradient("Col2Im")
def _columns_added(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """The windows of the gradient, which the columns were added to."""
    grad, columns = grads[0], first(node)
    assert grad is not None
    image = constant_ints(node.inputs[1], "the image_shape of Col2Im")
    block = constant_ints(node.inputs[2], "the block_shape of Col2Im")
    rank = len(image)
    strides, dilations = (list(attribute(node, k, None) or [1] * rank) for k in ("strides", "dilations"))
    pads = list(attribute(node, "pads", None) or [0] * 2 * rank)
    padded = [image[k] + pads[k] + pads[rank + k] for k in range(rank)]
    counts = [(padded[k] - (block[k] - 1) * dilations[k] - 1) // strides[k] + 1 for k in range(rank)]
    index = np.zeros((1, 1), np.int64)  # of each place in a window and each window, in the padded image
    for k in range(rank):
        own = np.add.outer(np.arange(block[k]) * dilations[k], np.arange(counts[k]) * strides[k])
        index = index[:, None, :, None] * padded[k] + own[None, :, None, :]
        index = index.reshape(index.shape[0] * index.shape[1], -1)
    edges = b.whole(0, 0, *pads[:rank], 0, 0, *pads[rank:])
    batch, channels = b.sizes(grad)[:2]
    wide = b.Pad(grad, edges, b.number(0.0, grad)) if any(pads) else grad
    flat = b.Reshape(wide, b.whole(batch, channels, math.prod(padded)))
    return [b.like(b.Gather(flat, b.constant(index), axis=2), columns), None, None]


@gradient("MaxUnpool")
def _unpool(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """What lies at each place; where several numbers were put to one, each gets all of it."""
    grad, x, indices = grads[0], first(node), node.inputs[1]
    assert grad is not None and indices is not None
    shape = b.sizes(x)
    rank = len(shape) - 2
    kernel = node.attrs["kernel_shape"]
    strides = list(attribute(node, "strides", None) or [1] * rank)
    pads = list(attribute(node, "pads", None) or [0] * 2 * rank)
    natural = [(shape[2 + k] - 1) * strides[k] + kernel[k] - pads[k] - pads[rank + k] for k in range(rank)]
    axes = list(range(2, 2 + rank))
    if operand(node, 2) is not None:  # zeros behind
        grad = b.Slice(grad, b.whole(*[0] * rank), b.whole(*natural), b.whole(*axes))
    flat = b.Reshape(grad, b.whole(-1))
    return [b.like(b.Gather(flat, b.Reshape(indices, b.whole(-1)), axis=0), x), None, None][: len(node.inputs)]
