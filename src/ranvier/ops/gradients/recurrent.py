"""Recurrent layers step by step, as the plain operators of one step repeated: for sequences of known length.

RNN and GRU are derived by this in all their forms; LSTM where its own rule does not know the form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Node, Value
from ranvier.ops.gradients.base import Backward, attribute, first, operand
from ranvier.ops.gradients.parts import made_of

_LONGEST = 512
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 4, 5, 6, 7  # operands
State = tuple[Value, ...]  # the hidden state first
Step = Callable[[Value, State], State]  # the input's part of the gates and the state, to the next state
Function = Callable[[Value], Value]


def direction_of(node: Node, length: int) -> str:
    """Which way a recurrent layer runs; NotSupported where it runs too long to be written out."""
    if length > _LONGEST:
        raise NotSupported(f"the gradient of {node.op} is known for up to {_LONGEST} steps; this one has {length}")
    return _text(attribute(node, "direction", "forward"))


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else str(found)


def _is_unusual(node: Node) -> bool:
    """Whether a layer is anything but gates with their default functions, time first, over sequences of one length."""
    given = [_text(name).lower() for name in attribute(node, "activations", None) or ()]
    default = _DEFAULTS[node.op]
    own = bool(given) and tuple(given) != default * (len(given) // len(default))
    options = any(attribute(node, name, 0) for name in ("clip", "input_forget", "layout"))
    return own or options or operand(node, _LENGTHS) is not None


@made_of("RNN", "GRU")
@made_of("LSTM", when=_is_unusual)
def _recurrent(b: Backward, node: Node) -> Sequence[Value]:
    if attribute(node, "layout", 0):
        return _time_first(b, node)
    length = b.sizes(first(node))[0]
    direction = direction_of(node, length)
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    made = [_direction(b, node, way, backwards) for way, backwards in enumerate(reverse)]
    rows = [_stacked(b, [hidden[t] for hidden, _ in made]) for t in range(length)]
    lasts = [_stacked(b, list(each)) for each in zip(*(last for _, last in made))]
    return [_stacked(b, rows), *lasts]


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


def _direction(b: Backward, node: Node, way: int, backwards: bool) -> tuple[list[Value], State]:
    """The hidden state after each step, as the steps lie, and the last of every state."""

    def own(k: int) -> Value | None:
        value = operand(node, k)
        return (
            None if value is None else b.Squeeze(b.Slice(value, b.whole(way), b.whole(way + 1), b.whole(0)), b.whole(0))
        )

    x, lengths = first(node), operand(node, _LENGTHS)
    weight, recurrence, bias = own(1), own(2), own(3)
    assert weight is not None and recurrence is not None
    _, batch, _ = b.sizes(x)
    size, gates = int(node.attrs["hidden_size"]), _GATES[node.op]
    zero = b.constant(np.zeros((batch, size), b.dtype(x).numpy))
    state: State = (own(_HIDDEN) or zero, own(_CELL) or zero) if node.op == "LSTM" else (own(_HIDDEN) or zero,)
    left = right = None
    if bias is not None:
        left, right = _split(b, bias, 0, gates * size, gates * size)
    layer = _Layer(b, node, way, size)
    if node.op == "LSTM":
        step = layer.lstm(recurrence, right, own(_PEEPHOLES))
    else:
        step = (layer.gru if node.op == "GRU" else layer.rnn)(recurrence, right)
    found: list[Value] = []
    for t, piece in enumerate(_steps(b, x, lengths, backwards)):
        after = step(b.Gemm(piece, weight, left, transB=1), state)
        if lengths is None:
            state = after
            found.append(state[0])
        else:  # a sequence that has ended keeps its state and gives zeros
            running = _longer_than(b, lengths, t)
            state = tuple(b.Where(running, new, old) for new, old in zip(after, state))
            found.append(b.where(running, state[0]))
    if lengths is None:
        return found[::-1] if backwards else found, state
    lasts = tuple(b.where(_longer_than(b, lengths, 0), last) for last in state)
    if not backwards:
        return found, lasts
    turned = b.ReverseSequence(_stacked(b, found), b.cast(lengths, DType.int64), batch_axis=1, time_axis=0)
    return _pieces(b, turned), lasts


def _longer_than(b: Backward, lengths: Value, t: int) -> Value:
    return b.Unsqueeze(b.Greater(lengths, b.constant(np.asarray(t, b.dtype(lengths).numpy))), b.whole(1))


def _pieces(b: Backward, x: Value) -> list[Value]:
    """What lies along the first axis, one by one."""
    length = b.sizes(x)[0]
    parts = b.node("Split", [x], {"axis": 0, "num_outputs": length}, outputs=length).outputs if length > 1 else [x]
    return [b.Squeeze(part, b.whole(0)) for part in parts]


def _steps(b: Backward, x: Value, lengths: Value | None, backwards: bool) -> list[Value]:
    """The input of each step, in the order in which they are taken."""
    if backwards and lengths is not None:
        return _pieces(b, b.ReverseSequence(x, b.cast(lengths, DType.int64), batch_axis=1, time_axis=0))
    pieces = _pieces(b, x)
    return pieces[::-1] if backwards else pieces


# -- functions of gates -----------------------------------------------------------------------------------------------


def _functions(b: Backward, node: Node, way: int) -> list[Function]:
    """A direction's activations; alphas and betas go in order to those that take one, over all directions."""
    default = _DEFAULTS[node.op]
    names = [_text(name).lower() for name in attribute(node, "activations", None) or default * (way + 1)]
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


class _Layer:
    """One direction's cells."""

    def __init__(self, b: Backward, node: Node, way: int, size: int) -> None:
        self.b, self.node, self.size = b, node, size
        self.functions = _functions(b, node, way)
        self.clip = abs(float(attribute(node, "clip", 0.0) or 0.0))

    def limited(self, x: Value) -> Value:
        """What ``clip`` does to the sums that enter the gates."""
        return self.b.Clip(x, self.b.number(-self.clip, x), self.b.number(self.clip, x)) if self.clip else x

    def rnn(self, r: Value, bias: Value | None) -> Step:
        b, (f,) = self.b, self.functions

        def step(x: Value, state: State) -> State:
            return (f(self.limited(b.Add(x, b.Gemm(state[0], r, bias, transB=1)))),)

        return step

    def gru(self, r: Value, bias: Value | None) -> Step:
        b, size, (f, g) = self.b, self.size, self.functions
        after = bool(attribute(self.node, "linear_before_reset", 0))
        parts = _split(b, r, 0, 2 * size, size)
        biases: Sequence[Value | None] = (None, None) if bias is None else _split(b, bias, 0, 2 * size, size)

        def step(x: Value, state: State) -> State:
            (h,) = state
            first_two, last = _split(b, x, 1, 2 * size, size)
            gates = f(self.limited(b.Add(first_two, b.Gemm(h, parts[0], biases[0], transB=1))))
            z, reset = _split(b, gates, 1, size, size)
            if after:
                inner = b.Mul(reset, b.Gemm(h, parts[1], biases[1], transB=1))
            else:
                inner = b.Gemm(b.Mul(reset, h), parts[1], biases[1], transB=1)
            new = g(self.limited(b.Add(last, inner)))
            return (b.Add(b.Mul(b.Sub(b.number(1.0, z), z), new), b.Mul(z, h)),)

        return step

    def lstm(self, r: Value, bias: Value | None, peepholes: Value | None) -> Step:
        b, size, (f, g, h) = self.b, self.size, self.functions
        holes = None if peepholes is None else _split(b, peepholes, 0, size, size, size)
        coupled = bool(attribute(self.node, "input_forget", 0))

        def step(x: Value, state: State) -> State:
            hidden, memory = state
            sums = b.Add(x, b.Gemm(hidden, r, bias, transB=1))
            into, out, forget, fresh = _split(b, sums, 1, size, size, size, size)
            if holes is not None:
                into, forget = b.Add(into, b.Mul(holes[0], memory)), b.Add(forget, b.Mul(holes[2], memory))
            opened = f(self.limited(into))
            kept = b.Sub(b.number(1.0, opened), opened) if coupled else f(self.limited(forget))
            memory = b.Add(b.Mul(kept, memory), b.Mul(opened, g(self.limited(fresh))))
            if holes is not None:
                out = b.Add(out, b.Mul(holes[1], memory))
            return b.Mul(f(self.limited(out)), h(memory)), memory

        return step
