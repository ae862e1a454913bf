"""A partition for a whole span of calls whose inputs grow: lowered once, a copy with other numbers for every call.

What a step of decoding does differs from the step before in sizes alone. Lowering is followed for all calls of a span
at once (:mod:`ranvier.varying`), so each of them gets exactly the launches that lowering it alone would have made;
temporaries are placed for the largest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ranvier.codegen.definitions.defs import Declined
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm.patching import at_call, first_of, patch_of
from ranvier.graph.ir import Value
from ranvier.providers.base import Subgraph
from ranvier.providers.cpu.specialise import Result, Specialised
from ranvier.providers.cpu.target import Packs, Realised, Target
from ranvier.varying import Span, most, value_at, varies


class Growing(Specialised):
    """The specialisation of the first call of a span, and by ``at`` those of all ``calls``."""

    def __init__(
        self,
        part: Subgraph,
        inputs: Sequence[Value],
        definitions: Definitions,
        target: Target,
        packs: Packs,
        span: Span,
    ) -> None:
        if any(varies(size) for each in definitions.draws for size in definitions.shape(each.value)):
            raise Declined("as many random numbers as a size that grows")
        super().__init__(part, inputs, definitions, target, packs)
        self.shapes: list[tuple[Any, ...]] = [result.shape for result in self.results]
        self.dtypes = [result.dtype for result in self.results]
        self.results = [Result(r.dtype, value_at(r.shape, 0)) for r in self.results]
        self.result_bytes = most(self.result_bytes)
        self._patch = patch_of(self.varying, self.places, len(span.valid))
        self.calls = span.calls  # asked last: how work is divided was decided just now

    def _settled(self, realised: Realised) -> Realised:
        self.varying: list[Launch] = realised.launches
        for launch in realised.launches:
            for buffer in launch.buffers:
                if isinstance(buffer, At):
                    _settle(buffer, launch.label)
        realised.launches = [first_of(launch) for launch in realised.launches]
        return realised

    def at(self, call: int) -> Specialised:
        """What the ``call``-th call runs; 0 is the first."""
        return _Grown(self, call)


def _settle(buffer: At, label: str) -> None:
    storage = buffer.storage
    storage.nbytes = most(storage.nbytes)
    if storage.array is not None and storage.array.dtype == object:
        raise Declined(f"{label}: a constant with sizes in it that grow")


class _Grown(Specialised):
    """One of the calls. What only people and unusual runs look at is made when somebody does."""

    def __init__(self, whole: Growing, call: int) -> None:
        self.__dict__.update(whole.__dict__)
        del self.__dict__["results"], self.__dict__["launches"]
        self._call = call
        self.program = whole.program.patched(whole._patch, call)

    @functools.cached_property
    def results(self) -> list[Result]:  # type: ignore[override]
        whole: Any = self
        return [Result(dtype, value_at(shape, self._call)) for dtype, shape in zip(whole.dtypes, whole.shapes)]

    @functools.cached_property
    def launches(self) -> list[Launch]:  # type: ignore[override]
        whole: Any = self
        return [at_call(launch, self._call) for launch in whole.varying]
