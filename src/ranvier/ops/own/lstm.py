"""``ranvier::LSTMTraining`` and ``ranvier::LSTMSlopes``: an LSTM that keeps what its gradient needs, and the way back.

``LSTMTraining`` takes what LSTM takes, in layout 0, with whole sequences and the usual activations. After LSTM's three
results it gives the cells of all steps, [steps, ways, batch, size], and all gates after their functions, in LSTM's
order (input, output, forget, cell), [steps, ways, batch, 4 · size].

``LSTMSlopes`` walks back through time. From the gradients of LSTM's results, any of which may be left out, it gives
those of the sums that entered the gates, shaped as the gates, and of the first states. Everything else is products of
these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.graph.types import TensorType, Type
from ranvier.ops.accumulate import widened
from ranvier.ops.costs import dims, traffic
from ranvier.ops.pulse import pulse
from ranvier.ops.registry import Array, Cost, TypeCall, op

DOMAIN = "ranvier"
_REVERSE = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _ways(name: str, direction: str) -> tuple[bool, ...]:
    if direction not in _REVERSE:
        raise InvalidValue(f"{name}: direction must be forward, reverse or bidirectional, got {direction!r}", op=name)
    return _REVERSE[direction]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


@op("LSTMTraining", domain=DOMAIN)
def lstm_training(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    peepholes: Array | None = None,
    *,
    hidden_size: int,
    direction: str = "forward",
) -> tuple[Array, ...]:
    reverse, size = _ways("LSTMTraining", direction), hidden_size
    if x.ndim != 3 or w.shape != (len(reverse), 4 * size, x.shape[2]) or r.shape != (len(reverse), 4 * size, size):
        raise ShapeMismatch(f"LSTMTraining: X, W and R are {list(x.shape)}, {list(w.shape)} and {list(r.shape)}")
    if sequence_lens is not None:
        raise InvalidValue("LSTMTraining: sequences are whole", op="LSTMTraining")
    steps, batch, _ = x.shape
    wide = widened(x)
    y, cells = (np.empty((steps, len(reverse), batch, size), wide.dtype) for _ in range(2))
    gates = np.empty((steps, len(reverse), batch, 4 * size), wide.dtype)
    last = [np.zeros((len(reverse), batch, size), wide.dtype) for _ in range(2)]
    for d, backwards in enumerate(reverse):
        projected = wide @ widened(w[d]).T
        if bias is not None:
            projected = projected + widened(bias[d, : 4 * size]) + widened(bias[d, 4 * size :])
        holes = np.zeros(3 * size, wide.dtype) if peepholes is None else widened(peepholes[d])
        hole_i, hole_o, hole_f = np.split(holes, 3)
        recurrent = widened(r[d]).T
        h, c = (last[k][d] if s is None else widened(s[d]) for k, s in enumerate((initial_h, initial_c)))
        for t in reversed(range(steps)) if backwards else range(steps):
            pulse(f"step {t}")
            i, o, f, g = np.split(projected[t] + h @ recurrent, 4, axis=1)
            i, f, g = _sigmoid(i + hole_i * c), _sigmoid(f + hole_f * c), np.tanh(g)
            c = f * c + i * g
            o = _sigmoid(o + hole_o * c)
            h = o * np.tanh(c)
            y[t, d], cells[t, d], gates[t, d] = h, c, np.concatenate([i, o, f, g], axis=1)
        last[0][d], last[1][d] = h, c
    return tuple(a.astype(x.dtype, copy=False) for a in (y, *last, cells, gates))


@op("LSTMSlopes", domain=DOMAIN)
def lstm_slopes(
    r: Array,
    gates: Array,
    cells: Array,
    initial_c: Array | None = None,
    peepholes: Array | None = None,
    grad_y: Array | None = None,
    grad_h: Array | None = None,
    grad_c: Array | None = None,
    *,
    direction: str = "forward",
) -> tuple[Array, ...]:
    reverse = _ways("LSTMSlopes", direction)
    if cells.ndim != 4 or gates.shape != (*cells.shape[:3], 4 * cells.shape[3]) or cells.shape[1] != len(reverse):
        raise ShapeMismatch(f"LSTMSlopes: gates and cells are {list(gates.shape)} and {list(cells.shape)}")
    steps, _, batch, size = cells.shape
    wide, inner_cells = widened(gates), widened(cells)
    slopes = np.empty(gates.shape, wide.dtype)
    to_first = [np.empty((len(reverse), batch, size), wide.dtype) for _ in range(2)]
    for d, backwards in enumerate(reverse):
        holes = np.zeros(3 * size, wide.dtype) if peepholes is None else widened(peepholes[d])
        hole_i, hole_o, hole_f = np.split(holes, 3)
        nothing = np.zeros((batch, size), wide.dtype)
        start = nothing if initial_c is None else widened(initial_c[d])
        hidden, inner = (nothing if grad is None else widened(grad[d]) for grad in (grad_h, grad_c))
        order = range(steps)[::-1] if backwards else range(steps)
        for k in reversed(range(steps)):
            t = order[k]
            pulse(f"step {t}")
            i, o, f, g = np.split(wide[t, d], 4, axis=1)
            bent = np.tanh(inner_cells[t, d])
            earlier = inner_cells[order[k - 1], d] if k else start
            if grad_y is not None:
                hidden = hidden + widened(grad_y[t, d])
            to_o = hidden * bent * o * (1 - o)
            inner = inner + hidden * o * (1 - bent * bent) + to_o * hole_o
            to_i, to_f, to_g = inner * g * i * (1 - i), inner * earlier * f * (1 - f), inner * i * (1 - g * g)
            inner = inner * f + to_i * hole_i + to_f * hole_f
            slopes[t, d] = np.concatenate([to_i, to_o, to_f, to_g], axis=1)
            hidden = slopes[t, d] @ widened(r[d])
        to_first[0][d], to_first[1][d] = hidden, inner
    return tuple(a.astype(gates.dtype, copy=False) for a in (slopes, *to_first))


@lstm_training.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    x, r = call.type(0), call.type(2)
    dtype = x.dtype if isinstance(x, TensorType) else None
    if not isinstance(x, TensorType) or not isinstance(r, TensorType) or x.shape is None or r.shape is None:
        return [TensorType(dtype, None)] * 5
    steps, batch, ways, size = x.shape[0], x.shape[1], r.shape[0], int(call.attr("hidden_size"))
    states = [TensorType(dtype, (ways, batch, size))] * 2
    over_time = TensorType(dtype, (steps, ways, batch, size))
    return [over_time, *states, over_time, TensorType(dtype, (steps, ways, batch, 4 * size))]


@lstm_slopes.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    gates, cells = call.type(1), call.type(2)
    if not isinstance(cells, TensorType) or cells.shape is None:
        return [gates, None, None]
    first = TensorType(cells.dtype, cells.shape[1:])
    return [gates, first, first]


@lstm_training.cost
def _(call: TypeCall) -> Cost:
    weights = math.prod(dims(call.type(1))) + math.prod(dims(call.type(2)))
    return Cost(2.0 * weights * math.prod(dims(call.type(0))[:2]), traffic(call))


@lstm_slopes.cost
def _(call: TypeCall) -> Cost:
    gates = dims(call.type(1))
    return Cost(2.0 * math.prod(dims(call.type(0))) * gates[0] * gates[2], traffic(call))
