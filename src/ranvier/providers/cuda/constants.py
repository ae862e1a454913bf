"""Constants on a device: once for all graphs that are alive, as they are and in each form that kernels want them in.

A language model is compiled for prompts and for single tokens, and its weights are the same in both. They are known by
where they come from, never by what they hold, and only where nobody can write there: what may change belongs to the
graph that was compiled with it. They go with the last graph that uses them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from ranvier.graph.ir import Value
from ranvier.graph.tensors import ConstTensor, Same
from ranvier.providers.cuda.library import tensor_over, torch
from ranvier.providers.cuda.place import Place
from ranvier.providers.cuda.transfers import remember

T = TypeVar("T")

_IN_USE: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
_LOOKING = threading.Lock()  # not while something is made: two that make the same at once keep that of the first


class Constants:
    """Those of a part. ``tensors`` are the ones that it reads as they are, by their values."""

    def __init__(self, place: Place, values: Iterable[Value]) -> None:
        self.values = [v for v in values if is_constant(v)]
        self.tensors: dict[Value, Any] = {}
        self._place = place
        self._known = frozenset(self.values)

    def __contains__(self, value: object) -> bool:
        return value in self._known

    def tensor(self, value: Value) -> Any:
        """Brought to the device when it is first asked for."""
        found = self.tensors.get(value)
        if found is None:
            found = self.tensors[value] = shared(self._place, [value], "as it is", lambda: self._upload(value))
        return found

    def form(self, value: Value, form: Hashable, make: Callable[[Any], Any]) -> Any:
        """What ``make`` makes of its tensor, which is not brought there where another graph has that already. ``form``
        tells all that it depends on beside the constant; None: it cannot be told."""
        return shared(self._place, [value], form, lambda: make(self.tensor(value)))

    def keep(self, values: Iterable[Value]) -> None:
        """Nothing but these, which are read as they are."""
        read = set(values)
        self.tensors = {v: self.tensor(v) for v in self.values if v in read}

    def let_go(self, value: Value) -> None:
        self.tensors.pop(value, None)

    def _upload(self, value: Value) -> Any:
        const = _of(value)
        array = const.numpy()
        made = remember(tensor_over(array).to(self._place.device), array)
        const.release()
        return made


def is_constant(value: Value) -> bool:
    return value.const is not None and value.producer is None


def shared(place: Place, sources: Sequence[Value | None], form: Hashable, make: Callable[[], T]) -> T:
    """What is made of constants on a device, a tensor or a record of tensors: what another graph has in use, where it
    has it in this ``form``. Nobody writes to it."""
    key = _key(place, sources, form)
    if key is None:
        return make()
    with _LOOKING:
        found = _IN_USE.get(key)
    if found is None:
        made = make()
        place.settle()  # whoever finds it reads it in a stream of their own
        with _LOOKING:
            found = _IN_USE.setdefault(key, made)
    for tensor in (found,) if isinstance(found, torch.Tensor) else vars(found).values():
        if isinstance(tensor, torch.Tensor):
            place.uses(tensor)
    return cast(T, found)


def _key(place: Place, sources: Sequence[Value | None], form: Hashable) -> Hashable | None:
    """None where it is nobody else's."""
    given = [value for value in sources if value is not None]
    if form is None or not all(is_constant(value) and _lasts(_of(value).origin) for value in given):
        return None
    return (place.device, form, *(None if value is None else Same(_of(value).origin) for value in sources))


def _of(value: Value) -> ConstTensor:
    assert value.const is not None
    return value.const


def _lasts(origin: object) -> bool:
    """Whether nobody can write to the memory of a constant: neither through an array that it is a view of, nor through
    what that lies in. What is read again whenever it is wanted comes from where nobody writes."""
    while isinstance(origin, np.ndarray | memoryview):
        if origin.flags.writeable if isinstance(origin, np.ndarray) else not origin.readonly:
            return False
        origin = origin.base if isinstance(origin, np.ndarray) else origin.obj
    if origin is None or isinstance(origin, ConstTensor):
        return True
    try:
        return memoryview(origin).readonly  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no memory that tells, or none any more
        return False


__all__ = ["Constants", "is_constant", "shared"]
