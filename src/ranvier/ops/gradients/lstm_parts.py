"""LSTMTraining and LSTMSlopes as plain operators, step by step: what gradients of an LSTM's gradient are taken of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, first, operand
from ranvier.ops.gradients.parts import made_of
from ranvier.ops.own.lstm import DOMAIN

_LONGEST = 512


@made_of("LSTMTraining", domain=DOMAIN)
def _training(b: Backward, node: Node) -> Sequence[Value]:
    """The layer, and its gates out of its own results."""
    layer = b.node("LSTM", list(node.inputs), dict(node.attrs), outputs=3)
    length, batch, width = b.sizes(first(node))
    size = int(node.attrs["hidden_size"])

    def way(at: _Way) -> tuple[Value, Value]:
        hidden = at.own(operand(node, 5)) or at.zero()
        x = at.turned(first(node))
        before = at.shifted(hidden, at.turned(at.over_time(layer.outputs[0])))
        weight, recurrence = at.own(operand(node, 1)), at.own(operand(node, 2))
        assert weight is not None and recurrence is not None
        rows = b.Reshape(b.Concat(x, before, axis=2), b.whole(length * batch, width + size))
        bias = at.own(operand(node, 3))
        summed = b.Gemm(
            rows, b.Concat(weight, recurrence, axis=1), None if bias is None else b.Add(*at.split(bias, 2, 0)), transB=1
        )
        sums = at.split(b.Reshape(summed, b.whole(length, batch, 4 * size)), 4, 2)
        cell, holes = at.own(operand(node, 6)) or at.zero(), at.holes(operand(node, 7))
        found: list[list[Value]] = [[] for _ in range(5)]
        for i, o, f, g in zip(*(at.steps(each) for each in sums)):
            if holes is not None:
                i, f = (b.Add(each, b.Mul(hole, cell)) for each, hole in ((i, holes[0]), (f, holes[2])))
            i, f, g = b.Sigmoid(i), b.Sigmoid(f), b.Tanh(g)
            cell = b.Add(b.Mul(f, cell), b.Mul(i, g))
            o = b.Sigmoid(o if holes is None else b.Add(o, b.Mul(holes[1], cell)))
            for kept, each in zip(found, (i, o, f, g, cell)):
                kept.append(each)
        *gates, cells = (at.turned(at.stacked(each)) for each in found)
        return cells, b.node("Concat", gates, {"axis": 2}).output

    cells, gates = _each_way(b, node, (length, batch, size), way)
    return [*layer.outputs, _joined(b, cells, 1), _joined(b, gates, 1)]


@made_of("LSTMSlopes", domain=DOMAIN)
def _slopes(b: Backward, node: Node) -> Sequence[Value]:
    cells = operand(node, 2)
    assert cells is not None
    length, _, batch, size = b.sizes(cells)

    def way(at: _Way) -> tuple[Value, Value, Value]:
        gates, kept = (operand(node, k) for k in (1, 2))
        recurrence = at.own(first(node))
        assert gates is not None and kept is not None and recurrence is not None
        cells = at.turned(at.over_time(kept))
        i, o, f, g = at.split(at.turned(at.over_time(gates)), 4, 2)
        holes = at.holes(operand(node, 4))
        earlier = at.shifted(at.own(operand(node, 3)) or at.zero(), cells)
        bent, one = b.Tanh(cells), b.number(1.0, cells)

        def rising(gate: Value) -> Value:
            return b.Mul(gate, b.Sub(one, gate))

        by_hidden_o = at.steps(b.Mul(bent, rising(o)))
        by_hidden_c = at.steps(b.Mul(o, b.Sub(one, b.Mul(bent, bent))))
        by_cell = [
            at.steps(b.Mul(g, rising(i))),
            at.steps(b.Mul(earlier, rising(f))),
            at.steps(b.Mul(i, b.Sub(one, b.Mul(g, g)))),
        ]
        forget = at.steps(f)
        grads = [operand(node, k) for k in (5, 6, 7)]
        given = None if grads[0] is None else at.steps(at.turned(at.over_time(grads[0])))
        hidden, inner = (at.own(grad) or at.zero() for grad in grads[1:])
        found: list[Value] = []
        for t in reversed(range(length)):
            hidden = hidden if given is None else b.Add(given[t], hidden)
            to_o = b.Mul(hidden, by_hidden_o[t])
            inner = b.Add(inner, b.Mul(hidden, by_hidden_c[t]))
            if holes is not None:
                inner = b.Add(inner, b.Mul(to_o, holes[1]))
            to_i, to_f, to_g = (b.Mul(inner, each[t]) for each in by_cell)
            inner = b.Mul(inner, forget[t])
            if holes is not None:
                inner = b.Add(inner, b.Add(b.Mul(to_i, holes[0]), b.Mul(to_f, holes[2])))
            found.append(b.Concat(to_i, to_o, to_f, to_g, axis=1))
            hidden = b.MatMul(found[-1], recurrence)
        return at.turned(at.stacked(found[::-1])), hidden, inner

    slopes, hidden, inner = _each_way(b, node, (length, batch, size), way)
    return [_joined(b, slopes, 1), _joined(b, hidden, 0), _joined(b, inner, 0)]


def _each_way(
    b: Backward, node: Node, sizes: tuple[int, int, int], way: Callable[[_Way], Sequence[Value]]
) -> list[list[Value]]:
    """By result, what each direction gives."""
    if sizes[0] > _LONGEST:
        raise NotSupported(f"gradients of an LSTM's gradient are known for up to {_LONGEST} steps, not {sizes[0]}")
    direction = str(node.attrs.get("direction", "forward"))
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    made = [way(_Way(b, node, sizes, number, back)) for number, back in enumerate(reverse)]
    return [list(parts) for parts in zip(*made)]


def _joined(b: Backward, parts: Sequence[Value], axis: int) -> Value:
    """Results of the directions along an axis of their own."""
    wide = [b.Unsqueeze(part, b.whole(axis)) for part in parts]
    return wide[0] if len(wide) == 1 else b.node("Concat", wide, {"axis": axis}).output


class _Way:
    """One direction. Tensors over all steps are [length, batch, …], in the order in which steps are taken."""

    def __init__(self, b: Backward, node: Node, sizes: tuple[int, int, int], number: int, backwards: bool) -> None:
        self.b, self.number, self.backwards = b, number, backwards
        self.length, self.batch, self.size = sizes
        self.dtype = b.dtype(first(node))

    def zero(self) -> Value:
        return self.b.constant(np.zeros((self.batch, self.size), self.dtype.numpy))

    def own(self, value: Value | None) -> Value | None:
        """This direction's part of a tensor whose first axis they are."""
        return None if value is None else self._part(value, 0)

    def over_time(self, value: Value) -> Value:
        return self._part(value, 1)

    def _part(self, value: Value, axis: int) -> Value:
        b = self.b
        return b.Squeeze(b.Slice(value, b.whole(self.number), b.whole(self.number + 1), b.whole(axis)), b.whole(axis))

    def turned(self, value: Value) -> Value:
        if not self.backwards:
            return value
        b = self.b
        return b.Slice(value, b.whole(-1), b.whole(-self.length - 1), b.whole(0), b.whole(-1))

    def shifted(self, start: Value, values: Value) -> Value:
        """What every step began with."""
        b = self.b
        head = b.Unsqueeze(start, b.whole(0))
        if self.length == 1:
            return head
        return b.Concat(head, b.Slice(values, b.whole(0), b.whole(self.length - 1), b.whole(0)), axis=0)

    def split(self, value: Value, count: int, axis: int) -> Sequence[Value]:
        b = self.b
        sizes = b.whole(*[b.sizes(value)[axis] // count] * count)
        return b.node("Split", [value, sizes], {"axis": axis}, outputs=count).outputs

    def holes(self, value: Value | None) -> Sequence[Value] | None:
        own = self.own(value)
        return None if own is None else self.split(own, 3, 0)

    def steps(self, value: Value) -> list[Value]:
        """A tensor over all steps, step by step."""
        b = self.b
        if self.length == 1:
            return [b.Squeeze(value, b.whole(0))]
        parts = b.node("Split", [value], {"axis": 0, "num_outputs": self.length}, outputs=self.length).outputs
        return [b.Squeeze(part, b.whole(0)) for part in parts]

    def stacked(self, parts: Sequence[Value]) -> Value:
        b = self.b
        wide = [b.Unsqueeze(part, b.whole(0)) for part in parts]
        return wide[0] if len(wide) == 1 else b.node("Concat", wide, {"axis": 0}).output
