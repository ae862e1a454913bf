"""A graph placed on some providers and compiled for them, with the plans of the shapes it has met.

A session has one of these, and others where a provider had to be left out. A part that its provider fails to compile
goes to the next provider that takes its nodes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, InvalidGraph, InvalidModel, ResourceLimit, UnsupportedOp
from ranvier.graph.ir import Graph
from ranvier.graph.types import Type
from ranvier.logs import warn_once
from ranvier.memory import promises
from ranvier.providers.base import ExecutionProvider, PooledAllocator
from ranvier.runtime.growth import Growth, spanned
from ranvier.runtime.holdings import ask_before_failing
from ranvier.runtime.lanes import Helpers
from ranvier.runtime.partition import Partitioner, Partitioning
from ranvier.runtime.placement import partitioned, pinned
from ranvier.runtime.plan import Plan
from ranvier.runtime.preparing import preparing
from ranvier.runtime.program import CompiledPart, PartFailed, Program, compile_parts
from ranvier.runtime.transfer import TransferCounts

# what another provider would meet as well
_OF_THE_MODEL = (InvalidModel, InvalidGraph, InvalidConfig, UnsupportedOp, ResourceLimit)


class Compiled:
    """Parts of a graph on ``providers``. Thread-safe; plans and programs are kept up to a bound."""

    def __init__(
        self,
        graph: Graph,
        providers: Sequence[ExecutionProvider],
        config: SessionConfig,
        pool: PooledAllocator | None = None,
        counts: TransferCounts | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        self.graph = graph
        self.providers = list(providers)
        self._config = config
        self._pool = pool  # the session's own; None: the providers'
        self._counts = counts
        self._helpers = helpers  # threads for parts that run at the same time
        self.fallbacks: list[str] = []  # what could not be compiled where it was meant to be
        self._lock = threading.Lock()
        self._programs: OrderedDict[tuple[str, ...], Program] = OrderedDict()
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._growth = Growth()
        self._outputs = {v.name: v for v in graph.outputs}
        self.partitioning: Partitioning
        self.parts: list[CompiledPart]
        self._compile()
        if pool is not None:
            ask_before_failing(pool, self)
        promises.on_pressure(self.release_arenas)

    def _compile(self) -> None:
        blocked = pinned(self.graph, self.providers, self._config)
        while True:
            self.partitioning = partitioned(self.graph, self.providers, self._config, blocked)
            try:
                self.parts = compile_parts(
                    self.graph,
                    self.providers,
                    self._config,
                    self.graph.opsets,
                    self.partitioning.parts,
                    blocked,
                    self._pool,
                    self._counts,
                )
                return
            except PartFailed as failure:
                error, part = failure.error, failure.part
                if self._config.fallback == "off" or isinstance(error, _OF_THE_MODEL):
                    raise error from None
                name = part.provider.name
                reason = f"failed to compile it ({type(error).__name__}: {error})"
                for node in part.subgraph.nodes:
                    blocked[name, id(node)] = reason
                try:
                    Partitioner(self.providers, blocked).partition(part.subgraph.graph)
                except UnsupportedOp:
                    raise error from None  # nobody else takes it: what went wrong is the answer
                text = f"{name} {reason}: {part.subgraph.label}"
                self.fallbacks.append(text)
                warn_once(f"compile {text}", f"{text}; it goes to the next provider")

    def recall(self, key: Any) -> Plan | None:
        """The plan of an earlier call with the same shapes and outputs."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            else:
                plan = self._growth.find(*key)
        return plan

    def plan(
        self,
        shapes: Any,
        types: Sequence[Type | None],
        dims: Mapping[str, int],
        names: tuple[str, ...],
        *,
        stay: bool = False,
    ) -> Plan:
        """The plan for these types of inputs and names of outputs, made where there is none yet. ``stay``: outputs
        remain in the memory they were made in."""
        key = (shapes, _kept_as(names, stay))
        found = self.recall(key)
        if found is not None:
            return found
        with preparing(self._config.name or self.graph.name, "planning a run", self._config.limits.tensor_bytes):
            program = self.program(names, stay=stay)
            grown = None if stay else self._grown(shapes, names, program, types, dims)
            if grown is not None:
                return grown
            made = Plan(program, types, dims, self._pool or self.providers[-1].allocator(), self._config)
        dropped: list[Plan] = []
        with self._lock:
            plan = self._plans.setdefault(key, made)
            while len(self._plans) > self._config.plan_cache:
                dropped.append(self._plans.popitem(last=False)[1])
        for old in dropped:
            old.close()
        return plan

    def _grown(
        self,
        shapes: Any,
        names: tuple[str, ...],
        program: Program,
        types: Sequence[Type | None],
        dims: Mapping[str, int],
    ) -> Plan | None:
        """The plan of this call and of those that will follow, where it grew as the one before it did."""
        with self._lock:
            step = self._growth.grows(shapes, names)
        if step is None:
            return None
        allocator = self._pool or self.providers[-1].allocator()
        try:
            made = spanned(shapes, step, program, types, dims, allocator, self._config)
        except Exception as error:  # calls are planned one by one then, and errors are met there
            self._growth.reason = f"{type(error).__name__}: {error}"
            return None
        with self._lock:
            return self._growth.keep(made, names)

    def program(self, names: tuple[str, ...], *, stay: bool = False) -> Program:
        """The steps that make these outputs."""
        key = _kept_as(names, stay)
        with self._lock:
            found = self._programs.get(key)
        if found is None:
            wanted = [self._outputs[n] for n in names]
            made = Program(self.graph, self.parts, wanted, self._counts, self._helpers, stay)
            with self._lock:
                found = self._programs.setdefault(key, made)
                while len(self._programs) > self._config.plan_cache:
                    self._programs.popitem(last=False)
        return found

    def plans(self) -> list[Plan]:
        with self._lock:
            return [*self._plans.values(), *self._growth.plans()]

    def release_arenas(self) -> None:
        """Give back the arenas that no run uses."""
        for plan in self.plans():
            plan.close()

    def close(self) -> None:
        with self._lock:
            plans = list(self._plans.values())
            self._plans.clear()
            self._growth.clear()
            self._programs.clear()
        for plan in plans:
            plan.close()


def _kept_as(names: tuple[str, ...], stay: bool) -> tuple[str, ...]:
    """What programs and plans for these outputs are found by; no output has an empty name."""
    return ("", *names) if stay else names
