"""RNN and GRU step by step, as the plain operators of one step repeated: for sequences of known length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, first, operand
from ranvier.ops.gradients.parts import made_of

_LONGEST = 512
State = tuple[Value, ...]
Step = Callable[[Value, State], State]  # the input's part of the gates and the state, to the next state


def direction_of(node: Node, length: int) -> str:
    """Which way a recurrent layer runs; NotSupported for those whose gradient is not known."""
    if length > _LONGEST:
        raise NotSupported(f"the gradient of {node.op} is known for up to {_LONGEST} steps; this one has {length}")
    if attribute(node, "layout", 0) or operand(node, 4) is not None:
        raise NotSupported(f"the gradient of {node.op} with layout=1 or sequence_lens is not known")
    if attribute(node, "clip", None) or attribute(node, "input_forget", 0) or attribute(node, "activations", None):
        raise NotSupported(f"the gradient of {node.op} with activations of one's own, or clip, is not known")
    direction = attribute(node, "direction", "forward")
    return direction.decode() if isinstance(direction, bytes) else str(direction)


@made_of("RNN", "GRU")
def _recurrent(b: Backward, node: Node) -> Sequence[Value]:
    x = first(node)
    length, batch, _ = b.sizes(x)
    direction = direction_of(node, length)
    size = int(node.attrs["hidden_size"])
    ways = 2 if direction == "bidirectional" else 1
    steps = b.node("Split", [x], {"axis": 0, "num_outputs": length}, outputs=length).outputs if length > 1 else [x]
    inputs = [b.Squeeze(each, b.whole(0)) for each in steps]
    results: list[list[Value]] = []
    lasts: list[State] = []
    for way in range(ways):
        backwards = direction == "reverse" or way == 1
        hidden, last = _direction(b, node, inputs[::-1] if backwards else inputs, way, size, batch)
        results.append(hidden[::-1] if backwards else hidden)
        lasts.append(last)
    rows = [_stacked(b, [results[way][t] for way in range(ways)]) for t in range(length)]
    whole = _stacked(b, rows)
    return [whole, _stacked(b, [last[0] for last in lasts])]


def _stacked(b: Backward, parts: Sequence[Value]) -> Value:
    """Parts along a new first axis."""
    wide = [b.Unsqueeze(part, b.whole(0)) for part in parts]
    return wide[0] if len(wide) == 1 else b.node("Concat", wide, {"axis": 0}).output


def _direction(
    b: Backward, node: Node, inputs: Sequence[Value], way: int, size: int, batch: int
) -> tuple[list[Value], State]:
    def own(k: int) -> Value | None:
        value = operand(node, k)
        return (
            None if value is None else b.Squeeze(b.Slice(value, b.whole(way), b.whole(way + 1), b.whole(0)), b.whole(0))
        )

    weight, recurrence, bias = own(1), own(2), own(3)
    assert weight is not None and recurrence is not None
    gates = {"RNN": 1, "GRU": 3}[node.op]
    zero = b.constant(np.zeros((batch, size), b.dtype(first(node)).numpy))
    state: State = (own(5) or zero,)
    left = right = None
    if bias is not None:
        left, right = b.node("Split", [bias, b.whole(gates * size, gates * size)], {"axis": 0}, outputs=2).outputs
    step = _STEPS[node.op](b, node, recurrence, right, size)
    found = []
    for x in inputs:
        state = step(b.Gemm(x, weight, left, transB=1), state)
        found.append(state[0])
    return found, state


def _gates(b: Backward, joined: Value, size: int, count: int) -> Sequence[Value]:
    return b.node("Split", [joined, b.whole(*[size] * count)], {"axis": 1}, outputs=count).outputs


def _rnn(b: Backward, node: Node, r: Value, bias: Value | None, size: int) -> Step:
    def step(x: Value, state: State) -> State:
        return (b.Tanh(b.Add(x, b.Gemm(state[0], r, bias, transB=1))),)

    return step


def _gru(b: Backward, node: Node, r: Value, bias: Value | None, size: int) -> Step:
    after = bool(attribute(node, "linear_before_reset", 0))
    parts = b.node("Split", [r, b.whole(2 * size, size)], {"axis": 0}, outputs=2).outputs
    biases: Sequence[Value | None] = (None, None)
    if bias is not None:
        biases = b.node("Split", [bias, b.whole(2 * size, size)], {"axis": 0}, outputs=2).outputs

    def step(x: Value, state: State) -> State:
        (h,) = state
        first_two, last = b.node("Split", [x, b.whole(2 * size, size)], {"axis": 1}, outputs=2).outputs
        z, reset = _gates(b, b.Sigmoid(b.Add(first_two, b.Gemm(h, parts[0], biases[0], transB=1))), size, 2)
        if after:
            inner = b.Mul(reset, b.Gemm(h, parts[1], biases[1], transB=1))
        else:
            inner = b.Gemm(b.Mul(reset, h), parts[1], biases[1], transB=1)
        new = b.Tanh(b.Add(last, inner))
        return (b.Add(b.Mul(b.Sub(b.number(1.0, z), z), new), b.Mul(z, h)),)

    return step


_STEPS = {"RNN": _rnn, "GRU": _gru}
