"""The way back from results to variables, past functions that bring their own gradient.

Such a function cuts the way: what lies behind its results is derived by itself, up to its results and to those of the
others; what it makes of their gradients goes on from its operands. The last one is asked first, so that everything that
depends on its results has been seen by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ranvier.devices import Device
from ranvier.errors import ShapeMismatch
from ranvier.tensor.backward import Path, Recipe, derives, recipes, write_out
from ranvier.tensor.expr import CUSTOM, STOP, Expr, applied, known, spec

_ADD = spec("Add")
_STOP = spec(STOP)


class Own(Protocol):
    """A call of a function that brings its gradient. All are equal: what they do when computed is the same, and
    compiled groups are found by structure."""

    replayable: bool  # whether it holds nothing of the call that it was made for
    types: list[Expr]  # results of the function, as they were made: for their types and shapes

    def back(self, operands: Sequence[Expr], grads: list[Expr]) -> list[Expr | None]:
        """Gradients of the operands from those of the results."""
        ...


class _Turn:
    """One call on the way: its results that were met, its operands, and the way on from them."""

    __slots__ = ("of", "operands", "path", "recipe", "results")

    def __init__(self, of: Own, operands: tuple[Expr, ...]) -> None:
        self.of = of
        self.operands = operands
        self.results: dict[int, Expr] = {}
        self.path: Path
        self.recipe: Recipe


class Pullback:
    """Takes gradients of targets back to variables. It holds all values it may need."""

    def __init__(self, targets: Sequence[Expr], variables: Sequence[Expr]) -> None:
        self._targets, self._variables = targets, variables
        self._turns = _turns(targets, variables)
        cuts = [each for turn in self._turns for each in turn.results.values()]
        self._stops = [*variables, *cuts]
        self._path = Path(targets, self._stops)
        self._recipe = recipes.of(self._path, targets, self._stops)
        for turn in self._turns:
            turn.path = Path(turn.operands, self._stops)
            turn.recipe = recipes.of(turn.path, turn.operands, self._stops)

    @property
    def order(self) -> list[Expr]:
        """All expressions on the way."""
        parts = [self._path, *(turn.path for turn in self._turns)]
        cuts = [each for turn in self._turns for each in turn.results.values()]
        return [*(expr for part in parts for expr in part.order), *cuts]

    def pull(self, seeds: Sequence[Expr], device: Device | None, traced: bool = True) -> list[Expr | None]:
        """Gradients of the variables; None where nothing depends on one. ``traced``: they can be derived themselves."""
        found: dict[Expr, Expr] = {}
        self._gather(found, self._recipe.follow(self._path, seeds, device, traced), device, traced)
        for turn in reversed(self._turns):
            grads = {k: found[expr] for k, expr in turn.results.items() if expr in found}
            if not grads:
                continue
            whole = [grads[k] if k in grads else _zeros(each) for k, each in enumerate(turn.of.types)]
            made = turn.of.back(turn.operands, whole)
            onward = [_checked(grad, x, traced) for grad, x in zip(made, turn.operands)]
            self._gather(found, turn.recipe.follow(turn.path, onward, device, traced), device, traced)
        return [found.get(variable) for variable in self._variables]

    def _gather(
        self, found: dict[Expr, Expr], grads: Sequence[Expr | None], device: Device | None, traced: bool
    ) -> None:
        for expr, grad in zip(self._stops, grads):
            if grad is None:
                continue
            before = found.get(expr)
            if before is not None:
                grad = applied(_ADD, (before, grad), grad.dtype, grad.shape, device)
                if not traced:
                    grad.trace = None
            found[expr] = grad


def _turns(targets: Sequence[Expr], variables: Sequence[Expr]) -> list[_Turn]:
    """Calls of functions with their own gradient between targets and variables, operands first."""
    stops = set(variables)
    turns: dict[tuple[int, tuple[Expr, ...]], _Turn] = {}  # a call may have been written out more than once
    done: set[Expr] = set()
    pending = list(targets)
    while pending:
        expr = pending[-1]
        write_out(expr)
        if expr in done or expr in stops or not derives(expr):
            done.add(pending.pop())
            continue
        assert expr.spec is not None
        own = expr.spec[0] == CUSTOM
        behind = expr.inputs[1:] if own else expr.inputs
        missing = [x for x in behind if x not in done]
        if missing:
            pending += missing
            continue
        pending.pop()
        done.add(expr)
        if own:
            of, k = expr.spec[1][0][1], expr.spec[1][1][1]
            turns.setdefault((id(of), behind), _Turn(of, behind)).results[k] = expr
    return list(turns.values())


def _zeros(like: Expr) -> Expr:
    return known(np.zeros(like.shape, like.dtype.numpy), like.dtype, like.device)


def _checked(grad: Expr | None, operand: Expr, traced: bool) -> Expr:
    if grad is None:
        return _zeros(operand)
    if grad.shape != operand.shape or grad.dtype is not operand.dtype:
        form = f"{operand.dtype}{list(operand.shape)}"
        raise ShapeMismatch(f"a gradient of {form} has the same form, not {grad.dtype}{list(grad.shape)}")
    if traced or grad.trace is None:
        return grad
    made = applied(_STOP, (grad,), grad.dtype, grad.shape, grad.device)
    made.array, made.trace = grad.array, None
    return made


_OF_TENSORS = True
