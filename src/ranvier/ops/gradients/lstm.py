"""The gradient of LSTM: one operator for the way back through time, and products over all steps for the rest.

Gates and cells come from ``ranvier::LSTMTraining``. That asks for the layer again, but with the same operands, so that
a pass lets it stand for the layer itself (``passes/kept_gates.py``) wherever both are in one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, first, gradient, operand
from ranvier.ops.gradients.recurrent import direction_of
from ranvier.ops.own.lstm import DOMAIN

_OPERANDS = 8


@gradient("LSTM")
def _lstm(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    direction = direction_of(node)
    operands = [operand(node, k) for k in range(_OPERANDS)]
    while operands[-1] is None:
        operands.pop()
    attrs = {"hidden_size": int(node.attrs["hidden_size"]), "direction": direction}
    kept = b.node("LSTMTraining", operands, attrs, outputs=5, domain=DOMAIN, version=1)
    given = [grads[k] if k < len(grads) else None for k in range(3)]
    walked = b.node(
        "LSTMSlopes",
        [operand(node, 2), kept.outputs[4], kept.outputs[3], operand(node, 6), operand(node, 7), *given],
        {"direction": direction},
        outputs=3,
        domain=DOMAIN,
        version=1,
    )
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    found = [_Way(b, node, way, back).grads(kept, walked.outputs[0]) for way, back in enumerate(backwards)]
    made: list[Value | None] = [b.add_all([each[0] for each in found])]
    made += [_stacked(b, [each[k] for each in found]) for k in (1, 2, 3)]
    made += [None, walked.outputs[1], walked.outputs[2]]
    if operand(node, 7) is not None:
        made.append(_stacked(b, [each[4] for each in found]))
    return [grad if operand(node, k) is not None else None for k, grad in enumerate(made[: len(node.inputs)])]


def _joined(b: Backward, parts: Sequence[Value], axis: int) -> Value:
    return parts[0] if len(parts) == 1 else b.node("Concat", list(parts), {"axis": axis}).output


def _stacked(b: Backward, parts: Sequence[Value]) -> Value:
    return _joined(b, [b.Unsqueeze(part, b.whole(0)) for part in parts], 0)


class _Way:
    """One direction. Tensors over all steps are [length, batch, …], in the order in which they lie."""

    def __init__(self, b: Backward, node: Node, way: int, backwards: bool) -> None:
        self.b, self.node, self.way, self.backwards = b, node, way, backwards
        self.x = first(node)
        self.length, self.batch, self.width = b.sizes(self.x)
        self.size = int(node.attrs["hidden_size"])

    def grads(self, kept: Node, slopes: Value) -> list[Value]:
        """Of x, w, r, bias and peepholes."""
        b, size = self.b, self.size
        flat = self.flat(self.of_way(slopes, 1), 4 * size)
        # inputs and states side by side, as their weights: one product instead of two
        before = self.before(5, self.of_way(kept.outputs[0], 1))
        rows = self.flat(_joined(b, [self.x, before], 2), self.width + size)
        to_weights = b.Gemm(flat, rows, transA=1)
        to_weight, to_recurrence = b.node(
            "Split", [to_weights, b.whole(self.width, size)], {"axis": 1}, outputs=2
        ).outputs
        weight = operand(self.node, 1)
        assert weight is not None
        to_x = b.MatMul(flat, self.of_way(weight, 0))
        to_bias = b.ReduceSum(flat, b.whole(0), keepdims=0)
        made = [
            b.Reshape(to_x, b.whole(self.length, self.batch, self.width)),
            to_weight,
            to_recurrence,
            _joined(b, [to_bias, to_bias], 0),
        ]
        if operand(self.node, 7) is not None:
            made.append(self.to_holes(flat, self.of_way(kept.outputs[3], 1)))
        return made

    def to_holes(self, flat: Value, cells: Value) -> Value:
        """Peepholes let gates see cells: the output gate those of its step, the others those before."""
        b, size = self.b, self.size
        now, earlier = self.flat(cells, size), self.flat(self.before(6, cells), size)
        sizes = b.whole(*[size] * 4)
        to_i, to_o, to_f, _ = b.node("Split", [flat, sizes], {"axis": 1}, outputs=4).outputs
        parts = [b.Mul(to_i, earlier), b.Mul(to_o, now), b.Mul(to_f, earlier)]
        return _joined(b, [b.ReduceSum(part, b.whole(0), keepdims=0) for part in parts], 0)

    def before(self, k: int, states: Value) -> Value:
        """What every step began with; operand k is what the first one began with."""
        b, start = self.b, operand(self.node, k)
        head = (
            b.constant(np.zeros((1, self.batch, self.size), b.dtype(self.x).numpy))
            if start is None
            else self.only_way(start)
        )
        if self.length == 1:
            return head
        if self.backwards:
            return _joined(b, [b.Slice(states, b.whole(1), b.whole(self.length), b.whole(0)), head], 0)
        return _joined(b, [head, b.Slice(states, b.whole(0), b.whole(self.length - 1), b.whole(0))], 0)

    def only_way(self, value: Value) -> Value:
        return self.b.Slice(value, self.b.whole(self.way), self.b.whole(self.way + 1), self.b.whole(0))

    def of_way(self, value: Value, axis: int) -> Value:
        b = self.b
        return b.Squeeze(b.Slice(value, b.whole(self.way), b.whole(self.way + 1), b.whole(axis)), b.whole(axis))

    def flat(self, value: Value, width: int) -> Value:
        return self.b.Reshape(value, self.b.whole(self.length * self.batch, width))
