"""Sessions in bfloat16 on any processor, as graphs with casts, and times by a table: so that what is chosen by either
can be tested everywhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ranvier.config import SessionConfig
from ranvier.dtypes import DType
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node
from ranvier.passes.edit import builder
from ranvier.passes.facts import dtype_of
from ranvier.providers.base import NodePrecision
from ranvier.runtime.quantizing import choosing, forms, quantizer, report, samples
from ranvier.runtime.session import Session

LAYERS = ("Conv", "MatMul", "Gemm")
_STORED = (*LAYERS, "Tanh", "Relu", "Add")


def _codes(node: Node) -> str:
    """The kind of codes that a layer reads, if it does."""
    data = node.inputs[0]
    if data is None or data.producer is None or data.producer.op != "DequantizeLinear":
        return ""
    return "int16" if dtype_of(data.producer.inputs[0]) is DType.int16 else "int8"


def _names(node: Node, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(node.name, pattern) for pattern in patterns)


class Pretended:
    """A session whose times are those of a table: by kinds of layers, and by their names where those are given."""

    times: Mapping[str, float] = {"float32": 1.0, "bf16": 0.5, "int16": 0.5, "int8": 0.25}
    multiplies_bf16 = True
    stays: tuple[str, ...] = ()  # layers that it multiplies in float32 all the same
    saves: float = 0.0  # where it does not: what something that is no layer takes less, computed less exactly
    made: int = 0

    def __init__(self, graph: Graph, config: SessionConfig) -> None:
        Pretended.made += 1
        narrow = config.precision == "bf16" and self.multiplies_bf16
        self.layer_times: dict[str, float] = {}
        for node in graph.all_nodes():
            if node.op in LAYERS:
                wide = not narrow or _names(node, (*config.keep_f32, *self.stays))
                kind = _codes(node) or ("float32" if wide else "bf16")
                self.layer_times[node.name] = self.times.get(f"{kind} {node.name}", self.times[kind])
        found: dict[str, NodePrecision] = {}
        if narrow:
            graph, found = _narrowed(graph, config.keep_f32, self.stays)
        lighter = config.precision == "bf16" and self.saves > 0
        self._saved = self.saves if lighter else 0.0
        refused = "its products" if lighter else ""
        found |= dict.fromkeys(["transform"] if lighter else [], NodePrecision("f32", "f32"))
        self.report = SimpleNamespace(nodes=[], precisions=found, refused=refused)
        self._session = Session(graph, config.updated(precision="float32", keep_f32=()))

    @property
    def time(self) -> float:
        return sum(self.layer_times.values()) + self.saves - self._saved

    def run(self, *given: Any) -> dict[str, Any]:
        return self._session.run(*given)

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _narrowed(graph: Graph, keep: tuple[str, ...], stays: tuple[str, ...]) -> tuple[Graph, dict[str, NodePrecision]]:
    """Layers read rounded operands, and others what was stored so."""
    made, found = copied(graph), dict[str, NodePrecision]()
    for node in list(made.all_nodes()):
        kept = _names(node, keep)
        product = node.op in LAYERS and not kept and node.name not in stays and not _codes(node)
        stored = node.op in _STORED and not kept and not node.output.is_graph_output
        found[node.name] = NodePrecision("bf16" if product else "f32", "bf16" if stored else "f32")
        ops = builder(node, "pretended")
        for position, value in enumerate(node.inputs[:2] if product else ()):
            rounded = ops.Cast(ops.Cast(value, to=DType.bfloat16.onnx), to=DType.float32.onnx)
            node.set_input(position, rounded)
    return made, found


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    times: Mapping[str, float] | None = None,
    *,
    bf16: bool = True,
    words: bool = False,
    saves: float = 0.0,
) -> None:
    """Such sessions wherever quantizing makes some; ``words``: on a processor that multiplies codes of 16 bits fast."""
    monkeypatch.setattr(Pretended, "saves", saves)
    monkeypatch.setattr(choosing, "are_fast", lambda config: words)
    for module in (forms, choosing, samples, report):
        monkeypatch.setattr(module, "Session", Pretended)
    monkeypatch.setattr(Pretended, "multiplies_bf16", bf16)
    monkeypatch.setattr(Pretended, "times", {**Pretended.times, **(times or {})})
    monkeypatch.setattr(forms, "fastest", lambda sessions, feed, seconds: [each.time for each in sessions])
    monkeypatch.setattr(
        choosing, "measured", lambda session, feed, work, called, seconds: {n: session.layer_times[n] for n in work}
    )

    def timed(before: Graph, after: Graph, feed: Any, configs: Any) -> tuple[float, float]:
        with Pretended(copied(before), configs[0]) as first, Pretended(copied(after), configs[1]) as second:
            return first.time, second.time

    monkeypatch.setattr(quantizer, "timed", timed)
