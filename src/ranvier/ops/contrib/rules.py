"""What the com.microsoft operators share, above all type rules: the standard's own inference does not know them.

A rule works on dimensions that may be symbolic or unknown; arithmetic on one of those gives an unknown dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.types import Dim, Shape, TensorType, Type
from ranvier.ops.nn.window import output_sizes, resolve_pads
from ranvier.ops.registry import Array, TypeCall

MICROSOFT = "com.microsoft"

Rule = Callable[[TypeCall], Sequence[Type | None]]


def rounded(y: Array, dtype: np.dtype[Any]) -> Array:
    """A result computed wide, in the type it is due in."""
    return y.astype(dtype, copy=False)


def tensor(call: TypeCall, position: int) -> TensorType:
    """The type of a tensor operand; nothing known where there is no such operand."""
    kind = call.type(position)
    return kind if isinstance(kind, TensorType) else TensorType(None, None)


def same_as(position: int = 0) -> Rule:
    """The rule of an operator with one output, of the type of one operand."""

    def rule(call: TypeCall) -> Sequence[Type | None]:
        return [call.type(position)]

    return rule


def typed_as(position: int, shape_of: int) -> Rule:
    """The rule of an operator with one output: the element type of one operand, the shape of another."""

    def rule(call: TypeCall) -> Sequence[Type | None]:
        return [TensorType(tensor(call, position).dtype, tensor(call, shape_of).shape)]

    return rule


def broadcasting(*positions: int, dtype: DType | None = None) -> Rule:
    """The rule of an operator whose output is the broadcast of some operands, typed as the first of them."""

    def rule(call: TypeCall) -> Sequence[Type | None]:
        kind = dtype if dtype is not None else tensor(call, positions[0]).dtype
        return [TensorType(kind, broadcast(*(tensor(call, p).shape for p in positions)))]

    return rule


def plus(a: Dim, b: Dim) -> Dim:
    if a == 0:
        return b
    if b == 0:
        return a
    return a + b if isinstance(a, int) and isinstance(b, int) else None


def times(a: Dim, b: Dim) -> Dim:
    if a == 1:
        return b
    if b == 1:
        return a
    return a * b if isinstance(a, int) and isinstance(b, int) else None


def divided(a: Dim, by: int) -> Dim:
    return a if by == 1 else a // by if isinstance(a, int) and by else None


def at(shape: Shape | None, axis: int) -> Dim:
    """One dimension of a shape that may be unknown or too short."""
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None


def broadcast(*shapes: Shape | None) -> Shape | None:
    """The broadcast of shapes; None where a rank is unknown."""
    known: list[Shape] = []
    for shape in shapes:
        if shape is None:
            return None
        known.append(shape)
    rank = max(map(len, known), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        sizes = [s[axis] for s in known if len(s) >= -axis]
        wide = [d for d in sizes if d != 1]
        numbers = [d for d in wide if isinstance(d, int)]
        result.append(numbers[0] if numbers else 1 if not wide else wide[0] if len(set(wide)) == 1 else None)
    return tuple(result)


def matmul_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of a NumPy matrix product."""
    if a is None or b is None or not a or not b:
        return None
    lead = broadcast(a[:-2], b[:-2]) or ()
    return (*lead, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def window_shape(
    call: TypeCall, x: Shape | None, kernel: Shape | None, channels: Dim, *, last: bool = False
) -> Shape | None:
    """The result of a convolution or pool over ``x``, from the node's strides, dilations and padding attributes."""
    if x is None or kernel is None or len(kernel) != len(x) - 2:
        return None
    spatial = x[1:-1] if last else x[2:]
    counts: tuple[Dim, ...] = tuple(_window_count(call, k, d, size) for k, (d, size) in enumerate(zip(spatial, kernel)))
    return (x[0], *counts, channels) if last else (x[0], channels, *counts)


def _window_count(call: TypeCall, axis: int, size: Dim, kernel: Dim) -> Dim:
    if not isinstance(size, int) or not isinstance(kernel, int):
        return None
    stride, dilation = ((_entry(call, name, axis) or 1,) for name in ("strides", "dilations"))
    pads = call.attr("pads") or ()
    around = (pads[axis], pads[axis + len(pads) // 2]) if pads else None
    try:
        edges = resolve_pads(call.attr("auto_pad", "NOTSET"), around, (size,), (kernel,), stride, dilation)
        ceil_mode = bool(call.attr("ceil_mode", 0))
        return output_sizes((size,), (kernel,), stride, dilation, edges, ceil_mode=ceil_mode)[0]
    except RanvierError:  # the run itself reports it, with the real operands
        return None


def _entry(call: TypeCall, name: str, axis: int) -> Any:
    values = call.attr(name)
    return values[axis] if values else None
