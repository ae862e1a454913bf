"""Recurrent layers: RNN, GRU, LSTM.

A cell is a function from one step's projected input and the state to the next state; everything else (directions,
sequence lengths, layouts) is the same for all three and lives in :func:`_unroll`. The input projection of all steps
is one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.accumulate import widened
from ranvier.ops.allocation import checked_shape
from ranvier.ops.costs import dims, traffic
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, Cost, TypeCall, op
from ranvier.records import dataclass

Function = Callable[[Array], Array]
State = tuple[Array, ...]  # the hidden state first
Cell = Callable[[Array, State], State]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


# name in lower case -> (function of x, alpha, beta; default alpha; default beta); None where it takes no such number
_ACTIVATIONS: dict[str, tuple[Callable[[Array, float, float], Any], float | None, float | None]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: _sigmoid(x), None, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: np.where(x >= a, x, 0), 1.0, None),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1.0, None),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), None, None),
    "softplus": (lambda x, a, b: np.logaddexp(x, 0), None, None),
}


def gate_functions(
    name: str,
    given: Sequence[str] | None,
    default: tuple[str, ...],
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    directions: int,
) -> list[list[Function]]:
    """Per direction the layer's activation functions; alphas and betas go in order to those that take one."""
    names = list(given) if given else list(default * directions)
    if len(names) < len(default) * directions:
        raise InvalidValue(f"{name}: needs {len(default)} activations per direction, got {names}", op=name)
    spare_alphas, spare_betas = iter(alphas or ()), iter(betas or ())
    functions: list[Function] = []
    for activation in names[: len(default) * directions]:
        found = _ACTIVATIONS.get(activation.lower())
        if found is None:
            raise InvalidValue(f"{name}: unknown activation {activation!r}", op=name)
        function, alpha, beta = found
        alpha = None if alpha is None else next(spare_alphas, alpha)
        beta = None if beta is None else next(spare_betas, beta)
        functions.append(_bound(function, alpha or 0.0, beta or 0.0))
    return [functions[d * len(default) : (d + 1) * len(default)] for d in range(directions)]


def _bound(function: Callable[[Array, float, float], Any], alpha: float, beta: float) -> Function:
    return lambda x: function(x, alpha, beta)


def limiter(clip: float | None) -> Function:
    """What ``clip`` does to the sums that enter the gates."""
    if not clip:
        return lambda x: x
    bound = abs(clip)
    return lambda x: np.clip(x, -bound, bound)


@dataclass(slots=True)
class _Layer:
    """Checked operands, widened, in layout 0: time first, directions before the batch."""

    name: str
    x: Array  # [time, batch, input]
    w: Array  # [directions, gates * hidden, input]
    r: Array  # [directions, gates * hidden, hidden]
    input_bias: Array  # [directions, gates * hidden]
    recurrent_bias: Array
    lengths: Array | None  # per sequence; None when all are full
    reverse: tuple[bool, ...]  # per direction
    batch_first: bool
    dtype: np.dtype[Any]

    @property
    def directions(self) -> int:
        return len(self.reverse)

    @property
    def hidden(self) -> int:
        return int(self.r.shape[2])

    def state(self, initial: Array | None, what: str) -> Array:
        """An initial state ``[directions, batch, hidden]``; zeros when it is left out."""
        shape = (self.directions, self.x.shape[1], self.hidden)
        if initial is None:
            return np.zeros(shape, self.x.dtype)
        turned = initial.swapaxes(0, 1) if self.batch_first and initial.ndim == 3 else initial
        if turned.shape != shape:
            raise ShapeMismatch(f"{self.name}: {what} must be {list(shape)} (layout 0), got {list(turned.shape)}")
        return widened(turned)


def _layer(
    name: str,
    gates: int,
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    sequence_lens: Array | None,
    direction: str,
    hidden_size: int | None,
    layout: int,
) -> _Layer:
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if reverse is None:
        raise InvalidValue(f"{name}: direction must be forward, reverse or bidirectional, got {direction!r}", op=name)
    if x.ndim != 3 or w.ndim != 3 or r.ndim != 3:
        raise ShapeMismatch(f"{name}: X, W and R need 3 axes, got {list(x.shape)}, {list(w.shape)} and {list(r.shape)}")
    hidden = r.shape[2] if hidden_size is None else hidden_size
    inputs = x.swapaxes(0, 1) if layout else x
    steps, batch, width = inputs.shape
    expected = {
        "W": (w, (len(reverse), gates * hidden, width)),
        "R": (r, (len(reverse), gates * hidden, hidden)),
        "B": (bias, (len(reverse), 2 * gates * hidden)),
        "sequence_lens": (sequence_lens, (batch,)),
    }
    for what, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ShapeMismatch(f"{name}: {what} must be {list(shape)}, got {list(given.shape)}")
    if sequence_lens is not None and ((sequence_lens < 0) | (sequence_lens > steps)).any():
        raise InvalidValue(f"{name}: sequence_lens must lie in 0 to {steps}, got {sequence_lens.tolist()}", op=name)
    full = sequence_lens is None or bool((sequence_lens == steps).all())
    both = np.zeros((len(reverse), 2 * gates * hidden), np.float32) if bias is None else widened(bias)
    return _Layer(
        name,
        widened(inputs),
        widened(w),
        widened(r),
        both[:, : gates * hidden],
        both[:, gates * hidden :],
        None if full else sequence_lens,
        reverse,
        bool(layout),
        x.dtype,
    )


def _unroll(layer: _Layer, folded_bias: Array, cells: Sequence[Cell], initial: Sequence[Array]) -> tuple[Array, ...]:
    """Run each direction's cell over all steps: every hidden state, then the last of every state.

    ``folded_bias`` is what may be added to the input projection up front.
    """
    steps, batch, width = layer.x.shape
    shape = checked_shape((steps, layer.directions, batch, layer.hidden), layer.x.dtype, layer.name)
    outputs = np.zeros(shape, layer.x.dtype)
    finals = [np.empty_like(s) for s in initial]
    for d, backwards in enumerate(layer.reverse):
        order = _reading_order(layer, backwards)
        x = layer.x if order is None else np.take_along_axis(layer.x, order, axis=0)
        rows = x.reshape(steps * batch, width) @ layer.w[d].T + folded_bias[d]
        projected = rows.reshape(steps, batch, rows.shape[1])
        y = np.zeros((steps, batch, layer.hidden), layer.x.dtype)
        state: State = tuple(s[d] for s in initial)
        for t in range(steps):
            pulse(f"step {t}")
            following = cells[d](projected[t], state)
            if layer.lengths is None:
                state = following
                y[t] = state[0]
            else:  # a sequence that has ended keeps its state and yields zeros
                running = (t < layer.lengths)[:, None]
                state = tuple(np.where(running, new, old) for new, old in zip(following, state))
                y[t] = np.where(running, state[0], 0)
        outputs[:, d] = y if order is None else np.take_along_axis(y, order, axis=0)
        for final, last in zip(finals, state):
            # an empty sequence has no last value
            final[d] = last if layer.lengths is None else np.where(layer.lengths[:, None] > 0, last, 0)
    if layer.batch_first:
        outputs = outputs.transpose(2, 0, 1, 3)
        finals = [f.swapaxes(0, 1) for f in finals]
    return tuple(a.astype(layer.dtype, copy=False) for a in (outputs, *finals))


def _reading_order(layer: _Layer, backwards: bool) -> Array | None:
    """The step each sequence reads at each time, ``[time, batch, 1]``; the order is its own inverse."""
    if not backwards:
        return None
    steps, batch, _ = layer.x.shape
    times = np.arange(steps)[:, None, None]
    ends = np.full((1, batch, 1), steps) if layer.lengths is None else layer.lengths.reshape(1, batch, 1)
    return np.where(times < ends, ends - 1 - times, times)


@op("RNN")
def rnn(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    layer = _layer("RNN", 1, x, w, r, bias, sequence_lens, direction, hidden_size, layout)
    functions = gate_functions("RNN", activations, ("Tanh",), activation_alpha, activation_beta, layer.directions)
    cells = [_rnn_cell(r_d, limiter(clip), *f) for r_d, f in zip(layer.r, functions)]
    return _unroll(layer, layer.input_bias + layer.recurrent_bias, cells, [layer.state(initial_h, "initial_h")])


def _rnn_cell(r: Array, limit: Function, f: Function) -> Cell:
    def cell(projected: Array, state: State) -> State:
        return (f(limit(projected + state[0] @ r.T)),)

    return cell


@op("GRU")
def gru(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    layer = _layer("GRU", 3, x, w, r, bias, sequence_lens, direction, hidden_size, layout)
    functions = gate_functions(
        "GRU", activations, ("Sigmoid", "Tanh"), activation_alpha, activation_beta, layer.directions
    )
    gated = layer.recurrent_bias.copy()
    hidden_bias = layer.recurrent_bias[:, 2 * layer.hidden :]
    if linear_before_reset:  # then the reset gate scales the hidden gate's recurrent bias too
        gated[:, 2 * layer.hidden :] = 0
    cells = [
        _gru_cell(r_d, b_d if linear_before_reset else None, limiter(clip), *f)
        for r_d, b_d, f in zip(layer.r, hidden_bias, functions)
    ]
    return _unroll(layer, layer.input_bias + gated, cells, [layer.state(initial_h, "initial_h")])


def _gru_cell(r: Array, reset_bias: Array | None, limit: Function, f: Function, g: Function) -> Cell:
    """Gates in the order update, reset, hidden. ``reset_bias`` is given for the linear-before-reset form."""
    size = r.shape[1]
    r_gates, r_hidden = r[: 2 * size], r[2 * size :]

    def cell(projected: Array, state: State) -> State:
        h = state[0]
        if reset_bias is None:
            gates = f(limit(projected[:, : 2 * size] + h @ r_gates.T))
            update, reset = gates[:, :size], gates[:, size:]
            recurrent = (reset * h) @ r_hidden.T
        else:
            product = h @ r.T
            gates = f(limit(projected[:, : 2 * size] + product[:, : 2 * size]))
            update, reset = gates[:, :size], gates[:, size:]
            recurrent = reset * (product[:, 2 * size :] + reset_bias)
        candidate = g(limit(projected[:, 2 * size :] + recurrent))
        return (candidate + update * (h - candidate),)

    return cell


@op("LSTM")
def lstm(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    peepholes: Array | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    layer = _layer("LSTM", 4, x, w, r, bias, sequence_lens, direction, hidden_size, layout)
    names = ("Sigmoid", "Tanh", "Tanh")
    functions = gate_functions("LSTM", activations, names, activation_alpha, activation_beta, layer.directions)
    shape = (layer.directions, 3 * layer.hidden)
    if peepholes is not None and peepholes.shape != shape:
        raise ShapeMismatch(f"LSTM: P must be {list(shape)}, got {list(peepholes.shape)}")
    limit, coupled = limiter(clip), bool(input_forget)
    cells = [
        _lstm_cell(layer.r[d], None if peepholes is None else widened(peepholes[d]), limit, coupled, *functions[d])
        for d in range(layer.directions)
    ]
    initial = [layer.state(initial_h, "initial_h"), layer.state(initial_c, "initial_c")]
    return _unroll(layer, layer.input_bias + layer.recurrent_bias, cells, initial)


def _lstm_cell(
    r: Array, peepholes: Array | None, limit: Function, coupled: bool, f: Function, g: Function, h: Function
) -> Cell:
    """Gates in the order input, output, forget, cell; peepholes in the order input, output, forget."""
    size = r.shape[1]
    parts = [slice(k * size, (k + 1) * size) for k in range(4)]

    def cell(projected: Array, state: State) -> State:
        hidden, memory = state
        into, out, forget, fresh = ((projected + hidden @ r.T)[:, p] for p in parts)
        if peepholes is not None:
            into = into + peepholes[parts[0]] * memory
            forget = forget + peepholes[parts[2]] * memory
        opened = f(limit(into))
        kept = 1 - opened if coupled else f(limit(forget))
        memory = kept * memory + opened * g(limit(fresh))
        if peepholes is not None:
            out = out + peepholes[parts[1]] * memory
        return f(limit(out)) * h(memory), memory

    return cell


@rnn.cost
@gru.cost
@lstm.cost
def _recurrent_cost(call: TypeCall) -> Cost:
    """Both weights meet every step of every sequence once."""
    x = dims(call.type(0))
    weights = math.prod(dims(call.type(1))) + math.prod(dims(call.type(2)))
    return Cost(2.0 * weights * math.prod(x[:2]), traffic(call))
