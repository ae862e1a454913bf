"""What a lazy tensor stands for: an operator and what it is applied to, or numbers that exist already.

An :class:`Expr` is lighter than a node of the graph on purpose. Nodes know their users, which would tie every
parameter to all that was ever computed from it; an expression knows only its operands, and goes when nobody needs it.
Nodes are made of expressions when a group is compiled, once for all groups of the same structure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, Protocol
from weakref import ref

import numpy as np

from ranvier.devices import Device
from ranvier.dtypes import DType

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
# an operand that is part of the operator: its position and its integers (a plain number for one without dimensions,
# None for one that is left out)
Fixed = tuple[int, "int | Shape | None"]
# operator (``domain::name`` where it is none of the standard's), attributes, fixed operands and how many results there
# are; equal ones do the same to operands of one type
Spec = tuple[str, tuple[tuple[str, Any], ...], tuple[Fixed, ...], int]
Place = tuple[CodeType, int]

INPUT = "input"  # what a jitted function is given: no numbers, while it is being traced
CALL = "call"  # a result of a compiled function, which can be written out where a gradient needs what is inside
CUSTOM = "custom"  # the first operand, with a gradient of its own making for the others
ITEM = "item"  # one of the results of the operand, which is an operator with several and no value of its own
RESIDENT = "resident"  # numbers that exist in the memory of a device and are brought when somebody looks
STOP = "stop_gradient"  # the operand itself, through which no gradient goes
HOSTED = "numpy."  # begins the names of functions that NumPy has computed already
HERE: Device | None = None  # the device of tensors that nobody put anywhere: this machine, by what costs least


class Trace:
    """One differentiation under way. While it is, realised expressions that it may ask for keep what made them.

    A parameter has one of its own, outside of all others and under way as long as it wants a gradient: ``variable`` is
    the expression that stands for a value of the parameter (``owner``), behind which nothing is derived.
    """

    __slots__ = ("active", "level", "owner", "variable")

    def __init__(self, level: int) -> None:
        self.level = level
        self.active = True
        self.variable: ref[Expr] | None = None
        self.owner: ref[Any] | None = None


class Expr:
    """A value: computed (``array``), to be computed (``spec`` and ``inputs``), or both while it may be derived."""

    __slots__ = (
        "__weakref__",
        "array",
        "depth",
        "device",
        "dtype",
        "inputs",
        "shape",
        "spec",
        "together",
        "trace",
        "where",
    )

    array: Array | None
    spec: Spec | None
    inputs: tuple[Expr, ...]
    dtype: DType
    shape: Shape
    depth: int  # operators on the longest way to something that is computed
    device: Device | None
    trace: Trace | None
    where: Place | None  # the user's line
    together: tuple[ref[Expr], ...]  # what shares most of its work with this one

    def release(self) -> None:
        """Forget how a computed value came about."""
        self.spec = None
        self.inputs = ()
        self.trace = None
        self.depth = 0
        self.together = ()


def spec(op: str, attrs: tuple[tuple[str, Any], ...] = (), fixed: tuple[Fixed, ...] = (), outputs: int = 1) -> Spec:
    return (op, attrs, fixed, outputs)


def is_variable(expr: Expr) -> bool:
    """Whether an expression stands for a parameter."""
    trace = expr.trace
    return trace is not None and trace.variable is not None and trace.variable() is expr


def known(array: Array, dtype: DType, device: Device | None = HERE) -> Expr:
    """An expression for numbers that exist."""
    made = Expr.__new__(Expr)
    made.array = array
    made.spec = None
    made.inputs = ()
    made.dtype = dtype
    made.shape = array.shape
    made.depth = 0
    made.device = device
    made.trace = None
    made.where = None
    made.together = ()
    return made


class Holder(Protocol):
    """Who has numbers in the memory of a device."""

    def fetch(self) -> Array: ...


def resident(holder: Holder, dtype: DType, shape: Shape, device: Device | None = HERE) -> Expr:
    """An expression for numbers that a holder brings when they are wanted here."""
    made = Expr.__new__(Expr)
    made.array = None
    made.spec = (RESIDENT, (("in", holder),), (), 1)
    made.inputs = ()
    made.dtype = dtype
    made.shape = shape
    made.depth = 0
    made.device = device
    made.trace = None
    made.where = None
    made.together = ()
    return made


def holder_of(expr: Expr) -> Holder | None:
    """Who has the numbers of an expression, where they are not here."""
    if expr.array is not None or expr.spec is None or expr.spec[0] != RESIDENT:
        return None
    found: Holder = expr.spec[1][0][1]
    return found


def fetch(expr: Expr) -> bool:
    """Bring the numbers of an expression where a holder has them; False for any other expression."""
    holder = holder_of(expr)
    if holder is None:
        return False
    array = holder.fetch()
    array.flags.writeable = False
    trace = expr.trace if is_variable(expr) else None
    expr.array = array
    expr.release()
    expr.trace = trace
    return True


def applied(of: Spec, inputs: tuple[Expr, ...], dtype: DType, shape: Shape, device: Device | None = HERE) -> Expr:
    """An expression for an operator applied to others. The hot path: every operation on tensors comes through here."""
    made = Expr.__new__(Expr)
    made.array = None
    made.spec = of
    made.inputs = inputs
    made.dtype = dtype
    made.shape = shape
    made.device = device
    made.together = ()
    depth = 0
    trace = None
    for operand in inputs:
        if operand.array is None and operand.depth > depth:
            depth = operand.depth
        theirs = operand.trace
        if theirs is not None:
            if theirs.active:
                if trace is None or theirs.level < trace.level:
                    trace = theirs
            elif operand.array is not None:
                operand.release()
    made.depth = depth + 1
    made.trace = trace
    frame = sys._getframe(1)
    while frame.f_globals.get("_OF_TENSORS"):  # modules of this package say so; the first that does not is the user's
        back = frame.f_back
        if back is None:
            break
        frame = back
    made.where = (frame.f_code, frame.f_lasti)
    return made


def results(
    of: Spec, inputs: tuple[Expr, ...], types: Sequence[tuple[DType, Shape]], device: Device | None
) -> list[Expr]:
    """Expressions for the results of an operator with several; they are computed together."""
    whole = applied(of, inputs, *types[0], device)
    made = [applied(spec(ITEM, (("index", k),)), (whole,), *each, device) for k, each in enumerate(types)]
    tie(made)
    return made


def tie(exprs: Sequence[Expr]) -> None:
    """Let expressions that share most of their work be computed together."""
    tied = tuple(ref(expr) for expr in exprs)
    for expr in exprs:
        expr.together = tied


def line_of(expr: Expr) -> str:
    """``file:line`` of the operation, for people."""
    if expr.where is None:
        return ""
    code, at = expr.where
    number = next((line for start, end, line in code.co_lines() if start <= at < end and line is not None), None)
    return f"{code.co_filename}:{number or code.co_firstlineno}"


def bytes_of(expr: Expr) -> int:
    count = 1
    for size in expr.shape:
        count *= size
    return expr.dtype.nbytes(count)


_OF_TENSORS = True
