"""Recurrent layers step by step, as the plain operators of one step: repeated for short sequences, else in a Scan.

RNN and GRU are derived by this in all their forms; LSTM where its own rule does not know the form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.attributes import text_of
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.gradients.base import Backward, attribute, first, operand
from ranvier.ops.gradients.parts import made_of

_LONGEST = 512  # steps that are written out one by one
_SCAN = 21  # version
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 4, 5, 6, 7  # operands
State = tuple[Value, ...]  # the hidden state first
Step = Callable[[Value, State], State]  # the input's part of the gates and the state, to the next state
Function = Callable[[Value], Value]


def direction_of(node: Node) -> str:
    """Which way a recurrent layer runs."""
    return text_of(attribute(node, "direction", "forward"))


def _is_unusual(node: Node) -> bool:
    """Whether a layer is anything but gates with their default functions, time first, over sequences of one length."""
    given = [text_of(name).lower() for name in attribute(node, "activations", None) or ()]
    default = _DEFAULTS[node.op]
    own = bool(given) and tuple(given) != default * (len(given) // len(default))
    options = any(attribute(node, name, 0) for name in ("clip", "input_forget", "layout"))
    return own or options or operand(node, _LENGTHS) is not None


@made_of("RNN", "GRU")
@made_of("LSTM", when=_is_unusual)
def _recurrent(b: Backward, node: Node) -> Sequence[Value]:
    if attribute(node, "layout", 0):
        return _time_first(b, node)
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction_of(node)]
    made = [_direction(b, node, way, backwards) for way, backwards in enumerate(reverse)]
    wide = [b.Unsqueeze(hidden, b.whole(1)) for hidden, _ in made]
    lasts = [_stacked(b, list(each)) for each in zip(*(last for _, last in made))]
    return [wide[0] if len(wide) == 1 else b.node("Concat", wide, {"axis": 1}).output, *lasts]


def _time_first(b: Backward, node: Node) -> Sequence[Value]:
    """A layer with the batch first, by one with the time first."""
    turned = list(node.inputs)
    for k in (0, _HIDDEN, _CELL):
        value = operand(node, k)
        if value is not None:
            turned[k] = b.Transpose(value, perm=[1, 0, 2])
    attrs = {key: value for key, value in node.attrs.items() if key != "layout"}
    made = b.node(node.op, turned, attrs, outputs=len(node.outputs)).outputs
    return [b.Transpose(y, perm=[1, 0, 2] if k else [2, 0, 1, 3]) for k, y in enumerate(made)]


def _stacked(b: Backward, parts: Sequence[Value]) -> Value:
    """Parts along a new first axis."""
    wide = [b.Unsqueeze(part, b.whole(0)) for part in parts]
    return wide[0] if len(wide) == 1 else b.node("Concat", wide, {"axis": 0}).output


def _split(b: Backward, x: Value, axis: int, *sizes: int) -> Sequence[Value]:
    return b.node("Split", [x, b.whole(*sizes)], {"axis": axis}, outputs=len(sizes)).outputs


def _direction(b: Backward, node: Node, way: int, backwards: bool) -> tuple[Value, State]:
    """The hidden state after each step, ``[length, batch, size]``, and the last of every state."""

    def own(k: int) -> Value | None:
        value = operand(node, k)
        return (
            None if value is None else b.Squeeze(b.Slice(value, b.whole(way), b.whole(way + 1), b.whole(0)), b.whole(0))
        )

    x, lengths = first(node), operand(node, _LENGTHS)
    weight, recurrence, bias = own(1), own(2), own(3)
    assert weight is not None and recurrence is not None
    length, batch, width = b.sizes(x)
    size, gates = int(node.attrs["hidden_size"]), _GATES[node.op]
    zero = b.constant(np.zeros((batch, size), b.dtype(x).numpy))
    state: State = (own(_HIDDEN) or zero, own(_CELL) or zero) if node.op == "LSTM" else (own(_HIDDEN) or zero,)
    left, right = (None, None) if bias is None else _split(b, bias, 0, gates * size, gates * size)
    turned = backwards and lengths is not None  # each sequence by itself
    entering = _turned(b, x, lengths) if turned else x
    rows = b.Gemm(b.Reshape(entering, b.whole(length * batch, width)), weight, left, transB=1)
    projected = b.Reshape(rows, b.whole(length, batch, gates * size))
    cells = _Cells(b, node, way, size, recurrence, right, own(_PEEPHOLES) if node.op == "LSTM" else None)
    walk = _scanned if length > _LONGEST else _unrolled
    hidden, lasts = walk(b, cells, projected, state, lengths, backwards and not turned)
    if lengths is not None:
        lasts = tuple(b.where(_longer_than(b, lengths, b.whole(0)), last) for last in lasts)
    return _turned(b, hidden, lengths) if turned else hidden, lasts


def _turned(b: Backward, x: Value, lengths: Value | None) -> Value:
    assert lengths is not None
    return b.ReverseSequence(x, b.cast(lengths, DType.int64), batch_axis=1, time_axis=0)


def _longer_than(b: Backward, lengths: Value, t: Value) -> Value:
    return b.Unsqueeze(b.Greater(b.cast(lengths, DType.int64), t), b.whole(1))


def _after(b: Backward, step: Step, x: Value, state: State, lengths: Value | None, t: Value) -> tuple[Value, State]:
    """What a step gives, and the states after it. A sequence that has ended keeps its state and gives zeros."""
    after = step(x, state)
    if lengths is None:
        return after[0], after
    running = _longer_than(b, lengths, t)
    state = tuple(b.Where(running, new, old) for new, old in zip(after, state))
    return b.where(running, state[0]), state


def _unrolled(
    b: Backward, cells: _Cells, projected: Value, state: State, lengths: Value | None, reverse: bool
) -> tuple[Value, State]:
    length = b.sizes(projected)[0]
    parts: Sequence[Value] = [projected]
    if length > 1:
        parts = b.node("Split", [projected], {"axis": 0, "num_outputs": length}, outputs=length).outputs
    pieces = [b.Squeeze(part, b.whole(0)) for part in parts]
    step = cells.step(b)
    found: list[Value] = []
    for t, piece in enumerate(pieces[::-1] if reverse else pieces):
        hidden, state = _after(b, step, piece, state, lengths, b.whole(t))
        found.append(hidden)
    return _stacked(b, found[::-1] if reverse else found), state


def _scanned(
    b: Backward, cells: _Cells, projected: Value, state: State, lengths: Value | None, reverse: bool
) -> tuple[Value, State]:
    """As unrolled, but by a Scan: graphs do not grow with sequences."""
    length, batch, width = b.sizes(projected)
    kind = b.dtype(projected)
    body = Graph("step", opsets=b.graph.opsets)
    states = tuple(body.add_input(f"state{k}", TensorType(kind, b.sizes(each))) for k, each in enumerate(state))
    piece = body.add_input("piece", TensorType(kind, (batch, width)))
    t = body.add_input("t", TensorType(DType.int64, ()))
    inner = Backward(body)
    hidden, after = _after(inner, cells.step(inner), piece, states, lengths, t)
    body.outputs = [*(inner.Identity(each) for each in after), inner.Identity(hidden)]
    results = [Value("", TensorType(kind, b.sizes(each))) for each in state]
    rows = Value("", TensorType(kind, (length, *b.sizes(state[0]))))
    numbers = b.constant(np.arange(length, dtype=np.int64))
    directions = [int(reverse)]
    attrs = {"body": body, "num_scan_inputs": 2, "scan_input_directions": [*directions, 0],
             "scan_output_directions": directions}  # fmt: skip
    b.graph.add(
        "Scan", [*state, projected, numbers], attrs, [*results, rows], version=_SCAN, origin="gradient", before=b.before
    )
    return rows, tuple(results)


# -- functions of gates -----------------------------------------------------------------------------------------------


def _functions(b: Backward, node: Node, way: int) -> list[Function]:
    """A direction's activations; alphas and betas go in order to those that take one, over all directions."""
    default = _DEFAULTS[node.op]
    names = [text_of(name).lower() for name in attribute(node, "activations", None) or default * (way + 1)]
    alphas, betas = (iter(attribute(node, f"activation_{kind}", None) or ()) for kind in ("alpha", "beta"))
    made = [_function(b, name, alphas, betas) for name in names]
    return made[way * len(default) : (way + 1) * len(default)]


def _function(b: Backward, name: str, alphas: Iterator[float], betas: Iterator[float]) -> Function:
    plain = {"relu": b.Relu, "tanh": b.Tanh, "sigmoid": b.Sigmoid, "softsign": b.Softsign, "softplus": b.Softplus}
    if name in plain:
        return plain[name]
    one = {"leakyrelu": ("LeakyRelu", 0.01), "thresholdedrelu": ("ThresholdedRelu", 1.0), "elu": ("Elu", 1.0)}
    if name in one:
        op, default = one[name]
        slope = float(next(alphas, default))
        return lambda x: b.node(op, [x], {"alpha": slope}).output
    two = {"affine": (1.0, 0.0), "scaledtanh": (1.0, 1.0), "hardsigmoid": (0.2, 0.5)}
    if name not in two:
        raise NotSupported(f"{name!r} is not an activation of recurrent layers")
    alpha, beta = float(next(alphas, two[name][0])), float(next(betas, two[name][1]))
    if name == "hardsigmoid":
        return lambda x: b.HardSigmoid(x, alpha=alpha, beta=beta)
    if name == "affine":
        return lambda x: b.Add(b.Mul(x, b.number(alpha, x)), b.number(beta, x))
    return lambda x: b.Mul(b.Tanh(b.Mul(x, b.number(beta, x))), b.number(alpha, x))


class _Cells:
    """One direction's cells. What steps have in common is made once, outside of them."""

    def __init__(
        self,
        b: Backward,
        node: Node,
        way: int,
        size: int,
        recurrence: Value,
        bias: Value | None,
        peepholes: Value | None,
    ) -> None:
        self.node, self.way, self.size = node, way, size
        self.clip = abs(float(attribute(node, "clip", 0.0) or 0.0))
        self.recurrence, self.bias = recurrence, bias
        self.holes = None if peepholes is None else _split(b, peepholes, 0, size, size, size)
        self.parts: Sequence[Value] = ()
        self.biases: Sequence[Value | None] = (None, None)
        if node.op == "GRU":
            self.parts = _split(b, recurrence, 0, 2 * size, size)
            self.biases = (None, None) if bias is None else _split(b, bias, 0, 2 * size, size)

    def step(self, b: Backward) -> Step:
        """A step made by ``b``, which may be at work in the body of a Scan."""
        makers = {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}
        functions = _functions(b, self.node, self.way)

        def limited(x: Value) -> Value:
            """What ``clip`` does to the sums that enter the gates."""
            return b.Clip(x, b.number(-self.clip, x), b.number(self.clip, x)) if self.clip else x

        entered = [lambda x, f=f: f(limited(x)) for f in functions]
        return makers[self.node.op](b, entered, functions[-1])

    def _rnn(self, b: Backward, gates: Sequence[Function], last: Function) -> Step:
        (f,) = gates

        def step(x: Value, state: State) -> State:
            return (f(b.Add(x, b.Gemm(state[0], self.recurrence, self.bias, transB=1))),)

        return step

    def _gru(self, b: Backward, gates: Sequence[Function], last: Function) -> Step:
        (f, g), size = gates, self.size
        after = bool(attribute(self.node, "linear_before_reset", 0))

        def step(x: Value, state: State) -> State:
            (h,) = state
            first_two, third = _split(b, x, 1, 2 * size, size)
            opened = f(b.Add(first_two, b.Gemm(h, self.parts[0], self.biases[0], transB=1)))
            z, reset = _split(b, opened, 1, size, size)
            if after:
                inner = b.Mul(reset, b.Gemm(h, self.parts[1], self.biases[1], transB=1))
            else:
                inner = b.Gemm(b.Mul(reset, h), self.parts[1], self.biases[1], transB=1)
            new = g(b.Add(third, inner))
            return (b.Add(b.Mul(b.Sub(b.number(1.0, z), z), new), b.Mul(z, h)),)

        return step

    def _lstm(self, b: Backward, gates: Sequence[Function], last: Function) -> Step:
        (f, g, _), size, holes = gates, self.size, self.holes
        coupled = bool(attribute(self.node, "input_forget", 0))

        def step(x: Value, state: State) -> State:
            hidden, memory = state
            sums = b.Add(x, b.Gemm(hidden, self.recurrence, self.bias, transB=1))
            into, out, forget, fresh = _split(b, sums, 1, size, size, size, size)
            if holes is not None:
                into, forget = b.Add(into, b.Mul(holes[0], memory)), b.Add(forget, b.Mul(holes[2], memory))
            opened = f(into)
            kept = b.Sub(b.number(1.0, opened), opened) if coupled else f(forget)
            memory = b.Add(b.Mul(kept, memory), b.Mul(opened, g(fresh)))
            if holes is not None:
                out = b.Add(out, b.Mul(holes[1], memory))
            return b.Mul(f(out), last(memory)), memory  # what leaves the memory is not clipped

        return step
