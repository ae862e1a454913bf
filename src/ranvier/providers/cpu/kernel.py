"""A partition compiled by the CPU provider: one native call per run, one specialisation per set of shapes."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.codegen.definitions.define import define
from ranvier.codegen.definitions.defs import Declined, NeedsValue
from ranvier.codegen.definitions.reasons import shape_sources
from ranvier.codegen.signature import Constant, Tensor
from ranvier.codegen.storage import row_major
from ranvier.codegen.tuning import Decision
from ranvier.errors import InvalidValue, KernelError, OutOfMemory, RanvierError, ResourceLimit
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.types import TensorType, Type
from ranvier.logs import warn_once
from ranvier.memory import promised
from ranvier.ops import TypeInference, registry
from ranvier.ops.pulse import pulse, watching
from ranvier.providers.base import (
    BodyRunner,
    CompileContext,
    Entry,
    KernelStats,
    KernelTime,
    MemoryUsage,
    NodePrecision,
    Subgraph,
    TensorAllocator,
)
from ranvier.providers.cpu.growing import Growing
from ranvier.providers.cpu.growing_calls import GrowingCalls
from ranvier.providers.cpu.lower.index import LOWERINGS
from ranvier.providers.cpu.narrow.effective import effective
from ranvier.providers.cpu.products import CpuProducts
from ranvier.providers.cpu.specialise import CheckFailed, Result, Specialised
from ranvier.providers.cpu.target import Packs, Target
from ranvier.varying import Span

Array = np.ndarray[Any, Any]
_SMALL = 64  # inputs of up to this many elements may decide shapes
_EXPLAINED = 1e9  # operations and bytes of work that may be done again to say what was wrong with the data


class Unlowered:
    """Shapes that no code was made for, and why; ``flaw``: something here failed that should not have."""

    __slots__ = ("flaw", "reason")

    def __init__(self, reason: Exception) -> None:
        self.flaw = not isinstance(reason, RanvierError | Declined | NeedsValue)
        self.reason = f"{type(reason).__name__}: {reason}" if self.flaw else str(reason)


class CpuKernel:
    """Thread-safe. ``bind`` gives the specialisation for known shapes; a plain call finds it by its inputs."""

    def __init__(
        self,
        part: Subgraph,
        ctx: CompileContext,
        target: Target,
        allocator: TensorAllocator,
        packs: Packs | None = None,
    ) -> None:
        self.part = part
        self.target = target
        self._products = CpuProducts(target.isa)
        self._ctx = ctx
        self._allocator = allocator
        self._keep = ctx.config.plan_cache
        # looked up now: operators that are replaced later stay as they are in this session
        self._bodies = [(node, registry.get(node.domain, node.op, node.version)) for node in part.nodes]
        self.inputs = tuple(v for v in part.inputs if v.const is None)
        self.holds_constants = True
        self.checks_buffers = True
        self._positions = [k for k, v in enumerate(part.inputs) if v.const is None]
        self._packs = packs or Packs()
        self._lock = threading.RLock()
        self._made: OrderedDict[Any, Specialised | Unlowered] = OrderedDict()
        self._keyed: tuple[int, ...] = ()  # of self.inputs: those whose content decides shapes
        self._growing = GrowingCalls()
        self._runners: dict[Graph, BodyRunner] = {}  # of branches, for when the part runs node by node
        self._calls, self._seconds = 0, 0.0

    def narrowed(self, part: Subgraph) -> CpuKernel:
        """The kernel of some of the part's nodes; prepared constants are shared."""
        return CpuKernel(part, self._ctx, self.target, self._allocator, self._packs)

    # -- shapes known before the call -------------------------------------------------------------------------------

    def bind(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array]) -> Bound | None:
        """The specialisation for these types, or None where only the inputs' content will tell."""
        shapes: list[Any] = []
        for value in self.inputs:
            found = types.get(value)
            if not isinstance(found, TensorType) or not found.is_static or found.dtype is None:
                return None
            shapes.append((found.dtype.numpy, found.shape))
        if self._keyed:
            return None
        key = (tuple(shapes), ())
        with self._lock:
            made = self._made.get(key)
            if made is None:
                try:
                    made = self._specialise(types, known)
                except ResourceLimit:
                    raise
                except Exception:
                    return None  # the call meets the same, and says so if the data is not to blame
                self._remember(key, made)
        return Bound(self, made) if isinstance(made, Specialised) else None

    def grow(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array], span: Span) -> BoundSpan:
        """The specialisations of a span of calls."""
        if self._keyed:
            raise Declined("the content of inputs decides about shapes")
        with self._lock:
            made = self._lowered(types, known, span)
        return BoundSpan(self, made)

    def _lowered(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array], span: Span) -> Growing:
        definitions = define(self.part.inputs, self.part.nodes, types, known, LOWERINGS, self._products)
        return Growing(self.part, self.inputs, definitions, self.target, self._packs, span)

    def _span(self, inference: TypeInference, span: Span) -> Growing:
        return self._lowered(inference.types, inference.values, span)

    def _specialise(self, types: Mapping[Value, Type | None], known: Mapping[Value, Array]) -> Specialised:
        definitions = define(self.part.inputs, self.part.nodes, types, known, LOWERINGS, self._products)
        return Specialised(self.part, self.inputs, definitions, self.target, self._packs)

    def _remember(self, key: Any, made: Specialised | Unlowered) -> None:
        self._made[key] = made
        while len(self._made) > self._keep:
            self._made.popitem(last=False)

    # -- shapes known by the call -----------------------------------------------------------------------------------

    def __call__(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Array | None, dims: Mapping[str, int]
    ) -> None:
        self._run(inputs, outputs, profiled=False)

    def profile(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: Any, dims: Mapping[str, int]
    ) -> list[KernelTime]:
        return self._run(inputs, outputs, profiled=True)

    def _run(self, inputs: Sequence[Any], outputs: list[Any], profiled: bool) -> list[KernelTime]:
        given = [row_major(inputs[k], aligned=True) for k in self._positions]
        made = self._find(given)
        if isinstance(made, Unlowered):
            self._interpret(given, outputs)
            self._tell(made)
            return []
        missing = made.result_bytes if any(given is None for given in outputs) else 0
        records: list[KernelTime] = []
        started = time.perf_counter()
        with promised(missing, self.part.label):
            results = [_writable(given, result) for given, result in zip(outputs, made.results)]
            memory = self._allocator.alloc(made.workspace, self.part.label)
            try:
                if profiled:
                    records = made.profile(given, results, memory.ctypes.data)
                else:
                    made.run(given, results, memory.ctypes.data)
            except CheckFailed as failed:
                self.explain(given, made, failed)
            finally:
                self._allocator.free(memory)
        outputs[:] = results
        self.count(time.perf_counter() - started)
        return records

    def count(self, seconds: float) -> None:
        self._calls += 1
        self._seconds += seconds

    def _find(self, given: Sequence[Array]) -> Specialised | Unlowered:
        shapes = tuple([(x.dtype, x.shape) for x in given])
        with self._lock:
            key = (shapes, self._content(given))
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
            made: Specialised | Unlowered
            grown = self._growing.find(given, self._keyed) or self._growing.make(
                given, self._keyed, self.part, self._infer, self._span
            )
            if grown is not None:
                return grown
            while True:
                try:
                    inference = self._infer(given)
                    made = self._specialise(inference.types, inference.values)
                except ResourceLimit:
                    raise
                except Exception as reason:
                    if isinstance(reason, NeedsValue | Declined) and self._key_more(given):
                        continue
                    made = Unlowered(reason)
                break
            self._remember((shapes, self._content(given)), made)
            return made

    def _content(self, given: Sequence[Array]) -> tuple[bytes, ...]:
        return tuple([given[k].tobytes() for k in self._keyed])

    def _key_more(self, given: Sequence[Array]) -> bool:
        """Let the content of small inputs decide shapes too, first of those that operands which decide shapes
        are made from, then of all integers; False when it does already."""
        small = [k for k, x in enumerate(given) if x.size <= _SMALL]
        deciding = shape_sources(self.part.nodes, LOWERINGS)
        sources = tuple(k for k in small if self.inputs[k] in deciding)
        for found in (sources, tuple(k for k in small if k in sources or given[k].dtype.kind in "iub")):
            if len(found) > len(self._keyed):
                self._keyed = found
                return True
        return False

    def _infer(self, given: Sequence[Array]) -> TypeInference:
        inference = TypeInference()
        for value, array in zip(self.inputs, given):
            inference.types[value] = TensorType(dtypes.of(array), array.shape)
        for k in self._keyed:
            inference.values[self.inputs[k]] = given[k]
        for value in self.part.inputs:
            if value.const is not None:
                inference.know(value)
        for node in self.part.nodes:
            inference.visit(node)
        return inference

    # -- the operators' own bodies ----------------------------------------------------------------------------------

    def _interpret(self, given: Sequence[Array], outputs: list[Any]) -> None:
        """Run node by node as the reference does: for shapes that no lowering takes, and for its errors."""
        env: dict[Value, Any] = {v: v.const.numpy() for v in self.part.inputs if v.const is not None}
        env.update(zip(self.inputs, given))
        kept = set(self.part.outputs)
        last = {v: node for node in self.part.nodes for v in [*node.dependencies(), *node.outputs]}
        for node, definition in self._bodies:
            name = node.name or node.op
            pulse(f"{node.op} {name!r}")
            wanted = tuple(bool(v.uses) or v.is_graph_output for v in node.outputs)
            call = registry.Call(wanted, node.version, node=node, opsets=self._ctx.opsets)
            operands = [None if v is None else env[v] for v in node.inputs]
            if node.has_subgraphs:
                call.run = functools.partial(self._nested, {v: env[v] for v in node.captures()})
            try:
                with np.errstate(all="ignore"):
                    results = definition.run(operands, node.attrs, call)
            except RanvierError as error:
                _at(node, error)
                raise
            except MemoryError as error:
                raise OutOfMemory(f"{node.op} {name!r} on cpu: out of memory") from error
            except Exception as error:
                message = f"{node.op} {name!r} failed on cpu: {type(error).__name__}: {error}"
                raise KernelError(message, node=name, op=node.op, provider="cpu") from error
            if len(results) < len(node.outputs) and any(wanted[len(results) :]):
                message = f"{node.op}: gave {len(results)} results, output {len(results)} is used"
                raise _at(node, InvalidValue(message, op=node.op))
            env.update(zip(node.outputs, results))
            for value in {v for v in [*node.dependencies(), *node.outputs] if last[v] is node} - kept:
                env.pop(value, None)
        for k, value in enumerate(self.part.outputs):
            found = env[value]
            buffer = outputs[k]
            if buffer is not None and buffer.shape == found.shape and buffer.dtype == found.dtype:
                np.copyto(buffer, found)
            else:
                outputs[k] = np.array(found)

    def _nested(self, captured: Mapping[Value, Any], graph: Graph, given: Sequence[Any]) -> list[Any]:
        with self._lock:
            runner = self._runners.get(graph)
            if runner is None:
                runner = self._runners[graph] = self._ctx.body(graph)
        return runner(given, captured)

    def bodies(self) -> Sequence[BodyRunner]:
        with self._lock:
            return tuple(self._runners.values())

    def _tell(self, made: Unlowered) -> None:
        label = self.part.label
        what = "could not be compiled, which is a flaw" if made.flaw else "runs by the reference"
        key = f"{self.part.nodes[0].op} {made.reason}" if made.flaw else label
        warn_once(f"cpu-interpret-{key}", f"cpu: {label} {what}: {made.reason}")

    def explain(self, given: Sequence[Array], made: Specialised, failed: CheckFailed) -> None:
        """Raise for data that generated code refused: as the reference says it where finding out costs little."""
        if sum(each.flops + each.traffic for each in made.launches) < _EXPLAINED:
            self._interpret(given, [None] * len(self.part.outputs))
        node = next((n for n in self.part.nodes if failed.node in (n.name, n.op)), None)
        raise failed if node is None else _at(node, failed)

    @property
    def refused(self) -> str:
        return effective(self._ctx.config.precision, self.target.isa)[1]

    def precisions(self) -> Mapping[str, NodePrecision]:
        newest = self._newest()
        return {} if newest is None else newest.choices

    @property
    def code(self) -> str:
        return self.target.isa.key

    @property
    def threads(self) -> int:
        return self.target.threads

    def decisions(self) -> Sequence[Decision]:
        newest = self._newest()
        return () if newest is None else newest.decisions

    def joined(self) -> Sequence[tuple[str, ...]]:
        newest = self._newest()
        return () if newest is None else newest.joined

    # -- about it ---------------------------------------------------------------------------------------------------

    def in_place(self, output: int, input: int) -> bool:
        return False  # memory inside the partition is planned by itself

    def memory_usage(self) -> MemoryUsage:
        with self._lock:
            workspace = max((m.workspace for m in self._made.values() if isinstance(m, Specialised)), default=0)
        return MemoryUsage(self._packs.nbytes, workspace)

    def stats(self) -> KernelStats:
        return KernelStats(self._calls, self._seconds)

    @property
    def source(self) -> str:
        """The launches of the newest specialisation, for people to read."""
        newest = self._newest()
        if newest is None:
            return "not yet compiled: shapes are known at the first run"
        return newest.text()

    def _newest(self) -> Specialised | None:
        with self._lock:
            return next((m for m in reversed(self._made.values()) if isinstance(m, Specialised)), None)

    def assembly(self) -> list[str]:
        """The machine code of all kernels of the newest specialisation."""
        newest = self._newest()
        return [] if newest is None else newest.assembly()


class Bound:
    """A kernel for shapes that are known: takes the plan's memory."""

    __slots__ = ("_program", "constants", "kernel", "made", "memory", "positions", "workspace")

    def __init__(self, kernel: CpuKernel, made: Specialised) -> None:
        self.kernel = kernel
        self.made = made
        self._program = made.program if made.runs_alone() else None
        self.positions = kernel._positions
        self.workspace = made.workspace
        self.constants = made.constants
        self.memory = made.memory

    def __call__(self, inputs: Sequence[Any], outputs: list[Any], workspace: int, dims: Mapping[str, int]) -> None:
        """As a compiled kernel, but ``workspace`` is the address of ``self.workspace`` bytes."""
        self._complete(outputs)
        self.call([inputs[k] for k in self.positions], outputs, workspace)

    def call(self, given: list[Array], outputs: list[Array], workspace: int) -> None:
        program = self._program
        if program is not None and watching() is None and program.run_alone(given, outputs, workspace):
            return
        for k, x in enumerate(given):
            flags = x.flags
            if not (flags.c_contiguous and flags.aligned):
                given[k] = row_major(x, aligned=True)
        try:
            self.made.run(given, outputs, workspace)
        except CheckFailed as failed:
            self.kernel.explain(given, self.made, failed)

    def entry(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | Constant], workspace: int) -> Entry | None:
        return self.made.entry(inputs, outputs, workspace)

    def may_overwrite(self, output: int, given: int) -> bool:
        return self.made.may_overwrite(output, given)

    def profile(
        self, inputs: Sequence[Any], outputs: list[Any], workspace: int, dims: Mapping[str, int]
    ) -> list[KernelTime]:
        self._complete(outputs)
        given = [row_major(inputs[k], aligned=True) for k in self.positions]
        try:
            return self.made.profile(given, outputs, workspace)
        except CheckFailed as failed:
            self.kernel.explain(given, self.made, failed)
            raise

    def _complete(self, outputs: list[Any]) -> None:
        outputs[:] = [_writable(given, result) for given, result in zip(outputs, self.made.results)]


class BoundSpan:
    """A kernel for a span of calls whose inputs grow."""

    def __init__(self, kernel: CpuKernel, made: Growing) -> None:
        self._kernel, self._made = kernel, made
        self.calls = made.calls

    def at(self, call: int) -> Bound:
        return Bound(self._kernel, self._made.at(call))


def _at(node: Node, error: RanvierError) -> RanvierError:
    """The error with the node it came from."""
    name = node.name or node.op
    error.node = error.node or name
    error.add_note(f"while running {node.op} {name!r} on cpu")
    return error


def _writable(buffer: Array | None, result: Result) -> Array:
    """Where generated code writes a result: the caller's buffer where it is just such memory, or new memory."""
    if buffer is not None and buffer.shape == result.shape and buffer.dtype == result.dtype and buffer.flags.carray:
        return buffer
    return np.empty(result.shape, result.dtype)
