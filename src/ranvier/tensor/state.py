"""Tensors that keep their identity while their value is replaced: parameters, optimizer states, caches, keys.

A :class:`Tensor` is a value; a :class:`State` is a place that holds one. Whoever computes with a state gets the value
it has then. A jitted function takes the states it reads as further inputs and gives back those it assigns.

A :class:`Parameter` is a state that gradients are wanted of. What is computed from it remembers how, until
``backward`` has been called on the result or nobody holds it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.graph.tensors import ConstTensor
from ranvier.runtime.outputs import writable
from ranvier.tensor.autodiff import under_way
from ranvier.tensor.backward import variables_behind
from ranvier.tensor.core import Tensor, as_tensor, device_of, wrapped
from ranvier.tensor.expr import STOP, Array, Expr, Trace, applied, known, spec, tie
from ranvier.tensor.pullback import Pullback
from ranvier.tensor.stored import constant_behind, stored
from ranvier.tensor.tracing import Tracing, now

_STOP = spec(STOP)
_OUTERMOST = -1  # the level of what parameters remember: no derivation that is under way ends later
T = TypeVar("T")


class Setting(Generic[T]):
    """A value of Python that a jitted function may read and that may change between its calls, such as whether a
    layer is being trained: the function is traced again for each value it meets."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    @property
    def value(self) -> T:
        if now.tracing is not None:
            now.tracing.met(self, "_value", self._value)
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._value = value


class State(Tensor):
    """A tensor whose value can be replaced by another of the same type and shape."""

    __slots__ = ("_held", "_home", "_spare", "name")
    __hash__ = object.__hash__  # type: ignore[assignment]  # a place is known by itself, whatever it holds

    _held: Expr
    _home: Any  # memory on a device, where a compiled function has put the value
    _spare: Array | None  # memory of an earlier value, for the next one
    name: str

    def __init__(self, data: Any, dtype: Any = None, device: Any = None, name: str = "") -> None:
        self._spare = self._home = None
        self.name = name
        self._held = self.cut(Tensor(data, dtype, device)._expr)

    @property
    def _expr(self) -> Expr:
        tracing = now.tracing
        return self._held if tracing is None else self._traced(tracing)

    @_expr.setter
    def _expr(self, expr: Expr) -> None:
        self._replace(expr)

    def _traced(self, tracing: Tracing) -> Expr:
        """What stands for it in the function being traced."""
        return tracing.read(self)

    @property
    def value(self) -> Tensor:
        """Its value as it is now, which stays when the state gets another."""
        return wrapped(self._expr)

    def assign(self, value: Any) -> None:
        """Hold another value from now on. No gradient goes through an assignment."""
        own = as_tensor(value, self)
        if own.dtype is not self.dtype:
            raise DTypeMismatch(f"{self._named()} holds {self.dtype}, not {own.dtype}")
        if own.shape != self.shape:
            raise ShapeMismatch(f"{self._named()} holds the shape {list(self.shape)}, not {list(own.shape)}")
        self._replace(own._expr)

    def _named(self) -> str:
        return f"{type(self).__name__.lower()} {self.name!r}" if self.name else f"a {type(self).__name__.lower()}"

    def _replace(self, expr: Expr) -> None:
        tracing = now.tracing
        if tracing is None:
            self._held = self.cut(expr)
        else:
            tracing.write(self, self.cut(expr))

    def cut(self, expr: Expr) -> Expr:
        """An expression of the same value that does not know how it came about."""
        if expr.array is not None:
            return known(expr.array, expr.dtype, expr.device)
        made = applied(_STOP, (expr,), expr.dtype, expr.shape, expr.device)
        made.trace = None
        return made

    def marked(self, expr: Expr, tracing: Tracing | None = None) -> Expr:
        """Let an expression stand for this state."""
        return expr

    # -- memory: a compiled function writes new values over old ones that nobody looks at ------------------------------

    def take_memory(self, keep: bool) -> Array:
        """Memory for the next value. ``keep``: the present one is still needed meanwhile."""
        if not keep:
            found = _alone(self._held)
            if found is not None:
                self._spare = None
                return found
        found, self._spare = self._spare, None
        return np.empty(self.shape, self.dtype.numpy) if found is None else found

    def put(self, array: Array) -> None:
        """Hold this value from now on; the memory of the one before is kept for the next."""
        if self._held.array is array:
            return
        free = _alone(self._held)
        if free is None:
            self._held = self.marked(known(array, self._held.dtype, self._held.device))
        else:  # nobody else can see that the expression stands for another value now
            self._spare, self._held.array = free, array

    # what a state is: a description of it must not count as reading its value
    @property
    def dtype(self) -> Any:
        return self._held.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._held.shape

    @property
    def ndim(self) -> int:
        return len(self._held.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._again(self.numpy())

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return type(self)(*self._again(self.value))

    def _again(self, value: Any) -> tuple[Any, ...]:
        """What to make another one of."""
        return value, None, None, self.name


class Constant(State):
    """A state that hardly ever gets another value, such as the weights of a layer in few bits. Functions are compiled
    for the value it has: it is part of them, in the order that the processor reads it in, and no input. Another value
    has them compiled again."""

    __slots__ = ("_inside",)

    _inside: ref[Expr] | None  # of numbers that are read again: what stands for it in functions that are compiled

    def __init__(self, data: Any, dtype: Any = None, device: Any = None, name: str = "") -> None:
        self._inside = None
        super().__init__(data, dtype, device, name)

    @classmethod
    def of(cls, constant: ConstTensor, name: str = "") -> Constant:
        """One of numbers that are read again where they are not in memory."""
        made = cls.__new__(cls)
        made._spare = made._home = made._inside = None
        made.name = name
        made._held = stored(constant)
        return made

    @property
    def _expr(self) -> Expr:
        """Outside of functions that are compiled a new one for each who asks: numbers go with whoever wanted them."""
        tracing = now.tracing
        if tracing is not None:
            return self._traced(tracing)
        constant = constant_behind(self._held)
        return self._held if constant is None else stored(constant, self._held.device)

    @_expr.setter
    def _expr(self, expr: Expr) -> None:
        self._replace(expr)

    def put_on(self, device: Any) -> None:
        """Have its numbers on a device."""
        constant, place = constant_behind(self._held), device_of(device)
        if place != self._held.device:  # otherwise functions of it would be compiled again
            self._replace(self.value.to_device(device)._expr if constant is None else stored(constant, place))

    def cut(self, expr: Expr) -> Expr:
        constant = constant_behind(expr)
        return super().cut(expr) if constant is None else stored(constant, expr.device)

    def _traced(self, tracing: Tracing) -> Expr:
        """The same in all functions, by which they are known to do the same; where its numbers are wanted meanwhile, as
        a gradient outside of ``jit`` does, they stay with functions that have been traced, and go with them."""
        tracing.met(self, "_held", self._held)
        constant = constant_behind(self._held)
        if constant is None:
            return self._held
        inside = None if self._inside is None else self._inside()
        if inside is None or constant_behind(inside) is not constant or inside.device != self._held.device:
            inside = stored(constant, self._held.device)
            self._inside = ref(inside)
        return inside

    def _replace(self, expr: Expr) -> None:
        if now.tracing is not None:
            raise InvalidInput(f"{self._named()} is part of the function that assigns it")
        super()._replace(expr)


class Parameter(State):
    """A state that is learned: ``backward`` adds to its gradient, ``grad``."""

    __slots__ = ("_grad", "_grad_home", "_spare_grad", "_wanted")

    _grad: Tensor | None
    _grad_home: Any
    _spare_grad: Array | None
    _wanted: bool

    def __init__(
        self, data: Any, dtype: Any = None, device: Any = None, name: str = "", requires_grad: bool = True
    ) -> None:
        self._wanted = requires_grad
        self._grad = self._spare_grad = self._grad_home = None
        super().__init__(data, dtype, device, name)
        if not self.dtype.is_float:
            raise DTypeMismatch(f"what is learned are real floating-point numbers, not {self.dtype}")

    @property
    def requires_grad(self) -> bool:
        if now.tracing is not None:
            now.tracing.met(self, "_wanted", self._wanted)
        return self._wanted

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if now.tracing is not None:
            raise InvalidInput(f"{self._named()} cannot be frozen or released inside of a jitted function")
        if wanted != self._wanted:
            self._wanted = wanted
            self._held = self.cut(self._held)

    @property
    def grad(self) -> Tensor | None:
        """The sum of the gradients since it was None."""
        tracing = now.tracing
        return self._grad if tracing is None else tracing.read_grad(self)

    @grad.setter
    def grad(self, grad: Any) -> None:
        found = None if grad is None else as_tensor(grad, self)
        if found is not None and (found.dtype is not self.dtype or found.shape != self.shape):
            form = f"{found.dtype}{list(found.shape)}"
            raise ShapeMismatch(f"the gradient of {self.dtype}{list(self.shape)} has the same form, not {form}")
        tracing = now.tracing
        if tracing is None:
            self._grad = found
        else:
            tracing.write_grad(self, found)

    @property
    def _expr(self) -> Expr:
        tracing = now.tracing
        found = self._held if tracing is None else tracing.read(self)
        return found if now.recording or found.trace is None else super().cut(found)

    @_expr.setter
    def _expr(self, expr: Expr) -> None:
        self._replace(expr)

    def cut(self, expr: Expr) -> Expr:
        return self.marked(super().cut(expr))

    @property
    def _has_grad(self) -> bool:
        return self._grad is not None

    def marked(self, expr: Expr, tracing: Tracing | None = None) -> Expr:
        """Let an expression stand for the parameter, where its gradient is wanted."""
        if tracing is not None:
            tracing.met(self, "_wanted", self._wanted)
        if self._wanted:
            trace = expr.trace = Trace(_OUTERMOST)
            trace.variable, trace.owner = ref(expr), ref(self)
        return expr

    def take_grad_memory(self, keep: bool) -> Array:
        """As ``take_memory``, for the gradient; a tensor that somebody got is theirs."""
        if not keep and self._grad is not None and getrefcount(self._grad) <= 2:
            found = _alone(self._grad._expr)
            if found is not None:
                self._spare_grad = None
                return found
        found, self._spare_grad = self._spare_grad, None
        return np.empty(self.shape, self.dtype.numpy) if found is None else found

    def put_grad(self, array: Array) -> None:
        if self._grad is not None and self._grad._expr.array is not array and getrefcount(self._grad) <= 2:
            free = _alone(self._grad._expr)
            self._spare_grad = self._spare_grad if free is None else free
        self._grad = wrapped(known(array, self._held.dtype, self._held.device))

    def _again(self, value: Any) -> tuple[Any, ...]:
        return *super()._again(value), self._wanted


def _alone(expr: Expr) -> Array | None:
    """The memory of a value that nobody but its holder looks at, ready to be written to."""
    array = expr.array
    # of an expression: the holder's, the parameter's and that of the call; of an array one more, the name just given
    if array is None or getrefcount(expr) > 3 or getrefcount(array) > 3 or not array.flags.c_contiguous:
        return None
    found = writable(array)
    if found is not None:
        expr.array = found
    return found


def backward(target: Tensor, gradient: Any = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Add the gradients of a tensor to ``grad`` of the parameters it was computed from.

    What was remembered for it is forgotten unless ``retain_graph`` says otherwise. ``create_graph``: the gradients
    can be derived themselves.
    """
    if not target.dtype.is_float:
        raise DTypeMismatch(f"only real floating-point numbers have a gradient, not {target.dtype}")
    expr = target._expr
    if gradient is None:
        if target.shape:
            raise ShapeMismatch(f"a tensor of shape {list(target.shape)} is given its own gradient to backward")
        seed = known(np.ones((), target.dtype.numpy), target.dtype, expr.device)
    else:
        given = as_tensor(gradient, target)
        if given.shape != target.shape or given.dtype is not target.dtype:
            form = f"{given.dtype}{list(given.shape)}"
            raise ShapeMismatch(f"the gradient of {target.dtype}{list(target.shape)} has the same form, not {form}")
        seed = given._expr
    variables = variables_behind([expr])
    if not variables:
        raise InvalidInput(
            "nothing behind this tensor wants a gradient: it was not computed from parameters, or backward has been "
            "called already (see retain_graph)"
        )
    way = Pullback([expr], variables)
    found = way.pull([seed], expr.device, create_graph)
    if not retain_graph and not create_graph:
        _forget(way.order)
    made: list[Expr] = []
    for variable, each in zip(variables, found):
        assert variable.trace is not None and variable.trace.owner is not None
        parameter: Parameter | None = variable.trace.owner()
        if parameter is not None and each is not None:
            grad, before = wrapped(each), parameter.grad
            parameter.grad = grad if before is None else before + grad
            made.append(as_tensor(parameter.grad)._expr)
    tie([x for x in (expr, *made) if x.array is None])


def _forget(order: Sequence[Expr]) -> None:
    """Let go of what was remembered only for parameters, now or as soon as it is computed."""
    for expr in order:
        trace = expr.trace
        if trace is not None and trace.level == _OUTERMOST and not under_way():
            expr.trace = None
            if expr.array is not None:
                expr.release()


_OF_TENSORS = True
