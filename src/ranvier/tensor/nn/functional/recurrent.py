"""Recurrent layers as the operators RNN, LSTM and GRU, whose kernels run all steps; weights have PyTorch's layout."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.errors import ShapeMismatch
from ranvier.tensor.core import Tensor, common_device, wrapped
from ranvier.tensor.expr import results, spec
from ranvier.tensor.manipulate import concat, expand_dims, permute_dims, reshape
from ranvier.tensor.nn.functional.shape import parts

# PyTorch's gates in the order in which the operator has them: i f g o as i o f c, and r z n as z r h
_ORDER = {"RNN": (0,), "LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}
GATES = {mode: len(order) for mode, order in _ORDER.items()}
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # of inputs, of the state, and their biases


def _gates(mode: str, weight: Tensor) -> Tensor:
    order = _ORDER[mode]
    if len(order) == 1:
        return weight
    gates = parts(weight, len(order), axis=0)
    return concat([gates[k] for k in order], axis=0)


def recurrent_layer(
    mode: str, x: Tensor, directions: Sequence[Weights], states: Sequence[Tensor], nonlinearity: str = "tanh"
) -> tuple[Tensor, list[Tensor]]:
    """One layer over [steps, batch, inputs], forwards or in both directions: outputs [steps, batch, ways · size],
    and the last states, each [ways, batch, size]. ``states`` has the first ones, in the same form;
    without any they are zeros."""
    steps, batch, width = x.shape
    size, ways = directions[0][1].shape[1], len(directions)
    if directions[0][0].shape[1] != width:
        raise ShapeMismatch(f"a layer for {directions[0][0].shape[1]} inputs was given {width}")
    w = _stacked([_gates(mode, each[0]) for each in directions])
    r = _stacked([_gates(mode, each[1]) for each in directions])
    operands = [x, w, r]
    fixed: list[tuple[int, None]] = []
    biases = [
        concat([_gates(mode, each[2]), _gates(mode, each[3])], axis=0)
        for each in directions
        if each[2] is not None and each[3] is not None
    ]
    if biases:
        operands.append(_stacked(biases))
    else:
        fixed.append((3, None))
    fixed.append((4, None))
    operands += states
    attrs: list[tuple[str, object]] = [("hidden_size", size)]
    attrs.append(("direction", "bidirectional" if ways == 2 else "forward"))
    if mode == "RNN" and nonlinearity == "relu":
        attrs.append(("activations", ("Relu",) * ways))
    if mode == "GRU":
        attrs.append(("linear_before_reset", 1))
    count = 3 if mode == "LSTM" else 2
    kinds = [(x.dtype, (steps, ways, batch, size)), *[(x.dtype, (ways, batch, size))] * (count - 1)]
    of = spec(mode, tuple(sorted(attrs)), tuple(fixed), count)
    made = results(of, tuple(o._expr for o in operands), kinds, common_device(tuple(operands)))
    outputs, *last = [wrapped(each) for each in made]
    joined = reshape(permute_dims(outputs, (0, 2, 1, 3)), (steps, batch, ways * size))
    return joined, last


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    wide = [expand_dims(part, axis=0) for part in parts]
    return wide[0] if len(wide) == 1 else concat(wide, axis=0)


_OF_TENSORS = True
