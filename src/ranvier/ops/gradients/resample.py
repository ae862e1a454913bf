"""Resize as products with small matrices, one for each axis: it is linear and treats axes one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops import registry
from ranvier.ops.gradients.base import Backward, attribute, first
from ranvier.ops.gradients.parts import made_of


@made_of("Resize", "Upsample")
def _resize(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    before, after = b.sizes(x), b.sizes(node.output)
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if mode in ("tf_crop_and_resize", b"tf_crop_and_resize"):
        raise NotSupported("the gradient of Resize with tf_crop_and_resize is not known")
    y = x
    rank = len(before)
    for axis, (old, new) in enumerate(zip(before, after)):
        if old == new:
            continue
        weights = _weights(node, axis, old, new, rank).astype(b.dtype(x).numpy)
        order = [k for k in range(rank) if k != axis] + [axis]
        back = [int(k) for k in np.argsort(order)]
        turned = y if axis == rank - 1 else b.Transpose(y, perm=order)
        y = b.MatMul(turned, b.constant(weights))
        y = y if axis == rank - 1 else b.Transpose(y, perm=back)
    return [y]


def _weights(node: Node, axis: int, old: int, new: int, rank: int) -> np.ndarray:
    """[old, new]: what each result takes of each element, found by resizing rows of the identity."""
    scales = [1.0] * rank
    source = node.inputs
    definition = registry.get(node.domain, node.op, node.version)
    known = next((v for v in (source[2:3] if node.op == "Resize" else source[1:2]) if v is not None), None)
    factor = new / old
    if known is not None and known.const is not None and known.const.size == rank:
        factor = float(known.const.numpy()[axis])
    scales[-1] = factor
    rows = np.eye(old).reshape([1] * (rank - 2) + [old, old]) if rank > 1 else None
    if rows is None:
        raise NotSupported("the gradient of Resize needs two axes at least")
    call = registry.Call((True,), node.version, node=node, opsets={})
    attrs = {k: v for k, v in node.attrs.items() if k not in ("axes", "scales")}
    operands = (
        [rows, None, np.array(scales, np.float32)] if node.op == "Resize" else [rows, np.array(scales, np.float32)]
    )
    found: np.ndarray = definition.run(operands, attrs, call)[0]
    if found.shape[-1] != new:
        raise NotSupported("the gradient of this Resize is not known: its sizes do not follow from its scales")
    return found.reshape(old, new)
