"""What the optimiser asks about a machine, answered from measured figures or, where there are none, nominal ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ranvier.devices import CPU
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Type
from ranvier.ops import TypeInference
from ranvier.ops.estimate import BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_NODE, node_cost
from ranvier.providers.base import DeclaresSpeed, ExecutionProvider, OwnMemory
from ranvier.runtime.calibration.classes import BY_ARITHMETIC, VIEW, Work, bytes_of, weight_bytes, work_of
from ranvier.runtime.calibration.table import Figures
from ranvier.runtime.partition.problem import Link

TYPICAL_DIM = 64  # stands for a dimension that only a run will tell
_LAUNCH = 2e-6  # nominal seconds to start a part
_REPEATED = 8.0  # times that the body of a loop runs, where nobody knows
# where a class was not measured: others whose rates are the next best guess
_NEXT = {
    "product.thin": ("product",),
    "conv.pointwise": ("product", "conv.dense"),
    "conv.3x3": ("conv.dense", "conv.pointwise", "product"),
    "conv.dense": ("conv.pointwise", "product"),
    "conv.first": ("conv.depthwise", "conv.dense", "product"),
    "conv.depthwise": ("conv.first", "conv.dense", "product"),
    "conv.transposed": ("conv.dense", "product"),
    "attention": ("product",),
    "recurrent": ("product.thin", "product"),
    "trees": ("product.thin", "product"),
    "elementwise.math": ("elementwise",),
    "elementwise.fused": ("elementwise",),
    "reduction": ("normalisation", "elementwise"),
    "normalisation": ("reduction", "elementwise"),
    "pooling": ("normalisation", "movement", "elementwise"),
    "movement": ("elementwise",),
    "gather": ("movement", "elementwise"),
    "resize": ("pooling", "movement", "elementwise"),
    "quantise": ("elementwise.math", "elementwise"),
    "other": ("movement", "elementwise"),
}
_READING = frozenset(("product", "conv.pointwise", "conv.3x3", "conv.dense"))
_MESSAGE = 20e-6  # nominal seconds of a message to another process, beside what the device is said to add


class MachineCosts:
    """A :class:`~ranvier.runtime.partition.costs.CostModel` for some providers.

    ``figures`` by the names of providers; ``types`` of values where those in the graph say too little.
    """

    def __init__(
        self,
        providers: Sequence[ExecutionProvider],
        figures: Mapping[str, Figures],
        types: Mapping[Value, Type | None] | None = None,
    ) -> None:
        self.figures = dict(figures)
        self.types = types or {}
        self._home = next((p.name for p in providers if not isinstance(p, OwnMemory)), "")
        self._devices = {self.memory(provider): provider for provider in providers}
        self._works: dict[int, Work] = {}

    def node_seconds(self, node: Node, provider: ExecutionProvider) -> float | None:
        if node.has_subgraphs:
            return self._bodies(node, provider)
        work = self.work(node)
        figures = self.figures.get(provider.name)
        if figures is None:
            return self._nominal(node, work, provider)
        if work.kind == VIEW:
            return 0.0 if provider.capability().whole_parts else figures.node
        for kind in (work.kind, *_NEXT.get(work.kind, ())):
            found = figures.time(kind, work.dtype, work.amount)
            if found is not None:
                return found + self._reading(node, work, figures)
        return self._nominal(node, work, provider)

    def nbytes(self, value: Value) -> float:
        return bytes_of(value, self.types)

    def transfer(self, source: str, target: str) -> Link:
        """From device to device the way leads through the host."""
        host = str(CPU)
        ways = [self._way(target, inward=True)] if target != host else []
        if source != host:
            ways.append(self._way(source, inward=False))
        return Link(sum(way.latency for way in ways), 1 / sum(1 / way.bandwidth for way in ways))

    def memory(self, provider: ExecutionProvider) -> str:
        """Providers on the host have one memory, and yet a value costs something to hand over: each keeps tensors in
        an order of its own, and what one computes in a go another cannot continue. The first of them is at home."""
        device = str(provider.device)
        if isinstance(provider, OwnMemory) or provider.name == self._home or not provider.capability().whole_parts:
            return device
        return f"{device}/{provider.name}"

    def launch(self, provider: ExecutionProvider) -> float:
        figures = self.figures.get(provider.name)
        if figures is not None:
            return figures.launch
        return provider.declared_speed().latency + _MESSAGE if isinstance(provider, DeclaresSpeed) else _LAUNCH

    def capacity(self, provider: ExecutionProvider) -> float | None:
        return provider.declared_speed().memory if isinstance(provider, DeclaresSpeed) else None

    def engine(self, provider: ExecutionProvider) -> tuple[int | None, int]:
        """All providers that compute on the host's cores share them."""
        return (None, 1) if isinstance(provider, OwnMemory) else (0, 1)

    def work(self, node: Node) -> Work:
        found = self._works.get(id(node))
        if found is None:
            found = self._works[id(node)] = work_of(node, self.types)
        return found

    def _reading(self, node: Node, work: Work, figures: Figures) -> float:
        """Seconds to bring weights into the caches, where those of the samples were already. How fast they come
        is told by the largest of the products that do nothing but read them."""
        thin = figures.points.get("product.thin float32")
        if work.kind not in _READING or not thin:
            return 0.0
        operations, seconds = thin[-1]
        return weight_bytes(node) * seconds / (operations / 2 * 4)

    def _bodies(self, node: Node, provider: ExecutionProvider) -> float:
        """Of branches the longest counts, of loops the body as often as it is guessed to run."""
        times = [
            sum(self.node_seconds(inner, provider) or 0.0 for inner in body) + self.launch(provider)
            for body in node.subgraphs()
        ]
        return max(times, default=0.0) * (1.0 if node.op == "If" else _REPEATED)

    def _nominal(self, node: Node, work: Work, provider: ExecutionProvider) -> float:
        flops, bandwidth, each = FLOPS_PER_SECOND, BYTES_PER_SECOND, 0.0
        if isinstance(provider, DeclaresSpeed):
            flops, bandwidth = provider.declared_speed().flops, math.inf
        elif not provider.capability().whole_parts:
            each = SECONDS_PER_NODE
        if work.kind == VIEW:
            return each
        cost = node_cost(node, {v: t for v, t in self.types.items() if t is not None} if self.types else None)
        arithmetic = cost.flops / flops
        return max(arithmetic, 0.0 if work.kind in BY_ARITHMETIC else cost.bytes / bandwidth) + each

    def _way(self, device: str, *, inward: bool) -> Link:
        provider = self._devices.get(device)
        if provider is None:
            return Link(0.0)
        figures = self.figures.get(provider.name)
        if not isinstance(provider, OwnMemory):
            moved = None if figures is None else figures.points.get("movement float32")
            return Link(_LAUNCH, BYTES_PER_SECOND / 2 if not moved else moved[-1][0] / moved[-1][1] / 2)
        way = None if figures is None else figures.inward if inward else figures.outward
        if way is not None:
            return Link(*way)
        if isinstance(provider, DeclaresSpeed):
            speed = provider.declared_speed()
            return Link(speed.latency + _MESSAGE, speed.bandwidth)
        return Link(SECONDS_PER_NODE, BYTES_PER_SECOND)


def guessed_types(
    graph: Graph, given: Sequence[Type | None] | None = None, sizes: Mapping[str, int] | None = None
) -> dict[Value, Type | None]:
    """Types of all values of a graph with a size for every symbol: those in ``sizes``, of a batch 1, of others a
    typical one."""
    dims = {name: max(symbol.lo, 1 if _is_batch(name) else TYPICAL_DIM) for name, symbol in graph.symbols.items()}
    for name, symbol in graph.symbols.items():
        if symbol.hi is not None:
            dims[name] = min(dims[name], symbol.hi)
    inference = TypeInference({**dims, **(sizes or {})}, annotated=True)
    inference.run(graph, given)
    return inference.types


def _is_batch(name: str) -> bool:
    folded = name.lower()
    return "batch" in folded or folded in ("n", "b", "bs")
