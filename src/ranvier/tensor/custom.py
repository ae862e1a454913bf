"""Functions that bring their own gradient: one that the user writes, or the same function computed again.

``checkpoint`` saves memory: what a function computes on the way to its results is not kept for the way back but
computed again there, from its arguments, once the gradient of the results has come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.errors import InvalidInput
from ranvier.tensor.autodiff import variables_now
from ranvier.tensor.backward import derives, write_out
from ranvier.tensor.core import Tensor, as_tensor, wrapped
from ranvier.tensor.expr import CUSTOM, INPUT, Expr, Trace, applied, fetch, is_variable, spec
from ranvier.tensor.pullback import Own, Pullback
from ranvier.tensor.stored import constant_behind
from ranvier.tensor.trees import filled, leaves, mapped

_AFTER = spec("ranvier::After")


class _Equal:
    """What differs from call to call is no part of the structure by which compiled groups are found."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equal)

    def __hash__(self) -> int:
        return 1


def custom_gradient(function: Callable[..., tuple[Any, Callable[[Any], Any]]]) -> Callable[..., Any]:
    """A function whose gradient is written by hand: it returns its result and a function ``back``.

    ``back`` is given the gradient of the result, in its form, and returns that of the argument; of several arguments a
    tuple, with None where there is none. Gradients are with respect to positional arguments only: what else the
    function uses counts as constant.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if not isinstance(found, tuple) or len(found) != 2 or not callable(found[1]):
            raise InvalidInput("a function with its own gradient returns two things: a result, and a function")
        result, back = found
        operands = [x._expr for x in leaves(args) if isinstance(x, Tensor)]
        return _attached(result, operands, _Written(back, args, result))

    return call


class _Written(_Equal):
    """A call of a function whose gradient was written by hand."""

    replayable = False

    def __init__(self, back: Callable[[Any], Any], args: tuple[Any, ...], result: Any) -> None:
        self._back, self._args, self._result = back, args, result
        self.types = [as_tensor(x)._expr for x in leaves(result)]

    def back(self, operands: Sequence[Expr], grads: list[Expr]) -> list[Expr | None]:
        found = self._back(filled(self._result, [wrapped(grad) for grad in grads]))
        parts = (found,) if len(self._args) == 1 else found
        if not isinstance(parts, tuple | list) or len(parts) != len(self._args):
            raise InvalidInput(f"{len(self._args)} arguments have as many gradients, and back returns all of them")
        made: list[Expr | None] = []
        for each, argument in zip(parts, self._args):
            _pair(each, argument, made)
        return made


def _pair(grad: Any, argument: Any, made: list[Expr | None]) -> None:
    """Gradients of the tensors in an argument, in the order of its leaves; None stands for as many as there are."""
    if isinstance(argument, Tensor):
        made.append(None if grad is None else as_tensor(grad, argument)._expr)
    elif isinstance(argument, dict):
        for key, each in argument.items():
            _pair(None if grad is None else grad.get(key), each, made)
    elif isinstance(argument, list | tuple):
        if grad is not None and len(grad) != len(argument):
            raise InvalidInput(f"the gradient of {len(argument)} things has as many parts, not {len(grad)}")
        for k, each in enumerate(argument):
            _pair(None if grad is None else grad[k], each, made)


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which computes again on the way back what it does not return: less memory, more work.

    Also for what it uses besides its arguments, such as the parameters of a module.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x._expr for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = function(*args, **kwargs)
        outputs = [x._expr for x in leaves(result) if isinstance(x, Tensor)]
        block = _Block(given, outputs)
        return _attached(result, block.operands, block)

    return call


class _Block(_Equal):
    """What a function computed between its arguments and its results, to be computed again."""

    replayable = True

    def __init__(self, given: Sequence[Expr], outputs: list[Expr]) -> None:
        self.types = outputs
        self._order: list[Expr] = []
        self._fixed: dict[Expr, Expr] = {}
        arguments = dict.fromkeys(given)
        outer = set(variables_now())
        captured: dict[Expr, None] = {}  # what it uses besides its arguments and a gradient may be wanted of
        seen: set[Expr] = set(arguments)
        pending = list(outputs)
        while pending:
            expr = pending[-1]
            if expr in seen:
                pending.pop()
                continue
            write_out(expr)
            stays = constant_behind(expr) is not None  # where it is
            if not stays:
                fetch(expr)
            if is_variable(expr) or expr in outer or (expr.spec is not None and expr.spec[0] == INPUT):
                captured[expr] = None
            elif stays or expr.spec is None or (expr.array is not None and not derives(expr)):
                self._fixed[expr] = expr
            else:
                missing = [x for x in expr.inputs if x not in seen]
                if missing:
                    pending += missing
                    continue
                self._order.append(expr)
            pending.pop()
            seen.add(expr)
        self._count = len(arguments)
        self.operands = [*arguments, *captured]

    def back(self, operands: Sequence[Expr], grads: list[Expr]) -> list[Expr | None]:
        trace = Trace(0)  # that of the arguments may be over, where somebody comes back late
        made = dict(self._fixed)
        fresh: list[Expr] = []
        for k, (old, new) in enumerate(zip(self.operands, operands)):
            if k < self._count:
                new = applied(_AFTER, (new, grads[0]), new.dtype, new.shape, new.device)
                new.trace = new.trace or trace
            made[old] = new
            fresh.append(new)
        for each in self._order:
            assert each.spec is not None
            inputs = tuple([made[x] for x in each.inputs])
            made[each] = applied(each.spec, inputs, each.dtype, each.shape, each.device)
        way = Pullback([made[x] for x in self.types], fresh)
        try:
            return way.pull(grads, self.types[0].device)
        finally:
            trace.active = False


def _attached(result: Any, operands: Sequence[Expr], own: Own) -> Any:
    """The result, behind which a gradient goes by another way."""
    count = 0

    def attach(x: Any) -> Any:
        nonlocal count
        if not isinstance(x, Tensor):
            return x
        expr = x._expr
        of = spec(CUSTOM, (("of", own), ("index", count)))
        made = applied(of, (expr, *operands), expr.dtype, expr.shape, expr.device)
        count += 1
        if made.trace is None:
            return x
        made.array = expr.array
        return wrapped(made)

    return mapped(attach, result)


_OF_TENSORS = True
