"""What each layer's codes do to the results, without compiling a model for every question.

One graph holds both forms of all layers: an input of the graph says for each whether it reads codes, and others with
which range. What a layer's weights lose is a second layer beside it, whose result is added where its switch is on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType
from ranvier.passes.edit import builder, bypass
from ranvier.quantize import Integers
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.rounding import Rounding
from ranvier.runtime.quantizing.samples import Feed
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import added_row, mean_loss
from ranvier.runtime.session import Session

ORIGIN = "switch"
Array = np.ndarray[Any, Any]
Range = tuple[float, float]


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
        self._scheme = Integers(8, signed, "tensor", signed=signed)
        self._code = DType.int8 if signed else DType.uint8
        made, rounding = copied(graph), rounding or Rounding()
        for site in find_sites(made):
            if site.name in self.names:
                self._switch(made, site, f"switch{self.names.index(site.name)}", means.get(site.data.name), rounding)
        self._session = Session(made, config)

    def __enter__(self) -> Switches:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _switch(self, graph: Graph, site: Site, stem: str, mean: Array | None, rounding: Rounding) -> None:
        node, data, scalar = site.node, site.data, TensorType(DType.float32, ())
        lost = rounding.codes(site)[2]
        row = None if mean is None else mean_loss(site, lost, mean).astype(np.float32)
        if node.op == "MatMul" and added_row(node, len(lost)) is None:  # there is no bias to take it back by
            row = None
        on, step = graph.add_input(f"{stem}.on", scalar), graph.add_input(f"{stem}.scale", scalar)
        zero = graph.add_input(f"{stem}.zero", TensorType(self._code, ()))
        ops = builder(node, ORIGIN)
        back = ops.DequantizeLinear(ops.QuantizeLinear(data, step, zero), step, zero)
        read = ops.Add(data, ops.Mul(on, ops.Sub(back, data)))
        less = np.ascontiguousarray(np.moveaxis(-lost, 0, site.outputs))
        made = ops.node(node.op, [read, *node.inputs[1:]], dict(node.attrs), version=node.version).output
        extra = ops.node(node.op, [read, less], dict(node.attrs), version=node.version).output
        if row is not None:
            extra = ops.Add(extra, row.reshape(-1, *[1] * (less.ndim - 2)) if site.inner is None else row)
        total = ops.Add(made, ops.Mul(extra, on))
        if not node.output.is_graph_output:  # one that is hands its name on by itself
            total.name, node.output.name = node.output.name, total.name
        bypass(node, total, ORIGIN)

    def results(self, feeds: Sequence[Feed], coded: Mapping[str, Range]) -> list[list[Array]]:
        """Results with these layers coded, by the ranges of what they read."""
        given: dict[str, Array] = {}
        for k, name in enumerate(self.names):
            low, high = coded.get(name, (0.0, 1.0))
            scale, zero = self._scheme.parameters(np.array(min(0.0, low)), np.array(max(0.0, high)))
            given[f"switch{k}.on"] = np.array(name in coded, np.float32)
            given[f"switch{k}.scale"] = np.asarray(scale, np.float32).reshape(())
            given[f"switch{k}.zero"] = np.asarray(zero, self._code.numpy).reshape(())
        return [[np.asarray(x) for x in self._session.run({**feed, **given}).values()] for feed in feeds]

    def error(self, feeds: Sequence[Feed], expected: Sequence[Sequence[Array]], coded: Mapping[str, Range]) -> float:
        return difference(self.results(feeds, coded), expected).error
