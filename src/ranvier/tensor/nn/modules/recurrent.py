"""Recurrent layers: RNN, LSTM and GRU over sequences, and one step of each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor, beside
from ranvier.tensor.elementwise import sigmoid, tanh
from ranvier.tensor.manipulate import concat, expand_dims, squeeze, swapaxes
from ranvier.tensor.nn import functional as F
from ranvier.tensor.nn import init
from ranvier.tensor.nn.functional.recurrent import GATES, Weights, recurrent_layer
from ranvier.tensor.nn.functional.shape import parts
from ranvier.tensor.nn.generator import Generator
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.nn.modules.linear import empty_parameter


class _Recurrent(Module):
    _mode: str

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        nonlinearity: str = "tanh",
        dtype: Any = None,
        key: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if nonlinearity not in ("tanh", "relu"):
            raise InvalidInput(f"nonlinearity is 'tanh' or 'relu', not {nonlinearity!r}")
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        self.nonlinearity, self.generator = nonlinearity, generator
        gates, ways = GATES[self._mode] * hidden_size, 2 if bidirectional else 1
        for layer in range(num_layers):
            for way in range(ways):
                tail = f"l{layer}" + ("_reverse" if way else "")
                inputs = input_size if layer == 0 else hidden_size * ways
                self.register_parameter(f"weight_ih_{tail}", empty_parameter((gates, inputs), dtype))
                self.register_parameter(f"weight_hh_{tail}", empty_parameter((gates, hidden_size), dtype))
                if bias:
                    self.register_parameter(f"bias_ih_{tail}", empty_parameter((gates,), dtype))
                    self.register_parameter(f"bias_hh_{tail}", empty_parameter((gates,), dtype))
        self.reset_parameters(key)

    def reset_parameters(self, key: Tensor | None = None) -> None:
        keys, bound = init.Keys(key), 1.0 / math.sqrt(self.hidden_size) if self.hidden_size else 0.0
        for param in self.parameters():
            init.uniform_(param, -bound, bound, key=keys.next())

    def _weights(self, layer: int) -> list[Weights]:
        found: list[Weights] = []
        for way in range(2 if self.bidirectional else 1):
            tail = f"l{layer}" + ("_reverse" if way else "")
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            w, r, b, c = (self._parameters.get(f"{name}_{tail}") for name in names)
            assert w is not None and r is not None
            found.append((w.value, r.value, None if b is None else b.value, None if c is None else c.value))
        return found

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
        """Outputs of the last layer at each step, and the last states of all layers."""
        x = as_tensor(input)
        single = x.ndim == 2
        if x.ndim not in (2, 3):
            raise ShapeMismatch(f"a sequence has 2 or 3 dimensions; got shape {list(x.shape)}")
        if single:
            x = expand_dims(x, axis=1)
        elif self.batch_first:
            x = swapaxes(x, 0, 1)
        firsts = self._firsts(x, hx, single)
        ways = 2 if self.bidirectional else 1
        lasts: list[list[Tensor]] = [[] for _ in range(2 if self._mode == "LSTM" else 1)]
        for layer in range(self.num_layers):
            own = [state[layer * ways : (layer + 1) * ways] for state in firsts]
            x, last = recurrent_layer(self._mode, x, self._weights(layer), own, self.nonlinearity)
            for kept, each in zip(lasts, last):
                kept.append(each)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, generator=self.generator)
        states = [kept[0] if len(kept) == 1 else concat(kept, axis=0) for kept in lasts]
        if single:
            x, states = squeeze(x, axis=1), [squeeze(each, axis=1) for each in states]
        elif self.batch_first:
            x = swapaxes(x, 0, 1)
        return x, (tuple(states) if self._mode == "LSTM" else states[0])

    def _firsts(self, x: Tensor, hx: Any, single: bool) -> list[Tensor]:
        number = 2 if self._mode == "LSTM" else 1
        shape = (self.num_layers * (2 if self.bidirectional else 1), x.shape[1], self.hidden_size)
        if hx is None:
            return []  # the operators begin with zeros
        found = [as_tensor(each) for each in (hx if number == 2 else (hx,))]
        found = [expand_dims(each, axis=1) for each in found] if single else found
        for each in found:
            if each.shape != shape:
                raise ShapeMismatch(f"a first state of shape {list(each.shape)}; expected {list(shape)}")
        return found

    def extra_repr(self) -> str:
        said = f"{self.input_size}, {self.hidden_size}"
        for name, plain in (("num_layers", 1), ("bias", True), ("batch_first", False), ("dropout", 0.0)):
            value = getattr(self, name)
            said += "" if value == plain else f", {name}={value}"
        return said + (", bidirectional=True" if self.bidirectional else "")


class RNN(_Recurrent):
    """h' = tanh(W x + R h + b), or with ``nonlinearity="relu"``."""

    _mode = "RNN"


class LSTM(_Recurrent):
    """A recurrent layer with a memory and three gates; states are (hidden, memory)."""

    _mode = "LSTM"


class GRU(_Recurrent):
    """A recurrent layer with two gates."""

    _mode = "GRU"


class _Cell(Module):
    _mode: str

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, *, dtype: Any = None, key: Tensor | None = None
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        gates = GATES[self._mode] * hidden_size
        self.weight_ih = empty_parameter((gates, input_size), dtype)
        self.weight_hh = empty_parameter((gates, hidden_size), dtype)
        self.register_parameter("bias_ih", empty_parameter((gates,), dtype) if bias else None)
        self.register_parameter("bias_hh", empty_parameter((gates,), dtype) if bias else None)
        keys, bound = init.Keys(key), 1.0 / math.sqrt(hidden_size)
        for param in self.parameters():
            init.uniform_(param, -bound, bound, key=keys.next())

    def _parts(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, self.bias_hh)

    def _zeros(self, x: Tensor) -> Tensor:
        return beside(Tensor(np.zeros((*x.shape[:-1], self.hidden_size), x.dtype.numpy)), x)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


class RNNCell(_Cell):
    """One step of an RNN."""

    _mode = "RNN"

    def forward(self, input: Any, hx: Any = None) -> Tensor:
        x = as_tensor(input)
        a, b = self._parts(x, self._zeros(x) if hx is None else as_tensor(hx))
        return tanh(a + b)


class LSTMCell(_Cell):
    """One step of an LSTM."""

    _mode = "LSTM"

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Tensor]:
        x = as_tensor(input)
        h, c = (self._zeros(x), self._zeros(x)) if hx is None else (as_tensor(each) for each in hx)
        a, b = self._parts(x, h)
        i, f, g, o = parts(a + b, 4)
        memory = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(memory), memory


class GRUCell(_Cell):
    """One step of a GRU."""

    _mode = "GRU"

    def forward(self, input: Any, hx: Any = None) -> Tensor:
        x = as_tensor(input)
        h = self._zeros(x) if hx is None else as_tensor(hx)
        a, b = self._parts(x, h)
        (r, z, n), (s, y, m) = parts(a, 3), parts(b, 3)
        kept = sigmoid(z + y)
        new = tanh(n + sigmoid(r + s) * m)
        return (1.0 - kept) * new + kept * h


_OF_TENSORS = True
