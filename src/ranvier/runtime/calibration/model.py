"""What the optimiser asks about a machine, answered from measured figures or, where there are none, nominal ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ranvier.devices import CPU
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Type
from ranvier.ops import TypeInference
from ranvier.ops.estimate import BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_NODE, node_cost
from ranvier.providers.base import DeclaresSpeed, ExecutionProvider
from ranvier.providers.own_memory import OwnMemory
from ranvier.runtime.calibration.bodies import Values, graphs_run, times_run
from ranvier.runtime.calibration.classes import BY_ARITHMETIC, VIEW, Work, bytes_of, weight_bytes, work_of
from ranvier.runtime.calibration.table import Figures
from ranvier.runtime.partition.costs import ask, pose, restricted
from ranvier.runtime.partition.optimise import optimise
from ranvier.runtime.partition.problem import Link

TYPICAL_DIM = 64  # stands for a dimension that only a run will tell
_LAUNCH = 2e-6  # nominal seconds to start a part
_ITERATION = 5e-6  # nominal seconds to run a nested graph once, beside what is in it
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

    ``figures`` by the names of providers; ``types`` of values where those in the graph say too little, ``values`` the
    data of small ones: they tell how often loops run, and which branch.
    """

    def __init__(
        self,
        providers: Sequence[ExecutionProvider],
        figures: Mapping[str, Figures],
        types: Mapping[Value, Type | None] | None = None,
        values: Values | None = None,
    ) -> None:
        self.providers = list(providers)
        self.figures = dict(figures)
        self.types: dict[Value, Type] = {v: t for v, t in types.items() if t is not None} if types else {}
        self.values = values or {}
        self._home = next((p.name for p in providers if not isinstance(p, OwnMemory)), "")
        self._devices = {self.memory(provider): provider for provider in providers}
        self._works: dict[int, Work] = {}
        self._placed: dict[int, float] = {}  # seconds of nested graphs that the runtime places

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
        """The nested graphs as often as they run; of branches that may be taken the longest counts."""
        capability = provider.capability()
        driven = capability.asks_for_bodies and not capability.whole_parts
        times = [
            self._driven(body, provider) if driven else self._compiled(body, provider)
            for body in graphs_run(node, self.values)
        ]
        return max(times, default=0.0) * times_run(node, self.types, self.values)

    def _driven(self, body: Graph, provider: ExecutionProvider) -> float:
        """Once through a graph that the runtime places among all providers, whoever has the node around it."""
        found = self._placed.get(id(body))
        if found is None:
            claims = restricted(ask(body, self.providers), self.providers, {})
            found = optimise(pose(body, self.providers, self, claims=claims).problem).cost.total if len(body) else 0.0
            self._placed[id(body)] = found
        figures = self.figures.get(provider.name)
        return found + (_ITERATION if figures is None or figures.iteration is None else figures.iteration)

    def _compiled(self, body: Graph, provider: ExecutionProvider) -> float:
        """Once through a graph that the provider compiles into its part: nothing starts anew for it."""
        return sum(self.node_seconds(inner, provider) or 0.0 for inner in body)

    def _nominal(self, node: Node, work: Work, provider: ExecutionProvider) -> float:
        flops, bandwidth, each = FLOPS_PER_SECOND, BYTES_PER_SECOND, 0.0
        if isinstance(provider, DeclaresSpeed):
            flops, bandwidth = provider.declared_speed().flops, math.inf
        elif not provider.capability().whole_parts:
            each = SECONDS_PER_NODE
        if work.kind == VIEW:
            return each
        cost = node_cost(node, self.types)
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


def guessed(
    graph: Graph, given: Sequence[Type | None] | None = None, sizes: Mapping[str, int] | None = None
) -> TypeInference:
    """Types, and the data of small values, of a graph with a size for every symbol: those in ``sizes``, of a batch 1,
    of others a typical one."""
    dims = {name: max(symbol.lo, 1 if _is_batch(name) else TYPICAL_DIM) for name, symbol in graph.symbols.items()}
    for name, symbol in graph.symbols.items():
        if symbol.hi is not None:
            dims[name] = min(dims[name], symbol.hi)
    inference = TypeInference({**dims, **(sizes or {})}, annotated=True)
    inference.run(graph, given)
    return inference


def _is_batch(name: str) -> bool:
    folded = name.lower()
    return "batch" in folded or folded in ("n", "b", "bs")
