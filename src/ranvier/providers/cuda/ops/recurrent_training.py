"""An LSTM that keeps its gates, and its way back through time: as few calls a step as torch needs.

What no step waits for is computed for all of them at once. A step is then one product and five or six calls on vectors;
on a GPU, where these have kernels of their own, one product and one launch.
"""

from __future__ import annotations

from typing import Any

from ranvier.ops.own.lstm import DOMAIN
from ranvier.providers.cuda.library import installed, torch
from ranvier.providers.cuda.table import FLOATS, Call, lowers

_ON_PROCESSOR = False  # whether the kernels are used there too, interpreted: for tests
_REVERSE = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@lowers("LSTMTraining", domain=DOMAIN, types=FLOATS, wide=True)
def lstm_training(
    call: Call,
    x: Any,
    w: Any,
    r: Any,
    bias: Any = None,
    lengths: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    peepholes: Any = None,
) -> Any:
    reverse, size = _REVERSE[call.attr("direction", "forward")], r.shape[2]
    steps, batch = x.shape[:2]
    y, cells = (x.new_empty(steps, len(reverse), batch, size) for _ in range(2))
    gates = x.new_empty(steps, len(reverse), batch, 4 * size)
    lasts = []
    for d, backwards in enumerate(reverse):
        projected = torch.matmul(x, w[d].mT)
        if bias is not None:
            projected = projected + (bias[d, : 4 * size] + bias[d, 4 * size :])
        h, c = (x.new_zeros(batch, size) if state is None else state[d] for state in (initial_h, initial_c))
        recurrent, holes = r[d].mT, None if peepholes is None else peepholes[d].split(size)
        if holes is None and _has_kernels(x):
            lasts.append(_forward(projected, recurrent, h, c, backwards, gates[:, d], cells[:, d], y[:, d]))
            continue
        for t in reversed(range(steps)) if backwards else range(steps):
            sums, own = torch.addmm(projected[t], h, recurrent), gates[t, d]
            if holes is not None:
                sums[:, :size].addcmul_(holes[0], c)
                sums[:, 2 * size : 3 * size].addcmul_(holes[2], c)
            torch.sigmoid(sums[:, : 3 * size], out=own[:, : 3 * size])
            torch.tanh(sums[:, 3 * size :], out=own[:, 3 * size :])
            i, o, f, g = own.split(size, dim=1)
            c = torch.addcmul(i * g, f, c, out=cells[t, d])
            if holes is not None:
                torch.sigmoid(torch.addcmul(sums[:, size : 2 * size], holes[1], c), out=o)
            h = torch.mul(o, torch.tanh(c), out=y[t, d])
        lasts.append((h, c))
    return y, *(torch.stack([last[k] for last in lasts]) for k in range(2)), cells, gates


@lowers("LSTMSlopes", domain=DOMAIN, types=FLOATS, wide=True)
def lstm_slopes(
    call: Call,
    r: Any,
    gates: Any,
    cells: Any,
    initial_c: Any = None,
    peepholes: Any = None,
    grad_y: Any = None,
    grad_h: Any = None,
    grad_c: Any = None,
) -> Any:
    reverse = _REVERSE[call.attr("direction", "forward")]
    steps, _, batch, size = cells.shape
    slopes = torch.empty_like(gates)
    firsts = []
    for d, backwards in enumerate(reverse):
        nothing = gates.new_zeros(batch, size)
        hidden, inner = (nothing if grad is None else grad[d] for grad in (grad_h, grad_c))
        order = range(steps)[::-1] if backwards else range(steps)
        if peepholes is None and _has_kernels(gates):
            start = nothing if initial_c is None else initial_c[d].contiguous()
            to_result = None if grad_y is None else grad_y[:, d]
            firsts.append(_back(r[d], gates[:, d], cells[:, d], start, to_result, hidden, inner, order, slopes[:, d]))
            continue
        i, o, f, g = gates[:, d].split(size, dim=-1)
        bent, start = torch.tanh(cells[:, d]), (nothing if initial_c is None else initial_c[d])[None]
        inside = cells[1:, d] if backwards else cells[:-1, d]
        earlier = torch.cat([inside, start] if backwards else [start, inside])[:steps]
        to_out, to_cell = bent * o * (1 - o), o * (1 - bent * bent)
        # by gates, as they lie in the slopes; the output gate's place is written over
        by_cell = torch.stack([g * i * (1 - i), bent, earlier * f * (1 - f), i * (1 - g * g)], dim=2)
        holes = None if peepholes is None else peepholes[d].split(size)
        for k in reversed(range(steps)):
            t = order[k]
            if grad_y is not None:
                hidden = hidden + grad_y[t, d]
            own = slopes[t, d]
            into, out, forget, _ = own.split(size, dim=1)
            inner = torch.addcmul(inner, hidden, to_cell[t])
            if holes is not None:
                inner = torch.addcmul(inner, hidden * to_out[t], holes[1])
            torch.mul(inner[:, None], by_cell[t], out=own.view(batch, 4, size))
            torch.mul(hidden, to_out[t], out=out)
            inner = inner * f[t]
            if holes is not None:
                inner = inner + into * holes[0] + forget * holes[2]
            hidden = torch.matmul(own, r[d])
        firsts.append((hidden, inner))
    return slopes, *(torch.stack([first[k] for first in firsts]) for k in range(2))


def _has_kernels(x: Any) -> bool:
    return bool(x.dtype == torch.float32 and (x.is_cuda or _ON_PROCESSOR) and x.numel() and installed("triton"))


def _forward(
    projected: Any, recurrent: Any, h: Any, c: Any, backwards: bool, gates: Any, cells: Any, y: Any
) -> tuple[Any, Any]:
    """The steps of one way; the last result and cell."""
    from ranvier.providers.cuda.kernels import lstm  # Triton is not imported before

    steps, batch, size = y.shape
    c, product = c.contiguous(), gates.new_empty(batch, 4 * size)
    for t in reversed(range(steps)) if backwards else range(steps):
        torch.mm(h, recurrent, out=product)
        lstm.forward(projected[t], product, c, gates[t], cells[t], y[t])
        h, c = y[t], cells[t]
    return h, c


def _back(
    r: Any,
    gates: Any,
    cells: Any,
    start: Any,
    to_result: Any,
    hidden: Any,
    inner: Any,
    order: range,
    slopes: Any,
) -> tuple[Any, Any]:
    """The steps of one way, the last one first; gradients of the first result and cell."""
    from ranvier.providers.cuda.kernels import lstm

    hidden, inner = hidden.clone(), inner.clone()
    for k in reversed(range(len(order))):
        t = order[k]
        earlier = cells[order[k - 1]] if k else start
        grad = None if to_result is None else to_result[t].contiguous()
        lstm.back(gates[t], cells[t], earlier, hidden, grad, inner, slopes[t])
        torch.mm(slopes[t], r, out=hidden)
    return hidden, inner
