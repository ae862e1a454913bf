"""Calls of a kernel that grow where the content of inputs decides about shapes, as a length that is given as a tensor.

What a call is told apart by, sizes and such contents, is a list of numbers. When they go on as they did from one call
to the next, the part is lowered for the calls to come at once (:mod:`ranvier.providers.cpu.growing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier import dtypes
from ranvier.graph.types import TensorType
from ranvier.ops import TypeInference
from ranvier.ops.infer_growing import follow_nodes
from ranvier.providers.base import Subgraph
from ranvier.providers.cpu.growing import Growing
from ranvier.providers.cpu.specialise import Specialised
from ranvier.varying import Span, follow

Array = np.ndarray[Any, Any]
CALLS = 512  # of a span, at most
_KEPT = 4
_FEWEST = 4  # a span of fewer calls than this was not worth its making …
_PATIENCE = 3  # … and after so many in a row no more are made


class GrowingCalls:
    """Spans of calls of one kernel. Whoever calls holds the kernel's lock."""

    def __init__(self) -> None:
        self._spans: list[tuple[Any, list[int], list[int], int, Growing]] = []
        self._last: tuple[Any, list[int]] | None = None
        self._step: list[int] | None = None
        self._poor = 0
        self.reason = ""  # why the last attempt failed, for people

    def find(self, given: Sequence[Array], keyed: Sequence[int]) -> Specialised | None:
        """What a call of a span runs; None where it belongs to none."""
        if not self._spans:
            return None
        kinds, numbers = _numbers(given, keyed)
        for like, first, step, at, made in reversed(self._spans):
            if like != kinds:
                continue
            call, rest = divmod(numbers[at] - first[at], step[at])
            if rest == 0 and 0 <= call < made.calls and numbers == [a + call * d for a, d in zip(first, step)]:
                self._last = kinds, numbers
                found: Specialised = made.at(call)
                return found
        return None

    def make(
        self,
        given: Sequence[Array],
        keyed: Sequence[int],
        part: Subgraph,
        infer: Callable[[Sequence[Array]], TypeInference],
        lower: Callable[[TypeInference, Span], Growing],
    ) -> Specialised | None:
        """A span that begins with this call, where it grew as the one before it did; None where there is none."""
        kinds, numbers = _numbers(given, keyed)
        last, before = self._last, self._step
        self._last, self._step = (kinds, numbers), None
        if last is None or last[0] != kinds:
            return None
        step = [b - a for a, b in zip(last[1], numbers)]
        if not any(step) or min(step) < 0:
            return None
        self._step = step
        if step != before or self._poor >= _PATIENCE:
            return None
        self._poor += 1  # until it turns out to be worth it
        try:
            with follow(Span(CALLS)) as span:
                made = lower(_grown(given, keyed, step, span, part, infer(given)), span)
        except Exception as error:  # calls are lowered one by one then, and errors are met there
            self.reason = f"{type(error).__name__}: {error}"
            return None
        if made.calls >= _FEWEST:
            self._poor = 0
        at = next(k for k, d in enumerate(step) if d)
        self._spans = [*self._spans, (kinds, numbers, step, at, made)][-_KEPT:]
        return made.at(0)


def _numbers(given: Sequence[Array], keyed: Sequence[int]) -> tuple[Any, list[int]]:
    """What kind of call it is, and the numbers that tell it from others of the kind."""
    kinds = (tuple([(x.dtype, x.ndim) for x in given]), tuple([(k, given[k].shape) for k in keyed]))
    numbers = [d for x in given for d in x.shape]
    for k in keyed:
        if given[k].dtype.kind not in "iu":
            return (*kinds, given[k].tobytes()), numbers
        numbers += given[k].ravel().tolist()
    return kinds, numbers


def _grown(
    given: Sequence[Array],
    keyed: Sequence[int],
    step: Sequence[int],
    span: Span,
    part: Subgraph,
    first: TypeInference,
) -> TypeInference:
    """The inference of all calls of a span, of which ``first`` is that of the first."""
    found = TypeInference()
    steps = iter(step)
    inputs = [v for v in part.inputs if v.const is None]
    for value, x in zip(inputs, given):
        found.types[value] = TensorType(dtypes.of(x), tuple([span.growing(d, next(steps)) for d in x.shape]))
    for k in keyed:
        x = given[k]
        if x.dtype.kind in "iu":
            content = np.empty(x.shape, object)
            content.reshape(-1)[:] = [span.growing(n, next(steps)) for n in x.ravel().tolist()]
            found.values[inputs[k]] = content
        else:
            found.values[inputs[k]] = x
    follow_nodes(found, first, part.nodes)
    return found
