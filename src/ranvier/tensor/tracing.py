"""What a thread is doing with tensors at the moment: computing them, or tracing a function that will be compiled."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from ranvier.tensor.expr import INPUT, Expr, applied, spec

if TYPE_CHECKING:
    from ranvier.tensor.core import Tensor
    from ranvier.tensor.state import Parameter, State


class Tracing:
    """One run of a function on placeholders, and what it does to states meanwhile.

    A state that is read becomes an input, and what it is assigned a result; nothing outside changes. ``guards`` are
    values of Python that the function has seen and that may differ the next time.
    """

    def __init__(self) -> None:
        self.active = True
        self.inputs: list[Expr] = []
        self.read_states: dict[State, Expr] = {}  # in the order of reading, with the placeholders
        self.read_grads: dict[Parameter, Expr] = {}
        self.states: dict[State, Expr] = {}  # those assigned, with their last values
        self.grads: dict[Parameter, Tensor | None] = {}
        self.guards: dict[tuple[Any, str], Any] = {}

    def placeholder(self, like: Expr) -> Expr:
        """What stands for numbers of this type and shape that come later."""
        of = spec(INPUT, (("tracing", self), ("index", len(self.inputs))))
        made = applied(of, (), like.dtype, like.shape, like.device)
        self.inputs.append(made)
        return made

    def met(self, holder: Any, name: str, value: Any) -> None:
        self.guards.setdefault((holder, name), value)

    def read(self, state: State) -> Expr:
        found = self.states.get(state)
        if found is None:
            found = self.read_states.get(state)
        if found is None:
            found = self.read_states[state] = state.marked(self.placeholder(state._held), self)
        return found

    def write(self, state: State, value: Expr) -> None:
        self.states[state] = value

    def read_grad(self, parameter: Parameter) -> Tensor | None:
        from ranvier.tensor.core import wrapped

        if parameter in self.grads:
            return self.grads[parameter]
        found = parameter._grad
        self.met(parameter, "_has_grad", found is not None)
        if found is None:
            return None
        if parameter not in self.read_grads:
            self.read_grads[parameter] = self.placeholder(found._expr)
        return wrapped(self.read_grads[parameter])

    def write_grad(self, parameter: Parameter, grad: Tensor | None) -> None:
        self.grads[parameter] = grad


class _Now(threading.local):
    tracing: Tracing | None = None  # the function being traced, the outermost where several are inside each other
    recording: bool = True  # whether operations on parameters remember what a gradient needs


now = _Now()


class no_grad:
    """Inside of it, what is computed from parameters remembers nothing for gradients: ``with rv.no_grad():``."""

    def __enter__(self) -> None:
        self._before = now.recording
        now.recording = False

    def __exit__(self, *_: Any) -> None:
        now.recording = self._before


def user_frame() -> FrameType:
    """The innermost call that is not the library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "ranvier":
        frame = frame.f_back
    return frame


def user_line() -> str:
    """``file:line`` of the innermost call that is not the library's."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_OF_TENSORS = True
