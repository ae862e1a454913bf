"""Gradients of Python functions of tensors.

A function is run as it is: its values can be looked at, and branches and loops may depend on them. What it did to its
arguments is then derived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.tensor.core import IDENTITY, Tensor, as_tensor, wrapped
from ranvier.tensor.expr import STOP, Expr, Trace, applied, known, spec, tie
from ranvier.tensor.pullback import Pullback
from ranvier.tensor.trees import filled, leaves, mapped

_STOP = spec(STOP)


class _Level(threading.local):
    now = 0
    variables: tuple[Expr, ...] = ()  # of all derivations that are under way


_level = _Level()


def under_way() -> bool:
    """Whether a function is being derived in this thread."""
    return _level.now > 0


def variables_now() -> tuple[Expr, ...]:
    """The variables of all derivations that are under way in this thread."""
    return _level.variables


def stop_gradient(x: Any) -> Any:
    """The same values, taken as constants by whoever derives what is made of them; also for nested dicts and lists."""

    def stopped(each: Any) -> Tensor:
        own = as_tensor(each)
        made = applied(_STOP, (own._expr,), own.dtype, own.shape, own._expr.device)
        made.array = own._expr.array
        if made.array is not None and made.trace is None:
            made.release()
        return wrapped(made)

    return mapped(stopped, x)


def grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the gradient of one with a single number as its result.

    ``argnums`` says with respect to which arguments: each a tensor, or nested dicts and lists of them; gradients come
    in the same form. ``has_aux``: the function returns (number, anything), and so does the gradient.
    """
    both = value_and_grad(function, argnums, has_aux=has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return gradient


def value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the value of one, a single number, and its gradient; see ``grad``."""

    def both(*args: Any, **kwargs: Any) -> Any:
        chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        for k in chosen:
            if not -len(args) <= k < len(args):
                raise InvalidInput(f"there is no argument {k} to derive by: {len(args)} were given")
        chosen = tuple(k % len(args) for k in chosen)
        run = _Run([args[k] for k in chosen])
        try:
            given = list(args)
            for k, tree in zip(chosen, run.arguments):
                given[k] = tree
            result = function(*given, **kwargs)
            value, aux = _unpacked(result, has_aux)
            if value.shape:
                raise ShapeMismatch(f"the gradient of a single number is asked for, got shape {list(value.shape)}")
            pull = run.pullback([value])
            found = pull([_ones(value)])
            shared = [value, *leaves(found), *(x for x in leaves(aux) if isinstance(x, Tensor))]
            tie([x._expr for x in shared if x._expr.array is None])
        finally:
            run.end()
        grads = found[0] if isinstance(argnums, int) else tuple(found)
        return ((value, aux), grads) if has_aux else (value, grads)

    return both


def vjp(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """The function's result, and a function that takes a gradient of the result (in its form) back to gradients of
    the arguments."""
    run = _Run(primals)
    try:
        result = function(*run.arguments)
        targets = list(leaves(result))
        for each in targets:
            if not isinstance(each, Tensor):
                raise InvalidInput(f"a function of tensors returns tensors, not {type(each).__name__}")
        pull = run.pullback(targets)
    finally:
        run.end()

    def back(cotangent: Any) -> tuple[Any, ...]:
        seeds = list(leaves(cotangent))
        if len(seeds) != len(targets):
            raise InvalidInput(f"{len(targets)} results have as many gradients; {len(seeds)} were given")
        return tuple(pull([_seed(seed, target) for seed, target in zip(seeds, targets)]))

    return result, back


def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The function's result for these arguments, and how it changes when they change in the direction of the tangents
    (each in the form of its argument): the derivative forwards. What takes gradients back is linear in them, and its
    own way back is the way forwards."""
    if len(primals) != len(tangents):
        raise InvalidInput(f"{len(primals)} arguments have as many tangents; {len(tangents)} were given")
    result, back = vjp(function, *primals)
    zeros = mapped(lambda x: _zeros(x._expr), result)
    _, forth = vjp(lambda cotangent: back(cotangent), zeros)
    (tangent,) = forth(tuple(tangents))
    return result, tangent


class _Run:
    """One run of a function, with variables in place of its arguments."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._trace = Trace(_level.now)
        _level.now += 1
        self._variables: list[Expr] = []
        self._outer = _level.variables
        try:
            self.arguments = [mapped(self._variable, each) for each in arguments]
            _level.variables = (*self._outer, *self._variables)
        except BaseException:
            self.end()
            raise

    def _variable(self, given: Any) -> Tensor:
        if not isinstance(given, Tensor | float | np.ndarray | np.generic):
            raise InvalidInput(f"gradients are with respect to tensors, not {type(given).__name__}")
        own = as_tensor(given)
        if not own.dtype.is_float:
            raise DTypeMismatch(f"gradients are with respect to real floating-point numbers, not {own.dtype}")
        source = own._expr
        made = applied(IDENTITY, (source,), own.dtype, own.shape, source.device)
        made.array = source.array
        made.trace = made.trace or self._trace
        self._variables.append(made)
        return wrapped(made)

    def pullback(self, targets: Sequence[Tensor]) -> Callable[[list[Expr]], list[Any]]:
        """What takes gradients of the targets to gradients of the arguments. It holds all values it may need."""
        for target in targets:
            if not target.dtype.is_float:
                raise DTypeMismatch(f"only real floating-point results have a gradient, not {target.dtype}")
        variables = self._variables
        way = Pullback([t._expr for t in targets], variables)
        forms = self.arguments

        def pull(seeds: list[Expr]) -> list[Any]:
            device = variables[0].device if variables else None
            found = way.pull(seeds, device)
            made = [_zeros(v) if g is None else wrapped(g) for g, v in zip(found, variables)]
            rest = iter(made)
            return [filled(tree, [next(rest) for _ in leaves(tree)]) for tree in forms]

        return pull

    def end(self) -> None:
        self._trace.active = False
        _level.now = self._trace.level
        _level.variables = self._outer


def _unpacked(result: Any, has_aux: bool) -> tuple[Tensor, Any]:
    value, aux = result, None
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise InvalidInput("with has_aux a function returns two things: a number, and anything else")
        value, aux = result
    if not isinstance(value, Tensor):
        raise InvalidInput(f"the gradient of a tensor is asked for, not of {type(value).__name__}")
    return value, aux


def _ones(value: Tensor) -> Expr:
    return known(np.ones(value.shape, value.dtype.numpy), value.dtype, value._expr.device)


def _zeros(variable: Expr) -> Tensor:
    return wrapped(known(np.zeros(variable.shape, variable.dtype.numpy), variable.dtype, variable.device))


def _seed(given: Any, target: Tensor) -> Expr:
    own = as_tensor(given, target)
    if own.dtype is not target.dtype or own.shape != target.shape:
        raise ShapeMismatch(
            f"the gradient of {target.dtype}{list(target.shape)} has the same form, not {own.dtype}{list(own.shape)}"
        )
    return own._expr


_OF_TENSORS = True
