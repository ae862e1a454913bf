"""A size at many calls at once: what a compiler does for one length of a cache, it does for those that follow.

Compiling for given sizes is arithmetic on whole numbers and decisions about them. A :class:`Varying` takes the place
of such a number. It holds the number's value in every call of a :class:`Span` (the sizes of now, those of the next
call, and so on), so that arithmetic gives the results for all of them; a decision is taken for the sizes of now, and
the span remembers in which calls it would have been the same. What comes out is right for just those calls: all that
was decided there is what would have been decided for each of them alone.

A Varying is taken for an ``int`` (or ``float``) wherever Python code looks at it, but it is none: wherever one is
needed itself (to count, to index, as a key, inside NumPy) its value of now is handed out, and the span shrinks to the
calls that have the same. So nothing is lost by code that knows nothing of all this, except calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


class Span:
    """Calls from now on, in order; ``valid`` are those for which every decision was the same as for the first."""

    __slots__ = ("valid",)

    def __init__(self, count: int) -> None:
        self.valid = np.ones(count, bool)

    def growing(self, first: int, step: int) -> Any:
        """A size that is ``first`` now and ``step`` more at every call; a plain number where it stays."""
        return first + step * self._count() if step else first

    def _count(self) -> Any:
        return _number(self, np.arange(len(self.valid), dtype=np.int64))

    def require(self, holds: Numbers) -> None:
        self.valid &= holds

    @property
    def calls(self) -> int:
        """How many calls from now on are valid without a gap."""
        gaps = np.flatnonzero(~self.valid)
        return int(gaps[0]) if len(gaps) else len(self.valid)


def _number(span: Span, values: Numbers) -> Any:
    first = values[0]
    if (values == first).all():
        return first.item()
    return Varying(span, values)


def _values(x: Any) -> Any:
    return x.values if type(x) is Varying else x


def _binary(function: Callable[..., Any]) -> Any:
    def forward(self: Varying, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return _number(self.span, function(self.values, _values(other)))

    return forward


def _reflected(function: Callable[..., Any]) -> Any:
    def backward(self: Varying, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return _number(self.span, function(_values(other), self.values))

    return backward


def _divided(function: Callable[..., Any], *, swapped: bool) -> Any:
    def divide(self: Varying, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        a, b = (other, self) if swapped else (self, other)
        if b == 0:  # a decision like any other: calls where it is 0 are not meant
            raise ZeroDivisionError("division by zero")
        with np.errstate(divide="ignore", invalid="ignore"):
            return _number(self.span, function(_values(a), _values(b)))

    return divide


def _compared(function: Callable[..., Any]) -> Any:
    def compare(self: Varying, other: Any) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return self._decided(function(self.values, _values(other)))

    return compare


_following: list[Span] = []


@contextmanager
def follow(span: Span) -> Iterator[Span]:
    """While numbers that vary are about."""
    _following.append(span)
    try:
        yield span
    finally:
        _following.remove(span)


def following() -> bool:
    """Might a number vary? Asked where looking at all of them would take long."""
    return bool(_following)


class Varying:
    """A number in all calls of a span; never one that is the same in all of them (that is an ``int``)."""

    __slots__ = ("span", "values")
    __array_ufunc__ = None  # NumPy's numbers leave arithmetic with it to its own methods

    def __init__(self, span: Span, values: Numbers) -> None:
        self.span = span
        self.values = values

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance sees
        return float if self.values.dtype.kind == "f" else int

    # -- arithmetic -------------------------------------------------------------------------------------------------

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __rshift__ = _binary(operator.rshift)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __floordiv__ = _divided(operator.floordiv, swapped=False)
    __rfloordiv__ = _divided(operator.floordiv, swapped=True)
    __truediv__ = _divided(operator.truediv, swapped=False)
    __rtruediv__ = _divided(operator.truediv, swapped=True)
    __mod__, __rmod__ = _divided(operator.mod, swapped=False), _divided(operator.mod, swapped=True)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Any:
        return Varying(self.span, -self.values)

    def __abs__(self) -> Any:
        return _number(self.span, np.abs(self.values))

    def __ceil__(self) -> Any:
        return self._whole(np.ceil)

    def __floor__(self) -> Any:
        return self._whole(np.floor)

    def __round__(self, digits: int | None = None) -> Any:
        return self._whole(np.rint)

    def _whole(self, function: Callable[[Numbers], Numbers]) -> Any:
        return _number(self.span, function(self.values).astype(np.int64))

    # -- decisions --------------------------------------------------------------------------------------------------

    __lt__, __le__ = _compared(operator.lt), _compared(operator.le)
    __gt__, __ge__ = _compared(operator.gt), _compared(operator.ge)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return self._decided(self.values == _values(other))

    def __ne__(self, other: object) -> Any:
        if not isinstance(other, int | float | np.number):
            return NotImplemented
        return self._decided(self.values != _values(other))

    def __bool__(self) -> bool:
        return self._decided(self.values != 0)

    def _decided(self, outcomes: Numbers) -> bool:
        now = bool(outcomes[0])
        self.span.require(outcomes if now else ~outcomes)
        return now

    # -- where the number itself is needed --------------------------------------------------------------------------

    def _pinned(self) -> Any:
        now = self.values[0]
        self.span.require(self.values == now)
        return now.item()

    def __index__(self) -> int:
        return operator.index(self._pinned())

    def __int__(self) -> int:
        whole = Varying(self.span, np.trunc(self.values))
        return int(whole._pinned())

    def __float__(self) -> float:
        return float(self._pinned())

    def __hash__(self) -> int:
        return hash(self._pinned())

    def __repr__(self) -> str:
        return repr(self._pinned())

    def __format__(self, form: str) -> str:
        return format(self._pinned(), form)


def whole(x: Any) -> Any:
    """``int(x)``, which a size that varies is already."""
    return x if type(x) is Varying else int(x)


def smallest(*numbers: Any) -> Any:
    """``min``, which is no decision where nothing but the number is made of it."""
    return _extreme(np.minimum, min, numbers)


def largest(*numbers: Any) -> Any:
    """``max``, likewise."""
    return _extreme(np.maximum, max, numbers)


def _extreme(function: Any, plain: Any, numbers: Sequence[Any]) -> Any:
    span = next((x.span for x in numbers if type(x) is Varying), None)
    if span is None:
        return plain(numbers)
    found = _values(numbers[0])
    for other in numbers[1:]:
        found = function(found, _values(other))
    return _number(span, found)


def most(x: Any) -> Any:
    """The largest that a number is in any call."""
    return x.values.max().item() if type(x) is Varying else x


def value_at(numbers: Sequence[Any], call: int) -> tuple[Any, ...]:
    """Numbers as they are in one call; 0 is the first."""
    return tuple([x.values[call].item() if type(x) is Varying else x for x in numbers])


def varies(x: object) -> bool:
    return type(x) is Varying


def content(x: Any) -> Any:
    """What tells a number from others in all calls, as part of a key."""
    return x.values.tobytes() if type(x) is Varying else x
