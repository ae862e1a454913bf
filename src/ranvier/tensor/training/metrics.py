"""Numbers that tell how good a model is, gathered over batches.

They are computed by NumPy from results that have been computed anyway: a metric is no part of what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ranvier.errors import InvalidConfig, ShapeMismatch, nearest

Array = np.ndarray[Any, Any]


class Metric(Protocol):
    """Takes results and targets batch by batch; ``value`` is that of all since ``reset``."""

    name: str
    better: str  # "higher" or "lower"

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any) -> None: ...

    def value(self) -> float: ...


class Mean:
    """The mean over all samples of a number that a function gives for each, or for the batch."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any], better: str = "lower") -> None:
        self.name = name
        self.better = better
        self._function = function
        self.reset()

    def reset(self) -> None:
        self._sum, self._count = 0.0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        found = np.asarray(self._function(outputs, targets), np.float64)
        samples = len(np.asarray(targets)) if found.ndim == 0 and np.ndim(targets) else found.size
        self._sum += float(found.mean()) * samples
        self._count += samples

    def value(self) -> float:
        return self._sum / self._count if self._count else float("nan")


class Accuracy(Mean):
    """The share of samples whose class is among the ``top`` ones by score. Scores have a class axis more than targets;
    one score for each sample says yes where it is above ``threshold``."""

    def __init__(self, top: int = 1, *, axis: int = -1, threshold: float = 0.0) -> None:
        super().__init__("accuracy" if top == 1 else f"top{top}_accuracy", self._hits, "higher")
        self._top, self._axis, self._threshold = top, axis, threshold

    def _hits(self, outputs: Any, targets: Any) -> Array:
        scores, wanted = np.asarray(outputs), np.asarray(targets)
        if scores.shape == wanted.shape and not np.issubdtype(wanted.dtype, np.floating):
            return np.asarray((scores > self._threshold) == (wanted > 0))
        if scores.ndim == wanted.ndim:  # probabilities as targets
            wanted = wanted.argmax(self._axis)
        scores = np.moveaxis(scores, self._axis, -1)
        if scores.shape[:-1] != wanted.shape:
            raise ShapeMismatch(f"scores {list(scores.shape)} and classes {list(wanted.shape)} do not fit")
        if self._top == 1:
            return np.asarray(scores.argmax(-1) == wanted)
        best = np.argpartition(-scores, min(self._top, scores.shape[-1]) - 1, axis=-1)[..., : self._top]
        return np.asarray((best == wanted[..., None]).any(-1))


class F1:
    """The harmonic mean of precision and recall, averaged over classes."""

    name = "f1"
    better = "higher"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._confusion: Array = np.zeros((0, 0), np.int64)

    def update(self, outputs: Any, targets: Any) -> None:
        scores, wanted = np.asarray(outputs), np.asarray(targets).reshape(-1)
        classes = scores.shape[-1]
        if len(self._confusion) != classes:
            self._confusion = np.zeros((classes, classes), np.int64)
        np.add.at(self._confusion, (wanted, scores.reshape(-1, classes).argmax(-1)), 1)

    def value(self) -> float:
        right = np.diag(self._confusion)
        either = self._confusion.sum(0) + self._confusion.sum(1)
        return float(np.mean(2 * right[either > 0] / either[either > 0])) if (either > 0).any() else float("nan")


_BY_NAME: Mapping[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "top5_accuracy": lambda: Accuracy(5),
    "f1": F1,
    "mse": lambda: Mean("mse", lambda y, t: (np.asarray(y, np.float64) - np.asarray(t)) ** 2),
    "mae": lambda: Mean("mae", lambda y, t: np.abs(np.asarray(y, np.float64) - np.asarray(t))),
}


def metrics_of(given: Sequence[str | Metric] | Mapping[str, Callable[[Any, Any], Any]]) -> list[Metric]:
    """Metrics from names, from metrics, or from functions by name."""
    if isinstance(given, Mapping):
        return [Mean(name, function) for name, function in given.items()]
    found: list[Metric] = []
    for each in given:
        if not isinstance(each, str):
            found.append(each)
        elif each in _BY_NAME:
            found.append(_BY_NAME[each]())
        else:
            raise InvalidConfig(f"no metric is called {each!r}{nearest(each, _BY_NAME)}")
    return found
