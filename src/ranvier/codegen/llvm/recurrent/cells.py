"""What one step of a recurrent layer does to its gates: LSTM, GRU and RNN as ONNX defines them, on vectors of units.

A step has one or two *phases*. In each, the state is multiplied with the recurrent weights of the phase's gates, and
once a vector of units has all its gates, they are turned into the new state while still in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ranvier.codegen.llvm import vmath
from ranvier.codegen.llvm.builder import Fn, Val
from ranvier.codegen.llvm.isa import Isa
from ranvier.records import dataclass

Kind = Literal["LSTM", "GRU", "RNN"]
GATES: dict[Kind, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS: dict[Kind, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
# name -> default alpha and beta, None where the function takes no such number
PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
    "softsign": (None, None),
    "softplus": (None, None),
}


@dataclass(frozen=True)
class Activation:
    """A gate's function with its numbers."""

    name: str  # in lower case
    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, f: Fn, x: Val, isa: Isa) -> Val:
        return _EMITTERS[self.name](f, x, self.alpha, self.beta, isa)


def _hard_sigmoid(f: Fn, x: Val, a: float, b: float, isa: Isa) -> Val:
    return f.min_(f.max_(f.fma(x, a, b), 0.0), 1.0)


def _elu(f: Fn, x: Val, a: float, b: float, isa: Isa) -> Val:
    return f.select(f.cmp("oge", x, 0.0), x, f.mul(vmath.expm1(f, f.min_(x, 0.0), isa), a))


_EMITTERS: dict[str, Callable[[Fn, Val, float, float, Isa], Val]] = {
    "relu": lambda f, x, a, b, isa: f.max_(x, 0.0),
    "tanh": lambda f, x, a, b, isa: vmath.tanh(f, x, isa),
    "sigmoid": lambda f, x, a, b, isa: vmath.sigmoid(f, x, isa),
    "affine": lambda f, x, a, b, isa: f.fma(x, a, b),
    "leakyrelu": lambda f, x, a, b, isa: f.select(f.cmp("oge", x, 0.0), x, f.mul(x, a)),
    "thresholdedrelu": lambda f, x, a, b, isa: f.select(f.cmp("oge", x, a), x, f.const(x.type, 0.0)),
    "scaledtanh": lambda f, x, a, b, isa: f.mul(vmath.tanh(f, f.mul(x, b), isa), a),
    "hardsigmoid": _hard_sigmoid,
    "elu": _elu,
    "softsign": lambda f, x, a, b, isa: f.div(x, f.add(f.unary("fabs", x), 1.0)),
    "softplus": lambda f, x, a, b, isa: vmath.softplus(f, x, isa),
}


def activations_of(
    kind: Kind,
    given: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    directions: int,
) -> list[tuple[Activation, ...]]:
    """Per direction the functions of a layer; alphas and betas go in order to those that take one."""
    names = list(given) if given else list(DEFAULTS[kind] * directions)
    spare_alphas, spare_betas = iter(alphas or ()), iter(betas or ())
    found = []
    for name in names:
        alpha, beta = PARAMETERS[name.lower()]
        alpha = 0.0 if alpha is None else float(next(spare_alphas, alpha))
        beta = 0.0 if beta is None else float(next(spare_betas, beta))
        found.append(Activation(name.lower(), alpha, beta))
    count = len(DEFAULTS[kind])
    return [tuple(found[d * count : (d + 1) * count]) for d in range(directions)]


@dataclass(frozen=True)
class Cell:
    """A step, as far as code depends on it."""

    kind: Kind
    element: str
    activations: tuple[Activation, ...]
    clip: float = 0.0  # 0: none
    coupled: bool = False  # LSTM: the forget gate is what the input gate leaves
    peepholes: bool = False
    linear_before_reset: bool = False
    lengths: bool = False  # sequences end at different steps
    paired: bool = False  # recurrent weights are bfloat16, two in 32 bits
    kept: bool = False  # LSTM: gates and cells of all steps are wanted

    @property
    def key(self) -> tuple[object, ...]:
        functions = tuple((a.name, a.alpha, a.beta) for a in self.activations)
        flags = (self.coupled, self.peepholes, self.linear_before_reset, self.lengths, self.paired, self.kept)
        return (self.kind, self.element, functions, self.clip, *flags)

    @property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """ONNX's numbers of the gates each phase computes."""
        return phases_of(self.kind, self.linear_before_reset)

    def limited(self, f: Fn, x: Val) -> Val:
        return f.max_(f.min_(x, abs(self.clip)), -abs(self.clip)) if self.clip else x


def phases_of(kind: Kind, linear_before_reset: bool) -> tuple[tuple[int, ...], ...]:
    """A GRU whose reset gate acts before the product needs that gate of all units first."""
    if kind == "GRU" and not linear_before_reset:
        return ((0, 1), (2,))
    return (tuple(range(GATES[kind])),)


@dataclass(frozen=True)
class Units:
    """A vector of units of one sequence: where its parts of the state are. Addresses, except for sums."""

    sums: Sequence[Val]  # per gate of the phase: the recurrent product
    inputs: Sequence[Val]  # per gate of the phase: the projected input with its bias
    hidden: Val
    following: Val  # receives the new hidden state
    memory: Val  # LSTM: the cell state; GRU: the update gate between its phases
    reset: Val  # GRU: the hidden state after the reset gate
    extra: Sequence[Val]  # LSTM: peepholes; GRU: the hidden gate's recurrent bias
    running: Val | None  # i1 per lane: the sequence has not ended
    keep: Callable[[Sequence[Val], Val], None] | None = None  # LSTM: takes gates after their functions, and the cell


def emit_units(cell: Cell, phase: int, f: Fn, at: Units, isa: Isa) -> None:
    """Gates of one phase into the new state."""
    if cell.kind == "LSTM":
        new = _lstm(cell, f, at, isa)
    elif cell.kind == "RNN":
        new = cell.activations[0](f, cell.limited(f, at.inputs[0] + at.sums[0]), isa)
    elif cell.linear_before_reset:
        update, reset = (cell.activations[0](f, cell.limited(f, at.inputs[k] + at.sums[k]), isa) for k in (0, 1))
        recurrent = reset * (at.sums[2] + _load(f, at.sums[0], at.extra[0]))
        new = _mixed(cell, f, at, at.inputs[2] + recurrent, update, isa)
    elif phase == 0:
        update, reset = (cell.activations[0](f, cell.limited(f, at.inputs[k] + at.sums[k]), isa) for k in (0, 1))
        f.store(update, at.memory)
        f.store(reset * _load(f, reset, at.hidden), at.reset)
        return
    else:
        new = _mixed(cell, f, at, at.inputs[0] + at.sums[0], _load(f, at.sums[0], at.memory), isa)
    if at.running is not None:
        new = f.select(at.running, new, _load(f, new, at.hidden))
    f.store(new, at.following)


def _load(f: Fn, like: Val, address: Val) -> Val:
    return f.load(like.type, address)


def _mixed(cell: Cell, f: Fn, at: Units, candidate_sum: Val, update: Val, isa: Isa) -> Val:
    """A GRU's new state between its candidate and the old one."""
    candidate = cell.activations[1](f, cell.limited(f, candidate_sum), isa)
    return f.fma(update, _load(f, update, at.hidden) - candidate, candidate)


def _lstm(cell: Cell, f: Fn, at: Units, isa: Isa) -> Val:
    """Gates in the order input, output, forget, cell; peepholes in the order input, output, forget."""
    gate, fresh, shown = cell.activations
    into, out, forget, proposed = (x + s for x, s in zip(at.inputs, at.sums))
    memory = _load(f, into, at.memory)
    if cell.peepholes:
        into = f.fma(_load(f, into, at.extra[0]), memory, into)
        forget = f.fma(_load(f, into, at.extra[2]), memory, forget)
    opened = gate(f, cell.limited(f, into), isa)
    kept = f.sub(f.const(opened.type, 1.0), opened) if cell.coupled else gate(f, cell.limited(f, forget), isa)
    candidate = fresh(f, cell.limited(f, proposed), isa)
    changed = kept * memory + opened * candidate
    if cell.peepholes:
        out = f.fma(_load(f, out, at.extra[1]), changed, out)
    released = gate(f, cell.limited(f, out), isa)
    new = released * shown(f, changed, isa)
    if at.keep is not None:
        at.keep([opened, released, kept, candidate], changed)
    f.store(changed if at.running is None else f.select(at.running, changed, memory), at.memory)
    return new
