"""The short way of a call like the last one: what was looked up then is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.signature import Tensor
from ranvier.runtime.control import RunControl
from ranvier.runtime.plan import Plan

_OFTEN = 8  # calls by Python between two looks for an entry


class Recent:
    """The plan of the last call, for the next one with the same types: nothing has to be looked up then.

    ``enter`` is a way in without Python, once such calls have come a few times and where there is one: it gives the
    outputs as ``run`` does.
    """

    __slots__ = ("_calls", "_control", "_expected", "_names", "_plan", "enter")

    def __init__(
        self,
        required: Sequence[str],
        values: Sequence[Any],
        plan: Plan,
        names: tuple[str, ...],
        control: RunControl,
    ) -> None:
        # an array with a type of its own making is compared by the slower way, every time, and objects are looked at
        self._expected = [
            (n, x.dtype, x.shape) if type(x) is np.ndarray and x.dtype != object else (n, None, None)
            for n, x in zip(required, values)
        ]
        self._calls = 0
        self.enter: Callable[[Any], dict[str, Any] | None] | None = None if plan.opened is None else plan.opened.run
        self._control = control
        self._plan = plan
        self._names = names

    def run(self, inputs: Any) -> dict[str, Any] | None:
        """The outputs, or None where this call is another one."""
        if type(inputs) is not dict or len(inputs) != len(self._expected):
            return None
        values = []
        for name, dtype, shape in self._expected:
            x = inputs.get(name)
            if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape:
                return None
            values.append(x)
        self._calls += 1
        if self._calls == _OFTEN:
            self._open(values)
        results = self._plan.run_directly(values)
        if results is None:
            results = self._plan.run(values, self._control, None)
        return dict(zip(self._names, results))

    def _open(self, values: list[Any]) -> None:
        """Ask the plan for its entry: at the first calls, and again where that does not let calls in any more."""
        self._calls = 0
        taken = [Tensor(name, x.dtype, x.shape, None) for (name, _, _), x in zip(self._expected, values)]
        entry = self._plan.entry(taken, self._names)
        self.enter = None if entry is None else entry.run


__all__ = ["Recent"]
