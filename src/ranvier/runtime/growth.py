"""Plans for calls that grow: each has some inputs a little larger than the one before, as when a cache is decoded with.

A plan is made for given sizes, and making one takes longer than a step of decoding. When two calls in a row needed one
and differ by the same step as the two before them, a plan is made for the whole span of calls to come
(:mod:`ranvier.varying`), and each of them gets a copy with its own numbers: microseconds instead of milliseconds. Where
that is not possible calls are planned one by one, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.errors import ResourceLimit
from ranvier.graph.types import TensorType, Type
from ranvier.ops import TypeInference
from ranvier.ops.infer_growing import grown_types
from ranvier.providers.base import BoundKernel, Growable, SpanKernel, TensorAllocator
from ranvier.runtime.arenas import Arena
from ranvier.runtime.plan import Plan
from ranvier.runtime.program import Prepared, Program, Step, static_bytes
from ranvier.varying import Span, content, follow, value_at, varies

CALLS = 512  # of a span, at most
_KEPT = 4  # spans of a model: several conversations may take turns
_FEWEST = 4  # a span of fewer calls than this was not worth its making …
_PATIENCE = 3  # … and after so many in a row no more are made

Sizes = tuple[Any, ...]  # element type and shape of every input, as a session compares them


class _SpanPlan(Plan):
    """The plan of the first call of a span; its memory is that of all."""

    def __init__(
        self,
        kernel: SpanKernel,
        types: Mapping[int, Type | None],
        program: Program,
        given: Sequence[Type | None],
        dims: Mapping[str, int],
        allocator: TensorAllocator,
        config: SessionConfig,
    ) -> None:
        self.kernel = kernel
        self.growing = types
        super().__init__(program, given, dims, allocator, config)

    def _bind(self, step: Step, inference: TypeInference) -> BoundKernel | None:
        self.only = self.kernel.at(0)
        return self.only

    @functools.cached_property
    def outputs(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """The shapes of outputs, with sizes that vary, each once, and which of them those in ``_fresh`` have."""
        shapes: list[tuple[Any, ...]] = []
        known: dict[tuple[Any, ...], int] = {}
        which: list[int] = []
        for slot, _, _ in self._fresh:
            found = self.growing[slot]
            assert isinstance(found, TensorType) and found.shape is not None
            key = tuple([content(d) for d in found.shape])
            which.append(known.setdefault(key, len(shapes)))
            if which[-1] == len(shapes):
                shapes.append(found.shape)
        return shapes, which


class _GrownPlan(Plan):
    """The plan of a later call; arenas are those of the first."""

    def __init__(self, whole: _SpanPlan, call: int, dims: Mapping[str, int]) -> None:
        self.__dict__.update(whole.__dict__)
        del self.__dict__["types"]
        self._whole, self._call = whole, call
        self.dims = dict(dims)
        bound = whole.kernel.at(call)
        self._bound, self.only = [bound], bound
        different, which = whole.outputs
        made = [value_at(shape, call) for shape in different]
        shapes = [made[k] for k in which]
        self._fresh = [(slot, dtype, shape) for (slot, dtype, _), shape in zip(whole._fresh, shapes)]
        self._fresh_bytes = whole._fresh_bytes  # of the first: they serve to tell small from large
        if whole._direct is not None:
            self._direct = whole._direct.with_shapes(bound, shapes)

    @functools.cached_property
    def types(self) -> dict[int, Type | None]:  # type: ignore[override]
        return {slot: _type_at(found, self._call) for slot, found in self._whole.growing.items()}

    def _prepared(self, held: Arena) -> list[Prepared | None]:
        return [(self.only, held.start + self.layout.workspaces.get(0, 0))]

    def close(self) -> None:
        """Nothing is its own."""


def _type_at(found: Type | None, call: int) -> Type | None:
    if isinstance(found, TensorType) and found.shape is not None:
        return TensorType(found.dtype, value_at(found.shape, call))
    return found


class _Spanned:
    """A span of calls with one plan for all."""

    def __init__(self, first: Sizes, step: Sizes, plan: _SpanPlan, dims: Mapping[str, Any]) -> None:
        self._first, self._step, self.plan, self._dims = first, step, plan, dims
        # where the number of a call is read from
        self._at, self._axis = next((k, a) for k, s in enumerate(step) if s for a, d in enumerate(s) if d)
        # inputs with the same type, shape and step (all keys and values of a cache) are looked at together
        kinds: dict[Any, list[int]] = {}
        for k, kind in enumerate(zip(first, step)):
            kinds.setdefault(kind, []).append(k)
        self._kinds = [(*kind, places) for kind, places in kinds.items()]
        self._now: tuple[int, Plan] = (0, plan)

    def find(self, sizes: Sizes) -> Plan | None:
        """The plan of a call with these sizes, if it is one of the span."""
        base, step = self._first[self._at][1][self._axis], self._step[self._at][self._axis]
        mine = sizes[self._at]
        if type(mine) is not tuple or len(mine[1]) <= self._axis:
            return None
        call, rest = divmod(mine[1][self._axis] - base, step)
        if rest or not 0 <= call < self.plan.kernel.calls:
            return None
        if len(sizes) != len(self._first):
            return None
        for first, by, places in self._kinds:
            due = first if by is None else (first[0], tuple([a + call * d for a, d in zip(first[1], by)]))
            for k in places:
                if sizes[k] != due:
                    return None
        now = self._now  # others may look for another call meanwhile
        if now[0] != call:
            dims = dict(zip(self._dims, value_at(tuple(self._dims.values()), call)))
            now = self._now = (call, _GrownPlan(self.plan, call, dims) if call else self.plan)
        return now[1]

    def close(self) -> None:
        self.plan.close()


class Growth:
    """The spans of one compiled graph. Whoever calls holds the lock of its plans, except while one is made."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, ...], list[_Spanned]] = {}
        self._last: dict[tuple[str, ...], Sizes] = {}
        self._step: dict[tuple[str, ...], Sizes] = {}
        self._poor = 0
        self.reason = ""  # why the last attempt failed, for people

    def find(self, sizes: Sizes, names: tuple[str, ...]) -> Plan | None:
        """The plan of a call that belongs to a span."""
        spans = self._spans.get(names)
        if spans is None:
            return None
        for spanned in reversed(spans):
            plan = spanned.find(sizes)
            if plan is not None:
                self._last[names] = sizes
                return plan
        return None

    def grows(self, sizes: Sizes, names: tuple[str, ...]) -> Sizes | None:
        """The step by which sizes grow, where those of a new call go on as the last did."""
        last = self._last.get(names)
        self._last[names] = sizes
        step = None if last is None else _difference(last, sizes)
        before = self._step.get(names)
        if step is None:
            return None
        self._step[names] = step
        if step != before or self._poor >= _PATIENCE:
            return None
        self._poor += 1  # until it turns out to be worth it
        return step

    def keep(self, spanned: _Spanned, names: tuple[str, ...]) -> Plan:
        """Remember a span that was made; returns the plan of its first call."""
        if spanned.plan.kernel.calls >= _FEWEST:
            self._poor = 0
        spans = self._spans.setdefault(names, [])
        spans.append(spanned)
        if len(spans) > _KEPT:
            spans.pop(0).close()
        return spanned.plan

    def plans(self) -> list[Plan]:
        return [spanned.plan for spans in self._spans.values() for spanned in spans]

    def clear(self) -> None:
        for plan in self.plans():
            plan.close()
        self._spans.clear()


def _difference(a: Sizes, b: Sizes) -> Sizes | None:
    """By how much every dim grew, None for inputs that stayed; None where it is not growth."""
    found: list[tuple[int, ...] | None] = []
    for x, y in zip(a, b):
        if x == y:
            found.append(None)
            continue
        if type(x) is not tuple or type(y) is not tuple or x[0] != y[0] or len(x[1]) != len(y[1]):
            return None
        step = tuple([q - p for p, q in zip(x[1], y[1])])
        if min(step) < 0:
            return None
        found.append(step)
    return tuple(found) if len(a) == len(b) and any(found) else None


def spanned(
    sizes: Sizes,
    step: Sizes,
    program: Program,
    types: Sequence[Type | None],
    dims: Mapping[str, int],
    allocator: TensorAllocator,
    config: SessionConfig,
) -> _Spanned:
    """One plan for a call of these sizes and those that follow, step by step; fails where there is none."""
    if len(program.steps) != 1 or config.memory.secure or config.limits.memory_bytes is not None:
        raise NotImplementedError("several kernels, or memory to be counted")
    kernel = program.steps[0].kernel
    if not isinstance(kernel, Growable):
        raise NotImplementedError("a kernel that takes one size at a time")
    with follow(Span(CALLS)) as span:
        growing = [
            TensorType(t.dtype, tuple(span.growing(d, s) for d, s in zip(t.shape, steps)))  # type: ignore[arg-type]
            if steps is not None and isinstance(t, TensorType) and t.shape is not None
            else t
            for t, steps in zip(types, step)
        ]
        first = TypeInference(dims, annotated=True)
        first.run(program.graph, types)
        found = grown_types(program.graph, first, growing)
        made = kernel.grow(found.types, found.values, span)
        varying = {slot: found.types.get(v) for v, slot in program.slots.items()}
        _check_limit(varying.values(), config.limits.tensor_bytes)
        plan = _SpanPlan(made, varying, program, types, dims, allocator, config)
        bound = _grown_dims(program, growing, dims)
        return _Spanned(sizes, step, plan, bound)


def _check_limit(types: Iterable[Type | None], allowed: int | None) -> None:
    """Calls with a tensor past the limit are not of the span: they are planned, and refused, by themselves."""
    for found in types:
        if allowed is not None and (static_bytes(found) or 0) > allowed:
            raise ResourceLimit("tensor_bytes", allowed, 0, str(found))


def _grown_dims(program: Program, types: Sequence[Type | None], dims: Mapping[str, int]) -> dict[str, Any]:
    """The symbolic dims with sizes that vary, as the inputs have them."""
    found: dict[str, Any] = dict(dims)
    for value, given in zip(program.graph.inputs, types):
        if isinstance(value.type, TensorType) and isinstance(given, TensorType) and value.type.shape and given.shape:
            for declared, size in zip(value.type.shape, given.shape):
                name = getattr(declared, "name", None)
                if name in found and varies(size):
                    found[name] = size
    return found
