"""Weights of products in the order in which the kernels read them, made once for a part whatever sizes it runs with.

Rows of the output lie together: a product of few tokens then reads memory in order, and the library's is as fast as
with the other order. Codes of 4 bits are put into the kernels' own order; those of other widths become floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn import functional

from ranvier.graph.ir import Node, Value
from ranvier.providers.cuda.constants import shared
from ranvier.providers.cuda.kernels import choose, few_tokens, int4, w4a16
from ranvier.providers.cuda.kernels.few_tokens import Around
from ranvier.providers.cuda.kernels.gemv import gated_gemv, gemv
from ranvier.providers.cuda.ops.weight_only import numbers_of
from ranvier.providers.cuda.place import Place
from ranvier.providers.cuda.steps import Env
from ranvier.records import dataclass


class Floats:
    """One to three matrices that read the same tokens; results side by side."""

    def __init__(self, matrices: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._matrices = tuple(matrices)
        self._bias = bias
        self.n = sum(matrix.shape[0] for matrix in matrices)

    def few(self, x: torch.Tensor, out: torch.Tensor, around: Around) -> torch.Tensor:
        tile = choose.gemv_tile("float", x.shape[1], x.shape[0], self.n)
        how: dict[str, Any] = {"bias": self._bias, "residual": around.residual, "norm": around.norm}
        return gemv(x, self._matrices, out, eps=around.eps, tile=tile, pdl=around.pdl, **how)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """One matrix, by the library."""
        (matrix,) = self._matrices
        return functional.linear(x, matrix, self._bias)


class GatedFloats:
    def __init__(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
        self._gate, self._up, self._activation = gate, up, activation
        self.n = int(gate.shape[0])

    def few(self, x: torch.Tensor, out: torch.Tensor, around: Around) -> torch.Tensor:
        tile = choose.gemv_tile("gated", x.shape[1], x.shape[0], self.n)
        how: dict[str, Any] = {"norm": around.norm, "eps": around.eps, "pdl": around.pdl}
        return gated_gemv(x, self._gate, self._up, out, activation=self._activation, tile=tile, **how)


class Codes:
    """4-bit weights of one or several matrices; with ``activation`` rows of gate and up in turn."""

    def __init__(self, weights: int4.Int4, bias: torch.Tensor | None, activation: str = "") -> None:
        self.weights = weights
        self._bias = bias
        self._activation = activation
        self.n = weights.n // 2 if activation else weights.n

    def few(self, x: torch.Tensor, out: torch.Tensor, around: Around) -> torch.Tensor:
        gated = bool(self._activation)
        return self._few(x, out, replace(around, bias=self._bias, gated=gated, activation=self._activation))

    def _few(self, x: torch.Tensor, out: torch.Tensor, around: Around) -> torch.Tensor:
        """By the matrix unit where it takes them, else by Triton's kernel."""
        if few_tokens.suits(x, self.weights, around):
            return few_tokens.coded(x, self.weights, out, around)
        tile = choose.gemv_tile("int4", x.shape[1], x.shape[0])
        return w4a16.gemv(x, self.weights, out, tile=tile, **vars(around))

    def many(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rows_times(x, self._bias)
        return _ACTIVATIONS[self._activation](y[:, 0::2]) * y[:, 1::2] if self._activation else y

    def rows_times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """A result for every row of the weights."""
        weights = self.weights
        choice = choose.product("int4", x.shape[0], x.shape[1])
        if choice.kernel == choose.GEMV:
            return self._few(x, x.new_empty(x.shape[0], weights.n), Around(bias=bias))
        rows = x.new_empty(weights.n, weights.k)
        return functional.linear(x, w4a16.unpack(weights, rows), bias)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
Weights = Floats | GatedFloats | Codes
T = TypeVar("T")
_SIZES = ("K", "N", "bits", "block_size")  # attributes that say how codes lie


class Shelf:
    """Weights of a part, by the nodes that multiply with them. Codes of 4 bits are here once, in the form in which few
    tokens want them; what reads them by themselves finds them in it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._made: dict[Any, Any] = {}
        self._places: dict[Node, tuple[Codes, slice]] = {}  # rows in which codes of 4 bits are

    def holds(self, node: Node) -> bool:
        """Are the weights of a node here, whatever becomes of its operands?"""
        return node in self._places or node in self._made

    def side_by_side(self, nodes: Sequence[Node], biases: Sequence[Value], kind: str, env: Env) -> Floats | Codes:
        """``biases`` are as many as nodes, or none."""
        key = (*nodes, *biases)
        if key not in self._made:
            bias = torch.cat([env.tensors[value].reshape(-1) for value in biases]) if biases else None
            if kind == "int4":
                made = self._made[key] = Codes(self._shared("stacked", nodes, lambda: self._stacked(nodes, env)), bias)
                ends = itertools.accumulate(int(node.attrs["N"]) for node in nodes)
                for node, end in zip(nodes, ends):
                    self._places.setdefault(node, (made, slice(end - int(node.attrs["N"]), end)))
            else:
                self._made[key] = Floats([self._rows(node, env) for node in nodes], bias)
        found: Floats | Codes = self._made[key]
        return found

    def gated(self, gate: Node, up: Node, kind: str, activation: str, env: Env) -> GatedFloats | Codes:
        key = (gate, up, activation)
        if key not in self._made:
            if kind == "int4":
                codes = self._shared("interleaved", (gate, up), lambda: self._interleaved(gate, up, env))
                made = self._made[key] = Codes(codes, None, activation)
                for first, node in enumerate((gate, up)):
                    self._places.setdefault(node, (made, slice(first, None, 2)))
            else:
                self._made[key] = GatedFloats(self._rows(gate, env), self._rows(up, env), activation)
        found: GatedFloats | Codes = self._made[key]
        return found

    def times(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """The product of a node that is here, and nothing else."""
        rows = x.reshape(-1, x.shape[-1])
        if node in self._places:
            codes, mine = self._places[node]
            y = codes.rows_times(rows)[:, mine]
        else:
            y = functional.linear(rows, self._made[node])
        return y.reshape(*x.shape[:-1], -1)

    def _rows(self, node: Node, env: Env) -> torch.Tensor:
        """Floats ``[N, K]``; those of a MatMul lie so since they were loaded."""
        if node.op == "MatMul" and _tensor(node, 1, env).mT.is_contiguous():
            found: torch.Tensor = _tensor(node, 1, env).mT
            return found
        if node not in self._made:
            form = ("floats", _tensor(node, 0, env).dtype)
            self._made[node] = self._shared(form, [node], lambda: self._numbers(node, env))
        kept: torch.Tensor = self._made[node]
        return kept

    def _numbers(self, node: Node, env: Env) -> torch.Tensor:
        if node.op == "MatMul":
            return _tensor(node, 1, env).mT.contiguous()
        operands = [None if node.input(k) is None else _tensor(node, k, env) for k in (1, 2, 3)]
        return numbers_of(node, *operands).to(_tensor(node, 0, env).dtype)

    def _stacked(self, nodes: Sequence[Node], env: Env) -> int4.Int4:
        parts = [self._codes(node, env) for node in nodes]
        return int4.stacked(*parts) if len(parts) > 1 else parts[0]

    def _interleaved(self, gate: Node, up: Node, env: Env) -> int4.Int4:
        return int4.interleaved(self._codes(gate, env), self._codes(up, env))

    def _shared(self, form: Hashable, nodes: Sequence[Node], make: Callable[[], T]) -> T:
        """Weights of nodes in a form, which parts of other graphs may have too."""
        sources = [node.input(k) for node in nodes for k in (1, 2, 3)]
        sizes = [(node.op, *(node.attrs.get(name) for name in _SIZES)) for node in nodes]
        return shared(self._place, sources, (form, *sizes), make)

    def _codes(self, node: Node, env: Env) -> int4.Int4:
        if node in self._places:
            codes, mine = self._places[node]
            return int4.chosen(codes.weights, mine)
        zeros = None if node.input(3) is None else _tensor(node, 3, env)
        k, n, group = (node.attrs[name] for name in ("K", "N", "block_size"))
        groups = -(-k // group)
        packed, scales = _tensor(node, 1, env).reshape(n, groups, -1), _tensor(node, 2, env).reshape(n, groups)
        return int4.pack(packed, scales, k, group, zeros)


@dataclass(frozen=True)
class Borrowed:
    """Stands for the codes of a node, which are on a shelf."""

    shelf: Shelf
    node: Node

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return self.shelf.times(self.node, x)


def _tensor(node: Node, position: int, env: Env) -> Any:
    value = node.input(position)
    assert value is not None
    return env.tensors[value]
