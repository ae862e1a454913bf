"""What optimizers have in common: groups of parameters, states, and one computation for all updates of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.tensor.core import Tensor, as_tensor
from ranvier.tensor.elementwise import negative, where
from ranvier.tensor.groups import realise
from ranvier.tensor.manipulate import astype
from ranvier.tensor.optim.groups import Group
from ranvier.tensor.state import Parameter, State
from ranvier.tensor.tracing import no_grad, now


class Optimizer:
    """Changes parameters by their gradients. A subclass says what a parameter's states are and how it is updated."""

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        self.defaults = dict(defaults)
        self.param_groups: list[Group] = []
        self.state: dict[Parameter, dict[str, State]] = {}
        self._pending: list[tuple[State, Tensor]] = []
        given = list(params)
        if not given:
            raise InvalidInput("an optimizer was given no parameters")
        for each in given if isinstance(given[0], Mapping) else [{"params": given}]:
            self.add_param_group(each)

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        """First values of a parameter's states: a shape, filled with zeros, for each name."""
        return {}

    def begin(self, group: Group) -> Any:
        """What all parameters of a group share in a step. ``group.steps`` counts this step already."""
        return None

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        """Change one parameter through ``self.change``."""
        raise NotImplementedError

    def change(self, state: State, value: Tensor) -> None:
        """Let a state have another value at the end of this step."""
        self._pending.append((state, value))

    # -- for users --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """More parameters, with options of their own where they are given."""
        options = {name: value for name, value in param_group.items() if name != "params"}
        unknown = [name for name in options if name not in self.defaults]
        if unknown:
            raise InvalidInput(f"{type(self).__name__} has no option {unknown[0]!r}")
        given = param_group["params"]
        params = [given] if isinstance(given, Parameter) else [_parameter(each) for each in given]
        have = {id(p) for group in self.param_groups for p in group.params}
        if len({id(p) for p in params}) < len(params) or any(id(p) in have for p in params):
            raise InvalidInput("a parameter is in one group, once")
        group = Group(params, self.defaults | options)
        self.check(group)
        self.param_groups.append(group)
        for param in params:
            self._states(group, param)

    def check(self, group: Group) -> None:
        """Raise where options make no sense."""
        if group["lr"] < 0.0:
            raise InvalidInput(f"the learning rate is not negative: {group['lr']}")

    def _states(self, group: Group, param: Parameter) -> dict[str, State]:
        found = self.state.get(param)
        if found is None:
            found = self.state[param] = {
                name: State(np.zeros(shape, param.dtype.numpy), device=param.device, name=name)
                for name, shape in self.states_of(group, param).items()
            }
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for group in self.param_groups:
            for param in group.params:
                param.grad = None if set_to_none or param.grad is None else param.grad * 0.0

    def step(self, closure: Callable[[], Tensor] | None = None, *, skip: Any = None) -> Tensor | None:
        """Update all parameters that have a gradient, all of them in one computation.

        ``skip``: a tensor of one truth value; where it holds, everything stays as it is.
        """
        loss = None if closure is None else closure()
        with no_grad():
            self._pending = []
            for group in self.param_groups:
                self._step_group(group)
            changes, self._pending = self._pending, []
            for state, value in changes:
                kept = value if skip is None else where(as_tensor(skip), state.value, value)
                state.assign(astype(kept, state.dtype))
        if now.tracing is None:
            realise([state._expr for state, _ in changes])
        return loss

    def _step_group(self, group: Group) -> None:
        chosen = [(param, grad) for param in group.params if (grad := param.grad) is not None]
        if not chosen:
            return
        self.change(group.steps, group.steps + 1.0)
        shared = self.begin(group)
        turned = "maximize" in group and group["maximize"]
        for param, grad in chosen:
            self.update(group, shared, param, negative(grad) if turned else grad, self._states(group, param))

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """States and options, parameters by number; in PyTorch's form."""
        states: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group in self.param_groups:
            numbers = list(range(number, number + len(group.params)))
            number += len(group.params)
            groups.append({name: numbers if name == "params" else group[name] for name in group})
            for k, param in zip(numbers, group.params):
                own = {name: state.value for name, state in self._states(group, param).items()}
                states[k] = {"step": group.steps.value, **own}
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with states and options of another run; PyTorch's are taken too."""
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group.params) for group in self.param_groups]:
            raise InvalidInput(f"groups of {sizes} parameters do not fit those of this optimizer")
        for group, given in zip(self.param_groups, groups):
            for name in given:
                if name in group and name != "params":
                    group[name] = given[name]
            steps = 0.0
            for key, param in zip(given["params"], group.params):
                saved = state_dict["state"].get(key, {})
                steps = max(steps, float(saved.get("step", 0.0)))
                for name, state in self._states(group, param).items():
                    if saved.get(name) is None:
                        continue
                    value = Tensor(saved[name], device=param.device)
                    if value.shape != state.shape:
                        raise ShapeMismatch(f"{name} has the shape {list(state.shape)}, not {list(value.shape)}")
                    state.assign(astype(value, state.dtype))
            group.steps.assign(Tensor(np.array(steps), device=group.steps.device))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.param_groups))})"


def _parameter(given: Any) -> Parameter:
    found = given[1] if isinstance(given, tuple) else given  # as named_parameters has them
    if not isinstance(found, Parameter):
        raise InvalidInput(f"an optimizer changes parameters, not {type(found).__name__}")
    return found


_OF_TENSORS = True
