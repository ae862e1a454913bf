"""Groups of parameters with their options.

What schedules change (the learning rate, momenta) is held as states: a compiled step reads them and goes on with other
values. Any other option is a setting, for each value of which a step is traced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput
from ranvier.tensor.core import Tensor
from ranvier.tensor.manipulate import astype
from ranvier.tensor.state import Parameter, Setting, State

SCHEDULED = ("lr", "momentum", "betas")


class Group(MutableMapping[str, Any]):
    """Parameters that are learned with the same options: ``group["lr"] = 0.01``."""

    def __init__(self, params: Sequence[Parameter], options: Mapping[str, Any]) -> None:
        self.params = list(params)
        self._device = self.params[0].device if self.params else None
        self.steps = State(np.zeros((), np.float64), device=self._device, name="steps")
        self._states: dict[str, State] = {}
        self._settings: dict[str, Setting[Any]] = {}
        for name, value in options.items():
            self[name] = value

    def number(self, name: str, like: Tensor | None = None) -> Tensor:
        """A scheduled option as a tensor: in float64, or in the type of another tensor."""
        value = self._states[name].value
        return value if like is None else astype(value, like.dtype)

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """An option of two numbers, each in float64."""
        both = self._states[name].value
        return both[0], both[1]

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self.params
        if name in self._states:
            return _plain(self._states[name].numpy())
        return self._settings[name].value

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            raise InvalidInput("the parameters of a group stay; see add_param_group")
        if name not in SCHEDULED:
            if name in self._settings:
                self._settings[name].value = value
            else:
                self._settings[name] = Setting(value)
            return
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value, np.float64)
        if name in self._states:
            self._states[name].assign(Tensor(array.astype(np.float64), device=self._device))
        else:
            self._states[name] = State(array.astype(np.float64), device=self._device, name=name)

    def __delitem__(self, name: str) -> None:
        raise InvalidInput(f"{name!r} stays an option of its group")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", *self._states, *self._settings])

    def __len__(self) -> int:
        return 1 + len(self._states) + len(self._settings)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={self[name]}" for name in self if name != "params")
        return f"Group({len(self.params)} parameters, {options})"


def _plain(array: Any) -> Any:
    return float(array) if not array.shape else tuple(float(x) for x in array)


_OF_TENSORS = True
