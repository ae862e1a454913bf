"""States of compiled functions in the memory of a device, where they stay from call to call.

A state has a home there: memory whose address never changes, so that a run of the device can be captured on it once.
Which expression's value lies in a home is known by identity: as long as a state still holds that one, nothing is
copied. A function writes new values over the old ones, and what somebody else still holds is brought to the host
before. Gradients that a function only writes stay where its run puts them, until the next call of it.

Only results travel, and only when they are asked for: a call returns while the device still works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any
from weakref import ref

import numpy as np

from ranvier.devices import Device
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig
from ranvier.logs import warn_once
from ranvier.providers.own_memory import KeepsValues
from ranvier.runtime.session import Session
from ranvier.runtime.tied import TiedRun
from ranvier.runtime.transfer import HOST
from ranvier.tensor.core import wrapped
from ranvier.tensor.expr import Array, Expr, fetch, holder_of, resident
from ranvier.tensor.groups import realise
from ranvier.tensor.state import Parameter, State


class _Place:
    """Memory of a device with a value in it, which is brought here when it is wanted."""

    __slots__ = ("provider", "tensor")

    def __init__(self, provider: KeepsValues, tensor: Any) -> None:
        self.provider = provider
        self.tensor = tensor

    def fetch(self) -> Array:
        return self.provider.leave([self.tensor])()[0]


class Home(_Place):
    """That of a state. ``current``: the expression whose value lies there."""

    __slots__ = ("current",)

    def __init__(self, provider: KeepsValues, array: Array) -> None:
        super().__init__(provider, provider.bring(array))
        self.current: Expr | None = None


class Slot(_Place):
    """Where a run writes a result, the same in each call. ``expr``: who stands for what lies there."""

    __slots__ = ("expr",)

    def __init__(self, provider: KeepsValues) -> None:
        super().__init__(provider, None)
        self.expr: ref[Expr] | None = None


class _Arriving:
    """A result on its way to the host."""

    __slots__ = ("_arrived", "_position")

    def __init__(self, arrived: Callable[[], list[Array]], position: int) -> None:
        self._arrived, self._position = arrived, position

    def fetch(self) -> Array:
        return self._arrived()[self._position]


class _Held:
    """A state, or the gradient of a parameter: where its value is, and where the device has it."""

    __slots__ = ("grad", "state")

    def __init__(self, state: State, *, grad: bool = False) -> None:
        self.state = state
        self.grad = grad

    @property
    def expr(self) -> Expr | None:
        if not self.grad:
            return self.state._held
        assert isinstance(self.state, Parameter)
        return None if self.state._grad is None else self.state._grad._expr

    @property
    def home(self) -> Home | None:
        found: Home | None
        if self.grad:
            assert isinstance(self.state, Parameter)
            found = self.state._grad_home
        else:
            found = self.state._home
        return found

    def settle(self, home: Home) -> None:
        if self.grad:
            assert isinstance(self.state, Parameter)
            self.state._grad_home = home
        else:
            self.state._home = home

    def put(self, expr: Expr) -> None:
        if self.grad:
            assert isinstance(self.state, Parameter)
            self.state._grad = wrapped(expr)
        else:
            self.state._held = self.state.marked(expr)

    def looked_at(self, expr: Expr, others: int) -> bool:
        """Whether anybody but its holder, and so many ``others``, refers to the value."""
        if self.grad:
            assert isinstance(self.state, Parameter)
            if getrefcount(self.state._grad) > 2:
                return True
        return getrefcount(expr) > 4 + others  # the holder's, the caller's, the parameter's and that of the count


class DeviceRun:
    """A compiled function on a device: its arguments have memory there, and states their homes.

    ``inputs`` and ``outputs`` say by position what is a state; None stands for an argument, and for a result that is
    returned.
    """

    def __init__(
        self,
        session: Session,
        provider: KeepsValues,
        inputs: Sequence[_Held | None],
        outputs: Sequence[_Held | None],
        types: Sequence[DType],
        device: Device | None,
    ) -> None:
        self._session, self._provider = session, provider
        self._types, self._device = types, device
        self._states = [(k, held) for k, held in enumerate(inputs) if held is not None]
        self._arguments = [k for k, held in enumerate(inputs) if held is None]
        where = {(held.state, held.grad): k for k, held in self._states}
        self._replaced = [
            (which, where[held.state, held.grad], held)
            for which, held in enumerate(outputs)
            if held is not None and (held.state, held.grad) in where
        ]
        taken = {which for which, _, _ in self._replaced}
        self._written = [
            (k, held, Slot(provider)) for k, held in enumerate(outputs) if held is not None and k not in taken
        ]
        self._homes: list[Home] = []
        self._static: list[Any] = []  # memory of the arguments
        self._last: list[Array | None] = []  # what lies there, where it cannot have changed since
        self._run: TiedRun | None = None
        self._lock = threading.Lock()

    def prepare(self, given: Sequence[Array]) -> None:
        """Make the run where there is none for the homes that states have now. InvalidConfig says why it cannot be,
        and states are as they were."""
        with self._lock:
            if self._run is None or any(held.home is not home for (_, held), home in zip(self._states, self._homes)):
                self._run = None
                self._tie(given)

    def call(self, given: Sequence[Array], returned: Sequence[int]) -> dict[int, Expr]:
        """Run it; states have their new values then. ``given``: arrays for the arguments. Expressions of those results
        that are ``returned``, by position."""
        with self._lock:
            self._bring(given)
            kept = self._make_room()
            assert self._run is not None
            results = self._provider.launch(self._run.in_order)
            self._settle(results, kept)
            return self._leave(results, returned)

    # -- what goes in -------------------------------------------------------------------------------------------------

    def _tie(self, given: Sequence[Array]) -> None:
        """Prepare the run on the homes of its states. Preparing runs it, so states get their values afterwards."""
        provider, session = self._provider, self._session
        realise([held.expr for _, held in self._states if held.expr is not None and held.expr.array is None])
        self._homes, tensors = [], {}
        for k, held in self._states:
            expr, home = held.expr, held.home
            assert expr is not None and expr.array is not None
            if home is None or home.provider.space != provider.space:
                home = Home(provider, expr.array)
                held.settle(home)
            self._homes.append(home)
            tensors[k] = home.tensor
        for k, array in zip(self._arguments, given):
            tensors[k] = provider.bring(array)
        self._static = [tensors[k] for k in self._arguments]
        self._last = [None] * len(self._static)
        names, outputs = session.signature.required, session.output_names
        in_place = {outputs[which]: names[k] for which, k, _ in self._replaced}
        for _, _, held in self._replaced:
            assert held.home is not None
            if held.home.current is not None:
                fetch(held.home.current)
                held.home.current = None
        run = session.tied({names[k]: tensor for k, tensor in tensors.items()}, in_place)
        if run.shaped_by:
            raise InvalidConfig(f"sizes follow from what {', '.join(run.shaped_by)} holds")
        self._run = run

    def _bring(self, given: Sequence[Array]) -> None:
        """Arguments and states that the device does not have yet."""
        targets: list[Any] = []
        sources: list[Any] = []
        for n, (array, static) in enumerate(zip(given, self._static)):
            if array is self._last[n]:
                continue
            targets.append(static)
            sources.append(array)
            self._last[n] = array if _lasting(array) else None
        for (_, held), home in zip(self._states, self._homes):
            expr = held.expr
            if expr is home.current:
                continue
            assert expr is not None
            before = home.current
            if before is not None and holder_of(before) is home and getrefcount(before) > 3:
                fetch(before)  # of somebody who had the value before this one
            holder = holder_of(expr)
            targets.append(home.tensor)
            if isinstance(holder, _Place) and holder.provider.space == self._provider.space:
                sources.append(holder.tensor)
                if isinstance(holder, Slot):
                    expr.spec = resident(home, expr.dtype, expr.shape).spec
            else:
                if expr.array is None:
                    realise((expr,))
                sources.append(expr.array)
            home.current = expr
        if targets:
            self._provider.refill(targets, sources)
            moved = [source for source in sources if isinstance(source, np.ndarray)]
            if moved:
                self._count(HOST, self._provider.space, moved)

    def _make_room(self) -> list[bool]:
        """Bring what others still hold to the host before it is overwritten. For each state that gets a new value,
        whether the expression it holds can stand for that: nobody else has seen it."""
        kept = []
        for _, _, held in self._replaced:
            expr = held.expr
            assert expr is not None
            shared = held.looked_at(expr, 1)  # the home's
            if shared:
                fetch(expr)
            kept.append(not shared and expr.array is None)
        for _, held, slot in self._written:
            expr = None if slot.expr is None else slot.expr()
            own = expr is not None and holder_of(expr) is slot
            shared = own and (expr is not held.expr or held.looked_at(expr, 0))  # type: ignore[arg-type]
            if shared:
                assert expr is not None
                fetch(expr)
            kept.append(own and not shared)
        return kept

    # -- what comes out -----------------------------------------------------------------------------------------------

    def _settle(self, results: Sequence[Any], kept: Sequence[bool]) -> None:
        for (which, _, held), same in zip(self._replaced, kept):
            if not same:
                home = held.home
                assert home is not None
                made = self._standing(home, which, results)
                held.put(made)
                home.current = made
        for (which, held, slot), same in zip(self._written, kept[len(self._replaced) :]):
            slot.tensor = results[which]
            if not same:
                made = self._standing(slot, which, results)
                held.put(made)
                slot.expr = ref(made)

    def _standing(self, holder: _Place, which: int, results: Sequence[Any]) -> Expr:
        return resident(holder, self._types[which], tuple(results[which].shape), self._device)

    def _leave(self, results: Sequence[Any], returned: Sequence[int]) -> dict[int, Expr]:
        if not returned:
            return {}
        arrived = self._provider.leave([results[k] for k in returned])
        made = {
            k: resident(_Arriving(arrived, n), self._types[k], tuple(results[k].shape), self._device)
            for n, k in enumerate(returned)
        }
        self._count(self._provider.space, HOST, [results[k] for k in returned])
        return made

    def _count(self, source: str, target: str, values: Sequence[Any]) -> None:
        self._session._moved.add(source, target, len(values), sum(int(x.nbytes) for x in values), 0.0)


def _lasting(array: Array) -> bool:
    """Whether an array cannot be changed by anybody as long as it is referred to."""
    return not array.flags.writeable and array.base is None


def device_run(
    session: Session,
    name: str,
    inputs: Sequence[tuple[State, bool] | None],
    outputs: Sequence[tuple[State, bool] | None],
    types: Sequence[DType],
    device: Device | None,
) -> DeviceRun | None:
    """What runs a compiled function on a device with its states there; None where it is not for one device."""
    keeping = [each for each in session.providers if isinstance(each, KeepsValues)]
    if not keeping or all(held is None for held in (*inputs, *outputs)):
        return None
    owners = {part.part.provider for part in session._parts}
    if owners != {keeping[0]} or len(session._parts) != 1:
        others = sorted({f"{p.part.subgraph.label} on {p.part.provider.name}" for p in session._parts})
        reason = f"it is in {len(session._parts)} parts ({', '.join(others[:4])})"
        if any(owner in keeping for owner in owners):
            tell(name, reason)
        return None
    made = [[None if x is None else _Held(x[0], grad=x[1]) for x in each] for each in (inputs, outputs)]
    return DeviceRun(session, keeping[0], made[0], made[1], types, device)


def tell(name: str, reason: str) -> None:
    """States travel in each call then, which costs far more than anything else: somebody should know."""
    warn_once(f"resident {name}", f"states of {name} do not stay on the device: {reason}")


_OF_TENSORS = True
__all__ = ["DeviceRun", "Home", "Slot", "device_run", "tell"]
