"""A session's model compiled with a table of decisions, and what each of its launches takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.codegen.tuning import Decision, Table, given
from ranvier.providers.base import KernelTime, TellsDecisions
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.runtime.session import Session

_APART = 2e-3  # of its largest value, that a result may differ by: sums are taken in another order
_APART_NARROW = 5e-2  # where numbers are rounded to 16 bits on the way
_LEAST, _MOST = 3, 100  # runs
_DIFFERENT = 0.01  # of the elements of a result that are no fractions


@dataclass(frozen=True)
class Cost:
    """What the launches of a decision took, at best, all together."""

    decision: Decision
    seconds: float
    times: int  # how many groups of nodes it was taken for


class Variant:
    """One way to run the model. The best time of every launch is kept over all runs."""

    def __init__(self, session: Session, table: Table, feed: Mapping[str, Any]) -> None:
        self.table = table
        self._session = session
        self._names = session.output_names
        self._control = session._control(None)
        with given(table):
            self._compiled = session._compiled_for(session.providers)
            values, dims = session.signature.bind(session.signature.named(feed))
            self._values = values
            self._plan = session._plan(self._compiled, values, dims, self._names)
        self._best: dict[TellsDecisions, np.ndarray[Any, Any]] = {}

    def run(self) -> list[Any]:
        """One run that is looked at launch by launch."""
        with given(self.table):  # branches of control flow are compiled when they are met
            return self._plan.run(self._values, self._control, self)

    def record(self, *event: Any) -> None:
        """Of a step as a whole nothing is kept."""

    def inside(self, step: Any, times: Sequence[KernelTime]) -> None:
        kernel = step.kernel
        if not isinstance(kernel, TellsDecisions):
            return
        taken = np.array([t.end_ns - t.start_ns for t in times], np.float64) / 1e9
        known = self._best.get(kernel)
        whole = known is not None and len(known) == len(taken)
        self._best[kernel] = np.minimum(known, taken) if known is not None and whole else taken

    def forget(self) -> None:
        """Begin to measure anew, for a comparison with something that has not run as often."""
        self._best.clear()

    def decisions(self) -> dict[str, Decision]:
        """All that were taken, by key."""
        return {each.key: each for kernel in self._best for each in kernel.decisions()}

    def costs(self, keys: Iterable[str]) -> dict[str, Cost]:
        wanted = set(keys)
        found: dict[str, Cost] = {}
        for kernel, best in self._best.items():
            for each in kernel.decisions():
                if each.key not in wanted:
                    continue
                before = found.get(each.key, Cost(each, 0.0, 0))
                more = float(best[each.first : each.end].sum())
                found[each.key] = Cost(each, before.seconds + more, before.times + 1)
        return found

    @property
    def seconds(self) -> float:
        """All launches together, each at its best."""
        return float(sum(best.sum() for best in self._best.values()))

    def close(self) -> None:
        self._compiled.close()
        self._best.clear()
        gc.collect()  # packed weights are as large as the model's own


def interleaved(first: Variant, second: Variant, seconds: float) -> None:
    """Runs of both in turn, for so long, and neither too few nor more than are needed."""
    end = time.perf_counter() + seconds
    done = 0
    while done < _LEAST or (done < _MOST and time.perf_counter() < end):
        for each in (first, second) if done % 2 else (second, first):
            each.run()
        done += 1


def agree(one: Sequence[Any], other: Sequence[Any], narrow: bool) -> bool:
    """Whether results are the same but for rounding."""
    return all(_agree(a, b, _APART_NARROW if narrow else _APART) for a, b in zip(one, other))


def _agree(a: Any, b: Any, apart: float) -> bool:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.size or a.dtype == object or a.dtype.kind not in "fiub":
        return True
    if a.dtype.kind != "f":
        return float(np.mean(a != b)) <= _DIFFERENT
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return False
    largest = float(np.abs(x[finite]).max()) if finite.any() else 0.0
    return bool((np.abs(x[finite] - y[finite]) <= apart * largest + 1e-12).all())
