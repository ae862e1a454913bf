"""What single nodes do to the results, without compiling a model for every question.

One graph holds both forms of all nodes: an input of the graph says for each whether it is rounded. Of layers that read
codes other inputs give the range. What a layer's weights lose is a second layer beside it, whose result is added where
its switch is on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.passes.edit import builder, bypass
from ranvier.passes.facts import dtype_of
from ranvier.runtime.quantizing.range_inputs import Range, RangeInputs
from ranvier.runtime.quantizing.report import Difference, difference
from ranvier.runtime.quantizing.rounding import Rounding
from ranvier.runtime.quantizing.samples import Feed, as_array
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import added_row, mean_loss
from ranvier.runtime.quantizing.tails import tail
from ranvier.runtime.session import Session

ORIGIN = "switch"
Array = np.ndarray[Any, Any]


class Switches:
    """Runs a model with some of its layers coded. A context manager."""

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        means: Mapping[str, Array],
        config: SessionConfig,
        *,
        signed: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.names = list(names)
        self._ranges = RangeInputs(signed)
        made, rounding = copied(graph), rounding or Rounding()
        for site in find_sites(made, bodies=True):
            if site.name in self.names:
                self._switch(made, site, f"switch{self.names.index(site.name)}", means.get(site.name), rounding)
        self._session = Session(made, config)

    def __enter__(self) -> Switches:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _switch(self, graph: Graph, site: Site, stem: str, mean: Array | None, rounding: Rounding) -> None:
        on = graph.add_input(f"{stem}.on", TensorType(DType.float32, ()))
        back = self._ranges.rounded(graph, builder(site.node, ORIGIN), site.data, stem)
        _switch_layer(site, on, back, rounding.codes(site)[2], mean)

    def results(self, feeds: Sequence[Feed], coded: Mapping[str, Range]) -> list[list[Array]]:
        """Results with these layers coded, by the ranges of what they read."""
        given: dict[str, Array] = {}
        for k, name in enumerate(self.names):
            given[f"switch{k}.on"] = np.array(name in coded, np.float32)
            given |= self._ranges.given(f"switch{k}", coded.get(name, (0.0, 1.0)))
        return [[as_array(x) for x in self._session.run({**feed, **given}).values()] for feed in feeds]

    def difference(
        self, feeds: Sequence[Feed], expected: Sequence[Sequence[Array]], coded: Mapping[str, Range]
    ) -> Difference:
        return difference(self.results(feeds, coded), expected)


class NarrowSwitches:
    """Runs a model with some of its nodes as sessions in bfloat16 compute them. Rounding belongs to whoever reads a
    value: ``products`` round all they read and their weights, others read values that nodes have ``stored`` rounded.
    A context manager."""

    def __init__(
        self,
        graph: Graph,
        products: Collection[str],
        stored: Collection[str],
        means: Mapping[str, Array],
        config: SessionConfig,
        rounding: Rounding,
    ) -> None:
        made = copied(graph)
        self.names: list[str] = []
        every = find_sites(made, bodies=True)
        sites = {id(site.node): site for site in every if site.name in products}
        inside = {id(node) for site in every for node in tail(site.node).nodes}
        for node in list(made.all_nodes()):
            site = sites.get(id(node))
            read = [] if id(node) in inside else _read_rounded(node, stored)
            if site is None and not read:
                continue
            on = made.add_input(f"switch{len(self.names)}.on", TensorType(DType.float32, ()))
            self.names.append(node.name)
            if site is not None:
                lost = np.moveaxis(site.numbers, site.outputs, 0) - rounding.bfloat(site)
                narrow = _narrowed(builder(node, ORIGIN), site.data)
                _switch_layer(site, on, narrow, lost, means.get(site.name))
                continue
            ops = builder(node, ORIGIN)
            for position, value in read:
                node.set_input(position, ops.Add(value, ops.Mul(on, ops.Sub(_narrowed(ops, value), value))))
        self._session = Session(made, config)

    def __enter__(self) -> NarrowSwitches:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def difference(
        self, feeds: Sequence[Feed], expected: Sequence[Sequence[Array]], narrow: Collection[str]
    ) -> Difference:
        given = {f"switch{k}.on": np.array(name in narrow, np.float32) for k, name in enumerate(self.names)}
        found = [[as_array(x) for x in self._session.run({**feed, **given}).values()] for feed in feeds]
        return difference(found, expected)


def _narrowed(ops: GraphOps, value: Value) -> Value:
    return ops.Cast(ops.Cast(value, to=DType.bfloat16.onnx), to=DType.float32.onnx)


def _read_rounded(node: Node, stored: Collection[str]) -> list[tuple[int, Value]]:
    """What a node reads that lies in memory with fewer bits, and where."""
    return [
        (position, value)
        for position, value in enumerate(node.inputs)
        if value is not None
        and value.producer is not None
        and value.producer.name in stored
        and dtype_of(value) is DType.float32
    ]


def _switch_layer(site: Site, on: Value, rounded: Value, lost: Array, mean: Array | None) -> None:
    """A layer that reads rounded data, and whose weights lose this, where the switch is on."""
    node, data = site.node, site.data
    row = None if mean is None else mean_loss(site, lost, mean).astype(np.float32)
    if node.op == "MatMul" and added_row(node, len(lost)) is None:  # there is no bias to take it back by
        row = None
    ops = builder(node, ORIGIN)
    read = ops.Add(data, ops.Mul(on, ops.Sub(rounded, data)))
    less = np.ascontiguousarray(np.moveaxis(-lost, 0, site.outputs)).astype(np.float32)
    made = ops.node(node.op, [read, *node.inputs[1:]], dict(node.attrs), version=node.version).output
    extra = ops.node(node.op, [read, less], dict(node.attrs), version=node.version).output
    if row is not None:
        extra = ops.Add(extra, row.reshape(-1, *[1] * (less.ndim - 2)) if site.inner is None else row)
    total = ops.Add(made, ops.Mul(extra, on))
    if not node.output.is_graph_output:  # one that is hands its name on by itself
        total.name, node.output.name = node.output.name, total.name
    bypass(node, total, ORIGIN)
