"""Numbers that can be read again: they are in memory only while somebody needs them as they are.

The codes of a layer become something else, in the order that the processor reads them in, when a function is compiled.
From then on nobody looks at them, and where they come from a file they need not stay.
"""

from __future__ import annotations

from ranvier.devices import Device
from ranvier.graph.tensors import ConstTensor
from ranvier.tensor.expr import HERE, Array, Expr, holder_of, resident


class _Holder:
    __slots__ = ("constant",)

    def __init__(self, constant: ConstTensor) -> None:
        self.constant = constant

    def fetch(self) -> Array:
        return self.constant.numpy()


def stored(constant: ConstTensor, device: Device | None = HERE) -> Expr:
    """An expression for such numbers."""
    return resident(_Holder(constant), constant.dtype, constant.shape, device)


def constant_behind(expr: Expr) -> ConstTensor | None:
    """What they are read from; None for any other expression."""
    holder = holder_of(expr)
    return holder.constant if isinstance(holder, _Holder) else None


def constant_of(expr: Expr) -> ConstTensor:
    """A constant of a graph for numbers that exist."""
    found = constant_behind(expr)
    if found is not None:
        return found
    assert expr.array is not None
    return ConstTensor.of(expr.array)


_OF_TENSORS = True
