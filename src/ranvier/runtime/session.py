"""A session: one model, loaded, optimized, placed and compiled, ready to run from any thread.

The whole pipeline is :meth:`Session.__init__`: ``load → Graph → passes → partition → compile``; binding sizes to a
:class:`Plan` happens at the first run with those sizes.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.config import ProviderConfig, SessionConfig, resolve
from ranvier.errors import (
    InvalidConfig,
    InvalidInput,
    OutOfMemory,
    RanvierError,
    ResourceLimit,
    SessionClosed,
    UnsupportedOp,
    nearest,
)
from ranvier.graph.ir import Graph
from ranvier.graph.types import TensorType, Type
from ranvier.graph.verify import verify
from ranvier.passes import default_passes
from ranvier.passes.manager import passes_for
from ranvier.providers.base import ExecutionProvider
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.compiled import Compiled
from ranvier.runtime.control import RunControl, RunOptions
from ranvier.runtime.debug import Fan, KernelPrinter, show_report, show_sources
from ranvier.runtime.fallback import FAILURES, Condition, Recovery
from ranvier.runtime.holdings import SessionMemory, held, own_memory
from ranvier.runtime.lanes import Helpers
from ranvier.runtime.narrowing import calibrated
from ranvier.runtime.order import order_for_memory, typical_bytes
from ranvier.runtime.outputs import blocks
from ranvier.runtime.overriding import overriding
from ranvier.runtime.partition import unsupported_ops
from ranvier.runtime.placement import check_pins, fitting
from ranvier.runtime.plan import Plan
from ranvier.runtime.preparing import Clock, preparing, read_model
from ranvier.runtime.profile import Profiler
from ranvier.runtime.program import CompiledPart
from ranvier.runtime.recent import Recent
from ranvier.runtime.report import Report, describe_placement
from ranvier.runtime.residence import adopted, handed_out, on_host_where_needed
from ranvier.runtime.settings import apply_bounds, check_providers, configured, effective
from ranvier.runtime.signature import Inputs, Signature
from ranvier.runtime.tied import TiedRun, tie
from ranvier.runtime.transfer import TransferCounts


class Session:
    """Runs one model. Immutable after creation and safe to use from many threads at once."""

    def __init__(
        self,
        model: Any,
        config: SessionConfig | ProviderConfig | None = None,
        *,
        base_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = effective(config)
        chain, absent = REGISTRY.chain(
            self.config.providers, fallback=self.config.fallback == "on", options=self.config.provider_options
        )
        self.providers = [configured(provider, self.config) for provider in chain]
        self._own = [made for made, shared in zip(self.providers, chain) if made is not shared]
        self._helpers = Helpers(self.config.threads)
        self._ending = weakref.finalize(self, _close_all, [self._helpers, *self._own])
        check_providers(self.config, self.providers)
        clock = Clock()
        self.graph = model if isinstance(model, Graph) else self._load(model, base_dir)
        apply_bounds(self.graph, self.config.symbol_bounds)
        if self.config.dims_apart:
            from ranvier.runtime.dims_apart import set_dims_apart  # few models need it

            set_dims_apart(self.graph)
        clock.lap("load")
        loaded = len(self.graph)
        named = fitting(self.graph, self.config)
        passes = passes_for(self.config.optimization, default_passes(), self.config.disabled_passes)
        with self._preparing("optimizing it"):
            self._overriding = overriding(self.graph, self._with_inputs)
            missing = unsupported_ops(self.graph, self.providers)
            if missing:
                raise UnsupportedOp(missing)
            reports = passes.run(self.graph, self.config)
            for each in self.graph.all_graphs():
                each.reorder(order_for_memory(each, typical_bytes))
            if self.config.debug:
                verify(self.graph)
            check_pins(self.graph, self.providers, self.config, named)
        clock.lap("optimize")
        with self._preparing("compiling it"):
            self._pool, self._budget = own_memory(self.providers, self.config)
            self._moved = TransferCounts()
            found = calibrated(self.graph, self.providers, self.config, self._compiled_with)
            self._compiled, self.config, calibration = found
        clock.lap("compile")
        self.signature = Signature(self.graph)
        self.output_names = tuple(v.name for v in self.graph.outputs)
        self._outputs = dict(zip(self.output_names, self.graph.outputs))
        self._control = functools.partial(RunControl, limits=self.config.limits, budget=self._budget)
        self._recovery = Recovery(self.providers, self._compiled_for)
        self._lock = threading.Lock()
        self._profilers: tuple[Profiler, ...] = ()
        self._recent: Recent | None = None
        self._printer: KernelPrinter | None = None
        self._closed = False
        control = self._control(None)
        self._unlimited = None if control.watched else control
        fallbacks = [*map(str, absent), *self._compiled.fallbacks]
        self._fallbacks = fallbacks
        self._summary = self._summarised(loaded, reports, clock.laps, fallbacks)
        self._summary.calibration = calibration
        if self.config.debug >= 1:
            show_report(self.report)
        if self.config.debug >= 2:
            self._printer = KernelPrinter(self._parts)
        self._prepare_static()
        if self.config.tune is not None:
            import ranvier.runtime.tuning.at_load as tuning

            self._compiled = tuning.tuned(self, self.config.tune)
        REGISTRY.watch(self)
        if self.config.debug >= 3:
            show_sources(self._parts, assembly=self.config.debug >= 4)

    # -- creation ---------------------------------------------------------------------------------------------------

    def _load(self, model: Any, base_dir: str | os.PathLike[str] | None) -> Graph:
        return read_model(model, self.config.limits, base_dir)

    def _preparing(self, step: str) -> AbstractContextManager[None]:
        return preparing(self.config.name or self.graph.name, step, self.config.limits.tensor_bytes)

    def _with_inputs(self, graph: Graph) -> Session:
        """A session like this one for its model with other inputs."""
        made = Session(graph, self.config.updated(tune=None))
        for profiler in self._profilers:
            made._attach(profiler)
        return made

    @property
    def interface(self) -> Graph:
        """The graph that says what a call may give: the model's own, before defaults of inputs became constants."""
        return self.graph if self._overriding is None else self._overriding.graph

    def optimized(self) -> Graph:
        """The optimized graph with every input that the model has."""
        return self.graph if self._overriding is None else self._overriding.optimized()

    @property
    def _parts(self) -> list[CompiledPart]:
        return self._compiled.parts

    def _compiled_with(self, config: SessionConfig) -> Compiled:
        return Compiled(self.graph, self.providers, config, self._pool, self._moved, self._helpers)

    def _compiled_for(self, providers: Sequence[ExecutionProvider]) -> Compiled:
        with self._preparing("compiling it again"):
            return Compiled(self.graph, providers, self.config, self._pool, self._moved, self._helpers)

    @functools.cached_property
    def report(self) -> Report:
        """What was done to the model and where it runs; nodes are described when somebody first looks."""
        describe_placement(self._summary, self._compiled)
        return self._summary

    def _summarised(self, loaded: int, passes: list[Any], seconds: dict[str, float], fallbacks: list[str]) -> Report:
        return Report(
            model=self.config.name or self.graph.name,
            providers=tuple(p.name for p in self.providers),
            optimization=self.config.optimization,
            nodes_loaded=loaded,
            passes=passes,
            seconds=seconds,
            fallbacks=fallbacks,
            constants="" if self._overriding is None else str(self._overriding),
            problems=list(self.graph.metadata.get("problems", ())),
            precision=self.config.precision,
            counts=self._moved,
        )

    def _prepare_static(self) -> None:
        """Where all sizes are known now, generated code is made now: the first run shall not be slower than others."""
        types = [v.type for v in self.signature.inputs]
        if not all(isinstance(t, TensorType) and t.is_static and t.dtype is not None for t in types):
            return
        started = time.perf_counter()
        try:
            self.bind()
        except (ResourceLimit, OutOfMemory):
            return  # the run will say so, and only if it happens
        self._summary.seconds["generate"] = time.perf_counter() - started

    # -- the interface of the model ---------------------------------------------------------------------------------

    @property
    def inputs(self) -> dict[str, Type | None]:
        """Types of the inputs a call must give, by name."""
        return {name: self.signature.by_name[name].type for name in self.signature.required}

    @property
    def optional_inputs(self) -> dict[str, Type | None]:
        """Types of inputs that have a default in the model and may be overridden."""
        graph = self.interface
        return {value.name: value.type for value in graph.inputs if value.name in graph.defaults}

    @property
    def outputs(self) -> dict[str, Type | None]:
        """Types of the outputs, by name."""
        return {name: value.type for name, value in self._outputs.items()}

    # -- running ----------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any],
        outputs: Sequence[str] | None = None,
        options: RunOptions | None = None,
        into: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Outputs by name. ``inputs`` by name, or in order; ``outputs`` selects, and only what they need is run.

        ``into`` names arrays for outputs: one of the right type and shape, where the size is known beforehand, is
        written in place and returned; otherwise the output is a new array as usual.
        """
        recent = self._recent
        if recent is not None and outputs is None and options is None and into is None:
            if recent.enter is not None and (found := recent.enter(inputs)) is not None:
                return found
            try:
                found = recent.run(inputs)
            except FAILURES as error:
                found = self._recent = None
                if getattr(error, "provider", None):  # a direct call does not know who failed: the longer way tells
                    self._check_open()
                    return self._recovered(error, inputs, self.output_names, None, None, self._compiled, frozenset())
            if found is not None:
                return found
        self._check_open()
        if self._overriding is not None and (other := self._overriding.session_for(inputs)) is not None:
            return other[0].run(other[1], outputs, options, into)
        names = self.output_names if outputs is None else self._selected(outputs)
        control = self._unlimited if options is None and self._unlimited else self._control(options)
        compiled, without = self._compiled, frozenset[str]()
        if self._recovery.troubled:
            without = self._recovery.left_out()
            compiled = (self._recovery.variant(without) if without else None) or compiled
        try:
            results = self._attempt(compiled, inputs, names, control, into)
        except FAILURES as error:
            return self._recovered(error, inputs, names, options, into, compiled, without)
        if self._recovery.troubled:
            self._recovery.worked(compiled)
        return dict(zip(names, results))

    def _attempt(
        self,
        compiled: Compiled,
        inputs: Mapping[str, Any] | Sequence[Any],
        names: tuple[str, ...],
        control: RunControl,
        into: Mapping[str, Any] | None,
    ) -> list[Any]:
        """The outputs, from one run over one set of providers."""
        values, plan = self._recall(compiled, inputs, names)
        if plan is None:
            values, dims = self.signature.bind(adopted(self.signature.named(inputs), compiled.providers))
            plan = self._plan(compiled, values, dims, names)
            values = on_host_where_needed(values, plan.program)
        targets = None if into is None else [into.get(name) for name in names]
        profilers = self._profilers
        if not profilers and self._printer is None:
            if (
                self._unlimited is not None
                and compiled is self._compiled
                and names is self.output_names
                and not self.signature.defaults
                and not self._recovery.troubled
            ):
                self._recent = Recent(self.signature.required, values, plan, names, self._unlimited)
            return plan.run(values, control, None, targets)
        started = time.perf_counter_ns()
        results = plan.run(values, control, Fan([*profilers, *([self._printer] if self._printer else [])]), targets)
        for profiler in profilers:
            profiler.span(self._summary.model or "run", started, time.perf_counter_ns())
        return results

    def run_again(self, inputs: Any) -> dict[str, Any] | None:
        """All outputs by the shortest way, where calls like this one have come before; None where they have not, or
        that way is not open now."""
        recent = self._recent
        return None if recent is None or recent.enter is None else recent.enter(inputs)

    def run_in_place(
        self, inputs: Inputs, outputs: Sequence[str] | None = None, options: RunOptions | None = None
    ) -> dict[str, Any]:
        """As ``run``, but results stay in the memory they were made in: on a GPU, tensors that every library takes
        through DLPack. Those made on the host are arrays, and so are all of them where a provider fails."""
        self._check_open()
        if self._overriding is not None and (other := self._overriding.session_for(inputs)) is not None:
            return other[0].run_in_place(other[1], outputs)
        names = self.output_names if outputs is None else self._selected(outputs)
        compiled = self._compiled
        try:
            values, dims = self.signature.bind(adopted(self.signature.named(inputs), compiled.providers))
            plan = self._plan(compiled, values, dims, names, stay=True)
            values = on_host_where_needed(values, plan.program)
            results = plan.run(values, (options is None and self._unlimited) or self._control(options), None)
            return dict(zip(names, handed_out(results, plan.program)))
        except FAILURES as error:
            return self._recovered(error, inputs, names, options, None, compiled, frozenset())

    def tied(self, inputs: Mapping[str, Any], in_place: Mapping[str, str] | None = None) -> TiedRun:
        """A run tied to tensors on a device; see :func:`ranvier.runtime.tied.tie`."""
        if self._overriding is not None and (other := self._overriding.session_for(inputs)) is not None:
            return tie(*other, in_place or {})
        return tie(self, inputs, in_place or {})

    def _recovered(
        self,
        error: RanvierError,
        inputs: Mapping[str, Any] | Sequence[Any],
        names: tuple[str, ...],
        options: RunOptions | None,
        into: Mapping[str, Any] | None,
        compiled: Compiled,
        without: frozenset[str],
    ) -> dict[str, Any]:
        """The outputs in spite of a failure, by the providers that are left."""
        if self.config.fallback == "off":
            if name := getattr(error, "provider", ""):
                REGISTRY.ledger.failed(name, error)
            raise error
        self._recent = None
        control = self._control(options)
        results = self._recovery.run(
            error,
            compiled,
            without,
            lambda other: self._attempt(other, inputs, names, control.again(), into),
        )
        self._summary.fallbacks = [*self._fallbacks, *(f"{t} ({n} times)" for t, n in self._recovery.events.items())]
        return dict(zip(names, results))

    @property
    def health(self) -> dict[str, Condition]:
        """How each provider did in this session: failures, requests that others finished, and who is left out."""
        return self._recovery.conditions()

    __call__ = run

    def bind(self, **dims: int) -> Plan:
        """The plan for these sizes of the symbolic dims, made now rather than at the first run."""
        self._check_open()
        known = self.graph.symbols
        for name, size in dims.items():
            if name not in known:
                raise InvalidConfig(f"the model has no dimension {name!r}{nearest(name, known)}")
            if not isinstance(size, int) or not known[name].admits(size):
                raise InvalidConfig(
                    f"dimension {name!r} cannot be {size!r}: bounds [{known[name].lo}, {known[name].hi}]"
                )
        types = [v.type.bind(dims) if v.type is not None else None for v in self.signature.inputs]
        shapes = tuple(
            (t.dtype.numpy, t.shape) if isinstance(t, TensorType) and t.dtype is not None else None for t in types
        )
        return self._compiled.plan(shapes, types, dims, self.output_names)

    def _recall(self, compiled: Compiled, inputs: Any, names: tuple[str, ...]) -> tuple[list[Any], Plan | None]:
        """The plan of an earlier call with the same names, element types and shapes: it was checked then."""
        required = self.signature.required
        if type(inputs) is not dict or len(inputs) != len(required) or self.signature.defaults:
            return [], None
        values = [inputs.get(name) for name in required]
        if not all(type(x) is np.ndarray and x.dtype != object for x in values):
            return [], None  # what they hold must be looked at every time
        return values, compiled.recall((_key(values), names))

    def _plan(
        self,
        compiled: Compiled,
        values: Sequence[Any],
        dims: dict[str, int],
        names: tuple[str, ...],
        *,
        stay: bool = False,
    ) -> Plan:
        types = [
            TensorType(dtypes.of(x), x.shape) if isinstance(x, np.ndarray) else v.type
            for v, x in zip(self.signature.inputs, values)
        ]
        return compiled.plan(_key(values), types, dims, names, stay=stay)

    def _selected(self, outputs: Sequence[str]) -> tuple[str, ...]:
        if isinstance(outputs, Mapping):
            way = "run(inputs, outputs) of a session; InferenceSession takes them in ONNX Runtime's order"
            raise InvalidInput(f"outputs are names, got a mapping, which inputs are: {way}")
        for name in outputs:
            if not isinstance(name, str) or name not in self._outputs:
                raise InvalidInput(f"the model has no output {name!r}{nearest(str(name), self._outputs)}")
        return tuple(outputs)

    # -- memory -----------------------------------------------------------------------------------------------------

    def memory(self) -> SessionMemory:
        """Bytes the session holds now: weights, and arenas that wait for a run or are in one."""
        found = held(self._compiled, self.graph.constant_bytes(), self._pool, self._budget)
        return functools.reduce(SessionMemory.beside, (other.memory() for other in self._others()), found)

    def trim(self) -> None:
        """Give back the arenas that no run uses, and what providers and the process keep for reuse."""
        for other in self._others():
            other.trim()
        self._compiled.release_arenas()
        blocks.clear()
        for provider in self.providers:
            provider.allocator().trim()
        if self._pool is not None:
            self._pool.trim()

    # -- looking at it ----------------------------------------------------------------------------------------------

    def profile(self, path: str | os.PathLike[str] | None = None) -> Profiler:
        """Record what runs inside a ``with`` block; with a path, write a Chrome/Perfetto trace at its end."""
        self._check_open()
        return Profiler(self, path)

    def _attach(self, profiler: Profiler) -> None:
        with self._lock:
            self._profilers = (*self._profilers, profiler)
            self._recent = None
        for other in self._others():
            other._attach(profiler)

    def _detach(self, profiler: Profiler) -> None:
        with self._lock:
            self._profilers = tuple(p for p in self._profilers if p is not profiler)
        for other in self._others():
            other._detach(profiler)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back all memory; later calls raise SessionClosed. Runs in progress finish first by themselves."""
        with self._lock:
            self._closed, self._recent = True, None
        for other in self._others():
            other.close()
        self._compiled.close()
        self._recovery.close()
        if self._pool is not None:
            self._pool.close()
        self._ending()
        REGISTRY.unwatch(self)

    def _others(self) -> list[Session]:
        return [] if self._overriding is None else self._overriding.made()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"session {self._summary.model!r} is closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self._summary.model!r} on {', '.join(self._summary.providers)}>"


def _close_all(owned: Sequence[ExecutionProvider | Helpers]) -> None:
    for each in owned:
        each.close()


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    """Element types and shapes: two calls with equal keys need the same checks and the same plan."""
    return tuple([(x.dtype, x.shape) if isinstance(x, np.ndarray) else id(type(x)) for x in values])


def load(
    model: Any,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    config: SessionConfig | ProviderConfig | None = None,
    preset: str | None = None,
    **options: Any,
) -> Session:
    """A session for a model given as a path, bytes, a file object or a ``ModelProto``.

    ``options`` are those of :class:`~ranvier.config.SessionConfig`: ``providers``, ``optimization``, ``threads``,
    ``limits`` …; they win over ``config``. What neither says is set by environment variables, by a file
    ``ranvier.toml`` and by the preset, ``"edge"`` or ``"cloud"``; see :mod:`ranvier.config.resolve`.
    """
    return Session(model, resolve(options, config=config, preset=preset).config, base_dir=base_dir)


__all__ = ["Session", "load"]
