"""What running a model will take, before it is compiled, or exactly once it is."""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.codegen.arena import Lifetime, plan_memory
from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph, Value
from ranvier.ops import TypeInference, registry
from ranvier.records import dataclass
from ranvier.runtime.program import static_bytes
from ranvier.runtime.session import Session


@dataclass(frozen=True)
class ModelEstimate:
    """Bytes of one run. ``exact``: the figures are those of a plan; otherwise they were worked out from types alone."""

    weights: int  # in the model
    packed: int  # the weights as kernels will read them; where they make no other form, the weights themselves
    arena: int
    outputs: int
    unknown: tuple[str, ...] = ()  # values whose size only the run will tell; they count for nothing
    exact: bool = False

    @property
    def run(self) -> int:
        """What one run takes, as the limit ``memory_bytes`` counts it."""
        return self.packed + self.arena + self.outputs


def estimate_model(model: Graph | Session, dims: Mapping[str, int] | None = None) -> ModelEstimate:
    """The memory of one run with these sizes of the symbolic dims.

    For a session the plan is made and its figures are exact but for values of unknown size. For a graph every result
    gets a place from its birth to its last use, an elementwise one that of an operand that ends there. A provider that
    fuses nodes needs less, one that keeps scratch memory or unfolds weights (fast convolutions take up to four times
    theirs) more.
    """
    sizes = dict(dims or {})
    if isinstance(model, Session):
        plan = model.bind(**sizes)
        names = {slot: value.name for value, slot in plan.program.slots.items()}
        return ModelEstimate(
            model.graph.constant_bytes(),
            plan.weight_bytes(),
            plan.memory.arena,
            plan.output_bytes(),
            tuple(names[slot] for slot in plan.layout.unplanned),
            exact=True,
        )
    for name in sizes:
        if name not in model.symbols:
            raise InvalidConfig(f"the model has no dimension {name!r}{nearest(name, model.symbols)}")
    inference = TypeInference(sizes)
    inference.run(model)
    weights = model.constant_bytes()
    results = dict.fromkeys(model.outputs)
    found, unknown = lifetimes(model, inference, set(results))
    outputs = 0
    for value in results:
        nbytes = static_bytes(inference.types.get(value))
        outputs += nbytes or 0
        if nbytes is None:
            unknown.append(value.name)
    return ModelEstimate(weights, weights, plan_memory(found).arena, outputs, tuple(unknown))


def lifetimes(graph: Graph, inference: TypeInference, kept: set[Value]) -> tuple[list[Lifetime], list[str]]:
    """When each value of a graph is born and used last, without those that are kept; and those of unknown size."""
    nodes = list(graph)
    last = {value: k for k, node in enumerate(nodes) for value in (*node.outputs, *node.dependencies())}
    found: list[Lifetime] = []
    unknown: list[str] = []
    index: dict[Value, int] = {}
    for k, node in enumerate(nodes):
        definition = registry.find(node.domain, node.op, node.version)
        takes_over: tuple[int, ...] = ()
        if definition is not None and "elementwise" in definition.traits:
            takes_over = tuple(index[v] for v in node.inputs if v is not None and v in index and last[v] == k)
        for value in node.outputs:
            if value in kept or value.const is not None:
                continue
            nbytes = static_bytes(inference.types.get(value))
            if nbytes is None:
                unknown.append(value.name)
            else:
                index[value] = len(found)
                found.append(Lifetime(nbytes, k, last[value], takes_over))
    return found, unknown
