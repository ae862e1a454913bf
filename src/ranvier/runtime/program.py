"""A graph compiled to steps over numbered slots, and how one call runs through them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, KernelError, OutOfMemory, RanvierError, nearest
from ranvier.graph.ir import Graph, Value
from ranvier.graph.tensors import stand_in
from ranvier.graph.types import TensorType
from ranvier.ops.allocation import MAX_RANK, current_limit, tensor_limit
from ranvier.providers.base import (
    BodyRunner,
    BoundKernel,
    CompileContext,
    CompiledKernel,
    ExecutionProvider,
    Narrowable,
    PooledAllocator,
    Profiled,
    RunsBodies,
    SelfContained,
)
from ranvier.records import dataclass
from ranvier.runtime.control import RunControl, running
from ranvier.runtime.holdings import ask_before_failing
from ranvier.runtime.lanes import Halt, Helpers
from ranvier.runtime.partition import Beside, Blocked, Part, narrowed
from ranvier.runtime.placement import partitioned
from ranvier.runtime.transfer import HOST, TransferCounts, TransferKernel, space_of

Array = np.ndarray[Any, Any]
Buffers = Mapping[int, Array]
Prepared = tuple[BoundKernel, int]  # a kernel for known types, and the address of its workspace


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call: the slots it reads and writes, and those that are free afterwards."""

    kernel: CompiledKernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    label: str
    op: str
    provider: str


@dataclass(frozen=True, slots=True)
class Wave:
    """Steps in a row, some of which run at the same time: those of each lane in order. What several lanes read is free
    when all have ended."""

    lanes: tuple[range, ...]
    frees: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        return self.lanes[0].start

    @property
    def stop(self) -> int:
        return self.lanes[-1].stop


@dataclass(frozen=True, slots=True)
class _Call:
    """A step before it is known which slots nobody reads afterwards."""

    kernel: CompiledKernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    label: str
    op: str
    provider: str
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class CompiledPart:
    part: Part
    kernel: CompiledKernel


class PartFailed(Exception):
    """A provider could not compile a part; never leaves the runtime."""

    def __init__(self, part: Part, error: Exception) -> None:
        super().__init__(part, error)
        self.part = part
        self.error = error


def compile_parts(
    graph: Graph,
    providers: Sequence[ExecutionProvider],
    config: SessionConfig,
    opsets: Mapping[str, int],
    parts: Sequence[Part] | None = None,
    blocked: Blocked | None = None,
    pool: PooledAllocator | None = None,
    counts: TransferCounts | None = None,
) -> list[CompiledPart]:
    """Every part of the graph compiled by its provider; bodies of control flow become programs of their own.

    PartFailed tells which part could not be; ``blocked`` keeps nodes from providers that failed before.
    """

    def body(nested: Graph, config: SessionConfig) -> BodyRunner:
        from ranvier.runtime.body import Body  # a body is planned like a session, and plans are made of programs

        inside = compile_parts(nested, providers, config, opsets, None, blocked, pool, counts)
        made = Body(Program(nested, inside, counts=counts), pool or providers[0].allocator(), config)
        if pool is not None:
            ask_before_failing(pool, made)
        return made

    contexts: dict[tuple[str, int], CompileContext] = {}
    compiled: list[CompiledPart] = []
    for part in partitioned(graph, providers, config, blocked).parts if parts is None else parts:
        provider = part.provider
        threads = 0 if part.beside is None else part.beside.threads
        ctx = contexts.get((provider.name, threads))
        if ctx is None:
            options = provider_options(provider, config.provider_options.get(provider.name, {}))
            own = replace(config, threads=threads) if threads else config
            within = functools.partial(body, config=own)
            ctx = contexts[provider.name, threads] = CompileContext(own, options, within, opsets, pool)
        try:
            kernel = provider.compile(part.subgraph, ctx)
        except PartFailed:
            raise  # of a nested graph
        except Exception as error:
            raise PartFailed(part, error) from error
        compiled.append(CompiledPart(part, kernel))
    return compiled


def kernels_of(parts: Iterable[CompiledPart]) -> Iterator[CompiledKernel]:
    """The kernels of parts, and of bodies that those run, as far as these were made."""
    from ranvier.runtime.body import Body

    for each in parts:
        yield each.kernel
        for body in each.kernel.bodies() if isinstance(each.kernel, RunsBodies) else ():
            if isinstance(body, Body):
                yield from kernels_of(body.program.parts)


def provider_options(provider: ExecutionProvider, given: Mapping[str, Any]) -> Any:
    """The provider's own option set, made from names; an unknown one raises with the nearest."""
    known = [f.name for f in fields(provider.Options)]
    for name in given:
        if name not in known:
            raise InvalidConfig(f"provider {provider.name!r}: unknown option {name!r}{nearest(name, known)}")
    return provider.Options(**given)


class Program:
    """Steps for some outputs of a graph. Immutable; one ``run`` keeps all its state in a list of slots."""

    def __init__(
        self,
        graph: Graph,
        parts: Iterable[CompiledPart],
        outputs: Sequence[Value] | None = None,
        counts: TransferCounts | None = None,
        helpers: Helpers | None = None,
        stay: bool = False,
    ) -> None:
        """``stay``: outputs that were made in another memory are left there."""
        self.graph = graph
        self._stay = stay
        self._counts = counts
        self._helpers = helpers
        self.outputs = tuple(graph.outputs if outputs is None else outputs)
        needed = _needed(list(parts), self.outputs)
        self.slots: dict[Value, int] = {}
        self._elsewhere: dict[tuple[Value, str], int] = {}  # slots of values in another memory than the host's
        self.moved: set[int] = set()  # slots that a transfer fills: what it brings has memory of its own
        for value in [*graph.inputs, *graph.captured()]:
            self._slot(value)
        calls = self._calls(needed)
        self.template: list[Any] = [None] * (len(self.slots) + len(self._elsewhere))
        constants: set[int] = set()
        read = set(self.outputs)
        for item in needed:
            if not isinstance(item.kernel, SelfContained) and space_of(item.part.provider) == HOST:
                read.update(item.part.subgraph.inputs)
        for value, slot in self.slots.items():
            if value.const is not None and value.producer is None:
                self.template[slot] = value.const.numpy() if value in read else stand_in(value.const)
                constants.add(slot)
        self.input_slots = tuple(self.slots[v] for v in graph.inputs)
        self.output_slots = tuple(self._last[v] for v in self.outputs)
        self.waves = _waves(calls) if helpers is not None else ()
        self.steps = self._steps(calls, constants)
        self.parts = tuple(needed)

    def _slot(self, value: Value) -> int:
        return self.slots.setdefault(value, len(self.slots) + len(self._elsewhere))

    def _place(self, value: Value, space: str) -> int:
        """The slot of a value in a memory."""
        if space == HOST:
            return self._slot(value)
        return self._elsewhere.setdefault((value, space), len(self.slots) + len(self._elsewhere))

    def _calls(self, parts: Sequence[CompiledPart]) -> list[_Call]:
        """The kernels to call, in order, with transfers where a value is needed in a memory it is not in."""
        calls: list[_Call] = []
        providers = {space_of(item.part.provider): item.part.provider for item in parts}
        spaces: dict[Value, list[str]] = {}  # the memories a value is in, the one it was made in first

        def bring(values: Iterable[Value], space: str) -> None:
            missing: dict[str, list[Value]] = {}
            for value in dict.fromkeys(values):
                found = spaces.setdefault(value, [HOST])
                if space not in found:
                    missing.setdefault(HOST if HOST in found else found[0], []).append(value)
            for source, moving in missing.items():
                if source != HOST and space != HOST:  # from device to device by way of the host
                    bring(moving, HOST)
                    source = HOST
                provider = providers[space if source == HOST else source]
                kernel = TransferKernel(provider, inward=source == HOST, counts=self._counts)
                before = tuple(self._place(v, source) for v in moving)
                after = tuple(self._place(v, space) for v in moving)
                calls.append(_Call(kernel, before, after, kernel.label, "transfer", kernel.provider))
                self.moved.update(after)
                for value in moving:
                    spaces[value].append(space)

        wave = -1
        for item in parts:
            sub = item.part.subgraph
            space = space_of(item.part.provider)
            beside = item.part.beside
            if beside is not None and beside.wave != wave:
                wave = beside.wave
                bring(_read_by_wave(parts, wave), HOST)  # before it begins: lanes do not wait for each other
            if space == HOST:
                bring(sub.inputs, HOST)
            else:
                bring((v for v in sub.inputs if v.const is None or v.producer is not None), space)
            for value in sub.outputs:
                spaces[value] = [space]
            inputs = tuple(
                self._place(v, space) if space in spaces.get(v, (HOST,)) else self._slot(v) for v in sub.inputs
            )
            outputs = tuple(self._place(v, space) for v in sub.outputs)
            op = sub.nodes[0].op if len(sub.nodes) == 1 else f"{len(sub.nodes)} nodes"
            calls.append(_Call(item.kernel, inputs, outputs, sub.label, op, item.part.provider.name, beside))
        bring((v for v in self.outputs if not self._stay or HOST in spaces.get(v, (HOST,))), HOST)
        # where each output is found in the end, and the provider whose memory that is
        self._last = {v: self._place(v, spaces[v][0] if self._stay else HOST) for v in self.outputs}
        self.staying = tuple(providers.get(spaces[v][0]) if self._stay else None for v in self.outputs)
        return calls

    def transfers(self) -> list[tuple[TransferKernel, tuple[Value, ...]]]:
        """Every transfer of a run: the step, and the values that it moves together."""
        values = {slot: value for value, slot in self.slots.items()}
        values.update((slot, value) for (value, _), slot in self._elsewhere.items())
        return [
            (step.kernel, tuple(values[slot] for slot in step.inputs))
            for step in self.steps
            if isinstance(step.kernel, TransferKernel)
        ]

    def _steps(self, calls: Sequence[_Call], constants: set[int]) -> tuple[Step, ...]:
        last: dict[int, int] = {}
        for k, call in enumerate(calls):
            for slot in (*call.inputs, *call.outputs):
                last[slot] = k
        kept = constants | set(self.output_slots)
        self.waves = tuple(self._freeing(wave, calls, last, kept) for wave in self.waves)
        kept.update(slot for wave in self.waves for slot in wave.frees)
        ending: dict[int, list[int]] = {}
        for slot, k in last.items():
            if slot not in kept:
                ending.setdefault(k, []).append(slot)
        return tuple(
            Step(call.kernel, call.inputs, call.outputs, tuple(ending.get(k, ())), call.label, call.op, call.provider)
            for k, call in enumerate(calls)
        )

    @staticmethod
    def _freeing(wave: Wave, calls: Sequence[_Call], last: Mapping[int, int], kept: Container[int]) -> Wave:
        """The wave with what ends in it and more than one lane reads."""
        lanes: dict[int, set[int]] = {}
        for k, lane in enumerate(wave.lanes):
            for j in lane:
                for slot in calls[j].inputs:
                    if last[slot] < wave.stop and slot not in kept:
                        lanes.setdefault(slot, set()).add(k)
        return Wave(wave.lanes, tuple(slot for slot, readers in lanes.items() if len(readers) > 1))

    def run(
        self,
        env: list[Any],
        control: RunControl,
        buffers: Buffers,
        dims: Mapping[str, int],
        profiler: Any,
        kernels: Sequence[Prepared | None] = (),
    ) -> list[Any]:
        """Run all steps over ``env`` (a copy of the template with the inputs filled in); returns the outputs."""
        steps = itertools.zip_longest(self.steps, kernels)
        if self.waves:
            self._run_waves(list(steps), env, control, buffers, dims, profiler)
        else:
            self._run_steps(steps, env, control, buffers, dims, profiler)
        return [env[slot] for slot in self.output_slots]

    def _run_waves(
        self,
        steps: Sequence[tuple[Step, Prepared | None]],
        env: list[Any],
        control: RunControl,
        buffers: Buffers,
        dims: Mapping[str, int],
        profiler: Any,
    ) -> None:
        """Steps in order, and the lanes of a wave at the same time. A lane writes slots that no other reads meanwhile,
        and counts the memory that it holds for itself."""
        assert self._helpers is not None
        controls = [control.again() for _ in range(max(len(wave.lanes) for wave in self.waves) - 1)]
        limit = current_limit()

        def run_lane(lane: range, counting: RunControl, halt: Halt) -> None:
            with tensor_limit(limit), running(counting, profiler):
                part = halt.until(steps[lane.start : lane.stop])
                self._run_steps(part, env, counting, buffers, dims, profiler)

        done = 0
        try:
            for wave in self.waves:
                self._run_steps(steps[done : wave.start], env, control, buffers, dims, profiler)
                each = zip(wave.lanes, [control, *controls])
                self._helpers.run([functools.partial(run_lane, *given) for given in each])
                for slot in wave.frees:
                    env[slot] = None
                done = wave.stop
            self._run_steps(steps[done:], env, control, buffers, dims, profiler)
        finally:
            for counting in controls:
                counting.close()

    @staticmethod
    def _run_steps(
        steps: Iterable[tuple[Step, Prepared | None]],
        env: list[Any],
        control: RunControl,
        buffers: Buffers,
        dims: Mapping[str, int],
        profiler: Any,
    ) -> None:
        watched = control.watched
        for step, prepared in steps:
            if watched:
                control.check(f"{step.op} {step.label!r}")
            inputs = [env[slot] for slot in step.inputs]
            outputs: list[Any] = [buffers.get(slot) for slot in step.outputs]
            started = time.perf_counter_ns() if profiler is not None else 0
            try:
                kernel, workspace = (step.kernel, None) if prepared is None else prepared
                if profiler is not None and isinstance(kernel, Profiled):
                    profiler.inside(step, kernel.profile(inputs, outputs, workspace, dims))
                else:
                    kernel(inputs, outputs, workspace, dims)  # type: ignore[arg-type]
            except RanvierError as error:
                if not _located(error):
                    error.node = error.node or step.label
                    if isinstance(error, OutOfMemory | KernelError):
                        error.provider = error.provider or step.provider
                    error.add_note(f"while running {step.op} {step.label!r} on {step.provider}")
                raise
            except MemoryError as error:
                problem = OutOfMemory(f"{step.op} {step.label!r} on {step.provider}: out of memory")
                problem.provider = step.provider
                raise problem from error
            except RecursionError as error:
                raise _failed(step, error, inputs) from None
            except Exception as error:
                raise _failed(step, error, inputs) from error
            if profiler is not None:
                profiler.record(step, started, time.perf_counter_ns(), inputs, outputs)
            for slot, result in zip(step.outputs, outputs):
                env[slot] = result
                if watched and result is not buffers.get(slot):
                    control.hold(result, f"{step.op} {step.label!r}")
            for slot in step.frees:
                env[slot] = None


def _read_by_wave(parts: Sequence[CompiledPart], wave: int) -> list[Value]:
    """What the parts of a wave read and none of them makes."""
    inside = [item.part.subgraph for item in parts if item.part.beside is not None and item.part.beside.wave == wave]
    made = {value for sub in inside for value in sub.outputs}
    return [value for sub in inside for value in sub.inputs if value not in made]


def _waves(calls: Sequence[_Call]) -> tuple[Wave, ...]:
    """The waves that more than one lane is left of."""
    found: list[Wave] = []
    for _, group in itertools.groupby(enumerate(calls), key=lambda each: each[1].beside and each[1].beside.wave):
        lanes: dict[int, list[int]] = {}
        for k, call in group:
            if call.beside is not None:
                lanes.setdefault(call.beside.lane, []).append(k)
        if len(lanes) > 1:
            found.append(Wave(tuple(range(lane[0], lane[-1] + 1) for lane in lanes.values())))
    return tuple(found)


def _needed(parts: list[CompiledPart], outputs: Sequence[Value]) -> list[CompiledPart]:
    """The parts that the outputs depend on, in order."""
    wanted = set(outputs)
    needed: list[CompiledPart] = []
    for item in reversed(parts):
        if any(v in wanted for v in item.part.subgraph.outputs):
            item = _narrowed(item, wanted)
            wanted.update(item.part.subgraph.inputs)
            needed.append(item)
    return needed[::-1]


def _narrowed(item: CompiledPart, wanted: set[Value]) -> CompiledPart:
    """The part with only the nodes that ``wanted`` depends on, where it has others and can be had without them."""
    whole = item.part.subgraph
    if all(v in wanted for v in whole.outputs) or not isinstance(item.kernel, Narrowable):
        return item
    part = narrowed(whole, wanted)
    return CompiledPart(Part(item.part.provider, part, item.part.beside), item.kernel.narrowed(part))


def _located(error: RanvierError) -> bool:
    return any(note.startswith("while running") for note in getattr(error, "__notes__", ()))


def _failed(step: Step, error: BaseException, inputs: Sequence[Any]) -> KernelError:
    given = ", ".join(_describe(x) for x in inputs)
    message = f"{step.op} {step.label!r} failed on {step.provider}: {type(error).__name__}: {error} (inputs: {given})"
    return KernelError(message, node=step.label, op=step.op, provider=step.provider)


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__


def static_bytes(value_type: Any) -> int | None:
    """Bytes of a planned buffer, or None where the type does not allow one."""
    if not isinstance(value_type, TensorType) or value_type.dtype is None or value_type.dtype.name == "string":
        return None
    nbytes = value_type.nbytes
    shape = value_type.shape or ()
    if nbytes == 0 or len(shape) > MAX_RANK or any(isinstance(d, int) and d < 0 for d in shape):
        # no array is like that, or beside a size of 0 the others may be absurd: the kernel will say what is wrong
        return None
    return nbytes


__all__ = ["Buffers", "CompiledPart", "PartFailed", "Prepared", "Program", "Step", "compile_parts", "static_bytes"]
