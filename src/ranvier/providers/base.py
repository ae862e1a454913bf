"""The contract between the runtime and an execution provider.

A provider looks at a graph and says which nodes it takes (:class:`Claim`) and why it leaves the others
(:class:`Decline`); it turns a part of the graph into a :class:`CompiledKernel`; it owns the memory its kernels use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from ranvier.codegen.arena import MemoryPlan
from ranvier.codegen.launch import Units
from ranvier.codegen.signature import Constant, Tensor
from ranvier.codegen.tuning import Decision
from ranvier.config import MemoryConfig, SessionConfig
from ranvier.devices import Device
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import Type
from ranvier.memory import MemoryTracker
from ranvier.records import dataclass
from ranvier.varying import Span

Array = np.ndarray[Any, Any]
LARGEST_VALUES = "largest values"  # in a graph's metadata: of its tensors on a sample, by name, where somebody looked


@dataclass(frozen=True)
class Claim:
    """Nodes a provider would run, with the reason where it is worth telling."""

    nodes: tuple[Node, ...]
    note: str = ""


@dataclass(frozen=True)
class Decline:
    """A node a provider leaves to others, and why."""

    node: Node
    reason: str


@dataclass(frozen=True)
class ProviderCapability:
    """What a provider can do, before it has seen a model. ``None`` means everything there is."""

    ops: frozenset[str] | None = None
    dtypes: frozenset[DType] | None = None
    memory: tuple[str, ...] = ("system",)
    whole_parts: bool = True  # False: compiles one node at a time, so the runtime plans between its nodes
    notes: str = ""
    last_resort: bool = False  # gets only what no other provider takes, whatever the costs
    asks_for_bodies: bool = False  # the runtime runs bodies of control flow for it, wherever their nodes are placed
    devices: frozenset[str] = frozenset()  # kinds it computes on; empty: that of its tensors
    max_rank: int | None = None
    max_dim: int | None = None  # along any axis
    max_batch: int | None = None
    max_sequence: int | None = None
    flash_attention: bool = False  # attention without the matrix of scores in memory
    paged_attention: bool = False  # keys and values in blocks that need not lie together
    cuda_graphs: bool = False
    tensor_parallel: int = 1  # devices that share one operator
    pipeline_parallel: int = 1  # devices that share the layers
    alignment: int = 1  # bytes: where tensors that it is given must start
    custom_kernels: frozenset[str] = frozenset()  # kinds of source that its ``kernels`` load
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else it says about itself
    threads: str = ""  # its kernels use: "one", "given" (as many as the session says); "": nobody knows
    dear_claims: bool = False  # asking it about a graph takes long: answers are kept (see providers/claims.py)


class GraphView:
    """The nodes of a graph that a provider may claim; a filter, not a copy."""

    __slots__ = ("_open", "graph")

    def __init__(self, graph: Graph, open_nodes: Iterable[Node] | None = None) -> None:
        self.graph = graph
        self._open = None if open_nodes is None else {id(n) for n in open_nodes}

    def __iter__(self) -> Iterator[Node]:
        for node in self.graph:
            if self._open is None or id(node) in self._open:
                yield node


@dataclass(frozen=True)
class Subgraph:
    """A part to compile: nodes in order, the values it reads (captures of nested graphs included) and makes."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    graph: Graph

    @property
    def label(self) -> str:
        first = self.nodes[0]
        return first.name or first.op if len(self.nodes) == 1 else f"{first.name or first.op} +{len(self.nodes) - 1}"


BodyRunner = Callable[[Sequence[Any], Mapping[Value, Any]], list[Any]]


@dataclass(frozen=True)
class CompileContext:
    """What compiling may use: the session's options, and a way to run a nested graph."""

    config: SessionConfig
    options: Any
    body: Callable[[Graph], BodyRunner]  # makes a runner for a subgraph: (explicit inputs, captured values) -> outputs
    opsets: Mapping[str, int] = field(default_factory=dict)
    allocator: TensorAllocator | None = None  # of the host's memory: what this session wants used


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes a kernel holds for itself (constants) and needs while it runs (workspace)."""

    constants: int = 0
    workspace: int = 0


@dataclass(frozen=True)
class KernelStats:
    """How often a kernel ran and how long that took."""

    calls: int = 0
    seconds: float = 0.0


@runtime_checkable
class CompiledKernel(Protocol):
    """One part, ready to run."""

    @property
    def source(self) -> str:
        """What was generated, for people to read."""
        ...

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        """Run. ``outputs[k]`` holds a buffer to write into, or None: then the kernel puts its own value there."""
        ...

    def in_place(self, output: int, input: int) -> bool:
        """May this output be written over this input's memory, when nobody needs the input afterwards?"""
        ...

    def memory_usage(self) -> MemoryUsage: ...

    def stats(self) -> KernelStats: ...


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One generated kernel inside a step: when it ran (nanoseconds of ``time.perf_counter_ns``) and what it did."""

    label: str  # the nodes it stands for
    kernel: str
    start_ns: int
    end_ns: int
    flops: float
    bytes: float
    threads: int
    units: Units = ""  # what did the arithmetic, of which each has a peak of its own


@runtime_checkable
class Profiled(Protocol):
    """A kernel, bound or not, that can tell what it did inside: called instead of the kernel while somebody watches."""

    def profile(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Any, dims: Mapping[str, int]
    ) -> list[KernelTime]: ...


class BoundKernel(Protocol):
    """A kernel for types that are known: called with the address of ``workspace`` bytes from the plan's arena."""

    workspace: int
    constants: int  # bytes of weights it reads, in the form it wants them
    memory: MemoryPlan  # what lies where in the workspace

    def __call__(self, inputs: Sequence[Any], outputs: list[Any], workspace: int, dims: Mapping[str, int]) -> None: ...

    def call(self, given: list[Array], outputs: list[Array], workspace: int) -> None:
        """The same with the inputs that are no constants, and with arrays of the right type and shape everywhere."""
        ...


@runtime_checkable
class Overwrites(Protocol):
    """A bound kernel that knows which results it can write over which inputs, counted as ``call`` is given them."""

    def may_overwrite(self, output: int, given: int) -> bool:
        """Whether it can where both have the same type and shape, in runs that nobody watches; such a run fails, if
        it does, before it writes there."""
        ...


class Entry(Protocol):
    """The way into a bound kernel that goes through no Python: ``run(inputs)`` by name gives the outputs by name, or
    None where the call is another one, or two come at a time. The workspace belongs to it until it is closed."""

    def run(self, inputs: Any, /) -> dict[str, Any] | None: ...

    @property
    def busy(self) -> bool: ...

    @property
    def runs(self) -> int: ...

    def close(self) -> bool:
        """Takes it out of use, if no run is in it."""
        ...


@runtime_checkable
class Enters(Protocol):
    """A bound kernel that may have an entry of its own."""

    def entry(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | Constant], workspace: int) -> Entry | None:
        """Places are those that ``call`` is given them at."""
        ...


@runtime_checkable
class Bindable(Protocol):
    """A compiled kernel that can be prepared for types before it is called."""

    def bind(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array]) -> BoundKernel | None:
        """The kernel for these types of values, and small tensors whose content is known; None where they do not
        suffice."""
        ...


class SpanKernel(Protocol):
    """A kernel for a span of calls whose inputs grow."""

    calls: int  # how many there are

    def at(self, call: int) -> BoundKernel:
        """The kernel of one of them; 0 is the first. All work in memory of the same size."""
        ...


@runtime_checkable
class Growable(Protocol):
    """A compiled kernel that can be prepared for many calls at once, whose sizes are numbers that vary
    (:mod:`ranvier.varying`)."""

    def grow(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array], span: Span) -> SpanKernel: ...


@runtime_checkable
class SelfContained(Protocol):
    """A compiled kernel with the part's constants in a form of its own: what it is given for them, it ignores."""

    holds_constants: bool


@dataclass(frozen=True)
class NodePrecision:
    """What a node computes in and its result is stored in ("f32", "bf16", "fp16"), and why where there is a reason."""

    computes: str
    stores: str
    why: str = ""


@runtime_checkable
class TellsPrecision(Protocol):
    """A compiled kernel that can store and multiply float32 values in 16 bits, where the session allows it."""

    @property
    def refused(self) -> str:
        """Why it does not do what the session asks for; empty where it does."""
        ...

    def precisions(self) -> Mapping[str, NodePrecision]:
        """By the names of nodes, for the shapes that were last compiled for."""
        ...


@runtime_checkable
class RunsBodies(Protocol):
    """A compiled kernel that has bodies of control flow run for it (:attr:`CompileContext.body`)."""

    def bodies(self) -> Sequence[BodyRunner]:
        """Those it has made so far."""
        ...


@runtime_checkable
class Branches(Protocol):
    """A compiled kernel that runs one of two bodies, as a condition says; its results are the first ones of theirs."""

    @property
    def condition(self) -> int:
        """Its place among the inputs."""
        ...

    def branch(self, truth: bool) -> BodyRunner: ...


@runtime_checkable
class TellsDecisions(Protocol):
    """A compiled kernel whose planners may take decisions from a table (:mod:`ranvier.codegen.tuning`)."""

    @property
    def code(self) -> str:
        """The instruction set it is compiled for."""
        ...

    @property
    def threads(self) -> int: ...

    def decisions(self) -> Sequence[Decision]:
        """Those of the shapes that were last compiled for, where a table was looked at."""
        ...


@runtime_checkable
class TellsJoined(Protocol):
    """A compiled kernel that may take several products of one tensor as one step."""

    def joined(self) -> Sequence[tuple[str, ...]]:
        """The nodes of each such step, for the shapes that were last compiled for."""
        ...


@runtime_checkable
class ChecksBuffers(Protocol):
    """A compiled kernel that looks at the memory it is offered for a result: where that is of another shape or type, it
    makes its own. So a caller's memory can be offered before the size of the result is known."""

    checks_buffers: bool


@runtime_checkable
class Narrowable(Protocol):
    """A compiled kernel of several nodes that can be had for some of them: what a call asks for, and no more."""

    def narrowed(self, part: Subgraph) -> CompiledKernel: ...


@runtime_checkable
class TensorAllocator(Protocol):
    """Memory of one device: 64-byte aligned."""

    def alloc(self, nbytes: int, part: str = "") -> Array:
        """A buffer; OutOfMemory, which names ``part``, where there is no room."""
        ...

    def free(self, buffer: Array) -> None:
        """Give back what ``alloc`` gave, the same object; InvalidBuffer for anything else."""
        ...

    def copy(self, source: Array, target: Array) -> None: ...

    def trim(self) -> int: ...

    def stats(self) -> AllocatorStats: ...


@runtime_checkable
class PooledAllocator(TensorAllocator, Protocol):
    """An allocator that can be had with a pool of one's own."""

    @property
    def secure(self) -> bool: ...

    def configured(
        self, config: MemoryConfig, limit: int | None = None, name: str = "", tracker: MemoryTracker | None = None
    ) -> PooledAllocator: ...

    def on_pressure(self, release: Callable[[], object]) -> None: ...

    def ask_back(self) -> None:
        """Have everybody who registered with ``on_pressure`` give back what waits."""
        ...

    def touched(self, buffer: Array) -> None:
        """A buffer has been written to: from now on the system counts it."""
        ...

    def close(self) -> int: ...


@dataclass(frozen=True)
class AllocatorStats:
    """Bytes in use now, at most, and kept for reuse; taken from the system in all. How many requests there were, and
    how many of them failed."""

    active: int
    peak: int
    cached: int
    reserved: int = 0
    allocations: int = 0
    failures: int = 0


@dataclass(frozen=True)
class DeclaredSpeed:
    """What a device is said to do, for placing by cost where nobody has measured it."""

    flops: float  # operations a second
    bandwidth: float  # bytes a second between its memory and the host's
    latency: float  # seconds of a transfer or a launch
    memory: float  # bytes it can hold


@runtime_checkable
class DeclaresSpeed(Protocol):
    """A provider that knows the speed of its device."""

    def declared_speed(self) -> DeclaredSpeed: ...


@runtime_checkable
class Configurable(Protocol):
    """A provider whose options matter before it compiles: for what it claims, or for the device it speaks to."""

    def configure(self, options: Any) -> ExecutionProvider:
        """The provider with these options."""
        ...


@runtime_checkable
class AvailableWith(Protocol):
    """A provider that some options make available where it is not by itself."""

    def available_with(self, options: Mapping[str, Any]) -> str | None:
        """None, or the reason why it cannot be used here with these options."""
        ...


@dataclass(frozen=True)
class KernelInfo:
    """A loaded kernel, for people and programs: what it is made of, how it is called and how often it was."""

    name: str
    kind: str  # of source, one of ``ProviderCapability.custom_kernels``
    signature: str
    source: str  # what was generated, in the provider's own language
    launches: int
    seconds: float


@dataclass(frozen=True)
class KernelHandle:
    """Stands for a kernel that was loaded; only the provider that made it knows what it means."""

    provider: str
    name: str
    number: int


class CustomKernels(Protocol):
    """Kernels of the user's own, on one provider. Thread-safe.

    What ``source`` and ``signature`` may be, the provider says; ``grid`` is the number of tiles of work along up to
    three axes, ``block`` the size of one tile.
    """

    def load(self, source: Any, name: str, signature: Any) -> KernelHandle:
        """Make a kernel; InvalidConfig where source and signature do not fit, KernelError where it does not compile."""
        ...

    def launch(self, handle: KernelHandle, grid: Any, block: Any, args: Sequence[Any]) -> None:
        """Run it to the end. Arguments that the signature does not allow raise before anything runs."""
        ...

    def info(self, handle: KernelHandle) -> KernelInfo: ...

    def unload(self, handle: KernelHandle) -> None:
        """Forget it: launches under way finish, later ones raise."""
        ...


@runtime_checkable
class OffersKernels(Protocol):
    """A provider that runs kernels of the user's own."""

    @property
    def kernels(self) -> CustomKernels: ...


class ExecutionProvider(Protocol):
    """Something that can run parts of a graph."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]  # other names people know it by, ONNX Runtime's among them
    device: Device
    Options: ClassVar[type]  # a frozen, validated dataclass

    def available(self) -> str | None:
        """None, or the reason why it cannot be used here."""
        ...

    def capability(self) -> ProviderCapability: ...

    def claim(self, view: GraphView) -> Iterable[Claim | Decline]: ...

    def compile(self, part: Subgraph, ctx: CompileContext) -> CompiledKernel: ...

    def allocator(self) -> TensorAllocator: ...

    def close(self) -> None: ...
