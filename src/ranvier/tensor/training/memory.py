"""What a training step takes, before it is run.

The step is written out as the graph it will be (the model, and behind it the gradients of all that is learned), and
every value in it gets a place from its birth to its last use, as for running. What the backward half reads of the
forward half must be kept in between; it is most of the memory, and what recomputing saves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ranvier.codegen.arena import plan_memory
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops import TypeInference
from ranvier.passes import DeadCode, PassManager
from ranvier.passes.differentiate import differentiate
from ranvier.records import dataclass
from ranvier.runtime.estimates import lifetimes
from ranvier.runtime.program import static_bytes
from ranvier.tensor.training.learned import roles_of
from ranvier.tensor.training.lowering import LEARNING, prepared, settle

Shape = tuple[int, ...]
# numbers that an optimizer keeps for each weight; Adafactor keeps sums of rows and columns
_KEPT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "lion": 1, "rmsprop": 1}
OPTIMIZERS = (*_KEPT, "adafactor")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class TrainingEstimate:
    """Bytes of one training step."""

    weights: int  # all of them, learned or not
    learned: int  # those that are learned
    gradients: int
    optimizer: int  # what it keeps from step to step
    activations: int  # of the forward half, kept for the backward half
    working: int  # the most that intermediate values, those among them, take at a time
    inputs: int
    unknown: tuple[str, ...] = ()  # values whose size only the run will tell

    @property
    def total(self) -> int:
        """The most there is at a time."""
        return self.weights + self.gradients + self.optimizer + self.working + self.inputs


def estimate_training(
    graph: Graph,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    optimizer: str = "adamw",
    learned: Iterable[str] | None = None,
) -> TrainingEstimate:
    """The memory of a training step of a loaded model. ``batch`` is the size of the inputs' first axes, ``dims`` are
    other sizes by name (1 for those left out); ``learned`` are the names of what is not frozen."""
    if optimizer not in OPTIMIZERS:
        raise InvalidConfig(f"no optimizer is called {optimizer!r}{nearest(optimizer, OPTIMIZERS)}")
    settle(graph)
    roles = roles_of(graph)
    chosen = [n for n in roles.learned if n not in roles.same and (learned is None or n in set(learned))]
    types = {value.name: _sized(value, batch, dims or {}) for value in graph.inputs}
    training = frozenset(n.name for n in graph if n.op in LEARNING and not n.domain)
    own, _, _ = prepared(graph, types, chosen, roles.followed, training)
    first = len(types)
    wanted = own.inputs[first : first + len(chosen)]
    floats = [v for v in own.outputs if isinstance(v.type, TensorType) and v.type.dtype and v.type.dtype.is_float]
    gradients = [g for g in differentiate(own, [(v, None) for v in floats], wanted) if g is not None]
    forward = _behind(own.outputs)
    own.outputs = [*own.outputs, *gradients]
    PassManager([DeadCode()]).run(own)
    working, unknown = peak(own)
    shapes = [_shape(graph, name) for name in chosen]
    return TrainingEstimate(
        weights=graph.constant_bytes(),
        learned=sum(_bytes(v) for v in wanted),
        gradients=sum(_bytes(v) for v in wanted),
        optimizer=optimizer_bytes(optimizer, shapes),
        activations=_kept(own, forward),
        working=working,
        inputs=sum(_bytes(v) for v in own.inputs[:first]),
        unknown=tuple(unknown),
    )


def peak(graph: Graph) -> tuple[int, list[str]]:
    """The most that a graph's intermediate values take at a time, and those of unknown size."""
    inference = TypeInference({})
    inference.run(graph)
    found, unknown = lifetimes(graph, inference, set(graph.outputs))
    return plan_memory(found).arena, unknown


def optimizer_bytes(optimizer: str, shapes: Sequence[Shape]) -> int:
    """What an optimizer keeps, in float32."""
    numbers = 0
    for shape in shapes:
        size = 1
        for d in shape:
            size *= d
        if optimizer == "adafactor":
            numbers += size // shape[-1] + size // shape[-2] if len(shape) > 1 and size else size
        else:
            numbers += _KEPT[optimizer] * size
    return 4 * numbers


def bytes_of_text(limit: int | str) -> int:
    """Bytes from a number or from text like ``"500 MB"``, ``"2GiB"``."""
    if isinstance(limit, int):
        return limit
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", limit)
    if found is None or found[2].lower() not in _UNITS:
        raise InvalidConfig(f"not a size of memory: {limit!r}; write 2000000, '500 MB' or '2 GiB'")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _sized(value: Value, batch: int | None, dims: Mapping[str, int]) -> tuple[DType, Shape]:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.dtype is None or kind.shape is None:
        raise InvalidConfig(f"input {value.name!r} is {kind}; a step can be estimated for tensors of known rank")
    shape = [d if isinstance(d, int) else dims.get(getattr(d, "name", ""), 1) for d in kind.shape]
    if batch is not None and shape and (not isinstance(kind.shape[0], int) or kind.shape[0] == 1):
        shape[0] = batch
    return kind.dtype, tuple(shape)


def _behind(outputs: Sequence[Value]) -> set[Node]:
    """The nodes that values are computed by."""
    found: set[Node] = set()
    pending = [v.producer for v in outputs]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [v.producer for v in node.dependencies()]
    return found


def _kept(graph: Graph, forward: set[Node]) -> int:
    """Bytes of values from the forward half that the backward half reads."""
    total = 0
    for node in graph:
        if node in forward:
            for value in node.outputs:
                if any(user not in forward for user, _ in value.uses):
                    total += _bytes(value)
    return total


def _bytes(value: Value) -> int:
    return static_bytes(value.type) or 0


def _shape(graph: Graph, name: str) -> Shape:
    const = graph.constants[name].const
    assert const is not None
    return const.shape
