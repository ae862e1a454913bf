"""The gradient of LSTM, from its results: all that steps do not wait for is one product for the whole sequence.

Gates of all steps follow from the inputs and from the states that the layer gave out. Only the way back through time is
walked step by step, with one product each; gradients of weights are products over all steps again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, Grads, first, gradient, operand
from ranvier.ops.gradients.recurrent import direction_of


@gradient("LSTM")
def _lstm(b: Backward, node: Node, grads: list[Value | None]) -> Grads:
    x = first(node)
    length = b.sizes(x)[0]
    direction = direction_of(node, length)
    ways = 2 if direction == "bidirectional" else 1
    found: list[list[Value | None]] = []
    for way in range(ways):
        found.append(_Way(b, node, way, backwards=direction == "reverse" or way == 1).grads(grads))
    made: list[Value | None] = []
    for k in range(len(node.inputs)):
        parts = [each[k] for each in found if each[k] is not None]
        if not parts or operand(node, k) is None:
            made.append(None)
        elif k == 0:
            made.append(b.add_all(parts))  # type: ignore[arg-type]
        else:
            wide = [b.Unsqueeze(part, b.whole(0)) for part in parts if part is not None]
            made.append(_joined(b, wide, 0))
    return made


def _joined(b: Backward, parts: Sequence[Value], axis: int) -> Value:
    return parts[0] if len(parts) == 1 else b.node("Concat", list(parts), {"axis": axis}).output


class _Way:
    """One direction. Tensors over all steps are [length, batch, …], in the order in which steps are taken."""

    def __init__(self, b: Backward, node: Node, way: int, *, backwards: bool) -> None:
        self.b, self.node, self.way, self.backwards = b, node, way, backwards
        self.x = first(node)
        self.length, self.batch, self.width = b.sizes(self.x)
        self.size = int(node.attrs["hidden_size"])
        self.dtype: DType = b.dtype(self.x)

    def grads(self, grads: list[Value | None]) -> list[Value | None]:
        """Of x, w, r, bias, lengths, first hidden state, first cell and peepholes."""
        b, size = self.b, self.size
        weight, recurrence = self.own(1), self.own(2)
        assert weight is not None and recurrence is not None
        zero = b.constant(np.zeros((self.batch, size), self.dtype.numpy))
        hidden, cell = self.own(5) or zero, self.own(6) or zero
        x = self.turned(self.x)
        before = self.shifted(hidden, self.turned(self.outputs()))
        # inputs and states side by side, as their weights: one product instead of two
        rows = self.flat(_joined(b, [x, before], 2), self.width + size)
        summed = b.Gemm(rows, _joined(b, [weight, recurrence], 1), self.bias(), transB=1)
        holes = self.split(self.own(7), 3, 0) if operand(self.node, 7) is not None else None
        slopes, last_hidden, last_cell, holes_found = self.back(summed, cell, recurrence, holes, grads)
        flat = self.flat(slopes, 4 * size)
        to_x = b.Reshape(b.MatMul(flat, weight), b.whole(self.length, self.batch, self.width))
        to_bias = b.ReduceSum(flat, b.whole(0), keepdims=0)
        to_weights = b.Gemm(flat, rows, transA=1)
        to_weight, to_recurrence = b.node(
            "Split", [to_weights, b.whole(self.width, size)], {"axis": 1}, outputs=2
        ).outputs
        return [
            self.turned(to_x),
            to_weight,
            to_recurrence,
            _joined(b, [to_bias, to_bias], 0),
            None,
            last_hidden,
            last_cell,
            holes_found,
        ]

    # -- operands ---------------------------------------------------------------------------------------------------

    def own(self, k: int) -> Value | None:
        b, value = self.b, operand(self.node, k)
        if value is None:
            return None
        return b.Squeeze(b.Slice(value, b.whole(self.way), b.whole(self.way + 1), b.whole(0)), b.whole(0))

    def bias(self) -> Value | None:
        value = self.own(3)
        if value is None:
            return None
        left, right = self.split(value, 2, 0)
        return self.b.Add(left, right)

    def outputs(self) -> Value:
        """All hidden states of this direction; the layer is asked again where nobody wanted them."""
        b, node = self.b, self.node
        if node.outputs and node.outputs[0].name:
            whole = node.outputs[0]
        else:
            whole = b.node(node.op, list(node.inputs), dict(node.attrs), outputs=3).outputs[0]
        return self.of_way(whole, 1)

    def of_way(self, value: Value, axis: int) -> Value:
        b = self.b
        return b.Squeeze(b.Slice(value, b.whole(self.way), b.whole(self.way + 1), b.whole(axis)), b.whole(axis))

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
        return _joined(b, [head, b.Slice(values, b.whole(0), b.whole(self.length - 1), b.whole(0))], 0)

    def flat(self, value: Value, width: int) -> Value:
        return self.b.Reshape(value, self.b.whole(self.length * self.batch, width))

    def split(self, value: Value | None, count: int, axis: int) -> Sequence[Value]:
        assert value is not None
        b = self.b
        sizes = b.whole(*[b.sizes(value)[axis] // count] * count)
        return b.node("Split", [value, sizes], {"axis": axis}, outputs=count).outputs

    def steps(self, value: Value) -> list[Value]:
        """A tensor over all steps, step by step."""
        b = self.b
        if self.length == 1:
            return [b.Squeeze(value, b.whole(0))]
        parts = b.node("Split", [value], {"axis": 0, "num_outputs": self.length}, outputs=self.length).outputs
        return [b.Squeeze(part, b.whole(0)) for part in parts]

    def stacked(self, parts: Sequence[Value]) -> Value:
        return _joined(self.b, [self.b.Unsqueeze(part, self.b.whole(0)) for part in parts], 0)

    # -- through time -----------------------------------------------------------------------------------------------

    def back(
        self, summed: Value, cell: Value, recurrence: Value, holes: Sequence[Value] | None, grads: list[Value | None]
    ) -> tuple[Value, Value, Value, Value | None]:
        """Slopes of all gates, of the first states, and of the peepholes."""
        b, shape = self.b, self.b.whole(self.length, self.batch, 4 * self.size)
        first_i, first_o, first_f, first_g = self.split(b.Reshape(summed, shape), 4, 2)
        g = b.Tanh(first_g)
        if holes is None:
            i, o, f = (b.Sigmoid(each) for each in (first_i, first_o, first_f))
            cells = self.cells(cell, self.steps(f), self.steps(b.Mul(i, g)))
        else:
            i, o, f, cells = self.with_holes(cell, [first_i, first_o, first_f, g], holes)
        one = b.number(1.0, summed)
        earlier = self.shifted(cell, cells)
        bent = b.Tanh(cells)

        def rising(gate: Value) -> Value:
            return b.Mul(gate, b.Sub(one, gate))

        by_hidden_o = self.steps(b.Mul(bent, rising(o)))
        by_hidden_c = self.steps(b.Mul(o, b.Sub(one, b.Mul(bent, bent))))
        by_cell = [
            self.steps(b.Mul(g, rising(i))),
            self.steps(b.Mul(earlier, rising(f))),
            self.steps(b.Mul(i, b.Sub(one, b.Mul(g, g)))),
        ]
        forget = self.steps(f)
        given = [None] * self.length if grads[0] is None else self.steps(self.turned(self.of_way(grads[0], 1)))
        hidden, inner = (self.last(grads, k) for k in (1, 2))
        found: list[Value] = []
        for t in reversed(range(self.length)):
            ways = [each for each in (given[t], hidden) if each is not None]
            hidden = b.add_all(ways) if ways else b.zeros(cell)
            to_o = b.Mul(hidden, by_hidden_o[t])
            through = b.Mul(hidden, by_hidden_c[t])
            inner = through if inner is None else b.Add(inner, through)
            if holes is not None:
                inner = b.Add(inner, b.Mul(to_o, holes[1]))
            to_i, to_f, to_g = (b.Mul(inner, each[t]) for each in by_cell)
            slope = _joined(b, [to_i, to_o, to_f, to_g], 1)
            inner = b.Mul(inner, forget[t])
            if holes is not None:
                inner = b.Add(inner, b.Add(b.Mul(to_i, holes[0]), b.Mul(to_f, holes[2])))
            hidden = b.MatMul(slope, recurrence)
            found.append(slope)
        assert hidden is not None and inner is not None
        slopes = self.stacked(found[::-1])
        return slopes, hidden, inner, None if holes is None else self.to_holes(slopes, cells, earlier)

    def cells(self, cell: Value, forget: list[Value], new: list[Value]) -> Value:
        found = []
        for f, added in zip(forget, new):
            cell = self.b.Add(self.b.Mul(f, cell), added)
            found.append(cell)
        return self.stacked(found)

    def with_holes(self, cell: Value, sums: list[Value], holes: Sequence[Value]) -> tuple[Value, Value, Value, Value]:
        """Gates that look at cells too."""
        b = self.b
        gates: list[list[Value]] = [[], [], []]
        cells = []
        for i, o, f, g in zip(*(self.steps(each) for each in sums)):
            i, f = (b.Sigmoid(b.Add(each, b.Mul(hole, cell))) for each, hole in ((i, holes[0]), (f, holes[2])))
            cell = b.Add(b.Mul(f, cell), b.Mul(i, g))
            o = b.Sigmoid(b.Add(o, b.Mul(holes[1], cell)))
            for kept, each in zip(gates, (i, o, f)):
                kept.append(each)
            cells.append(cell)
        i, o, f = (self.stacked(each) for each in gates)
        return i, o, f, self.stacked(cells)

    def last(self, grads: list[Value | None], k: int) -> Value | None:
        grad = grads[k] if k < len(grads) else None
        return None if grad is None else self.of_way(grad, 0)

    def to_holes(self, slopes: Value, cells: Value, earlier: Value) -> Value:
        b = self.b
        to_i, to_o, to_f, _ = self.split(slopes, 4, 2)
        parts = [b.Mul(to_i, earlier), b.Mul(to_o, cells), b.Mul(to_f, earlier)]
        return _joined(b, [b.ReduceSum(part, b.whole(0, 1), keepdims=0) for part in parts], 0)
