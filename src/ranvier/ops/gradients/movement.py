"""Gradients of operators that move elements: back where they came from, added up where several came from one."""

from __future__ import annotations

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    return [b.like(grads[0], first(node)), None][: len(node.inputs)]


@gradient("After", domain="ranvier")
def _after(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    return [grads[0], None]


@gradient("Transpose")
def _transpose(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    perm = node.attrs.get("perm") or tuple(reversed(range(b.rank(first(node)))))
    return [b.Transpose(grads[0], perm=[int(k) for k in np.argsort(perm)])]


@gradient("Expand")
def _expand(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    return [b.sum_to(grads[0], first(node)), None]


@gradient("Tile")
def _tile(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    x, grad = first(node), grads[0]
    assert grad is not None
    repeats = constant_ints(operand(node, 1), "repeats of Tile")
    split = [size for r, d in zip(repeats, b.sizes(x)) for size in (r, d)]
    apart = b.Reshape(grad, b.whole(*split))
    return [b.ReduceSum(apart, b.whole(*range(0, len(split), 2)), keepdims=0), None]


@gradient("Concat")
def _concat(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    parts = [v for v in node.inputs if v is not None]
    axis = b.axis(node, 0, parts[0])
    if len(parts) == 1:
        return [grads[0]]
    sizes = [b.dims(v)[axis] for v in parts]
    if all(isinstance(d, int) for d in sizes):
        lengths = b.whole(*(int(d) for d in sizes))  # type: ignore[arg-type]
    else:
        lengths = b.node("Concat", [b.Gather(b.Shape(v), b.whole(axis)) for v in parts], {"axis": 0}).output
    return list(b.node("Split", [grads[0], lengths], {"axis": axis}, outputs=len(parts)).outputs)


@gradient("Split")
def _split(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    axis = b.axis(node, 0, first(node))
    parts = [b.zeros(y) if g is None else g for g, y in zip(grads, node.outputs)]
    joined = parts[0] if len(parts) == 1 else b.node("Concat", parts, {"axis": axis}).output
    return [joined, None][: len(node.inputs)]


@gradient("Slice")
def _slice(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Into zeros, at the places it was taken from."""
    grad, x = grads[0], first(node)
    assert grad is not None
    if node.version < 10:
        starts, ends = (tuple(node.attrs[k]) for k in ("starts", "ends"))
        axes = tuple(node.attrs.get("axes", range(len(starts))))
        steps = (1,) * len(starts)
    else:
        starts, ends, axes, steps = (constant_ints(operand(node, k), "bounds of Slice") for k in (1, 2, 3, 4))
        axes = axes or tuple(range(len(starts)))
        steps = steps or (1,) * len(starts)
    dims, rank = b.dims(x), b.rank(x)
    before, after = [0] * rank, [0] * rank
    plain = True
    chosen: list[tuple[int, range]] = []
    for start, end, axis, step in zip(starts, ends, axes, steps):
        size = dims[axis]
        if not isinstance(size, int):
            raise NotSupported("the gradient of Slice needs the sizes of the axes it cuts")
        places = range(*slice(start, end if not (step < 0 and end < -size) else None, step).indices(size))
        chosen.append((axis % rank, places))
        plain = plain and step == 1
        before[axis % rank] = places.start if len(places) else 0
        after[axis % rank] = size - places.stop if len(places) else size
    if plain:
        pads = b.whole(*before, *after)
        found = b.Pad(grad, pads, b.number(0.0, grad))
    else:
        found = grad
        for axis, places in chosen:
            target = list(b.dims(found))
            target[axis] = dims[axis]
            if not all(isinstance(d, int) for d in target):
                raise NotSupported("the gradient of a Slice with steps needs all sizes")
            at = np.array(list(places), np.int64)
            spread = at.reshape([-1 if k == axis else 1 for k in range(rank)])
            wide = b.Expand(b.constant(spread), b.shape(found))
            zeros = b.constant(np.zeros(target, b.dtype(grad).numpy))
            found = b.ScatterElements(zeros, wide, found, axis=axis)
    return [found, *[None] * (len(node.inputs) - 1)]


@gradient("Pad")
def _pad(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    assert grad is not None
    rank = b.rank(x)
    pads = constant_ints(operand(node, 1), "pads") if node.version >= 11 else tuple(node.attrs["pads"])
    axes = constant_ints(operand(node, 3), "axes of Pad") or tuple(range(rank))
    count = len(axes)
    mode = attribute(node, "mode", "constant")
    mode = mode.decode() if isinstance(mode, bytes) else mode
    if mode != "constant":
        inner = _unpadded(b, grad, x, [a % rank for a in axes], pads, mode)
    elif all(p >= 0 for p in pads):
        ends = [-p if p > 0 else 2**62 for p in pads[count:]]
        inner = b.Slice(grad, b.whole(*pads[:count]), b.whole(*ends), b.whole(*axes))
    else:  # what was cut off has no gradient
        wide = [0] * (2 * rank)
        for k, axis in enumerate(axes):
            wide[axis % rank], wide[axis % rank + rank] = -pads[k], -pads[k + count]
        inner = b.Pad(grad, b.whole(*wide), b.number(0.0, grad))
    found: list[Value | None] = [inner, *[None] * (len(node.inputs) - 1)]
    value = operand(node, 2)
    if value is not None:
        rest = b.Sub(b.ReduceSum(grad, keepdims=0), b.ReduceSum(inner, keepdims=0))
        found[2] = b.like(rest, value)
    return found


def _unpadded(b: Backward, grad: Value, x: Value, axes: list[int], pads: tuple[int, ...], mode: str) -> Value:
    """Padding with what is there already takes elements from places of each axis: gradients go back to them."""
    sizes = b.sizes(x)
    for k, axis in reversed(list(enumerate(axes))):
        before, after = pads[k], pads[k + len(axes)]
        places = np.arange(sizes[axis], dtype=np.int64)
        places = places[max(-before, 0) : len(places) - max(-after, 0)]
        places = np.pad(places, (max(before, 0), max(after, 0)), mode=mode)  # type: ignore[call-overload]
        target = list(b.sizes(grad))
        target[axis] = sizes[axis]
        zeros = b.Expand(b.number(0.0, grad), b.whole(*target))
        grad = _added_rows(b, zeros, b.constant(places), grad, axis, 1)
    return grad


def _added_rows(b: Backward, zeros: Value, indices: Value, grad: Value, axis: int, lead: int) -> Value:
    """Slices along an axis added to zeros at their indices, of which there are ``lead`` dimensions."""
    rank = b.rank(zeros)
    # the gathered axes first, then as rows of a ScatterND
    order = [*range(axis, axis + lead), *range(axis), *range(axis + lead, rank - 1 + lead)]
    rows = grad if order == sorted(order) else b.Transpose(grad, perm=order)
    places = b.Unsqueeze(b.cast(indices, DType.int64), b.whole(lead))
    moved = [axis, *(k for k in range(rank) if k != axis)]
    base = zeros if axis == 0 else b.Transpose(zeros, perm=moved)
    added = b.ScatterND(base, places, rows, reduction="add")
    return added if axis == 0 else b.Transpose(added, perm=[int(k) for k in np.argsort(moved)])


@gradient("Gather")
def _gather(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """Rows are added where they were taken from, however often."""
    grad, x, indices = grads[0], first(node), node.inputs[1]
    assert grad is not None and indices is not None
    return [_added_rows(b, b.zeros(x), indices, grad, b.axis(node, 0, x), b.rank(indices)), None]


@gradient("GatherElements")
def _gather_elements(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    assert grad is not None
    axis = b.axis(node, 0, x)
    return [b.ScatterElements(b.zeros(x), node.inputs[1], grad, axis=axis, reduction="add"), None]


@gradient("GatherND")
def _gather_nd(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad, x = grads[0], first(node)
    assert grad is not None
    indices = node.inputs[1]
    assert indices is not None
    batch = int(attribute(node, "batch_dims", 0))
    if batch:  # scattering knows no such dimensions: their places become part of the indices
        sizes = b.sizes(indices)
        grids = np.meshgrid(*(np.arange(d, dtype=np.int64) for d in sizes[:batch]), indexing="ij")
        places = np.stack(grids, axis=-1).reshape(*sizes[:batch], *[1] * (len(sizes) - 1 - batch), batch)
        wide = b.constant(np.ascontiguousarray(np.broadcast_to(places, (*sizes[:-1], batch))))
        indices = b.node("Concat", [wide, b.cast(indices, DType.int64)], {"axis": len(sizes) - 1}).output
    return [b.ScatterND(b.zeros(x), indices, grad, reduction="add"), None]


@gradient("DepthToSpace", "SpaceToDepth")
def _depth(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    grad = grads[0]
    assert grad is not None
    size, mode = node.attrs["blocksize"], attribute(node, "mode", "DCR")
    if node.op == "SpaceToDepth":
        return [b.DepthToSpace(grad, blocksize=size, mode="DCR")]
    if mode in ("DCR", b"DCR"):
        return [b.SpaceToDepth(grad, blocksize=size)]
    n, c, h, w = b.sizes(first(node))
    apart = b.Reshape(grad, b.whole(n, c // size**2, h, size, w, size))
    return [b.like(b.Transpose(apart, perm=[0, 1, 3, 5, 2, 4]), first(node))]


@gradient("Trilu")
def _trilu(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    operands = [grads[0], *node.inputs[1:]]
    return [b.node("Trilu", operands, dict(node.attrs)).output, None][: len(node.inputs)]


@gradient("ReverseSequence")
def _reverse(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    assert grads[0] is not None
    return [b.node("ReverseSequence", [grads[0], node.inputs[1]], dict(node.attrs)).output, None]
