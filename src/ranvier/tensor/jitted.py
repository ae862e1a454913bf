"""Functions of tensors, compiled whole.

A jitted function is run once on placeholders for each signature: the form of its arguments, their types and shapes, and
the plain values of Python among them. What it computes becomes one graph; from then on a call is one run of it. States
that it reads are inputs besides its arguments, and states that it assigns are results.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np

from ranvier import dtypes
from ranvier.errors import InvalidInput
from ranvier.logs import warn_once
from ranvier.runtime.preferred import preferred
from ranvier.tensor.autodiff import under_way
from ranvier.tensor.compiled import Compiled, Relatives
from ranvier.tensor.core import Tensor, wrapped
from ranvier.tensor.expr import Expr, known
from ranvier.tensor.groups import realise as realise_exprs
from ranvier.tensor.state import State
from ranvier.tensor.tracing import Tracing, now
from ranvier.tensor.trees import leaves as leaves_of

P = ParamSpec("P")
R = TypeVar("R")
_KEPT = 64  # compiled signatures of a function
_MANY = 16  # graphs of a function after which somebody is told
_LEAF = object()  # stands for a tensor in the form of arguments


def realise(*trees: Any) -> None:
    """Compute tensors together: what they have in common is computed once."""
    exprs = [x._expr for x in leaves_of(trees) if isinstance(x, Tensor)]
    realise_exprs([x for x in exprs if x.array is None])


@overload
def jit(function: Callable[P, R], /) -> Jitted[P, R]: ...


@overload
def jit(
    *, static_argnames: str | Sequence[str] = (), dynamic: bool = True
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static_argnames: str | Sequence[str] = (),
    dynamic: bool = True,
) -> Any:
    """A function that does the same, compiled whole; also as a decorator.

    Tensors and arrays in its arguments, and in dicts, lists and tuples there, are what it is compiled for all values
    of. Everything else (numbers, strings, objects) is part of the signature by its value; arguments named in
    ``static_argnames`` are so as a whole. ``dynamic``: from the second signature on that differs in one size only, one
    graph serves for all sizes where the function does the same for them.
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if function is None:
        return lambda given: Jitted(given, names, dynamic)
    return Jitted(function, names, dynamic)


class Jitted(Generic[P, R]):
    """A function that is compiled for each signature it is called with."""

    def __init__(self, function: Callable[P, R], static: tuple[str, ...] = (), dynamic: bool = True) -> None:
        if not callable(function):
            raise InvalidInput(f"a function can be compiled, not {type(function).__name__}")
        functools.update_wrapper(self, function)
        self._function = function
        self._static = frozenset(static)
        self._places = _places(function, static)
        self._dynamic = dynamic
        self._relatives: dict[Any, Relatives] = {}
        self._kept: OrderedDict[Any, list[Compiled]] = OrderedDict()
        self._lock = threading.RLock()  # states are changed by one call at a time
        self.traces = 0  # signatures that it was run on placeholders for
        self.graphs = 0  # compiled for these

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if now.tracing is not None or under_way():
            return self._function(*args, **kwargs)  # a part of what is being traced or derived
        form, given = self._flat(args, kwargs)
        key = (form, now.recording, preferred())
        with self._lock:
            try:
                kept = self._kept.get(key, ())
            except TypeError as error:
                raise InvalidInput(
                    f"arguments of a jitted function that are no tensors are hashable: {error}"
                ) from None
            compiled = next((each for each in kept if each.holds()), None)
            if compiled is None:
                compiled = self._compiled(key, args, kwargs, given)
            if compiled.lasting:
                return cast(R, compiled.call(given))
        if compiled.inline:
            return self._function(*args, **kwargs)
        return cast(R, compiled.call(given))  # several threads may be in here

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method: compiled for each object it is called on."""
        return self if instance is None else functools.partial(self, instance)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Expr]]:
        """The form of a call, and the tensors in it."""
        given: list[Expr] = []
        form: list[Any] = []
        static = self._places
        for k, each in enumerate(args):
            if k in static:
                form += (type(each), each)
            else:
                _flatten(each, form, given)
        if kwargs:
            for name in sorted(kwargs):
                form.append(name)
                if name in self._static:
                    form += (type(kwargs[name]), kwargs[name])
                else:
                    _flatten(kwargs[name], form, given)
        return tuple(form), given

    def _compiled(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Expr]) -> Compiled:
        """Trace and compile it for a signature."""
        tracing = Tracing()
        rest = iter([tracing.placeholder(expr) for expr in given])
        static = self._places
        inside = [each if k in static else _replaced(each, rest) for k, each in enumerate(args)]
        named = {name: kwargs[name] if name in self._static else None for name in kwargs}
        for name in sorted(kwargs):
            if name not in self._static:
                named[name] = _replaced(kwargs[name], rest)
        now.tracing = tracing
        try:
            result = self._function(*inside, **named)  # type: ignore[arg-type]
        finally:
            now.tracing = None
            tracing.active = False
        relatives = self._relatives.setdefault(_family(key), Relatives()) if self._dynamic else Relatives()
        compiled = Compiled(tracing, len(given), result, getattr(self, "__name__", "function"), relatives)
        self.traces += 1
        self.graphs += not compiled.shared
        if self.graphs == _MANY and not compiled.shared:
            name = getattr(self, "__qualname__", str(self._function))
            text = (
                f"{name} was compiled {_MANY} times: numbers that differ from call to call are better given as tensors"
            )
            warn_once(f"jit {id(self)}", text)
        kept = self._kept.setdefault(key, [])
        kept.insert(0, compiled)
        del kept[_KEPT:]
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return compiled

    def clear(self) -> None:
        """Forget what was compiled."""
        with self._lock:
            self._kept.clear()
            self._relatives.clear()


def _family(key: Any) -> Any:
    """A signature without the sizes of its tensors."""
    form, *rest = key
    return (*(len(x) if k >= 2 and form[k - 2] is _LEAF else x for k, x in enumerate(form)), *rest)


def _places(function: Callable[..., Any], static: Sequence[str]) -> frozenset[int]:
    """Where the static arguments stand when they are given without their names."""
    if not static:
        return frozenset()
    import inspect

    names = list(inspect.signature(function).parameters)
    unknown = [name for name in static if name not in names]
    if unknown:
        raise InvalidInput(f"static_argnames: the function has no argument {', '.join(unknown)}")
    return frozenset(names.index(name) for name in static)


def _flatten(x: Any, form: list[Any], given: list[Expr]) -> None:
    kind = type(x)
    if kind is Tensor:
        expr = x._expr
        given.append(expr)
        form += (_LEAF, expr.dtype, expr.shape, expr.device)
    elif isinstance(x, np.ndarray | np.generic):
        if isinstance(x, np.ndarray) and x.dtype.kind in "fiub" and x.dtype.isnative:
            expr = known(x, dtypes.of(x))  # what is only read need not be copied
        else:
            expr = Tensor(x)._expr
        given.append(expr)
        form += (_LEAF, expr.dtype, expr.shape, expr.device)
    elif isinstance(x, State):
        form += (kind, x)
    elif isinstance(x, dict):
        form += (kind, len(x))
        for key, each in x.items():
            form.append(key)
            _flatten(each, form, given)
    elif isinstance(x, list | tuple):
        form += (kind, len(x))
        for each in x:
            _flatten(each, form, given)
    elif isinstance(x, Tensor):
        _flatten(wrapped(x._expr), form, given)
    else:
        form += (kind, x)


def _replaced(x: Any, rest: Any) -> Any:
    """The same argument with placeholders, in the order in which ``_flatten`` meets the tensors."""
    if isinstance(x, State):
        return x
    if isinstance(x, Tensor | np.ndarray | np.generic):
        return wrapped(next(rest))
    if isinstance(x, dict):
        return type(x)((key, _replaced(each, rest)) for key, each in x.items())
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_replaced(each, rest) for each in x))
    if isinstance(x, list | tuple):
        return type(x)(_replaced(each, rest) for each in x)
    return x


_OF_TENSORS = True
