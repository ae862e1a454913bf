"""Recurrent layers, step after step; the projections of all inputs are one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ranvier.dtypes import DType
from ranvier.graph.ir import Node
from ranvier.providers.cuda.library import functional, torch
from ranvier.providers.cuda.ops.integer_products import by_column, quantized_product
from ranvier.providers.cuda.ops.quantization import less
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

_TYPES = FLOATS | {DType.int32}
# name in lower case -> (function of x, alpha, beta; default alpha; default beta); None where it takes no such number
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], float | None, float | None]] = {
    "relu": (lambda x, a, b: torch.relu(x), None, None),
    "tanh": (lambda x, a, b: torch.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: torch.sigmoid(x), None, None),
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: functional.leaky_relu(x, a), 0.01, None),
    "thresholdedrelu": (lambda x, a, b: torch.where(x >= a, x, torch.zeros_like(x)), 1.0, None),
    "scaledtanh": (lambda x, a, b: a * torch.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: torch.clamp(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: functional.elu(x, a), 1.0, None),
    "softsign": (lambda x, a, b: x / (1 + x.abs()), None, None),
    "softplus": (lambda x, a, b: torch.logaddexp(x, torch.zeros_like(x)), None, None),
}
State = tuple[Any, ...]


def _unknown(node: Node) -> str | None:
    odd = [name for name in node.attrs.get("activations", ()) or () if name.lower() not in _ACTIVATIONS]
    return f"the activation {odd[0]!r} is not lowered to torch" if odd else None


def _functions(call: Call, default: tuple[str, ...], directions: int) -> list[list[Callable[[Any], Any]]]:
    names = list(call.attr("activations") or default * directions)
    alphas, betas = iter(call.attr("activation_alpha") or ()), iter(call.attr("activation_beta") or ())
    made: list[Callable[[Any], Any]] = []
    for name in names[: len(default) * directions]:
        function, alpha, beta = _ACTIVATIONS[name.lower()]
        alpha = None if alpha is None else next(alphas, alpha)
        beta = None if beta is None else next(betas, beta)
        made.append(_bound(function, alpha, beta))
    return [made[d * len(default) : (d + 1) * len(default)] for d in range(directions)]


def _bound(function: Callable[..., Any], alpha: Any, beta: Any) -> Callable[[Any], Any]:
    return lambda x: function(x, alpha, beta)


def _limiter(call: Call) -> Callable[[Any], Any]:
    clip = call.attr("clip")
    if not clip:
        return lambda x: x
    return lambda x: x.clamp(-abs(clip), abs(clip))


class _Layer:
    """The operands in layout 0: time first, directions before the batch."""

    def __init__(self, call: Call, gates: int, x: Any, r_hidden: int, lengths: Any) -> None:
        self.reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[
            call.attr("direction", "forward")
        ]
        self.batch_first = call.flag("layout")
        self.x = x.transpose(0, 1) if self.batch_first else x
        self.hidden = r_hidden
        self.gates = gates
        steps = self.x.shape[0]
        self.lengths = lengths
        if lengths is not None:
            call.require(((lengths >= 0) & (lengths <= steps)).all(), f"sequence_lens must lie in 0 to {steps}")

    def state(self, initial: Any) -> Any:
        if initial is None:
            return self.x.new_zeros(len(self.reverse), self.x.shape[1], self.hidden)
        return initial.transpose(0, 1) if self.batch_first else initial

    def order(self, backwards: bool) -> Any:
        """The step that each sequence reads at each time; its own inverse."""
        if not backwards:
            return None
        steps, batch = self.x.shape[:2]
        times = torch.arange(steps, device=self.x.device)[:, None]
        if self.lengths is None:
            return (steps - 1 - times).expand(steps, batch)
        ends = self.lengths.to(torch.int64)[None]
        return torch.where(times < ends, ends - 1 - times, times)

    def unrolled(
        self,
        project: Callable[[int, Any], Any],
        cells: Sequence[Callable[[Any, State], State]],
        initial: Sequence[Any],
        *,
        ended_is_zero: bool = False,
    ) -> tuple[Any, ...]:
        steps = self.x.shape[0]
        outputs, finals = [], []
        for d, backwards in enumerate(self.reverse):
            order = self.order(backwards)
            x = self.x if order is None else _taken(self.x, order)
            projected = project(d, x)
            state: State = tuple(s[d] for s in initial)
            last_hidden = torch.zeros_like(state[0])
            rows = []
            for t in range(steps):
                following = cells[d](projected[t], state)
                if self.lengths is None:
                    state = following
                    rows.append(state[0])
                    continue
                running = (t < self.lengths)[:, None]
                if ended_is_zero:
                    last_hidden = torch.where(running, following[0], last_hidden)
                    hidden = torch.where(running, following[0], torch.zeros_like(following[0]))
                    rest = [torch.where(running, new, old) for new, old in zip(following[1:], state[1:])]
                    state = (hidden, *rest)
                else:
                    state = tuple(torch.where(running, new, old) for new, old in zip(following, state))
                rows.append(torch.where(running, state[0], torch.zeros_like(state[0])))
            y = torch.stack(rows) if rows else self.x.new_zeros(0, self.x.shape[1], self.hidden)
            outputs.append(y if order is None else _taken(y, order))
            if self.lengths is not None:
                some = (self.lengths > 0)[:, None]
                found = (last_hidden, *state[1:]) if ended_is_zero else state
                state = tuple(torch.where(some, s, torch.zeros_like(s)) for s in found)
            finals.append(state)
        y = torch.stack(outputs, dim=1)
        last = [torch.stack([state[k] for state in finals]) for k in range(len(initial))]
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last)
        return y, *last


def _taken(x: Any, order: Any) -> Any:
    return torch.gather(x, 0, order[..., None].expand(*order.shape, x.shape[-1]))


def _biases(layer: _Layer, bias: Any, like: Any) -> tuple[Any, Any]:
    width = layer.gates * layer.hidden
    if bias is None:
        bias = like.new_zeros(len(layer.reverse), 2 * width)
    return bias[:, :width], bias[:, width:]


def _projection(w: Any, folded: Any) -> Callable[[int, Any], Any]:
    return lambda d, x: torch.matmul(x, w[d].mT) + folded[d]


@lowers("RNN", types=_TYPES, refuses=_unknown, wide=True)
def rnn(call: Call, x: Any, w: Any, r: Any, bias: Any = None, lengths: Any = None, initial: Any = None) -> Any:
    layer = _Layer(call, 1, x, r.shape[2], lengths)
    functions, limit = _functions(call, ("Tanh",), len(layer.reverse)), _limiter(call)

    def cell(d: int) -> Callable[[Any, State], State]:
        (f,) = functions[d]
        return lambda projected, state: (f(limit(projected + torch.matmul(state[0], r[d].mT))),)

    ours, theirs = _biases(layer, bias, x)
    cells = [cell(d) for d in range(len(layer.reverse))]
    return layer.unrolled(_projection(w, ours + theirs), cells, [layer.state(initial)])


@lowers("GRU", types=_TYPES, refuses=_unknown, wide=True)
def gru(call: Call, x: Any, w: Any, r: Any, bias: Any = None, lengths: Any = None, initial: Any = None) -> Any:
    layer = _Layer(call, 3, x, r.shape[2], lengths)
    functions, limit = _functions(call, ("Sigmoid", "Tanh"), len(layer.reverse)), _limiter(call)
    size, linear = layer.hidden, call.flag("linear_before_reset")
    ours, theirs = _biases(layer, bias, x)
    hidden_bias = theirs[:, 2 * size :]
    gated = torch.cat([theirs[:, : 2 * size], torch.zeros_like(hidden_bias)], dim=1) if linear else theirs

    def cell(d: int) -> Callable[[Any, State], State]:
        f, g = functions[d]

        def step(projected: Any, state: State) -> State:
            h = state[0]
            if linear:
                product = torch.matmul(h, r[d].mT)
                gates = f(limit(projected[:, : 2 * size] + product[:, : 2 * size]))
                recurrent = gates[:, size:] * (product[:, 2 * size :] + hidden_bias[d])
            else:
                gates = f(limit(projected[:, : 2 * size] + torch.matmul(h, r[d, : 2 * size].mT)))
                recurrent = torch.matmul(gates[:, size:] * h, r[d, 2 * size :].mT)
            candidate = g(limit(projected[:, 2 * size :] + recurrent))
            return (candidate + gates[:, :size] * (h - candidate),)

        return step

    cells = [cell(d) for d in range(len(layer.reverse))]
    return layer.unrolled(_projection(w, ours + gated), cells, [layer.state(initial)])


def _lstm_cell(
    call: Call, functions: list[Callable[[Any], Any]], recurrent: Callable[[Any], Any], peepholes: Any, size: int
) -> Callable[[Any, State], State]:
    """Gates in the order input, output, forget, cell; peepholes in the order input, output, forget."""
    f, g, h = functions
    limit, coupled = _limiter(call), call.flag("input_forget")

    def step(projected: Any, state: State) -> State:
        hidden, memory = state
        into, out, forget, fresh = (projected + recurrent(hidden)).split(size, dim=-1)
        if peepholes is not None:
            into = into + peepholes[:size] * memory
            forget = forget + peepholes[2 * size :] * memory
        opened = f(limit(into))
        kept = 1 - opened if coupled else f(limit(forget))
        memory = kept * memory + opened * g(limit(fresh))
        if peepholes is not None:
            out = out + peepholes[size : 2 * size] * memory
        return f(limit(out)) * h(memory), memory

    return step


@lowers("LSTM", types=_TYPES, refuses=_unknown, wide=True)
def lstm(
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
    layer = _Layer(call, 4, x, r.shape[2], lengths)
    functions = _functions(call, ("Sigmoid", "Tanh", "Tanh"), len(layer.reverse))

    def recurrent(d: int) -> Callable[[Any], Any]:
        return lambda hidden: torch.matmul(hidden, r[d].mT)

    cells = [
        _lstm_cell(call, functions[d], recurrent(d), None if peepholes is None else peepholes[d], layer.hidden)
        for d in range(len(layer.reverse))
    ]
    ours, theirs = _biases(layer, bias, x)
    return layer.unrolled(_projection(w, ours + theirs), cells, [layer.state(initial_h), layer.state(initial_c)])


@lowers("DynamicQuantizeLSTM", domain=CONTRIB, types=_TYPES | {DType.int8, DType.uint8}, refuses=_unknown)
def dynamic_quantize_lstm(
    call: Call,
    x: Any,
    w: Any,
    r: Any,
    bias: Any,
    lengths: Any,
    initial_h: Any,
    initial_c: Any,
    peepholes: Any,
    w_scale: Any,
    w_zero: Any,
    r_scale: Any,
    r_zero: Any,
) -> Any:
    layer = _Layer(call, 4, x, r.shape[1], lengths)
    functions = _functions(call, ("Sigmoid", "Tanh", "Tanh"), len(layer.reverse))
    width = 4 * layer.hidden
    weights = [less(w[d], by_column(_of_direction(w_zero, d))) for d in range(len(layer.reverse))]
    states = [less(r[d], by_column(_of_direction(r_zero, d))) for d in range(len(layer.reverse))]

    def recurrent(d: int) -> Callable[[Any], Any]:
        return lambda hidden: quantized_product(hidden, states[d], by_column(_of_direction(r_scale, d)))

    def project(d: int, inputs: Any) -> Any:
        flat = inputs.reshape(-1, inputs.shape[-1])
        y = quantized_product(flat, weights[d], by_column(_of_direction(w_scale, d)))
        y = y.reshape(*inputs.shape[:2], width)
        return y if bias is None else y + (bias[d, :width] + bias[d, width:])

    cells = [
        _lstm_cell(call, functions[d], recurrent(d), None if peepholes is None else peepholes[d], layer.hidden)
        for d in range(len(layer.reverse))
    ]
    initial = [layer.state(initial_h), layer.state(initial_c)]
    return layer.unrolled(project, cells, initial, ended_is_zero=True)


def _of_direction(parameter: Any, d: int) -> Any:
    return parameter[d] if parameter.ndim > 1 else parameter.reshape(-1)[d : d + 1]
