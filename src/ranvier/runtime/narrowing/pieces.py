"""A graph cut into pieces, to see what single nodes in 16 bits do to the results.

The pieces are compiled in float32 once, and what lies between them on a sample is remembered. To try some nodes in 16
bits, their piece alone is compiled anew; the pieces before it need not run, and those behind it are there.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.extract import extract
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import TensorType
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.narrowing import sample

_PIECES = 12
_LEAST = 4  # nodes in 16 bits that a piece has on average, or pieces are fewer
_SMALL = 64  # whole numbers up to so many are taken to be sizes, which a graph is compiled for
_TYPES = {"bf16": DType.bfloat16, "fp16": DType.float16}
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})


class Piece:
    """Some nodes as a graph of their own: what it reads and makes are values of the whole."""

    def __init__(self, nodes: Sequence[Node], whole: Graph, outputs: Sequence[Value], values: Mapping[Value, Any]):
        made = {v for node in nodes for v in node.outputs}
        needed = list(dict.fromkeys(v for node in nodes for v in node.dependencies() if v not in made))
        self.nodes = nodes
        self.inputs = [v for v in needed if not _constant(v)]
        self.outputs = [v for v in outputs if v in made]
        self.graph = extract(nodes, needed, self.outputs, opsets=whole.opsets)
        self.graph.metadata = dict(whole.metadata)
        pairs = list(zip(self.inputs, self.graph.inputs))
        for value, given in pairs:
            if _is_size(values[value]):
                given.replace_by(self.graph.add_constant(ConstTensor.of(values[value]), given.name))
        self.inputs = [value for value, _ in pairs if not _is_size(values[value])]
        self.graph.inputs = [given for value, given in pairs if not _is_size(values[value])]


class Pieces:
    """A context manager. ``narrow`` are nodes that are in 16 bits unless they are kept, by name; of these, ``stored``
    have their results in memory so."""

    def __init__(
        self,
        graph: Graph,
        providers: Sequence[ExecutionProvider],
        config: SessionConfig,
        values: Sequence[Any],
        dims: Mapping[str, int],
        narrow: Sequence[str],
        stored: Collection[str],
    ) -> None:
        self._providers, self._config, self._dims = providers, config, dims
        self._type = _TYPES[config.precision].numpy
        self._stored = {v for node in graph if node.name in stored for v in node.outputs} - set(graph.outputs)
        self._wanted = list(graph.outputs)
        self._values: dict[Value, Any] = dict(zip(graph.inputs, values))
        self._pieces: list[tuple[Piece, Compiled]] = []
        self.names: list[tuple[str, ...]] = []  # of nodes in 16 bits, by piece
        counted, exact = set(narrow), config.updated(precision="float32")
        cut = _cut(graph, counted)
        needed = _needed_later(cut, graph)
        for nodes in cut:
            piece = Piece(nodes, graph, needed, self._values)
            compiled = Compiled(piece.graph, providers, exact)
            self._pieces.append((piece, compiled))
            self._values.update(self._run(piece, compiled, self._values))
            self.names.append(tuple(name for node in nodes for name in _counted(node, counted)))
        self._values |= {v: v.const.numpy() for v in self._wanted if v.const is not None and v not in self._values}

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        for _piece, compiled in self._pieces:
            compiled.close()

    def made(self, k: int, narrow: Collection[str]) -> dict[Value, Any]:
        """What piece ``k`` makes with these of its nodes in 16 bits."""
        piece, _ = self._pieces[k]
        kept = tuple(glob.escape(name) for name in self.names[k] if name not in narrow)
        config = self._config.updated(keep_f32=(*self._config.keep_f32, *kept))
        compiled = Compiled(piece.graph, self._providers, config)
        try:
            found = self._run(piece, compiled, self._values)
        finally:
            compiled.close()
        for value in self._stored.intersection(found):  # in the whole graph they do not cross a border
            if value.producer is not None and value.producer.name in narrow and found[value].dtype == np.float32:
                with np.errstate(over="ignore"):
                    found[value] = found[value].astype(self._type).astype(np.float32)
        return found

    def off(self, k: int, made: Mapping[Value, Any]) -> float:
        """The sum of squares of what piece ``k`` makes otherwise than in float32, each as a part of what it makes."""
        return sum(_relative(made[v], self._values[v]) for v in self._pieces[k][0].outputs)

    def error(self, k: int, made: Mapping[Value, Any]) -> float:
        """How far results are off where piece ``k`` makes this, and all others work in float32."""
        values, changed = {**self._values, **made}, set(made)
        try:
            for other, exact in self._pieces[k + 1 :]:
                if not changed.isdisjoint(other.inputs):
                    values |= self._run(other, exact, values)
                    changed.update(other.outputs)
        except RanvierError:  # sizes that follow from data no longer fit those of other pieces
            return math.inf
        return sample.largest_difference([values[v] for v in self._wanted], [self._values[v] for v in self._wanted])

    def _run(self, piece: Piece, compiled: Compiled, values: Mapping[Value, Any]) -> dict[Value, Any]:
        given = [values[v] for v in piece.inputs]
        return dict(zip(piece.outputs, sample.results(compiled, given, self._dims, self._config.limits)))


def _relative(found: Any, expected: Any) -> float:
    if not isinstance(expected, np.ndarray) or expected.dtype != np.float32:
        return 0.0
    if found.shape != expected.shape:
        return math.inf
    flat = expected.ravel()
    gap = found.ravel() - flat
    return float(np.dot(gap, gap)) / max(float(np.dot(flat, flat)), 1e-30)


def _constant(value: Value) -> bool:
    return value.const is not None and value.producer is None


def _is_size(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iub" and x.size <= _SMALL


def _cut(graph: Graph, narrow: Collection[str]) -> list[list[Node]]:
    """Nodes in order, in pieces with about as many in 16 bits each, where few tensors go from one to the next."""
    nodes = list(graph)
    crossing, possible = _crossings(nodes)
    each = [len(_counted(node, narrow)) for node in nodes]
    total = sum(each)
    count = max(1, min(_PIECES, total // _LEAST))
    reach = max(1, len(nodes) // (3 * count))
    behind = np.cumsum(each)
    cuts = [0]
    for j in range(1, count):
        ideal = int(np.searchsorted(behind, j * total / count)) + 1
        places = [p for p in range(max(cuts[-1] + 1, ideal - reach), min(len(nodes), ideal + reach + 1)) if possible[p]]
        if places:
            cuts.append(min(places, key=lambda p: (crossing[p], nodes[p].op not in _PRODUCTS, abs(p - ideal))))
    return [nodes[a:b] for a, b in zip(cuts, [*cuts[1:], len(nodes)])]


def _counted(node: Node, names: Collection[str]) -> list[str]:
    """Those of a node and of what is inside it that are among the names."""
    inside = (each for body in node.subgraphs() for each in body.all_nodes())
    return [each.name for each in (node, *inside) if each.name in names]


def _crossings(nodes: Sequence[Node]) -> tuple[list[int], list[bool]]:
    """Before each node, how many values are made before it and read by it or behind it, and whether all are tensors."""
    last = {v: k for k, node in enumerate(nodes) for v in node.dependencies()}
    all_, others = np.zeros(len(nodes) + 1, np.int64), np.zeros(len(nodes) + 1, np.int64)
    for k, node in enumerate(nodes):
        for value in node.outputs:
            for counts in (all_,) if isinstance(value.type, TensorType) else (all_, others):
                counts[k + 1 : last.get(value, k) + 1] += 1
    return all_.tolist(), (others == 0).tolist()


def _needed_later(cut: Sequence[Sequence[Node]], graph: Graph) -> list[Value]:
    """What another piece than its own reads, and the results of the graph."""
    maker = {v: k for k, nodes in enumerate(cut) for node in nodes for v in node.outputs}
    read = (v for k, nodes in enumerate(cut) for node in nodes for v in node.dependencies() if maker.get(v, k) != k)
    return list(dict.fromkeys([*read, *graph.outputs]))
