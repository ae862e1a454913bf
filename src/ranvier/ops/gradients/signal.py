"""Gradients of Fourier transforms, which are transforms the other way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, attribute, constant_ints, first, gradient, operand
from ranvier.ops.gradients.parts import made_of


@gradient("DFT")
def _transform(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    """The adjoint: conjugate exponentials, without the factor of the inverse or with it."""
    grad, x = grads[0], first(node)
    assert grad is not None
    shape = b.sizes(x)
    given = operand(node, 2)
    along = int(attribute(node, "axis", 1)) if node.version < 20 else -2
    along = constant_ints(given, "the axis of DFT")[0] if given is not None else along
    along %= len(shape)
    inverse, onesided = bool(attribute(node, "inverse", 0)), bool(attribute(node, "onesided", 0))
    count = constant_ints(operand(node, 1), "the dft_length of DFT")
    length = count[0] if count else 2 * (shape[along] - 1) if inverse and onesided else shape[along]
    axis, size = b.constant(np.asarray(along, np.int64)), b.constant(np.asarray(length, np.int64))
    if inverse:
        found = b.Div(b.DFT(grad, size, axis), b.number(float(length), grad))
        if onesided:  # what stands for two frequencies counts twice
            twice = np.full(length, 2.0)
            twice[0] = 1.0
            if length % 2 == 0:
                twice[length // 2] = 1.0
            twice[length // 2 + 1 :] = 0.0
            wide = [1] * len(shape)
            wide[along] = length
            found = b.Mul(found, b.constant(twice.reshape(wide).astype(b.dtype(grad).numpy)))
    else:
        found = b.Mul(b.DFT(grad, size, axis, inverse=1), b.number(float(length), grad))
    if shape[-1] == 1:
        found = b.Slice(found, b.whole(0), b.whole(1), b.whole(len(shape) - 1))
    if shape[along] < length:
        found = b.Slice(found, b.whole(0), b.whole(shape[along]), b.whole(along))
    elif shape[along] > length:
        pads = [0] * 2 * len(shape)
        pads[len(shape) + along] = shape[along] - length
        found = b.Pad(found, b.whole(*pads), b.number(0.0, found))
    return [found, None, None][: len(node.inputs)]


@made_of("STFT")
def _short_transforms(b: Backward, node: Node) -> Sequence[Value]:
    """Frames gathered from the signal, weighed, and transformed."""
    signal, window = first(node), operand(node, 2)
    shape = b.sizes(signal)
    if len(shape) == 2:
        signal, shape = b.Unsqueeze(signal, b.whole(2)), (*shape, 1)
    (step,) = constant_ints(node.inputs[1], "the frame_step of STFT")
    given = constant_ints(operand(node, 3), "the frame_length of STFT")
    length = given[0] if given else shape[1] if window is None else b.sizes(window)[0]
    count = (shape[1] - length) // step + 1
    index = np.add.outer(np.arange(count) * step, np.arange(length))
    frames = b.Gather(signal, b.constant(index.astype(np.int64)), axis=1)  # [batch, frames, length, parts]
    if window is not None:
        frames = b.Mul(frames, b.Unsqueeze(window, b.whole(1)))
    axis = b.constant(np.asarray(2, np.int64))
    return [b.DFT(frames, None, axis, onesided=int(attribute(node, "onesided", 1)))]
