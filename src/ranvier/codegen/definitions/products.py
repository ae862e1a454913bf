"""Products as lowerings ask for them; every device makes them in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ranvier.graph.ir import Value
from ranvier.records import dataclass

if TYPE_CHECKING:
    from ranvier.codegen.definitions.program import Definitions


@dataclass(frozen=True)
class Window:
    """How a convolution moves over an image; numbers per spatial axis, ``pads`` all begins and then all ends.

    A transposed convolution's filters are [in, out / group, …], and its ``pads`` are what is cut off the result.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    group: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


class Products(Protocol):
    """A device's products. ``out``, where given, is defined as the result and has the operands' element type; a result
    without may have more bits than that."""

    def matmul(
        self, b: Definitions, x: Value, y: Value, shape: Sequence[int], out: Value | None = None, alpha: float = 1.0
    ) -> Value:
        """``alpha`` times x [..., M, K] times y [..., K, N]: floats of one type, batches broadcast to ``shape``."""

    def convolve(
        self, b: Definitions, x: Value, w: Value, shape: Sequence[int], window: Window, out: Value | None = None
    ) -> Value:
        """[N, C, …] with filters [out, in / group, …], as large as ``shape`` says."""


def folded_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of all axes taken as one (row-major), or None where they do not lie like that."""
    step: int | None = None
    span = 1
    for d, s in zip(reversed(shape), reversed(strides)):
        if d == 1:
            continue
        if step is None:
            step, span = s, d
        elif s != step * span:
            return None
        else:
            span *= d
    return 0 if step is None else step
