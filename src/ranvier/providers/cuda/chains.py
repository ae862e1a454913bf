"""Loops over the same rows as one kernel: what goes backward through a norm or a softmax is a dozen nodes, each of
which reads what another wrote, or the same as another.

A nest is done where a later one stands that reads what it makes, if nobody needs that before; or the later one where
the first stands, if all that it reads is there by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ranvier.codegen.loops.chain import chained, depends, only_folds
from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.storage import Storage
from ranvier.graph.ir import Value
from ranvier.providers.cuda.forms import Work
from ranvier.providers.cuda.realise import CallStep, ContractionStep, CudaRealiser, NestStep, ResultStep
from ranvier.providers.cuda.steps import NodeStep, Step

_ROW = 8192  # points of a row that stays in registers
_PASSES = 4
_NEAR = 16  # candidates that are tried for a nest
_FAR = 16  # steps: what is made so much earlier than it is needed takes memory for longer than it saves time


def chain(steps: Sequence[Step]) -> list[Step]:
    """The steps with nests done together."""
    chains = _Chains(steps)
    for _ in range(_PASSES):
        if not chains.once():
            break
    return chains.left()


class Trial(CudaRealiser):
    """Steps that are only looked at: nothing is compiled or measured for them."""

    def multiplied(self, work: Work) -> None:
        self._made.add(work.out.storage)
        self.steps.append(_Product(self.places.tokens(work.reads()), self.places.tokens((work.out.storage,))))


class _Product(ContractionStep):
    def __init__(self, reads: tuple[Value, ...], writes: tuple[Value, ...]) -> None:
        self.reads, self.writes = reads, writes


class _Chains:
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps: list[Step | None] = list(steps)
        self._makers: dict[Value, set[int]] = {}
        self._readers: dict[Value, set[int]] = {}
        for k, step in enumerate(steps):
            self._enter(k, step)
        # what may do more to its operands than read them is passed by nobody
        self._bars = [k for k, step in enumerate(steps) if not _is_plain(step)]

    def left(self) -> list[Step]:
        return [step for step in self._steps if step is not None]

    def once(self) -> bool:
        """Whether something was joined."""
        found = False
        for k in range(len(self._steps)):
            while isinstance(self._steps[k], NestStep) and self._join(k):
                found = True
        return found

    def _enter(self, k: int, step: Step) -> None:
        for value in step.reads:
            self._readers.setdefault(value, set()).add(k)
        for value in step.writes:
            self._makers.setdefault(value, set()).add(k)

    def _leave(self, k: int, step: Step) -> None:
        for value in step.reads:
            self._readers[value].discard(k)
        for value in step.writes:
            self._makers[value].discard(k)

    def _join(self, k: int) -> bool:
        """Let a nest and an earlier one be one, in either's place."""
        step = self._steps[k]
        assert isinstance(step, NestStep)
        near = {m for v in step.reads for m in (*self._makers.get(v, ()), *self._readers.get(v, ())) if m < k}
        for m in sorted(near, reverse=True)[:_NEAR]:
            other = self._steps[m]
            if not isinstance(other, NestStep) or any(m < bar < k for bar in self._bars):
                continue
            at = k if self._waits(m, k) else m if self._is_ready(k, m) else None
            if at is None or not _worth(other.nest, step.nest):
                continue
            if k - m > _FAR and (at == m or not depends(other.nest, step.nest)):
                continue
            made = chained(other.nest, step.nest, self._needed(other, {m, k}))
            if made is None or not _fits(other.nest, step.nest, made):
                continue
            self._put(m, k, at, made)
            return True
        return False

    def _waits(self, m: int, k: int) -> bool:
        """Whether nobody touches what a step makes before another one."""
        step = self._steps[m]
        assert step is not None
        users = {u for v in step.writes for u in (*self._readers.get(v, ()), *self._makers.get(v, ()))}
        return not any(m < u < k for u in users)

    def _is_ready(self, k: int, m: int) -> bool:
        """Whether a step could run where an earlier one does."""
        step = self._steps[k]
        assert step is not None
        before = {u for v in step.reads for u in self._makers.get(v, ())}
        before |= {u for v in step.writes for u in (*self._readers.get(v, ()), *self._makers.get(v, ()))}
        return not any(m < u < k for u in before)

    def _needed(self, step: NestStep, by: set[int]) -> set[Storage]:
        """What a step writes that others than these read, or write to."""
        tokens = {storage: step.places.token(storage) for storage in step.storages}
        return {s for s, token in tokens.items() if s not in step.makes or self._readers.get(token, set()) - by}

    def _put(self, m: int, k: int, at: int, nest: Nest) -> None:
        first, second = self._steps[m], self._steps[k]
        assert isinstance(first, NestStep) and isinstance(second, NestStep)
        self._leave(m, first)
        self._leave(k, second)
        self._steps[m] = self._steps[k] = None
        written = {nest.operands[j].view.storage for j in nest.written()}
        makes = [s for s in (*first.makes, *second.makes) if s in written]
        made = NestStep(nest, first.places, makes, first.origin | second.origin, chained=True)
        self._steps[at] = made
        self._enter(at, made)


def _is_plain(step: Step) -> bool:
    if isinstance(step, CallStep):
        step = step.step
    return isinstance(step, NodeStep | NestStep | ContractionStep | ResultStep)


def _worth(first: Nest, second: Nest) -> bool:
    """Whether there is something to gain, judged before it is tried."""
    if first.row or second.row:
        return True
    return depends(first, second) and first.extents == second.extents


def _fits(first: Nest, second: Nest, made: Nest) -> bool:
    """Whether both are done well as one: rows stay in registers, or nothing but folds is done along them."""
    if not made.row:  # elementwise work that nobody else sees
        kept = {made.operands[k].view.storage for k in made.written()}
        return not any(first.operands[k].view.storage in kept for k in first.written())
    if only_folds(made):
        return not depends(first, second) or _is_short(made)
    return _is_short(made)


def _is_short(nest: Nest) -> bool:
    """Whether rows lie without gaps and are short."""
    points = math.prod(nest.extents[a] for a in nest.row)
    whole = [o for o in nest.operands if all(s or n == 1 for s, n in zip(o.strides, nest.extents))]
    along = any(abs(o.strides[a]) == 1 and nest.extents[a] > 1 for o in whole for a in nest.row)
    return 1 < points <= _ROW and along


__all__ = ["Trial", "chain"]
